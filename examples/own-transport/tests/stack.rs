//! The quickstart's servers over QUIC, selected by configuration.

use std::time::Duration;

use gym_client::transport::http::frames::FramesConfig;
use gym_client::{CallOptions, Transports};
use gym_core::CallContext;
use gym_examples::servers::servers;
use gym_own_transport::{QUIC, QuicBackend};
use gym_server::Stack;

const CONFIGURATION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/quickstart.yaml");

fn transports(secret: &str) -> Transports {
    Transports::standard().with(QuicBackend::new(secret, FramesConfig::default()).expect("a key"))
}

async fn stack(settings: &[&str]) -> Stack {
    let mut builder = Stack::builder().config_file(CONFIGURATION).servers(servers().over(transports("stack")));
    for setting in settings.iter().chain(&["+head_server.port=0"]) {
        builder = builder.set(*setting);
    }
    builder.start().await.expect("the stack starts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_quickstarts_servers_call_each_other_over_quic() {
    let stack = stack(&["++transport=[quic,http]", "++require_transport=quic"]).await;
    let cx = CallContext::within(Duration::from_secs(60));
    let body = r#"{"input": "2 + 2"}"#;
    let answer = stack.client().post(&cx, "policy_model", "/v1/responses", body, CallOptions::default()).await;
    assert!(answer.expect("an answer").status.is_success());
    let paths = stack.client().transports().paths();
    assert_eq!(paths.iter().map(|path| path.transport).collect::<Vec<_>>(), [Some(QUIC)]);
    stack.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_quic_is_refused_with_its_reason() {
    let plain = stack(&["++transport=http"]).await;
    let url = plain.servers().iter().find(|server| server.name == "policy_model").expect("it runs").url.clone();
    let policy = gym_core::transport::TransportPolicy::auto().require("quic");
    let connecting = transports("stack").with_policy(policy);
    let endpoint = gym_core::Endpoint::parse(&url).expect("an endpoint");
    let cx = CallContext::within(Duration::from_secs(60));
    let error =
        connecting.connect(&cx, &[endpoint], &gym_core::transport::ConnectOptions::default()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("http: below require_transport quic") && text.contains("offers no quic endpoint"), "{text}");
    plain.stop().await;
}
