//! A group of simulated ranks, its supervisor, and the controller that asks for one step after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use gym_client::transport::Transports;
use gym_core::testing::{Faults, SimHost, SimNet};
use gym_core::transport::{Fenced, Listener as _, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Error, Incarnation};
use gym_group::RankLayout;
use gym_group::collective::{Buffer, Communicator, HostCollectives, Moved, Peers, Seat, Seats};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::audit::{AGREED_TIMEOUT, Audit, Failure, faulty};
use crate::plan::{Axis, Fault, FaultKind, Plan, Regime, StepPlan};
use crate::script::{Operation, Part, Script};

/// Longer than any step lasts; only a hang reaches it.
const STEP_MAX: Duration = Duration::from_secs(120);
/// The time in which the ranks are told a new epoch.
const TOLD_TIMEOUT: Duration = Duration::from_millis(15);
/// Steps that may fail after the faults, in the epoch in which ranks have failed: some have missed how a meeting ended.
const MISSED_MAX: usize = 3;

/// What a schedule gave.
pub(crate) struct Report {
    pub(crate) plan: Plan,
    pub(crate) violations: Vec<String>,
    pub(crate) trace: gym_core::testing::net::Trace,
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    /// The steps after the faults that failed.
    pub(crate) missed: usize,
}

struct Group {
    plan: Plan,
    net: SimNet,
    layout: RankLayout,
    audit: Audit,
    state: Mutex<State>,
}

struct State {
    rng: fastrand::Rng,
    epoch: u64,
    members: Vec<Member>,
    /// Ranks that were lost and are not replaced yet.
    lost: BTreeMap<u32, String>,
    /// Faults that outlast their step.
    lasting: Vec<JoinHandle<()>>,
}

/// One incarnation of a rank.
#[derive(Clone)]
struct Member {
    rank: u32,
    incarnation: u64,
    host: SimHost,
    endpoint: Endpoint,
    backend: HostCollectives,
    peers: Peers,
    joined: Arc<Mutex<Vec<Weak<dyn Communicator>>>>,
    /// Cancels the calls of the current step.
    cancel: Arc<Mutex<CancelToken>>,
}

/// A transfer that is awaited by a task of its own, so that the time of its end is known.
struct Kept<'s> {
    what: String,
    part: Part<'s>,
    given: usize,
    until: Instant,
    ended: JoinHandle<(Moved, Instant)>,
}

pub(crate) async fn play(plan: Plan) -> Report {
    fastrand::seed(plan.seed);
    let net = SimNet::new(plan.seed, plan.network.clone());
    let group = Arc::new(Group::new(plan, net));
    group.renew();
    let mut missed = 0;
    let (last, steps) = group.plan.steps.split_last().expect("a step");
    for (number, step) in steps.iter().enumerate() {
        group.play_step(number, step).await;
    }
    let lasting = std::mem::take(&mut group.state.lock().lasting);
    join_all(lasting).await;
    group.net.set_faults(Faults::calm());
    group.net.note("controller", format_args!("the faults have ended"));
    // What was delayed arrives.
    sleep(group.plan.network.long_way_max * 2).await;
    if group.plan.renewed {
        group.renew();
    }
    // Every schedule ends with a step that succeeds.
    let steady = group.plan.regime == Regime::Calm && !steps.iter().any(|step| step.impatient);
    let most = if group.plan.renewed || steady { 0 } else { MISSED_MAX };
    loop {
        let failures = group.play_calm_step(steps.len() + missed, last).await;
        if failures.is_empty() {
            break;
        }
        missed += 1;
        if missed > most {
            let first = &failures[0];
            group.audit.violation(format_args!("rank {} fails after the faults: {}", first.rank, first.error));
            break;
        }
    }
    group.end().await;
    let (succeeded, failed) = group.audit.counts();
    let trace = group.net.trace();
    let plan = group.plan.clone();
    let group = Arc::into_inner(group).expect("all tasks have ended");
    Report { plan, violations: group.audit.into_violations(), trace, succeeded, failed, missed }
}

impl Group {
    fn new(plan: Plan, net: SimNet) -> Self {
        let layout = RankLayout::new(plan.axes().into_iter().map(|(name, size)| (name, size as usize)));
        let state = State {
            rng: fastrand::Rng::with_seed(plan.seed ^ 0x5eed),
            epoch: 0,
            members: (0..plan.world_size).map(|rank| Member::start(&net, rank)).collect(),
            lost: BTreeMap::new(),
            lasting: Vec::new(),
        };
        Self { audit: Audit::new(net.clone()), plan, net, layout: layout.expect("axes"), state: Mutex::new(state) }
    }

    // ---- the controller ----

    async fn play_step(self: &Arc<Self>, number: usize, step: &StepPlan) {
        let pause = {
            let mut state = self.state.lock();
            Duration::from_millis(state.rng.u64(..300) * state.rng.u64(..=1))
        };
        sleep(pause).await;
        let faults = step.faults.iter().map(|fault| tokio::spawn(Arc::clone(self).inject(*fault)));
        let faults: Vec<JoinHandle<()>> = faults.collect();
        self.all_play(number, step).await;
        let one = self.plan.regime == Regime::One;
        for (fault, injected) in step.faults.iter().zip(faults) {
            if one || fault.lasts.is_none() {
                injected.abort();
                drop(injected.await);
                self.heal(fault);
            } else {
                self.state.lock().lasting.push(injected);
            }
        }
        let failures = self.audit.end_step();
        match (self.plan.regime, step.faults.first()) {
            (Regime::Calm, _) => {
                // A rank may give its join up when the others have met. They learn of it when they need it.
                let gave_up = self.plan.steps[..=number].iter().any(|step| step.impatient);
                let left =
                    |failure: &Failure| failure.is_join || failure.error.message().contains("has left the meeting");
                let needless = failures.iter().filter(|failure| !(gave_up && left(failure)));
                needless.for_each(|failure| self.needless(number, failure));
            }
            (Regime::One, Some(fault)) => {
                failures.iter().for_each(|failure| self.audit.check_blame(fault, failure, self.plan.deadline_min()));
                self.audit.check_causes(&faulty(fault));
                self.whole().await;
                if self.renews() {
                    self.renew();
                }
            }
            (Regime::One, None) if number < self.plan.faulty() || self.renews() => {
                failures.iter().for_each(|failure| self.needless(number, failure))
            }
            (Regime::One | Regime::Many, _) => {}
        }
        self.whole().await;
    }

    /// Ranks that were told nothing meet again as they can.
    fn renews(&self) -> bool {
        self.plan.renewed
    }

    fn needless(&self, step: usize, failure: &Failure) {
        self.audit
            .violation(format_args!("rank {} fails in step {step} without a fault: {}", failure.rank, failure.error));
    }

    async fn play_calm_step(self: &Arc<Self>, number: usize, step: &StepPlan) -> Vec<Failure> {
        self.whole().await;
        self.all_play(number, step).await;
        self.audit.end_step()
    }

    async fn all_play(self: &Arc<Self>, number: usize, step: &StepPlan) {
        self.net.note("controller", format_args!("asks for step {number}"));
        let members = self.state.lock().members.clone();
        for member in &members {
            *member.cancel.lock() = CancelToken::new();
        }
        let played: Vec<JoinHandle<()>> = members
            .into_iter()
            .map(|member| {
                let host = member.host.clone();
                host.spawn(Arc::clone(self).play_rank(member, number, step.clone()))
            })
            .collect();
        if timeout(STEP_MAX, join_all(played)).await.is_err() {
            self.audit.violation(format_args!("step {number} does not end"));
        }
    }

    /// Waits until every rank that was lost is replaced, and all ranks have been told.
    async fn whole(&self) {
        while !self.state.lock().lost.is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
        sleep(TOLD_TIMEOUT).await;
    }

    async fn end(self: &Arc<Self>) {
        let members = std::mem::take(&mut self.state.lock().members);
        let backends: Vec<HostCollectives> = members.iter().map(|member| member.backend.clone()).collect();
        drop(members);
        // The last fault, the answers to what a rank has sent, and joins that wait.
        sleep(Duration::from_secs(30)).await;
        for (rank, backend) in backends.iter().enumerate() {
            if backend.meetings() > 0 {
                self.audit.violation(format_args!("{} meetings of rank {rank} are left", backend.meetings()));
            }
        }
    }

    // ---- the ranks ----

    async fn play_rank(self: Arc<Self>, member: Member, number: usize, step: StepPlan) {
        let seed = self.plan.seed ^ (number as u64) << 20 ^ u64::from(member.rank) << 8;
        let mut rng = fastrand::Rng::with_seed(seed);
        let meetings = step.meetings.iter().map(|(axis, script)| {
            let rng = rng.fork();
            self.take_part(&member, *axis, script, &step, rng)
        });
        join_all(meetings).await;
    }

    async fn take_part(&self, member: &Member, axis: Axis, script: &Script, step: &StepPlan, mut rng: fastrand::Rng) {
        let pause = |rng: &mut fastrand::Rng| sleep(Duration::from_millis(rng.u64(..step.pause_ms)));
        pause(&mut rng).await;
        let (rank, cx, peers) = (member.rank, CallContext::within(self.plan.join), &member.peers);
        let began = Instant::now();
        let join = async |cx: CallContext| match axis {
            Axis::All => peers.all(&cx).await,
            Axis::Data => peers.communicator(&cx, "data").await,
            Axis::Tensor => peers.communicator(&cx, "tensor").await,
        };
        let mut early = None;
        while step.impatient && early.is_none() && rng.u8(..4) > 0 {
            early = join(CallContext::within(Duration::from_millis(rng.u64(1..40)))).await.ok();
        }
        let joined = match early {
            Some(communicator) => Ok(communicator),
            None => join(cx).await,
        };
        if began.elapsed() > self.plan.join + AGREED_TIMEOUT {
            self.audit.violation(format_args!("rank {rank} meets {axis:?} after {:?}", began.elapsed()));
        }
        let communicator = match joined {
            Ok(communicator) => communicator,
            Err(error) => {
                let failure = Failure { rank, ranks: self.ranks(axis, rank), is_join: true, error };
                return self.audit.failed(format_args!("{axis:?}"), failure);
            }
        };
        member.joins(&communicator);
        let meeting = communicator.meeting();
        let rank_at = |position: usize| meeting.seats[position].rank;
        let cancel = member.cancel();
        let differs = |fault: &Fault| fault.kind == FaultKind::Differ && fault.rank == rank;
        let differs = step.faults.iter().find(|fault| differs(fault)).map(|fault| fault.other as usize);
        let (mut kept, mut ended): (Vec<Kept<'_>>, bool) = (Vec::new(), false);
        for (at, operation) in script.iter().enumerate() {
            pause(&mut rng).await;
            for part in operation.parts(meeting.position(), rank_at) {
                let within = Duration::from_millis(
                    rng.u64(self.plan.deadline_min().as_millis() as u64..=self.plan.deadline.as_millis() as u64),
                );
                let mut cx = CallContext::within(within);
                cx.cancel = cancel.clone();
                let odd = operation.is_even() && differs.is_some_and(|from| at >= from);
                kept.push(self.started(&cx, &*communicator, at, operation, part, odd));
            }
            while kept.len() > rng.usize(..=step.kept_max) && !ended {
                let one = kept.swap_remove(rng.usize(..kept.len()));
                ended = !self.finished(member, &*communicator, one).await;
            }
            if ended {
                break;
            }
        }
        for one in kept {
            self.finished(member, &*communicator, one).await;
        }
    }

    fn started<'s>(
        &self,
        cx: &CallContext,
        rank: &dyn Communicator,
        at: usize,
        operation: &Operation,
        part: Part<'s>,
        odd: bool,
    ) -> Kept<'s> {
        let what = format!("call {at}, {:?} of {}", operation.kind, rank.meeting());
        let mut given = match part.operation {
            gym_group::collective::Collective::Receive { .. } => BytesMut::zeroed(part.input.len()),
            _ => BytesMut::from(part.input),
        };
        if odd {
            given.resize(given.len() + part.dtype.size(), 0);
        }
        let (given_bytes, until) = (given.len(), Instant::now() + cx.remaining());
        let transfer = rank.start(cx, part.operation, Buffer::host(part.dtype, given));
        let ended = tokio::spawn(async move {
            let moved = transfer.await;
            (moved, Instant::now())
        });
        Kept { what, part, given: given_bytes, until, ended }
    }

    /// Checks a transfer that has ended. Returns `false` if it has failed.
    async fn finished(&self, member: &Member, communicator: &dyn Communicator, kept: Kept<'_>) -> bool {
        let (Kept { what, part, given, until, ended }, rank) = (kept, member.rank);
        let Ok((moved, at)) = ended.await else {
            self.audit.violation(format_args!("{what} on rank {rank} has panicked"));
            return false;
        };
        if at > until + AGREED_TIMEOUT {
            self.audit.violation(format_args!("{what} on rank {rank} ends {:?} after its deadline", at - until));
        }
        match moved.result {
            Ok(_) => {
                if moved.buffer.host_bytes() != Some(part.expected) {
                    self.audit.violation(format_args!("{what} on rank {rank} gives other bits"));
                }
                self.audit.succeeded(rank, format_args!("{what}"));
                true
            }
            Err(error) => {
                let bytes = moved.buffer.bytes();
                if bytes != given {
                    self.audit.violation(format_args!("{what} on rank {rank} gives {bytes} bytes of {given} back"));
                }
                let meeting = communicator.meeting();
                self.audit.cause(&meeting.to_string(), rank, member.incarnation, &error);
                let ranks = meeting.seats.iter().map(|seat| seat.rank).collect();
                self.audit.failed(format_args!("{what}"), Failure { rank, ranks, is_join: false, error });
                false
            }
        }
    }

    /// Returns the ranks that a rank meets along an axis.
    fn ranks(&self, axis: Axis, rank: u32) -> Vec<u32> {
        let inner = self.plan.axes().get(1).map_or(1, |(_, size)| *size);
        let meets = |other: &u32| match axis {
            Axis::All => true,
            Axis::Data => other % inner == rank % inner,
            Axis::Tensor => other / inner == rank / inner,
        };
        (0..self.plan.world_size).filter(meets).collect()
    }

    // ---- the supervisor ----

    /// Tells all ranks a new epoch, each a little later than the one before.
    fn renew(&self) {
        let mut state = self.state.lock();
        state.epoch += 1;
        let here = |member: &&Member| !state.lost.contains_key(&member.rank);
        let seats = state.members.iter().filter(here).map(Member::seat).collect();
        let seats = Seats::new(state.epoch, self.layout.clone(), seats).without(state.lost.clone());
        self.net.note("supervisor", format_args!("tells epoch {} with {} ranks", state.epoch, seats.seats.len()));
        let told: Vec<Member> = state.members.iter().filter(here).cloned().collect();
        for member in told {
            let (seats, late) = (seats.clone(), TOLD_TIMEOUT.mul_f64(state.rng.f64()));
            let peers = member.peers.clone();
            drop(member.host.spawn(async move {
                sleep(late).await;
                peers.seat(seats);
            }));
        }
    }

    /// Replaces a rank that has ended.
    async fn replace(self: Arc<Self>, rank: u32) {
        sleep(self.plan.notices).await;
        if self.plan.tells_losses {
            self.renew();
        }
        sleep(self.plan.replaces).await;
        {
            let mut state = self.state.lock();
            state.members[rank as usize] = Member::start(&self.net, rank);
            state.lost.remove(&rank);
        }
        self.renew();
    }

    // ---- the faults ----

    async fn inject(self: Arc<Self>, fault: Fault) {
        sleep(fault.at).await;
        let Some(member) = self.state.lock().members.get(fault.rank as usize).cloned() else { return };
        let host = member.host.name();
        match fault.kind {
            FaultKind::Crash | FaultKind::SilentCrash | FaultKind::End => {
                if self.state.lock().lost.insert(fault.rank, "crashed".to_owned()).is_some() {
                    return;
                }
                drop(tokio::spawn(Arc::clone(&self).replace(fault.rank)));
                if fault.kind == FaultKind::End {
                    member.peers.close();
                    sleep(Duration::from_millis(10)).await;
                }
                return self.net.crash(host);
            }
            FaultKind::Freeze => self.net.freeze(host),
            FaultKind::AbortUnheard => {
                self.net.freeze(host);
                self.abort_but(fault.rank);
            }
            FaultKind::Isolate => self.net.isolate(host),
            FaultKind::Mute => self.net.mute(host),
            FaultKind::Cut => self.net.cut(host, &host_of(fault.other)),
            FaultKind::Slow => self.net.slow(host, Duration::from_millis(20 + u64::from(fault.other) * 30)),
            FaultKind::Abort => {
                let other = self.state.lock().members[fault.other as usize].clone();
                [member, other].iter().for_each(Member::abort);
                return;
            }
            FaultKind::Cancel => return member.cancel().cancel(),
            FaultKind::Differ => return,
        }
        match fault.lasts {
            Some(lasts) => sleep(lasts).await,
            None => std::future::pending().await,
        }
        self.heal(&fault);
    }

    fn heal(&self, fault: &Fault) {
        let host = &host_of(fault.rank);
        match fault.kind {
            FaultKind::Freeze | FaultKind::AbortUnheard => self.net.thaw(host),
            FaultKind::Isolate => self.net.reconnect(host),
            FaultKind::Mute => self.net.unmute(host),
            FaultKind::Cut => self.net.set_faults(self.plan.network.clone()),
            FaultKind::Slow => self.net.slow(host, Duration::ZERO),
            _ => {}
        }
    }

    /// Two other ranks abort their meetings at the same time.
    fn abort_but(&self, rank: u32) {
        let members = self.state.lock().members.clone();
        let others = members.iter().filter(|member| member.rank != rank).rev();
        others.take(2).for_each(Member::abort);
    }
}

fn host_of(rank: u32) -> String {
    format!("rank-{rank}")
}

impl Member {
    fn start(net: &SimNet, rank: u32) -> Self {
        let host = net.host(&host_of(rank));
        let incarnation = host.life() + 1;
        let backend = HostCollectives::new(Transports::new().with(host.clone()));
        let listener = host.listen("worker").expect("a new host listens nowhere");
        let endpoint = listener.endpoints()[0].clone();
        let handler = Arc::new(Fenced::new(Incarnation(incarnation), backend.clone()));
        let serving = serve(Box::new(listener), handler, CancelToken::new(), Duration::ZERO);
        drop(host.spawn(serving.map(drop)));
        let peers = Peers::new("policy", rank, Arc::new(backend.clone()));
        Self { rank, incarnation, host, endpoint, backend, peers, joined: Arc::default(), cancel: Arc::default() }
    }

    fn seat(&self) -> Seat {
        Seat::new(self.rank, Incarnation(self.incarnation)).serving_at([self.endpoint.clone()])
    }

    fn joins(&self, communicator: &Arc<dyn Communicator>) {
        let mut joined = self.joined.lock();
        joined.retain(|known| known.strong_count() > 0);
        joined.push(Arc::downgrade(communicator));
    }

    fn cancel(&self) -> CancelToken {
        self.cancel.lock().clone()
    }

    /// Aborts the meetings of the rank.
    fn abort(&self) {
        let joined = std::mem::take(&mut *self.joined.lock());
        for communicator in joined.iter().filter_map(Weak::upgrade) {
            communicator.abort(Error::internal(format!("rank {} stops on purpose", self.rank)));
        }
    }
}
