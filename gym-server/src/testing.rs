//! Test support of this crate.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use gym_client::registry::StaticRegistry;
use gym_client::{ServerClient, Transports};
use gym_core::base::{FileLock, Files};
use gym_core::registry::Instance;
use gym_core::server::ServerKind;
use gym_core::transport::InProcess;
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Incarnation, Result, World};

/// Returns a world without files, with a fixed seed and a fixed start time.
pub(crate) fn world() -> World {
    World::new(Arc::new(NoFiles), 7, Duration::from_secs(1_700_000_000))
}

#[derive(Debug)]
struct NoFiles;

fn none<T>() -> Result<T> {
    Err(Error::not_started(Code::Unimplemented, "there are no files here"))
}

#[async_trait]
impl Files for NoFiles {
    async fn length(&self, _: &Path) -> Result<Option<u64>> {
        none()
    }

    async fn read(&self, _: &Path, _: u64, _: usize) -> Result<Bytes> {
        none()
    }

    async fn append(&self, _: &Path, _: &[Bytes], _: bool) -> Result<()> {
        none()
    }

    async fn rewrite(&self, _: &Path, _: u64, _: &[Bytes]) -> Result<()> {
        none()
    }

    async fn truncate(&self, _: &Path, _: u64) -> Result<()> {
        none()
    }

    async fn replace(&self, _: &Path, _: &[Bytes]) -> Result<()> {
        none()
    }

    async fn rename(&self, _: &Path, _: &Path) -> Result<()> {
        none()
    }

    async fn remove(&self, _: &Path) -> Result<()> {
        none()
    }

    async fn lock(&self, _: &Path) -> Result<Box<dyn FileLock>> {
        none()
    }
}

/// Servers of one process that call each other by name.
#[derive(Debug)]
pub(crate) struct TestNetwork {
    in_process: InProcess,
    servers: tokio::task::JoinSet<Result<()>>,
}

impl TestNetwork {
    pub(crate) fn new() -> Self {
        Self { in_process: InProcess::new(), servers: tokio::task::JoinSet::new() }
    }

    /// Returns a client of the servers of these names, including servers that are added later.
    pub(crate) fn client(&self, names: &[&str]) -> ServerClient {
        let instances = names.iter().map(|name| instance(name)).collect();
        let transports = Transports::new().with_connector(Arc::new(self.in_process.clone()));
        ServerClient::new(Arc::new(StaticRegistry::new(instances)), transports, &world())
    }

    /// Serves a handler under a name.
    pub(crate) fn serve(&mut self, name: &str, handler: impl Handler) {
        let listener = self.in_process.listen(name).unwrap();
        let (drain, grace) = (CancelToken::new(), Duration::from_secs(1));
        self.servers.spawn(gym_core::transport::serve(Box::new(listener), Arc::new(handler), drain, grace));
    }
}

fn instance(name: &str) -> Instance {
    Instance {
        name: name.to_owned(),
        replica: 0,
        kind: ServerKind::Agent,
        implementation: String::new(),
        endpoints: vec![Endpoint::parse(&format!("mem://{name}")).unwrap()],
        incarnation: Incarnation(1),
        labels: std::collections::BTreeMap::new(),
        member: None,
        paused: false,
    }
}
