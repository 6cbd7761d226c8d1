//! Cases of order, and of capacity in both directions at the same time.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use parking_lot::Mutex;

use super::{Fixture, Make, TransportSetup, far, post, run_cases};
use crate::message::{Request, Response, Status};
use crate::testing::with_segment;
use crate::transport::{Handler, handler_fn};

/// Far more than a transport copies or sends in one piece.
const LARGE: usize = 3 << 20;

pub(super) async fn run(make: Make<'_>) {
    run_cases!(make;
        calls_arrive_in_the_order_in_which_they_were_sent_whatever_their_size,
        full_ends_do_not_block_each_other,
    );
}

/// Reports each call and responds with its message.
fn echo(arrived: impl Fn(&Request) + Send + Sync + 'static) -> impl Handler {
    handler_fn(move |request: Request| {
        arrived(&request);
        async move { Ok(Response::new(Status::OK, request.message)) }
    })
}

async fn calls_arrive_in_the_order_in_which_they_were_sent_whatever_their_size(make: Make<'_>) {
    let arrived = Arc::new(Mutex::new(Vec::new()));
    let order = Arc::clone(&arrived);
    let handler = echo(move |request| {
        order.lock().push(request.message.head.to_bytes());
    });
    let fixture = Fixture::with_calls_max(make, 1_000, handler).await;
    let channel = fixture.channel().await;
    let mut replies = Vec::new();
    let sent: Vec<_> = (0..500).map(|call| Bytes::from(call.to_string())).collect();
    for (call, text) in sent.iter().enumerate() {
        let mut request = with_segment(post(far(), "/next"), if call % 50 == 0 { LARGE } else { call });
        request.message.head = text.clone().into();
        replies.push(channel.start(request).await.expect("it is handed over"));
    }
    // In reverse order.
    for (reply, text) in replies.into_iter().zip(&sent).rev() {
        assert_eq!(reply.await.expect("an answer").message.head.to_bytes(), text);
    }
    assert_eq!(*arrived.lock(), sent);
}

async fn full_ends_do_not_block_each_other(make: Make<'_>) {
    // Each end accepts one large message at a time, so both directions are full at the same time.
    let setup = TransportSetup { calls_max: 8, request_bytes_in_flight_max: LARGE + (1 << 20) };
    let fixture = Fixture::with(make, setup, echo(|_| ())).await;
    let channel = fixture.channel().await;
    let calls = (0..32).map(|_| channel.call(with_segment(post(far(), "/echo"), LARGE)));
    for answer in join_all(calls).await {
        assert_eq!(answer.expect("an answer").message.segments[0].len(), LARGE);
    }
}
