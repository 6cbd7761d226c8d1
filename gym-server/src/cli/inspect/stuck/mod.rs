//! `rgym stuck`: names the wait that blocks each of the oldest rollouts, across processes.
//!
//! ```text
//!   servers of the head · collectors and controllers of this machine ◄── GET /waits?older_ms=…   which traces are old
//!                                                                    ◄── GET /waits?trace=…      all waits of these traces
//!   chains: rollout ▸ call ▸ handler ▸ … ▸ leaf ▸ state of the process that does not answer
//! ```

mod chain;
mod process;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use gym_client::registry::RemoteRegistry;
use gym_core::registry::{MemberRegistry as _, MemberSpec};
use gym_core::{CallContext, World};
use serde::Serialize;

use crate::cli::args::options::StuckArgs;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
use crate::cli::inspect::status::{self, HEAD_TIMEOUT};
use crate::cli::setup::head_server;
use crate::stack::Servers;
use chain::{Chain, Cluster, attempt, seconds};
use process::{NoAnswer, addresses, ask};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct StuckReport {
    /// Processes that answered.
    processes: usize,
    chains: Vec<Chain>,
    /// Processes that did not answer.
    silent: Vec<NoAnswer>,
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
    let (listed, no_head) = match status::list(&transports, &head).await {
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
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let older = args.older.as_millis();
    let rollout = args.rollout.as_deref();
    let first = ask(&transports, &asked_at, &format!("older_ms={older}")).await;
    let traces = Cluster::new(&first, &workers).oldest(rollout, limit);
    // Asked once more: the leaf of an old rollout can be young, and a process leaves out its youngest waits.
    let mut all = first;
    if !traces.is_empty() {
        let answering: Vec<_> =
            all.iter().filter(|asked| asked.answer.is_ok()).map(|asked| asked.address.clone()).collect();
        let silent = all.extract_if(.., |asked| asked.answer.is_err()).collect::<Vec<_>>();
        let mut again = ask(&transports, &answering, &format!("trace={}", traces.join(","))).await;
        for (again, first) in again.iter_mut().zip(all) {
            match (&mut again.answer, first.answer) {
                // Calls of groups have no trace, and a turn can be held by a call of another one.
                (Ok(again), Ok(first)) => {
                    again.add(first.waits.into_iter().filter(|wait| !traces.contains(&wait.trace)));
                }
                (again, first) => *again = first,
            }
        }
        again.extend(silent);
        all = again;
    }
    let cluster = Cluster::new(&all, &workers);
    let report = StuckReport {
        processes: all.iter().filter(|asked| asked.answer.is_ok()).count(),
        chains: cluster.chains(&traces, rollout, limit),
        silent: cluster.silent().filter(|silent| !silent.foreign).cloned().collect(),
        head: no_head,
    };
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::Failed(error.to_string()))?;
        console::print(&text);
    } else {
        console::print(&text(&report, &args));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the process of each worker. A head server of NeMo Gym has none.
async fn workers(head: &gym_core::Endpoint, transports: &gym_client::Transports) -> BTreeMap<String, u32> {
    let registry = Arc::new(RemoteRegistry::new(head.clone(), transports.clone(), World::real()));
    let members = registry.members(&CallContext::within(HEAD_TIMEOUT)).await.unwrap_or_default();
    let pid = |spec: &MemberSpec| {
        // A worker's servers run in its process, except for those in Python.
        let labels = std::iter::once(&spec.labels).chain(spec.servers.iter().map(|server| &server.labels));
        labels.filter_map(|labels| labels.get("pid")?.parse().ok()).next()
    };
    members.into_iter().filter_map(|member| Some((member.spec.name.clone(), pid(&member.spec)?))).collect()
}

fn text(report: &StuckReport, args: &StuckArgs) -> String {
    let mut text = String::new();
    for chain in &report.chains {
        let subject =
            chain.rollout.as_deref().map_or("call".to_owned(), |rollout| format!("rollout {}", attempt(rollout)));
        let _ = writeln!(text, "{subject}, {}: {}", seconds(chain.age_ms), chain.leaf);
        for hop in &chain.hops {
            let _ = writeln!(text, "  {:>8}  {} ({})", seconds(hop.wait.age_us / 1_000), hop.text, hop.process);
        }
    }
    if report.chains.is_empty() {
        let _ = writeln!(text, "nothing has waited for {} s", args.older.as_secs_f64());
    }
    for silent in &report.silent {
        let name = if silent.server.is_empty() { "a program" } else { &silent.server };
        let pid = silent.pid.map(|pid| format!("pid {pid}, ")).unwrap_or_default();
        let _ = writeln!(text, "no answer from {name} ({pid}{}): {}", silent.url, silent.reason);
    }
    if let Some(error) = &report.head {
        let _ = writeln!(text, "without the servers of a head server: {error}");
    }
    let _ = write!(text, "{} servers and programs answered", report.processes);
    text
}
