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
use crate::cli::inspect::patiently;
use crate::cli::inspect::status::{self, ListedServer};
use crate::cli::setup::head_server;
use crate::head::waits::chain::{attempt, seconds};
use crate::head::waits::process::{Address, of_this_machine};
use crate::head::waits::{FollowedWaits, WaitsWanted, follow, processes};
use crate::stack::Servers;

/// Limit for a request to the head server. Whoever asks what stands still does not wait long for a head server that does.
const HEAD_TIMEOUT: Duration = Duration::from_secs(3);

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct StuckReport {
    #[serde(flatten)]
    waits: FollowedWaits,
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
    let (listed, no_head) = match patiently(&head, HEAD_TIMEOUT, status::list(&transports, &head, HEAD_TIMEOUT)).await {
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
    let wanted = WaitsWanted {
        rollout: args.rollout.as_deref(),
        older: args.older,
        collectors: None,
        limit: usize::try_from(args.limit).unwrap_or(usize::MAX),
    };
    let waits = follow(&transports, &asked_at, &workers, wanted).await;
    let report = StuckReport { waits, head: no_head };
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

fn text(report: &StuckReport, args: &StuckArgs) -> String {
    let mut text = String::new();
    for chain in &report.waits.chains {
        let subject =
            chain.rollout.as_deref().map_or("call".to_owned(), |rollout| format!("rollout {}", attempt(rollout)));
        let _ = writeln!(text, "{subject}, {}: {}", seconds(chain.age_ms), chain.leaf);
        for hop in &chain.hops {
            let _ = writeln!(text, "  {:>8}  {} ({})", seconds(hop.wait.age_us / 1_000), hop.text, hop.process);
        }
    }
    if report.waits.chains.is_empty() {
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
