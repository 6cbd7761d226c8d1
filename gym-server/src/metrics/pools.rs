//! Metrics of the pools of a process: read from each pool whenever the metrics are written.

use std::sync::Arc;

use gym_client::work::WorkPool;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::metrics::ServerLabels;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabels {
    server: String,
    worker: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WeightLabels {
    server: String,
    of: String,
}

/// The queue and the workers of each pool.
#[derive(Clone, Default)]
pub(super) struct PoolMetrics {
    waiting: Family<ServerLabels, Gauge>,
    held: Family<ServerLabels, Gauge>,
    workers: Family<ServerLabels, Gauge>,
    lost: Family<ServerLabels, Counter>,
    late: Family<ServerLabels, Counter>,
    worker_held: Family<WorkerLabels, Gauge>,
    worker_capacity: Family<WorkerLabels, Gauge>,
    worker_finished: Family<WorkerLabels, Counter>,
    weight: Family<WeightLabels, Gauge>,
    pools: Arc<Mutex<Vec<(ServerLabels, WorkPool)>>>,
}

impl PoolMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("gym_pool_waiting", "Rollouts that wait for a worker", self.waiting.clone());
        registry.register("gym_pool_held", "Rollouts that workers hold", self.held.clone());
        registry.register("gym_pool_workers", "Workers that take rollouts", self.workers.clone());
        registry.register("gym_pool_workers_lost", "Workers that were lost with rollouts", self.lost.clone());
        registry.register("gym_pool_late_responses", "Responses that came too late to count", self.late.clone());
        registry.register("gym_pool_worker_held", "Rollouts that a worker holds", self.worker_held.clone());
        let help = "Rollouts that a worker can hold: its weight in the distribution of the work";
        registry.register("gym_pool_worker_capacity", help, self.worker_capacity.clone());
        let help = "Rollouts that a worker has finished since it joined the pool";
        registry.register("gym_pool_worker_finished", help, self.worker_finished.clone());
        let help =
            "Share of the work that a server gets while work for several servers waits (--weight), if it is not 1";
        registry.register("gym_pool_weight", help, self.weight.clone());
    }

    pub(super) fn watch(&self, labels: ServerLabels, pool: WorkPool) {
        self.pools.lock().push((labels, pool));
    }

    pub(super) fn update(&self) {
        let gauge = |family: &Family<ServerLabels, Gauge>, labels: &ServerLabels, value: usize| {
            family.get_or_create(labels).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        // A worker that has left has no values.
        self.worker_held.clear();
        self.worker_capacity.clear();
        self.worker_finished.clear();
        for (labels, pool) in &*self.pools.lock() {
            let now = pool.snapshot();
            gauge(&self.waiting, labels, now.waiting);
            gauge(&self.held, labels, now.held);
            gauge(&self.workers, labels, now.workers.len());
            for worker in &now.workers {
                let worker_labels = WorkerLabels { server: labels.server.clone(), worker: worker.name.to_string() };
                let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
                self.worker_held.get_or_create(&worker_labels).set(count(worker.held));
                self.worker_capacity.get_or_create(&worker_labels).set(count(worker.capacity));
                self.worker_finished.get_or_create(&worker_labels).inc_by(worker.finished);
            }
            for (of, weight) in &now.weights {
                let labels = WeightLabels { server: labels.server.clone(), of: of.clone() };
                self.weight.get_or_create(&labels).set(i64::from(*weight));
            }
            for (family, total) in [(&self.lost, now.workers_lost), (&self.late, now.late)] {
                let counter = family.get_or_create(labels);
                counter.inc_by(total.saturating_sub(counter.get()));
            }
        }
    }
}
