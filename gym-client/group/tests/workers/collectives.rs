//! Ranks in processes meet: sums over axes, and every survivor of a rank that is killed or stopped names it.
//!
//! `GYM_COLLECTIVE_KILLS` says how often a rank is killed (10 unless set), `GYM_KILL_SEED` where the seeds begin.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::transport::TransportPolicy;
use gym_core::{CallContext, Code, Result, worker};
#[cfg(feature = "nccl")]
use gym_group::collective::nccl;
use gym_group::collective::{CollectiveOptions, Communicator, CommunicatorExt as _, Peers, ReduceOp};
use gym_group::placement::{ClusterSpec, CommunicationBackend};
use gym_group::{
    Dispatch, Group, GroupError, Payload, Rank, RankLayout, RankState, Tensor, WorkerEnv, WorkerGroupExt as _,
};
use gym_group::{GroupRequest, Provisioner, VirtualCluster};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::{Instant, sleep};

use super::types::Init;
use super::{LONG, freeze, options, pid, signal, spec, start, status, stop, until};

const RANKS: u32 = 4;

/// What [`summing::endure`] returns.
type Endured = Result<(String, u64, u64), GroupError>;

/// Sums with its peers.
pub(crate) struct Summing {
    rank: Rank,
    peers: Peers,
}

worker! {
    impl Worker for Summing as summing {
        fn start(env: WorkerEnv, _: Init) -> Result<Self> {
            #[cfg(feature = "nccl")]
            super::nccl::register(env.rank)?;
            Ok(Self { rank: env.rank, peers: env.peers })
        }
        /// Returns the first element of the sum over an axis, whether all elements have the value they must have, and the epoch.
        exclusive async fn sum(&mut self, cx: &CallContext, call: Payload<(String, usize)>) -> Result<Payload<(f32, bool, u64)>> {
            let (axis, elements) = call.value;
            let peers = if axis.is_empty() { self.peers.all(cx).await? } else { self.peers.communicator(cx, &axis).await? };
            let meeting = peers.meeting();
            // Exact in every order of the sum.
            let values = |rank: Rank| (0..elements).map(move |at| (at % 1_000) as f32 + rank as f32);
            let expected: Vec<f32> = (0..elements).map(|at| (at % 1_000) as f32 * meeting.world_size() as f32)
                .map(|sum| sum + meeting.seats.iter().map(|seat| seat.rank as f32).sum::<f32>()).collect();
            let sum = summed(&*peers, cx, values(self.rank).collect()).await?;
            Ok((sum[0], sum == expected, peers.meeting().epoch).into())
        }
        /// Returns the sum of a third of each rank, as gradients travel.
        exclusive async fn gradient(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<f32>> {
            let data = self.peers.gradients(cx, "data").await?;
            let third = Tensor::from_vec([1], vec![1.0_f32 / 3.0])?;
            Ok(data.all_reduce(cx, third, ReduceOp::Sum).await?.view::<f32>()?[0].into())
        }
        /// Sums this many elements again and again, each time with this deadline. Returns how that failed, when, in microseconds of the machine, and how long
        /// the last sum took, in microseconds.
        exclusive async fn endure(&mut self, cx: &CallContext, call: Payload<(usize, u64)>) -> Result<Payload<(String, u64, u64)>> {
            let (peers, (elements, deadline)) = (self.peers.all(cx).await?, call.value);
            loop {
                let values = vec![1.0_f32; elements];
                let (cx, began) = (cx.child().at_most(Duration::from_millis(deadline)), Instant::now());
                if let Err(error) = summed(&*peers, &cx, values).await {
                    return Ok((error.to_string(), micros(), began.elapsed().as_micros() as u64).into());
                }
                cx.progress.advance(1);
            }
        }
    }
}

/// Returns the sum of the ranks' values: of a GPU's memory where the rank has NCCL.
async fn summed(peers: &dyn Communicator, cx: &CallContext, values: Vec<f32>) -> Result<Vec<f32>> {
    #[cfg(feature = "nccl")]
    if std::env::var_os(nccl::NCCL_LIBRARY_VARIABLE).is_some() {
        return super::nccl::summed(peers, cx, &values).await;
    }
    let sum = peers.all_reduce(cx, Tensor::from_vec([values.len()], values)?, ReduceOp::Sum).await?;
    Ok(sum.view::<f32>()?.to_vec())
}

/// Has one rank sum along an axis, or with all ranks. Returns whether the sum is right.
#[cfg(feature = "nccl")]
pub(crate) async fn sum_at(group: &Group, rank: Rank, axis: &str) -> Result<bool, GroupError> {
    let call = group.call(summing::sum, (axis.to_owned(), 100)).dispatch(Dispatch::rank(rank)).deadline(LONG);
    Ok(call.await?.into_values().remove(0).1)
}

/// The clock that processes of a machine have in common.
fn micros() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

pub(crate) fn layout() -> RankLayout {
    RankLayout::new([("data", 2), ("tensor", 2)]).expect("a layout")
}

async fn summing(restarts: u32) -> Group {
    summing_with(restarts, CollectiveOptions::default()).await
}

async fn summing_with(restarts: u32, collectives: CollectiveOptions) -> Group {
    summing_over(restarts, collectives, None).await
}

async fn summing_over(restarts: u32, collectives: CollectiveOptions, policy: Option<TransportPolicy>) -> Group {
    let mut options = options().restarting(restarts);
    options.heartbeat = Duration::from_millis(50);
    options.layout = Some(layout());
    let mut spec = spec("summing", RANKS);
    spec.collectives = collectives;
    #[cfg(feature = "nccl")]
    if collectives.backend == CommunicationBackend::Nccl {
        spec.variables = super::nccl::variables();
    }
    if let Some(policy) = policy {
        options.transports = options.transports.with_policy(policy.clone());
        spec.transport_policy = Some(policy);
    }
    start(spec, options).await.expect("starts")
}

async fn check_sums(group: &Group, elements: usize) -> u64 {
    let mut epoch = 0;
    for (axis, expected) in [("", [6.0; 4]), ("data", [2.0, 4.0, 2.0, 4.0]), ("tensor", [1.0, 1.0, 5.0, 5.0])] {
        let sums =
            group.call(summing::sum, (axis.to_owned(), elements)).deadline(LONG).await.expect("sums").into_values();
        let values: Vec<f32> = sums.iter().map(|(value, ..)| *value).collect();
        assert_eq!(values, expected, "{axis}");
        assert!(sums.iter().all(|(_, right, _)| *right), "{axis}: {sums:?}");
        epoch = sums[0].2;
    }
    epoch
}

pub(crate) async fn ranks_in_processes_sum_over_each_axis() {
    let group = summing(0).await;
    for elements in [1, 1_000, 1_000_003] {
        check_sums(&group, elements).await;
    }
    stop(&group).await;
}

pub(crate) async fn the_options_of_a_group_name_how_its_ranks_meet() {
    let exact = 1.0_f32 / 3.0 + 1.0 / 3.0;
    let mut options = CollectiveOptions::default();
    options.backend = CommunicationBackend::Tcp;
    options.compress_gradients = true;
    let group = summing_with(0, options).await;
    check_sums(&group, 1_000_003).await;
    let sums = group.call(summing::gradient, ()).deadline(LONG).await.expect("sums").into_values();
    assert!(sums.iter().all(|sum| *sum != exact && (sum - exact).abs() <= exact / 128.0), "{sums:?}");
    until("a heartbeat tells the path", || {
        status(&group, 0).collectives.totals.iter().any(|totals| totals.path == "http+frames")
    })
    .await;
    stop(&group).await;

    let mut options = CollectiveOptions::default();
    options.backend = CommunicationBackend::Shm;
    let group = summing_with(0, options).await;
    if group.worker_status().iter().all(|rank| rank.node_name == group.worker_status()[0].node_name) {
        check_sums(&group, 1_000_003).await;
        until("a heartbeat tells the path", || {
            let totals = status(&group, 0).collectives.totals;
            !totals.is_empty() && totals.iter().all(|totals| totals.path == "shm")
        })
        .await;
    } else {
        let error = group.call(summing::sum, (String::new(), 1)).deadline(LONG).await.expect_err("two nodes");
        assert!(error.to_string().contains("'shm' needs memory that all ranks share: ranks 0 and "), "{error}");
    }
    stop(&group).await;

    let mut spec = spec("summing", RANKS);
    spec.collectives.backend = CommunicationBackend::Nccl;
    // Also where the machine has them.
    for name in ["GYM_NCCL_LIBRARY", "GYM_CUDA_LIBRARY"] {
        spec.variables.insert(name.to_owned(), "/no/such/library".to_owned());
    }
    let group = start(spec, self::options()).await.expect("starts");
    let error = group.call(summing::sum, (String::new(), 1)).deadline(LONG).await.expect_err("no NCCL");
    assert_eq!(error.cause().code(), Code::FailedPrecondition);
    let why = if cfg!(feature = "nccl") {
        "cannot be loaded: GYM_NCCL_LIBRARY=/no/such/library: no such file or directory. Install it"
    } else {
        "the feature `nccl`"
    };
    let text = error.to_string();
    assert!(text.contains(why) && text.contains("'auto' or 'host' for ranks on CPUs"), "{error}");
    stop(&group).await;
}

pub(crate) async fn the_survivors_of_a_killed_rank_name_it() {
    let number =
        |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"));
    kill_ranks(number("GYM_COLLECTIVE_KILLS", 10), CollectiveOptions::default(), None).await;
}

#[cfg(feature = "nccl")]
pub(crate) async fn the_survivors_of_a_rank_that_is_killed_under_nccl_name_it() {
    let kills = std::env::var("GYM_COLLECTIVE_KILLS").map_or(5, |text| text.parse().expect("a number"));
    kill_ranks(kills, over_nccl(), None).await;
}

#[cfg(feature = "nccl")]
pub(crate) fn over_nccl() -> CollectiveOptions {
    let mut options = CollectiveOptions::default();
    options.backend = CommunicationBackend::Nccl;
    options
}

/// Lets all ranks sum, each time with this deadline in milliseconds, until one sum fails. Returns when all do, because a rank that asks for its peers when
/// one of them is lost waits for the restart.
async fn endure(group: &Group, elements: usize, deadline: u64) -> impl Future<Output = Vec<Endured>> {
    let mut calls = Vec::new();
    for rank in 0..RANKS {
        let call = group.call(summing::endure, (elements, deadline)).dispatch(Dispatch::rank(rank)).deadline(LONG);
        let pending = call.start().await.expect("handed over");
        calls.push(async { Ok(pending.await?.into_values().remove(0)) });
    }
    until("all ranks sum", || {
        let sums =
            |rank| status(group, rank).running.iter().any(|call| call.method == "summing.endure" && call.progress > 0);
        (0..RANKS).all(sums)
    })
    .await;
    join_all(calls)
}

/// Checks that one rank has ended, and that all others name it, and no other. Returns when their sums failed, and how long those took, in microseconds.
fn survivors_name(outcomes: Vec<Endured>, lost: Rank, when: &str) -> Vec<(u64, u64)> {
    let mut times = Vec::new();
    for (rank, outcome) in (0..).zip(outcomes) {
        if rank == lost {
            outcome.expect_err("it was lost");
            continue;
        }
        let (error, failed, took) = outcome.expect("it survives");
        let others = (0..RANKS).filter(|other| *other != lost).any(|other| error.contains(&format!("rank {other} ")));
        assert!(
            error.contains(&format!("rank {lost} ")) && !others,
            "{when}: rank {lost} is lost, and rank {rank} says: {error}"
        );
        times.push((failed, took));
    }
    times
}

/// Kills ranks while they sum. With a policy, over its transports.
pub(crate) async fn kill_ranks(kills: u64, collectives: CollectiveOptions, policy: Option<TransportPolicy>) {
    let first_seed = std::env::var("GYM_KILL_SEED").map_or(1, |text| text.parse().expect("a number"));
    let group = summing_over(u32::try_from(kills).expect("fits"), collectives, policy).await;
    let mut epoch = check_sums(&group, 100).await;
    let mut times = Vec::new();
    for seed in first_seed..first_seed + kills {
        let mut random = fastrand::Rng::with_seed(seed);
        let killed: Rank = random.u32(0..RANKS);
        let elements = [16, 16_384, 1 << 20][random.usize(0..3)];
        let enduring = endure(&group, elements, 30_000).await;
        sleep(Duration::from_micros(random.u64(1_000..60_000))).await;
        let at = micros();
        signal(pid(&group, killed), Signal::KILL);
        let named = survivors_name(enduring.await, killed, &format!("seed {seed}"));
        times.extend(named.into_iter().map(|(failed, _)| failed.saturating_sub(at)));
        group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
        let newer = check_sums(&group, 100).await;
        assert!(newer > epoch, "seed {seed}: {newer} after {epoch}");
        epoch = newer;
    }
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1e3;
    println!(
        "{kills} kills, {} survivors: failed after {:.1} ms (p50), {:.1} ms (p99)",
        times.len(),
        at(0.5),
        at(0.99)
    );
    stop(&group).await;
}

pub(crate) async fn an_operation_that_waits_tells_for_whom() {
    let group = summing(0).await;
    let absent = 2;
    let mut calls = Vec::new();
    for rank in (0..RANKS).filter(|rank| *rank != absent) {
        let call = group.call(summing::sum, (String::new(), 100)).dispatch(Dispatch::rank(rank)).deadline(LONG);
        calls.push(call.start().await.expect("handed over"));
    }
    // Until it joins, the ranks wait for the meeting.
    let other = group.call(summing::endure, (100, 60_000)).dispatch(Dispatch::rank(absent)).deadline(LONG);
    let other = tokio::spawn(other.start().await.expect("handed over"));
    for outcome in join_all(calls).await {
        outcome.expect("the first sum has all ranks");
    }
    until("it tells that the others have not called", || {
        let waiting = status(&group, absent).collectives.waiting;
        waiting.first().is_some_and(|waiting| waiting.missing == [0, 1, 3])
    })
    .await;
    let told = &status(&group, absent).collectives.waiting[0].to_string();
    assert!(told.starts_with("waits in all_reduce 1 of meeting policy (epoch 1): ranks 0, 1, 3 have not"), "{told}");
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(group.metrics()));
    let operations = r#"gym_collective_operations_total{group="policy",rank="0",operation="all_reduce",path=""#;
    until("the metrics have the first sum", || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        text.lines().any(|line| line.starts_with(operations) && line.ends_with(" 1.0"))
    })
    .await;
    drop(other);
    group.kill(0).await.expect("kills");
    stop(&group).await;
}

pub(crate) async fn a_stopped_rank_is_named_at_the_deadline() {
    stop_rank(CollectiveOptions::default()).await;
}

#[cfg(feature = "nccl")]
pub(crate) async fn a_rank_that_is_stopped_under_nccl_is_named_at_the_deadline() {
    stop_rank(over_nccl()).await;
}

/// Stops ranks while they sum: `GYM_COLLECTIVE_KILLS` times, by default once.
async fn stop_rank(collectives: CollectiveOptions) {
    let stops = std::env::var("GYM_COLLECTIVE_KILLS").map_or(1, |text| text.parse().expect("a number"));
    let group = summing_with(stops, collectives).await;
    let mut times = Vec::new();
    for round in 0..stops {
        times.extend(stop_one(&group, round % RANKS).await);
    }
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100] as f64 / 1e3;
    println!(
        "{stops} stops, {} survivors: failed {:.1} ms (p50), {:.1} ms (p99) after they began",
        times.len(),
        at(50),
        at(99)
    );
    stop(&group).await;
}

/// Stops a rank while all sum. Returns how long the sums of the others took that failed, in microseconds.
async fn stop_one(group: &Group, stopped: Rank) -> Vec<u64> {
    check_sums(group, 100).await;
    let deadline = 400;
    let mut calls = Vec::new();
    for rank in (0..RANKS).filter(|rank| *rank != stopped) {
        let call = group.call(summing::endure, (16, deadline)).dispatch(Dispatch::rank(rank)).deadline(LONG);
        calls.push(call.start().await.expect("handed over"));
    }
    let call = group.call(summing::endure, (16, deadline)).dispatch(Dispatch::rank(stopped)).deadline(LONG);
    let frozen = tokio::spawn(call.start().await.expect("handed over"));
    sleep(Duration::from_millis(20)).await;
    freeze(pid(group, stopped)).await;
    let mut times = Vec::new();
    for outcome in join_all(calls).await {
        let (error, _, took) = outcome.expect("it survives").into_values().remove(0);
        assert!(error.contains(&format!("rank {stopped} does not answer")), "{error}");
        times.push(took);
    }
    signal(pid(group, stopped), Signal::KILL);
    frozen.await.expect("no panic").expect_err("it was killed");
    group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
    check_sums(group, 100).await;
    times
}

/// Ranks 0 to 2 are on one machine and rank 3 is on another one. They sum over TCP, and name rank 3 when it is killed, and when `cut_off` takes away the
/// node of this name.
pub(crate) async fn ranks_meet_over_machines(provisioner: impl Provisioner + 'static, cut_off: impl FnOnce(&str)) {
    let mut bundles = ClusterSpec::new([3, 1]);
    bundles.use_gpus = false;
    let cluster = VirtualCluster::new(bundles, provisioner).expect("valid");
    let mut options = options().restarting(4);
    options.heartbeat = Duration::from_millis(50);
    options.layout = Some(layout());
    let request = GroupRequest::new("policy", "summing", &Init::default(), options).expect("JSON");
    let group = cluster.start(&CallContext::within(LONG), request).await.expect("starts");
    let machine = |rank| machine_of(&group, rank);
    assert!(machine(0) == machine(1) && machine(1) == machine(2) && machine(2) != machine(3));
    for elements in [1_000, 1_000_003] {
        check_sums(&group, elements).await;
    }
    let told = || status(&group, 0).collectives;
    until("a heartbeat tells of all sums", || told().totals.iter().map(|totals| totals.operations).sum::<u64>() == 6)
        .await;
    // Those with rank 2 and with rank 1 are in memory.
    let paths: Vec<_> = told().totals.into_iter().map(|totals| (totals.path, totals.operations)).collect();
    assert_eq!(paths, [("http+frames".to_owned(), 2), ("shm".to_owned(), 4)]);
    let why = format!("ranks 0 and 3 are on the nodes `{}` and `{}`", machine(0), machine(3));
    assert_eq!(told().not_shared, Some(why));

    let enduring = endure(&group, 16, 30_000).await;
    let at = micros();
    group.kill(3).await.expect("kills");
    let named = survivors_name(enduring.await, 3, "it was killed");
    let after: Vec<u64> = named.into_iter().map(|(failed, _)| failed.saturating_sub(at) / 1_000).collect();
    println!("    rank 3 is killed: its survivors name it after {after:?} ms");
    group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
    let epoch = check_sums(&group, 1_000_003).await;

    let (incarnation, deadline) = (status(&group, 3).incarnation, 1_000);
    let enduring = endure(&group, 1 << 20, deadline).await;
    cut_off(status(&group, 3).node_name.as_deref().expect("it is on a node"));
    let named = survivors_name(enduring.await, 3, "it was cut off");
    let took: Vec<u64> = named.into_iter().map(|(_, took)| took / 1_000).collect();
    println!("    its node is cut off: they name it {took:?} ms after the start of a sum with {deadline} ms");
    assert!(took.iter().all(|took| *took < 3 * deadline), "{took:?}");
    until("rank 3 is on the machine of the others", || {
        let rank = status(&group, 3);
        rank.incarnation > incarnation && rank.state == RankState::Healthy && machine(3) == machine(0)
    })
    .await;
    assert!(check_sums(&group, 1_000_003).await > epoch);
    until("a heartbeat tells that they share memory", || {
        let told = status(&group, 3).collectives;
        !told.totals.is_empty() && told.totals.iter().all(|totals| totals.path == "shm") && told.not_shared.is_none()
    })
    .await;
    // A rank that is asked to exit waits for those that were cut off to close their connections.
    group.shutdown(Duration::from_secs(2)).await.expect("stops");
}

/// The machine of a rank; the node of a rank on Ray is a share of it.
fn machine_of(group: &Group, rank: Rank) -> String {
    let node = status(group, rank).node_name.expect("it is on a node");
    node.rsplit('@').next().expect("at least one").to_owned()
}
