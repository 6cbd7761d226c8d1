//! The suite that every provisioner passes: what it reserves, starts, ends and reports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use gym_core::{CallContext, Code, Incarnation};
use gym_group::placement::{ClusterSpec, PlacementStrategy};
use gym_group::{Deployment, LaunchSpec, NodeEvent, NodeState, Provisioner, RankEvent, ReserveRequest};
use gym_group::{ExitCause, Rank, RankExit};
use tokio::time::timeout;

use super::{LONG, provisioners, spec};

fn cx() -> CallContext {
    CallContext::within(LONG)
}

fn lives(ranks: u32, incarnation: u64) -> Vec<(Rank, Incarnation)> {
    (0..ranks).map(|rank| (rank, Incarnation(incarnation))).collect()
}

/// Reads events and keeps what they say.
struct Events(BoxStream<'static, RankEvent>);

impl Events {
    /// Reads until `wanted` returns something.
    async fn until<T>(&mut self, what: &str, mut wanted: impl FnMut(&RankEvent) -> Option<T>) -> T {
        let found = async {
            loop {
                let event = self.0.next().await.unwrap_or_else(|| panic!("the events ended before: {what}"));
                if let Some(found) = wanted(&event) {
                    return found;
                }
            }
        };
        timeout(LONG, found).await.unwrap_or_else(|_| panic!("never came: {what}"))
    }

    async fn ready(&mut self, ranks: u32, incarnation: u64) {
        let mut waiting: Vec<Rank> = (0..ranks).collect();
        self.until("all ranks are ready", |event| {
            if let RankEvent::Ready { rank, incarnation: of, endpoints } = event {
                assert!(!endpoints.is_empty());
                assert_eq!(of.0, incarnation, "rank {rank}");
                waiting.retain(|known| known != rank);
            }
            waiting.is_empty().then_some(())
        })
        .await;
    }

    async fn exit(&mut self, rank: Rank) -> RankExit {
        self.until("the rank exits", |event| match event {
            RankEvent::Exited { rank: of, exit } if *of == rank => Some(exit.clone()),
            _ => None,
        })
        .await
    }
}

pub(crate) async fn all_provisioners_pass_one_suite() {
    for (name, provisioner, _) in provisioners() {
        println!("  {name}");
        holds_what_was_asked_for(&*provisioner).await;
        says_what_is_missing(&*provisioner).await;
        starts_each_rank_once_and_tells_a_late_reader_all(&*provisioner).await;
        restarts_end_the_old_incarnation_first(&*provisioner).await;
        a_kill_hits_only_the_incarnation_that_was_meant(&*provisioner).await;
        an_unknown_worker_type_starts_nothing(&*provisioner).await;
        a_shutdown_ends_all_ranks_and_allows_no_more(&*provisioner).await;
        a_release_ends_the_ranks_that_still_run(&*provisioner).await;
    }
}

async fn holds_what_was_asked_for(provisioner: &dyn Provisioner) {
    let reservation = provisioner.reserve(&cx(), &ReserveRequest::for_ranks(3)).await.expect("there is room");
    let (placement, nodes) = (reservation.placement(), reservation.nodes());
    let bundles: Vec<_> = placement.groups.iter().flat_map(|group| &group.bundles).collect();
    assert_eq!(bundles.len(), 3);
    assert!(bundles.iter().all(|bundle| bundle.host < nodes.len()), "{bundles:?} on {nodes:?}");
    assert!(nodes.iter().all(|node| node.state == NodeState::Serving));
    let mut events = reservation.events();
    for _ in &nodes {
        let event = timeout(LONG, events.next()).await.expect("in time").expect("an event");
        assert!(matches!(event, NodeEvent::Serving { .. }), "{event:?}");
    }
    reservation.release(Duration::ZERO).await.expect("releases");
    reservation.release(Duration::ZERO).await.expect("nothing to do");
}

async fn says_what_is_missing(provisioner: &dyn Provisioner) {
    let mut cluster = ClusterSpec::new([100_000]);
    cluster.use_gpus = false;
    cluster.placement_group_strategy = PlacementStrategy::StrictPack;
    let error = provisioner.reserve(&CallContext::within(Duration::from_secs(20)), &ReserveRequest::new(cluster)).await;
    let error = error.expect_err("nobody has that many CPUs");
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(error.to_string().contains("100000 CPUs") || error.to_string().contains("do not fit"), "{error}");
}

async fn launched(provisioner: &dyn Provisioner, ranks: u32) -> Arc<dyn Deployment> {
    let reservation = provisioner.reserve(&cx(), &ReserveRequest::for_ranks(ranks)).await.expect("there is room");
    // The deployment keeps the bundles.
    reservation.launch(&cx(), spec("obedient", ranks)).await.expect("starts")
}

async fn starts_each_rank_once_and_tells_a_late_reader_all(provisioner: &dyn Provisioner) {
    let deployment = launched(provisioner, 3).await;
    Events(deployment.events()).ready(3, 1).await;
    let mut started: BTreeMap<Rank, u32> = BTreeMap::new();
    let mut late = Events(deployment.events());
    let mut waiting = 3;
    late.until("the events so far", |event| {
        match event {
            RankEvent::Started { rank, .. } => *started.entry(*rank).or_default() += 1,
            RankEvent::Ready { .. } => waiting -= 1,
            _ => {}
        }
        (waiting == 0).then_some(())
    })
    .await;
    assert_eq!(started, BTreeMap::from([(0, 1), (1, 1), (2, 1)]));
    deployment.shutdown(LONG).await.expect("stops");
}

async fn restarts_end_the_old_incarnation_first(provisioner: &dyn Provisioner) {
    let deployment = launched(provisioner, 2).await;
    let mut events = Events(deployment.events());
    events.ready(2, 1).await;
    deployment.restart(&cx(), &lives(2, 2)).await.expect("restarts");
    let mut running: BTreeMap<Rank, u64> = BTreeMap::from([(0, 1), (1, 1)]);
    let mut waiting = 2;
    events
        .until("both ranks are ready again", |event| {
            match event {
                RankEvent::Exited { rank, exit } if running.get(rank) == Some(&exit.incarnation) => {
                    running.remove(rank);
                }
                RankEvent::Started { rank, incarnation, .. } => {
                    assert_eq!(incarnation.0, 2);
                    let before = running.insert(*rank, 2);
                    assert_eq!(before, None, "the old incarnation of rank {rank} had not ended");
                }
                RankEvent::Ready { incarnation, .. } if incarnation.0 == 2 => waiting -= 1,
                _ => {}
            }
            (waiting == 0).then_some(())
        })
        .await;
    let unknown = deployment.restart(&cx(), &[(7, Incarnation(2))]).await.expect_err("there is no such rank");
    assert_eq!(unknown.code(), Code::NotFound);
    deployment.shutdown(LONG).await.expect("stops");
}

async fn a_kill_hits_only_the_incarnation_that_was_meant(provisioner: &dyn Provisioner) {
    let deployment = launched(provisioner, 2).await;
    let mut events = Events(deployment.events());
    events.ready(2, 1).await;
    let late = deployment.kill(1, Some(Incarnation(9))).await.expect_err("another incarnation runs");
    assert_eq!(late.code(), Code::NotFound);
    deployment.kill(1, Some(Incarnation(1))).await.expect("it runs");
    let exit = events.exit(1).await;
    assert_eq!((exit.incarnation, exit.cause), (1, ExitCause::Died));
    deployment.shutdown(LONG).await.expect("stops");
}

async fn an_unknown_worker_type_starts_nothing(provisioner: &dyn Provisioner) {
    let reservation = provisioner.reserve(&cx(), &ReserveRequest::for_ranks(1)).await.expect("there is room");
    let error = reservation.launch(&cx(), spec("obediant", 1)).await.expect_err("no such type");
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("`obediant`") && error.to_string().contains("obedient"), "{error}");
    reservation.release(Duration::ZERO).await.expect("releases");
}

async fn a_shutdown_ends_all_ranks_and_allows_no_more(provisioner: &dyn Provisioner) {
    let deployment = launched(provisioner, 2).await;
    let mut events = Events(deployment.events());
    events.ready(2, 1).await;
    deployment.shutdown(LONG).await.expect("stops");
    let mut ended = 0;
    events
        .until("both have exited", |event| {
            if let RankEvent::Exited { exit, .. } = event {
                assert_eq!(exit.cause, ExitCause::Stopped);
                ended += 1;
            }
            (ended == 2).then_some(())
        })
        .await;
    deployment.shutdown(LONG).await.expect("nothing to do");
    // Either an error, or an exit: no rank starts.
    if deployment.restart(&cx(), &lives(1, 2)).await.is_ok() {
        let exit = events.exit(0).await;
        assert_eq!((exit.incarnation, exit.cause), (2, ExitCause::StartFailed));
    }
}

async fn a_release_ends_the_ranks_that_still_run(provisioner: &dyn Provisioner) {
    let reservation = provisioner.reserve(&cx(), &ReserveRequest::for_ranks(1)).await.expect("there is room");
    let spec: LaunchSpec = spec("obedient", 1);
    let deployment = reservation.launch(&cx(), spec.clone()).await.expect("starts");
    let mut events = Events(deployment.events());
    events.ready(1, 1).await;
    reservation.release(LONG).await.expect("releases");
    let exit = events.exit(0).await;
    assert_eq!(exit.cause, ExitCause::Stopped);
    reservation.launch(&cx(), spec).await.expect_err("the bundles were released");
}
