//! Decides which ranks take calls, and which can still answer one.

use gym_core::base::process::unusual_state;
use gym_core::group::RankState;
use gym_core::group::layout::Rank;
use gym_core::group::{GroupView, RankView};
use gym_core::message::Incarnation;
use gym_core::transport::Channel;
use gym_core::{Code, Error, Result};

use crate::call::monitor::RankMonitor;

/// Returns the channel to a rank, if the rank accepts calls.
pub(super) fn open<'v>(member: &'v RankView, monitor: Option<&dyn RankMonitor>) -> Result<&'v Channel> {
    match &member.channel {
        Some(channel) if member.state == RankState::Healthy => Ok(channel),
        _ if member.state == RankState::Suspect => {
            let text = format!("the rank is suspect and takes no calls: {}", silence(member, monitor));
            Err(Error::not_started(Code::Unavailable, text))
        }
        _ => Err(Error::not_started(Code::Unavailable, format!("the rank is {} and takes no calls", member.state))),
    }
}

/// Returns `true` if a call that was sent to this incarnation can still be answered, as far as is known. A suspect rank has been silent for as long as a
/// call may wait for it.
pub(super) fn may_answer(view: &GroupView, rank: Rank, incarnation: Incarnation) -> bool {
    view.member(rank).is_some_and(|member| {
        let alive = matches!(member.state, RankState::Healthy | RankState::Stale | RankState::Starting);
        member.incarnation == incarnation && alive
    })
}

/// Returns `true` if this incarnation has been silent for so long that the rank is suspect.
pub(super) fn is_silent(member: &RankView, incarnation: Incarnation) -> bool {
    member.incarnation == incarnation && member.state == RankState::Suspect
}

/// Returns the error of a rank that can no longer reply.
pub(super) fn no_answer(
    view: &GroupView,
    rank: Rank,
    incarnation: Incarnation,
    monitor: Option<&dyn RankMonitor>,
) -> Error {
    let now = match view.member(rank) {
        None => "gone",
        Some(member) if is_silent(member, incarnation) => {
            return Error::unknown(Code::Unavailable, silence(member, monitor));
        }
        Some(member) if member.incarnation == incarnation => member.state.as_str(),
        Some(_) => "replaced",
    };
    Error::unknown(Code::Unavailable, format!("the rank is {now}; it has not answered"))
}

/// Describes the silence of a suspect rank, with the state of its process if that is on this machine.
fn silence(member: &RankView, monitor: Option<&dyn RankMonitor>) -> String {
    let (rank, incarnation) = (member.rank, member.incarnation);
    let mut text = match monitor.and_then(|monitor| monitor.silent_for(rank, incarnation)) {
        Some(silence) => format!("no heartbeat for {:.1} s", silence.as_secs_f64()),
        None => "no heartbeat".to_owned(),
    };
    if let Some(pid) = monitor.and_then(|monitor| monitor.pid(rank, incarnation)) {
        match unusual_state(pid) {
            Some(state) => text.push_str(&format!("; process {pid} {state}")),
            None => {
                text.push_str(&format!("; process {pid} runs: its machine is overloaded, or its memory is swapped out"))
            }
        }
    }
    text
}
