//! Pull and push in one collection: workers take the rollouts of some servers, and those of the others are sent by name.

use std::collections::BTreeSet;

use futures_util::future::BoxFuture;
use gym_core::{Request, Response, Result};

use crate::client::ServerClient;
use crate::work::dispatch::Dispatch;
use crate::work::pool::WorkPool;

/// Pull for some servers, push for all others.
#[derive(Debug)]
pub(crate) struct PulledServers {
    pub(crate) servers: BTreeSet<String>,
    pub(crate) pool: WorkPool,
    pub(crate) client: ServerClient,
}

impl Dispatch for PulledServers {
    fn run<'a>(&'a self, server: &'a str, request: &'a Request) -> BoxFuture<'a, Result<Response>> {
        if self.servers.contains(server) { self.pool.run(server, request) } else { self.client.run(server, request) }
    }
}
