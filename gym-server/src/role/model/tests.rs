use gym_core::{CallContext, Handler as _, RawObject, Request, Response, Status};
use serde_json::Value;

use crate::model::{ScriptedItem, ScriptedModel, ScriptedModelConfig};
use crate::role::{RoleServer, ServerContext};
use crate::testing::world;

async fn post(route: &'static str, body: &str) -> Response {
    let policy = |request: &RawObject, _: &mut fastrand::Rng| {
        assert!(!request.contains("stream") && !request.contains("client_metadata"));
        vec![ScriptedItem::message("hi"), ScriptedItem::tool_call("add", "{}")]
    };
    let model = ScriptedModel::new(ScriptedModelConfig::default(), &world(), policy);
    let server = RoleServer::model(model, &ServerContext::new("policy", "Scripted", &world()));
    server.handle(Request::post(CallContext::default(), route, body.to_owned())).await.unwrap()
}

fn text(response: &Response) -> String {
    String::from_utf8(response.message.head.to_bytes().to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn both_dialects_answer_plainly_and_as_replayed_events() {
    for (route, body) in [("/v1/responses", r#"{"input":"x"}"#), ("/v1/chat/completions", r#"{"messages":[]}"#)] {
        let answer = post(route, body).await;
        assert_eq!(answer.status, Status::OK);
        assert!(answer.metadata.get("set-cookie").unwrap().starts_with("Scripted___policy="));
        let streamed = body.replace('}', r#","stream":true,"client_metadata":{}}"#);
        let events = post(route, &streamed).await;
        assert_eq!((events.status, events.message.content_type.as_str()), (Status::OK, "text/event-stream"));
        assert_eq!(events.metadata.get("cache-control"), Some("no-cache"));
        let last = text(&events).trim_end().rsplit("\n\n").next().unwrap().to_owned();
        assert!(last.starts_with("event: response.completed") || last == "data: [DONE]", "{last}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_schema_forbids_is_a_422_on_both_ways() {
    for (route, body, kind) in [
        ("/v1/responses", "{}", "missing"),
        ("/v1/responses", r#"{"stream":true}"#, "missing"),
        ("/v1/responses", r#"{"input":"x","seed":1}"#, "extra_forbidden"),
        ("/v1/chat/completions", r#"{"messages":[],"stream":1}"#, "literal_error"),
        ("/v1/chat/completions", "{", "json_invalid"),
    ] {
        let answer = post(route, body).await;
        assert_eq!(answer.status, Status(422), "{body}");
        let body: Value = serde_json::from_str(&text(&answer)).unwrap();
        assert_eq!(body["detail"][0]["type"], kind);
    }
    assert_eq!(post("/v1/models", "{}").await.status, Status(404));
}
