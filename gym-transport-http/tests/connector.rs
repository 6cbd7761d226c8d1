//! The client end with servers of other software and with connections that break.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod support;

use std::sync::Arc;
use std::time::Duration;

use gym_core::rollout::FailureClass;
use gym_core::transport::handler_fn;
use gym_core::{Code, Error, Execution, Request, Response, Status, Verb};
use gym_transport_http::HttpConfig;
use parking_lot::Mutex;
use support::{Client, Server, TIMEOUT, channel_to, soon, within};
use tokio::net::TcpListener;

fn facts(error: &Error) -> (Code, Execution) {
    (error.code(), error.execution())
}

fn echo_server() -> Server {
    Server::start(
        HttpConfig::default(),
        handler_fn(|request: Request| async move { Ok(Response::new(Status::OK, request.message)) }),
    )
}

/// Starts a server that reads one request per connection, responds with `reply`, and closes the connection.
async fn foreign(reply: &'static str) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut client = Client(listener.accept().await.unwrap().0);
            read_request(&mut client).await;
            client.write(reply).await;
        }
    });
    address
}

/// Reads a request with a body of two bytes, and returns its header section.
async fn read_request(client: &mut Client) -> String {
    // A request has the form of a response: a header section and a body of announced length.
    client.answer().await.head
}

#[tokio::test]
async fn calls_one_after_the_other_share_a_connection() {
    let server = echo_server();
    let channel = channel_to(server.address, HttpConfig::default()).await;
    for call in 0..50 {
        let answer = channel.call(Request::post(within(), "/", call.to_string())).await.unwrap();
        assert_eq!(answer.message.head.to_bytes(), call.to_string());
    }
    assert_eq!(*server.accepted.borrow(), 1);
}

/// Starts a server that answers the first request of each connection. Of the second one, it sends `begun` and then closes the connection, as a
/// balancer does. Connections after the first are answered with `later` and closed; without `later`, nobody listens after the first. Returns the
/// header sections that arrived.
async fn closing_second(
    begun: &'static str,
    later: Option<&'static str>,
) -> (std::net::SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let heads = Arc::<Mutex<Vec<String>>>::default();
    let seen = Arc::clone(&heads);
    tokio::spawn(async move {
        let mut client = Client(listener.accept().await.unwrap().0);
        // Before the connection breaks, so that the next one is refused.
        let listener = later.map(|later| (listener, later));
        let read = async |client: &mut Client| {
            let head = read_request(client).await;
            seen.lock().push(head);
        };
        read(&mut client).await;
        client.write(ANSWER).await;
        read(&mut client).await;
        client.write(begun).await;
        drop(client);
        while let Some((listener, later)) = &listener {
            let mut client = Client(listener.accept().await.unwrap().0);
            read(&mut client).await;
            client.write(later).await;
        }
    });
    (address, heads)
}

const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";

#[tokio::test]
async fn a_reused_connection_that_breaks_is_replaced_for_requests_that_may_arrive_twice() {
    let half = "HTTP/1.1 200 OK\r\n";
    // The verb, whether the request is repeatable, whether the connector repeats all, what comes of the response; `true` if it is sent again.
    let table = [
        (Verb::Post, false, false, "", false),
        (Verb::Put, false, false, "", false),
        (Verb::Get, false, false, "", true),
        (Verb::Head, false, false, "", true),
        (Verb::Post, true, false, "", true),
        (Verb::Post, false, true, "", true),
        (Verb::Get, true, true, half, false),
        (Verb::Post, true, true, half, false),
    ];
    for (verb, repeatable, all, begun, again) in table {
        let case = format!("{verb} {repeatable} {all} {begun:?}");
        let (address, heads) = closing_second(begun, Some(ANSWER)).await;
        let mut config = HttpConfig::default();
        config.repeats_on_new_connection = all;
        let channel = channel_to(address, config).await;
        channel.call(Request::post(within(), "/", "{}")).await.unwrap();
        let mut request = Request::post(within(), "/", "{}");
        request.verb = verb;
        request.context.repeatable = repeatable;
        let answered = soon(channel.call(request)).await;
        assert_eq!(heads.lock().len(), 2 + usize::from(again), "{case}");
        match answered {
            Ok(response) => assert!(again && response.status == Status::OK, "{case}"),
            Err(error) => {
                assert_eq!((again, facts(&error)), (false, (Code::Unavailable, Execution::Unknown)), "{case}: {error}");
                let reused = error.to_string().contains("the reused connection broke before a response came");
                assert_eq!(reused, begun.is_empty(), "{case}: {error}");
                assert_eq!(error.class(), reused.then_some(FailureClass::TransportPeerDrop), "{case}: {error}");
            }
        }
    }
}

#[tokio::test]
async fn a_repetition_that_did_not_start_says_nothing_of_the_first_request() {
    let refused = "HTTP/1.1 503 Service Unavailable\r\nx-gym-execution: not-started\r\ncontent-length: 2\r\n\r\n{}";
    for (later, arrived) in [(None, 2), (Some(""), 3), (Some(refused), 3)] {
        let (address, heads) = closing_second("", later).await;
        let channel = channel_to(address, HttpConfig::default()).await;
        channel.call(Request::post(within(), "/", "{}")).await.unwrap();
        let mut request = Request::post(within(), "/", "{}");
        request.context.repeatable = true;
        let error = soon(channel.call(request)).await.unwrap_err();
        assert_eq!(facts(&error), (Code::Unavailable, Execution::Unknown), "{later:?}: {error}");
        assert_eq!(heads.lock().len(), arrived, "{later:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_shares_the_connections_there_are() {
    let server = echo_server();
    let mut config = HttpConfig::default();
    config.connections_max = 4;
    let channel = channel_to(server.address, config).await;
    let calls: Vec<_> = (0..500)
        .map(|call| {
            let channel = channel.clone();
            tokio::spawn(async move { channel.call(Request::post(within(), "/", call.to_string())).await })
        })
        .collect();
    for (call, answer) in calls.into_iter().enumerate() {
        assert_eq!(soon(answer).await.unwrap().unwrap().message.head.to_bytes(), call.to_string());
    }
    assert!(*server.accepted.borrow() <= 4);
}

#[tokio::test]
async fn a_connection_is_used_again_after_a_reply_of_any_length() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let channel = channel_to(listener.local_addr().unwrap(), HttpConfig::default()).await;
    let large = format!("HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n{}", " ".repeat(3_000_000));
    let replies = [
        &["HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", "0\r\n", "\r\n"][..],
        &["HTTP/1.1 200 OK\r\n", "content-length: 2\r\n\r\n", "{", "}"],
        &["HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"],
        &["HTTP/1.1 204 No Content\r\n\r\n"],
        &[&large],
    ];
    let served = async {
        let mut client = Client(listener.accept().await.unwrap().0);
        for reply in replies.iter().cycle().take(15) {
            read_request(&mut client).await;
            for part in *reply {
                client.write(part).await;
                // The caller reads this part before the next.
                tokio::task::yield_now().await;
            }
        }
    };
    let called = async {
        for _ in 0..15 {
            channel.call(Request::post(within(), "/", "{}")).await.unwrap();
        }
    };
    // Only one connection is accepted.
    soon(async { tokio::join!(called, served) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_burst_is_all_answered() {
    let server = echo_server();
    let channel = channel_to(server.address, HttpConfig::default()).await;
    let calls: Vec<_> = (0..16_000)
        .map(|call| {
            let channel = channel.clone();
            let cx = gym_core::CallContext::within(Duration::from_secs(100));
            tokio::spawn(async move { channel.call(Request::post(cx, "/", call.to_string())).await })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status, Status::OK);
    }
    assert!(*server.accepted.borrow() <= HttpConfig::default().connections_max);
}

#[tokio::test]
async fn a_peer_that_closes_unused_connections_is_not_noticed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let channel = channel_to(listener.local_addr().unwrap(), HttpConfig::default()).await;
    for _ in 0..20 {
        let served = async {
            let mut client = Client(listener.accept().await.unwrap().0);
            read_request(&mut client).await;
            client.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
            client
        };
        let (answer, client) =
            soon(async { tokio::join!(channel.call(Request::post(within(), "/", "{}")), served) }).await;
        answer.unwrap();
        // The next call starts before the runtime has polled for events: only the kernel has noticed the close.
        drop(client);
    }
}

#[tokio::test]
async fn an_unused_connection_is_closed_after_its_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = HttpConfig::default();
    config.idle_timeout = Duration::from_millis(50);
    let channel = channel_to(listener.local_addr().unwrap(), config).await;
    let served = async {
        let mut client = Client(listener.accept().await.unwrap().0);
        read_request(&mut client).await;
        client.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
        client
    };
    let (answer, mut client) =
        soon(async { tokio::join!(channel.call(Request::post(within(), "/", "{}")), served) }).await;
    answer.unwrap();
    assert_eq!(client.rest().await, b"");
}

#[tokio::test]
async fn a_reply_that_says_close_ends_its_connection() {
    let address = foreign("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}").await;
    let channel = channel_to(address, HttpConfig::default()).await;
    for _ in 0..10 {
        channel.call(Request::post(within(), "/", "{}")).await.unwrap();
    }
}

#[tokio::test]
async fn a_foreign_reply_of_any_kind_is_a_reply() {
    for (reply, status, body) in [
        ("HTTP/1.1 500 Internal Server Error\r\ncontent-length: 3\r\n\r\n\"x\"", 500, "\"x\""),
        ("HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\nno length", 404, "no length"),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{\"\r\n4\r\na\":1\r\n1\r\n}\r\n0\r\n\r\n",
            200,
            "{\"a\":1}",
        ),
        ("HTTP/1.0 200 OK\r\n\r\nold", 200, "old"),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", 204, ""),
        ("HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", 302, ""),
    ] {
        let channel = channel_to(foreign(reply).await, HttpConfig::default()).await;
        let answer = soon(channel.call(Request::post(within(), "/", "{}"))).await.expect(reply);
        assert_eq!((answer.status, &answer.message.head.to_bytes()[..]), (Status(status), body.as_bytes()));
    }
}

#[tokio::test]
async fn a_foreign_error_is_finished_with_the_code_of_its_status() {
    let address = foreign("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}").await;
    let channel = channel_to(address, HttpConfig::default()).await;
    let error = channel.call(Request::post(within(), "/", "{}")).await.unwrap().into_result().unwrap_err();
    assert_eq!(facts(&error), (Code::Unavailable, Execution::Finished));
}

#[tokio::test]
async fn what_breaks_after_the_request_has_left_is_unknown() {
    for (reply, code) in [
        ("", Code::Unavailable),
        ("HTTP/1.1 200", Code::Unavailable),
        ("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", Code::Unavailable),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf", Code::Unavailable),
        ("SSH-2.0-OpenSSH_9.9\r\n\r\n", Code::DataLoss),
        ("HTTP/1.1 200 OK\r\ncontent-type: application/x-gym-frame\r\ncontent-length: 2\r\n\r\n{}", Code::DataLoss),
    ] {
        let channel = channel_to(foreign(reply).await, HttpConfig::default()).await;
        let error = soon(channel.call(Request::post(within(), "/run", "{}"))).await.expect_err(reply);
        assert_eq!(facts(&error), (code, Execution::Unknown), "{reply:?}: {error}");
        assert!(error.subject().contains("POST /run"), "{error}");
    }
}

#[tokio::test]
async fn nobody_there_is_not_started_and_names_the_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let channel = channel_to(address, HttpConfig::default()).await;
    let error = channel.call(Request::post(within(), "/", "{}")).await.unwrap_err();
    assert_eq!(facts(&error), (Code::Unavailable, Execution::NotStarted));
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn a_reply_of_announced_length_above_the_limit_is_not_read() {
    let address = foreign("HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n").await;
    let channel = channel_to(address, HttpConfig::default()).await;
    let error = soon(channel.call(Request::post(within(), "/", "{}"))).await.unwrap_err();
    assert_eq!(facts(&error), (Code::ResourceExhausted, Execution::Finished));
    assert!(error.to_string().contains("reply_bytes_max"), "{error}");
}

#[tokio::test]
async fn what_http_cannot_send_is_refused_by_name() {
    let server = echo_server();
    let channel = channel_to(server.address, HttpConfig::default()).await;
    for (request, named) in [
        (Request::post(within(), "/a b", "{}"), "/a b"),
        (Request::post(within(), "no-slash", "{}"), "no-slash"),
        (Request::post(within(), "/a#b", "{}"), "/a#b"),
        (Request::post(within().with_metadata("x-a", "1\r\n2"), "/", "{}"), "x-a"),
        (Request::post(within().with_metadata("x a", "1"), "/", "{}"), "x a"),
    ] {
        let error = channel.call(request).await.unwrap_err();
        assert_eq!(facts(&error), (Code::InvalidArgument, Execution::NotStarted));
        assert!(error.to_string().contains(named), "{error}");
    }
    channel.call(Request::post(within(), "/", "{}")).await.unwrap();
}

#[tokio::test]
async fn a_request_has_host_length_and_the_time_that_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let channel = channel_to(address, HttpConfig::default()).await;
    let served = async {
        let mut client = Client(listener.accept().await.unwrap().0);
        let head = read_request(&mut client).await;
        client.write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        head
    };
    let cx = within().with_metadata("cookie", "a=1").with_metadata("transfer-encoding", "chunked");
    let (answer, head) = soon(async { tokio::join!(channel.call(Request::post(cx, "/run?x=1", "{}")), served) }).await;
    answer.unwrap();
    let has = |line: &str| head.lines().any(|known| known == line);
    assert!(head.starts_with("POST /run?x=1 HTTP/1.1\r\n"), "{head}");
    assert!(has(&format!("host: {address}")), "{head}");
    assert!(has("content-length: 2") && has("content-type: application/json") && has("cookie: a=1"), "{head}");
    assert!(!head.contains("transfer-encoding"), "{head}");
    let left = head.lines().find_map(|line| line.strip_prefix("x-gym-timeout-ms: ")).unwrap();
    assert!((1_000..=TIMEOUT.as_millis()).contains(&left.parse().unwrap()), "{left}");
}

#[tokio::test]
async fn a_large_request_to_a_server_that_refuses_it_gets_the_refusal() {
    let mut config = HttpConfig::default();
    config.request_bytes_max = 1_000;
    let server = Server::start(config, handler_fn(|_| async { Ok(Response::json("{}")) }));
    let channel = channel_to(server.address, HttpConfig::default()).await;
    let answer = soon(channel.call(Request::post(within(), "/", "x".repeat(20 << 20)))).await.unwrap();
    assert_eq!(answer.status, Status(413));
    let error = answer.into_result().unwrap_err();
    assert_eq!(facts(&error), (Code::InvalidArgument, Execution::NotStarted));
    // The same body would be too large again.
    assert!(!error.may_resend(true) && !error.failure_class().is_transient());
}
