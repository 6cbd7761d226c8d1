//! The conformance suite of [`MemberRegistry`]. It runs under tokio's paused clock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::base::error::{Code, Result};
use crate::message::{CallContext, Incarnation};
use crate::registry::{
    Heartbeat, JoinedMember, MemberLease, MemberRegistry, MemberServer, MemberSpec, MemberState, MemberTiming,
    RosterUpdate, RosterVersion, ServerChange,
};
use crate::server::ServerKind;
use crate::transport::Endpoint;

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(3);
const RECONNECT_TIMEOUT: Duration = Duration::from_millis(100);
/// Less than any of these intervals, more than a message takes.
const MARGIN_TIMEOUT: Duration = Duration::from_millis(20);

/// A registry under test.
pub trait MemberFixture: fmt::Debug + Send + Sync {
    /// Returns the registry, empty at first.
    fn registry(&self) -> Arc<dyn MemberRegistry>;
}

/// Checks an implementation under a paused clock. `make` returns an empty registry for each case.
///
/// # Panics
/// Panics if the implementation violates the contract of [`MemberRegistry`].
pub async fn members<F: MemberFixture>(make: impl Fn() -> F) {
    a_member_gets_work_after_its_first_healthy_heartbeat(&make()).await;
    a_heartbeat_is_answered_at_a_change_or_after_its_interval(&make()).await;
    a_silent_member_is_suspect_and_then_gone(&make()).await;
    a_suspect_member_that_returns_is_checked_first(&make()).await;
    a_broken_connection_is_a_suspicion_at_once_and_the_end_soon(&make()).await;
    a_member_that_connects_again_in_time_is_not_gone(&make()).await;
    the_late_end_of_an_old_connection_changes_nothing(&make()).await;
    a_member_that_leaves_is_not_lost(&make()).await;
    a_member_that_must_drain_is_told_at_once(&make()).await;
    a_name_belongs_to_one_living_process(&make()).await;
    invalid_members_are_rejected_with_the_reason(&make()).await;
    watchers_get_the_changes_since_their_version(&make()).await;
    ranks_are_kept_if_they_are_free(&make()).await;
}

fn cx() -> CallContext {
    CallContext::within(Duration::from_secs(60))
}

fn spec(name: &str, incarnation: u64, servers: &[&str]) -> MemberSpec {
    let mut spec = MemberSpec::new(name, Incarnation(incarnation));
    spec.host = format!("{name}-host");
    spec.timing = MemberTiming { heartbeat: HEARTBEAT_INTERVAL, timeout: TIMEOUT, reconnect: RECONNECT_TIMEOUT };
    let endpoint = Endpoint::parse(&format!("http://{name}:{incarnation}")).expect("an endpoint");
    let server = |server: &&str| MemberServer::new(*server, ServerKind::Agent, [endpoint.clone()]);
    spec.servers = servers.iter().map(server).collect();
    spec
}

/// A member that sends its heartbeats by hand.
struct Process<'a> {
    registry: &'a Arc<dyn MemberRegistry>,
    lease: MemberLease,
    seq: u64,
}

impl<'a> Process<'a> {
    async fn join(registry: &'a Arc<dyn MemberRegistry>, spec: MemberSpec) -> Self {
        let JoinedMember { lease, .. } = registry.join(&cx(), spec).await.expect("joins");
        Self { registry, lease, seq: 0 }
    }

    async fn serving(registry: &'a Arc<dyn MemberRegistry>, spec: MemberSpec) -> Self {
        let mut process = Self::join(registry, spec).await;
        assert_eq!(process.heartbeat(MemberState::Joining, true).await.expect("a heartbeat"), MemberState::Serving);
        process
    }

    fn next(&mut self, known: MemberState, healthy: bool) -> Heartbeat {
        self.seq += 1;
        Heartbeat { lease: self.lease.clone(), seq: self.seq, healthy, draining: false, round_trip_us: None, known }
    }

    async fn heartbeat(&mut self, known: MemberState, healthy: bool) -> Result<MemberState> {
        let heartbeat = self.next(known, healthy);
        self.registry.heartbeat(&cx(), &heartbeat).await.map(|reply| reply.state)
    }
}

async fn state(registry: &Arc<dyn MemberRegistry>, name: &str) -> Option<MemberState> {
    let members = registry.members(&cx()).await.expect("a list");
    members.iter().find(|member| member.spec.name == name).map(|member| member.state)
}

/// Returns the servers of a name that get work, and the number of those that do not.
async fn servers(registry: &Arc<dyn MemberRegistry>, name: &str) -> (Vec<u64>, usize) {
    let all = registry.resolve(&cx(), name).await.expect("a list");
    let (paused, open): (Vec<_>, Vec<_>) = all.into_iter().partition(|server| server.paused);
    (open.iter().map(|server| server.incarnation.0).collect(), paused.len())
}

async fn roster(registry: &Arc<dyn MemberRegistry>, seen: Option<RosterVersion>) -> RosterUpdate {
    registry.roster(&cx(), seen, MARGIN_TIMEOUT).await.expect("a roster")
}

async fn a_member_gets_work_after_its_first_healthy_heartbeat(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::join(&registry, spec("a", 1, &["math"])).await;
    assert_eq!(state(&registry, "a").await, Some(MemberState::Joining));
    assert_eq!(servers(&registry, "math").await, (vec![], 1));
    // Its servers do not respond yet.
    assert_eq!(member.heartbeat(MemberState::Serving, false).await.expect("a heartbeat"), MemberState::Joining);
    assert_eq!(servers(&registry, "math").await, (vec![], 1));
    assert_eq!(member.heartbeat(MemberState::Joining, true).await.expect("a heartbeat"), MemberState::Serving);
    assert_eq!(servers(&registry, "math").await, (vec![1], 0));
}

async fn a_heartbeat_is_answered_at_a_change_or_after_its_interval(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &[])).await;
    let began = Instant::now();
    assert_eq!(member.heartbeat(MemberState::Serving, false).await.expect("a heartbeat"), MemberState::Serving);
    let took = began.elapsed();
    assert!(took >= HEARTBEAT_INTERVAL && took < HEARTBEAT_INTERVAL + MARGIN_TIMEOUT, "{took:?}");
    let drained = async {
        sleep(HEARTBEAT_INTERVAL / 2).await;
        registry.drain(&cx(), "a").await.expect("a member");
    };
    let began = Instant::now();
    let (answer, ()) = tokio::join!(member.heartbeat(MemberState::Serving, false), drained);
    assert_eq!(answer.expect("a heartbeat"), MemberState::Draining);
    assert!(began.elapsed() < HEARTBEAT_INTERVAL / 2 + MARGIN_TIMEOUT, "{:?}", began.elapsed());
}

async fn a_silent_member_is_suspect_and_then_gone(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &["math"])).await;
    let seen = roster(&registry, None).await.now;
    sleep(HEARTBEAT_INTERVAL * 2 - MARGIN_TIMEOUT).await;
    assert_eq!(state(&registry, "a").await, Some(MemberState::Serving));
    sleep(MARGIN_TIMEOUT * 2).await;
    assert_eq!(state(&registry, "a").await, Some(MemberState::Suspect));
    assert_eq!(servers(&registry, "math").await, (vec![], 1));
    // The list and the roster say the same: why, since when, and what time is left.
    let members = registry.members(&cx()).await.expect("the members");
    let why = members[0].why();
    assert!(why.starts_with("no heartbeat for 2") && why.ends_with("; gone in 1 s unless it returns"), "{why}");
    assert!(members[0].since_ms.is_some_and(|since| since <= MARGIN_TIMEOUT.as_millis() as u64 * 2), "{members:?}");
    let suspects = roster(&registry, Some(seen)).await.suspects;
    assert_eq!(suspects.iter().map(|suspect| suspect.why()).collect::<Vec<_>>(), [why]);
    sleep(HEARTBEAT_INTERVAL).await;
    assert_eq!(state(&registry, "a").await, Some(MemberState::Gone));
    assert_eq!(servers(&registry, "math").await, (vec![], 0));
    let update = roster(&registry, Some(seen)).await;
    let Some(ServerChange::Gone(gone)) = update.changes.last() else { panic!("{update:?}") };
    assert_eq!((gone.name.as_str(), gone.incarnation), ("math", Incarnation(1)));
    let why = gone.lost.as_deref().expect("a reason");
    assert!(why.contains("a is gone") && why.contains("no heartbeat for 3"), "{why}");
    sleep(HEARTBEAT_INTERVAL).await;
    let members = registry.members(&cx()).await.expect("the members");
    assert!(members[0].why().contains("no heartbeat for 3"), "{members:?}");
    assert!(members[0].since_ms.is_some_and(|since| since >= HEARTBEAT_INTERVAL.as_millis() as u64), "{members:?}");
    assert_eq!((members[0].gone_in_ms, roster(&registry, None).await.suspects), (None, vec![]));
    let refused = member.heartbeat(MemberState::Serving, true).await.expect_err("it is gone");
    assert_eq!(refused.code(), Code::NotFound);
}

async fn a_suspect_member_that_returns_is_checked_first(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &["math"])).await;
    sleep(HEARTBEAT_INTERVAL * 2 + MARGIN_TIMEOUT).await;
    assert_eq!(state(&registry, "a").await, Some(MemberState::Suspect));
    let answer = timeout(MARGIN_TIMEOUT, member.heartbeat(MemberState::Serving, false)).await.expect("at once");
    assert_eq!(answer.expect("a heartbeat"), MemberState::Joining);
    assert_eq!(servers(&registry, "math").await, (vec![], 1));
    assert_eq!(member.heartbeat(MemberState::Joining, true).await.expect("a heartbeat"), MemberState::Serving);
    assert_eq!(servers(&registry, "math").await, (vec![1], 0));
}

/// Starts a heartbeat and drops its connection.
async fn break_connection(member: &mut Process<'_>) {
    let heartbeat = member.next(MemberState::Serving, false);
    let _ = timeout(MARGIN_TIMEOUT, member.registry.heartbeat(&cx(), &heartbeat)).await.expect_err("it waits");
    // The other side notices.
    sleep(Duration::from_millis(1)).await;
}

async fn a_broken_connection_is_a_suspicion_at_once_and_the_end_soon(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &["math"])).await;
    break_connection(&mut member).await;
    assert_eq!(state(&registry, "a").await, Some(MemberState::Suspect));
    let update = roster(&registry, None).await;
    let began = Instant::now();
    let update = registry.roster(&cx(), Some(update.now), HEARTBEAT_INTERVAL).await.expect("a roster");
    assert!(matches!(&update.changes[..], [ServerChange::Gone(gone)] if gone.lost.is_some()), "{update:?}");
    assert!(began.elapsed() <= RECONNECT_TIMEOUT + MARGIN_TIMEOUT, "{:?}", began.elapsed());
    assert_eq!(state(&registry, "a").await, Some(MemberState::Gone));
}

async fn a_member_that_connects_again_in_time_is_not_gone(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &["math"])).await;
    for _ in 0..20 {
        break_connection(&mut member).await;
        sleep(RECONNECT_TIMEOUT / 2).await;
        assert_eq!(member.heartbeat(MemberState::Serving, false).await.expect("in time"), MemberState::Joining);
        assert_eq!(member.heartbeat(MemberState::Joining, true).await.expect("healthy"), MemberState::Serving);
    }
    assert_eq!(servers(&registry, "math").await, (vec![1], 0));
}

async fn the_late_end_of_an_old_connection_changes_nothing(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &[])).await;
    let (old, new) = (member.next(MemberState::Serving, false), member.next(MemberState::Serving, false));
    let context = cx();
    let mut first = Box::pin(registry.heartbeat(&context, &old));
    let _ = timeout(MARGIN_TIMEOUT, first.as_mut()).await.expect_err("it waits");
    let second = async {
        let answer = registry.heartbeat(&context, &new).await;
        answer.expect("a heartbeat").state
    };
    let late = async {
        sleep(MARGIN_TIMEOUT).await;
        drop(first);
    };
    assert_eq!(tokio::join!(second, late).0, MemberState::Serving);
    assert_eq!(state(&registry, "a").await, Some(MemberState::Serving));
}

async fn a_member_that_leaves_is_not_lost(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let member = Process::serving(&registry, spec("a", 1, &["math"])).await;
    let seen = roster(&registry, None).await.now;
    for _ in 0..2 {
        registry.leave(&cx(), member.lease.clone()).await.expect("leaves, once and again");
    }
    let update = roster(&registry, Some(seen)).await;
    assert!(matches!(&update.changes[..], [ServerChange::Gone(gone)] if gone.lost.is_none()), "{update:?}");
    assert_eq!(state(&registry, "a").await, Some(MemberState::Gone));
}

async fn a_member_that_must_drain_is_told_at_once(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut member = Process::serving(&registry, spec("a", 1, &["math"])).await;
    let error = registry.drain(&cx(), "b").await.expect_err("no such member");
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("the members are a"), "{error}");
    registry.drain(&cx(), "a").await.expect("a member");
    assert_eq!(servers(&registry, "math").await, (vec![], 1));
    let answer = timeout(MARGIN_TIMEOUT, member.heartbeat(MemberState::Serving, true)).await.expect("at once");
    assert_eq!(answer.expect("a heartbeat"), MemberState::Draining);
    // A break does not make it serve again.
    sleep(HEARTBEAT_INTERVAL * 2 + MARGIN_TIMEOUT).await;
    assert_eq!(member.heartbeat(MemberState::Serving, true).await.expect("a heartbeat"), MemberState::Draining);
}

async fn a_name_belongs_to_one_living_process(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut first = Process::serving(&registry, spec("a", 5, &["math"])).await;
    let again = registry.join(&cx(), spec("a", 5, &["math"])).await.expect("the same process");
    assert_eq!(again.lease, first.lease);
    let mut second = spec("a", 6, &["math"]);
    second.host = "other-host".to_owned();
    let error = registry.join(&cx(), second.clone()).await.expect_err("a living member has this name");
    assert_eq!(error.code(), Code::AlreadyExists);
    assert!(error.to_string().contains("a-host") && error.to_string().contains("--name"), "{error}");
    break_connection(&mut first).await;
    registry.join(&cx(), second).await.expect("the first is suspect, and the second is newer");
    let error = first.heartbeat(MemberState::Serving, true).await.expect_err("its place is taken");
    assert_eq!(error.code(), Code::NotFound);
    let error = registry.join(&cx(), spec("a", 5, &["math"])).await.expect_err("an older process");
    assert_eq!(error.code(), Code::AlreadyExists);
    assert_eq!(servers(&registry, "math").await.1, 1, "only the servers of the second");
}

async fn invalid_members_are_rejected_with_the_reason(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    type Change = Box<dyn Fn(&mut MemberSpec)>;
    let cases: [(&str, Change); 7] = [
        ("--name", Box::new(|spec| spec.name.clear())),
        ("--name", Box::new(|spec| "a b".clone_into(&mut spec.name))),
        ("WORKER_TIMEOUT", Box::new(|spec| spec.timing.timeout = HEARTBEAT_INTERVAL * 2)),
        ("WORKER_TIMEOUT", Box::new(|spec| spec.timing.timeout = Duration::from_secs(1_000 * 86_400))),
        ("more than 0", Box::new(|spec| spec.timing.heartbeat = Duration::ZERO)),
        ("no endpoint", Box::new(|spec| spec.servers[0].endpoints.clear())),
        ("the limit is", Box::new(|spec| drop(spec.labels.insert("x".to_owned(), "y".repeat(100_000))))),
    ];
    for (what, change) in cases {
        let mut spec = spec("a", 1, &["math"]);
        change(&mut spec);
        let error = registry.join(&cx(), spec).await.expect_err(what);
        assert_eq!(error.code(), Code::InvalidArgument, "{what}: {error}");
        assert!(error.to_string().contains(what), "{what}: {error}");
    }
    assert_eq!(registry.members(&cx()).await.expect("a list"), []);
}

async fn watchers_get_the_changes_since_their_version(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let first = roster(&registry, None).await;
    assert!(first.complete && first.changes.is_empty(), "{first:?}");
    let began = Instant::now();
    let same = registry.roster(&cx(), Some(first.now), HEARTBEAT_INTERVAL).await.expect("a roster");
    assert_eq!((same.now, same.changes.len(), same.complete), (first.now, 0, false));
    assert!(began.elapsed() >= HEARTBEAT_INTERVAL, "it waits for a change");
    let joined = async {
        sleep(MARGIN_TIMEOUT).await;
        Process::serving(&registry, spec("a", 1, &["math", "code"])).await
    };
    let began = Instant::now();
    let context = cx();
    let (update, _member) = tokio::join!(registry.roster(&context, Some(first.now), HEARTBEAT_INTERVAL), joined);
    assert!(began.elapsed() < MARGIN_TIMEOUT * 2, "{:?}", began.elapsed());
    let update = update.expect("a roster");
    assert!(!update.complete && update.changes.len() >= 2, "{update:?}");
    let other_life = RosterVersion { term: first.now.term ^ 1, version: update.now.version };
    for unknown in [None, Some(other_life)] {
        let all = roster(&registry, unknown).await;
        assert!(all.complete, "{all:?}");
        assert_eq!(all.changes.len(), 2);
    }
}

async fn ranks_are_kept_if_they_are_free(fixture: &impl MemberFixture) {
    let registry = fixture.registry();
    let mut wanted = spec("a", 1, &["math"]);
    wanted.servers[0].replica = Some(3);
    assert_eq!(registry.join(&cx(), wanted.clone()).await.expect("joins").replicas, [3]);
    let mut other = spec("b", 1, &["math", "math"]);
    other.servers[0].replica = Some(3);
    assert_eq!(registry.join(&cx(), other).await.expect("joins").replicas, [0, 1]);
}
