//! Kept connections that break under the next call: which calls are sent again, and what the others say.
#![cfg(feature = "http")]

use std::sync::Arc;
use std::time::Duration;

use gym_client::{CallOptions, JOINS_RUNS_LABEL, ServerClient, Transports};
use gym_core::message::CALL_METADATA;
use gym_core::registry::{Balance, MemoryRegistry, Registration, Registry};
use gym_core::rollout::FailureClass;
use gym_core::server::ServerKind;
use gym_core::transport::{InProcess, RetryPolicy};
use gym_core::{CallContext, Code, Endpoint, Error, Execution, Request, Response, Result, Verb, World};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// The request lines that a server received.
type Seen = Arc<Mutex<Vec<String>>>;

/// Reads one request; `None` if the client has closed the connection.
async fn read_request(client: &mut BufReader<TcpStream>) -> Option<String> {
    let (mut first, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if client.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line if first.is_empty() => first = line.trim_end_matches(" HTTP/1.1").to_owned(),
            line => {
                if let Some(value) = line.strip_prefix("content-length: ") {
                    length = value.parse().expect("a length");
                }
            }
        }
    }
    client.read_exact(&mut vec![0; length]).await.ok()?;
    Some(first)
}

/// Starts a server that answers the first request of each connection, and closes it after it has read a second one, as a balancer does.
async fn server(seen: &Seen, label: bool) -> ServerClient {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let seen = Arc::clone(seen);
    tokio::spawn(async move {
        loop {
            let mut client = BufReader::new(listener.accept().await.expect("a connection").0);
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                for answer in ["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", ""] {
                    let Some(line) = read_request(&mut client).await else { return };
                    seen.lock().push(line);
                    client.write_all(answer.as_bytes()).await.expect("the client reads");
                }
            });
        }
    });
    let registry = MemoryRegistry::new();
    let endpoint = Endpoint::parse(&endpoint).expect("an endpoint");
    let mut registration = Registration::new("server", ServerKind::Environment, vec![endpoint]);
    if label {
        registration.labels.insert(JOINS_RUNS_LABEL.to_owned(), "1".to_owned());
    }
    registry.register(&CallContext::default(), registration).await.expect("registers");
    let client = ServerClient::new(Arc::new(registry), Transports::from_features(InProcess::new()), &World::real());
    // Without a budget: what is sent again is outside of it.
    client.with(Balance::default(), RetryPolicy::never())
}

fn within() -> CallContext {
    CallContext::within(Duration::from_secs(60))
}

/// Asserts that the error tells of a connection, and not of a server that is gone.
fn tells_of_the_connection(error: &Error) {
    let text = error.to_string();
    assert!(text.contains("the reused connection broke before a response came"), "{text}");
    assert!(text.contains("whether the request was executed is not known") && !text.contains("gone"), "{text}");
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{text}");
    assert_eq!(error.failure_class(), FailureClass::TransportPeerDrop, "{text}");
}

#[tokio::test]
async fn a_call_is_sent_again_over_a_new_connection_if_its_route_is_idempotent_or_deduplicated() {
    let idempotent = CallOptions::idempotent();
    let default = CallOptions::default();
    // Verb, route, options, whether the request has a call id, whether the server joins equal runs; `true` if it is sent again.
    let table = [
        (Verb::Get, "/health", default, false, false, true),
        (Verb::Get, "/metrics", idempotent, false, false, true),
        (Verb::Post, "/aggregate_metrics", idempotent, false, false, true),
        (Verb::Post, "/run", default, true, true, true),
        (Verb::Post, "/run", default, true, false, false),
        (Verb::Post, "/run", default, false, true, false),
        (Verb::Post, "/verify", default, true, true, false),
        (Verb::Post, "/seed_session", default, false, false, false),
        (Verb::Post, "/close_session", default, false, false, false),
        (Verb::Post, "/some_tool", default, false, false, false),
        (Verb::Post, "/step", default, false, false, false),
        (Verb::Post, "/v1/responses", default, false, false, false),
    ];
    for (verb, route, options, id, joins, again) in table {
        let case = format!("{verb} {route}, {options:?}, call id {id}, joins {joins}");
        let seen = Seen::default();
        let client = server(&seen, joins).await;
        client.get(&within(), "server", "/first").await.expect("a new connection");
        let mut request = Request::post(if id { within().with_call_id(7) } else { within() }, route, "{}");
        assert_eq!(request.context.metadata.get(CALL_METADATA).is_some(), id);
        request.verb = verb;
        let answered: Result<Response> = client.send("server", &request, options).await;
        let mut expected = vec!["GET /first".to_owned()];
        expected.extend(vec![format!("{verb} {route}"); 1 + usize::from(again)]);
        assert_eq!(*seen.lock(), expected, "{case}");
        match answered {
            Ok(_) => assert!(again, "{case}"),
            Err(error) => {
                assert!(!again, "{case}: {error}");
                tells_of_the_connection(&error);
            }
        }
    }
}

#[tokio::test]
async fn a_session_whose_connection_broke_is_not_lost() {
    let seen = Seen::default();
    let client = server(&seen, false).await;
    let mut session = client.session();
    let cx = within();
    session.post(&cx, "server", "/seed_session", "{}").await.expect("a new connection");
    tells_of_the_connection(&session.post(&cx, "server", "/verify", "{}").await.expect_err("the connection breaks"));
    session.post(&cx, "server", "/verify", "{}").await.expect("the server is still there");
    assert_eq!(*seen.lock(), ["POST /seed_session", "POST /verify", "POST /verify"]);
}
