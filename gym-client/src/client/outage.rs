//! The servers that are away, for which calls of a client wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use gym_core::{CancelToken, Error};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Time for which a call waits for a server that is away: the `retry_budget_seconds` of a model endpoint.
pub const SERVER_TIMEOUT: Duration = Duration::from_secs(300);

/// A server for which calls wait, because it cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwaitedServer {
    /// The name of the server.
    pub server: String,
    /// Time since the first call failed, in seconds.
    pub seconds: u64,
    /// Calls that wait. None of them has started.
    pub waiting: usize,
    /// Time for which each call waits, in seconds.
    pub gives_up_after_seconds: u64,
    /// The reason, as of the last question.
    pub reason: String,
}

/// The servers that a client waits for.
#[derive(Debug, Default)]
pub(super) struct Outages {
    /// Servers that are waited for before this client has reached them.
    expected: RwLock<BTreeSet<String>>,
    away: Mutex<BTreeMap<String, Arc<Outage>>>,
}

/// A server that is away.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) since: Instant,
    /// Cancelled when the server is back.
    pub(super) back: CancelToken,
    /// Held by the call that asks; the number of questions so far.
    pub(super) asking: tokio::sync::Mutex<u32>,
    waiting: AtomicUsize,
    reason: Mutex<Arc<str>>,
}

impl Outage {
    /// Returns the reason, as of the last question.
    pub(super) fn reason(&self) -> Arc<str> {
        Arc::clone(&self.reason.lock())
    }

    /// Notes why the server did not answer.
    pub(super) fn note(&self, error: &Error) {
        *self.reason.lock() = reason(error);
    }
}

/// A call that waits. The last one that ends removes the outage.
pub(super) struct Waiting<'a> {
    outages: &'a Outages,
    server: &'a str,
    pub(super) outage: Arc<Outage>,
}

impl Waiting<'_> {
    /// Ends the outage: all its calls are sent.
    pub(super) fn end(&self) {
        if self.remove(&mut self.outages.away.lock()) {
            let waiting = self.outage.waiting.load(Relaxed);
            tracing::info!(server = self.server, after = ?self.outage.since.elapsed(), waiting, "a server is back");
        }
        self.outage.back.cancel();
    }

    /// Removes the outage; returns `false` if the server is not away any more, or again.
    fn remove(&self, away: &mut BTreeMap<String, Arc<Outage>>) -> bool {
        let listed = away.get(self.server).is_some_and(|known| Arc::ptr_eq(known, &self.outage));
        listed && away.remove(self.server).is_some()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut away = self.outages.away.lock();
        if self.outage.waiting.fetch_sub(1, Relaxed) == 1 {
            self.remove(&mut away);
        }
    }
}

impl Outages {
    /// Adds servers that are waited for before they were reached.
    pub(super) fn expect(&self, servers: impl IntoIterator<Item = String>) {
        self.expected.write().extend(servers);
    }

    pub(super) fn expects(&self, server: &str) -> bool {
        self.expected.read().contains(server)
    }

    /// Begins to wait for a server to which a call failed.
    pub(super) fn begin<'a>(&'a self, server: &'a str, error: &Error) -> Waiting<'a> {
        let mut away = self.away.lock();
        let outage = away.entry(server.to_owned()).or_insert_with(|| {
            tracing::warn!(server, %error, "a server is away; calls wait for it");
            Arc::new(Outage {
                since: Instant::now(),
                back: CancelToken::new(),
                asking: tokio::sync::Mutex::default(),
                waiting: AtomicUsize::new(0),
                reason: Mutex::new(reason(error)),
            })
        });
        outage.waiting.fetch_add(1, Relaxed);
        Waiting { outages: self, server, outage: Arc::clone(outage) }
    }
}

/// The servers for which the calls of a client wait. It does not keep the client. Cheap to clone.
///
/// ```
/// use std::sync::Arc;
///
/// use gym_client::registry::StaticRegistry;
/// use gym_client::{ServerClient, Transports};
/// use gym_core::World;
///
/// let registry = Arc::new(StaticRegistry::default());
/// let client = ServerClient::new(registry, Transports::new(), &World::real());
/// // For a task that reports what the calls of others wait for.
/// let awaited = client.awaited();
/// for server in awaited.list() {
///     println!("{} calls wait for {}: {}", server.waiting, server.server, server.reason);
/// }
/// assert!(awaited.list().is_empty(), "nothing was called");
/// ```
#[derive(Clone, Debug)]
pub struct AwaitedServers(pub(super) Arc<Outages>);

impl AwaitedServers {
    /// Returns the servers for which calls wait now.
    #[must_use]
    pub fn list(&self) -> Vec<AwaitedServer> {
        let report = |(server, outage): (&String, &Arc<Outage>)| AwaitedServer {
            server: server.clone(),
            seconds: outage.since.elapsed().as_secs(),
            waiting: outage.waiting.load(Relaxed),
            gives_up_after_seconds: SERVER_TIMEOUT.as_secs(),
            reason: outage.reason().to_string(),
        };
        self.0.away.lock().iter().map(report).collect()
    }
}

/// Returns the innermost reason of an error: `Connection refused`.
fn reason(error: &Error) -> Arc<str> {
    error.chain().last().map_or_else(|| error.message().into(), |link| link.message.as_str().into())
}
