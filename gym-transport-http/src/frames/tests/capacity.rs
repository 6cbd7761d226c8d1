//! Capacity after calls were cancelled.

use gym_core::testing::{Storm, with_segment};
use gym_core::transport::mux::ConnectionLimits;

use super::{CALLS_MAX, LONG_TIMEOUT, joined, post, soon};
use crate::frames::config::FramesConfig;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_dropped_anywhere_leave_nothing_in_flight_and_the_pools_whole() {
    let storm = Storm::default();
    let mut limits = ConnectionLimits::default();
    limits.calls_max = 64;
    limits.request_bytes_in_flight_max = 4 << 20;
    let config = FramesConfig { limits, ..FramesConfig::default() };
    let both = joined(config.clone(), config, storm.handler()).await;
    storm.run(&both.channel).await;
    // All earlier messages are settled once a last call is answered, or soon after.
    soon(both.channel.call(with_segment(post("/echo"), 3 << 20))).await.unwrap();
    soon(async {
        while both.listener.calls.available_permits() != CALLS_MAX
            || both.listener.pool.bytes().1 != 0
            || both.caller_pool.bytes().1 != 0
        {
            tokio::task::yield_now().await;
        }
    })
    .await;
    both.channel.close(LONG_TIMEOUT).await.expect("no call is left");
    soon(both.serving).await.unwrap().unwrap();
    assert_eq!(
        (both.listener.pool.bytes(), both.caller_pool.bytes().1),
        ((0, 0), 0),
        "an ended connection keeps nothing"
    );
}
