//! The backend `nccl` of a build without the feature: the error that names it.

use std::sync::Arc;

use async_trait::async_trait;
use gym_core::group::collective::{Collectives, Communicator, Meeting};
use gym_core::{CallContext, Code, Error, Result};

/// Why this build cannot use it.
pub(super) const MISSING: Option<&str> = Some(WITHOUT);
const WITHOUT: &str = "communication_backend 'nccl' needs a build with the feature `nccl`, and this build has none: collective \
                                  operations fail; use 'auto' or 'host' for ranks on CPUs";

/// Returns the backend of a rank that asks for NCCL and cannot have it.
pub(super) fn over(_: Arc<dyn Collectives>) -> Arc<dyn Collectives> {
    Arc::new(Missing)
}

/// Returns the backend of a rank that lets NCCL move memory of GPUs, if it can.
pub(super) fn if_used(host: Arc<dyn Collectives>) -> Arc<dyn Collectives> {
    host
}

#[derive(Debug)]
struct Missing;

#[async_trait]
impl Collectives for Missing {
    fn name(&self) -> &'static str {
        "nccl"
    }

    async fn join(&self, _: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>> {
        Err(Error::not_started(Code::FailedPrecondition, WITHOUT).about(format!("join {meeting}")))
    }
}
