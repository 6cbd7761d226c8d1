//! `rgym status`: lists the servers of a head server of the SDK or of NeMo Gym, with the health of each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::future::join_all;
use gym_client::Transports;
use gym_client::registry::RemoteRegistry;
use gym_core::registry::{Member, MemberRegistry as _};
use gym_core::server::EndpointReport;
use gym_core::transport::Transport;
use gym_core::{CallContext, Endpoint, Error, Response, Result, World};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cli::args::options::StatusArgs;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
#[cfg(feature = "ray")]
use crate::cli::inspect::ray::{self, ClusterStatus};
use crate::cli::inspect::{HEAD_TIMEOUT, with_notice, without_head, workers};
use crate::cli::setup::head_server;
use crate::cli::setup::models::in_progress;
use crate::role::reply::health::{PeerReport, StallReport};
use crate::role::reply::runs::OldestRun;
use crate::stack::Servers;

/// Limit for a health request; a slower server counts as unhealthy.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit for the displayed part of a health response, which other programs may exceed.
const REASON_CHARS_MAX: usize = 80;

#[derive(Debug, Serialize)]
struct Status {
    head: ServerHealth,
    servers: Vec<ServerHealth>,
    /// The members of the cluster, with those that left or were lost. Empty for NeMo Gym's head server.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    members: Vec<Member>,
    /// The Ray cluster of the configuration.
    #[cfg(feature = "ray")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ray: Option<ClusterStatus>,
}

#[derive(Debug, Serialize)]
struct ServerHealth {
    name: String,
    kind: String,
    implementation: String,
    url: String,
    pid: Option<u32>,
    healthy: bool,
    /// The reported status, or the reason for its absence.
    health: String,
    in_flight: Option<i64>,
    /// The rollout that an agent or an environment server has been running for the longest time.
    oldest: Option<OldestRun>,
    uptime_seconds: Option<u64>,
    /// The paths to the server's peers in other processes.
    peers: Vec<PeerReport>,
    /// Handlers that block a thread of the server's process.
    stalls: Vec<StallReport>,
    /// The endpoints of a model server.
    endpoints: Vec<EndpointReport>,
}

/// The fields that are read from `/server_instances`.
#[derive(Debug, Deserialize)]
pub(super) struct ListedServer {
    pub(super) process_name: String,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    server_type: Option<String>,
    #[serde(default)]
    pub(super) url: Option<String>,
    #[serde(default)]
    pub(super) pid: Option<u32>,
    #[serde(default)]
    start_time: Option<f64>,
}

pub(in crate::cli) async fn status(
    args: StatusArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
) -> Outcome {
    let (config, head) = head_server::of_command(args.head_url.as_deref(), head_url_given, overrides, servers).await?;
    #[cfg(not(feature = "ray"))]
    drop(config);
    let world = World::real();
    let transports = servers.transports();
    let listed = with_notice(&head, HEAD_TIMEOUT, list(&transports, &head, HEAD_TIMEOUT))
        .await
        .map_err(|error| Failure::Failed(format!("{error}\n  fix: {}", without_head())))?;
    let now = world.now().as_secs_f64();
    let servers = listed.into_iter().map(|listed| health(&transports, listed, now));
    let head_entry = ListedServer {
        process_name: "head_server".to_owned(),
        name: Some("head".to_owned()),
        server_type: Some("head_server".to_owned()),
        url: Some(head.to_string()),
        pid: None,
        start_time: None,
    };
    let registry = RemoteRegistry::new(head.clone(), transports.clone(), world);
    let cx = CallContext::within(HEAD_TIMEOUT);
    let (head, servers, members) =
        tokio::join!(health(&transports, head_entry, now), join_all(servers), registry.members(&cx));
    let status = Status {
        head,
        servers,
        members: members.unwrap_or_default(),
        #[cfg(feature = "ray")]
        ray: ray::of_configuration(&config).await?,
    };
    if args.json {
        let text = serde_json::to_string_pretty(&status).map_err(|error| Failure::Failed(error.to_string()))?;
        console::print(&text);
    } else {
        console::print(&text(&status, &transports.known()));
        #[cfg(feature = "ray")]
        status.ray.iter().for_each(|ray| console::print(&format!("\n{}", ray.text())));
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn list(transports: &Transports, head: &Endpoint, within: Duration) -> Result<Vec<ListedServer>> {
    let response = get(transports, head, "/server_instances", within).await?.into_result();
    let response = response.map_err(|error| error.about(format!("GET {head}/server_instances")))?;
    serde_json::from_slice(&response.message.head.to_bytes()).map_err(|error| {
        Error::internal("its list of servers is invalid; check that the URL is that of a head server")
            .about(format!("GET {head}/server_instances"))
            .caused_by(error)
    })
}

async fn get(transports: &Transports, at: &Endpoint, route: &'static str, within: Duration) -> Result<Response> {
    let cx = CallContext::within(within);
    transports.ask(&cx, at, route).await.map_err(|error| match error.subject() {
        "" => error.about(format!("GET {at}{route}")),
        _ => error,
    })
}

async fn health(transports: &Transports, listed: ListedServer, now: f64) -> ServerHealth {
    let uptime = listed.start_time.map(|start| (now - start).max(0.0) as u64);
    let mut health = ServerHealth {
        name: listed.process_name,
        kind: listed.server_type.unwrap_or_default(),
        implementation: listed.name.unwrap_or_default(),
        url: listed.url.clone().unwrap_or_default(),
        pid: listed.pid,
        healthy: false,
        health: String::new(),
        in_flight: None,
        oldest: None,
        uptime_seconds: uptime,
        peers: Vec::new(),
        stalls: Vec::new(),
        endpoints: Vec::new(),
    };
    let answered = match listed.url.as_deref().map(Endpoint::parse) {
        None => Err(Error::invalid("the server has no URL")),
        Some(Err(error)) => Err(error),
        Some(Ok(endpoint)) => get(transports, &endpoint, "/health", HEALTH_TIMEOUT).await,
    };
    match answered {
        Ok(response) => {
            let body: Value = serde_json::from_slice(&response.message.head.to_bytes()).unwrap_or_default();
            let said = body["status"].as_str().map(|status| status.chars().take(REASON_CHARS_MAX).collect::<String>());
            // A 404 also counts as healthy: NeMo Gym's older servers do not have the route.
            health.healthy = response.status.is_success() || response.status.0 == 404;
            health.health = match (said, response.status.is_success()) {
                (Some(said), _) => said,
                (None, true) => "ok".to_owned(),
                (None, false) => format!("HTTP status {}", response.status.0),
            };
            health.in_flight = body["in_flight"].as_i64();
            // Servers of other programs report neither rollouts nor peers.
            health.oldest = serde_json::from_value(body["oldest"].clone()).unwrap_or_default();
            health.peers = serde_json::from_value(body["peers"].clone()).unwrap_or_default();
            health.stalls = serde_json::from_value(body["stalls"].clone()).unwrap_or_default();
            health.endpoints = serde_json::from_value(body["endpoints"].clone()).unwrap_or_default();
        }
        Err(error) => health.health = error.message().chars().take(REASON_CHARS_MAX).collect(),
    }
    health
}

fn text(status: &Status, known: &[Transport]) -> String {
    let dash = || "-".to_owned();
    let rows = [&status.head].into_iter().chain(&status.servers).map(|server| {
        [
            server.name.clone(),
            server.kind.clone(),
            server.implementation.clone(),
            server.url.clone(),
            server.pid.map_or_else(dash, |pid| pid.to_string()),
            server.health.clone(),
            server.in_flight.map_or_else(dash, |count| count.to_string()),
            server.oldest.as_ref().map_or_else(dash, oldest),
            server.uptime_seconds.map_or_else(dash, uptime),
            transports(&server.peers, known).unwrap_or_else(dash),
        ]
    });
    let header =
        ["name", "kind", "implementation", "url", "pid", "health", "in flight", "oldest", "uptime", "transports"];
    let mut text = console::table(header, rows);
    // The servers of a process reach their peers over the same transports, so duplicates are removed.
    let rejections: BTreeSet<String> =
        status.servers.iter().flat_map(|server| &server.peers).filter_map(rejections).collect();
    rejections.iter().for_each(|line| text.push_str(&format!("\n{line}")));
    // Each server reports the stalls of its whole process.
    let stalls: BTreeSet<(&str, &str)> = status
        .servers
        .iter()
        .flat_map(|server| &server.stalls)
        .map(|stall| (stall.server.as_str(), stall.route.as_str()))
        .collect();
    for (server, route) in stalls {
        let reports = status.servers.iter().flat_map(|server| &server.stalls);
        let same = reports.filter(|stall| (stall.server.as_str(), stall.route.as_str()) == (server, route));
        let seconds = same.map(|stall| stall.seconds).max().unwrap_or_default();
        let _ = write!(text, "\n`{route}` of server `{server}` has blocked a thread of its process for {seconds} s");
    }
    for server in &status.servers {
        let failing = server.endpoints.iter().filter_map(|report| in_progress(&server.name, report));
        failing.for_each(|line| text.push_str(&format!("\n{line}")));
    }
    if !status.members.is_empty() {
        let _ = write!(text, "\n\n{}", workers::text(&status.members));
    }
    let healthy = status.servers.iter().filter(|server| server.healthy).count();
    let _ = write!(text, "\n{healthy} of {} servers healthy, head {}", status.servers.len(), status.head.url);
    text
}

/// Counts peers by transport, the preferred transport first: `shm 2, http 1`.
fn transports(peers: &[PeerReport], known: &[Transport]) -> Option<String> {
    let mut counts: BTreeMap<(usize, &str), usize> = BTreeMap::new();
    for peer in peers {
        *counts.entry((order(peer, known), transport_name(peer))).or_default() += 1;
    }
    let words: Vec<String> = counts.into_iter().map(|((_, name), count)| format!("{name} {count}")).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// Returns the transport's name, or the scheme of a connector without one.
fn transport_name(peer: &PeerReport) -> &str {
    match &peer.transport {
        Some(transport) => transport,
        None if peer.scheme.is_empty() => "unreachable",
        None => &peer.scheme,
    }
}

/// Sorts unreachable peers first, then known transports by preference, then transports that this program does not know.
fn order(peer: &PeerReport, known: &[Transport]) -> usize {
    let position = |name: &String| known.iter().position(|known| known.as_str() == name);
    match &peer.transport {
        None => 0,
        Some(name) => 1 + position(name).unwrap_or(known.len()),
    }
}

/// Returns the reasons why preferred transports to a peer were rejected. For a peer of another process, the rejection of in-process
/// calls is left out.
fn rejections(peer: &PeerReport) -> Option<String> {
    let reasons = peer.refused.iter().filter(|refused| refused.transport != Transport::MEM.as_str());
    let reasons: Vec<String> = reasons.map(|refused| format!("{}: {}", refused.transport, refused.why)).collect();
    (!reasons.is_empty()).then(|| format!("{} over {} ({})", peer.peer, transport_name(peer), reasons.join("; ")))
}

/// Formats the oldest rollout in flight as `45 s (3-0)`.
fn oldest(run: &OldestRun) -> String {
    let rollout = run.rollout.as_ref().map(|rollout| format!(" ({rollout})")).unwrap_or_default();
    format!("{} s{rollout}", run.seconds)
}

/// Formats an uptime as `3d 04:05:06`.
fn uptime(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{:02}:{:02}:{:02}", rest / 3_600, rest / 60 % 60, rest % 60);
    if days == 0 { clock } else { format!("{days}d {clock}") }
}

#[cfg(test)]
mod tests {
    use gym_client::transport::BUILT_IN;

    use super::*;

    #[test]
    fn a_server_reports_the_transports_to_its_peers_and_why_preferred_ones_were_rejected() {
        let peers = serde_json::json!([
            {"peer": "http://a:1", "transport": "http", "scheme": "http", "lanes": "",
             "refused": [{"transport": "mem", "why": "no"}, {"transport": "shm", "why": "another host"}]},
            {"peer": "http://b:1", "transport": "shm", "scheme": "ucx", "lanes": "posix/memory", "refused": []},
            {"peer": "http://c:1", "transport": "shm", "scheme": "ucx", "lanes": "posix/memory", "refused": []},
            {"peer": "http://d:1", "transport": null, "scheme": "", "lanes": "", "refused": []},
        ]);
        let peers: Vec<PeerReport> = serde_json::from_value(peers).unwrap();
        assert_eq!(transports(&peers, &BUILT_IN).as_deref(), Some("unreachable 1, shm 2, http 1"));
        let reasons: Vec<String> = peers.iter().filter_map(rejections).collect();
        assert_eq!(reasons, ["http://a:1 over http (shm: another host)"]);
        assert_eq!(transports(&[], &BUILT_IN), None);
    }

    #[test]
    fn uptime_is_a_clock_with_days_in_front() {
        assert_eq!(uptime(59), "00:00:59");
        assert_eq!(uptime(3 * 86_400 + 4 * 3_600 + 5 * 60 + 6), "3d 04:05:06");
    }
}
