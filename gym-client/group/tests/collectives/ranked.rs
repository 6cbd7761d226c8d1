//! Ranks of one process that meet over the transports of a program.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_client::transport::Transports;
use gym_core::testing::conformance::{CollectiveFixture, collectives};
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CancelToken, Endpoint, Incarnation};
use gym_group::collective::{Collectives, HostCollectives, Seat, Sharing};
use parking_lot::Mutex;

/// The ranks of this process, each with a listener of its own.
pub(crate) struct Ranked {
    transports: Transports,
    options: Box<dyn Fn(u32) -> ListenOptions + Send + Sync>,
    ranks: Mutex<BTreeMap<u32, (HostCollectives, Vec<Endpoint>)>>,
    sharing: Sharing,
    ended: CancelToken,
}

impl Ranked {
    pub(crate) fn new(transports: Transports, options: impl Fn(u32) -> ListenOptions + Send + Sync + 'static) -> Self {
        let (ranks, ended) = (Mutex::default(), CancelToken::new());
        Self { transports, options: Box::new(options), ranks, sharing: Sharing::Never, ended }
    }

    /// Lets the ranks meet in shared memory.
    #[allow(dead_code)] // Not in every program that has this module.
    pub(crate) fn in_shared_memory(mut self) -> Self {
        self.sharing = Sharing::Always;
        self
    }

    async fn served(&self, rank: u32) -> (HostCollectives, Vec<Endpoint>) {
        if let Some(known) = self.ranks.lock().get(&rank) {
            return known.clone();
        }
        let backend = HostCollectives::sharing(self.transports.clone(), self.sharing, 4 << 20);
        let handler = backend.handler().unwrap();
        let (listener, handler) = self.transports.listen((self.options)(rank), handler, &[]).await.unwrap();
        let endpoints = listener.endpoints().to_vec();
        tokio::spawn(serve(listener, handler, self.ended.clone(), Duration::ZERO));
        self.ranks.lock().entry(rank).or_insert((backend, endpoints)).clone()
    }

    fn meetings(&self) -> usize {
        self.ranks.lock().values().map(|(backend, _)| backend.meetings()).sum()
    }
}

impl Drop for Ranked {
    fn drop(&mut self) {
        self.ended.cancel();
    }
}

impl fmt::Debug for Ranked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ranked")
    }
}

#[async_trait]
impl CollectiveFixture for Ranked {
    async fn rank(&self, rank: u32) -> (Arc<dyn Collectives>, Seat) {
        let (backend, endpoints) = self.served(rank).await;
        (Arc::new(backend), Seat::new(rank, Incarnation(1)).serving_at(endpoints))
    }
}

/// Runs the suite, after which every meeting is forgotten.
pub(crate) async fn suite(fixture: Ranked, seed: u64) {
    collectives(&fixture, seed).await;
    // The last tasks of a meeting end after its communicators.
    let forgotten = async {
        while fixture.meetings() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), forgotten).await.expect("every meeting is forgotten");
}
