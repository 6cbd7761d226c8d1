//! The replicas of a server name, as the registry last returned them.

pub(super) mod pending;

use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use gym_core::base::Cancelled;
use gym_core::message::CALL_METADATA;
use gym_core::observe::waits::WaitTarget;
use gym_core::registry::{AffinityCounts, AffinityKey, Balance, Instance, Load, Picker};
use gym_core::server::ServerKind;
use gym_core::transport::ConnectOptions;
use gym_core::{CancelToken, Code, Endpoint, Error, Execution, Incarnation, Request, Result};
use tokio::time::Instant;

use crate::client::replicas::pending::PendingCalls;
use crate::transport::ReconnectingPeer;

/// The label of an instance that joins a `/run` which arrives again; see
/// [`RolloutServer::joins_runs`](gym_core::RolloutServer::joins_runs). Its value is `1`.
pub const JOINS_RUNS_LABEL: &str = "joins_runs";

/// The replicas of one name.
#[derive(Debug)]
pub(super) struct ReplicaSet {
    pub(super) replicas: Vec<Arc<Replica>>,
    /// Chooses among the replicas of this name only; each name has its own order.
    pub(super) picker: Arc<Picker>,
    /// Time of the registry's last response that listed the replicas.
    pub(super) seen: Instant,
    pub(super) stale_from: Instant,
    /// A call to a replica failed: the next call queries the registry first.
    pub(super) doubtful: bool,
}

impl ReplicaSet {
    /// Creates an empty set, for the one call that queried the registry.
    pub(super) fn absent() -> Self {
        let (replicas, picker, now) = (Vec::new(), Arc::default(), Instant::now());
        Self { replicas, picker, seen: now, stale_from: now, doubtful: true }
    }

    /// Returns the picker of a name that is resolved for the first time. If the program sets no balancing, the replicas of a model are
    /// chosen by affinity, because their caches have the prompts.
    pub(super) fn picker(balance: Option<&Balance>, replicas: &[Arc<Replica>]) -> Arc<Picker> {
        let of_model = replicas.iter().any(|replica| replica.kind == ServerKind::Model);
        let by_kind = || if of_model { Balance::Affinity } else { Balance::default() };
        Arc::new(Picker::new(balance.cloned().unwrap_or_else(by_kind)))
    }

    /// Returns `true` if the calls of a session may go to another replica than its first: model servers keep nothing of a session.
    pub(super) fn moves_sessions(&self) -> bool {
        self.replicas.len() > 1
            && *self.picker.balance() == Balance::Affinity
            && self.replicas.iter().all(|replica| replica.kind == ServerKind::Model)
    }

    /// Returns the choices by affinity so far; `None` without a choice.
    pub(super) fn affinity(&self) -> Option<AffinityCounts> {
        self.picker.affinity().filter(|_| self.replicas.len() > 1)
    }

    /// Returns `false` if there are replicas and none of them is ever chosen, because their weight is 0.
    pub(super) fn can_choose(&self) -> bool {
        let balance = self.picker.balance();
        self.replicas.is_empty() || self.replicas.iter().any(|replica| balance.chooses(replica.number as usize))
    }

    /// Chooses a replica; one in `failed` only if all replicas have failed. Replicas are identified by number, because weights are
    /// assigned to ranks and positions in the list change.
    pub(super) fn choose(
        &self,
        server: &str,
        failed: &[u32],
        request: &Request,
        session: Option<SessionAffinity>,
    ) -> Result<Arc<Replica>> {
        if let [only] = &self.replicas[..]
            && only.takes_work()
            && failed.is_empty()
            && !matches!(self.picker.balance(), Balance::Weighted(_))
        {
            return Ok(Arc::clone(only));
        }
        let key = session.map(|session| AffinityKey::of_number(session.number));
        if let (Some(key), Some(home)) = (key, session.and_then(|session| session.home)) {
            self.picker.remember(key, home as usize);
        }
        let prompt = || AffinityKey::of_request(&request.message.head.to_object().ok()?);
        let pick = |open: &[Load]| self.picker.pick_for(key, prompt, open);
        let load = |replica: &Arc<Replica>| Load { index: replica.number as usize, pending: replica.pending.count() };
        let of = |open: &dyn Fn(&Arc<Replica>) -> bool| {
            pick(&self.replicas.iter().filter(|replica| open(replica)).map(load).collect::<Vec<_>>())
        };
        // If every replica has failed once, one of those that get work; if none gets work, any, because it may still respond.
        let chosen = of(&|replica| replica.takes_work() && !failed.contains(&replica.number))
            .or_else(|| of(&|replica| replica.takes_work()))
            .or_else(|| of(&|_| true));
        let replica = chosen.and_then(|number| self.replicas.iter().find(|replica| replica.number as usize == number));
        replica.cloned().ok_or_else(|| match self.replicas.len() {
            0 => absent(server),
            count => {
                let why = format!("its {count} replicas have weight 0, which is never chosen");
                Error::not_started(Code::Unavailable, why).about(server.to_owned())
            }
        })
    }
}

/// The session of a call, for [`ReplicaSet::choose`].
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionAffinity {
    /// Identifies the session among those of its client.
    pub(super) number: u64,
    /// The rank of the replica that sent the last response.
    pub(super) home: Option<u32>,
}

/// One replica of a server, with its channel.
#[derive(Debug)]
pub(super) struct Replica {
    pub(super) peer: ReconnectingPeer,
    pub(super) incarnation: Incarnation,
    pub(super) number: u32,
    pub(super) kind: ServerKind,
    /// The server joins a `/run` that arrives again.
    joins_runs: bool,
    pub(super) pending: PendingCalls,
    /// The server gets no new work: its member is joining, suspect or draining.
    paused: AtomicBool,
    /// `None` if nothing tells the client of lost servers.
    lost: Option<LostSignal>,
}

impl Replica {
    /// Waits for the loss of the replica; `None` if nothing tells of it.
    pub(super) fn loss(&self) -> Option<ReplicaLoss<'_>> {
        self.lost.as_ref().map(|signal| ReplicaLoss { signal, fired: signal.token.cancelled() })
    }

    /// Returns `true` if the server may receive this request twice, because it joins the second one to the first.
    pub(super) fn joins(&self, request: &Request) -> bool {
        self.joins_runs && request.route.path() == "/run" && request.context.metadata.get(CALL_METADATA).is_some()
    }

    pub(super) fn takes_work(&self) -> bool {
        !self.paused.load(Relaxed) && !self.is_lost()
    }

    /// Returns `true` if this is the server with this incarnation and these endpoints, possibly under another number: a restarted head assigns numbers
    /// anew.
    pub(super) fn is(&self, incarnation: Incarnation, endpoints: &[Endpoint]) -> bool {
        self.incarnation == incarnation && self.peer.endpoints() == endpoints
    }

    /// Gives the server no new work, until the registry lists it again.
    pub(super) fn pause(&self) {
        self.paused.store(true, Relaxed);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.as_ref().is_some_and(|lost| lost.token.is_cancelled())
    }

    /// Ends the calls in flight.
    pub(super) fn lose(&self, reason: &str) {
        if let Some(lost) = &self.lost {
            let _ = lost.reason.set(reason.to_owned());
            lost.token.cancel();
        }
    }
}

impl WaitTarget for Replica {
    /// Returns the address of the server, by which it is recognized among the replicas of its name.
    fn describe(&self) -> String {
        self.peer.address().map(ToString::to_string).unwrap_or_default()
    }
}

/// Tells calls in flight that their server is lost.
#[derive(Debug, Default)]
struct LostSignal {
    token: CancelToken,
    reason: OnceLock<String>,
}

/// Resolves to the error of a call in flight when its server is lost.
#[derive(Debug)]
pub(super) struct ReplicaLoss<'a> {
    signal: &'a LostSignal,
    fired: Cancelled<'a>,
}

impl Future for ReplicaLoss<'_> {
    type Output = Error;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Error> {
        ready!(Pin::new(&mut self.fired).poll(cx));
        let reason = self.signal.reason.get().map_or("the server is gone", String::as_str);
        // The server may have run the call: whether to repeat it is the caller's decision.
        Poll::Ready(Error::new(Code::Unavailable, Execution::Unknown, reason.to_owned()))
    }
}

/// Returns the replica of an instance: the known one, with its channel and counter, if it has the same incarnation and endpoints. `follows`
/// is `true` if the client learns of lost servers.
pub(super) fn replica(instance: Instance, known: Option<&ReplicaSet>, follows: bool) -> Arc<Replica> {
    let same = known.and_then(|known| {
        known.replicas.iter().find(|replica| {
            !replica.is_lost()
                && replica.number == instance.replica
                && replica.is(instance.incarnation, &instance.endpoints)
        })
    });
    match same {
        Some(replica) => {
            replica.paused.store(instance.paused, Relaxed);
            Arc::clone(replica)
        }
        None => {
            // A server of this process is not lost before the process is.
            let other_process =
                instance.member.is_some() || instance.endpoints.iter().all(|endpoint| endpoint.scheme() != "mem");
            Arc::new(Replica {
                peer: ReconnectingPeer::new(instance.endpoints, ConnectOptions::to_incarnation(instance.incarnation)),
                incarnation: instance.incarnation,
                number: instance.replica,
                kind: instance.kind,
                joins_runs: instance.labels.get(JOINS_RUNS_LABEL).is_some_and(|value| value == "1"),
                pending: PendingCalls::default(),
                paused: AtomicBool::new(instance.paused),
                lost: (follows && other_process).then(LostSignal::default),
            })
        }
    }
}

/// The text of the error of a name without a registered server.
pub(super) const ABSENT: &str = "no server of this name is registered";

/// Returns the error of a name without a registered server. `Unavailable` instead of `NotFound`, because a restarting server
/// registers again soon.
fn absent(server: &str) -> Error {
    Error::not_started(Code::Unavailable, ABSENT).about(server.to_owned())
}
