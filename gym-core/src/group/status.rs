//! What the hosts of a group's ranks say of themselves: never waits for a worker.

use futures_util::future::join_all;

use crate::channel::Channel;
use crate::context::CallContext;
use crate::error::{Code, Error, Result};
use crate::group::GroupView;
use crate::host::{STATUS_ROUTE, WorkerStatus};
use crate::message::Request;

pub(crate) async fn ask_all(view: &GroupView, cx: &CallContext) -> Vec<Result<WorkerStatus>> {
    join_all(view.members().iter().map(|member| async {
        match &member.channel {
            Some(channel) => ask(channel, cx).await,
            None => {
                let why = format!("rank {} is {} and has no address", member.rank, member.state);
                Err(Error::not_started(Code::Unavailable, why))
            }
        }
    }))
    .await
}

async fn ask(channel: &Channel, cx: &CallContext) -> Result<WorkerStatus> {
    let response = channel.call(Request::get(cx.child(), STATUS_ROUTE)).await?.into_result()?;
    serde_json::from_slice(&response.message.head.to_bytes())
        .map_err(|error| Error::finished(Code::DataLoss, "no status of a worker").caused_by(error))
}
