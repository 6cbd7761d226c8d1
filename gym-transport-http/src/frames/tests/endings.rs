//! Peers that are silent, hostile, or of another protocol.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use bytes::Bytes;
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Connector, Listener, handler_fn};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Request, Response, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::{joined, open, post, request_frame, response_frame, soon};
use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::codec::frame::{FrameHeader, FrameKind, bare, greeting_frame};
use crate::frames::config::FramesConfig;
use crate::frames::{FRAMES_SCHEME, FramesConnector, UnixListener};

/// Returns a channel to a peer that has completed its handshake, and the raw socket of that peer.
async fn greeted(options: &ConnectOptions) -> (Channel, UnixStream) {
    let (near, mut far) = UnixStream::pair().unwrap();
    let config = FramesConfig::default();
    far.write_all(&greeting_frame(&config.limits)).await.unwrap();
    let link = open(near, (&config, options), &ReceiveBufferPool::new(0)).await;
    let mut theirs = vec![0; greeting_frame(&config.limits).len()];
    far.read_exact(&mut theirs).await.unwrap();
    (Channel::new(link), far)
}

fn facts(error: &Error) -> (Code, Execution) {
    (error.code(), error.execution())
}

const GONE: (Code, Execution) = (Code::Unavailable, Execution::Unknown);

#[tokio::test(start_paused = true)]
async fn a_peer_that_is_stopped_is_missed_and_its_calls_end() {
    let (channel, far) = greeted(&ConnectOptions::default()).await;
    let began = tokio::time::Instant::now();
    let mut request = post("/hold");
    request.context = CallContext::within(Duration::from_secs(3_600));
    let reply = channel.start(request).await.unwrap();
    let error = reply.await.unwrap_err();
    assert_eq!(facts(&error), GONE, "{error}");
    assert!(error.to_string().contains("silence_max"), "{error}");
    assert_eq!(facts(&channel.closed().await), GONE);
    let silence_max = ConnectionLimits::default().silence_max;
    assert!((silence_max..silence_max * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    drop(far);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_peer_that_is_watched_in_another_way_keeps_its_calls() {
    let (channel, far) = greeted(&ConnectOptions::default().watched()).await;
    let mut request = post("/compute");
    request.context = CallContext::within(Duration::from_secs(3_600));
    let error = channel.call(request).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    drop(far);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_lives_and_has_nothing_to_say_is_kept() {
    let handler = handler_fn(|_| async {
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        Ok(Response::json("{}"))
    });
    let both = joined(FramesConfig::default(), FramesConfig::default(), handler).await;
    let mut request = post("/slow");
    request.context = CallContext::within(Duration::from_secs(7_200));
    both.channel.call(request).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_stops_reading_holds_nobody_beyond_the_deadline() {
    let (channel, mut far) = greeted(&ConnectOptions::default()).await;
    let alive = tokio::spawn(async move {
        // The peer is alive, but does not read.
        while far.write_all(&bare(FrameKind::Heartbeat, 0)).await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let mut large = post("/large");
    large.context = CallContext::within(Duration::from_secs(100));
    large.message.segments.push(Bytes::from(vec![7; 64 << 20]));
    let large = channel.start(large).await.unwrap();
    let small = channel.start(Request::get(CallContext::within(Duration::from_secs(50)), "/small")).await.unwrap();
    for reply in [small, large] {
        let error = reply.await.unwrap_err();
        assert_eq!(facts(&error), (Code::DeadlineExceeded, Execution::Unknown), "{error}");
    }
    channel.close(Duration::ZERO).await.unwrap();
    alive.await.unwrap();
}

#[tokio::test]
async fn a_peer_that_is_killed_is_missed_at_once() {
    let (channel, far) = greeted(&ConnectOptions::default()).await;
    let reply = channel.start(post("/hold")).await.unwrap();
    drop(far);
    assert_eq!(facts(&soon(reply).await.unwrap_err()), GONE);
    assert_eq!(facts(&soon(channel.closed()).await), GONE);
    let error = channel.call(post("/next")).await.unwrap_err();
    assert_eq!(facts(&error), (Code::Unavailable, Execution::NotStarted), "{error}");
}

/// Returns a frame as a correct peer would write it.
fn answer(call: u64, bytes: usize) -> Vec<u8> {
    let mut response = Response::json("{}");
    response.message.segments = vec![Bytes::from(vec![7; bytes])];
    let mut frame = response_frame(call, &response);
    frame.extend_from_slice(b"{}");
    frame.extend_from_slice(&response.message.segments[0]);
    frame.to_vec()
}

#[tokio::test]
async fn a_hostile_server_ends_its_calls_with_a_typed_error() {
    let mut head = bytes::BytesMut::new();
    FrameHeader { kind: FrameKind::Body, length: 5, call: 1 }.write(&mut head);
    let cases = [
        ("garbage", vec![0xff; 100]),
        ("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("a second greeting", greeting_frame(&ConnectionLimits::default()).to_vec()),
        ("a cancel", bare(FrameKind::Cancel, 1).to_vec()),
        ("a body of nothing", head.to_vec()),
        ("more than there is room for", answer(1, 2_000)),
        ("an answer with a damaged header", {
            let mut frame = answer(1, 5);
            frame[16] ^= 1;
            frame
        }),
    ];
    for (what, bytes) in cases {
        let (channel, mut far) = greeted(&ConnectOptions::default()).await;
        let mut request = post("/hold");
        request.context.reply_bytes_max = 1_000;
        let reply = channel.start(request).await.unwrap();
        far.write_all(&bytes).await.unwrap();
        let error = soon(reply).await.unwrap_err();
        assert_eq!(facts(&error), (Code::DataLoss, Execution::Unknown), "{what}: {error}");
        assert_eq!(soon(channel.closed()).await.code(), Code::DataLoss, "{what}");
    }
}

#[tokio::test]
async fn an_answer_that_is_cut_off_or_comes_twice_is_never_taken_for_one() {
    let (channel, mut far) = greeted(&ConnectOptions::default()).await;
    let reply = channel.start(post("/hold")).await.unwrap();
    let whole = answer(1, 1_000);
    far.write_all(&whole[..whole.len() - 1]).await.unwrap();
    far.shutdown().await.unwrap();
    let error = soon(reply).await.unwrap_err();
    assert_eq!(facts(&error), GONE);
    assert!(error.to_string().contains("middle of an answer"), "{error}");

    let (channel, mut far) = greeted(&ConnectOptions::default()).await;
    let (first, second) = (channel.start(post("/1")).await.unwrap(), channel.start(post("/2")).await.unwrap());
    far.write_all(&[answer(1, 10), answer(1, 11), answer(99, 12), answer(2, 13)].concat()).await.unwrap();
    assert_eq!(soon(first).await.unwrap().message.segments[0].len(), 10);
    assert_eq!(soon(second).await.unwrap().message.segments[0].len(), 13);
}

#[tokio::test]
async fn a_hostile_caller_ends_its_connection_and_nothing_else() {
    let message = Request::get(CallContext::default(), "/x").message;
    let request = |call| request_frame(call, &message).to_vec();
    let greeting = greeting_frame(&ConnectionLimits::default()).to_vec();
    let cases = [
        ("no greeting", request(1)),
        ("garbage", [greeting.clone(), vec![0xee; 64]].concat()),
        ("an answer", [greeting.clone(), answer(1, 1)].concat()),
        ("a number twice", [greeting.clone(), request(3), request(3)].concat()),
        ("a cut request", [greeting.clone(), request(1)[..40].to_vec()].concat()),
    ];
    for (what, bytes) in cases {
        let (mut near, far) = UnixStream::pair().unwrap();
        let listener =
            super::ListenerState::new(FramesConfig::default(), std::sync::Arc::new(tokio::sync::Semaphore::new(9)));
        let handler = std::sync::Arc::new(handler_fn(|_| std::future::pending()));
        let peer = gym_core::message::PeerInfo::default();
        let serving = super::serve(super::Socket::Unix(far), &[], listener.clone(), handler, peer, Default::default());
        let serving = tokio::spawn(serving);
        near.write_all(&bytes).await.unwrap();
        near.shutdown().await.unwrap();
        let error = soon(serving).await.unwrap().unwrap_err();
        assert_eq!(facts(&error), (Code::DataLoss, Execution::Unknown), "{what}: {error}");
        soon(async {
            while listener.calls.available_permits() != 9 {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_server_without_frames_says_that_it_has_none() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = Endpoint::parse(&format!("{FRAMES_SCHEME}://{}", listener.local_addr().unwrap())).unwrap();
    for (answer, code) in [
        (&b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"[..], Code::Unimplemented),
        (&b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nHello, I speak something else"[..], Code::DataLoss),
        (&b"220 mail.example.com ESMTP\r\n"[..], Code::Unavailable),
        (&b""[..], Code::Unavailable),
    ] {
        let connector = FramesConnector::tcp(FramesConfig::default());
        let cx = CallContext::default();
        let options = ConnectOptions::default();
        let (connected, ()) = tokio::join!(connector.connect(&cx, &endpoint, &options), async {
            let (mut peer, _) = listener.accept().await.unwrap();
            let mut asked = [0; 16];
            peer.read_exact(&mut asked).await.unwrap();
            peer.write_all(answer).await.unwrap();
            peer.shutdown().await.unwrap();
            // Reads until the other end has closed.
            let _ = peer.read_to_end(&mut Vec::new()).await;
        });
        let error = connected.unwrap_err();
        assert_eq!(facts(&error), (code, Execution::NotStarted), "{error}");
        assert!(error.to_string().contains(endpoint.as_str()), "{error}");
    }
}

#[tokio::test]
async fn a_socket_file_is_ours_alone_replaced_when_stale_and_removed_at_the_end() {
    let folder = std::env::temp_dir().join(format!("gym-frames-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (path, config) = (folder.join("worker"), FramesConfig::default());
    // A process that was killed leaves its socket file behind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let mut listener = UnixListener::bind(&path, config.clone()).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no draft is left");

    let error = UnixListener::bind(&path, config.clone()).unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    std::fs::write(folder.join("notes"), "text").unwrap();
    let error = UnixListener::bind(folder.join("notes"), config.clone()).unwrap_err();
    assert!(error.code() == Code::AlreadyExists && error.to_string().contains("not a socket"), "{error}");
    let error = UnixListener::bind(folder.join("n".repeat(120)), config.clone()).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.to_string().contains("108"), "{error}");

    // The listener still works after all of this. The first connection only checked whether a process listens.
    let endpoint = listener.endpoints()[0].clone();
    let serving = tokio::spawn(async move {
        loop {
            let handler = std::sync::Arc::new(handler_fn(|request: Request| async move {
                let peer = request.peer.unwrap().address;
                Ok(Response::new(Status::OK, gym_core::Message::text(peer.to_string())))
            }));
            tokio::spawn(listener.accept().await.unwrap().serve(handler, Default::default()));
        }
    });
    let connector = FramesConnector::unix(config);
    let channel =
        soon(connector.connect(&CallContext::default(), &endpoint, &ConnectOptions::default())).await.unwrap();
    let answer = soon(channel.call(post("/who"))).await.unwrap();
    assert_eq!(answer.message.head.to_bytes(), format!("process {}", std::process::id()));
    serving.abort();
    let _ = serving.await;
    assert!(!path.exists());
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Sends `calls` calls from a caller that never reads; returns the error that ends the connection.
async fn never_reading(calls: u64, handler: impl gym_core::Handler) -> Error {
    let (mut near, far) = UnixStream::pair().unwrap();
    let mut limits = ConnectionLimits::default();
    limits.calls_max = 4;
    let config = FramesConfig { limits, ..FramesConfig::default() };
    let listener = super::ListenerState::new(config, std::sync::Arc::new(tokio::sync::Semaphore::new(9)));
    let handler = std::sync::Arc::new(handler);
    let peer = gym_core::message::PeerInfo::default();
    let serving = super::serve(super::Socket::Unix(far), &[], listener, handler, peer, Default::default());
    let serving = tokio::spawn(serving);
    let message = Request::get(CallContext::default(), "/x").message;
    let mut sent = near.write_all(&greeting_frame(&ConnectionLimits::default())).await;
    for call in 1..=calls {
        if sent.is_err() {
            break;
        }
        sent = near.write_all(&request_frame(call, &message)).await;
        // Each call is sent separately: a call that arrives together with others finds no capacity.
        tokio::task::yield_now().await;
    }
    let _ = near.shutdown().await;
    soon(serving).await.unwrap().expect_err("nobody takes what it is to say")
}

#[tokio::test]
async fn a_caller_that_never_reads_is_not_answered_without_end() {
    let answered =
        handler_fn(|_| async { Ok(Response::new(Status::OK, gym_core::Message::text("x".repeat(4 << 10)))) });
    let error = never_reading(9_000, answered).await;
    assert_eq!(facts(&error), (Code::ResourceExhausted, Execution::Unknown), "{error}");
    let refused = handler_fn(|_| std::future::pending());
    let error = never_reading(90_000, refused).await;
    assert_eq!(facts(&error), (Code::ResourceExhausted, Execution::Unknown), "{error}");
}
