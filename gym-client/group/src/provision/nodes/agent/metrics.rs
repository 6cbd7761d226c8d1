//! `/metrics` of a node agent: what it offers and what is held, its process and its GPUs.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use gym_client::metrics::{ProcessMetrics, open_metrics};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::AgentState;
use crate::usage::GpuMetrics;

/// The metrics of an agent. Created with the first scrape: nothing samples GPUs for an agent that nothing scrapes.
#[derive(Default)]
pub(super) struct AgentMetrics(OnceLock<Registry>);

impl AgentMetrics {
    /// Returns the text of OpenMetrics. Must be called within a tokio runtime.
    pub(super) fn text(&self, state: &Arc<AgentState>) -> String {
        let registry = self.0.get_or_init(|| {
            let mut registry = Registry::default();
            registry.register_collector(Box::new(NodeMetrics(Arc::downgrade(state))));
            registry.register_collector(Box::new(ProcessMetrics));
            if let Some(gpus) = GpuMetrics::of_this_machine() {
                registry.register_collector(Box::new(gpus));
            }
            registry
        });
        open_metrics(registry)
    }
}

#[derive(Debug)]
struct NodeMetrics(Weak<AgentState>);

impl Collector for NodeMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(state) = self.0.upgrade() else { return Ok(()) };
        let report = state.report();
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let gauges: [(&str, &str, u64); 5] = [
            ("gym_node_cpus", "CPUs that the node offers to worker groups", report.cpus.into()),
            ("gym_node_cpus_free", "CPUs of the node that no controller holds", report.free_cpus.into()),
            ("gym_node_gpus", "GPUs that the node offers to worker groups", count(report.gpus.len())),
            ("gym_node_gpus_free", "GPUs of the node that no controller holds", count(report.free_gpus.len())),
            ("gym_node_controllers", "Controllers that hold a part of the node", count(state.sessions.lock().len())),
        ];
        for (name, help, value) in gauges {
            ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}
