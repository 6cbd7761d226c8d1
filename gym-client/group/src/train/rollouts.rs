//! A training environment whose scores come from real rollouts: a named server runs each row.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use gym_client::ServerClient;
use gym_client::collect::ledger::MemoryLedger;
use gym_client::collect::reward_of;
use gym_client::collect::{Driver, DriverOptions, RolloutRow};
use gym_core::group::{Batch, JsonRows, Offsets};
use gym_core::rollout::{Outcome, TaskKey};
use gym_core::{CallContext, CancelToken, Error, Execution, RawObject, Result, World};

use crate::train::{EnvironmentInterface, EnvironmentReturn};

/// The JSON column with the rows that [`RolloutEnvironment`] runs.
pub const TASK_COLUMN: &str = "task";
/// The JSON column for the rollouts: the scored row, or `null`.
pub const ROLLOUT_COLUMN: &str = "rollout";

/// Runs the rows of the JSON column `task` on an environment server as the collector does: with bounded concurrency, attempts,
/// deadlines and typed failures. The rollouts are recorded only in memory and returned in the column `rollout`.
#[derive(Clone, Debug)]
pub struct RolloutEnvironment {
    client: ServerClient,
    world: World,
    server: Arc<str>,
    agent: Arc<str>,
    options: DriverOptions,
}

impl RolloutEnvironment {
    /// Creates an environment that runs rollouts of `agent` on the environment server (or agent) named `server`.
    #[must_use]
    pub fn new(client: ServerClient, world: &World, server: &str, agent: &str) -> Self {
        Self {
            client,
            world: world.clone(),
            server: server.into(),
            agent: agent.into(),
            options: DriverOptions::default(),
        }
    }

    /// Replaces concurrency, attempts and deadlines. An attempt also ends at the step's own deadline.
    #[must_use]
    pub fn with_options(mut self, options: DriverOptions) -> Self {
        self.options = options;
        self
    }

    /// Returns row `index` as it is sent to the server.
    fn row(&self, index: usize, text: Bytes) -> Result<RolloutRow> {
        let key = TaskKey::new(u32::try_from(index).expect("a batch has fewer rows"), 0);
        let task = RawObject::parse(text)
            .map_err(|error| Error::from(error).about(format!("row {index} of column `{TASK_COLUMN}`")))?;
        let row = task
            .edit()
            .set("_ng_task_index", key.task_index.to_string())
            .set("_ng_rollout_index", key.rollout_index.to_string())
            .set_value("agent_ref", &serde_json::json!({ "type": "responses_api_agents", "name": &*self.agent }))?
            .to_object()?;
        Ok(RolloutRow { key, agent: Arc::clone(&self.agent), server: Arc::clone(&self.server), result_type: None, row })
    }
}

impl EnvironmentInterface for RolloutEnvironment {
    async fn step(&self, cx: &CallContext, generations: &Batch) -> Result<EnvironmentReturn> {
        let tasks = generations.column(TASK_COLUMN)?.json()?;
        let rows: Result<Vec<RolloutRow>> = (0..tasks.rows()).map(|index| self.row(index, tasks.row(index)?)).collect();
        let rows = rows?;
        let count = rows.len();

        let ledger = Arc::new(MemoryLedger::new());
        let mut options = self.options.clone();
        options.attempt_timeout = options.attempt_timeout.min(cx.remaining());
        let driver = Arc::new(Driver::new(self.client.clone(), ledger.clone(), &self.world, options));
        let run = driver.run(stream::iter(rows.into_iter().map(Ok)), CancelToken::new());
        cx.bound(Execution::Unknown, run).await?;

        let mut outcomes = ledger.take_outcomes();
        let mut rewards = Vec::with_capacity(count);
        let mut rollouts = Vec::with_capacity(count);
        for index in 0..count {
            let rollout = match outcomes.remove(&TaskKey::new(index as u32, 0)) {
                Some(Outcome::Completed(row)) => Some(row),
                Some(Outcome::Failed { class, .. }) => {
                    tracing::warn!(row = index, %class, agent = &*self.agent, "a rollout failed; its row is masked");
                    None
                }
                None => None,
            };
            rewards.push(rollout.as_ref().and_then(reward_of).map(|reward| reward as f32));
            rollouts.push(rollout.map_or_else(|| Bytes::from_static(b"null"), RawObject::into_text));
        }
        let lengths = Offsets::from_lengths(rollouts.iter().map(Bytes::len));
        let rollouts = JsonRows::new(rollouts.concat().into(), lengths)?;
        Ok(EnvironmentReturn { rewards, columns: Batch::empty().with(ROLLOUT_COLUMN, rollouts)? })
    }
}
