//! Statistics of a series of numbers, with the conventions of pandas: NaN is a missing value, the standard deviation is
//! that of a sample, and quantiles interpolate linearly.

use serde_json::Value;

use super::student_t::t_quantile_95;

/// A sum that does not lose small terms to large ones (Neumaier).
pub(crate) fn exact_sum(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0_f64, 0.0_f64);
    for value in values {
        let next = sum + value;
        lost += if sum.abs() >= value.abs() { (sum - next) + value } else { (value - next) + sum };
        sum = next;
    }
    // With an infinity among the values the correction is NaN, the sum is not.
    if lost.is_finite() { sum + lost } else { sum }
}

/// A series of numbers without its missing values, sorted.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    sorted: Vec<f64>,
}

impl Series {
    /// Drops the NaNs and sorts the remaining values.
    pub(crate) fn new(mut values: Vec<f64>) -> Self {
        values.retain(|value| !value.is_nan());
        values.sort_unstable_by(f64::total_cmp);
        Self { sorted: values }
    }

    /// Number of values.
    pub(crate) fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Sum of the values.
    pub(crate) fn sum(&self) -> f64 {
        exact_sum(self.sorted.iter().copied())
    }

    /// Arithmetic mean. Like all other statistics, `None` without values.
    pub(crate) fn mean(&self) -> Option<f64> {
        (!self.sorted.is_empty()).then(|| self.sum() / self.count() as f64)
    }

    /// Largest value.
    pub(crate) fn max(&self) -> Option<f64> {
        self.sorted.last().copied()
    }

    /// Smallest value.
    pub(crate) fn min(&self) -> Option<f64> {
        self.sorted.first().copied()
    }

    /// Middle value, or the mean of the middle two.
    pub(crate) fn median(&self) -> Option<f64> {
        let count = self.count();
        match count {
            0 => None,
            _ if count % 2 == 1 => Some(self.sorted[count / 2]),
            _ => Some(f64::midpoint(self.sorted[count / 2 - 1], self.sorted[count / 2])),
        }
    }

    /// Standard deviation of a sample; `None` for fewer than two values.
    pub(crate) fn sample_std(&self) -> Option<f64> {
        (self.count() > 1).then(|| (self.squared_deviations() / (self.count() - 1) as f64).sqrt())
    }

    /// Standard deviation of a whole population.
    pub(crate) fn population_std(&self) -> Option<f64> {
        (self.count() > 0).then(|| (self.squared_deviations() / self.count() as f64).sqrt())
    }

    fn squared_deviations(&self) -> f64 {
        let mean = self.mean().unwrap_or(0.0);
        exact_sum(self.sorted.iter().map(|value| (value - mean) * (value - mean)))
    }

    /// The value below which `fraction` of the series lies, interpolated linearly between neighbors.
    pub(crate) fn quantile(&self, fraction: f64) -> Option<f64> {
        let last = self.count().checked_sub(1)?;
        let position = fraction * last as f64;
        let below = position.floor() as usize;
        let low = self.sorted[below];
        let high = self.sorted[(below + 1).min(last)];
        Some(if low == high { low } else { low + (high - low) * (position - below as f64) })
    }
}

/// A number as JSON, without a decimal point if it is `whole`.
pub(super) fn number(value: f64, whole: bool) -> Value {
    // Beyond 2^63 the cast saturates; such a number is written as a float.
    if whole && value.abs() < 9.0e18 { Value::from(value as i64) } else { Value::from(value) }
}

/// The 95 % confidence interval of a mean over `count` values with standard error `error`; `None` for one value or
/// none.
pub(crate) fn confidence_interval_95(mean: f64, error: f64, count: usize) -> Option<(f64, f64)> {
    if count <= 1 {
        return None;
    }
    let half = if error == 0.0 { 0.0 } else { t_quantile_95(count as u64 - 1) * error };
    Some((mean - half, mean + half))
}
