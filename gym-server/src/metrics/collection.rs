//! Metrics of a collection: read from its counters whenever the metrics are written.

use std::fmt;
use std::sync::Arc;

use gym_client::collect::CollectProgress;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// The rollouts of a collection, its attempts by class, and its rewards.
#[derive(Debug)]
pub(super) struct CollectionMetrics(pub(super) Arc<CollectProgress>);

impl Collector for CollectionMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = self.0.snapshot();
        let help = "Rollouts that ended in this run: completed, or failed for good. Its rate is the throughput";
        let mut family = encoder.encode_descriptor("gym_collect_rollouts", help, None, MetricType::Counter)?;
        for (outcome, count) in [("completed", now.completed), ("failed", now.given_up)] {
            ConstCounter::new(count).encode(family.encode_family(&[("outcome", outcome)])?)?;
        }
        let help = "Attempts that ended in this run by class: completed, or the class of the failure";
        let mut family = encoder.encode_descriptor("gym_collect_attempts", help, None, MetricType::Counter)?;
        let classes = now.failures.iter().map(|(class, count)| (class.as_str(), *count));
        for (class, count) in [("completed", now.completed)].into_iter().chain(classes) {
            ConstCounter::new(count).encode(family.encode_family(&[("class", class)])?)?;
        }
        let gauges = [
            ("gym_collect_requested", "Rollouts that the collection consists of", now.total),
            ("gym_collect_done", "Rollouts that need no further attempt, those of earlier runs included", now.done()),
            ("gym_collect_in_flight", "Rollouts in flight", now.in_flight),
        ];
        for (name, help, count) in gauges {
            ConstGauge::new(count).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let (help, seconds) = ("Age of the rollout that has been in flight for the longest time", Some(&Unit::Seconds));
        let family = encoder.encode_descriptor("gym_collect_oldest", help, seconds, MetricType::Gauge)?;
        ConstGauge::new(now.oldest.map_or(0.0, |oldest| oldest.age.as_secs_f64())).encode(family)?;
        let help = "Mean reward of the recorded rollouts by agent, those of earlier runs included";
        let mut family = encoder.encode_descriptor("gym_collect_mean_reward", help, None, MetricType::Gauge)?;
        for (agent, score) in now.scores.iter().filter(|(_, score)| score.count > 0) {
            #[expect(clippy::cast_precision_loss, reason = "a mean")]
            let mean = score.reward_sum / score.count as f64;
            ConstGauge::new(mean).encode(family.encode_family(&[("agent", &**agent)])?)?;
        }
        Ok(())
    }
}
