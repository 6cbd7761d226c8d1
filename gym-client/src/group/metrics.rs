//! The same as [`Group::worker_status`](super::Group::worker_status) and its siblings, as Prometheus metrics.

use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use tokio::time::Instant;

use super::options::GroupOptions;
use super::seat::Seat;
use super::supervise::Shared;
use super::{Group, RankState, status};
use crate::provision::Usage;

/// Reads a group whenever metrics are asked for. Register it as a collector; a group that is gone has no metrics.
pub struct GroupMetrics(Weak<Shared>);

impl Group {
    /// This group's metrics, for a registry's `register_collector`: by `group` and `rank`, whether it is up, its incarnation,
    /// restarts, seconds since its last sign of life, whether it is stuck, CPU, memory and its peak, GPU memory, how it is reached. What is not known is left
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
        for gauge in GAUGES {
            let mut family =
                encoder.encode_descriptor(gauge.name, gauge.help, gauge.unit.as_ref(), MetricType::Gauge)?;
            for seat in seats.iter() {
                let rank = Rank { seat, usage: usage.get(&seat.place.rank), options: &shared.options, now };
                if let Some(value) = (gauge.of)(&rank) {
                    let labels = [("group", shared.name.to_string()), ("rank", seat.place.rank.to_string())];
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let help = "How the rank is reached (always 1)";
        let mut family = encoder.encode_descriptor("gym_worker_path", help, None, MetricType::Gauge)?;
        for seat in seats.iter() {
            let Some(path) = seat.channel.as_ref().map(gym_core::Channel::path) else { continue };
            let labels = [
                ("group", shared.name.to_string()),
                ("rank", seat.place.rank.to_string()),
                ("scheme", path.scheme.to_owned()),
                ("lanes", path.lanes.to_string()),
            ];
            ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// What a gauge reads.
struct Rank<'a> {
    seat: &'a Seat,
    usage: Option<&'a Usage>,
    options: &'a GroupOptions,
    now: Instant,
}

struct RankGauge {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    /// `None` for what is not known.
    of: fn(&Rank<'_>) -> Option<f64>,
}

const fn gauge(name: &'static str, help: &'static str, of: fn(&Rank<'_>) -> Option<f64>) -> RankGauge {
    RankGauge { name, help, unit: None, of }
}

const fn bytes(name: &'static str, help: &'static str, of: fn(&Rank<'_>) -> Option<f64>) -> RankGauge {
    RankGauge { name, help, unit: Some(Unit::Bytes), of }
}

const GAUGES: [RankGauge; 10] = [
    gauge("gym_worker_up", "Whether the rank takes calls", |rank| flag(rank.seat.state == RankState::Healthy)),
    gauge("gym_worker_incarnation", "Which life of the rank this is", |rank| count(rank.seat.incarnation.0)),
    gauge("gym_worker_restarts", "Restarts of the rank", |rank| count(rank.seat.restarts_used.into())),
    gauge("gym_worker_stuck", "Whether the rank lives and does not move", |rank| {
        flag(status::stuck(rank.seat, rank.now, rank.options).is_some())
    }),
    RankGauge {
        name: "gym_worker_heartbeat_age",
        help: "Time since its last sign of life",
        unit: Some(Unit::Seconds),
        of: |rank| rank.seat.heard.map(|heard| rank.now.duration_since(heard).as_secs_f64()),
    },
    gauge("gym_worker_cpu_cores", "Processor time that it uses, in cores", |rank| {
        rank.usage?.cpu_percent.map(|percent| percent / 100.0)
    }),
    bytes("gym_worker_resident_memory", "Memory of the rank with all that it started", |rank| {
        count(rank.usage?.resident_bytes)
    }),
    bytes("gym_worker_resident_memory_peak", "The most of it that was seen", |rank| {
        count(rank.usage?.peak_resident_bytes)
    }),
    bytes("gym_worker_gpu_memory", "GPU memory that the rank holds, with all that it started", |rank| {
        rank.usage?.gpu_memory_bytes.and_then(count)
    }),
    gauge("gym_worker_memory_high", "Whether it passed nine tenths of its memory limit", |rank| {
        flag(rank.seat.memory_high)
    }),
];

fn flag(is: bool) -> Option<f64> {
    Some(f64::from(u8::from(is)))
}

#[expect(clippy::unnecessary_wraps, reason = "what a gauge reads may not be known")]
fn count(number: u64) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
    Some(number as f64)
}
