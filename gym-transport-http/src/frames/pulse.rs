//! Is the peer still there? A crash closes the socket; a peer that is stopped, or cut off, is only silent.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use gym_core::{Code, Error};
use tokio::time::sleep;

use super::layout::Greeting;
use super::outbox::Outbox;
use super::pool::LandingPool;

/// Signs of life within the time after which an end gives up: two may be lost in a busy moment.
const BEATS: u32 = 3;

/// Whether anything has come since somebody looked last.
#[derive(Debug, Default)]
pub(super) struct Heard(AtomicBool);

impl Heard {
    pub(super) fn set(&self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends signs of life, and ends when the peer has sent nothing for `silence_max`.
///
/// Beats are counted, not time: an end that was itself stopped for a minute first reads what has come meanwhile.
pub(super) async fn heartbeat(
    outbox: &Outbox,
    heard: &Heard,
    pool: &LandingPool,
    silence_max: Duration,
    theirs: &Greeting,
) -> Error {
    let beat = silence_max.min(theirs.silence_max) / BEATS;
    let beats_max = silence_max.as_nanos().div_ceil(beat.as_nanos().max(1));
    let mut silent = 0;
    loop {
        sleep(beat).await;
        outbox.post_heartbeat();
        pool.trim(silence_max);
        silent = if heard.0.swap(false, Relaxed) { 0 } else { silent + 1 };
        if silent >= beats_max {
            return Error::unknown(
                Code::Unavailable,
                format!("the peer has been silent for longer than silence_max = {silence_max:?}"),
            );
        }
    }
}
