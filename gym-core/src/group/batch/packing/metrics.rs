//! Metrics of sequence packing, for one call and for many.

use serde::Serialize;

/// Metrics of one packing call, with NeMo RL's names and definitions. All are zero if there are no bins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PackingMetrics {
    /// Number of packed sequences.
    pub num_sequences: usize,
    /// Number of bins.
    pub num_bins: usize,
    /// Tokens of all sequences.
    pub total_sequence_length: usize,
    /// Capacity of all bins, in tokens.
    pub total_bin_capacity: usize,
    /// Padding tokens.
    pub total_waste: usize,
    /// Mean utilization of a bin, 0 to 1.
    pub average_utilization: f64,
    /// Share of the total capacity that is padding, 0 to 1.
    pub waste_ratio: f64,
    /// 1 minus the sample standard deviation of the bins' utilization divided by its mean; 1 if all bins are equally full.
    pub bin_balance: f64,
    /// The minimum number of bins that could hold the tokens if sequences could be split.
    pub theoretical_min_bins: usize,
    /// The theoretical minimum number of bins divided by the actual number.
    pub bin_efficiency: f64,
}

impl PackingMetrics {
    /// Computes the metrics of these bins, which hold positions in `lengths`. The capacity is in tokens.
    ///
    /// # Panics
    /// If a position is beyond the end of `lengths`.
    #[must_use]
    pub fn of(lengths: &[usize], bins: &[Vec<usize>], capacity: usize) -> Self {
        if bins.is_empty() || capacity == 0 {
            return Self::default();
        }
        let loads: Vec<usize> = bins.iter().map(|bin| bin.iter().map(|index| lengths[*index]).sum()).collect();
        let total_sequence_length: usize = loads.iter().sum();
        let total_bin_capacity = bins.len() * capacity;
        let mean = total_sequence_length as f64 / total_bin_capacity as f64;
        let theoretical_min_bins = total_sequence_length.div_ceil(capacity);
        Self {
            num_sequences: bins.iter().map(Vec::len).sum(),
            num_bins: bins.len(),
            total_sequence_length,
            total_bin_capacity,
            total_waste: total_bin_capacity.saturating_sub(total_sequence_length),
            average_utilization: mean,
            waste_ratio: 1.0 - mean,
            bin_balance: balance(&loads, capacity, mean),
            theoretical_min_bins,
            bin_efficiency: theoretical_min_bins as f64 / bins.len() as f64,
        }
    }
}

fn balance(loads: &[usize], capacity: usize, mean: f64) -> f64 {
    if loads.len() < 2 || mean == 0.0 {
        return 1.0;
    }
    let squares: f64 = loads.iter().map(|load| (*load as f64 / capacity as f64 - mean).powi(2)).sum();
    1.0 - (squares / (loads.len() - 1) as f64).sqrt() / mean
}

/// Sums over several calls, and extremes of single calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PackingTotals {
    /// Number of calls added. All other fields are zero if there are none.
    pub packing_operations: usize,
    /// Number of packed sequences.
    pub total_sequences: usize,
    /// Number of bins.
    pub total_bins: usize,
    /// Tokens of all sequences.
    pub total_sequence_length: usize,
    /// Capacity of all bins, in tokens.
    pub total_bin_capacity: usize,
    /// Utilization of the call with the lowest utilization.
    pub min_utilization: f64,
    /// Utilization of the call with the highest utilization.
    pub max_utilization: f64,
}

impl PackingTotals {
    /// Adds a call. A call without bins only increases the number of calls.
    pub fn add(&mut self, call: &PackingMetrics) {
        self.packing_operations += 1;
        if call.num_bins == 0 {
            return;
        }
        let first = self.total_bins == 0;
        self.total_sequences += call.num_sequences;
        self.total_bins += call.num_bins;
        self.total_sequence_length += call.total_sequence_length;
        self.total_bin_capacity += call.total_bin_capacity;
        let utilization = call.average_utilization;
        self.min_utilization = if first { utilization } else { self.min_utilization.min(utilization) };
        self.max_utilization = if first { utilization } else { self.max_utilization.max(utilization) };
    }

    /// Returns the share of the total capacity that is used, 0 to 1.
    #[must_use]
    pub fn average_utilization(&self) -> f64 {
        if self.total_bins == 0 { 0.0 } else { self.total_sequence_length as f64 / self.total_bin_capacity as f64 }
    }
}
