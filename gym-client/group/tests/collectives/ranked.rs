//! Ranks of one process that meet over the transports of a program.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use gym_client::transport::Transports;
use gym_core::testing::conformance::{CollectiveFixture, Ranks, collectives};
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Incarnation};
use gym_group::collective::{Collectives, HostCollectives, Meeting, Seat};

/// The ranks of this process, each with a listener of its own.
pub(crate) struct Ranked {
    transports: Transports,
    options: Box<dyn Fn(u32) -> ListenOptions + Send + Sync>,
    ranks: Mutex<BTreeMap<u32, (HostCollectives, Vec<Endpoint>)>>,
    epoch: AtomicU64,
    ended: CancelToken,
}

impl Ranked {
    pub(crate) fn new(transports: Transports, options: impl Fn(u32) -> ListenOptions + Send + Sync + 'static) -> Self {
        let (ranks, epoch, ended) = (Mutex::default(), AtomicU64::new(1), CancelToken::new());
        Self { transports, options: Box::new(options), ranks, epoch, ended }
    }

    async fn rank(&self, rank: u32) -> (HostCollectives, Vec<Endpoint>) {
        if let Some(known) = self.ranks.lock().unwrap().get(&rank) {
            return known.clone();
        }
        let backend = HostCollectives::new(self.transports.clone());
        let handler = backend.handler().unwrap();
        let (listener, handler) = self.transports.listen((self.options)(rank), handler, &[]).await.unwrap();
        let endpoints = listener.endpoints().to_vec();
        tokio::spawn(serve(listener, handler, self.ended.clone(), Duration::ZERO));
        self.ranks.lock().unwrap().entry(rank).or_insert((backend, endpoints)).clone()
    }

    fn meetings(&self) -> usize {
        self.ranks.lock().unwrap().values().map(|(backend, _)| backend.meetings()).sum()
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
    async fn meeting(&self, ranks: &[u32]) -> Ranks {
        let (epoch, cx) = (self.epoch.fetch_add(1, Ordering::Relaxed), cx());
        let mut seats = Vec::new();
        for rank in ranks {
            seats.push(Seat::new(*rank, Incarnation(1)).serving_at(self.rank(*rank).await.1));
        }
        let joins = ranks.iter().map(|rank| {
            let meeting = Meeting::new("policy/data", epoch, *rank, seats.clone()).unwrap();
            let (cx, backend) = (&cx, self.ranks.lock().unwrap()[rank].0.clone());
            async move { backend.join(cx, meeting).await }
        });
        try_join_all(joins).await.unwrap()
    }
}

fn cx() -> CallContext {
    CallContext::within(Duration::from_secs(60))
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
