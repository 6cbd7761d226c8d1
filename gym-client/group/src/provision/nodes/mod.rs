//! Ranks on other machines: an agent on each node, and a provisioner that reserves bundles on them.
//!
//! ```text
//!   controller                                                     node
//!   Nodes ── members of the head server ──► which nodes there are
//!     │ reserve                                                    NodeAgent
//!     ▼                                                               │ session: CPUs, GPUs, ports, a lease
//!   NodesReservation ── one long poll for each node ────────────────► │
//!     │  events, usage ◄────────────────────────────────────────────  │
//!     │ launch                                                        ▼
//!   NodesDeployment ── launch, start, end, kill, stop ─────────────► ranks: child processes of the agent
//!     │
//!     └─ a node is lost: its ranks have ended for the group at once. They restart on another node when the lease is over: no two
//!        incarnations of a rank are ever alive
//! ```
//!
//! The head server only lists the nodes. A group runs on while the head server is away.

mod agent;
mod deployment;
mod lease;
mod link;
mod message;
mod moving;
mod reservation;
mod source;
mod state;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use gym_core::registry::MemberRegistry;
use gym_core::{CallContext, Endpoint, Result};
use tokio::time::{Instant, timeout_at};

use crate::provision::deployment::{Provisioner, Reservation, ReserveRequest};
use crate::provision::variables::Variables;

#[cfg(feature = "ray")]
pub(crate) use agent::program::{AGENT_ROLE, AgentLines};
pub use agent::{NodeAgent, NodeOptions};
use gym_client::transport::Transports;
use lease::check_lease;
use link::AgentClient;
use message::NodeReport;
#[cfg(feature = "ray")]
pub(crate) use moving::BundleMoves;
pub(crate) use reservation::NodesReservation;
pub(crate) use source::NodeSource;
use source::{FixedAgents, MemberAgents};
use state::NodesState;

/// Limit of one look at an agent, and of one reservation.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit for the other agents, once one has responded.
const STRAGGLER_TIMEOUT: Duration = Duration::from_secs(1);

/// Reserves bundles on the nodes of a cluster, and starts ranks there.
///
/// ```no_run
/// # use std::{sync::Arc, time::Duration}; use gym_client::{Transports, registry::RemoteRegistry};
/// # use gym_group::{Nodes, NodesOptions, VirtualCluster, placement::ClusterSpec}; use gym_core::{Endpoint, Result, World};
/// # fn example(secret: String) -> Result<()> {
/// let head = RemoteRegistry::new(Endpoint::parse("http://10.0.0.1:11000")?, Transports::standard(), World::real());
/// let mut options = NodesOptions::default();
/// options.wait_for_room = Duration::from_secs(600); // nodes may still join
/// let nodes = Nodes::of_cluster(Arc::new(head), Transports::standard(), secret).with(options);
/// let cluster = VirtualCluster::new(ClusterSpec::new([8, 8]), nodes)?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Nodes {
    source: Arc<dyn NodeSource>,
    transports: Transports,
    secret: Arc<str>,
    /// Variables of the ranks, over those of this program.
    variables: Arc<Variables>,
    options: NodesOptions,
}

/// Options of a controller of nodes, with an example at [`Nodes`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodesOptions {
    /// A node that has not heard from the controller for this long kills its ranks, and a rank of a lost node restarts elsewhere after this
    /// time. From 200 ms to 300 s. Default: 10 s.
    pub lease: Duration,
    /// Time in which an agent whose connection broke may be reached again, before its node is lost. Default: 1 s.
    pub reconnect: Duration,
    /// Time for which a reservation, and a restart of ranks on another node, waits for nodes with enough room. A restart that finds none counts
    /// against the group's budget. Default: 30 s.
    pub wait_for_room: Duration,
}

impl Default for NodesOptions {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(10),
            reconnect: Duration::from_secs(1),
            wait_for_room: Duration::from_secs(30),
        }
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Nodes {
    /// Uses the members of a cluster that run a node agent.
    #[must_use]
    pub fn of_cluster(members: Arc<dyn MemberRegistry>, transports: Transports, secret: impl Into<Arc<str>>) -> Self {
        Self::of(Arc::new(MemberAgents(members)), transports, secret.into())
    }

    /// Uses the agents at these endpoints, without a head server.
    #[must_use]
    pub fn at(agents: Vec<Endpoint>, transports: Transports, secret: impl Into<Arc<str>>) -> Self {
        Self::of(Arc::new(FixedAgents(agents)), transports, secret.into())
    }

    /// Uses the agents of `source`.
    pub(crate) fn of(source: Arc<dyn NodeSource>, transports: Transports, secret: Arc<str>) -> Self {
        Self { source, transports, secret, variables: Arc::default(), options: NodesOptions::default() }
    }

    /// Sets variables of the ranks that take precedence over those of this program.
    #[cfg(feature = "ray")]
    pub(crate) fn with_variables(self, variables: Variables) -> Self {
        Self { variables: Arc::new(variables), ..self }
    }

    /// Replaces the options.
    #[must_use]
    pub fn with(mut self, options: NodesOptions) -> Self {
        self.options = options;
        self
    }

    /// Returns the agents that respond, with what they report, by name; and the errors of the others.
    async fn agents(&self, cx: &CallContext) -> Result<(Vec<(AgentClient, NodeReport)>, Vec<String>)> {
        let candidates = self.source.agents(cx).await?;
        let asked = candidates.into_iter().map(|(name, endpoints)| async move {
            let client = AgentClient::new(endpoints, self.transports.clone(), &self.secret);
            let report = client.report(&cx.child().at_most(REPORT_TIMEOUT)).await;
            report.map(|report| (client, report)).map_err(|error| format!("{name}: {error}"))
        });
        let mut asked: FuturesUnordered<_> = asked.collect();
        let (mut agents, mut errors) = (Vec::new(), Vec::new());
        let mut until = Instant::now() + REPORT_TIMEOUT;
        loop {
            match timeout_at(until, asked.next()).await {
                Ok(Some(Ok(agent))) => {
                    agents.push(agent);
                    // An agent that is stopped must not hold up the others.
                    until = until.min(Instant::now() + STRAGGLER_TIMEOUT);
                }
                Ok(Some(Err(error))) => errors.push(error),
                Ok(None) => break,
                Err(_) => {
                    errors.push(format!("{} more nodes have not responded in time", asked.len()));
                    break;
                }
            }
        }
        agents.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        Ok((agents, errors))
    }
}

impl Nodes {
    pub(crate) async fn reserve_nodes(
        &self,
        cx: &CallContext,
        request: &ReserveRequest,
    ) -> Result<Arc<NodesReservation>> {
        check_lease(self.options.lease)?;
        request.cluster.validate()?;
        Ok(Arc::new(NodesReservation(NodesState::reserve(self.clone(), cx, request.clone()).await?)))
    }
}

#[async_trait]
impl Provisioner for Nodes {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        Ok(self.reserve_nodes(cx, request).await?)
    }
}
