//! `rgym top`: the collections and workers of a head server in the terminal, as its page shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::time::Duration;

use gym_client::registry::{RemoteRegistry, local_programs};
use gym_core::registry::MemberState;
use gym_core::rollout::{Attempt, TaskKey};
use gym_core::{CallContext, Code, Endpoint, Error, Request, World};
use serde::Deserialize;

use crate::cli::args::options::TopArgs;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
use crate::cli::inspect::{HEAD_TIMEOUT, with_notice};
use crate::cli::setup::head_server;
use crate::cli::setup::signals::StopSignals;
use crate::head::collections::CollectionView;
use crate::head::page::ClusterView;
use crate::stack::Servers;

/// Time between two drawings, at least.
const DRAW_INTERVAL: Duration = Duration::from_secs(1);
/// Lines of a screen whose height is unknown.
const HEIGHT: usize = 40;
/// Columns of a screen whose width is unknown.
const WIDTH: usize = 140;
/// Span over which the rate of a collection is measured.
const RATE_SECONDS: u64 = 15;
/// Rollouts in flight and causes that are listed for a collection.
const LISTED_MAX: usize = 5;

/// Draws until a signal comes; without a terminal, prints once.
pub(in crate::cli) async fn top(
    args: TopArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
) -> Outcome {
    let (_, head) = head_server::of_command(args.head_url.as_deref(), head_url_given, overrides, servers).await?;
    let at = |head: &Endpoint| RemoteRegistry::new(head.clone(), servers.transports(), World::real());
    let (mut head, mut registry) = (head.clone(), at(&head));
    let mut first = with_notice(&head, HEAD_TIMEOUT, read(&registry, None)).await;
    // Those of programs on this machine, such as of a collection that has started its own servers.
    let others: BTreeSet<String> = local_programs()
        .into_iter()
        .filter_map(|program| program.head.filter(|other| *other != head).map(|other| other.to_string()))
        .collect();
    let named = args.head_url.is_some() || !overrides.is_empty();
    if let (Err(error), false, Some(other)) = (&first, named, others.first().filter(|_| others.len() == 1)) {
        eprintln!("{error}\nshowing the head server of a program of this machine, {other}");
        head = head_server::parse(other)?;
        registry = at(&head);
        first = with_notice(&head, HEAD_TIMEOUT, read(&registry, None)).await;
    }
    let first = first.map_err(|error| {
        let fix = match error.code() {
            Code::NotFound => {
                "this head server has no page, because it is NeMo Gym's or older; `rgym status` lists its servers"
                    .to_owned()
            }
            Code::DeadlineExceeded => {
                format!("`{} stuck --head-url {head}` says whether its process stands still", console::program())
            }
            _ if !others.is_empty() => {
                let others = others.iter().cloned().collect::<Vec<_>>().join(", ");
                format!(
                    "name the head server with --head-url or HEAD_SERVER_URL; programs of this machine have {others}"
                )
            }
            _ => format!(
                "start servers with `{} run`, or set another head server with --head-url or HEAD_SERVER_URL",
                console::program()
            ),
        };
        Failure::Failed(format!("{error}\n  fix: {fix}"))
    })?;
    if args.once || !io::stdout().is_terminal() {
        let waits = read_waits(&registry, &first).await;
        console::print(&text(&first, &waits, head.as_str(), WIDTH));
        return Ok(ExitCode::SUCCESS);
    }
    let stop = StopSignals::listen()?;
    // The alternate screen, without a cursor: the terminal is as before afterwards.
    console::print("\x1b[?1049h\x1b[?25l");
    let mut waits = read_waits(&registry, &first).await;
    let mut state = Ok(first);
    let mut seen = None;
    while !stop.graceful.is_cancelled() {
        let shown = match &state {
            Ok(state) => {
                seen = Some(format!("seen={}&roster={}&ended={}", state.seen, state.roster, u64::MAX));
                text(state, &waits, head.as_str(), WIDTH)
            }
            Err(error) => format!("{head} does not respond: {error}\ntrying again; Ctrl-C ends"),
        };
        console::print(&screen(&shown));
        let next = async {
            let (next, ()) = tokio::join!(read(&registry, seen.as_deref()), tokio::time::sleep(DRAW_INTERVAL));
            let waits = match &next {
                Ok(state) => read_waits(&registry, state).await,
                Err(_) => Waits::new(),
            };
            (next, waits)
        };
        tokio::select! {
            biased;
            () = stop.graceful.cancelled() => break,
            next = next => (state, waits) = next,
        }
        if state.is_err() {
            seen = None;
        }
    }
    console::print("\x1b[?25h\x1b[?1049l");
    Ok(ExitCode::SUCCESS)
}

async fn read(registry: &RemoteRegistry, seen: Option<&str>) -> Result<ClusterView, Error> {
    let none = format!("ended={}", u64::MAX);
    let route = format!("/ui/state?{}", seen.unwrap_or(&none));
    let response = registry.send(&Request::get(CallContext::within(HEAD_TIMEOUT), route), true).await;
    // The query is nothing for a person.
    let response = response.map_err(|error| {
        let subject = error.subject().replace(&format!("?{}", seen.unwrap_or(&none)), "");
        error.about(subject)
    })?;
    serde_json::from_slice(&response.message.head.to_bytes()).map_err(|error| {
        Error::finished(Code::DataLoss, "the state of the head server cannot be read").caused_by(error)
    })
}

/// The wait of each rollout, by its attempt.
type Waits = BTreeMap<String, RolloutWait>;

#[derive(Deserialize)]
struct RolloutWait {
    rollout: Option<String>,
    phase: String,
    phase_ms: u64,
    #[serde(default)]
    turns: Option<u32>,
    leaf: String,
}

/// Returns what the oldest rollouts wait for, if any is in flight. Without an answer, the rest is shown.
async fn read_waits(registry: &RemoteRegistry, state: &ClusterView) -> Waits {
    #[derive(Deserialize)]
    struct Answer {
        chains: Vec<RolloutWait>,
    }
    if !state.collections.iter().any(|view| view.report.end.is_none() && view.report.in_flight > 0) {
        return Waits::new();
    }
    let asked = registry.send(&Request::get(CallContext::within(HEAD_TIMEOUT), "/ui/waits"), true).await;
    let answer: Option<Answer> =
        asked.ok().and_then(|response| serde_json::from_slice(&response.message.head.to_bytes()).ok());
    let chains = answer.map(|answer| answer.chains).unwrap_or_default();
    chains.into_iter().filter_map(|wait| Some((wait.rollout.clone()?, wait))).collect()
}

/// Returns the text for one screen: from the top, each line cleared to its end, the rest of the screen cleared.
fn screen(text: &str) -> String {
    let (columns, rows) = rustix::termios::tcgetwinsize(io::stdout())
        .map_or((WIDTH, HEIGHT), |size| (usize::from(size.ws_col).max(20), usize::from(size.ws_row).max(5)));
    let lines = text.lines().take(rows - 1).map(|line| line.chars().take(columns).collect::<String>());
    let lines: Vec<String> = lines.map(|line| format!("{line}\x1b[K")).collect();
    format!("\x1b[H{}\x1b[J", lines.join("\r\n"))
}

fn text(state: &ClusterView, waits: &Waits, head: &str, width: usize) -> String {
    let mut states: BTreeMap<String, usize> = BTreeMap::new();
    for member in &state.members {
        *states.entry(member.state.to_string()).or_default() += 1;
    }
    let workers: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let mut out = format!("{head}  {} servers", state.servers.len());
    // Writing to a string cannot fail.
    let _ = match workers.is_empty() {
        true => write!(out, ", no workers"),
        false => write!(out, ", workers: {}", workers.join(", ")),
    };
    if state.expected > 0 {
        let _ = write!(out, " (waits for {})", state.expected);
    }
    for collection in &state.collections {
        out.push_str("\n\n");
        self::collection(&mut out, collection, waits, width);
    }
    if state.collections.is_empty() {
        out.push_str("\n\nno collection has reported to this head server");
    }
    let troubled = state.members.iter().filter(|member| !matches!(member.state, MemberState::Serving));
    for member in troubled.take(LISTED_MAX * 2) {
        let _ = write!(out, "\n{} is {}: {}", member.spec.name, member.state, member.why());
    }
    out
}

fn collection(out: &mut String, view: &CollectionView, waits: &Waits, width: usize) {
    let report = &view.report;
    let (done, total) = (report.completed + report.already_completed, report.rollouts);
    let word = match &report.end {
        // Every row was tried.
        Some(end) if end == "exhausted" => "finished".to_owned(),
        Some(end) => end.replace('_', " "),
        None if view.silent => format!("no report for {} s", view.silent_ms / 1_000),
        None => "running".to_owned(),
    };
    let cells = 24;
    let filled = ((done + report.failed) * cells).checked_div(total).unwrap_or(0).min(cells);
    let bar = "█".repeat(filled as usize) + &"░".repeat((cells - filled) as usize);
    let _ = write!(out, "{}  {word}  {}, pid {}\n{bar} {done}/{total}", report.output, report.host, report.pid);
    if let (None, Some(rate)) = (&report.end, rate(view)) {
        let _ = write!(out, ", {rate:.1}/s");
        let left = total.saturating_sub(done + report.failed);
        if rate > 0.0 && left > 0 {
            let seconds = (left as f64 / rate).ceil() as u64;
            let _ = write!(out, ", ETA {:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60);
        }
    }
    if let Some(mean) = report.mean_reward {
        let _ = write!(out, ", mean reward {mean:.3}");
    }
    let _ = write!(out, ", {} in flight, {} failed", report.in_flight, report.failed);
    if let Some(queue) = &report.queue {
        let _ = write!(out, ", {} wait for {} workers", queue.waiting, queue.workers.len());
        if queue.workers_lost > 0 {
            let _ = write!(out, " ({} lost)", queue.workers_lost);
        }
    }
    if report.end.is_none() {
        for rollout in report.oldest.iter().take(LISTED_MAX) {
            let (id, seconds) = (rollout.attempt, rollout.seconds + view.silent_ms as f64 / 1e3);
            let mut line =
                format!("  {}-{}  {}  attempt {}  {seconds:.1} s", id.task, id.repeat, rollout.agent, id.attempt + 1);
            let attempt = Attempt { key: TaskKey::new(id.task, id.repeat), number: id.attempt };
            if let Some(wait) = waits.get(&attempt.to_string()) {
                let turns = wait.turns.map(|turns| format!(", {turns} turns")).unwrap_or_default();
                let _ = write!(line, "  {} {:.1} s{turns}: {}", wait.phase, wait.phase_ms as f64 / 1e3, wait.leaf);
            }
            let line: String = line.chars().take(width).collect();
            let _ = write!(out, "\n{line}");
        }
    }
    for cause in report.causes.iter().take(LISTED_MAX) {
        let chain: Vec<String> = cause.causes.iter().map(ToString::to_string).filter(|text| !text.is_empty()).collect();
        let line = format!("  {} × {}: {}", cause.count, cause.class, chain.join(": "));
        let line: String = line.chars().map(|c| if c == '\n' { ' ' } else { c }).take(width).collect();
        let _ = write!(out, "\n{line}");
    }
}

/// Returns the rollouts that ended in a second.
fn rate(view: &CollectionView) -> Option<f64> {
    let last = view.history.last()?;
    let first = view.history.iter().find(|point| point.0 + RATE_SECONDS * 1_000 >= last.0)?;
    let (ended, took) = ((last.1 + last.2).saturating_sub(first.1 + first.2), last.0.saturating_sub(first.0));
    (took > 0).then(|| ended as f64 / took as f64 * 1e3)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_screen_has_progress_oldest_rollouts_causes_and_workers_that_do_not_serve() {
        let state: ClusterView = serde_json::from_value(json!({
            "seen": 3, "roster": "1.2", "now_ms": 0, "started_ms": 0, "expected": 0, "ended": [], "servers": [],
            "members": [{
                "name": "w1", "incarnation": 1, "heartbeat_ms": 1000, "timeout_ms": 3000, "reconnect_ms": 100, "state": "suspect",
                "reason": "2 heartbeats missed", "silent_ms": 2100,
            }],
            "collections": [{
                "id": "c", "host": "h", "pid": 7, "output": "results/a.jsonl", "rollouts": 200, "completed": 90, "already_completed": 10,
                "failed": 20, "in_flight": 1, "mean_reward": 0.5, "silent_ms": 500, "silent": false,
                "history": [[0, 0, 0, 9, null], [30_000, 50, 0, 9, 0.4], [40_000, 100, 20, 1, 0.5]],
                "oldest": [{"task": 17, "repeat": 3, "attempt": 1, "agent": "math_agent", "seconds": 41.0}],
                "failures": {"tool_error": 20},
                "causes": [{
                    "count": 20, "class": "tool_error", "server": "math", "route": "/add", "example": "3-0",
                    "causes": [{"subject": "POST math/add"}, {"message": "panicked\nat line 3"}],
                }],
            }],
        }))
        .unwrap();
        let expected = "http://h:11000  0 servers, workers: 1 suspect\n\n\
            results/a.jsonl  running  h, pid 7\n\
            ██████████████░░░░░░░░░░ 100/200, 7.0/s, ETA 00:00:12, mean reward 0.500, 1 in flight, 20 failed\n  \
            17-3  math_agent  attempt 2  41.5 s  model 40.2 s, 231 turns: waits for `/v1/responses` of `m`\n  \
            20 × tool_error: POST math/add: panicked at line 3\n\
            w1 is suspect: 2 heartbeats missed";
        let wait = json!({"rollout": "17-3-a1", "phase": "model", "phase_ms": 40_200, "turns": 231, "leaf": "waits for `/v1/responses` of `m`"});
        let waits = Waits::from([("17-3-a1".to_owned(), serde_json::from_value(wait).unwrap())]);
        assert_eq!(text(&state, &waits, "http://h:11000", 140), expected);
        let mut ended = state;
        ended.collections[0].report.end = Some("exhausted".to_owned());
        let shown = text(&ended, &Waits::new(), "http://h:11000", 140);
        assert!(shown.contains("results/a.jsonl  finished  h, pid 7"), "{shown}");
    }
}
