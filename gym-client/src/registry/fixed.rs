//! A registry with the servers of a configuration.

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use gym_core::registry::{Instance, Lease, Registration, Registry};
use gym_core::{CallContext, Code, Error, Result};

/// A fixed list of servers, which rejects registrations.
#[derive(Clone, Debug, Default)]
pub struct StaticRegistry {
    instances: Vec<Instance>,
}

impl StaticRegistry {
    /// Creates a registry of these instances.
    #[must_use]
    pub fn new(mut instances: Vec<Instance>) -> Self {
        instances.sort_by(|a, b| (&a.name, a.replica).cmp(&(&b.name, b.replica)));
        Self { instances }
    }

    fn of(&self, name: &str) -> Vec<Instance> {
        self.instances.iter().filter(|instance| instance.name == name).cloned().collect()
    }
}

fn refused(what: &'static str) -> Error {
    Error::not_started(Code::Unimplemented, "this registry was read from a configuration; nothing joins or leaves it")
        .about(what)
}

#[async_trait]
impl Registry for StaticRegistry {
    async fn register(&self, _: &CallContext, _: Registration) -> Result<Lease> {
        Err(refused("register"))
    }

    async fn renew(&self, _: &CallContext, _: &Lease) -> Result<()> {
        Err(refused("renew"))
    }

    async fn deregister(&self, _: &CallContext, _: Lease) -> Result<()> {
        Err(refused("deregister"))
    }

    async fn resolve(&self, _: &CallContext, name: &str) -> Result<Vec<Instance>> {
        Ok(self.of(name))
    }

    async fn list(&self, _: &CallContext) -> Result<Vec<Instance>> {
        Ok(self.instances.clone())
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        stream::iter([self.of(name)]).chain(stream::pending()).boxed()
    }
}
