//! Metrics that a program adds to those of the SDK, without a type of the library that prints them.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

/// A number that only grows, made by [`Metrics::counter`](crate::metrics::Metrics::counter). Clones count together.
#[derive(Clone, Debug, Default)]
pub struct OwnCounter(pub(super) Counter);

impl OwnCounter {
    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.inc_by(count);
    }
}

/// A number that rises and falls, made by [`Metrics::gauge`](crate::metrics::Metrics::gauge). Clones are the same number.
#[derive(Clone, Debug, Default)]
pub struct OwnGauge(pub(super) Gauge<f64, AtomicU64>);

impl OwnGauge {
    /// Replaces the number.
    pub fn set(&self, value: f64) {
        self.0.set(value);
    }
}
