//! Detection of unresponsive peers. A crash closes the socket; a peer that is stopped or cut off only stops sending.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::sleep;

use super::limits::{ConnectionLimits, Handshake};
use super::sender::MessageSender;
use crate::base::error::{Code, Error};

/// Number of heartbeats within the time after which an end gives up: a busy peer may lose two.
const HEARTBEATS: u32 = 3;
/// Minimum time after which an end gives up, regardless of its limits. It prevents an end from sending more than ten heartbeats a
/// second to a peer that announces a shorter time.
const SILENCE_MIN: Duration = Duration::from_millis(300);
/// A time that no end waits out. In a handshake, the longest one is `u64::MAX` milliseconds.
const ENDLESS_TIMEOUT: Duration = Duration::from_millis(u64::MAX);
/// Stands for [`ENDLESS_TIMEOUT`] in the pause between two heartbeats, which also keep a connection open across routers.
const SILENCE_USUAL: Duration = Duration::from_secs(15);

/// Records whether the peer has sent anything since the last check.
#[derive(Debug, Default)]
pub struct PeerActivity(AtomicBool);

impl PeerActivity {
    /// Records that something was received.
    pub fn record(&self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends heartbeats, and returns an error when the peer has sent nothing for `silence_max`. Never returns if this time has no end at one of both ends.
///
/// Calls `each_heartbeat` at every heartbeat, for periodic checks of the transport. That is at least three times in the shorter
/// `silence_max` of both ends, which counts as at least 300 ms, and as 15 s if it has no end.
///
/// The function counts heartbeats, not time: an end that was itself stopped for a minute first reads the data that has arrived
/// meanwhile.
pub async fn heartbeat(
    sender: &impl MessageSender,
    activity: &PeerActivity,
    ours: &ConnectionLimits,
    theirs: &Handshake,
    each_heartbeat: impl Fn(),
) -> Error {
    let endless = ours.silence_max.max(theirs.silence_max) >= ENDLESS_TIMEOUT;
    let bounded = |silence: Duration| if silence >= ENDLESS_TIMEOUT { SILENCE_USUAL } else { silence.max(SILENCE_MIN) };
    let silence_max = bounded(ours.silence_max);
    let interval = silence_max.min(bounded(theirs.silence_max)) / HEARTBEATS;
    let intervals_max = if endless { u128::MAX } else { silence_max.as_nanos().div_ceil(interval.as_nanos()) };
    let mut silent = 0;
    loop {
        sleep(interval).await;
        sender.post_heartbeat();
        each_heartbeat();
        silent = if activity.0.swap(false, Relaxed) { 0 } else { silent + 1_u128 };
        if silent >= intervals_max {
            return Error::unknown(
                Code::Unavailable,
                format!("the peer has been silent for longer than silence_max = {silence_max:?}"),
            );
        }
    }
}
