//! The registry of the head server, and endpoints that are not head servers.

use std::time::Duration;

use gym_client::Transports;
use gym_client::collect::connect_head;
use gym_core::transport::InProcess;
use gym_core::{Endpoint, World};
use serde_json::{Value, json};

use super::ground::Ground;
use super::{Case, Got};

fn registration(name: &str) -> Value {
    json!({
        "name": name, "rank": 0, "kind": "resources_servers", "implementation": "x",
        "endpoints": ["http://127.0.0.1:1"], "incarnation": 1, "ttl_ms": 50,
    })
}

fn register(name: &'static str, outcome: &'static str, says: &'static [&'static str], change: fn(&mut Value)) -> Case {
    Case::new("bad registration", name, outcome, says, move |ground| {
        Box::pin(async move {
            let mut body = registration("newcomer");
            change(&mut body);
            ground.post("head_server", "/registry/register", &body.to_string()).await.got()
        })
    })
}

async fn ask_head(url: &str) -> Got {
    let head = Endpoint::parse(url).unwrap();
    let transports = Transports::from_features(InProcess::new());
    let world = World::real();
    let asked = connect_head(&head, transports, &world);
    match tokio::time::timeout(Duration::from_secs(30), asked).await.expect("asking a head ends") {
        Ok(_) => Got::new("accepted", url),
        Err(error) => Got::refusal(&error),
    }
}

pub(crate) fn cases() -> Vec<Case> {
    const LEASE: &str = "invalid lease";
    const HEAD: &str = "invalid head server";
    vec![
        register(
            "a server that is already registered",
            "HTTP 409",
            &[
                "register math",
                "replica 0 is live at mem://math and http://127.0.0.1:",
                "choose another name or number",
            ],
            |body| body["name"] = "math".into(),
        ),
        register("no endpoint", "HTTP 422", &["register newcomer", "at least one endpoint"], |body| {
            body["endpoints"] = json!([]);
        }),
        register("an endpoint that is not a URL", "HTTP 422", &["the body is invalid"], |body| {
            body["endpoints"] = json!(["somewhere"]);
        }),
        register("a name with a blank", "HTTP 422", &["use a name such as math_server"], |body| {
            body["name"] = "new comer".into();
        }),
        register("no time to live", "HTTP 422", &["ttl_ms must be more than 0"], |body| body["ttl_ms"] = 0.into()),
        register("an unknown kind", "HTTP 422", &["the body is invalid", "wizards"], |body| {
            body["kind"] = "wizards".into();
        }),
        Case::new(
            LEASE,
            "renewed after it expired",
            "HTTP 404",
            &["renew newcomer", "register again"],
            |ground: &Ground| {
                Box::pin(async move {
                    let body = registration("newcomer").to_string();
                    let lease = ground.post("head_server", "/registry/register", &body).await;
                    assert_eq!(lease.status, 200, "{lease:?}");
                    tokio::time::sleep(Duration::from_millis(80)).await;
                    ground.post("head_server", "/registry/renew", &lease.body).await.got()
                })
            },
        ),
        Case::new(LEASE, "renewed but never granted", "HTTP 404", &["renew nobody", "register again"], |ground| {
            Box::pin(async move {
                let lease = json!({"name": "nobody", "rank": 0, "incarnation": 1, "ttl_ms": 1_000}).to_string();
                ground.post("head_server", "/registry/renew", &lease).await.got()
            })
        }),
        Case::new(LEASE, "of an earlier server with the same name", "HTTP 404", &["renew math"], |ground| {
            Box::pin(async move {
                let lease = json!({"name": "math", "rank": 0, "incarnation": 1, "ttl_ms": 1_000}).to_string();
                ground.post("head_server", "/registry/renew", &lease).await.got()
            })
        }),
        Case::new(HEAD, "a port without a listener", "refused: unavailable", &["http://127.0.0.1:1"], |_| {
            Box::pin(ask_head("http://127.0.0.1:1"))
        }),
        Case::new(
            HEAD,
            "a server that is not a head server",
            "refused: not_found",
            &["global_config_dict_yaml"],
            |ground| Box::pin(async move { ask_head(&format!("http://{}", ground.address("math"))).await }),
        ),
        Case::new(HEAD, "another program", "refused: data_loss", &["its configuration is invalid"], |ground| {
            Box::pin(async move { ask_head(&format!("http://{}", ground.upstream.address())).await })
        }),
    ]
}
