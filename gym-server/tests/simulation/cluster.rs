//! The parts of a cluster: a worker with servers of its own, which joins the head server and takes work, and the pools of a collector.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use gym_client::registry::{LeaseKeeper, MemberKeeper, MemberOptions, RemoteRegistry};
use gym_client::work::{
    COLLECTOR_POOL, PoolWatch, PullingMember, WORK_LABEL, WorkPool, WorkPoolOptions, WorkPullerOptions,
};
use gym_client::{ServerClient, Transports};
use gym_core::registry::{
    Heartbeat, HeartbeatReply, Instance, JoinedMember, Lease, Member, MemberLease, MemberRegistry, MemberServer,
    MemberSpec, MemoryRegistry, Registration, Registry, RosterUpdate, RosterVersion,
};
use gym_core::rollout::work::WorkQueueOptions;
use gym_core::server::ServerKind;
use gym_core::testing::net::SimHost;
use gym_core::transport::{Fenced, InProcess, Listener, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Handler, Incarnation, Request, Response, Result, World};
use gym_server::role::{RoleServer, ServerContext};
use serde::Deserialize;

use crate::audit::{Audit, AuditedIncarnation, PoolAudit};
use crate::plan::ClusterPlan;
use crate::servers::{SmallAgent, SmallResources};
use crate::whole::{POLICY, policy};

/// The registrations within a process outlive every seed.
const LONG: Duration = Duration::from_secs(1_000_000);

/// A worker's process: an agent and a resources server, which is a member of the cluster.
pub(crate) struct Worker {
    pub(crate) name: &'static str,
    pub(crate) host: SimHost,
    pub(crate) remote: RemoteRegistry,
    pub(crate) world: World,
    pub(crate) audit: Audit,
    pub(crate) cluster: ClusterPlan,
    pub(crate) steps: u32,
    pub(crate) think_max: Duration,
    /// The agent has turns of the policy.
    pub(crate) turns: bool,
}

impl Worker {
    /// Serves until its host ends.
    pub(crate) async fn run(self) {
        let Self { name, host, remote, world, audit, cluster, steps, think_max, turns } = self;
        let incarnation = Incarnation(u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX));
        audit.member_started(name, incarnation);
        let network = InProcess::new();
        let transports = Transports::from(network.clone()).with_connector(Arc::new(host.clone()));
        let own = MemoryRegistry::new();
        // The agent has a client of its own: a client keeps the handlers that it called within its process, so one that is shared would keep
        // itself.
        let client = || ServerClient::new(Arc::new(own.clone()), transports.clone(), &world);
        let context = |name: &str| ServerContext::new(name, "small", &world);
        let fenced = |server: RoleServer| -> Arc<dyn Handler> {
            let handler = AuditedIncarnation {
                life: incarnation,
                handler: Arc::new(server) as Arc<dyn Handler>,
                audit: audit.clone(),
            };
            Arc::new(Fenced::new(incarnation, handler))
        };
        let resources = SmallResources { audit: audit.clone(), sessions: Arc::default(), steps };
        let resources = fenced(RoleServer::resources(resources, &context("resources")));
        let agent = SmallAgent {
            client: client(),
            world: world.clone(),
            steps,
            think_max,
            runs_once: Some(audit.clone()),
            turns,
        };
        let agent = fenced(RoleServer::agent(agent, &context("agent")));
        let serves = |listener: Box<dyn Listener>, handler: &Arc<dyn Handler>| {
            let serving = serve(listener, Arc::clone(handler), CancelToken::new(), Duration::ZERO);
            host.spawn(async move {
                // Ends with the host.
                let _ = serving.await;
            });
        };
        for (server, kind, handler) in
            [("resources", ServerKind::Resources, &resources), ("agent", ServerKind::Agent, &agent)]
        {
            serves(Box::new(network.listen(server).expect("a new process listens nowhere")), handler);
            let endpoint = Endpoint::parse(&format!("mem://{server}")).expect("an endpoint");
            let mut registration = Registration::new(server, kind, [endpoint]);
            registration.incarnation = incarnation;
            registration.ttl = LONG;
            own.register(&CallContext::default(), registration).await.expect("the registry of a process has no limits");
        }
        if turns {
            // As a configuration names the endpoint of an engine.
            let (kind, endpoint) = policy();
            let mut registration = Registration::new(POLICY, kind, [endpoint]);
            registration.ttl = LONG;
            own.register(&CallContext::default(), registration).await.expect("the registry of a process has no limits");
        }
        serves(Box::new(host.listen("agent").expect("a new process listens nowhere")), &agent);
        let mut spec = MemberSpec::new(name, incarnation);
        name.clone_into(&mut spec.host);
        spec.timing = cluster.timing;
        let endpoint = Endpoint::parse(&format!("sim://{name}/agent")).expect("an endpoint");
        spec.servers = vec![MemberServer {
            implementation: "small".to_owned(),
            ..MemberServer::new("agent", ServerKind::Agent, [endpoint])
        }];
        let remote = Arc::new(remote);
        let keeper = loop {
            let cx = CallContext::within(Duration::from_secs(60));
            let joining = MemberKeeper::join(remote.clone(), &cx, spec.clone(), MemberOptions::default(), &world);
            match joining.await {
                Ok(keeper) => break keeper,
                // The process ends with an error, and is started again.
                Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
            }
        };
        let mut options = WorkPullerOptions::new(name, &world);
        options.capacity = cluster.capacity;
        options.servers = Some(vec!["agent".to_owned()]);
        options.member = Some(PullingMember { incarnation, timing: spec.timing });
        let _pulling = cluster.pull.then(|| PoolWatch::start(remote.clone(), client(), options, &world));
        keeper.draining().cancelled().await;
        audit.violation(format_args!("{name} was asked to end"));
    }
}

/// Hosts a pool for each run of a collector.
pub(crate) struct CollectorPools {
    pub(crate) host: SimHost,
    pub(crate) remote: RemoteRegistry,
    pub(crate) world: World,
    pub(crate) audit: Audit,
    pub(crate) silence_max: Duration,
    pub(crate) ttl: Duration,
    /// Nothing happens by which a pool may lose a worker.
    pub(crate) keeps_all: bool,
}

/// The pool of one run.
pub(crate) struct RunPool {
    pub(crate) pool: WorkPool,
    audit: Audit,
    lease: LeaseKeeper,
    drain: CancelToken,
    keeps_all: bool,
}

impl CollectorPools {
    pub(crate) async fn start(&self) -> Result<RunPool> {
        let mut queue = WorkQueueOptions::default();
        queue.silence_max = self.silence_max;
        let mut options = WorkPoolOptions::default();
        options.queue = queue;
        let pool = WorkPool::new(options, &self.world);
        // Of this life of the host, at this time.
        let service = format!("work-{}", self.world.now().as_millis());
        let listener = self.host.listen(&service)?;
        let audit = PoolAudit::new(self.audit.clone());
        let handler = AuditedPool { pool: pool.clone(), audit: audit.clone() };
        let drain = CancelToken::new();
        let serving = serve(Box::new(listener), Arc::new(handler), drain.clone(), Duration::from_secs(2));
        self.host.spawn(async move {
            // Ends with the host.
            let _ = serving.await;
        });
        pool.admit_only_members();
        pool.follow(Arc::new(AuditedRoster { remote: self.remote.clone(), audit }));
        let endpoint = Endpoint::parse(&format!("sim://{}/{service}", self.host.name()))?;
        let mut registration = Registration::new(service, ServerKind::Environment, [endpoint]);
        COLLECTOR_POOL.clone_into(&mut registration.implementation);
        registration.ttl = self.ttl;
        registration.labels = [(WORK_LABEL.to_owned(), "1".to_owned())].into();
        let cx = CallContext::within(Duration::from_secs(10));
        let lease = LeaseKeeper::start(Arc::new(self.remote.clone()), &cx, registration).await?;
        Ok(RunPool { pool, audit: self.audit.clone(), lease, drain, keeps_all: self.keeps_all })
    }
}

impl RunPool {
    /// Ends the pool, as the command of a collection does.
    pub(crate) async fn end(self) {
        let snapshot = self.pool.snapshot();
        self.audit.count("worker lost by a pool", snapshot.workers_lost);
        self.audit.count("late response", snapshot.late);
        match (self.keeps_all, snapshot.workers_lost) {
            (true, 0) => self.audit.count("pool kept its workers through restarts of the head", 1),
            (true, lost) => {
                self.audit.violation(format_args!("a pool lost {lost} workers, and only the head was restarted"))
            }
            (false, _) => {}
        }
        self.lease.end(Duration::from_secs(2)).await;
        self.pool.close();
        self.drain.cancel();
    }
}

/// A pool whose assignments are recorded.
#[derive(Debug)]
struct AuditedPool {
    pool: WorkPool,
    audit: PoolAudit,
}

/// The fields that are read from a poll.
#[derive(Deserialize)]
struct Poll {
    worker: String,
    member: Option<u64>,
}

/// The fields that are read from the answer to a poll.
#[derive(Deserialize)]
struct Answer {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    id: u64,
}

impl Handler for AuditedPool {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.audit.check_lost(&self.pool.snapshot().workers);
        let poll: Option<Poll> = serde_json::from_slice(&request.message.head.to_bytes()).ok();
        if let Some(poll) = &poll {
            self.audit.polls(&poll.worker, poll.member.map(Incarnation));
        }
        let (answer, audit) = (self.pool.handle(request), self.audit.clone());
        Box::pin(async move {
            let response = answer.await?;
            let answer = serde_json::from_slice::<Answer>(&response.message.head.to_bytes());
            if let (Some(poll), Ok(answer)) = (poll, answer) {
                let items: BTreeSet<u64> = answer.items.iter().map(|item| item.id).collect();
                audit.handed_out(&poll.worker, poll.member.map(Incarnation), &items);
            }
            Ok(response)
        })
    }
}

/// The roster as a pool reads it.
#[derive(Debug)]
struct AuditedRoster {
    remote: RemoteRegistry,
    audit: PoolAudit,
}

#[async_trait]
impl Registry for AuditedRoster {
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease> {
        self.remote.register(cx, registration).await
    }

    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()> {
        self.remote.renew(cx, lease).await
    }

    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()> {
        self.remote.deregister(cx, lease).await
    }

    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>> {
        self.remote.resolve(cx, name).await
    }

    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>> {
        self.remote.list(cx).await
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        self.remote.watch(name)
    }
}

#[async_trait]
impl MemberRegistry for AuditedRoster {
    async fn join(&self, cx: &CallContext, spec: MemberSpec) -> Result<JoinedMember> {
        self.remote.join(cx, spec).await
    }

    async fn heartbeat(&self, cx: &CallContext, heartbeat: &Heartbeat) -> Result<HeartbeatReply> {
        self.remote.heartbeat(cx, heartbeat).await
    }

    async fn leave(&self, cx: &CallContext, lease: MemberLease) -> Result<()> {
        self.remote.leave(cx, lease).await
    }

    async fn drain(&self, cx: &CallContext, name: &str) -> Result<()> {
        self.remote.drain(cx, name).await
    }

    async fn members(&self, cx: &CallContext) -> Result<Vec<Member>> {
        self.remote.members(cx).await
    }

    async fn roster(&self, cx: &CallContext, seen: Option<RosterVersion>, wait: Duration) -> Result<RosterUpdate> {
        let update = self.remote.roster(cx, seen, wait).await?;
        // The pool applies it before anything else runs.
        self.audit.heard(&update);
        Ok(update)
    }
}
