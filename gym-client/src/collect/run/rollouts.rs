//! Rollouts as a stream, for programs that use each rollout as soon as it ends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use futures_util::stream::{Stream, StreamExt};
use gym_core::rollout::TaskKey;
use gym_core::{CancelToken, RawObject, Result, World};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::client::ServerClient;
use crate::collect::ledger::StreamLedger;
use crate::collect::run::driver::{Driver, DriverOptions, FailFast};
use crate::collect::run::rollout::{Rollout, RolloutSender};
use crate::collect::run::row::RolloutRow;

/// A stream of rollouts in the order in which they end.
///
/// The stream is bounded: while the program takes no rollout, at most [`DriverOptions::concurrency`] ended ones wait, and no
/// further rollouts start. Dropping the stream cancels the rollouts in flight at once.
///
/// An item is an error if the rows cannot be read or a task of the collector panics; the stream then ends.
///
/// ```
/// use gym_client::collect::Rollouts;
/// use gym_core::Result;
///
/// async fn rewards(mut rollouts: Rollouts) -> Result<Vec<f64>> {
///     let mut rewards = Vec::new();
///     while let Some(rollout) = rollouts.next().await {
///         rewards.extend(rollout?.reward());
///     }
///     Ok(rewards)
/// }
/// ```
#[derive(Debug)]
pub struct Rollouts {
    ended: mpsc::Receiver<Result<Rollout>>,
    /// The driver's task, aborted on drop together with all calls in flight.
    _driver: JoinSet<()>,
}

impl Rollouts {
    /// Runs each task once on `server`, as `agent`, and ignores [`DriverOptions::fail_fast`]. Must be called within a tokio runtime.
    #[must_use]
    pub fn run(
        client: ServerClient,
        world: &World,
        (server, agent): (&str, &str),
        tasks: impl Stream<Item = Result<RawObject>> + Send + 'static,
        options: DriverOptions,
    ) -> Self {
        // The program sees each failure itself, and a stream that ends early would look complete.
        let options = DriverOptions { fail_fast: FailFast::Never, ..options };
        let (sender, ended) = mpsc::channel(options.concurrency.max(1));
        let rollouts = RolloutSender { ledger: Arc::new(StreamLedger::new()), sender: sender.clone() };
        let ledger = Arc::clone(&rollouts.ledger);
        let driver = Arc::new(Driver::new(client, ledger, world, options).sending_to(rollouts));
        let (server, agent): (Arc<str>, Arc<str>) = (server.into(), agent.into());
        let rows = tasks.enumerate().map(move |(at, task)| row(at, &task?, Arc::clone(&server), Arc::clone(&agent)));
        let mut task = JoinSet::new();
        let driving = async move {
            // Ends with the rows or with the stream: dropping the stream aborts this task.
            if let Err(error) = driver.run(Box::pin(rows), CancelToken::new()).await {
                let _ = sender.send(Err(error)).await;
            }
        };
        task.spawn(driving.boxed());
        Self { ended, _driver: task }
    }

    /// Returns the next rollout that has ended, or `None` after the last one.
    ///
    /// # Cancel safety
    /// Cancel safe: no rollout is lost.
    pub async fn next(&mut self) -> Option<Result<Rollout>> {
        self.ended.recv().await
    }
}

impl Stream for Rollouts {
    type Item = Result<Rollout>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.ended.poll_recv(cx)
    }
}

fn row(at: usize, task: &RawObject, server: Arc<str>, agent: Arc<str>) -> Result<RolloutRow> {
    let key = TaskKey::new(u32::try_from(at).unwrap_or(u32::MAX), 0);
    let row = task
        .edit()
        .set("_ng_task_index", key.task_index.to_string())
        .set("_ng_rollout_index", "0")
        .set_value("agent_ref", &serde_json::json!({ "type": "responses_api_agents", "name": &*agent }))?
        .to_object()?;
    Ok(RolloutRow { key, agent, server, result_type: None, row })
}
