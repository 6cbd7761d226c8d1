//! The processes that are asked for their waits, and the state of those that do not answer.

use std::time::Duration;

use futures_util::future::join_all;
use gym_client::Transports;
use gym_client::registry::local_programs;
use gym_core::base::host_name;
use gym_core::base::process::unusual_state;
use gym_core::observe::waits::{ProcessWaits, WAITS_ROUTE, WaitReport};
use gym_core::registry::Instance;
use gym_core::{CallContext, Endpoint, Error, Result};
use serde::Serialize;

use crate::head::url_of;

/// Limit for one process. One that does not answer from memory within it stands still.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// An address at which a process reports its waits.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    /// The server at the address; empty for a program without servers.
    pub(crate) server: String,
    pub(crate) url: String,
    pub(crate) pid: Option<u32>,
    /// The addresses of further servers of its process.
    pub(crate) servers: Vec<String>,
}

impl Address {
    /// Returns the address of a server that a head server lists.
    pub(crate) fn of(server: Instance) -> Self {
        let pid = server.labels.get("pid").and_then(|pid| pid.parse().ok());
        Self { url: url_of(&server), pid, server: server.name, servers: Vec::new() }
    }
}

/// The answer of an address.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) address: Address,
    pub(super) answer: Result<ProcessWaits, NoAnswer>,
}

/// The reason why an address did not report its waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NoAnswer {
    pub(crate) server: String,
    pub(crate) url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    /// The facts that are known about the process.
    pub(crate) reason: String,
    /// A server of another program, which serves and does not report waits.
    #[serde(skip)]
    pub(crate) foreign: bool,
}

/// Returns the addresses of the programs of this machine that report their waits.
pub(crate) fn of_this_machine() -> impl Iterator<Item = Address> {
    local_programs().into_iter().map(|program| Address {
        server: String::new(),
        url: program.endpoint.to_string(),
        pid: Some(program.pid),
        servers: program.servers.iter().map(ToString::to_string).collect(),
    })
}

/// Asks each address for the waits of this query.
pub(super) async fn ask(transports: &Transports, addresses: &[Address], query: &str) -> Vec<Asked> {
    join_all(addresses.iter().map(|address| async {
        let answer = get(transports, &address.url, query).await.and_then(|(status, body)| {
            serde_json::from_slice::<ProcessWaits>(&body).map_err(|_| Error::invalid(format!("HTTP status {status}")))
        });
        let answer = answer.map_err(|error| NoAnswer {
            server: address.server.clone(),
            url: address.url.clone(),
            pid: address.pid,
            foreign: error.code() == gym_core::Code::InvalidArgument,
            reason: reason(address, &error),
        });
        Asked { address: address.clone(), answer }
    }))
    .await
}

async fn get(transports: &Transports, url: &str, query: &str) -> Result<(u16, bytes::Bytes)> {
    let cx = CallContext::within(ASK_TIMEOUT);
    let endpoint = Endpoint::parse(url)?;
    let response = transports.ask(&cx, &endpoint, format!("{WAITS_ROUTE}?{query}")).await?;
    Ok((response.status.0, response.message.head.to_bytes()))
}

fn reason(address: &Address, error: &Error) -> String {
    if error.code() == gym_core::Code::InvalidArgument {
        return format!("it does not report its waits ({}): it is a server of another program", error.message());
    }
    let state = address.pid.filter(|_| is_here(&address.url)).and_then(state);
    match state {
        Some(state) => state,
        None if error.code() == gym_core::Code::DeadlineExceeded => {
            format!("no answer within {} s: its threads are blocked, or it cannot be reached", ASK_TIMEOUT.as_secs())
        }
        None => error.message().chars().take(120).collect(),
    }
}

/// Returns `true` if the address is on this machine.
fn is_here(url: &str) -> bool {
    let Ok(endpoint) = Endpoint::parse(url) else { return false };
    let host = endpoint.address().rsplit_once(':').map_or("", |(host, _)| host);
    gym_client::registry::is_loopback(host) || host == host_name()
}

/// Describes a process of this machine that should answer; `None` if it runs as usual.
pub(super) fn state(pid: u32) -> Option<String> {
    Some(format!("its process {}", unusual_state(pid)?))
}

/// Adds the state of the processes that a wait is for, if they are on this machine.
pub(super) fn states(process: &ProcessWaits, wait: &WaitReport) -> Vec<String> {
    if process.host != host_name() {
        return Vec::new();
    }
    wait.pids.iter().filter_map(|pid| Some(format!("pid {pid}: {}", state(*pid)?))).collect()
}
