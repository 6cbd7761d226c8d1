//! Turns a process into a node agent, for an engine that starts a process on each node: the engine decides where, and tells the process what
//! it has there.
//!
//! The engine runs the user's own program with [`AGENT_ROLE`] as its first argument and an [`AgentAssignment`] in the variable
//! [`ASSIGNMENT_VARIABLE`]. The process writes one line with its endpoints to standard output, and ends with its parent, with its last controller, or
//! when it is asked to.

use std::io::Write as _;
use std::time::Duration;

use gym_client::launch;
use gym_core::base::runtime_threads;
use gym_core::{Endpoint, Error, Result};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::placement::{Devices, NodeResources, Topology};
use crate::provision::local::{WORKER_ROLE, set_entered};
use crate::provision::nodes::agent::{NodeAgent, NodeOptions, SessionEnd};
use crate::provision::workers::Workers;

/// First argument that makes a process a node agent.
pub(crate) const AGENT_ROLE: &str = "--gym-node-agent";
/// Environment variable that holds the assignment.
const ASSIGNMENT_VARIABLE: &str = "GYM_NODE_AGENT";
/// Prefix of the line with the endpoints.
const MARK: &str = "@gym ";
/// Exit status of an agent whose last controller released it, or that was asked to stop.
const RELEASED: i32 = 0;
/// Exit status of a process that could not become an agent.
const START_FAILED: i32 = 1;
/// Exit status of an agent without a controller: none came, or the last one was silent for its lease.
const NO_CONTROLLER: i32 = 75;

/// The part of a node that an agent has.
#[derive(Debug, Deserialize)]
struct AgentAssignment {
    /// The name of the node.
    name: String,
    /// The host to bind, which others are told.
    host: String,
    /// The GPUs, as in `CUDA_VISIBLE_DEVICES`.
    gpus: Vec<String>,
    /// The number of CPUs.
    cpus: u32,
    /// The NVLink domain of the node, and its position in it.
    domain: Option<String>,
    domain_rank: Option<u32>,
    /// The process that started this one, and that it must not outlive.
    parent: i32,
    #[serde(flatten)]
    given: AgentLines,
}

/// The part of an assignment that the controller decides on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AgentLines {
    /// The join secret.
    pub(crate) secret: String,
    /// Time to wait for the first controller, in seconds.
    pub(crate) first_s: f64,
    /// Time to wait for the next controller, in seconds.
    pub(crate) later_s: f64,
    /// Time between SIGTERM and SIGKILL for ranks, in seconds.
    pub(crate) grace_s: f64,
}

/// The message of an agent to the process that started it.
#[derive(Serialize)]
struct AgentHello<'a> {
    endpoints: &'a [Endpoint],
}

impl Workers {
    /// Runs the worker in a worker process, and the node agent in a process that an engine such as Ray started on a node; calls
    /// [`launch::enter`] too. Must be the first line of `main` in every program that has worker processes.
    ///
    /// These processes are this program, run again with a hidden first argument. In such a process this function does not
    /// return: the process creates its worker or its agent, reports its endpoints, and serves until it is asked to exit. In all other
    /// processes it returns at once.
    pub fn enter(&self) {
        launch::enter();
        match std::env::args_os().nth(1) {
            Some(role) if role == WORKER_ROLE => std::process::exit(self.be_worker()),
            Some(role) if role == AGENT_ROLE => std::process::exit(be_agent(self)),
            _ => set_entered(),
        }
    }
}

fn be_agent(workers: &Workers) -> i32 {
    // Its ranks are this program too.
    set_entered();
    let served = read_assignment().and_then(|assignment| {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(runtime_threads()).enable_all().build();
        let runtime = runtime.map_err(|error| Error::internal("cannot start a runtime").caused_by(error))?;
        runtime.block_on(serve(workers.clone(), assignment))
    });
    served.unwrap_or_else(|error| {
        eprintln!("gym node agent: {error}");
        START_FAILED
    })
}

fn read_assignment() -> Result<AgentAssignment> {
    let wrong = |error: String| {
        Error::invalid(format!("{ASSIGNMENT_VARIABLE}: {error}; {AGENT_ROLE} is for an engine that starts node agents"))
    };
    let text = std::env::var(ASSIGNMENT_VARIABLE).map_err(|error| wrong(error.to_string()))?;
    let assignment: AgentAssignment = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Error::internal("cannot request a signal for the end of the parent").caused_by(error))?;
    // It may have ended before the request.
    if getppid().map(Pid::as_raw_nonzero).map(std::num::NonZero::get) != Some(assignment.parent) {
        return Err(wrong(format!("process {} has ended", assignment.parent)));
    }
    Ok(assignment)
}

async fn serve(workers: Workers, assignment: AgentAssignment) -> Result<i32> {
    let AgentAssignment { name, host, gpus, cpus, domain, domain_rank, given, .. } = assignment;
    let mut options = NodeOptions::new(given.secret);
    options.host = host;
    options.resources = NodeResources {
        name: name.clone(),
        cpus: Some(cpus),
        gpus: Devices::Named(gpus),
        topology: Topology { domain, rank: domain_rank },
    };
    options.name = name;
    options.engine_divides = true;
    let handler = |kind| signal(kind).map_err(|error| Error::internal("cannot listen for signals").caused_by(error));
    let (mut terminate, mut interrupt) = (handler(SignalKind::terminate())?, handler(SignalKind::interrupt())?);
    let agent = NodeAgent::listen(workers, options).await?;
    say(&agent)?;
    let status = tokio::select! { biased;
        _ = terminate.recv() => RELEASED,
        _ = interrupt.recv() => RELEASED,
        ended = agent.idle(Duration::from_secs_f64(given.first_s), Duration::from_secs_f64(given.later_s)) => match ended {
            Some(SessionEnd::Released) => RELEASED,
            Some(SessionEnd::Silent) | None => NO_CONTROLLER,
        },
    };
    agent.stop(Duration::from_secs_f64(given.grace_s)).await;
    Ok(status)
}

fn say(agent: &NodeAgent) -> Result<()> {
    let hello = serde_json::to_string(&AgentHello { endpoints: agent.endpoints() });
    let hello = hello.map_err(|error| Error::internal("endpoints cannot be written as JSON").caused_by(error))?;
    let mut out = std::io::stdout().lock();
    // The program may have printed an incomplete line.
    writeln!(out, "\n{MARK}{hello}")
        .and_then(|()| out.flush())
        .map_err(|error| Error::internal("standard output is closed").caused_by(error))
}
