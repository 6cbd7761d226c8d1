//! The additions of a group to its calls.

use std::sync::Arc;

use crate::call::backlog::Backlog;
use crate::call::gate::Gate;
use crate::call::monitor::RankMonitor;

/// The additions of a group to its calls: admission, submitted calls, and a monitor of its ranks. The default adds nothing.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CallSupport {
    /// Admits each call before it is sent to any rank. `None`: every call is admitted. For groups that share bundles.
    pub gate: Option<Arc<dyn Gate>>,
    /// The [submitted](crate::GroupCall::submit) calls of a group with `async_communication`. `None`: calls run when they are awaited.
    pub backlog: Option<Arc<Backlog>>,
    /// Reports what ranks are doing. `None`: the errors of unanswered calls do not say it.
    pub monitor: Option<Arc<dyn RankMonitor>>,
}
