//! The collector: one incarnation of its process, which starts run after run.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use gym_client::ServerClient;
use gym_client::collect::ledger::{JsonlLedger, OpenMode, RecoveryReport};
use gym_client::collect::{Driver, OutputFiles, RolloutRow, RunEnd, write_new_file};
use gym_core::base::Files as _;
use gym_core::rollout::{KeyState, Ledger, TaskKey};
use gym_core::testing::{SimFiles, SimNet};
use gym_core::{CallContext, CancelToken, Code, RawObject, Result, World};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::audit::{Audit, AuditedLedger};
use crate::cluster::CollectorPools;
use crate::plan::{COLLECTOR, LateCheck, Plan};

pub(crate) const OUTPUT: &str = "out/rollouts.jsonl";

/// Collector runs after the end of the faults. Each run attempts every open rollout.
const RUNS_AFTER_HEALING: u32 = 12;

/// The signals to and from the collector.
#[derive(Clone, Default)]
pub(crate) struct Orders {
    pub(crate) stop: Arc<Mutex<CancelToken>>,
    pub(crate) healed: CancelToken,
    pub(crate) done: CancelToken,
}

/// Returns the rollouts as the lines of the materialized inputs.
fn lines(plan: &Plan) -> Vec<String> {
    let padding = "x".repeat(plan.padding);
    let keys = (0..plan.tasks).flat_map(|task| (0..plan.repeats).map(move |repeat| (task, repeat)));
    keys.map(|(task, repeat)| {
        format!(
            r#"{{"responses_create_params":{{"input":[]}},"_ng_task_index":{task},"_ng_rollout_index":{repeat},"x":"{padding}"}}"#
        )
    })
    .collect()
}

pub(crate) fn rows(plan: &Plan) -> Vec<RolloutRow> {
    let keys = (0..plan.tasks).flat_map(|task| (0..plan.repeats).map(move |repeat| TaskKey::new(task, repeat)));
    keys.zip(lines(plan))
        .map(|(key, line)| RolloutRow {
            key,
            agent: "agent".into(),
            server: plan.server().into(),
            result_type: None,
            row: RawObject::parse(line).expect("an object"),
        })
        .collect()
}

/// One incarnation of the collector's process. It starts run after run, like a shell loop.
pub(crate) struct Collector {
    pub(crate) client: ServerClient,
    pub(crate) world: World,
    pub(crate) rows: Vec<RolloutRow>,
    pub(crate) plan: Plan,
    pub(crate) late_check: LateCheck,
    pub(crate) net: SimNet,
    pub(crate) audit: Audit,
    pub(crate) files: SimFiles,
    pub(crate) orders: Orders,
    /// Hosts a pool for each run, if workers pull their work.
    pub(crate) pools: Option<CollectorPools>,
}

impl Collector {
    pub(crate) async fn run(mut self) {
        let mut after_healing = 0;
        loop {
            // The state at the start of the run: a run that still met faults does not count.
            let healed = self.orders.healed.is_cancelled();
            let open = self.once().await;
            if self.files.has_ended() {
                // Within a write.
                self.net.note(COLLECTOR, format_args!("has ended"));
                self.files = self.files.next_process();
                self.audit.check_acknowledged(&self.files, Path::new(OUTPUT));
            }
            if healed {
                after_healing += 1;
                if open == Some(0) || after_healing == RUNS_AFTER_HEALING {
                    break;
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.orders.done.cancel();
    }

    /// Runs one collection. Returns the number of open rollouts, or `None` if it is unknown.
    async fn once(&self) -> Option<usize> {
        let cx = CallContext::within(Duration::from_secs(120));
        let (ledger, opened) = match self.prepare(&cx).await {
            Ok(prepared) => prepared,
            Err(error) => {
                self.net.note(COLLECTOR, format_args!("cannot prepare the run: {error:?}"));
                if error.code() == Code::DataLoss {
                    self.audit.violation(format_args!("the ledger does not open again: {error}"));
                }
                return None;
            }
        };
        self.audit.opened(&self.files, Path::new(OUTPUT));
        self.net.note(COLLECTOR, format_args!("opens the ledger: {opened:?}"));
        let ledger = match self.late_check {
            LateCheck::On => ledger,
            LateCheck::Off => ledger.without_late_check(),
        };
        let ledger = Arc::new(AuditedLedger { ledger, audit: self.audit.clone() });
        let mut options = self.plan.options.clone();
        options.concurrency = self.plan.concurrency as usize;
        let driver = Driver::new(self.client.clone(), Arc::clone(&ledger) as Arc<dyn Ledger>, &self.world, options);
        let pool = match &self.pools {
            None => None,
            Some(pools) => match pools.start().await {
                Ok(pool) => Some(pool),
                Err(error) => {
                    self.net.note(COLLECTOR, format_args!("cannot register its pool: {error:?}"));
                    return None;
                }
            },
        };
        let driver = match &pool {
            None => driver,
            Some(pool) => driver.dispatching_over(Arc::new(pool.pool.clone())),
        };
        let stop = CancelToken::new();
        *self.orders.stop.lock() = stop.clone();
        let rows = self.rows.clone();
        let ended = Arc::new(driver).run(stream::iter(rows.into_iter().map(Ok)), stop).await;
        self.net.note(COLLECTOR, format_args!("ends a run: {ended:?}"));
        if let Some(pool) = pool {
            pool.end().await;
        }
        let closed = ledger.ledger.close(&cx).await;
        self.net.note(COLLECTOR, format_args!("closes the ledger: {closed:?}"));
        match ended {
            Ok(RunEnd::Exhausted | RunEnd::Stopped | RunEnd::FailedFast) => {}
            Err(_) => return None,
        }
        let open =
            |state| matches!(state, KeyState::Open { failures, .. } if failures < self.plan.options.attempts_max);
        Some(self.rows.iter().filter(|row| open(ledger.state(row.key))).count())
    }

    /// Writes the inputs and opens the ledger in the order of `RolloutCollector::collect`.
    async fn prepare(&self, cx: &CallContext) -> Result<(JsonlLedger, RecoveryReport)> {
        let OutputFiles { rollouts, failures, materialized, .. } = OutputFiles::beside(OUTPUT);
        let partial = materialized.with_extension("jsonl.partial");
        let [rollouts, failures, inputs] = [&rollouts, &failures, &materialized].map(|path| self.files.length(path));
        let recorded =
            rollouts.await?.is_some_and(|length| length > 0) || failures.await?.is_some_and(|length| length > 0);
        if recorded && inputs.await?.is_none_or(|length| length == 0) {
            self.audit.violation("there are outcomes, and their inputs are lost");
        }
        let lines = lines(&self.plan);
        let wanted = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
        let (sender, chunks) = mpsc::channel(1);
        let producing = async {
            for line in lines {
                // Fails after an error of the disk, which the other end reports.
                let _ = sender.send(Bytes::from(line + "\n")).await;
            }
            drop(sender);
            Ok(())
        };
        write_new_file(&self.files, &partial, chunks, producing).await?;
        let opened = JsonlLedger::open(cx, Arc::new(self.files.clone()), OUTPUT, OpenMode::Resume).await?;
        // A resumed collection may add rows, so it replaces its inputs too.
        if !recorded || self.world.rng().bool() {
            self.files.rename(&partial, &materialized).await?;
        } else {
            self.files.remove(&partial).await?;
        }
        if self.files.contents(&materialized) != wanted.as_bytes() {
            self.audit.violation("the inputs are not what was written");
        }
        Ok(opened)
    }
}
