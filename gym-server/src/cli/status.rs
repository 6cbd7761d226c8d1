//! `rgym status`: asks a head, ours or NeMo Gym's, for its servers, and each of them how it is.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::future::join_all;
use gym_client::Transports;
use gym_core::{CallContext, ConnectOptions, Endpoint, Error, InProcess, Level, Request, Response, Result, World};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::args::{Sources, StatusArgs};
use super::config::{Loaded, Need, load};
use super::console;
use super::{Failure, Outcome, head};
use crate::stack::Servers;

/// The head answers from memory.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A server that takes longer to say that it is well is not.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);
/// An answer to a question about health is short; this is for what some other server may send.
const REASON_CHARS_MAX: usize = 80;

#[derive(Debug, Serialize)]
struct Status {
    head: Health,
    servers: Vec<Health>,
}

#[derive(Debug, Serialize)]
struct Health {
    name: String,
    kind: String,
    implementation: String,
    url: String,
    pid: Option<u32>,
    healthy: bool,
    /// What it said, or why it said nothing.
    health: String,
    in_flight: Option<i64>,
    uptime_seconds: Option<u64>,
    /// How it reaches others in other processes, and why not better; as [`gym_client::PeerPath`].
    peers: Vec<Peer>,
}

/// How a server reaches a peer.
#[derive(Debug, Serialize, Deserialize)]
struct Peer {
    peer: String,
    /// The rung; none for a transport that is on none, and for a peer that was not reached.
    level: Option<Level>,
    scheme: String,
    lanes: String,
    refused: Vec<Refused>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Refused {
    level: Level,
    why: String,
}

impl Peer {
    fn over(&self) -> &str {
        match self.level {
            Some(level) => level.as_str(),
            None if self.scheme.is_empty() => "unreachable",
            None => &self.scheme,
        }
    }
}

/// What is read of `/server_instances`.
#[derive(Debug, Deserialize)]
struct Listed {
    process_name: String,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    server_type: Option<String>,
    #[serde(default)]
    url: Option<String>,
    #[serde(default)]
    pid: Option<u32>,
    #[serde(default)]
    start_time: Option<f64>,
}

pub(super) async fn status(args: StatusArgs, overrides: &[String], head_typed: bool) -> Outcome {
    let Loaded { config, .. } = load(&Sources::default(), overrides, &Servers::none(), Need::Values).await?;
    let head = head::endpoint(args.head_url.as_deref(), head_typed, overrides, &config)?;
    let world = World::real();
    let transports = Transports::from_features(InProcess::new());
    let listed = list(&transports, &head).await.map_err(|error| {
        Failure::Failed(format!(
            "{error}\n  fix: start servers with `rgym run`, or name another head with --head-url or HEAD_SERVER_URL"
        ))
    })?;
    let now = world.now().as_secs_f64();
    let servers = listed.into_iter().map(|listed| health(&transports, listed, now));
    let of_head = Listed {
        process_name: "head_server".to_owned(),
        name: Some("head".to_owned()),
        server_type: Some("head_server".to_owned()),
        url: Some(head.to_string()),
        pid: None,
        start_time: None,
    };
    let (head, servers) = tokio::join!(health(&transports, of_head, now), join_all(servers));
    let status = Status { head, servers };
    if args.json {
        let text = serde_json::to_string_pretty(&status).map_err(|error| Failure::Failed(error.to_string()))?;
        console::print(&text);
    } else {
        console::print(&text(&status));
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(transports: &Transports, head: &Endpoint) -> Result<Vec<Listed>> {
    let response = get(transports, head, "/server_instances", HEAD_TIMEOUT).await?.into_result()?;
    serde_json::from_slice(&response.message.head.to_bytes()).map_err(|error| {
        Error::internal("its list of servers cannot be read; is it a head server?")
            .about(format!("GET {head}/server_instances"))
            .caused_by(error)
    })
}

async fn get(transports: &Transports, at: &Endpoint, route: &'static str, within: Duration) -> Result<Response> {
    let cx = CallContext::within(within);
    let channel = transports.connect(&cx, std::slice::from_ref(at), &ConnectOptions::default()).await?;
    channel.call(Request::get(cx.child(), route)).await.map_err(|error| match error.subject() {
        "" => error.about(format!("GET {at}{route}")),
        _ => error,
    })
}

async fn health(transports: &Transports, listed: Listed, now: f64) -> Health {
    let uptime = listed.start_time.map(|start| (now - start).max(0.0) as u64);
    let mut health = Health {
        name: listed.process_name,
        kind: listed.server_type.unwrap_or_default(),
        implementation: listed.name.unwrap_or_default(),
        url: listed.url.clone().unwrap_or_default(),
        pid: listed.pid,
        healthy: false,
        health: String::new(),
        in_flight: None,
        uptime_seconds: uptime,
        peers: Vec::new(),
    };
    let answered = match listed.url.as_deref().map(Endpoint::parse) {
        None => Err(Error::invalid("it has no URL")),
        Some(Err(error)) => Err(error),
        Some(Ok(endpoint)) => get(transports, &endpoint, "/health", HEALTH_TIMEOUT).await,
    };
    match answered {
        Ok(response) => {
            let body: Value = serde_json::from_slice(&response.message.head.to_bytes()).unwrap_or_default();
            let said = body["status"].as_str().map(|status| status.chars().take(REASON_CHARS_MAX).collect::<String>());
            // A server without that route answers all the same; NeMo Gym's older ones have none.
            health.healthy = response.status.is_success() || response.status.0 == 404;
            health.health = match (said, response.status.is_success()) {
                (Some(said), _) => said,
                (None, true) => "ok".to_owned(),
                (None, false) => format!("answers {}", response.status.0),
            };
            health.in_flight = body["in_flight"].as_i64();
            // Other servers say nothing of it.
            health.peers = serde_json::from_value(body["peers"].clone()).unwrap_or_default();
        }
        Err(error) => health.health = error.message().chars().take(REASON_CHARS_MAX).collect(),
    }
    health
}

fn text(status: &Status) -> String {
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
            server.uptime_seconds.map_or_else(dash, uptime),
            reaches(&server.peers).unwrap_or_else(dash),
        ]
    });
    let header = ["name", "kind", "implementation", "url", "pid", "health", "in flight", "uptime", "reaches by"];
    let mut text = console::table(header, rows);
    // Servers of one process reach their peers by the same transports, so they would say the same.
    let refused: BTreeSet<String> =
        status.servers.iter().flat_map(|server| &server.peers).filter_map(refused).collect();
    refused.iter().for_each(|line| text.push_str(&format!("\n{line}")));
    let healthy = status.servers.iter().filter(|server| server.healthy).count();
    let _ = write!(text, "\n{healthy} of {} servers healthy, head {}", status.servers.len(), status.head.url);
    text
}

/// `shm 2, http 1`.
fn reaches(peers: &[Peer]) -> Option<String> {
    let mut counts: BTreeMap<(Option<Level>, &str), usize> = BTreeMap::new();
    for peer in peers {
        *counts.entry((peer.level, peer.over())).or_default() += 1;
    }
    let words: Vec<String> = counts.into_iter().map(|((_, over), count)| format!("{over} {count}")).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// Why a peer is not reached by better than it is. That one in another process is not in this one is no news.
fn refused(peer: &Peer) -> Option<String> {
    let reasons = peer.refused.iter().filter(|refused| refused.level != Level::InProcess);
    let reasons: Vec<String> = reasons.map(|refused| format!("{}: {}", refused.level, refused.why)).collect();
    (!reasons.is_empty()).then(|| format!("{} over {} ({})", peer.peer, peer.over(), reasons.join("; ")))
}

/// `3d 04:05:06`.
fn uptime(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{:02}:{:02}:{:02}", rest / 3_600, rest / 60 % 60, rest % 60);
    if days == 0 { clock } else { format!("{days}d {clock}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_by_which_rungs_it_reaches_others_and_why_not_by_better_ones() {
        let peers = serde_json::json!([
            {"peer": "http://a:1", "level": "http", "scheme": "http", "lanes": "",
             "refused": [{"level": "mem", "why": "no"}, {"level": "shm", "why": "another host"}]},
            {"peer": "http://b:1", "level": "shm", "scheme": "ucx", "lanes": "posix/memory", "refused": []},
            {"peer": "http://c:1", "level": "shm", "scheme": "ucx", "lanes": "posix/memory", "refused": []},
            {"peer": "http://d:1", "level": null, "scheme": "", "lanes": "", "refused": []},
        ]);
        let peers: Vec<Peer> = serde_json::from_value(peers).unwrap();
        assert_eq!(reaches(&peers).as_deref(), Some("unreachable 1, shm 2, http 1"));
        let told: Vec<String> = peers.iter().filter_map(refused).collect();
        assert_eq!(told, ["http://a:1 over http (shm: another host)"]);
        assert_eq!(reaches(&[]), None);
    }

    #[test]
    fn uptime_is_a_clock_with_days_in_front() {
        assert_eq!(uptime(59), "00:00:59");
        assert_eq!(uptime(3 * 86_400 + 4 * 3_600 + 5 * 60 + 6), "3d 04:05:06");
    }
}
