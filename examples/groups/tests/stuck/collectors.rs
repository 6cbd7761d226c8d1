//! Stalls of collectors: each is a program that drives rollouts in a way that stalls.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::stream;
use gym_client::collect::ledger::MemoryLedger;
use gym_client::collect::{Driver, DriverOptions, FailFast, RolloutRow};
use gym_client::registry::{StaticRegistry, WaitsListener};
use gym_client::work::{Dispatch, WorkPool, WorkPoolOptions};
use gym_client::{ServerClient, Transports};
use gym_core::registry::Balance;
use gym_core::rollout::{Attempt, KeyState, Ledger, Outcome, TaskKey};
use gym_core::transport::{InProcess, RetryPolicy};
use gym_core::{CallContext, CancelToken, Code, Error, RawObject, Request, Response, Result, World};

use crate::Ground;

/// A disk that never writes.
#[derive(Debug, Default)]
struct StandingLedger(MemoryLedger);

#[async_trait]
impl Ledger for StandingLedger {
    fn state(&self, key: TaskKey) -> KeyState {
        self.0.state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        self.0.begin(key)
    }

    async fn record(&self, _: &CallContext, _: Attempt, _: Outcome) -> Result<()> {
        std::future::pending().await
    }

    async fn flush(&self, cx: &CallContext) -> Result<()> {
        self.0.flush(cx).await
    }
}

/// Answers rollouts as the stall needs it.
#[derive(Debug)]
enum Answers {
    Completes,
    /// The server cannot be reached.
    Unreachable,
    /// All fail alike, except the first one, which never ends.
    FailsAlike,
}

impl Dispatch for Answers {
    fn run<'a>(&'a self, _: &'a str, request: &'a Request) -> BoxFuture<'a, Result<Response>> {
        Box::pin(async move {
            match self {
                Self::Completes => {
                    let row = request.message.head.to_object()?;
                    Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
                }
                Self::Unreachable => Err(Error::not_started(Code::Unavailable, "no route to the server")),
                Self::FailsAlike if request.message.head.to_object()?.get_as::<u32>("_ng_task_index")? == Some(0) => {
                    std::future::pending().await
                }
                Self::FailsAlike => Err(Error::finished(Code::Internal, "the environment is broken")),
            }
        })
    }
}

fn rows(count: u32) -> Vec<Result<RolloutRow>> {
    let row = |at| {
        Ok(RolloutRow {
            key: TaskKey::new(at, 0),
            agent: "room_agent".into(),
            server: "room_agent".into(),
            result_type: None,
            row: RawObject::parse(format!(r#"{{"_ng_task_index":{at},"_ng_rollout_index":0}}"#))?,
        })
    };
    (0..count).map(row).collect()
}

/// Drives rollouts until it is killed.
pub(crate) fn be_collector(stall: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    runtime.block_on(async {
        let (transports, world) = (Transports::from_features(InProcess::new()), World::real());
        let _waits = WaitsListener::start(&transports, None, Vec::new()).await.expect("listens");
        let mut options = DriverOptions::default();
        options.fail_fast = FailFast::Alike;
        options.concurrency = 40;
        let hour = Duration::from_secs(3_600);
        let mut slow = RetryPolicy::default();
        slow.backoff_min = hour;
        slow.backoff_max = hour;
        let pool = WorkPool::new(WorkPoolOptions::default(), &world);
        let dispatch: Arc<dyn Dispatch> = match stall {
            "queue" => Arc::new(pool.clone()),
            "pause" => Arc::new(Answers::FailsAlike),
            "backoff" => Arc::new(Answers::Unreachable),
            _ => Arc::new(Answers::Completes),
        };
        if stall == "backoff" {
            options.backoff = slow.clone();
        }
        let ledger: Arc<dyn Ledger> = match stall {
            "disk" => Arc::new(StandingLedger::default()),
            _ => Arc::new(MemoryLedger::new()),
        };
        let client = ServerClient::new(Arc::new(StaticRegistry::default()), transports, &world);
        let client = client.with(Balance::default(), slow.clone());
        let mut driver = Driver::new(client, ledger, &world, options);
        // The others call no server.
        if stall != "absent" {
            driver = driver.dispatching_over(dispatch);
        }
        let driver = Arc::new(driver);
        println!("drives");
        // More than begin before the pause.
        let count = if stall == "pause" { 1_000 } else { 1 };
        driver.run(stream::iter(rows(count)), CancelToken::new()).await.expect("runs");
        std::future::pending::<()>().await;
    });
}

pub(crate) fn waits_of_collectors_are_named() {
    for (stall, rollout, words) in [
        ("disk", Some("0-0"), "waits for the disk to record the outcome"),
        (
            "queue",
            Some("0-0"),
            "waits in the work queue for `/run` of `room_agent`: no worker has joined; waiting items: 1",
        ),
        ("pause", None, "the collector begins no rollout: all rollouts so far failed with one cause"),
        ("backoff", Some("0-0"), "the collector makes another attempt in "),
        ("absent", Some("0-0"), "no server of this name is registered"),
    ] {
        let ground = Ground::new();
        let (_collector, _) = ground.start(&["be-collector", stall], "drives");
        ground.expect(stall, rollout, &[words]);
    }
}
