//! What the ranks of a group are doing, asked of their hosts: never waits for a worker.

use std::time::Duration;

use futures_util::future::join_all;

use crate::channel::Channel;
use crate::context::{CallContext, Incarnation};
use crate::error::{Error, Result};
use crate::group::{GroupView, RankState};
use crate::host::{RunningCall, STATUS_ROUTE, WorkerStatus};
use crate::layout::Rank;
use crate::message::Request;

/// What is known of one rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct RankStatus {
    /// Which rank.
    pub rank: Rank,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// How the group sees it.
    pub state: RankState,
    /// What its host says; the error of one that does not say.
    pub host: Result<WorkerStatus>,
}

/// A rank that lives and does not move.
#[derive(Debug)]
#[non_exhaustive]
pub struct StuckRank {
    /// Which rank.
    pub rank: Rank,
    /// The call that does not move; `None` when the host itself does not answer.
    pub call: Option<RunningCall>,
}

pub(crate) async fn ask_all(view: &GroupView, cx: &CallContext) -> Vec<RankStatus> {
    join_all(view.members().iter().map(|member| async {
        let host = match &member.channel {
            Some(channel) => ask(channel, cx).await,
            None => Err(Error::not_started(
                crate::error::Code::Unavailable,
                format!("the rank is {} and has no address", member.state),
            )),
        };
        RankStatus { rank: member.rank, incarnation: member.incarnation, state: member.state, host }
    }))
    .await
}

async fn ask(channel: &Channel, cx: &CallContext) -> Result<WorkerStatus> {
    let response = channel.call(Request::get(cx.child(), STATUS_ROUTE)).await?.into_result()?;
    serde_json::from_slice(&response.message.head.to_bytes())
        .map_err(|error| Error::finished(crate::error::Code::DataLoss, "no status of a worker").caused_by(error))
}

/// A rank is stuck when a call of its runs and has told of no progress for `still`, or when it should answer and does not. One
/// that is idle or dead is not.
pub(crate) fn stuck(statuses: Vec<RankStatus>, still: Duration) -> Vec<StuckRank> {
    let still_ms = u64::try_from(still.as_millis()).unwrap_or(u64::MAX);
    let stuck = |status: RankStatus| match status.host {
        Ok(host) => {
            let call = host.running.into_iter().find(|call| call.still_ms >= still_ms)?;
            Some(StuckRank { rank: status.rank, call: Some(call) })
        }
        Err(_) if matches!(status.state, RankState::Healthy | RankState::Suspect | RankState::Stale) => {
            Some(StuckRank { rank: status.rank, call: None })
        }
        Err(_) => None,
    };
    statuses.into_iter().filter_map(stuck).collect()
}
