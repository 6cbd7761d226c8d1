//! Verifies answers to math problems in parallel: `cargo run --release -p gym-group-examples --bin verify`.
//!
//! The list takes items one by one and hands them out in batches that take 20 ms, least busy rank first. The batches of a lost rank are handed out again.
//!
//! The ranks are processes of this machine. With the address of a Ray cluster in `RAY_ADDRESS`, they run on its nodes, without another change:
//! `RAY_ADDRESS=10.0.0.1:6379 cargo run --release -p gym-group-examples --bin verify`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_group::BatchOptions;
use gym_group::health::RetryBudgets;
use gym_group::prelude::*;
use gym_group::ray::{RayAddress, ray_or_local};
use gym_group::{Group, GroupOptions, LaunchSpec, RankPlace, WorkerKind, Workers};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

const RANKS: u32 = 4;
const ITEMS: u64 = 1_000;

/// A problem, and the answer of a model.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Item {
    number: u64,
    answer: u64,
}

struct Verifier(u32);
worker! {
    impl Worker for Verifier as verifier {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> { Ok(Self(env.rank)) }
        /// Returns for each item whether the answer is the number of primes up to the number, and the rank. May be repeated on another rank.
        blocking(idempotent) fn check(&mut self, _: &CallContext, call: Payload<Vec<Item>>) -> Result<Payload<Vec<(bool, Rank)>>> {
            let check = |item: &Item| (primes(item.number) == item.answer, self.0);
            Ok(call.value.iter().map(check).collect::<Vec<_>>().into())
        }
    }
}

/// Counts the primes up to `number` by trial division.
fn primes(number: u64) -> u64 {
    (2..=number).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0)).count() as u64
}

fn workers() -> Workers {
    Workers::new().with("verifier", WorkerKind::of::<Verifier>())
}

fn main() -> anyhow::Result<()> {
    // First, because ranks run this program too.
    workers().enter();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(verify())
}

async fn verify() -> anyhow::Result<()> {
    let cx = CallContext::within(Duration::from_secs(300));
    let address = RayAddress::of_environment()?;
    match &address {
        Some(address) => println!("on the Ray cluster at {address}"),
        None => println!("on this machine; RAY_ADDRESS is not set"),
    }
    let places = (0..RANKS).map(|rank| RankPlace::on_one_node(rank, RANKS)).collect();
    let spec = LaunchSpec::new("verifiers", "verifier", serde_json::value::to_raw_value(&())?, places);
    let options = GroupOptions::new(Transports::standard()).restarting(3);
    let group = Arc::new(Group::start(&cx, &ray_or_local(address, workers()), spec, options).await?);

    // Every second answer is wrong.
    let items: Vec<Item> =
        (0..ITEMS).map(|at| Item { number: 10_000 + at, answer: primes(10_000 + at) + at % 2 }).collect();
    let begin = Instant::now();
    let balancer = group.balancer()?.again(RetryBudgets::default());
    let checked = balancer.map_batched(&cx, verifier::check, items, &BatchOptions::default()).await;
    let seconds = begin.elapsed().as_secs_f64();

    // An item whose verifier fails would fail alone: its error names it, and the others have their results. Here, none does.
    let checked = checked.into_iter().collect::<Result<Vec<_>, _>>()?;
    let right = checked.iter().filter(|(right, _)| *right).count();
    let nodes: Vec<String> = group
        .worker_status()
        .iter()
        .map(|rank| rank.node_name.as_deref().unwrap_or("this machine").to_owned())
        .collect();
    let mut by_node: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, rank) in &checked {
        *by_node.entry(&nodes[*rank as usize]).or_default() += 1;
    }
    println!("{right} of {ITEMS} answers are right; verified by node: {by_node:?}");
    println!("{:.0} items/s on {RANKS} ranks", ITEMS as f64 / seconds);
    group.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}
