//! Is the peer still there? A crash closes a socket; a peer that is stopped, or cut off, is only silent.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::sleep;

use super::limits::{Greeting, Limits};
use super::outbox::Outbox;
use crate::error::{Code, Error};

/// Signs of life within the time after which an end gives up: two may be lost in a busy moment.
const BEATS: u32 = 3;
/// No end gives up sooner, whatever its limits say, so that none need send more than ten signs of life a second to a peer that claims to
/// bear less.
const SILENCE_MIN: Duration = Duration::from_millis(300);

/// Whether anything has come since somebody looked last.
#[derive(Debug, Default)]
pub struct Heard(AtomicBool);

impl Heard {
    /// Something has come.
    pub fn set(&self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends signs of life, and ends when the peer has sent nothing for `silence_max`. `each_beat` is called at every beat, three
/// or more times in the shorter `silence_max` of both ends, which counts as 300 ms at least: for what is to be looked after now and then.
///
/// Beats are counted, not time: an end that was itself stopped for a minute first reads what has come meanwhile.
pub async fn heartbeat(
    outbox: &impl Outbox,
    heard: &Heard,
    ours: &Limits,
    theirs: &Greeting,
    each_beat: impl Fn(),
) -> Error {
    let silence_max = ours.silence_max.max(SILENCE_MIN);
    let beat = silence_max.min(theirs.silence_max.max(SILENCE_MIN)) / BEATS;
    let beats_max = silence_max.as_nanos().div_ceil(beat.as_nanos());
    let mut silent = 0;
    loop {
        sleep(beat).await;
        outbox.post_heartbeat();
        each_beat();
        silent = if heard.0.swap(false, Relaxed) { 0 } else { silent + 1 };
        if silent >= beats_max {
            return Error::unknown(
                Code::Unavailable,
                format!("the peer has been silent for longer than silence_max = {silence_max:?}"),
            );
        }
    }
}
