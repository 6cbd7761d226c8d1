//! The node of a worker: controllers of worker groups start ranks on it.
//!
//! A worker is a node if its program has worker types and a join secret is set. Ranks run this program, so a program without worker types
//! has nothing to offer.

use gym_core::Endpoint;
#[cfg(feature = "groups")]
use gym_group::{JOIN_SECRET_VARIABLE, NodeAgent, NodeOptions};

use crate::cli::console::Console;
use crate::cli::exit::Failure;
use crate::stack::{JoinOptions, Servers};

/// The node agent of a worker.
#[cfg(feature = "groups")]
pub(in crate::cli) type HostedNode = NodeAgent;

/// A build without worker groups has no node agent.
#[cfg(not(feature = "groups"))]
pub(in crate::cli) enum HostedNode {}

/// Starts the node agent of a worker and adds it to the membership, or says why there is none. `alone` is `true` for a worker without servers.
#[cfg(feature = "groups")]
pub(in crate::cli) async fn start(
    worker: &mut JoinOptions,
    head: &Endpoint,
    servers: &Servers,
    alone: bool,
    console: &Console,
) -> Result<Option<HostedNode>, Failure> {
    let types = servers.workers().names().collect::<Vec<_>>().join(", ");
    let secret = std::env::var(JOIN_SECRET_VARIABLE).unwrap_or_default();
    let (has_types, has_secret) = (!types.is_empty(), !secret.trim().is_empty());
    if !(has_types && has_secret) {
        let why = if has_types {
            format!(
                "{JOIN_SECRET_VARIABLE} is not set; set it to the secret of the controllers, and groups can start {types} here"
            )
        } else {
            "this program has no worker types; add them with `Servers::with_workers`".to_owned()
        };
        // A program without worker types that serves rollouts was never meant to be a node.
        if has_types || has_secret || alone {
            console.line(&format!("this worker offers no node: {why}"));
        }
        return Ok(None);
    }
    let mut options = NodeOptions::new(secret);
    options.name.clone_from(&worker.name);
    options.head = Some(head.clone());
    options.advertise.clone_from(&worker.advertise);
    options.join_within = worker.join_within;
    options.lines = console.lines();
    if let Some(host) = &worker.host {
        options.host.clone_from(host);
    }
    let agent = NodeAgent::listen(servers.workers().clone(), options).await?;
    let at = agent.endpoints().last().map_or("", Endpoint::as_str);
    console.line(&format!("this worker is a node: groups of this program can start {types} here, through {at}"));
    worker.node = Some(agent.member_node());
    Ok(Some(agent))
}

/// Says that this build has no node agent, if the worker has no servers either.
#[cfg(not(feature = "groups"))]
pub(in crate::cli) async fn start(
    _: &mut JoinOptions,
    _: &Endpoint,
    _: &Servers,
    alone: bool,
    console: &Console,
) -> Result<Option<HostedNode>, Failure> {
    if alone {
        console.line("this worker offers no node: build the program with the feature `groups` of gym-server, and add its worker types");
    }
    Ok(None)
}

/// Waits until no controller holds anything of the node.
pub(in crate::cli) async fn released(node: Option<&HostedNode>) {
    match node {
        None => {}
        #[cfg(feature = "groups")]
        Some(agent) => agent.released().await,
        #[cfg(not(feature = "groups"))]
        Some(agent) => match *agent {},
    }
}

/// Stops the ranks of the node, and kills those that run after `grace`.
pub(in crate::cli) async fn stop(node: Option<HostedNode>, grace: std::time::Duration) {
    match node {
        None => {}
        #[cfg(feature = "groups")]
        Some(agent) => agent.stop(grace).await,
        #[cfg(not(feature = "groups"))]
        Some(agent) => {
            let _ = grace;
            match agent {}
        }
    }
}
