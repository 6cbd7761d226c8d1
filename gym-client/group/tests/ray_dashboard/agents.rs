//! Reservations that succeed: node agents of this process play those of the nodes.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use gym_client::Transports;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Code, Result, World, worker};
use gym_group::placement::NodeResources;
use gym_group::ray::Ray;
use gym_group::{
    Group, GroupOptions, GroupRequest, InProcessRanks, NodeAgent, NodeEvent, NodeOptions, NodeState, Provisioner as _,
    Reservation, VirtualCluster, WorkerKind, Workers,
};
use gym_group::{HostOptions, Payload, RankState, WorkerEnv, WorkerGroupExt as _};
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::fake::{Answer, Cluster, Fake, Job, LONG, SUBMIT, event, placed};
use super::reserve::{options, ray, two_nodes};

fn cx() -> CallContext {
    CallContext::within(LONG)
}

/// Returns the options of the agent of a share, as the actor on its bundle gives them.
fn agent_options(job: &Job, share: usize) -> NodeOptions {
    let mut options = NodeOptions::new(job.spec()["agent"]["secret"].as_str().expect("a text"));
    options.name = format!("share{share:04}@127.0.0.1");
    let cpus = u32::try_from(job.spec()["cpus"][share].as_u64().expect("a number")).expect("fits");
    options.resources = NodeResources::new(&options.name, cpus, Vec::new());
    options
}

/// Returns the event that reports an agent.
fn listens(agent: &NodeAgent, share: usize, seq: u64) -> String {
    let fields = json!({
        "share": share, "incarnation": 1, "node_id": format!("node-10.0.0.1{}", share + 1), "ip": "127.0.0.1", "pid": 1, "gpus": [],
        "endpoints": agent.endpoints(),
    });
    event(seq, "agent", fields)
}

/// Starts the agents of a job, and returns the events that report them.
async fn start_agents(job: &Job) -> ([NodeAgent; 2], [String; 2]) {
    let start = async |share| NodeAgent::start(Workers::new(), agent_options(job, share)).await.expect("listens");
    let agents = [start(0).await, start(1).await];
    let events = [listens(&agents[0], 0, 4), listens(&agents[1], 1, 5)];
    (agents, events)
}

/// Returns the identifier of the second attempt of a job. Its random name may contain `-a1` too, so only the end is replaced.
fn second_attempt(first: &str) -> String {
    format!("{}-a2", first.strip_suffix("-a1").expect("the first attempt"))
}

/// Appends to the log of a job.
fn write(fake: &Fake, id: &str, lines: &str) {
    fake.with(|cluster| cluster.jobs.get_mut(id).expect("a job").log.push_str(lines));
}

/// Plays the driver of a job up to its agents.
async fn play(fake: &Fake, id: &str) -> [NodeAgent; 2] {
    let job = fake.with(|cluster| cluster.jobs[id].clone());
    let (agents, events) = start_agents(&job).await;
    write(fake, id, &events.concat());
    agents
}

/// Returns how often the log of this job was read.
fn looks(cluster: &Cluster, id: &str) -> usize {
    let line = format!("GET /api/jobs/{id}/logs");
    cluster.requests.iter().filter(|seen| seen.line == line).count()
}

/// Waits until the log of this job was read twice more: what was written before has its effect then.
async fn read_again(fake: &Fake, id: &str) {
    let before = fake.with(|cluster| looks(cluster, id));
    fake.until("the log is read", |cluster| looks(cluster, id) >= before + 2).await;
}

/// Reserves two nodes.
async fn reserved_with(fake: &Fake, ray: &Ray) -> (Arc<dyn Reservation>, String, [NodeAgent; 2]) {
    fake.play(|job| job.log = placed());
    let (cx, request) = (cx(), two_nodes());
    let playing = async {
        fake.until("the job runs", |cluster| cluster.jobs.len() == 1).await;
        let id = fake.job().id();
        (play(fake, &id).await, id)
    };
    let (reservation, (agents, id)) = tokio::join!(ray.reserve(&cx, &request), playing);
    (reservation.expect("reserved"), id, agents)
}

async fn reserved(fake: &Fake) -> (Arc<dyn Reservation>, String, [NodeAgent; 2]) {
    reserved_with(fake, &ray(fake, options())).await
}

fn assert_serving(reservation: &dyn Reservation) {
    let states: Vec<_> = reservation.nodes().into_iter().map(|node| node.state).collect();
    assert_eq!(states, [NodeState::Serving, NodeState::Serving]);
}

/// Cases 11 and 22 without ranks.
#[tokio::test(start_paused = true)]
async fn bundles_are_on_the_agents_of_their_shares_and_the_job_ends_with_the_reservation() {
    let fake = Fake::start().await;
    let (reservation, id, agents) = reserved(&fake).await;
    let placement = reservation.placement();
    let groups: Vec<_> = placement
        .groups
        .iter()
        .map(|group| (&*group.name, group.bundles.iter().map(|b| (b.node, b.index, b.host, b.gpu.is_some())).collect()))
        .collect();
    let expected: [(&str, Vec<_>); 2] = [("node0", vec![(0, 0, 0, false)]), ("node1", vec![(1, 0, 1, false)])];
    assert_eq!(groups, expected);
    let nodes: Vec<_> =
        reservation.nodes().into_iter().map(|node| (node.resources.name, node.resources.cpus)).collect();
    assert_eq!(nodes, [("share0000@127.0.0.1".to_owned(), Some(1)), ("share0001@127.0.0.1".to_owned(), Some(1))]);
    assert_serving(&*reservation);
    assert_eq!(fake.stops(), Vec::<String>::new());

    reservation.release(Duration::from_secs(1)).await.expect("releases");
    assert_eq!(fake.stops(), [&*id]);
    let last = fake.lines().pop().expect("a request");
    assert_eq!(
        (last, fake.job().status),
        (format!("GET /api/jobs/{id}"), "STOPPED"),
        "it waits for the end of the job"
    );
    // The agents have no controller now.
    for agent in &agents {
        timeout(LONG, agent.released()).await.expect("released");
    }
    let sent = fake.lines().len();
    reservation.release(Duration::from_secs(1)).await.expect("nothing to do");
    drop(reservation);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(fake.lines().len(), sent, "nothing is sent after the end: {:?}", fake.lines());
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_dropped_gives_its_agents_back_and_stops_its_job() {
    let fake = Fake::start().await;
    let (reservation, id, agents) = reserved(&fake).await;
    drop(reservation);
    fake.until("the job is asked to stop", |cluster| cluster.requests.iter().any(|seen| seen.line.ends_with("/stop")))
        .await;
    assert_eq!(fake.stops(), [id]);
    for agent in &agents {
        timeout(LONG, agent.released()).await.expect("released");
    }
}

/// Ray writes the log while it is read.
#[tokio::test(start_paused = true)]
async fn a_line_that_is_half_written_counts_when_it_is_complete() {
    let fake = Fake::start().await;
    let (ray, cx, request) = (ray(&fake, options()), cx(), two_nodes());
    fake.play(|job| job.log = placed());
    let mut reserving = ray.reserve(&cx, &request);
    let playing = async {
        fake.until("the job runs", |cluster| cluster.jobs.len() == 1).await;
        let job = fake.job();
        let (agents, [one, two]) = start_agents(&job).await;
        let end = two.len() - 2;
        for text in [&one, "(raylet) something else\n", &two[..3], &two[3..40], &two[40..end]] {
            write(&fake, &job.id(), text);
            read_again(&fake, &job.id()).await;
        }
        (agents, job.id(), two[end..].to_owned())
    };
    let (_agents, id, rest) = tokio::select! { biased;
        early = &mut reserving => panic!("reserved before the last line was complete: {early:?}"),
        played = playing => played,
    };
    write(&fake, &id, &rest);
    let reservation = timeout(LONG, reserving).await.expect("in time").expect("reserved");
    assert_serving(&*reservation);
    reservation.release(Duration::ZERO).await.expect("releases");
}

/// Case 34: a head that is away for a while changes nothing.
#[tokio::test(start_paused = true)]
async fn a_head_that_is_away_for_a_while_changes_nothing() {
    let fake = Fake::start().await;
    let (reservation, id, _agents) = reserved(&fake).await;
    for answer in [Answer::Closed, Answer::Never, Answer::text(500, "500 Internal Server Error")] {
        fake.before(move |_| Some(answer.clone()));
        sleep(Duration::from_secs(6)).await;
        assert_serving(&*reservation);
        fake.with(|cluster| cluster.before = None);
        let before = fake.with(|cluster| looks(cluster, &id));
        fake.until("the log is read again", |cluster| looks(cluster, &id) >= before + 4).await;
        assert_serving(&*reservation);
    }
    assert_eq!((fake.jobs().len(), fake.stops().len()), (1, 0), "{:?}", fake.lines());
    assert_eq!(fake.lines().iter().filter(|line| *line == SUBMIT).count(), 1);
    let mut events = reservation.events();
    let so_far: Vec<_> = std::iter::from_fn(|| events.next().now_or_never().flatten()).collect();
    assert!(so_far.len() == 2 && so_far.iter().all(|event| matches!(event, NodeEvent::Serving { .. })), "{so_far:?}");
    reservation.release(Duration::from_secs(1)).await.expect("releases");
    assert_eq!(fake.stops(), [id]);
}

/// Ray is about to end a node: its holder learns of it once, and the node serves on.
#[tokio::test(start_paused = true)]
async fn a_node_that_ray_drains_is_an_event_and_serves_on() {
    let fake = Fake::start().await;
    let (reservation, id, _agents) = reserved(&fake).await;
    for (seq, node, seconds) in [(6, "node-10.0.0.12", 30.2), (7, "node-10.0.0.12", 20.0), (8, "another", 1.0)] {
        write(&fake, &id, &event(seq, "draining", json!({"share": 1, "node_id": node, "seconds": seconds})));
        read_again(&fake, &id).await;
    }
    assert_serving(&*reservation);
    let mut events = reservation.events();
    let so_far: Vec<_> = std::iter::from_fn(|| events.next().now_or_never().flatten()).collect();
    let expected = NodeEvent::Draining {
        node: "share0001@127.0.0.1".to_owned(),
        why: "Ray drains it: it is to be taken away in 30 s".to_owned(),
    };
    assert_eq!(so_far[2..], [expected]);
    reservation.release(Duration::from_secs(1)).await.expect("releases");
}

/// Case 32: a job that fails after it ran is submitted again, as the next attempt.
#[tokio::test(start_paused = true)]
async fn a_job_that_fails_after_it_ran_is_submitted_again_as_the_next_attempt() {
    let fake = Fake::start().await;
    let (reservation, first, agents) = reserved(&fake).await;
    fake.with(|cluster| cluster.jobs.get_mut(&first).expect("a job").fail(-9));
    let second = second_attempt(&first);
    fake.until("a second job", |cluster| cluster.jobs.contains_key(&second)).await;
    let [one, two] = <[Job; 2]>::try_from(fake.jobs()).expect("two jobs");
    let mut expected = one.spec();
    expected["run"] = json!(second);
    assert_eq!(two.spec(), expected, "the same shares, and the same secret");
    assert_eq!(two.request["metadata"], json!({"name": "trainer", "gym": second}));
    assert_eq!(two.request["runtime_env"]["working_dir"], one.request["runtime_env"]["working_dir"]);
    assert_eq!(fake.seen("PUT ").len(), 1, "the package is there");
    // From here on, the second attempt is the job.
    drop(agents);
    let _agents = play(&fake, &second).await;
    read_again(&fake, &second).await;
    let old = fake.with(|cluster| looks(cluster, &first));
    sleep(Duration::from_secs(5)).await;
    assert_eq!(fake.with(|cluster| looks(cluster, &first)), old, "the first attempt is over");
    reservation.release(Duration::from_secs(1)).await.expect("releases");
    assert_eq!(fake.stops(), [second]);
    assert_eq!(fake.jobs().len(), 2);
}

/// A job that fails again and again is given up.
#[tokio::test(start_paused = true)]
async fn a_job_that_fails_again_and_again_is_submitted_as_often_as_the_options_say() {
    let fake = Fake::start().await;
    let mut options = options();
    options.max_restarts = 2;
    let (reservation, _, _agents) = reserved_with(&fake, &ray(&fake, options)).await;
    // Each next attempt fails at once.
    fake.play(|job| job.fail(1));
    fake.with(|cluster| cluster.jobs.values_mut().for_each(|job| job.fail(-9)));
    sleep(Duration::from_secs(30)).await;
    let attempts: Vec<String> = fake.jobs().iter().map(Job::id).collect();
    let name = attempts[0].strip_suffix("-a1").expect("the first attempt");
    assert_eq!(attempts[1..], [format!("{name}-a2"), format!("{name}-a3")]);
    reservation.release(Duration::from_secs(1)).await.expect("releases");
}

/// Without a head, a job cannot be submitted again; it is when the head is back.
#[tokio::test(start_paused = true)]
async fn a_job_whose_cluster_was_restarted_is_submitted_again_when_the_head_is_back() {
    let fake = Fake::start().await;
    let (reservation, first, _agents) = reserved(&fake).await;
    fake.before(|_| Some(Answer::Closed));
    sleep(Duration::from_secs(10)).await;
    // A head without fault tolerance comes back with nothing.
    fake.with(|cluster| {
        cluster.jobs.clear();
        cluster.packages.clear();
        cluster.before = None;
    });
    fake.until("another job", |cluster| !cluster.jobs.is_empty()).await;
    let second = fake.job().id();
    assert_eq!(second, second_attempt(&first));
    assert_eq!(fake.seen("PUT ").len(), 2, "the package was lost too");
    reservation.release(Duration::from_secs(1)).await.expect("releases");
    assert_eq!(fake.stops(), [second]);
}

/// Ray has the next attempt, and the program does not know it.
#[tokio::test(start_paused = true)]
async fn a_next_attempt_whose_response_was_lost_ends_with_the_reservation() {
    let fake = Fake::start().await;
    let (reservation, first, _agents) = reserved(&fake).await;
    fake.after(|seen| (seen.line == SUBMIT).then_some(Answer::Closed));
    fake.with(|cluster| cluster.jobs.get_mut(&first).expect("a job").fail(-9));
    let second = second_attempt(&first);
    fake.until("a second job", |cluster| cluster.jobs.contains_key(&second)).await;
    reservation.release(Duration::from_secs(1)).await.expect("releases");
    drop(reservation);
    fake.until("the second job has ended", |cluster| cluster.jobs[&second].status == "STOPPED").await;
    assert!(fake.stops().contains(&second), "{:?}", fake.stops());
}

/// The reservation is released while the cluster takes no jobs: no next attempt is submitted when it takes them again.
#[tokio::test(start_paused = true)]
async fn a_release_ends_the_submission_of_a_next_attempt() {
    let fake = Fake::start().await;
    let (reservation, first, _agents) = reserved(&fake).await;
    // A cluster that has just started.
    fake.before(|seen| (seen.line == SUBMIT).then(|| Answer::text(503, "No available agent")));
    fake.with(|cluster| cluster.jobs.get_mut(&first).expect("a job").fail(-9));
    fake.until("a submission", |cluster| cluster.requests.iter().filter(|seen| seen.line == SUBMIT).count() > 1).await;
    let (released, ()) = tokio::join!(reservation.release(Duration::from_secs(1)), async {
        sleep(Duration::from_millis(100)).await;
        fake.with(|cluster| cluster.before = None);
    });
    released.expect("releases");
    sleep(Duration::from_secs(10)).await;
    assert_eq!(fake.jobs().len(), 1, "{:?}", fake.lines());
}

/// The agents are released without it, and the job ends when the last of them has ended.
#[tokio::test(start_paused = true)]
async fn a_release_without_a_head_gives_the_agents_back_and_says_that_the_job_was_not_stopped() {
    let fake = Fake::start().await;
    let (reservation, _, agents) = reserved(&fake).await;
    fake.before(|_| Some(Answer::Closed));
    let error =
        timeout(LONG, reservation.release(Duration::from_secs(1))).await.expect("in time").expect_err("no head");
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.to_string().contains(&fake.url()), "{error}");
    for agent in &agents {
        timeout(LONG, agent.released()).await.expect("released");
    }
    // The head is back, and the release is tried again.
    fake.with(|cluster| cluster.before = None);
    reservation.release(Duration::from_secs(1)).await.expect("releases");
    assert_eq!(fake.job().status, "STOPPED");
}

/// A worker with a method that does nothing.
struct Idle;
worker! {
    impl Worker for Idle as idle {
        fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self) }
        exclusive async fn nothing(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> { Ok(().into()) }
    }
}

/// A group of two ranks on the two agents of a job. Agents and ranks are tasks of this process.
struct RankedJob {
    in_process: InProcess,
    workers: Workers,
    cluster: VirtualCluster,
    group: Group,
    /// The first attempt of the job.
    id: String,
}

impl RankedJob {
    /// Starts a group whose ranks may restart so many times.
    async fn start(fake: &Fake, restarts: u32) -> (Self, [NodeAgent; 2]) {
        let in_process = InProcess::new();
        let mut host = HostOptions::default();
        host.starts_in_task = true;
        let workers = Workers::new()
            .with("idle", WorkerKind::of::<Idle>().with_host(host))
            .over(Transports::from(in_process.clone()));
        fake.play(|job| job.log = placed());
        let ray = Ray::at(fake.address(), workers.clone()).with(options());
        let cluster = VirtualCluster::new(two_nodes().cluster, ray).expect("valid");
        let options = GroupOptions::new(in_process.clone().into()).restarting(restarts);
        let request = GroupRequest::new("policy", "idle", &(), options).expect("JSON");
        let cx = cx();
        let playing = async {
            fake.until("the job runs", |cluster| cluster.jobs.len() == 1).await;
            let id = fake.job().id();
            (both_agents(fake, &workers, &in_process, &id).await, id)
        };
        let (group, (agents, id)) = tokio::join!(cluster.start(&cx, request), playing);
        let ranked = Self { in_process, workers, cluster, group: group.expect("starts"), id };
        ranked.group.call(idle::nothing, ()).deadline(LONG).await.expect("answers");
        (ranked, agents)
    }

    /// Starts the agent of a share and reports it.
    async fn agent(&self, fake: &Fake, share: usize, seq: u64) -> NodeAgent {
        let job = fake.with(|cluster| cluster.jobs[&self.id].clone());
        let agent = start_agent(&self.workers, &self.in_process, &job, share).await;
        write(fake, &self.id, &listens(&agent, share, seq));
        agent
    }

    /// Waits until both ranks serve in this incarnation, and stops everything.
    async fn came_back(self, fake: &Fake, incarnation: u64) {
        let came_back = || {
            let ranks = self.group.worker_status();
            ranks.iter().all(|rank| rank.incarnation.0 == incarnation && rank.state == RankState::Healthy)
        };
        fake.until("both ranks are back", |_| came_back()).await;
        self.group.call(idle::nothing, ()).deadline(LONG).await.expect("answers");
        let nodes: Vec<_> = self.group.worker_status().into_iter().filter_map(|rank| rank.node_name).collect();
        let names: Vec<_> = nodes.iter().map(|name| &**name).collect();
        assert_eq!(names, ["share0000@127.0.0.1", "share0001@127.0.0.1"]);
        self.group.shutdown(LONG).await.expect("stops");
        self.cluster.shutdown(Duration::from_secs(1)).await.expect("stops");
    }
}

async fn start_agent(workers: &Workers, in_process: &InProcess, job: &Job, share: usize) -> NodeAgent {
    let ranks = InProcessRanks::new(workers.clone(), in_process.clone());
    let options = agent_options(job, share);
    NodeAgent::start_in_process(ranks, in_process.clone(), &World::real(), options).await.expect("listens")
}

/// Waits for a job, and starts and reports its agents.
async fn both_agents(fake: &Fake, workers: &Workers, in_process: &InProcess, id: &str) -> [NodeAgent; 2] {
    fake.until("the job runs", |cluster| cluster.jobs.contains_key(id)).await;
    let job = fake.with(|cluster| cluster.jobs[id].clone());
    let agents = [start_agent(workers, in_process, &job, 0).await, start_agent(workers, in_process, &job, 1).await];
    write(fake, id, &[listens(&agents[0], 0, 4), listens(&agents[1], 1, 5)].concat());
    agents
}

/// Case 32: ranks whose agents ended with their job restart on the agents of the next attempt.
#[tokio::test(start_paused = true)]
async fn ranks_of_a_job_that_failed_restart_on_the_agents_of_the_next_attempt() {
    let fake = Fake::start().await;
    let (ranked, first) = RankedJob::start(&fake, 3).await;
    // Ray ends the agents with the job.
    drop(first);
    fake.with(|cluster| cluster.jobs.get_mut(&ranked.id).expect("a job").fail(-9));
    let second = second_attempt(&ranked.id);
    let _second = both_agents(&fake, &ranked.workers, &ranked.in_process, &second).await;
    ranked.came_back(&fake, 2).await;
    assert_eq!(fake.stops(), [second]);
}

/// While a rank restarts, the node of another rank is lost: the restart waits for that node too, and tries again.
#[tokio::test(start_paused = true)]
async fn two_nodes_that_are_lost_a_moment_apart_cost_each_rank_one_restart() {
    let fake = Fake::start().await;
    let (ranked, [first, second]) = RankedJob::start(&fake, 1).await;
    drop(first);
    write(
        &fake,
        &ranked.id,
        &event(6, "lost", json!({"share": 0, "cause": "node", "node_id": "node-10.0.0.11", "why": "it died"})),
    );
    // By then, no rank of the lost node can be alive, and its bundle waits for the next agent.
    sleep(Duration::from_secs(20)).await;
    // The second node dies, which nothing has noticed when the first share has its next agent.
    drop(second);
    let _first = ranked.agent(&fake, 0, 7).await;
    let lost = || ranked.group.worker_status()[1].state != RankState::Healthy;
    fake.until("the second node is lost", |_| lost()).await;
    let _second = ranked.agent(&fake, 1, 8).await;
    ranked.came_back(&fake, 2).await;
}
