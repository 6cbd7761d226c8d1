//! Chains of waits: from the collector's rollout over the servers to the leaf, which nothing else explains.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use gym_core::observe::waits::{ProcessWaits, WaitKind, WaitReport};
use serde::Serialize;

use crate::head::waits::process::{Asked, NoAnswer, states};

/// One wait of a chain, with its process.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Hop {
    #[serde(flatten)]
    pub(crate) wait: WaitReport,
    pub(crate) process: String,
    /// The wait in one sentence.
    pub(crate) text: String,
}

/// The waits that block one rollout, or one call without a rollout.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Chain {
    /// `17-3-a1`; `None` for a call of no rollout.
    pub(crate) rollout: Option<String>,
    pub(crate) age_ms: u64,
    /// The phase of the rollout: `queue`, `seed`, `model`, `tool`, `verify`, `retry`, …
    pub(crate) phase: &'static str,
    /// The time since that phase began.
    pub(crate) phase_ms: u64,
    /// The turns that the model has had in the episode so far, from the second one on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) turns: Option<u32>,
    /// The wait that blocks all others, with what is known about it.
    pub(crate) leaf: String,
    pub(crate) hops: Vec<Hop>,
}

/// The processes that answered, each once.
pub(crate) struct Cluster<'a> {
    asked: &'a [Asked],
    processes: Vec<&'a ProcessWaits>,
    /// The process of each worker of the cluster, by its name.
    workers: &'a BTreeMap<String, u32>,
}

type Found<'a> = (&'a ProcessWaits, &'a WaitReport);

impl<'a> Cluster<'a> {
    pub(super) fn new(asked: &'a [Asked], workers: &'a BTreeMap<String, u32>) -> Self {
        Self { processes: asked.iter().filter_map(|asked| asked.answer.as_ref().ok()).collect(), asked, workers }
    }

    pub(super) fn silent(&self) -> impl Iterator<Item = &'a NoAnswer> {
        self.asked.iter().filter_map(|asked| asked.answer.as_ref().err())
    }

    /// Returns all waits, oldest first. The servers of a process report the same waits, except for their rollouts.
    fn waits(&self) -> Vec<Found<'a>> {
        let mut seen = BTreeSet::new();
        let mut waits: Vec<Found<'a>> = Vec::new();
        let mut processes: BTreeMap<(&str, u32), usize> = BTreeMap::new();
        for process in &self.processes {
            let first =
                *processes.entry((&process.host, process.pid)).and_modify(|count| *count += 1).or_insert(0) == 0;
            for wait in &process.waits {
                let is_run = wait.kind == WaitKind::Handler && wait.route == "/run";
                let new = seen.insert((
                    wait.kind,
                    &*process.host,
                    process.pid,
                    &*wait.server,
                    &*wait.route,
                    &*wait.trace,
                    wait.rollout.clone(),
                ));
                if if is_run { new } else { first } {
                    waits.push((process, wait));
                }
            }
        }
        waits.sort_by_key(|(_, wait)| std::cmp::Reverse(wait.age_us));
        waits
    }

    /// Returns the traces of the oldest rollouts and calls, which are asked for once more. Those of other collectors than these are left out.
    pub(super) fn oldest(
        &self,
        rollout: Option<&str>,
        collectors: Option<&BTreeSet<(String, u32)>>,
        limit: usize,
    ) -> Vec<String> {
        let waits = self.waits();
        let is_foreign = |(process, wait): &&Found<'a>| {
            matches!(wait.kind, WaitKind::Attempt | WaitKind::AttemptBackoff)
                && collectors.is_some_and(|known| !known.contains(&(process.host.clone(), process.pid)))
        };
        let foreign: BTreeSet<&str> = waits.iter().filter(is_foreign).map(|(_, wait)| &*wait.trace).collect();
        let mut traces: Vec<String> = Vec::new();
        let wanted = |wait: &WaitReport| match rollout {
            None => true,
            Some(wanted) => wait.rollout.as_deref().is_some_and(|name| is_of(name, wanted)),
        };
        for (_, wait) in waits.iter().filter(|(_, wait)| !foreign.contains(&*wait.trace)) {
            if traces.len() < limit && !wait.trace.is_empty() && wanted(wait) && !traces.contains(&wait.trace) {
                traces.push(wait.trace.clone());
            }
        }
        traces
    }

    /// Returns the number of traces that rest, of each process once.
    pub(super) fn resting(&self) -> usize {
        let processes: BTreeMap<_, _> =
            self.processes.iter().map(|process| ((&process.host, process.pid), process.resting)).collect();
        processes.into_values().sum()
    }

    /// Builds the chains of these traces, and of the waits without one, oldest first.
    pub(super) fn chains(&self, traces: &[String], rollout: Option<&str>, limit: usize) -> Vec<Chain> {
        let waits = self.waits();
        let mut chains: Vec<Chain> = Vec::new();
        for trace in traces {
            let of_trace: Vec<Found<'a>> = waits.iter().filter(|(_, wait)| wait.trace == *trace).copied().collect();
            chains.extend(self.chain(of_trace, &waits));
        }
        let untraced = waits.iter().filter(|(_, wait)| wait.trace.is_empty() && wait.kind != WaitKind::Episode);
        for found in untraced {
            let matches =
                rollout.is_none_or(|wanted| found.1.rollout.as_deref().is_some_and(|name| is_of(name, wanted)));
            if matches {
                chains.extend(self.chain(vec![*found], &waits));
            }
        }
        chains.sort_by_key(|chain| std::cmp::Reverse(chain.age_ms));
        chains.truncate(limit);
        chains
    }

    fn chain(&self, mut waits: Vec<Found<'a>>, all: &[Found<'a>]) -> Option<Chain> {
        // An episode blocks nothing: its calls do.
        let turns = waits.iter().filter_map(|(_, wait)| wait.turns).max();
        waits.retain(|(_, wait)| wait.kind != WaitKind::Episode);
        let mut found = in_order(waits);
        let (_, first) = found.first()?;
        let (age_ms, rollout) = (first.age_us / 1_000, found.iter().find_map(|(_, wait)| wait.rollout.clone()));
        // A call that waits for another group's turn goes on with the calls of that group.
        while let Some((process, last)) = found.last().copied()
            && let Some(holder) = &last.holder
        {
            let held = all.iter().find(|(of, wait)| {
                (&of.host, of.pid) == (&process.host, process.pid)
                    && wait.kind == WaitKind::Ranks
                    && wait.server == *holder
                    && !found.iter().any(|(_, known)| std::ptr::eq(*known, *wait))
            });
            match held {
                Some(held) => found.push(*held),
                None => break,
            }
        }
        let hops: Vec<Hop> = found.iter().map(|(process, wait)| hop(process, wait)).collect();
        let (process, last) = found.last()?;
        let mut leaf = hops.last()?.text.clone();
        if let Some(why) = self.why(process, last) {
            let _ = write!(leaf, "; {why}");
        }
        let _ = write!(leaf, " (in {})", hops.last()?.process);
        let (phase, phase_us) = phase(&found);
        Some(Chain { rollout, age_ms, phase, phase_ms: phase_us / 1_000, turns, leaf, hops })
    }

    /// Explains a leaf by the state of the processes that it is for.
    fn why(&self, process: &ProcessWaits, leaf: &WaitReport) -> Option<String> {
        match leaf.kind {
            WaitKind::Call => self.callee(leaf),
            WaitKind::Ranks => {
                let states = states(process, leaf);
                (!states.is_empty()).then(|| states.join("; "))
            }
            WaitKind::Queue => {
                let worker = leaf.on.strip_prefix("worker ")?.strip_suffix(" has it")?;
                let pid = self.workers.get(worker)?;
                let silent = self.silent().find(|silent| silent.pid == Some(*pid));
                Some(match silent {
                    Some(silent) => format!("worker {worker} (pid {pid}) does not answer: {}", silent.reason),
                    None => format!(
                        "worker {worker} (pid {pid}) does not list it: it has not begun, or its result is on the way"
                    ),
                })
            }
            _ => None,
        }
    }

    /// Explains a call that its server does not list.
    fn callee(&self, call: &WaitReport) -> Option<String> {
        let at = |asked: &&Asked| asked.address.url == call.on || asked.address.servers.contains(&call.on);
        let named = |asked: &&Asked| asked.address.server == call.server;
        let asked = self.asked.iter().find(at).or_else(|| self.asked.iter().find(named));
        let server = &call.server;
        Some(match asked.map(|asked| (&asked.answer, asked.address.pid)) {
            None if call.on.starts_with("mem:") => return None,
            None => format!("`{server}` is not registered any more"),
            Some((Ok(_), _)) => format!(
                "`{server}` answers, and does not list the call: it has not arrived, or its response is on the way"
            ),
            Some((Err(silent), _)) if silent.foreign => {
                format!("`{server}` is a server of another program, which does not report what it waits for")
            }
            Some((Err(silent), Some(pid))) => format!("`{server}` (pid {pid}) does not answer: {}", silent.reason),
            Some((Err(silent), None)) => format!("`{server}` does not answer: {}", silent.reason),
        })
    }
}

/// Waits of one process whose ages differ by less may be of one poll, in which the innermost future waits first.
const ONE_POLL_US: u64 = 1_000;

/// Orders the waits of one trace from the rollout to the leaf: by age, and each call directly before its handler. Within a process, a call is
/// recorded after its handler has begun, unless one poll went through several servers; and the ages of two processes are those at different times.
fn in_order<'a>(mut left: Vec<Found<'a>>) -> Vec<Found<'a>> {
    let of_rollout = |wait: &WaitReport| wait.kind.is_root();
    left.sort_by_key(|(_, wait)| (!of_rollout(wait), std::cmp::Reverse(wait.age_us)));
    // An environment server calls an agent, and the agent all others.
    for together in left.chunk_by_mut(|(one, older), (other, wait)| {
        (&one.host, one.pid) == (&other.host, other.pid) && older.age_us.abs_diff(wait.age_us) < ONE_POLL_US
    }) {
        if !together.iter().any(|(_, wait)| of_rollout(wait)) {
            together.sort_by_key(|(_, wait)| (wait.route != "/run", wait.age_us));
        }
    }
    let mut ordered: Vec<Found<'a>> = Vec::new();
    while !left.is_empty() {
        let mut at = 0;
        let (_, next) = left[0];
        if next.kind == WaitKind::Handler {
            let call = left.iter().position(|(_, call)| call.kind == WaitKind::Call && same(call, next));
            at = call.unwrap_or(0);
        }
        let taken = left.remove(at);
        ordered.push(taken);
        if taken.1.kind == WaitKind::Call
            && let Some(at) = left.iter().position(|(_, wait)| wait.kind == WaitKind::Handler && same(wait, taken.1))
        {
            ordered.push(left.remove(at));
        }
    }
    // A handler that blocks its thread is the leaf, although its time is counted from its last poll.
    ordered.sort_by_key(|(_, wait)| wait.kind == WaitKind::Blocked);
    ordered
}

/// Returns the phase of a rollout and its age: what its agent waits for. A verifier that asks a model verifies. Work in a queue is
/// in the phase of the worker that took it.
fn phase(waits: &[Found<'_>]) -> (&'static str, u64) {
    let known = |(_, wait): &Found<'_>| (phase_of(wait), wait.age_us);
    let inner = waits.iter().map(known).find(|(phase, _)| !matches!(*phase, "agent" | "queue"));
    inner.or_else(|| waits.last().map(known)).unwrap_or(("agent", 0))
}

fn phase_of(wait: &WaitReport) -> &'static str {
    match wait.kind {
        WaitKind::Queue => "queue",
        WaitKind::AttemptBackoff => "retry",
        WaitKind::Record => "record",
        WaitKind::Pause => "pause",
        WaitKind::Turn | WaitKind::Ranks | WaitKind::RankQueue | WaitKind::RankCall => "ranks",
        WaitKind::Endpoint | WaitKind::EndpointBackoff => "model",
        WaitKind::Attempt => "agent",
        _ => match &*wait.route {
            "/run" | "" => "agent",
            "/seed_session" | "/reset" => "seed",
            "/verify" => "verify",
            "/close_session" | "/close" => "close",
            route if route.starts_with("/v1/") => "model",
            _ => "tool",
        },
    }
}

fn same(one: &WaitReport, other: &WaitReport) -> bool {
    one.server == other.server && one.route == other.route
}

/// Returns `true` if the attempt `17-3-a1` is one of the rollout `17-3`.
fn is_of(attempt: &str, rollout: &str) -> bool {
    attempt.strip_prefix(rollout).is_some_and(|rest| rest.is_empty() || rest.starts_with("-a"))
}

/// Writes an attempt as a person reads it: `17-3, attempt 2` for `17-3-a1`.
#[cfg(any(feature = "cli", test))]
pub(crate) fn attempt(name: &str) -> String {
    match name.rsplit_once("-a") {
        Some((rollout, number)) => match number.parse::<u32>() {
            Ok(number) => format!("{rollout}, attempt {}", number + 1),
            Err(_) => name.to_owned(),
        },
        None => name.to_owned(),
    }
}

pub(crate) fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1_000.0)
}

fn hop(process: &ProcessWaits, wait: &WaitReport) -> Hop {
    let WaitReport { server, route, on, .. } = wait;
    let left = wait.left_ms.map(seconds);
    let left = left.as_deref().unwrap_or("some time");
    let text = match wait.kind {
        WaitKind::Attempt => "the collector waits for its attempt".to_owned(),
        WaitKind::AttemptBackoff => format!("the collector makes another attempt in {left}"),
        WaitKind::Record => "the collector waits for the disk to record the outcome".to_owned(),
        WaitKind::Pause => format!("the collector begins no rollout: {on}"),
        WaitKind::Call => format!("waits for `{route}` of `{server}` at {on}"),
        WaitKind::CallBackoff => format!("waits before a call is sent again: {on}"),
        WaitKind::Handler => format!("`{server}` runs `{route}`"),
        WaitKind::Blocked => format!("`{route}` of server `{server}` blocks the thread `{on}`"),
        WaitKind::Endpoint => format!("waits for the response of {on}"),
        WaitKind::EndpointBackoff => format!("waits {left} before the endpoint is called again: {on}"),
        WaitKind::Queue => format!("waits in the work queue for `{route}` of `{server}`: {on}"),
        WaitKind::Turn => format!("`{route}` of group `{server}` waits for its turn: {on}"),
        WaitKind::Ranks => format!("`{route}` of group `{server}` waits: {on}"),
        _ => format!("{server} {route} {on}"),
    };
    let program = if process.program.is_empty() { "process" } else { &process.program };
    Hop { wait: wait.clone(), process: format!("{program}, pid {} on {}", process.pid, process.host), text }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::head::waits::process::Address;

    fn wait(kind: WaitKind, age_ms: u64, server: &str, route: &str) -> WaitReport {
        let mut report = WaitReport::new(kind, 7, Duration::from_millis(age_ms));
        report.server = server.to_owned();
        report.route = route.to_owned();
        report
    }

    fn address(server: &str, pid: u32) -> Address {
        let url = format!("http://node-1:{pid}");
        Address { server: server.to_owned(), url, pid: Some(pid), servers: Vec::new() }
    }

    /// All servers in one process: the agent's first poll goes through the call of the model.
    #[test]
    fn the_leaf_is_the_innermost_wait_of_one_poll() {
        let us = |kind, age_us, server: &str, route: &str| {
            let mut report = wait(kind, 0, server, route);
            report.age_us = age_us;
            report
        };
        let waits = vec![
            us(WaitKind::Call, 6_483_250, "environment", "/run"),
            us(WaitKind::Handler, 6_483_247, "environment", "/run"),
            us(WaitKind::Handler, 6_481_796, "policy_model", "/v1/responses"),
            us(WaitKind::Call, 6_481_780, "policy_model", "/v1/responses"),
            us(WaitKind::Handler, 6_481_775, "agent", "/run"),
            us(WaitKind::Call, 6_481_771, "agent", "/run"),
        ];
        let all = [asked("environment", 1, waits)];
        let workers = BTreeMap::new();
        let cluster = Cluster::new(&all, &workers);
        let chains = cluster.chains(&cluster.oldest(None, None, 10), None, 10);
        let texts: Vec<&str> = chains[0].hops.iter().map(|hop| &*hop.text).collect();
        assert!(texts[0].contains("`/run` of `environment`"), "{texts:?}");
        assert_eq!(texts[1..].iter().filter(|text| text.contains("runs")).count(), 3);
        assert_eq!(*texts.last().unwrap(), "`policy_model` runs `/v1/responses`", "{texts:?}");
    }

    fn asked(server: &str, pid: u32, waits: Vec<WaitReport>) -> Asked {
        let mut process = ProcessWaits::default();
        process.host = "node-1".to_owned();
        process.pid = pid;
        process.waits = waits;
        Asked { address: address(server, pid), answer: Ok(process) }
    }

    fn silent(server: &str, pid: u32) -> Asked {
        let address = address(server, pid);
        let answer = Err(NoAnswer {
            server: server.to_owned(),
            url: address.url.clone(),
            pid: Some(pid),
            reason: "its process is stopped".to_owned(),
            foreign: false,
        });
        Asked { address, answer }
    }

    fn chains(asked: &[Asked]) -> Vec<Chain> {
        let workers = BTreeMap::new();
        let cluster = Cluster::new(asked, &workers);
        cluster.chains(&cluster.oldest(None, None, 10), None, 10)
    }

    #[test]
    fn rollouts_of_a_collector_that_reports_elsewhere_take_no_place() {
        // Two collectors of one machine, of which the other one has the older rollouts, with the same names.
        let attempt = |trace, age, rollout: &str| {
            let mut report = WaitReport::new(WaitKind::Attempt, trace, Duration::from_millis(age));
            report.rollout = Some(rollout.to_owned());
            report
        };
        let handler = |trace, age| WaitReport::new(WaitKind::Handler, trace, Duration::from_millis(age));
        let all = [
            asked("", 1, vec![attempt(1, 5_000, "0-0"), attempt(2, 4_000, "0-1")]),
            asked("", 2, vec![attempt(3, 900, "0-0")]),
            asked("agent", 3, vec![handler(1, 5_100), handler(2, 4_100), handler(3, 800)]),
        ];
        let workers = BTreeMap::new();
        let cluster = Cluster::new(&all, &workers);
        let ours = BTreeSet::from([("node-1".to_owned(), 2)]);
        let chains = cluster.chains(&cluster.oldest(None, Some(&ours), 1), None, 1);
        assert_eq!((chains.len(), chains[0].age_ms), (1, 900));
        assert_eq!(cluster.oldest(None, None, 10).len(), 3);
    }

    #[test]
    fn a_chain_leads_from_the_rollout_to_the_server_that_does_not_answer() {
        let mut rollout = wait(WaitKind::Attempt, 41_000, "", "");
        rollout.rollout = Some("17-3-a1".to_owned());
        let call = |age, server: &str, route: &str| {
            let mut report = wait(WaitKind::Call, age, server, route);
            report.on = "http://node-1:3".to_owned();
            report
        };
        // The agent answered a little later than the collector, so its handler seems older than the call.
        let agent = wait(WaitKind::Handler, 41_010, "agent", "/run");
        let asked = [
            asked("", 1, vec![rollout, call(40_999, "agent", "/run")]),
            asked("agent", 2, vec![agent, call(40_000, "model", "/v1/responses")]),
            silent("model", 3),
        ];
        let [chain] = &chains(&asked)[..] else { panic!("one rollout") };
        assert_eq!((chain.rollout.as_deref(), chain.age_ms), (Some("17-3-a1"), 41_000));
        assert_eq!((chain.phase, chain.phase_ms), ("model", 40_000));
        let kinds: Vec<WaitKind> = chain.hops.iter().map(|hop| hop.wait.kind).collect();
        assert_eq!(kinds, [WaitKind::Attempt, WaitKind::Call, WaitKind::Handler, WaitKind::Call]);
        let leaf = "waits for `/v1/responses` of `model` at http://node-1:3; `model` (pid 3) does not answer: its process is stopped";
        assert!(chain.leaf.starts_with(leaf), "{}", chain.leaf);
    }

    #[test]
    fn the_turns_of_an_episode_are_those_of_its_rollout_and_block_nothing() {
        let mut rollout = wait(WaitKind::Attempt, 9_000, "", "");
        rollout.rollout = Some("0-0".to_owned());
        let mut episode = wait(WaitKind::Episode, 8_900, "", "");
        episode.turns = Some(231);
        let all = [asked("", 1, vec![rollout, wait(WaitKind::Handler, 8_950, "agent", "/run"), episode])];
        let [chain] = &chains(&all)[..] else { panic!("one rollout") };
        assert_eq!((chain.turns, chain.hops.len()), (Some(231), 2));
        assert!(chain.leaf.starts_with("`agent` runs `/run`"), "{}", chain.leaf);
    }

    #[test]
    fn a_turn_leads_to_the_call_that_holds_it() {
        let mut turn = wait(WaitKind::Turn, 30_000, "logprob", "score");
        turn.holder = Some("policy".to_owned());
        let mut train = wait(WaitKind::Ranks, 40_000, "policy", "train");
        train.on = "rank 1 (pid 312)".to_owned();
        train.trace = String::new();
        let chains = chains(&[asked("", 1, vec![turn, train])]);
        let of_turn = chains.iter().find(|chain| chain.hops.len() == 2).expect("a chain over both groups");
        assert!(of_turn.leaf.starts_with("`train` of group `policy` waits: rank 1 (pid 312)"), "{}", of_turn.leaf);
    }

    #[test]
    fn servers_of_one_process_report_its_waits_once() {
        let run = |server: &str| {
            let mut report = wait(WaitKind::Handler, 9_000, server, "/run");
            report.rollout = Some("0-0".to_owned());
            report
        };
        let model = || wait(WaitKind::Handler, 8_000, "model", "/v1/responses");
        let asked = [asked("env", 1, vec![run("env"), model()]), asked("agent", 1, vec![run("agent"), model()])];
        let [chain] = &chains(&asked)[..] else { panic!("one rollout") };
        assert_eq!(
            chain.hops.iter().map(|hop| &*hop.text).collect::<Vec<_>>(),
            ["`env` runs `/run`", "`agent` runs `/run`", "`model` runs `/v1/responses`"]
        );
    }

    #[test]
    fn waits_of_one_process_are_ordered_although_inner_ones_are_recorded_first() {
        let us = |age_us, report: WaitReport| {
            let mut report = report;
            report.age_us = age_us;
            report
        };
        let waits = vec![
            us(900, wait(WaitKind::Handler, 0, "agent", "/run")),
            us(800, wait(WaitKind::Handler, 0, "model", "/v1/responses")),
            us(700, wait(WaitKind::Endpoint, 0, "", "")),
            us(600, wait(WaitKind::Call, 0, "model", "/v1/responses")),
            us(500, wait(WaitKind::Call, 0, "agent", "/run")),
            us(400, wait(WaitKind::Attempt, 0, "", "")),
        ];
        let [chain] = &chains(&[asked("", 1, waits)])[..] else { panic!("one rollout") };
        let kinds: Vec<WaitKind> = chain.hops.iter().map(|hop| hop.wait.kind).collect();
        use WaitKind::{Attempt, Call, Endpoint, Handler};
        assert_eq!(kinds, [Attempt, Call, Handler, Call, Handler, Endpoint]);
    }

    #[test]
    fn the_phase_is_what_the_agent_waits_for() {
        let of = |waits: &[(WaitKind, &str)]| {
            let mut age = 10_000;
            let waits = waits.iter().map(|(kind, route)| {
                age -= 1_000;
                wait(*kind, age, if *route == "/run" { "agent" } else { "env" }, route)
            });
            let asked = [asked("", 1, waits.collect())];
            let [chain] = &chains(&asked)[..] else { panic!("one rollout") };
            (chain.phase, chain.phase_ms)
        };
        use WaitKind::{Attempt, AttemptBackoff, Call, Handler, Queue};
        assert_eq!(of(&[(Attempt, ""), (Queue, "/run")]), ("queue", 8_000));
        assert_eq!(of(&[(Attempt, ""), (Queue, "/run"), (Handler, "/run"), (Call, "/add")]), ("tool", 6_000));
        assert_eq!(of(&[(Attempt, ""), (Call, "/run"), (Handler, "/run")]), ("agent", 7_000));
        let judged = [(Attempt, ""), (Call, "/run"), (Handler, "/run"), (Call, "/verify"), (Handler, "/v1/responses")];
        assert_eq!(of(&judged), ("verify", 6_000));
        assert_eq!(of(&[(AttemptBackoff, "")]), ("retry", 9_000));
    }

    #[test]
    fn attempts_are_counted_from_one() {
        assert_eq!(attempt("17-3-a1"), "17-3, attempt 2");
        assert_eq!(attempt("17-3"), "17-3");
        assert!(is_of("17-3-a1", "17-3") && is_of("17-3", "17-3") && !is_of("17-31", "17-3"));
    }
}
