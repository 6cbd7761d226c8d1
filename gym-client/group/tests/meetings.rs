//! Ranks of one process meet: in supervised groups and in groups without a supervisor, along axes, and again after a rank was replaced.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::time::Duration;

use gym_core::transport::InProcess;
use gym_core::{CallContext, Code, Error, Result, worker};
use gym_group::collective::{CommunicatorExt as _, Peers, ReduceOp};
use gym_group::train::StepMark;
use gym_group::{
    Dispatch, Group, GroupOptions, InProcessGroup, InProcessRanks, LaunchSpec, Payload, Rank, RankLayout, RankPlace,
    Tensor, WorkerEnv, WorkerGroupExt, WorkerKind, Workers,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// One permit for each rank that is about to ask for the communicator of an axis in which a rank is absent.
static ASKS: Semaphore = Semaphore::const_new(0);

struct Summing {
    rank: Rank,
    peers: Peers,
}

worker! {
    impl Worker for Summing as summing {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> {
            Ok(Self { rank: env.rank, peers: env.peers })
        }
        /// Returns the sum over the axis of each rank's number plus one, and the epoch in which it was made. One rank may be absent.
        exclusive async fn sum(&mut self, cx: &CallContext, call: Payload<(String, Option<Rank>)>) -> Result<Payload<(f32, u64)>> {
            let (axis, absent) = call.value;
            if absent == Some(self.rank) {
                return Ok((0.0, 0).into());
            }
            if absent.is_some() && !axis.is_empty() {
                ASKS.add_permits(1);
            }
            let peers = match &*axis {
                "" => self.peers.all(cx).await?,
                axis => self.peers.communicator(cx, axis).await?,
            };
            let own = Tensor::from_vec([1], vec![self.rank as f32 + 1.0])?;
            let sum = peers.all_reduce(cx, own, ReduceOp::Sum).await?;
            Ok((sum.view::<f32>()?[0], peers.meeting().epoch).into())
        }
    }
}

fn square() -> RankLayout {
    RankLayout::new([("data", 2), ("tensor", 2)]).unwrap()
}

async fn sums(group: &impl WorkerGroupExt, axis: &str) -> Vec<(f32, u64)> {
    group.call(summing::sum, (axis.to_owned(), None)).deadline(WAIT_TIMEOUT).await.unwrap().into_values()
}

fn values(sums: &[(f32, u64)]) -> Vec<f32> {
    sums.iter().map(|(sum, _)| *sum).collect()
}

async fn supervised() -> Group {
    let network = InProcess::new();
    let workers = Workers::new().with("summing", WorkerKind::of::<Summing>());
    let ranks = InProcessRanks::new(workers, network.clone());
    let places = (0..4).map(|rank| RankPlace::on_one_node(rank, 4)).collect();
    let spec = LaunchSpec::new("policy", "summing", serde_json::value::to_raw_value(&()).unwrap(), places);
    let mut options = GroupOptions::new(network.into()).restarting(3);
    options.layout = Some(square());
    Group::start(&CallContext::within(WAIT_TIMEOUT), &ranks, spec, options).await.unwrap()
}

/// Checks the sums of a group of four ranks, each of which has its number plus one.
async fn meets_along_each_axis(group: &impl WorkerGroupExt) {
    for (axis, expected) in [("", [10.0; 4]), ("data", [4.0, 6.0, 4.0, 6.0]), ("tensor", [3.0, 3.0, 7.0, 7.0])] {
        let sums = sums(group, axis).await;
        assert_eq!(values(&sums), expected, "{axis}");
        assert!(sums.iter().all(|(_, epoch)| *epoch == sums[0].1), "{axis}: {sums:?}");
    }
    let unknown = group.call(summing::sum, ("pipeline".to_owned(), None)).deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!(unknown.cause().code(), Code::InvalidArgument);
    assert!(unknown.to_string().contains("data") && unknown.to_string().contains("tensor"), "{unknown}");
}

#[tokio::test]
async fn ranks_without_a_supervisor_meet() {
    let group = InProcessGroup::start::<Summing>("policy", square(), ()).await.unwrap();
    meets_along_each_axis(&group).await;
    let before = sums(&group, "").await[0].1;
    group.kill(2).unwrap();
    group.restart::<Summing>(2, ()).await.unwrap();
    let after = sums(&group, "").await;
    assert_eq!(values(&after), [10.0; 4]);
    assert!(after[0].1 > before, "{after:?} after epoch {before}");
}

#[tokio::test]
async fn ranks_with_a_supervisor_meet() {
    let group = supervised().await;
    meets_along_each_axis(&group).await;
    group.shutdown(WAIT_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn a_rank_that_waits_for_a_lost_one_is_told_who_it_was() {
    let group = supervised().await;
    // Its ranks know who meets.
    sums(&group, "").await;
    let waiting = group.call(summing::sum, ("data".to_owned(), Some(2))).deadline(WAIT_TIMEOUT).start().await.unwrap();
    // Each of them asks in the same poll.
    drop(tokio::time::timeout(WAIT_TIMEOUT, ASKS.acquire_many(3)).await.unwrap());
    group.kill(2).await.unwrap();
    let error = waiting.await.unwrap_err();
    assert_eq!(error.cause().code(), Code::Unavailable, "{error}");
    assert!(error.to_string().contains("rank 2"), "{error}");
    group.ready(&CallContext::within(WAIT_TIMEOUT)).await.map_err(Error::from).unwrap();
    group.restart_failed_workers(&CallContext::within(WAIT_TIMEOUT)).await.unwrap();
    let sums = sums(&group, "").await;
    assert_eq!(values(&sums), [10.0; 4]);
    group.shutdown(WAIT_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn after_a_step_that_failed_the_same_ranks_meet_again() {
    let group = supervised().await;
    let before = sums(&group, "").await[0].1;
    let late = group.call(summing::sum, (String::new(), Some(2))).deadline(Duration::from_millis(200)).await;
    assert_eq!(late.unwrap_err().cause().code(), Code::DeadlineExceeded);
    let after = sums(&group, "").await;
    assert_eq!((values(&after), after[0].1), (vec![10.0; 4], before));
    group.shutdown(WAIT_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn a_rank_alone_says_whom_it_waited_for() {
    let group = supervised().await;
    let alone = group.call(summing::sum, ("data".to_owned(), None)).dispatch(Dispatch::rank(1));
    let error = alone.deadline(Duration::from_millis(300)).await.unwrap_err();
    assert_eq!(error.cause().code(), Code::DeadlineExceeded, "{error}");
    assert_eq!(values(&sums(&group, "").await), [10.0; 4], "the others are not harmed");
    group.shutdown(WAIT_TIMEOUT).await.unwrap();
}

/// Has a parameter, and takes steps.
struct Stepping {
    rank: Rank,
    step: u64,
    parameter: f32,
}

/// The newest parameters, as a rank that has them would tell them.
static NEWEST: Mutex<(u64, f32)> = Mutex::new((0, 0.0));

worker! {
    impl Worker for Stepping as stepping {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> {
            Ok(Self { rank: env.rank, step: 0, parameter: 0.0 })
        }
        /// Takes a step, except at one rank.
        exclusive async fn step(&mut self, _: &CallContext, call: Payload<Option<Rank>>) -> Result<Payload<StepMark>> {
            if call.value != Some(self.rank) {
                (self.step, self.parameter) = (self.step + 1, self.parameter + 0.5);
                *NEWEST.lock() = (self.step, self.parameter);
            }
            let parameters = Tensor::from_vec([1], vec![self.parameter])?;
            Ok(StepMark::new(self.step, [&parameters]).into())
        }
        /// Takes over the newest parameters.
        exclusive async fn load(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
            (self.step, self.parameter) = *NEWEST.lock();
            Ok(().into())
        }
    }
}

#[tokio::test]
async fn a_rank_whose_step_failed_alone_gets_the_state_of_the_others() {
    let network = InProcess::new();
    let ranks = InProcessRanks::new(Workers::new().with("stepping", WorkerKind::of::<Stepping>()), network.clone());
    let places = (0..3).map(|rank| RankPlace::on_one_node(rank, 3)).collect();
    let spec = LaunchSpec::new("policy", "stepping", serde_json::value::to_raw_value(&()).unwrap(), places);
    let options = GroupOptions::new(network.into()).on_restart(stepping::load, ());
    let group = Group::start(&CallContext::within(WAIT_TIMEOUT), &ranks, spec, options).await.unwrap();
    let step = async |absent: Option<Rank>| -> Vec<Rank> {
        let marks = group.call(stepping::step, absent).deadline(WAIT_TIMEOUT).await.unwrap().into_values();
        StepMark::outdated(&(0..).zip(marks).collect::<Vec<_>>())
    };
    assert!(step(None).await.is_empty());
    let outdated = step(Some(1)).await;
    assert_eq!(outdated, [1]);
    group.mark_stale(&CallContext::within(WAIT_TIMEOUT), outdated).await.unwrap();
    assert!(step(None).await.is_empty());
    assert_eq!(group.worker_status().iter().map(|rank| rank.restarts_used).sum::<u32>(), 0);
    group.shutdown(WAIT_TIMEOUT).await.unwrap();
    // A group that cannot prepare ranks says so.
    let group = supervised().await;
    let error = group.mark_stale(&CallContext::within(WAIT_TIMEOUT), [1]).await.unwrap_err();
    assert!(error.code() == Code::FailedPrecondition && error.to_string().contains("on_restart"), "{error}");
    group.shutdown(WAIT_TIMEOUT).await.unwrap();
}
