//! The worker of each rank: counts its calls, and tells the audit of each.

use std::time::Duration;

use gym_core::{Code, Execution};
use gym_group::prelude::*;
use serde::{Deserialize, Serialize};

use super::audit::{GroupAudit, LiveRank};

/// The variable with the name of the host of a rank.
pub(crate) const HOST_VARIABLE: &str = "SIMULATED_HOST";

/// The arguments of a call.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Counted {
    pub(crate) call: u64,
    pub(crate) lasts: Duration,
    /// The method returns an error, after it has counted.
    pub(crate) fails: bool,
}

/// A worker that lives until it is dropped.
pub(crate) struct Counter {
    live: LiveRank,
    count: u64,
}

worker! {
    impl Worker for Counter as pub(crate) counter {
        fn start(env: WorkerEnv, controller: u64) -> Result<Self> {
            let host = env.variables.get(HOST_VARIABLE).cloned().unwrap_or_default();
            let live = GroupAudit::entered().born(&env, controller, host);
            Ok(Self { live, count: 0 })
        }
        /// Counts the call and returns the count.
        exclusive async fn count(&mut self, _: &CallContext, call: Payload<Counted>) -> Result<Payload<u64>> {
            let Counted { call, lasts, fails } = call.value;
            self.live.runs(call);
            tokio::time::sleep(lasts).await;
            self.count += 1;
            self.live.ran(call, self.count);
            if fails {
                return Err(Error::new(Code::FailedPrecondition, Execution::Finished, "it fails on purpose"));
            }
            Ok(self.count.into())
        }
        /// Prepares a restarted rank.
        exclusive(idempotent) async fn prepare(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
            Ok(().into())
        }
    }
}
