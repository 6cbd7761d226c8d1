//! Bounds: calls and bytes on their way, and what is left when calls are given up.

use std::sync::Arc;

use bytes::Bytes;
use gym_core::mux::Limits;
use gym_core::{Request, Response, Status, handler_fn};

use super::super::config::FramesConfig;
use super::{CALLS_MAX, FAR, joined, post, soon};

fn with_segment(route: &'static str, bytes: usize) -> Request {
    let mut request = post(route);
    request.message.segments.push(Bytes::from(vec![7; bytes]));
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_arrive_in_the_order_in_which_they_were_sent_whatever_their_size() {
    let arrived = Arc::new(std::sync::Mutex::new(Vec::new()));
    let order = Arc::clone(&arrived);
    let handler = handler_fn(move |request: Request| {
        order.lock().unwrap().push(request.message.head.to_bytes());
        async move { Ok(Response::new(Status::OK, request.message)) }
    });
    let both = joined(FramesConfig::default(), FramesConfig::default(), handler).await;
    let mut replies = Vec::new();
    let sent: Vec<_> = (0..500).map(|call| Bytes::from(call.to_string())).collect();
    for (call, text) in sent.iter().enumerate() {
        let mut request = with_segment("/next", if call % 50 == 0 { 3 << 20 } else { call });
        request.message.head = text.clone().into();
        replies.push(both.channel.start(request).await.unwrap());
    }
    // The last first.
    for (reply, text) in replies.into_iter().zip(&sent).rev() {
        assert_eq!(soon(reply).await.unwrap().message.head.to_bytes(), text);
    }
    assert_eq!(*arrived.lock().unwrap(), sent);
}

#[tokio::test]
async fn full_ends_do_not_block_each_other() {
    // Each end takes one large message at a time; both directions are full at once.
    let handler = handler_fn(|request: Request| async move { Ok(Response::new(Status::OK, request.message)) });
    let limits = Limits { request_bytes_in_flight_max: 4 << 20, calls_max: 8, ..Limits::default() };
    let config = FramesConfig { limits, ..FramesConfig::default() };
    let both = joined(config.clone(), config, handler).await;
    let calls = (0..32).map(|_| both.channel.call(with_segment("/echo", 3 << 20)));
    for answer in soon(futures_util::future::join_all(calls)).await {
        assert_eq!(answer.unwrap().message.segments[0].len(), 3 << 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_dropped_anywhere_leave_nothing_in_flight_and_the_pools_whole() {
    const CALLS: u64 = 10_000;
    let handler = handler_fn(|request: Request| async move {
        if request.route.path() == "/hold" {
            request.context.cancel.cancelled().await;
        }
        Ok(Response::new(Status::OK, request.message))
    });
    let limits = Limits { calls_max: 64, request_bytes_in_flight_max: 4 << 20, ..Limits::default() };
    let config = FramesConfig { limits, ..FramesConfig::default() };
    let both = joined(config.clone(), config, handler).await;
    // A fixed seed, so that a failure comes again.
    let mut random = 0x2545_F491_4F6C_DD17_u64;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let mut kept = Vec::new();
    for call in 0..CALLS {
        let bytes = if call % 20 == 0 { 300_000 } else { usize::try_from(next(3_000)).unwrap() };
        let request = with_segment(if next(2) == 0 { "/hold" } else { "/echo" }, bytes);
        let mut started = Box::pin(both.channel.start(request));
        let Some(mut reply) = polled(&mut started, next(3)).await else { continue };
        match next(10) {
            0 => kept.push(reply),
            polls => drop(polled(&mut reply, polls).await),
        }
        if kept.len() > 16 {
            drop(kept.swap_remove(usize::try_from(next(16)).unwrap()));
        }
    }
    drop(kept);
    // Everything that was sent before is settled once a last call is answered, or soon after.
    soon(both.channel.call(with_segment("/echo", 3 << 20))).await.unwrap();
    soon(async {
        while both.hall.calls.available_permits() != CALLS_MAX
            || both.hall.pool.bytes().1 != 0
            || both.caller_pool.bytes().1 != 0
        {
            tokio::task::yield_now().await;
        }
    })
    .await;
    both.channel.close(FAR).await.expect("no call is left");
    soon(both.serving).await.unwrap().unwrap();
    assert_eq!((both.hall.pool.bytes(), both.caller_pool.bytes().1), ((0, 0), 0), "an ended connection keeps nothing");
}

/// What a future gives within so many polls.
async fn polled<T, E>(future: &mut (impl Future<Output = Result<T, E>> + Unpin), polls: u64) -> Option<T> {
    for _ in 0..=polls {
        if let std::task::Poll::Ready(done) = futures_util::poll!(&mut *future) {
            return done.ok();
        }
        tokio::task::yield_now().await;
    }
    None
}
