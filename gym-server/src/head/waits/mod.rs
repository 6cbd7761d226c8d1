//! The waits that block rollouts, across the processes of a cluster: for `rgym stuck` and for the page.
//!
//! ```text
//!   servers of the head · collectors and controllers of this machine ◄── GET /waits?older_ms=…   which traces are old
//!                                                                    ◄── GET /waits?trace=…      all waits of these traces
//!   chains: rollout ▸ call ▸ handler ▸ … ▸ leaf ▸ state of the process that does not answer
//! ```

pub(crate) mod chain;
pub(crate) mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_core::observe::waits::WaitReport;
use gym_core::registry::{Instance, Member, MemberSpec};
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::head::waits::chain::{Chain, Cluster};
use crate::head::waits::process::{Address, NoAnswer, ask, of_this_machine};

/// Rollouts that the page explains: those that a collector reports as its oldest, and some that are among them when it reports next. One request
/// names no more.
const SHOWN_MAX: usize = 64;
/// Age of the waits that the page asks for. Younger ones often end between two questions, so their chains would break off.
const SHOWN_OLDER: Duration = Duration::from_millis(100);
/// Age of an answer that several viewers share, at least.
const SHARED_FOR: Duration = Duration::from_secs(1);
/// Further time for each address: a process needs about a millisecond for thousands of waits, and the head server as much to read them.
const SHARED_FOR_EACH: Duration = Duration::from_millis(10);

/// Which waits are followed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitsWanted<'a> {
    /// Only those of this rollout: `17-3`.
    pub(crate) rollout: Option<&'a str>,
    /// Only those that have lasted this long.
    pub(crate) older: Duration,
    /// Only rollouts of these collectors, by machine and process, and what belongs to no rollout. `None` for those of all collectors.
    pub(crate) collectors: Option<&'a BTreeSet<(String, u32)>>,
    /// Maximum chains.
    pub(crate) limit: usize,
}

/// The waits of a cluster.
#[derive(Debug, Default, Serialize)]
pub(crate) struct FollowedWaits {
    /// Processes that answered.
    pub(crate) processes: usize,
    /// Rollouts and calls of which nothing runs: a call of theirs waits before it is sent again.
    pub(crate) resting: usize,
    pub(crate) chains: Vec<Chain>,
    /// Processes that did not answer.
    pub(crate) silent: Vec<NoAnswer>,
}

/// Asks the processes at these addresses for their waits, and connects them. `workers` has the process of each worker of the cluster.
pub(crate) async fn follow(
    transports: &Transports,
    addresses: &[Address],
    workers: &BTreeMap<String, u32>,
    wanted: WaitsWanted<'_>,
) -> FollowedWaits {
    let WaitsWanted { rollout, older, collectors, limit } = wanted;
    let first = ask(transports, addresses, &format!("older_ms={}", older.as_millis())).await;
    let traces = Cluster::new(&first, workers).oldest(rollout, collectors, limit);
    // Asked once more: the leaf of an old rollout can be young, and a process leaves out its youngest waits.
    let mut all = first;
    if !traces.is_empty() {
        let answering: Vec<_> =
            all.iter().filter(|asked| asked.answer.is_ok()).map(|asked| asked.address.clone()).collect();
        let silent = all.extract_if(.., |asked| asked.answer.is_err()).collect::<Vec<_>>();
        let mut again = ask(transports, &answering, &format!("trace={}", traces.join(","))).await;
        for (again, first) in again.iter_mut().zip(all) {
            match (&mut again.answer, first.answer) {
                // Calls of groups have no trace, and a turn can be held by a call of another one.
                (Ok(again), Ok(first)) => {
                    // No others: they would displace the youngest waits, and those are the leaves.
                    let of_groups = |wait: &WaitReport| wait.trace.is_empty() || wait.kind.is_of_group();
                    again.add(first.waits.into_iter().filter(|wait| !traces.contains(&wait.trace) && of_groups(wait)));
                }
                (again, first) => *again = first,
            }
        }
        again.extend(silent);
        all = again;
    }
    let cluster = Cluster::new(&all, workers);
    FollowedWaits {
        processes: all.iter().filter(|asked| asked.answer.is_ok()).count(),
        resting: cluster.resting(),
        chains: cluster.chains(&traces, rollout, limit),
        silent: cluster.silent().filter(|silent| !silent.foreign).cloned().collect(),
    }
}

/// Returns the attempts in flight that the processes at these addresses name, each with its longest time in milliseconds. A process names
/// the oldest thousand waits.
#[cfg(feature = "cli")]
pub(crate) async fn attempts_in_flight(transports: &Transports, addresses: &[Address]) -> BTreeMap<String, u64> {
    let mut attempts = BTreeMap::new();
    let answers = ask(transports, addresses, "older_ms=0").await.into_iter().filter_map(|asked| asked.answer.ok());
    for wait in answers.flat_map(|answer| answer.waits) {
        let Some(attempt) = wait.rollout else { continue };
        let age: &mut u64 = attempts.entry(attempt).or_default();
        *age = (*age).max(wait.age_us / 1_000);
    }
    attempts
}

impl FollowedWaits {
    /// Returns `true` if none of these rollouts runs: each of the oldest waits before a call is sent again, and as many traces do so.
    #[cfg(feature = "cli")]
    pub(crate) fn all_rest(&self, rollouts: u64) -> bool {
        let mut of_rollouts = self.chains.iter().filter(|chain| chain.rollout.is_some()).peekable();
        let rests = |chain: &Chain| chain.hops.last().is_some_and(|hop| hop.wait.kind.is_rest());
        of_rollouts.peek().is_some() && of_rollouts.all(rests) && self.resting as u64 >= rollouts
    }
}

/// Returns the process of each worker.
pub(crate) fn processes(members: Vec<Member>) -> BTreeMap<String, u32> {
    let pid = |spec: &MemberSpec| {
        // A worker's servers run in its process, except for those in Python.
        let labels = std::iter::once(&spec.labels).chain(spec.servers.iter().map(|server| &server.labels));
        labels.filter_map(|labels| labels.get("pid")?.parse().ok()).next()
    };
    members.into_iter().filter_map(|member| Some((member.spec.name.clone(), pid(&member.spec)?))).collect()
}

/// The waits that a head server shows on its page.
#[derive(Debug, Default)]
pub(crate) struct ShownWaits {
    /// `None` for a head server that cannot call others.
    transports: Option<Transports>,
    answer: Mutex<Option<SharedAnswer>>,
}

#[derive(Debug)]
struct SharedAnswer {
    until: Instant,
    waits: Arc<FollowedWaits>,
}

impl ShownWaits {
    #[cfg(feature = "http")]
    pub(crate) fn over(transports: Transports) -> Self {
        Self { transports: Some(transports), answer: Mutex::default() }
    }

    /// Returns the waits of the oldest rollouts of these collectors, a little old if others have just asked. Other collectors of this machine, which
    /// report to other head servers, have rollouts of the same names.
    pub(crate) async fn get(
        &self,
        servers: Vec<Instance>,
        members: Vec<Member>,
        collectors: &BTreeSet<(String, u32)>,
    ) -> Arc<FollowedWaits> {
        // Held while the processes are asked: whoever asks meanwhile gets the same answer.
        let mut answer = self.answer.lock().await;
        let now = Instant::now();
        if let Some(answer) = answer.as_ref().filter(|answer| now < answer.until) {
            return Arc::clone(&answer.waits);
        }
        let Some(transports) = &self.transports else { return Arc::default() };
        let addresses: Vec<Address> = servers.into_iter().map(Address::of).chain(of_this_machine()).collect();
        let wanted = WaitsWanted { rollout: None, older: SHOWN_OLDER, collectors: Some(collectors), limit: SHOWN_MAX };
        let waits = Arc::new(follow(transports, &addresses, &processes(members), wanted).await);
        let shared = SHARED_FOR.max(SHARED_FOR_EACH * u32::try_from(addresses.len()).unwrap_or(u32::MAX));
        *answer = Some(SharedAnswer { until: Instant::now() + shared, waits: Arc::clone(&waits) });
        waits
    }
}
