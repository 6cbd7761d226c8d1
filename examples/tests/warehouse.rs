//! Tests the warehouse: right, wrong, malformed and hostile episodes.
#![allow(clippy::unwrap_used)] // Also in what the tests share, which the lint does not know for tests.

use gym_core::{CallContext, Code, ModelResponse, RawObject, ResourcesServer, Result, SessionId, Verdict};
use gym_examples::warehouse::{Task, Warehouse};
use serde_json::{Value, json};

struct Episode<'a> {
    server: &'a Warehouse,
    session: SessionId,
}

impl Episode<'_> {
    async fn call(&self, tool: &str, arguments: Value) -> Result<(u16, Value)> {
        let arguments = RawObject::from_value(&arguments).unwrap();
        let reply = self.server.call_tool(&CallContext::default(), &self.session, tool, &arguments).await?;
        Ok((reply.status.0, serde_json::from_slice(&reply.message.head.to_bytes()).unwrap()))
    }

    async fn verify(&self, target: Value) -> Result<Verdict> {
        let task: Task = serde_json::from_value(json!({"target_stock": target})).unwrap();
        let said = ModelResponse(RawObject::parse(r#"{"output":[]}"#).unwrap());
        self.server.verify(&CallContext::default(), &self.session, task, &said).await
    }
}

async fn seed<'a>(server: &'a Warehouse, session: &str, stock: Value) -> Result<Episode<'a>> {
    let session = SessionId::new(session);
    let row = RawObject::from_value(&json!({"initial_stock": stock})).unwrap();
    server.seed_session(&CallContext::default(), &session, &row).await?;
    Ok(Episode { server, session })
}

fn stock() -> Value {
    json!({"A": {"bolts": 12, "nuts": 3}, "B": {}})
}

#[tokio::test]
async fn an_order_carried_out_step_by_step_is_rewarded() {
    let server = Warehouse::default();
    let episode = seed(&server, "s", stock()).await.unwrap();
    assert_eq!(episode.call("list_stock", json!({})).await.unwrap(), (200, json!({"stock": stock()})));
    let ok = (200, json!({"ok": true}));
    let step = json!({"item": "bolts", "quantity": 5, "from_bay": "A", "to_bay": "B"});
    assert_eq!(episode.call("move_stock", step).await.unwrap(), ok);
    let step = json!({"item": "nuts", "quantity": "3", "from_bay": "A"});
    assert_eq!(episode.call("ship_stock", step).await.unwrap(), ok);
    let step = json!({"item": "gears", "quantity": 2.0, "to_bay": "B"});
    assert_eq!(episode.call("receive_stock", step).await.unwrap(), ok);

    let verdict = episode.verify(json!({"A": {"bolts": 7}, "B": {"bolts": 5, "gears": 2}})).await.unwrap();
    assert_eq!((verdict.reward, &verdict.fields[1]), (1.0, &("changes", json!(3))));
    // Requests the score again, like a caller whose connection broke.
    assert_eq!(episode.verify(json!({"A": {"bolts": 7}, "B": {"bolts": 5, "gears": 2}})).await.unwrap().reward, 1.0);
}

#[tokio::test]
async fn doing_nothing_or_something_else_gets_nothing() {
    let server = Warehouse::default();
    let idle = seed(&server, "idle", stock()).await.unwrap();
    assert_eq!(idle.verify(json!({"A": {"bolts": 12}, "B": {"nuts": 3}})).await.unwrap().reward, 0.0);

    let wrong = seed(&server, "wrong", stock()).await.unwrap();
    let step = json!({"item": "nuts", "quantity": 2, "from_bay": "A", "to_bay": "B"});
    wrong.call("move_stock", step).await.unwrap();
    let verdict = wrong.verify(json!({"A": {"bolts": 12}, "B": {"nuts": 3}})).await.unwrap();
    assert_eq!(
        (verdict.reward, &verdict.fields[0].1),
        (0.0, &json!({"A": {"bolts": 12, "nuts": 1}, "B": {"nuts": 2}}))
    );
}

#[tokio::test]
async fn a_refused_step_says_why_and_changes_nothing() {
    let server = Warehouse::default();
    let episode = seed(&server, "s", stock()).await.unwrap();
    let huge = "x".repeat(1 << 20);
    for (tool, arguments, why) in [
        ("ship_stock", json!({"item": "bolts", "quantity": 13, "from_bay": "A"}), "bay A has 12 bolts, not 13"),
        ("ship_stock", json!({"item": "bolts", "quantity": 1, "from_bay": "B"}), "bay B has 0 bolts, not 1"),
        ("ship_stock", json!({"item": "bolts", "quantity": 0, "from_bay": "A"}), "from 1 to 1000000, not 0"),
        ("ship_stock", json!({"item": "bolts", "quantity": -5, "from_bay": "A"}), "from 1 to 1000000, not -5"),
        ("receive_stock", json!({"item": "a", "quantity": u64::MAX, "to_bay": "A"}), "from 1 to 1000000"),
        ("receive_stock", json!({"item": "bolts", "quantity": 999_999, "to_bay": "A"}), "bay A is full"),
        ("receive_stock", json!({"item": "", "quantity": 1, "to_bay": "A"}), "an item's name"),
        ("receive_stock", json!({"item": huge, "quantity": 1, "to_bay": "A"}), "an item's name"),
        ("receive_stock", json!({"item": "a", "quantity": 1, "to_bay": huge}), "the bays are A, B"),
        ("move_stock", json!({"item": "nuts", "quantity": 1, "from_bay": "A", "to_bay": "C"}), "there is no bay `C`"),
        ("move_stock", json!({"item": "nuts", "quantity": 1, "from_bay": "A", "to_bay": "A"}), "bay A is both"),
        (
            "move_stock",
            json!({"item": "nuts", "quantity": 4, "from_bay": "A", "to_bay": "B"}),
            "bay A has 3 nuts, not 4",
        ),
    ] {
        let (status, reply) = episode.call(tool, arguments).await.unwrap();
        let error = reply["error"].as_str().unwrap();
        assert!(status == 200 && error.contains(why) && error.len() < 200, "{tool}: {error}");
    }
    for (tool, arguments, problems) in [
        ("move_stock", json!({}), 4),
        ("ship_stock", json!({"item": 5, "quantity": "many", "from_bay": null}), 3),
        ("receive_stock", json!({"item": ["bolts"], "quantity": 1.5, "to_bay": "A"}), 2),
    ] {
        let (status, reply) = episode.call(tool, arguments).await.unwrap();
        assert_eq!((status, reply["detail"].as_array().map(Vec::len)), (422, Some(problems)), "{reply}");
    }
    assert_eq!(episode.call("burn_stock", json!({})).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(episode.call("list_stock", json!({})).await.unwrap().1, json!({"stock": stock()}));
    assert_eq!(episode.verify(stock()).await.unwrap().reward, 1.0);
}

#[tokio::test]
async fn a_bay_cannot_be_filled_with_kinds_without_end_and_a_move_into_a_full_bay_is_undone() {
    let server = Warehouse::default();
    let episode = seed(&server, "s", stock()).await.unwrap();
    let mut refused = 0;
    for number in 0..200 {
        let arguments = json!({"item": format!("kind {number}"), "quantity": 1, "to_bay": "B"});
        let (_, reply) = episode.call("receive_stock", arguments).await.unwrap();
        refused += u32::from(reply["ok"] == false);
    }
    assert_eq!(refused, 136);
    let before = episode.call("list_stock", json!({})).await.unwrap();
    let step = json!({"item": "nuts", "quantity": 3, "from_bay": "A", "to_bay": "B"});
    assert_eq!(episode.call("move_stock", step).await.unwrap().1["error"], "bay B is full");
    assert_eq!(episode.call("list_stock", json!({})).await.unwrap(), before);
}

#[tokio::test]
async fn a_lost_session_is_a_typed_error_and_never_a_reward() {
    let server = Warehouse::bounded(1);
    let lost = Episode { server: &server, session: SessionId::new("never") };
    assert_eq!(lost.call("list_stock", json!({})).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(lost.verify(stock()).await.unwrap_err().code(), Code::FailedPrecondition);

    let episode = seed(&server, "s", stock()).await.unwrap();
    assert_eq!(seed(&server, "more", stock()).await.err().unwrap().code(), Code::ResourceExhausted);
    server.close_session(&CallContext::default(), &episode.session).await.unwrap();
    assert_eq!(episode.verify(stock()).await.unwrap_err().code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn sessions_do_not_see_each_other_and_a_second_seed_does_not_start_over() {
    let server = Warehouse::default();
    let (one, two) = (seed(&server, "1", stock()).await.unwrap(), seed(&server, "2", stock()).await.unwrap());
    one.call("ship_stock", json!({"item": "nuts", "quantity": 3, "from_bay": "A"})).await.unwrap();
    seed(&server, "1", stock()).await.unwrap();
    assert_eq!(one.verify(json!({"A": {"bolts": 12}, "B": {}})).await.unwrap().reward, 1.0);
    assert_eq!(two.verify(stock()).await.unwrap().reward, 1.0);
}

#[tokio::test]
async fn a_row_that_no_warehouse_can_be_is_an_error_that_names_the_key() {
    let server = Warehouse::default();
    for (initial, why) in [
        (json!({}), "`initial_stock` of the row has 0 bays"),
        (json!({"A": {"bolts": 0}}), "has 0 bolts in bay A"),
        (json!({"A": {"bolts": 2_000_000}}), "write from 1 to 1000000"),
        (json!({"A": {"bolts": -1}}), "`initial_stock`"),
        (json!(5), "`initial_stock`"),
    ] {
        let error = seed(&server, "s", initial).await.err().unwrap();
        assert!(error.code() == Code::InvalidArgument && error.to_string().contains(why), "{error}");
    }
    let session = SessionId::new("s");
    let error = server.seed_session(&CallContext::default(), &session, &RawObject::empty()).await.unwrap_err();
    assert!(error.to_string().contains("`initial_stock`"), "{error}");
}
