//! The messages between a controller and the agent of a node.
//!
//! | route | request → response | |
//! |---|---|---|
//! | `GET /node` | → [`NodeReport`] | what the node has, and what is free |
//! | `POST /node/reserve` | [`ReserveBody`] → [`NodeReport`] | holds CPUs and GPUs in a session with a lease |
//! | `POST /node/poll` | [`PollBody`] → [`PollReply`] | events, usage and the lease; waits for an event |
//! | `POST /node/ports` | [`PortsBody`] → [`PortsReply`] | holds ports for the rendezvous of a group |
//! | `POST /node/launch` | [`LaunchBody`] | prepares ranks |
//! | `POST /node/start` | [`StartBody`] | starts incarnations of prepared ranks |
//! | `POST /node/end` | [`RanksBody`] | kills ranks, and answers when they have ended |
//! | `POST /node/kill` | [`KillBody`] | kills a rank as a crash would |
//! | `POST /node/environment` | [`RankBody`] → [`RankEnvironment`](crate::RankEnvironment) | the variables with which a rank starts |
//! | `POST /node/stop` | [`StopBody`] | stops the ranks of a launch |
//! | `POST /node/release` | [`ReleaseBody`] | stops all ranks of the session and ends it |
//!
//! Every request has the join secret as a bearer token, and may be repeated if its response was lost.

use std::net::IpAddr;
use std::time::Duration;

use gym_core::group::Rank;
use gym_core::message::Metadata;
use gym_core::transport::TransportPolicy;
use gym_core::{Error, Incarnation, Response, Result};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::collective::CollectiveOptions;
use crate::placement::{NodeResources, Topology};
use crate::provision::deployment::LaunchSpec;
use crate::provision::events::RankEvent;
use crate::provision::place::{RankPlace, Rendezvous};
use crate::provision::variables::Variables;
use crate::usage::node::NodeUsage;
use crate::usage::process::ProcessUsage;

pub(super) use gym_client::transport::body::{read, write};

/// The metadata that carries the join secret.
pub(super) const SECRET_METADATA: &str = "authorization";

/// The resources of a node, and those that no session holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct NodeReport {
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    pub(super) build: String,
    /// The address of the node for its ranks' peers.
    pub(super) address: IpAddr,
    pub(super) cpus: u32,
    pub(super) gpus: Vec<String>,
    pub(super) free_cpus: u32,
    pub(super) free_gpus: Vec<String>,
    /// The other GPUs that clusters hold which share theirs.
    pub(super) shared_gpus: Vec<String>,
    pub(super) domain: Option<String>,
    pub(super) domain_rank: Option<u32>,
    /// The controllers that hold something, and the GPUs that other programs of the machine hold, for errors.
    pub(super) held_by: Vec<String>,
}

impl NodeReport {
    /// Returns the resources that are free, with the shared GPUs if they are wanted, too.
    pub(super) fn free(&self, shared: bool) -> NodeResources {
        let free = |gpu: &&String| self.free_gpus.contains(gpu) || (shared && self.shared_gpus.contains(gpu));
        self.resources(self.free_cpus, self.gpus.iter().filter(free).cloned().collect())
    }

    pub(super) fn whole(&self) -> NodeResources {
        self.resources(self.cpus, self.gpus.clone())
    }

    fn resources(&self, cpus: u32, gpus: Vec<String>) -> NodeResources {
        let topology = Topology { domain: self.domain.clone(), rank: self.domain_rank };
        NodeResources { topology, ..NodeResources::new(&self.name, cpus, gpus) }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReserveBody {
    pub(super) session: String,
    /// Host and process of the controller, for errors and logs.
    pub(super) controller: String,
    pub(super) build: String,
    pub(super) cpus: u32,
    pub(super) gpus: Vec<String>,
    /// Other controllers may get the GPUs, if they share them, too.
    pub(super) share_gpus: bool,
    pub(super) lease_ms: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PollBody {
    pub(super) session: String,
    /// The number of the last response that the controller received; 0 for that of the reservation.
    pub(super) received: u64,
    /// Number of events that the controller has.
    pub(super) seen: usize,
    pub(super) wait_ms: u64,
    /// The controller wants the usage of the node.
    pub(super) monitor: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PollReply {
    pub(super) number: u64,
    /// The events after those seen, with their launch.
    pub(super) events: Vec<(u64, RankEvent)>,
    /// The usage of each running rank, with its launch.
    pub(super) usage: Vec<(u64, Rank, ProcessUsage)>,
    /// The usage of the node, as last sampled, if the controller wants it.
    pub(super) node: Option<NodeUsage>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PortsBody {
    pub(super) session: String,
    /// The group for which the ports are held; they replace those that were held for it.
    pub(super) group: u64,
    pub(super) low: u16,
    pub(super) high: u16,
    pub(super) count: usize,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PortsReply {
    pub(super) ports: Vec<u16>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LaunchBody {
    pub(super) session: String,
    pub(super) launch: u64,
    pub(super) group: String,
    pub(super) worker: String,
    pub(super) init: Box<RawValue>,
    pub(super) ranks: Vec<RankPlace>,
    pub(super) variables: Variables,
    pub(super) controller: Variables,
    pub(super) memory_limit_bytes: Option<u64>,
    pub(super) start_timeout_ms: u64,
    /// The transports that the policy allows, and the required one; `None` without a policy.
    pub(super) transports: Option<(Vec<String>, Option<String>)>,
    pub(super) rendezvous: Rendezvous,
    #[serde(default)]
    pub(super) collectives: CollectiveOptions,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StartBody {
    pub(super) session: String,
    pub(super) launch: u64,
    #[serde(rename = "lives")]
    pub(super) incarnations: Vec<(Rank, Incarnation)>,
    pub(super) rendezvous: Option<Rendezvous>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RanksBody {
    pub(super) session: String,
    pub(super) launch: u64,
    pub(super) ranks: Vec<Rank>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct KillBody {
    pub(super) session: String,
    pub(super) launch: u64,
    pub(super) rank: Rank,
    pub(super) incarnation: Option<Incarnation>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RankBody {
    pub(super) session: String,
    pub(super) launch: u64,
    pub(super) rank: Rank,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StopBody {
    pub(super) session: String,
    pub(super) launch: u64,
    pub(super) grace_ms: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReleaseBody {
    pub(super) session: String,
    pub(super) grace_ms: u64,
}

impl LaunchBody {
    /// Writes the part of `spec` that runs on one node.
    pub(super) fn of(
        spec: &LaunchSpec,
        known: &[gym_core::transport::Transport],
        session: &str,
        launch: u64,
        ranks: Vec<RankPlace>,
        rendezvous: &Rendezvous,
    ) -> Self {
        let allowed = |policy: &TransportPolicy| {
            let names = known.iter().filter(|transport| policy.allows(**transport));
            (names.map(|transport| transport.as_str().to_owned()).collect(), policy.required().map(str::to_owned))
        };
        Self {
            session: session.to_owned(),
            launch,
            group: spec.group.to_string(),
            worker: spec.worker.clone(),
            init: spec.init.clone(),
            ranks,
            variables: spec.variables.clone(),
            controller: spec.controller.clone().unwrap_or_default(),
            memory_limit_bytes: spec.memory_limit_bytes,
            start_timeout_ms: millis(spec.start_timeout),
            transports: spec.transport_policy.as_ref().map(allowed),
            rendezvous: rendezvous.clone(),
            collectives: spec.collectives,
        }
    }

    /// Returns the ranks to prepare.
    pub(super) fn into_spec(self) -> Result<(LaunchSpec, Rendezvous)> {
        let policy = |(names, required): (Vec<String>, Option<String>)| {
            let policy = TransportPolicy::named(names)?;
            Ok::<_, Error>(match required {
                Some(required) => policy.require(required),
                None => policy,
            })
        };
        let mut spec = LaunchSpec::new(self.group, self.worker, self.init, self.ranks);
        (spec.variables, spec.controller) = (self.variables, Some(self.controller));
        spec.memory_limit_bytes = self.memory_limit_bytes;
        spec.start_timeout = Duration::from_millis(self.start_timeout_ms);
        spec.transport_policy = self.transports.map(policy).transpose()?;
        spec.collectives = self.collectives;
        Ok((spec, self.rendezvous))
    }
}

/// Returns the metadata value of a join secret.
pub(super) fn bearer(secret: &str) -> String {
    format!("Bearer {secret}")
}

/// Returns `true` if a request carries the secret. Takes as long for a wrong secret of the same length.
pub(super) fn is_allowed(metadata: &Metadata, secret: &str) -> bool {
    let expected = bearer(secret);
    let given = metadata.get(SECRET_METADATA).unwrap_or_default();
    let differences = given.bytes().zip(expected.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    given.len() == expected.len() && differences == 0
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn reply(value: &impl Serialize) -> Result<Response> {
    Ok(Response::json(write(value)?))
}
