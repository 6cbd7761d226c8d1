//! The same as [`Group::worker_status`](super::Group::worker_status) and its siblings, as Prometheus metrics.

use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use tokio::time::Instant;

use super::status;
use super::supervise::Shared;
use super::{Group, RankState};

/// Reads a group whenever metrics are asked for. Register it as a collector; a group that is gone has no metrics.
pub struct GroupMetrics(Weak<Shared>);

impl Group {
    /// This group's metrics, for a registry's `register_collector`: by `group` and `rank`, whether it is up, its incarnation,
    /// restarts, seconds since its last sign of life, whether it is stuck, CPU, memory, peak and limit. What is not known is left
    /// out, never 0.
    #[must_use]
    pub fn metrics(&self) -> GroupMetrics {
        GroupMetrics(Arc::downgrade(&self.shared))
    }
}

impl fmt::Debug for GroupMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupMetrics")
    }
}

impl Collector for GroupMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(shared) = self.0.upgrade() else { return Ok(()) };
        let now = Instant::now();
        let usage = shared.deployment.usage();
        let seats = shared.seats();
        let ranks = seats.iter().map(|seat| (seat, usage.get(&seat.place.rank)));
        let each = |name, help, unit, of: &dyn Fn(usize) -> Option<f64>| Metric {
            name,
            help,
            unit,
            of_rank: of_all(seats.len(), of),
        };
        let at = |index: usize| ranks.clone().nth(index).expect("an index below the number of seats");
        let bytes = |count: u64| -> f64 {
            #[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
            {
                count as f64
            }
        };
        let all = [
            each("gym_worker_up", "Whether the rank takes calls", None, &|i| {
                Some(f64::from(u8::from(at(i).0.state == RankState::Healthy)))
            }),
            each("gym_worker_incarnation", "Which life of the rank this is", None, &|i| {
                Some(bytes(at(i).0.incarnation.0))
            }),
            each("gym_worker_restarts", "Restarts of the rank", None, &|i| Some(f64::from(at(i).0.restarts_used))),
            each("gym_worker_stuck", "Whether the rank lives and does not move", None, &|i| {
                Some(f64::from(u8::from(status::stuck(at(i).0, now, &shared.options).is_some())))
            }),
            each("gym_worker_memory_high", "Whether it passed nine tenths of its memory limit", None, &|i| {
                Some(f64::from(u8::from(at(i).0.memory_high)))
            }),
            each("gym_worker_heartbeat_age", "Since its last sign of life", Some(Unit::Seconds), &|i| {
                at(i).0.heard.map(|heard| now.duration_since(heard).as_secs_f64())
            }),
            each("gym_worker_cpu_ratio", "Processor time it uses, in cores", None, &|i| {
                at(i).1.and_then(|usage| usage.cpu_percent).map(|percent| percent / 100.0)
            }),
            each(
                "gym_worker_resident_memory",
                "Memory of the rank with all that it started",
                Some(Unit::Bytes),
                &|i| at(i).1.map(|usage| bytes(usage.resident_bytes)),
            ),
            each("gym_worker_resident_memory_peak", "The most of it that was seen", Some(Unit::Bytes), &|i| {
                at(i).1.map(|usage| bytes(usage.peak_resident_bytes))
            }),
        ];
        for metric in all {
            metric.encode(&mut encoder, &shared.name)?;
        }
        Ok(())
    }
}

/// One metric of all ranks.
struct Metric {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    of_rank: Vec<Option<f64>>,
}

fn of_all(ranks: usize, of: &dyn Fn(usize) -> Option<f64>) -> Vec<Option<f64>> {
    (0..ranks).map(of).collect()
}

impl Metric {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>, group: &str) -> fmt::Result {
        let mut family = encoder.encode_descriptor(self.name, self.help, self.unit.as_ref(), MetricType::Gauge)?;
        for (rank, value) in self.of_rank.iter().enumerate() {
            if let Some(value) = value {
                let labels = [("group", group.to_owned()), ("rank", rank.to_string())];
                ConstGauge::new(*value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
