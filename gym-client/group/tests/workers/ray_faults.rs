//! Random faults of a Ray cluster, one after the other: after each, all ranks come back, and no rank is ever alive twice.
//!
//! `GYM_RAY_FAULTS` is their number, 7 by default: one of each kind, and `GYM_FAULT_SEED` the seed of the first one.

use std::time::Duration;

use gym_group::placement::ClusterSpec;
use gym_group::{GroupRequest, VirtualCluster};
use gym_group::{RankState, WorkerGroupExt};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::nodes::{living_ranks, watch_lives};
use super::ray::{cx, ray, ray_options};
use super::ray_cluster::{
    AGENT, LONG, control, kill, no_process_of_ours, nodes_of, parents, processes, until, whole_cluster,
};
use super::types::{Describe, Init};
use super::{options, signal, status, stop};

/// The faults. Each has the place of a rank.
const FAULTS: [&str; 7] = [
    "rank killed",
    "rank frozen and killed",
    "agent killed",
    "actor killed",
    "machine lost",
    "cable cut",
    "driver killed",
];

pub(crate) async fn ray_faults_leave_no_orphan_and_no_second_incarnation() {
    let Some(address) = whole_cluster() else { return };
    let number =
        |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"));
    let (faults, first_seed) = (number("GYM_RAY_FAULTS", FAULTS.len() as u64), number("GYM_FAULT_SEED", 1));
    let mark = format!("{:016x}", fastrand::u64(..));
    let budget = u32::try_from(faults * 4 + 4).expect("fits");
    let mut on_ray = ray_options();
    on_ray.max_restarts = budget;
    let cluster = VirtualCluster::new(ClusterSpec::new([1, 1]), ray(address, on_ray)).expect("valid");
    let mut request =
        GroupRequest::new("policy", "obedient", &Init::default(), options().restarting(budget)).expect("JSON");
    request.variables.insert("GYM_TEST_MARK".to_owned(), mark.clone());
    let group = cluster.start(&cx(), request).await.expect("starts");
    let watcher = watch_lives(mark.clone());
    println!("    seed  node  fault                   lost after  serving after");
    for seed in first_seed..first_seed + faults {
        let mut random = fastrand::Rng::with_seed(seed);
        sleep(Duration::from_millis(random.u64(0..500))).await;
        // Each kind in turn, so that few faults have them all.
        let kind = FAULTS[(seed % FAULTS.len() as u64) as usize];
        let rank = random.u32(0..2);
        let node = nodes_of(&group)[rank as usize].clone();
        let before = status(&group, rank).incarnation;
        let began = Instant::now();
        match kind {
            "rank killed" => group.kill(rank).await.expect("kills"),
            "rank frozen and killed" => {
                let pid = living_ranks(&mark)[&u64::from(rank)][0];
                signal(pid, Signal::STOP);
                sleep(Duration::from_millis(random.u64(0..1_000))).await;
                signal(pid, Signal::KILL);
            }
            "agent killed" => processes(&node, AGENT).into_iter().for_each(kill),
            "actor killed" => parents(&node, AGENT).into_iter().for_each(kill),
            "machine lost" => drop(control(&json!({"do": "kill_node", "node": node}))),
            "cable cut" => drop(control(&json!({"do": "partition", "node": node}))),
            _ => {
                let drivers: Vec<i32> =
                    ["head", "n1", "n2"].iter().flat_map(|node| processes(node, "gym_ray.py")).collect();
                drivers.into_iter().for_each(kill);
            }
        }
        until("the exit is known", || {
            status(&group, rank).incarnation > before || status(&group, rank).state != RankState::Healthy
        })
        .await;
        let lost = began.elapsed();
        until("all serve again", || {
            let ranks = group.worker_status();
            status(&group, rank).incarnation > before && ranks.iter().all(|rank| rank.state == RankState::Healthy)
        })
        .await;
        println!(
            "    {seed:>4}  {node:<4}  {kind:<22}  {:>7} ms  {:>10} ms",
            lost.as_millis(),
            began.elapsed().as_millis()
        );
        // A driver that was killed ends both agents, one of them perhaps a moment later.
        let limit = Instant::now() + LONG;
        while let Err(error) = group.call(Describe, ()).deadline(LONG).await {
            assert!(Instant::now() < limit, "seed {seed}: {error}");
            sleep(Duration::from_millis(50)).await;
        }
        match kind {
            "machine lost" => drop(control(&json!({"do": "start_node", "node": node}))),
            "cable cut" => {
                control(&json!({"do": "heal", "node": node}));
                // Ray gives the node up; it comes back as a new one.
                control(&json!({"do": "kill_node", "node": node}));
                control(&json!({"do": "start_node", "node": node}));
            }
            _ => {}
        }
        assert!(!watcher.is_finished(), "seed {seed}: a rank was alive twice");
    }
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
    no_process_of_ours("after the stop").await;
    assert!(living_ranks(&mark).is_empty());
    assert!(!watcher.is_finished(), "a rank was alive twice");
    watcher.abort();
}
