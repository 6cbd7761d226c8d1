//! Bounds: calls and bytes on their way, and what is left when calls are given up.

use std::sync::Arc;

use bytes::Bytes;
use gym_core::mux::Limits;
use gym_core::testing::{Storm, with_segment};
use gym_core::{Request, Response, Status, handler_fn};

use super::super::config::FramesConfig;
use super::{CALLS_MAX, FAR, joined, post, soon};

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
        let mut request = with_segment(post("/next"), if call % 50 == 0 { 3 << 20 } else { call });
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
    let calls = (0..32).map(|_| both.channel.call(with_segment(post("/echo"), 3 << 20)));
    for answer in soon(futures_util::future::join_all(calls)).await {
        assert_eq!(answer.unwrap().message.segments[0].len(), 3 << 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_dropped_anywhere_leave_nothing_in_flight_and_the_pools_whole() {
    let storm = Storm::default();
    let limits = Limits { calls_max: 64, request_bytes_in_flight_max: 4 << 20, ..Limits::default() };
    let config = FramesConfig { limits, ..FramesConfig::default() };
    let both = joined(config.clone(), config, storm.handler()).await;
    storm.rage(&both.channel).await;
    // Everything that was sent before is settled once a last call is answered, or soon after.
    soon(both.channel.call(with_segment(post("/echo"), 3 << 20))).await.unwrap();
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
