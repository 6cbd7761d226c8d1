//! Streams the rows of the materialized inputs file to the driver.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt as _};
use gym_core::rollout::TaskKey;
use gym_core::{Error, Result};
use tokio::sync::mpsc;

use crate::collect::collector::{BUFFER_BYTES, invalid, open};
use crate::collect::input::{InputError, MaterializedRow, MaterializedRows};
use crate::collect::names::ServerNames;
use crate::collect::resume::offsets::RowOffsets;
use crate::collect::run::{Driver, RolloutRow};

/// Rows that the reader sends in one group: waking another thread for each row would cost as much as reading the row.
const GROUP_ROWS: usize = 64;

/// Groups that are read ahead of the rollouts in flight: enough that no rollout waits for the reader, few enough for
/// memory.
const GROUPS_AHEAD: usize = 4;

/// Selects the rows of a resumed collection that are not done.
pub(super) struct OpenRows {
    pub(super) offsets: RowOffsets,
    /// Counts the rows that are done.
    pub(super) driver: Arc<Driver>,
}

/// Streams the rows of a materialized file, each with the server that runs it: those that are open, or all.
pub(super) fn read_rows(
    path: PathBuf,
    names: ServerNames,
    open_rows: Option<OpenRows>,
) -> impl futures_util::Stream<Item = Result<RolloutRow>> + Unpin {
    let (sender, receiver) = mpsc::channel(GROUPS_AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut resolve = RowRouter { names, known: BTreeMap::new() };
        let file = match open(&path) {
            Ok(file) => file,
            Err(error) => return drop(sender.blocking_send(vec![Err(error)])),
        };
        let name = path.display().to_string();
        let rows: Box<dyn Iterator<Item = Result<MaterializedRow, InputError>>> = match open_rows {
            Some(OpenRows { offsets, driver }) => Box::new(offsets.open_rows(file, name, move |key| driver.skips(key))),
            None => Box::new(MaterializedRows::new(BufReader::with_capacity(BUFFER_BYTES, file), name)),
        };
        let mut rows = rows.map(|row| row.map_err(|error| invalid(&error)).and_then(|row| resolve.row(row)));
        loop {
            let mut group = Vec::with_capacity(GROUP_ROWS);
            // Reading stops after an error.
            while group.len() < GROUP_ROWS && !group.last().is_some_and(Result::is_err) {
                let Some(row) = rows.next() else { break };
                group.push(row);
            }
            let ends = group.len() < GROUP_ROWS || group.last().is_some_and(Result::is_err);
            // The receiver was dropped: the run was stopped.
            if sender.blocking_send(group).is_err() || ends {
                return;
            }
        }
    });
    let groups =
        stream::unfold(receiver, |mut receiver| async move { receiver.recv().await.map(|group| (group, receiver)) });
    Box::pin(groups.flat_map(stream::iter))
}

/// Caches the server of each agent, so that each agent is looked up once.
struct RowRouter {
    names: ServerNames,
    known: BTreeMap<RouteKey, ServerRoute>,
}

/// The agent and the environment server that a row names.
type RouteKey = (Option<String>, Option<String>);

#[derive(Clone)]
struct ServerRoute {
    agent: Arc<str>,
    server: Arc<str>,
    result_type: Arc<str>,
}

impl RowRouter {
    fn row(&mut self, row: MaterializedRow) -> Result<RolloutRow> {
        let place = || format!("materialized row {}", row.line);
        let key = |value: i64| {
            u32::try_from(value).map_err(|_| {
                Error::invalid(format!("index {value} is out of range; use 0 to {}", u32::MAX)).about(place())
            })
        };
        let key = TaskKey::new(key(row.key.task_index)?, key(row.key.rollout_index)?);
        let asked = (row.agent, row.environment_server);
        let route = match self.known.get(&asked) {
            Some(route) => route.clone(),
            None => {
                let (server, kind) =
                    match &asked {
                        (_, Some(server)) => (server.clone(), self.names.environment(server)?),
                        (Some(agent), None) => self.names.server_of_agent(agent)?,
                        (None, None) => return Err(Error::invalid(
                            "the row has neither agent_ref nor _ng_environment_server; collect again with --overwrite",
                        )
                        .about(place())),
                    };
                let agent = asked.0.as_deref().unwrap_or(&server).into();
                let route = ServerRoute { agent, server: server.as_str().into(), result_type: kind.as_str().into() };
                self.known.insert(asked, route.clone());
                route
            }
        };
        let ServerRoute { agent, server, result_type } = route;
        Ok(RolloutRow { key, agent, server, result_type: Some(result_type), row: row.row })
    }
}
