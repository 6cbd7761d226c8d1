//! The interface between the driver and the servers: push calls a server by name, pull waits for a worker.

use std::fmt;

use futures_util::future::BoxFuture;
use gym_core::{Request, Response, Result};

use crate::client::{CallOptions, ServerClient};

/// Runs requests on servers. The driver calls it once for each attempt.
///
/// - **Errors.** Any complete response is `Ok`, including error statuses. An error says whether the request may have run.
/// - **Repetition.** A request that may have run is never sent again, except to a server that then joins it to the first one.
/// - **Cancellation.** Dropping the future cancels the request, also if a worker has begun it.
pub trait Dispatch: fmt::Debug + Send + Sync + 'static {
    /// Runs the request on a server of this name, until the deadline of its context.
    fn run<'a>(&'a self, server: &'a str, request: &'a Request) -> BoxFuture<'a, Result<Response>>;
}

/// Push: the client chooses a replica by name and calls it.
impl Dispatch for ServerClient {
    fn run<'a>(&'a self, server: &'a str, request: &'a Request) -> BoxFuture<'a, Result<Response>> {
        Box::pin(self.send(server, request, CallOptions::default()))
    }
}
