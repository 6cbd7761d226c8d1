//! Responses of the server end to clients of every kind, over raw sockets.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod support;

use std::sync::Arc;
use std::time::Duration;

use gym_core::transport::handler_fn;
use gym_core::{Handler, Request, Response, Status};
use gym_transport_http::HttpConfig;
use support::{Server, soon};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Notify, mpsc};

const SHORT: Duration = Duration::from_millis(80);

fn echo() -> impl Handler {
    handler_fn(|request: Request| async move { Ok(Response::new(Status::OK, request.message)) })
}

/// Reports its calls, holds them until they are released, and reports when one is dropped.
fn held() -> (impl Handler, mpsc::Receiver<Request>, Arc<Notify>, mpsc::Receiver<()>) {
    struct Told(mpsc::Sender<()>);
    impl Drop for Told {
        fn drop(&mut self) {
            let _ = self.0.try_send(());
        }
    }
    let (started, started_seen) = mpsc::channel(64);
    let (dropped, dropped_seen) = mpsc::channel(64);
    let release = Arc::new(Notify::new());
    let released = Arc::clone(&release);
    let handler = handler_fn(move |request: Request| {
        let told = Told(dropped.clone());
        started.try_send(request).unwrap();
        let released = Arc::clone(&released);
        async move {
            let _told = told;
            released.notified().await;
            Ok(Response::json("{}"))
        }
    });
    (handler, started_seen, release, dropped_seen)
}

async fn assert_healthy(server: &Server) {
    let mut client = server.client().await;
    client.post("/", "{}").await;
    assert_eq!(client.answer().await.status(), 200);
}

#[tokio::test]
async fn json_goes_in_and_comes_out_bare() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client.post("/verify", r#"{"n":1E5}"#).await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.text()), (200, r#"{"n":1E5}"#));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("content-length"), Some("9"));
    assert_eq!(answer.header("transfer-encoding"), None);
}

#[tokio::test]
async fn a_connection_serves_many_calls_and_may_be_idle_longer_than_clients_keep_it() {
    let config = HttpConfig::default();
    // NeMo Gym's clients keep an idle connection for 15 s, its servers for 30 s.
    assert!(config.keep_alive_timeout >= Duration::from_secs(30));
    assert!(config.idle_timeout < Duration::from_secs(30));
    let server = Server::start(config, echo());
    let mut client = server.client().await;
    for call in 0..20 {
        client.post("/", call.to_string()).await;
        assert_eq!(client.answer().await.text(), call.to_string());
    }
    assert_eq!(*server.accepted.borrow(), 1);
}

#[tokio::test]
async fn an_idle_connection_ends_after_its_time() {
    // The used connection is in use within this time.
    let mut config = HttpConfig::default();
    config.keep_alive_timeout = Duration::from_secs(2);
    let server = Server::start(config, echo());
    let mut unused = server.client().await;
    let mut used = server.client().await;
    used.post("/", "{}").await;
    used.answer().await;
    assert_eq!((unused.rest().await, used.rest().await), (vec![], vec![]));
    assert_healthy(&server).await;
}

#[tokio::test]
async fn garbage_gets_400_and_the_server_lives() {
    let server = Server::start(HttpConfig::default(), echo());
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00\x00\x00\x00\x00\x00\x00\x00\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x00\x00\x00\x00\x00\x00\x00\x00\r\n\r\n",
    ] {
        let mut client = server.client().await;
        client.write(garbage).await;
        let rest = client.rest().await;
        assert!(
            rest.starts_with(b"HTTP/1.1 400 "),
            "{:?} for {:?}",
            String::from_utf8_lossy(&rest),
            String::from_utf8_lossy(garbage)
        );
    }
    let mut client = server.client().await;
    client.write(format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20))).await;
    let rest = client.rest().await;
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 4"), "{:?}", String::from_utf8_lossy(&rest));
    assert_healthy(&server).await;
}

#[tokio::test]
async fn a_broken_chunked_body_gets_400() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client.write("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n").await;
    assert_eq!(client.answer().await.status(), 400);
    assert_healthy(&server).await;
}

#[tokio::test]
async fn a_frame_that_is_none_gets_400() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client
        .write("POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/x-gym-frame\r\ncontent-length: 5\r\n\r\nframe")
        .await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-gym-execution")), (400, Some("not-started")));
}

#[tokio::test]
async fn a_slow_head_is_cut_off_and_an_idle_connection_is_not() {
    let mut config = HttpConfig::default();
    config.head_timeout = SHORT;
    let server = Server::start(config, echo());
    let mut idle = server.client().await;
    let mut slow = server.client().await;
    slow.post("/", "{}").await;
    slow.answer().await;
    slow.write("POST / HTTP/1.1\r\nhost: a\r\n").await;
    assert_eq!(slow.rest().await, b"");
    idle.post("/", "{}").await;
    assert_eq!(idle.answer().await.status(), 200);
}

#[tokio::test]
async fn a_silent_body_is_answered_with_the_name_of_its_timeout() {
    let mut config = HttpConfig::default();
    config.body_timeout = SHORT;
    let server = Server::start(config, echo());
    let mut client = server.client().await;
    client.write("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{").await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-gym-execution")), (504, Some("not-started")));
    assert!(answer.text().contains("body_timeout"), "{}", answer.text());
    assert_healthy(&server).await;
}

#[tokio::test]
async fn a_body_above_the_limit_gets_413_and_the_name_of_the_limit() {
    let mut config = HttpConfig::default();
    config.request_bytes_max = 100;
    let server = Server::start(config, echo());
    let large = "x".repeat(5 << 20);
    let mut client = server.client().await;
    client.post("/", &large[..100]).await;
    assert_eq!(client.answer().await.status(), 200);

    client.post("/", &large).await;
    let announced = client.answer().await;
    // The same connection remains usable.
    client
        .write(format!(
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n65\r\n{}\r\n0\r\n\r\n",
            &large[..101]
        ))
        .await;
    let chunked = client.answer().await;
    let mut asking = server.client().await;
    asking.write("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 101\r\n\r\n").await;
    let asked = asking.answer().await;
    for answer in [announced, chunked, asked] {
        assert_eq!((answer.status(), answer.header("x-gym-code")), (413, Some("invalid_argument")));
        assert!(answer.text().contains("request_bytes_max = 100"), "{}", answer.text());
    }
    assert_healthy(&server).await;
}

#[tokio::test]
async fn a_body_above_the_limit_is_refused_before_it_arrives_and_its_rest_is_read() {
    let mut config = HttpConfig::default();
    config.request_bytes_max = 100;
    let server = Server::start(config, echo());
    let chunk = format!("65\r\n{}\r\n", "x".repeat(101));
    for (head, rest) in [
        ("content-length: 5000000", "x".repeat(5_000_000)),
        ("transfer-encoding: chunked", format!("{chunk}{chunk}0\r\n\r\n")),
    ] {
        let mut client = server.client().await;
        client.write(format!("POST / HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n")).await;
        let mut rest = rest.as_str();
        if head.starts_with("transfer") {
            // A body without a length is too long once its bytes have come.
            client.write(chunk.clone()).await;
            rest = &rest[chunk.len()..];
        }
        // Nothing more is sent before the answer.
        let answer = client.answer().await;
        assert_eq!((answer.status(), answer.header("x-gym-execution")), (413, Some("not-started")));
        // The rest is no request, and the connection remains usable.
        client.write(rest.to_owned()).await;
        client.post("/", "{}").await;
        assert_eq!(client.answer().await.status(), 200, "{head}");
    }
    assert_healthy(&server).await;
}

#[tokio::test]
async fn a_client_that_never_sends_the_rest_of_a_refused_body_is_closed() {
    let mut config = HttpConfig::default();
    config.request_bytes_max = 100;
    config.head_timeout = Duration::from_millis(50);
    let server = Server::start(config, echo());
    for sent in ["", "x"] {
        let mut client = server.client().await;
        client.write(format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5000000\r\n\r\n{sent}")).await;
        assert_eq!(client.answer().await.status(), 413);
        assert!(client.rest().await.is_empty());
    }
    assert_healthy(&server).await;
}

#[tokio::test]
async fn a_client_that_leaves_drops_its_handler_and_fires_its_token() {
    let (handler, mut started, _release, mut dropped) = held();
    let server = Server::start(HttpConfig::default(), handler);
    for half_closed in [false, true] {
        let mut client = server.client().await;
        client.post("/", "{}").await;
        let request = soon(started.recv()).await.unwrap();
        assert!(!request.context.cancel.is_cancelled());
        // A client that closes its sending side has disconnected.
        let kept = if half_closed {
            client.0.shutdown().await.unwrap();
            Some(client)
        } else {
            drop(client);
            None
        };
        soon(dropped.recv()).await.unwrap();
        soon(request.context.cancel.cancelled()).await;
        drop(kept);
    }
}

#[tokio::test]
async fn an_answered_call_does_not_fire_its_token() {
    let (handler, mut started, release, mut dropped) = held();
    let server = Server::start(HttpConfig::default(), handler);
    let mut client = server.client().await;
    client.post("/", "{}").await;
    let request = soon(started.recv()).await.unwrap();
    release.notify_one();
    client.answer().await;
    soon(dropped.recv()).await.unwrap();
    drop(client);
    assert!(!request.context.cancel.is_cancelled());
}

#[tokio::test]
async fn pipelined_calls_are_answered_in_order() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    let calls: String =
        (0..50).map(|call| format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{call:02}")).collect();
    client.write(calls).await;
    for call in 0..50 {
        assert_eq!(client.answer().await.text(), format!("{call:02}"));
    }
}

#[tokio::test]
async fn an_answer_does_not_wait_for_the_rest_of_the_next_call() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client.write("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}POST / HTTP/1.1\r\nhost").await;
    assert_eq!(client.answer().await.text(), "{}");
    client.write(": a\r\ncontent-length: 1\r\n\r\n1").await;
    assert_eq!(client.answer().await.text(), "1");
}

#[tokio::test]
async fn a_chunked_body_is_put_together() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client.write("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await;
    client.write("3\r\n{\"a\r\n").await;
    client.write("4;x=y\r\n\":1}\r\n0\r\nx-trailer: 1\r\n\r\n").await;
    assert_eq!(client.answer().await.text(), "{\"a\":1}");
}

#[tokio::test]
async fn a_rollout_of_a_megabyte_comes_back_exactly() {
    let server = Server::start(HttpConfig::default(), echo());
    let body: Vec<u8> = (0_u32..).flat_map(|number| format!("{number},").into_bytes()).take(1_160_000).collect();
    let mut client = server.client().await;
    let (mut read, mut write) = client.0.split();
    let head = format!("POST /verify HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    let sent = async {
        write.write_all(head.as_bytes()).await.unwrap();
        write.write_all(&body).await.unwrap();
    };
    let mut came = vec![0; body.len() + 1_000];
    let read_all = async {
        use tokio::io::AsyncReadExt;
        let mut length = 0;
        while !came[..length].ends_with(&body[body.len() - 20..]) {
            length += read.read(&mut came[length..]).await.unwrap();
        }
        length
    };
    let (_, length) = soon(async { tokio::join!(sent, read_all) }).await;
    assert!(came[..length].ends_with(&body));
    assert!(came.starts_with(b"HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_client_that_waits_for_100_gets_it() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client.write("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n").await;
    assert_eq!(client.answer().await.status(), 100);
    client.write("{}").await;
    assert_eq!(client.answer().await.text(), "{}");
}

#[tokio::test]
async fn a_method_that_no_verb_names_gets_405() {
    let server = Server::start(HttpConfig::default(), echo());
    let mut client = server.client().await;
    client.write("TRACE / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(client.answer().await.status(), 405);
}

#[tokio::test]
async fn the_callers_time_is_the_calls_time() {
    let (handler, mut started, _release, _dropped) = held();
    let mut config = HttpConfig::default();
    config.default_deadline = Duration::from_secs(7);
    let server = Server::start(config, handler);
    let mut client = server.client().await;
    client.write("GET / HTTP/1.1\r\nhost: a\r\nx-gym-timeout-ms: 0\r\n\r\n").await;
    let passed = client.answer().await;
    assert_eq!((passed.status(), passed.header("x-gym-execution")), (504, Some("not-started")));
    client.write("GET / HTTP/1.1\r\nhost: a\r\nx-gym-timeout-ms: soon\r\n\r\n").await;
    let wrong = client.answer().await;
    assert_eq!(wrong.status(), 422);
    assert!(wrong.text().contains("x-gym-timeout-ms"), "{}", wrong.text());
    assert!(started.try_recv().is_err(), "neither was run");
    client.write("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let left = soon(started.recv()).await.unwrap().context.remaining();
    assert!(left <= Duration::from_secs(7) && left > Duration::from_secs(1), "{left:?}");
}

#[tokio::test]
async fn calls_beyond_the_bound_wait_and_are_not_refused() {
    let (handler, mut started, release, _dropped) = held();
    let mut config = HttpConfig::default();
    config.requests_max = 2;
    let server = Server::start(config, handler);
    let mut clients = Vec::new();
    for _ in 0..6 {
        let mut client = server.client().await;
        client.post("/", "{}").await;
        clients.push(client);
    }
    for _ in 0..2 {
        soon(started.recv()).await.unwrap();
    }
    for _ in 0..4 {
        assert!(started.try_recv().is_err(), "more than requests_max run");
        release.notify_one();
        soon(started.recv()).await.unwrap();
    }
    release.notify_one();
    release.notify_waiters();
    for mut client in clients {
        assert_eq!(client.answer().await.status(), 200);
    }
}

#[tokio::test]
async fn connections_beyond_the_bound_wait_to_be_accepted() {
    let mut config = HttpConfig::default();
    config.accepted_max = Some(1);
    let server = Server::start(config, echo());
    let mut first = server.client().await;
    let mut second = server.client().await;
    second.post("/", "{}").await;
    first.post("/", "{}").await;
    assert_eq!(first.answer().await.status(), 200);
    assert_eq!(*server.accepted.borrow(), 1);
    drop(first);
    assert_eq!(second.answer().await.status(), 200);
}

#[tokio::test]
async fn a_thousand_connections_at_once_are_all_answered() {
    let server = Server::start(HttpConfig::default(), echo());
    let calls = (0..1_000).map(|call| {
        let server = &server;
        async move {
            let mut client = server.client().await;
            client.post("/", call.to_string()).await;
            assert_eq!(client.answer().await.text(), call.to_string());
        }
    });
    futures_util::future::join_all(calls).await;
}

#[tokio::test]
async fn a_drain_answers_what_runs_and_says_close() {
    let (handler, mut started, release, _dropped) = held();
    let mut server = Server::start(HttpConfig::default(), handler);
    let mut idle = server.client().await;
    let mut busy = server.client().await;
    busy.post("/", "{}").await;
    soon(started.recv()).await.unwrap();
    server.drain.cancel();
    assert_eq!(idle.rest().await, b"");
    release.notify_one();
    let answer = busy.answer().await;
    assert_eq!((answer.status(), answer.header("connection")), (200, Some("close")));
    assert_eq!(busy.rest().await, b"");
    server.end().await;
}

#[tokio::test]
async fn an_answer_that_no_header_can_carry_is_an_error_that_names_it() {
    let server = Server::start(
        HttpConfig::default(),
        handler_fn(|_| async {
            let mut response = Response::json("{}");
            response.metadata.push("x-split", "a\r\nset-cookie: stolen=1");
            Ok(response)
        }),
    );
    let mut client = server.client().await;
    client.post("/", "{}").await;
    let answer = client.answer().await;
    assert_eq!(answer.status(), 422);
    assert!(answer.text().contains("x-split"), "{}", answer.text());
}

#[tokio::test]
async fn a_status_that_is_no_answer_is_an_error() {
    let server = Server::start(
        HttpConfig::default(),
        handler_fn(|request: Request| async move {
            let status = request.route.path()[1..].parse().unwrap();
            Ok(Response::new(Status(status), request.message))
        }),
    );
    let mut client = server.client().await;
    for status in ["100", "101", "1000", "0"] {
        client.post(&format!("/{status}"), "{}").await;
        let answer = client.answer().await;
        assert_eq!(answer.status(), 500);
        assert!(answer.text().contains(status), "{}", answer.text());
    }
}

#[tokio::test]
async fn a_dropped_serve_breaks_the_connection() {
    let (handler, mut started, _release, mut dropped) = held();
    let server = Server::start(HttpConfig::default(), handler);
    let mut client = server.client().await;
    client.post("/", "{}").await;
    soon(started.recv()).await.unwrap();
    drop(server);
    soon(dropped.recv()).await.unwrap();
    assert_eq!(client.rest().await, b"");
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let server = Server::start(HttpConfig::default(), echo());
    let error = gym_transport_http::http1::HttpListener::bind(server.address, HttpConfig::default()).unwrap_err();
    assert_eq!(error.code(), gym_core::Code::AlreadyExists);
    assert!(error.to_string().contains(&server.address.to_string()), "{error}");
}
