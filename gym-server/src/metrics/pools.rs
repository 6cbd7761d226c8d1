//! Metrics of the pools of a process: read from each pool whenever the metrics are written.

use std::sync::{Arc, Mutex, PoisonError};

use gym_client::work::WorkPool;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::metrics::ServerLabels;

/// The queue and the workers of each pool.
#[derive(Clone, Default)]
pub(super) struct PoolMetrics {
    waiting: Family<ServerLabels, Gauge>,
    held: Family<ServerLabels, Gauge>,
    workers: Family<ServerLabels, Gauge>,
    lost: Family<ServerLabels, Counter>,
    late: Family<ServerLabels, Counter>,
    pools: Arc<Mutex<Vec<(ServerLabels, WorkPool)>>>,
}

impl PoolMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("gym_pool_waiting", "Rollouts that wait for a worker", self.waiting.clone());
        registry.register("gym_pool_held", "Rollouts that workers hold", self.held.clone());
        registry.register("gym_pool_workers", "Workers that take rollouts", self.workers.clone());
        registry.register("gym_pool_workers_lost", "Workers that were lost with rollouts", self.lost.clone());
        registry.register("gym_pool_late_responses", "Responses that came too late to count", self.late.clone());
    }

    pub(super) fn watch(&self, labels: ServerLabels, pool: WorkPool) {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).push((labels, pool));
    }

    pub(super) fn update(&self) {
        let gauge = |family: &Family<ServerLabels, Gauge>, labels: &ServerLabels, value: usize| {
            family.get_or_create(labels).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        for (labels, pool) in &*self.pools.lock().unwrap_or_else(PoisonError::into_inner) {
            let now = pool.snapshot();
            gauge(&self.waiting, labels, now.waiting);
            gauge(&self.held, labels, now.held);
            gauge(&self.workers, labels, now.workers.len());
            for (family, total) in [(&self.lost, now.workers_lost), (&self.late, now.late)] {
                let counter = family.get_or_create(labels);
                counter.inc_by(total.saturating_sub(counter.get()));
            }
        }
    }
}
