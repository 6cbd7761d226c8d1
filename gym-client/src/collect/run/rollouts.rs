//! Rollouts as a stream, for a program that uses them as they come.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use futures_util::stream::{Stream, StreamExt};
use gym_core::base::CancelOnDrop;
use gym_core::rollout::{FailureClass, Outcome, TaskKey};
use gym_core::{CancelToken, RawObject, Result, World};
use tokio::sync::mpsc;

use crate::client::ServerClient;
use crate::collect::ledger::StreamLedger;
use crate::collect::run::driver::{Driver, DriverOptions};
use crate::collect::run::outcome::reward_of;
use crate::collect::run::row::RolloutRow;

/// One rollout that is over.
#[derive(Clone, Debug)]
pub struct Rollout {
    /// Which.
    pub key: TaskKey,
    /// The scored row, or the row of the failure and its class: a failure is never a reward.
    pub row: Result<RawObject, (FailureClass, RawObject)>,
}

impl Rollout {
    /// Its reward, if it has one.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        self.row.as_ref().ok().and_then(reward_of)
    }
}

/// Rollouts as they end. Nothing more is begun while nobody takes them, and dropping it stops those under way.
#[derive(Debug)]
pub struct Rollouts {
    ended: mpsc::Receiver<Result<(TaskKey, Outcome)>>,
    _stop: CancelOnDrop,
}

impl Rollouts {
    /// Runs each task once on `server`, as `agent`.
    #[must_use]
    pub fn run(
        client: ServerClient,
        world: &World,
        (server, agent): (&str, &str),
        tasks: impl Stream<Item = Result<RawObject>> + Send + 'static,
        options: DriverOptions,
    ) -> Self {
        let (sender, ended) = mpsc::channel(options.concurrency.max(1));
        let stop = CancelToken::new();
        let ledger = Arc::new(StreamLedger::new(sender.clone()));
        let driver = Arc::new(Driver::new(client, ledger, world, options));
        let (server, agent): (Arc<str>, Arc<str>) = (server.into(), agent.into());
        let rows = tasks.enumerate().map(move |(at, task)| row(at, &task?, Arc::clone(&server), Arc::clone(&agent)));
        let told = stop.clone();
        let collecting = async move {
            if let Err(error) = driver.run(Box::pin(rows), told).await {
                let _ = sender.send(Err(error)).await;
            }
        };
        tokio::spawn(collecting.boxed());
        Self { ended, _stop: stop.drop_guard() }
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

impl Rollouts {
    /// The next that is over.
    pub async fn next(&mut self) -> Option<Result<Rollout>> {
        self.ended.recv().await.map(|ended| ended.map(rollout))
    }
}

fn rollout((key, outcome): (TaskKey, Outcome)) -> Rollout {
    let row = match outcome {
        Outcome::Completed(row) => Ok(row),
        Outcome::Failed { class, row, .. } => Err((class, row)),
    };
    Rollout { key, row }
}

impl Stream for Rollouts {
    type Item = Result<Rollout>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.ended.poll_recv(cx).map(|ended| ended.map(|ended| ended.map(rollout)))
    }
}
