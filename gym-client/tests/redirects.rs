//! Redirects between servers: followed to the same host and port with method, body and cookies, and never an empty answer.
#![cfg(feature = "http")]

use std::sync::Arc;
use std::time::Duration;

use gym_client::transport::http::HttpConfig;
use gym_client::transport::http::http1::HttpListener;
use gym_client::{CallOptions, ServerClient, Transports};
use gym_core::registry::{MemoryRegistry, Registration, Registry};
use gym_core::server::ServerKind;
use gym_core::transport::{InProcess, Listener, handler_fn};
use gym_core::{CallContext, CancelToken, Code, Message, Request, Response, Status, World};

/// Answers as the path says: `/to/STATUS/PLACE` redirects, `/hops/N` redirects N times, and any other path returns what arrived.
fn answer(request: &Request) -> Response {
    let path = request.route.as_str().to_owned();
    let redirect = |status: u16, place: &str| {
        let mut response = Response::new(Status(status), Message::default());
        response.metadata.push("location", place.to_owned());
        response
    };
    if let Some((status, place)) = path.strip_prefix("/to/").and_then(|rest| rest.split_once('/')) {
        return redirect(status.parse().expect("a status"), place);
    }
    match path.strip_prefix("/hops/").map(|hops| hops.parse::<u32>().expect("a number")) {
        Some(0) | None => {
            let cookie = request.context.metadata.get("cookie").unwrap_or_default();
            let body = String::from_utf8_lossy(&request.message.head.to_bytes()).into_owned();
            Response::json(serde_json::json!([format!("{:?}", request.verb), path, cookie, body]).to_string())
        }
        Some(hops) => redirect(307, &format!("/hops/{}", hops - 1)),
    }
}

#[tokio::test]
async fn a_redirect_is_followed_on_its_host_and_port_or_is_an_error_that_names_the_target() {
    let mut listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), HttpConfig::default()).expect("listens");
    let endpoints = listener.endpoints();
    let own = endpoints.iter().find(|endpoint| endpoint.scheme() == "http").expect("an address").to_string();
    let (cx, registry) = (CallContext::within(Duration::from_secs(60)), MemoryRegistry::new());
    let plain: Vec<_> = endpoints.iter().filter(|endpoint| endpoint.scheme() == "http").cloned().collect();
    registry.register(&cx, Registration::new("server", ServerKind::Resources, plain)).await.expect("registers");
    let serving = tokio::spawn(async move {
        let handler = Arc::new(handler_fn(|request: Request| async move { Ok(answer(&request)) }));
        loop {
            let incoming = listener.accept().await.expect("a connection");
            tokio::spawn(incoming.serve(handler.clone(), CancelToken::new()));
        }
    });
    let client = ServerClient::new(Arc::new(registry), Transports::from_features(InProcess::new()), &World::real());
    let mut cx = cx;
    cx.metadata.push("cookie", "session=7");
    for (path, arrives) in [
        ("/plain", "/plain"),
        ("/to/307//other", "/other"),
        ("/to/308/", "/to/308/"),
        (&format!("/to/308/{own}/absolute?a=b"), "/absolute?a=b"),
        ("/hops/3", "/hops/0"),
    ] {
        let answered = client.post(&cx, "server", path.to_owned(), r#"{"a":1}"#, CallOptions::default()).await;
        if path.ends_with("/308/") {
            let error = answered.expect_err("it refers to nothing").to_string();
            assert!(error.contains("answered 308") && error.contains("refers to nothing"), "{error}");
            continue;
        }
        let answered = answered.unwrap_or_else(|error| panic!("{path}: {error}")).message.head.to_bytes();
        let expected = serde_json::json!(["Post", arrives, "session=7", r#"{"a":1}"#]).to_string();
        assert_eq!(String::from_utf8_lossy(&answered), expected, "{path}");
    }
    for (path, says) in [
        ("/to/307/http://127.0.0.1:9/x", "it refers to http://127.0.0.1:9/x"),
        ("/to/307/https://example.com/", "it refers to https://example.com/"),
        ("/to/302//other", "answered 302"),
        ("/to/303//other", "answered 303"),
        ("/to/304/", "answered 304"),
        ("/to/300//other", "answered 300"),
        ("/hops/4", "a loop"),
        ("/to/307//to/307//to/307//to/307//to/307//x", "a loop"),
    ] {
        let answered = client.post(&cx, "server", path, "{}", CallOptions::idempotent()).await;
        let error = answered.expect_err(path);
        assert!(error.to_string().contains(says) && error.to_string().contains("POST server"), "{path}: {error}");
        assert_eq!((error.code(), error.may_resend(true)), (Code::Internal, false), "{path}");
    }
    serving.abort();
}
