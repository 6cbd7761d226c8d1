//! `rgym stuck`: names the wait that blocks each of the oldest rollouts, across processes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_client::registry::RemoteRegistry;
use gym_core::registry::MemberRegistry as _;
use gym_core::{CallContext, Endpoint, World};
use serde::Serialize;

use crate::cli::args::options::StuckArgs;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
use crate::cli::inspect::status::{self, ListedServer};
use crate::cli::inspect::with_notice;
use crate::cli::setup::head_server;
use crate::head::waits::chain::{attempt, seconds};
use crate::head::waits::process::{Address, of_this_machine};
use crate::head::waits::{FollowedWaits, WaitsWanted, attempts_in_flight, follow, processes};
use crate::stack::Servers;

/// Limit for a request to the head server. Whoever asks what stands still does not wait long for a head server that does.
const HEAD_TIMEOUT: Duration = Duration::from_secs(3);

/// Rollouts in flight that the message about an unknown one names.
const NAMED_MAX: usize = 5;

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct StuckReport {
    #[serde(flatten)]
    waits: FollowedWaits,
    /// The reason why the rollout that was asked for is not listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<String>,
    /// The reason why the head server was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    head: Option<String>,
}

pub(in crate::cli) async fn stuck(
    args: StuckArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
) -> Outcome {
    let (_, head) = head_server::of_command(args.head_url.as_deref(), head_url_given, overrides, servers).await?;
    let transports = servers.transports();
    let (listed, no_head) = match with_notice(&head, HEAD_TIMEOUT, status::list(&transports, &head, HEAD_TIMEOUT)).await
    {
        Ok(listed) => (listed, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let asked_at = addresses(no_head.is_none().then_some(&head), listed);
    if let (Some(error), true) = (&no_head, asked_at.is_empty()) {
        return Err(Failure::Failed(format!(
            "{error}\n  fix: set the head server with --head-url or HEAD_SERVER_URL; a collection is found on its own machine"
        )));
    }
    let workers = match &no_head {
        None => workers(&head, &transports).await,
        Some(_) => BTreeMap::new(),
    };
    if let Some(wanted) = args.rollout.as_deref().filter(|wanted| rollout(wanted).is_none()) {
        return Err(Failure::Usage(format!(
            "{wanted}: this names no rollout\n  fix: write TASK-REPEAT, both from 0: {} stuck 17-3",
            console::program()
        )));
    }
    let wanted = WaitsWanted {
        rollout: args.rollout.as_deref(),
        older: args.older,
        collectors: None,
        limit: usize::try_from(args.limit).unwrap_or(usize::MAX),
    };
    let waits = follow(&transports, &asked_at, &workers, wanted).await;
    let unknown = match args.rollout.as_deref() {
        Some(wanted) if waits.chains.is_empty() => {
            let attempts = attempts_in_flight(&transports, &asked_at).await;
            Some(without_waits(wanted, args.older, &attempts))
        }
        _ => None,
    };
    let report = StuckReport { waits, unknown, head: no_head };
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::Failed(error.to_string()))?;
        console::print(&text);
    } else {
        console::print(&text(&report, &args));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the addresses of the servers that the head server lists, and of the programs of this machine.
fn addresses(head: Option<&Endpoint>, listed: Vec<ListedServer>) -> Vec<Address> {
    let servers = listed.into_iter().filter_map(|server| {
        let (server, url, pid) = (server.process_name, server.url?, server.pid);
        Some(Address { server, url, pid, servers: Vec::new() })
    });
    let head = head.map(|head| {
        let (server, url) = ("head_server".to_owned(), head.to_string());
        Address { server, url, pid: None, servers: Vec::new() }
    });
    head.into_iter().chain(servers).chain(of_this_machine()).collect()
}

/// Returns the process of each worker. A head server of NeMo Gym has none.
async fn workers(head: &Endpoint, transports: &Transports) -> BTreeMap<String, u32> {
    let registry = Arc::new(RemoteRegistry::new(head.clone(), transports.clone(), World::real()));
    processes(registry.members(&CallContext::within(HEAD_TIMEOUT)).await.unwrap_or_default())
}

/// Returns the task and the repeat of a rollout or an attempt: `17-3`, or `17-3-a1`.
fn rollout(name: &str) -> Option<(u32, u32)> {
    let (task, repeat) = name.split_once('-')?;
    let repeat = match repeat.split_once("-a") {
        Some((repeat, attempt)) => attempt.parse::<u32>().ok().map(|_| repeat)?,
        None => repeat,
    };
    Some((task.parse().ok()?, repeat.parse().ok()?))
}

/// Says why a rollout has no waits: it is young, or not in flight, and then which ones are.
fn without_waits(wanted: &str, older: Duration, attempts: &BTreeMap<String, u64>) -> String {
    let at = rollout(wanted);
    if let Some((_, age)) = attempts.iter().find(|(name, _)| *name == wanted || rollout(name) == at) {
        return format!(
            "rollout {wanted} is in flight for {}, and nothing of it has waited for {} s\n  fix: add --older 0 to see its waits",
            seconds(*age),
            older.as_secs_f64()
        );
    }
    let mut rollouts: Vec<(u32, u32)> = attempts.keys().filter_map(|name| rollout(name)).collect();
    rollouts.sort_unstable();
    rollouts.dedup();
    if rollouts.is_empty() {
        return format!(
            "rollout {wanted} is not in flight, and no other one is\n  fix: `{} view FILE {wanted}` shows one that has ended",
            console::program()
        );
    }
    let more = rollouts.len().saturating_sub(NAMED_MAX);
    // Those of the nearest tasks, in their order.
    let (task, repeat) = at.unwrap_or_default();
    rollouts.sort_by_key(|rollout| (rollout.0.abs_diff(task), rollout.1.abs_diff(repeat)));
    rollouts.truncate(NAMED_MAX);
    rollouts.sort_unstable();
    let named: Vec<String> = rollouts.iter().map(|(task, repeat)| format!("{task}-{repeat}")).collect();
    let more = if more > 0 { format!(" and {more} others") } else { String::new() };
    format!(
        "rollout {wanted} is not in flight; in flight are {}{more}\n  fix: name one of them as TASK-REPEAT; `{} view FILE {wanted}` shows \
         one that has ended",
        named.join(", "),
        console::program()
    )
}

fn text(report: &StuckReport, args: &StuckArgs) -> String {
    let mut text = String::new();
    for chain in &report.waits.chains {
        let subject =
            chain.rollout.as_deref().map_or("call".to_owned(), |rollout| format!("rollout {}", attempt(rollout)));
        let turns = chain.turns.map(|turns| format!(", {turns} turns")).unwrap_or_default();
        let _ = writeln!(text, "{subject}, {}{turns}: {}", seconds(chain.age_ms), chain.leaf);
        for hop in &chain.hops {
            let _ = writeln!(text, "  {:>8}  {} ({})", seconds(hop.wait.age_us / 1_000), hop.text, hop.process);
        }
    }
    if let Some(unknown) = &report.unknown {
        let _ = writeln!(text, "{unknown}");
    } else if report.waits.chains.is_empty() {
        let _ = writeln!(text, "nothing has waited for {} s", args.older.as_secs_f64());
    }
    for silent in &report.waits.silent {
        let name = if silent.server.is_empty() { "a program" } else { &silent.server };
        let pid = silent.pid.map(|pid| format!("pid {pid}, ")).unwrap_or_default();
        let _ = writeln!(text, "no answer from {name} ({pid}{}): {}", silent.url, silent.reason);
    }
    if let Some(error) = &report.head {
        let _ = writeln!(text, "without the servers of a head server: {error}");
    }
    let _ = write!(text, "{} servers and programs answered", report.waits.processes);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_without_waits_is_young_or_not_in_flight() {
        let older = Duration::from_secs(5);
        let of = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 1_200)).collect();
        let says = |wanted, names: &[&str]| without_waits(wanted, older, &of(names));
        let none = says("9-9", &[]);
        assert!(none.starts_with("rollout 9-9 is not in flight, and no other one is\n  fix: `"), "{none}");
        let all = ["0-0", "0-1-a2", "7-0", "8-0", "8-1", "9-0", "9-1", "30-4"];
        let near = says("9-9", &all);
        let expected =
            "rollout 9-9 is not in flight; in flight are 7-0, 8-0, 8-1, 9-0, 9-1 and 3 others\n  fix: name one";
        assert!(near.starts_with(expected), "{near}");
        for wanted in ["0-1", "0-1-a2"] {
            let young = says(wanted, &all);
            assert!(
                young.contains("is in flight for 1.2 s, and nothing of it has waited for 5 s\n  fix: add --older 0")
            );
        }
        assert_eq!(
            (rollout("17-3"), rollout("17-3-a1"), rollout("17"), rollout("a-b")),
            (Some((17, 3)), Some((17, 3)), None, None)
        );
    }
}
