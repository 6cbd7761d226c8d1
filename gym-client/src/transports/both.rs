//! Two listeners as one: the peers of either.

use async_trait::async_trait;
use gym_core::{Endpoint, Incoming, Listener, Result};

/// Accepts the peers of both. It ends with the first that ends.
#[derive(Debug)]
pub(crate) struct Both {
    endpoints: Vec<Endpoint>,
    better: Box<dyn Listener>,
    other: Box<dyn Listener>,
}

impl Both {
    /// The endpoints of `better` come first.
    pub(crate) fn new(better: Box<dyn Listener>, other: Box<dyn Listener>) -> Self {
        let endpoints = better.endpoints().iter().chain(other.endpoints()).cloned().collect();
        Self { endpoints, better, other }
    }
}

#[async_trait]
impl Listener for Both {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        tokio::select! {
            biased;
            accepted = self.better.accept() => accepted,
            accepted = self.other.accept() => accepted,
        }
    }
}
