//! A listener's endpoints, and the transport that is chosen for them.
#![cfg(feature = "http")]

use std::sync::Arc;

use gym_client::Transports;
use gym_client::transport::http::HttpConfig;
use gym_client::transport::http::http1::HttpListener;
use gym_core::transport::{ConnectOptions, InProcess, Listener, handler_fn};
use gym_core::{CallContext, CancelToken, Code, Request, Response};

#[tokio::test]
async fn one_port_offers_plain_http_and_ordered_frames() {
    let mut listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), HttpConfig::default()).unwrap();
    let endpoints = listener.endpoints().to_vec();
    let server = tokio::spawn(async move {
        let echo = Arc::new(handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) }));
        let mut peers = tokio::task::JoinSet::new();
        loop {
            peers.spawn(listener.accept().await.unwrap().serve(echo.clone(), CancelToken::new()));
        }
    });
    let transports = Transports::from_features(InProcess::new());
    let (cx, options) = (CallContext::default(), ConnectOptions::default());
    let plain = transports.connect(&cx, &endpoints, &options).await.unwrap();
    let ordered = transports.connect_ordered(&cx, &endpoints, &options).await.unwrap();
    assert_eq!((plain.path().scheme, plain.path().ordered), ("http", false));
    assert_eq!((ordered.path().scheme, ordered.path().ordered), ("http+frames", true));
    for channel in [plain, ordered] {
        let answer = channel.call(Request::post(CallContext::default(), "/echo", "[1]")).await.unwrap();
        assert_eq!(answer.message.head.to_bytes(), "[1]");
    }
    let error = transports.connect_ordered(&cx, &endpoints[..1], &options).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.to_string().contains("http+frames"), "{error}");
    server.abort();
}
