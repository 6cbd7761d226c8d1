//! An agent that is one function.

use gym_server::prelude::*;

/// An agent that calls a function.
pub(crate) struct Agent<F>(pub(crate) F);

impl<F, Fut> AgentServer for Agent<F>
where
    F: Fn(RawObject) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Response>> + Send,
{
    async fn run(&self, _: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        (self.0)(row.clone()).await
    }
}
