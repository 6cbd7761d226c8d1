//! Status and usage of the ranks as Prometheus metrics.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use gym_core::group::RankState;
use gym_core::group::collective::{CollectiveReport, OperationTotals};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use tokio::time::Instant;

use crate::supervise::group::Group;
use crate::supervise::options::GroupOptions;
use crate::supervise::record::RankRecord;
use crate::supervise::status;
use crate::supervise::supervisor::GroupState;
use crate::usage::process::ProcessUsage;

/// Prometheus collector of a group, read at each scrape. A dropped group has no metrics.
pub struct GroupMetrics(Weak<GroupState>);

impl Group {
    /// Returns the collector of this group's metrics, for a registry's `register_collector`. The labels are `group` and `rank`.
    /// The metrics are up, incarnation, restarts, seconds since the last heartbeat, stuck, CPU, memory and its peak, GPU memory,
    /// and the connection. Unknown values are omitted.
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
        let records = shared.records();
        for gauge in GAUGES {
            let mut family =
                encoder.encode_descriptor(gauge.name, gauge.help, gauge.unit.as_ref(), MetricType::Gauge)?;
            for record in records.iter() {
                let rank = Rank { record, usage: usage.get(&record.place.rank), options: &shared.options, now };
                if let Some(value) = (gauge.of)(&rank) {
                    let labels = [("group", shared.name.to_string()), ("rank", record.place.rank.to_string())];
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let help = "Current connection to the rank (always 1); lanes are those of UCX";
        let mut family = encoder.encode_descriptor("gym_worker_path", help, None, MetricType::Gauge)?;
        for record in records.iter() {
            let Some(path) = record.channel.as_ref().map(gym_core::Channel::path) else { continue };
            let labels = [
                ("group", shared.name.to_string()),
                ("rank", record.place.rank.to_string()),
                ("scheme", path.scheme.to_owned()),
                ("lanes", path.lanes.to_string()),
            ];
            ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
        }
        encode_collectives(&mut encoder, &shared.name, &records)
    }
}

/// Encodes what the ranks' last heartbeats told of their collective operations.
fn encode_collectives(encoder: &mut DescriptorEncoder<'_>, group: &str, records: &[RankRecord]) -> fmt::Result {
    let reports: Vec<(String, CollectiveReport)> = records
        .iter()
        .filter_map(|record| Some((record.place.rank.to_string(), record.report()?.collectives)))
        .filter(|(_, report)| !report.is_empty())
        .collect();
    type Value = fn(&OperationTotals) -> f64;
    let counters: [(&str, &str, Option<Unit>, Value); 3] = [
        ("gym_collective_operations", "Collective operations of the rank that have succeeded", None, |of| {
            of.operations as f64
        }),
        (
            "gym_collective_moved",
            "Bytes of the buffers of collective operations that have succeeded",
            Some(Unit::Bytes),
            |of| of.bytes as f64,
        ),
        (
            "gym_collective_time",
            "Time from the calls of collective operations to their ends",
            Some(Unit::Seconds),
            |of| of.micros as f64 / 1e6,
        ),
    ];
    for (name, help, unit, value) in counters {
        let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        for (rank, report) in &reports {
            for totals in &report.totals {
                let labels =
                    [("group", group), ("rank", rank), ("operation", &totals.operation), ("path", &totals.path)];
                ConstCounter::new(value(totals)).encode(family.encode_family(&labels)?)?;
            }
        }
    }
    let help = "Meetings of the rank for collective operations that have failed";
    let mut family = encoder.encode_descriptor("gym_collective_aborts", help, None, MetricType::Counter)?;
    for (rank, report) in &reports {
        ConstCounter::new(report.aborts).encode(family.encode_family(&[("group", group), ("rank", rank)])?)?;
    }
    let help =
        "Time for which the rank's oldest collective operation has waited at its last heartbeat; 0 if none waits";
    let unit = Some(Unit::Seconds);
    let mut family = encoder.encode_descriptor("gym_collective_waiting", help, unit.as_ref(), MetricType::Gauge)?;
    for (rank, report) in &reports {
        let waited = report.waiting.first().map_or(0.0, |waiting| waiting.elapsed_ms as f64 / 1e3);
        ConstGauge::new(waited).encode(family.encode_family(&[("group", group), ("rank", rank)])?)?;
    }
    Ok(())
}

/// The source of a gauge.
struct Rank<'a> {
    record: &'a RankRecord,
    usage: Option<&'a ProcessUsage>,
    options: &'a GroupOptions,
    now: Instant,
}

struct RankGauge {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    /// `None` if the value is unknown.
    of: fn(&Rank<'_>) -> Option<f64>,
}

const fn gauge(name: &'static str, help: &'static str, of: fn(&Rank<'_>) -> Option<f64>) -> RankGauge {
    RankGauge { name, help, unit: None, of }
}

const fn bytes(name: &'static str, help: &'static str, of: fn(&Rank<'_>) -> Option<f64>) -> RankGauge {
    RankGauge { name, help, unit: Some(Unit::Bytes), of }
}

const GAUGES: [RankGauge; 10] = [
    gauge("gym_worker_up", "1 if the rank accepts calls, otherwise 0", |rank| {
        flag(rank.record.state() == RankState::Healthy)
    }),
    gauge("gym_worker_incarnation", "Incarnation of the rank; each restart has a higher one", |rank| {
        count(rank.record.incarnation.0)
    }),
    gauge("gym_worker_restarts", "Restarts of the rank", |rank| count(rank.record.restarts_used().into())),
    gauge(
        "gym_worker_stuck",
        "1 if the rank runs without a heartbeat, or a call without progress; otherwise 0",
        |rank| flag(status::stuck(rank.record, rank.now, rank.options).is_some()),
    ),
    RankGauge {
        name: "gym_worker_heartbeat_age",
        help: "Time since the last heartbeat of the rank",
        unit: Some(Unit::Seconds),
        of: |rank| rank.record.heartbeat_age(rank.now).as_ref().map(Duration::as_secs_f64),
    },
    gauge("gym_worker_cpu_cores", "CPU cores that the rank uses, with all processes that it started", |rank| {
        rank.usage?.cpu_percent.map(|percent| percent / 100.0)
    }),
    bytes("gym_worker_resident_memory", "Resident memory of the rank, with all processes that it started", |rank| {
        count(rank.usage?.resident_bytes)
    }),
    bytes(
        "gym_worker_resident_memory_peak",
        "Highest sampled resident memory of the rank, with all processes that it started",
        |rank| count(rank.usage?.peak_resident_bytes),
    ),
    bytes("gym_worker_gpu_memory", "GPU memory of the rank, with all processes that it started", |rank| {
        rank.usage?.gpu_memory_bytes.and_then(count)
    }),
    gauge("gym_worker_memory_high", "1 if the rank has passed nine tenths of its memory limit, otherwise 0", |rank| {
        flag(rank.record.memory_high)
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
