//! The distribution of an agent's rewards, in bounded memory and without bounds that are known in advance.
//!
//! Most environments give few distinct rewards, such as 0 and 1: those are counted one by one. Other rewards are counted in bins whose
//! width is a power of ten. If a reward lies so far away that there would be too many bins, each ten bins become one. The counts
//! remain exact, because the edges of wide bins are also edges of narrow ones.

use std::collections::BTreeMap;

use serde::Serialize;

/// Distinct rewards up to which each is counted on its own.
const VALUES_MAX: usize = 8;
/// Bins that are counted. [-1, 1] with a width of 0.001 needs 2,001.
const BINS_MAX: f64 = 2_048.0;
/// Bins of the first width, so that most rewards that follow need no other one.
const FIRST_BINS: f64 = 1_000.0;
/// Bins of a report: few enough for a line of a table.
const REPORTED_MAX: i64 = 12;
/// The largest number of a bin. With fifteen digits of a double, three remain to tell an edge from its neighbors.
const INDEX_MAX: f64 = 1e12;
/// The exponents of a width, so that neither a width nor the number of a bin overflows.
const EXPONENT_MIN: i32 = -300;
const EXPONENT_MAX: i32 = 306;

/// A part of a distribution of rewards.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RewardBin {
    /// The smallest reward of the bin.
    pub from: f64,
    /// The end of the bin: equal to `from` if the bin is a single value, otherwise excluded, except in the last bin.
    pub to: f64,
    /// Number of rollouts.
    pub count: u64,
}

/// Counts finite rewards.
#[derive(Clone, Debug)]
pub(super) struct RewardHistogram {
    counts: Counts,
    min: f64,
    max: f64,
}

#[derive(Clone, Debug)]
enum Counts {
    /// Each value with its count, in ascending order.
    Values(Vec<(f64, u64)>),
    /// The bin with number n has the rewards from n × 10^exponent on.
    Bins { exponent: i32, bins: BTreeMap<i64, u64> },
}

impl Default for RewardHistogram {
    fn default() -> Self {
        Self { counts: Counts::Values(Vec::new()), min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

impl RewardHistogram {
    /// Counts one reward, which must be finite.
    pub(super) fn add(&mut self, reward: f64) {
        // -0.0 becomes 0.0, so that both are one value.
        let reward = reward + 0.0;
        (self.min, self.max) = (self.min.min(reward), self.max.max(reward));
        match &mut self.counts {
            Counts::Values(values) => {
                let at = values.partition_point(|(value, _)| *value < reward);
                match values.get_mut(at) {
                    Some((value, count)) if *value == reward => *count += 1,
                    _ => values.insert(at, (reward, 1)),
                }
                if values.len() > VALUES_MAX {
                    let (values, span) = (std::mem::take(values), self.max - self.min);
                    let exponent = (span / FIRST_BINS).log10().ceil() as i32;
                    let (mut exponent, mut bins) = (exponent.clamp(EXPONENT_MIN, EXPONENT_MAX), BTreeMap::new());
                    values.into_iter().for_each(|(value, count)| add_to_bin(&mut exponent, &mut bins, value, count));
                    self.counts = Counts::Bins { exponent, bins };
                }
            }
            Counts::Bins { exponent, bins } => add_to_bin(exponent, bins, reward, 1),
        }
    }

    /// Returns the smallest and the largest reward; `None` without any.
    pub(super) fn range(&self) -> Option<(f64, f64)> {
        (self.min <= self.max).then_some((self.min, self.max))
    }

    /// Returns the distribution: each value if there are at most eight, otherwise at most twelve bins of equal width, also empty ones.
    pub(super) fn bins(&self) -> Vec<RewardBin> {
        let (exponent, bins) = match &self.counts {
            Counts::Values(values) => {
                return values.iter().map(|&(value, count)| RewardBin { from: value, to: value, count }).collect();
            }
            Counts::Bins { exponent, bins } => (*exponent, bins),
        };
        let (Some((&first, _)), Some((&last, _))) = (bins.first_key_value(), bins.last_key_value()) else {
            return Vec::new();
        };
        // The largest reward ends the last bin, if it is an edge: [0.9, 1], and not [0.9, 1) and [1, 1.1).
        let ends_at_edge = |width: i64| last % width == 0 && edge(last, exponent) == self.max && last > first;
        let count =
            |width: i64| last.div_euclid(width) - first.div_euclid(width) + if ends_at_edge(width) { 0 } else { 1 };
        let widths = (0..).flat_map(|tens| [1, 2, 5].map(|factor| factor * 10_i64.pow(tens)));
        let width = widths.into_iter().find(|width| count(*width) <= REPORTED_MAX).expect("ever wider bins are fewer");
        let lowest = first.div_euclid(width);
        let mut reported: Vec<RewardBin> = (lowest..lowest + count(width).max(1))
            .map(|bin| RewardBin { from: edge(bin * width, exponent), to: edge((bin + 1) * width, exponent), count: 0 })
            .collect();
        let highest = reported.len() - 1;
        for (bin, count) in bins {
            let at = usize::try_from(bin.div_euclid(width) - lowest).unwrap_or(0);
            reported[at.min(highest)].count += count;
        }
        reported
    }
}

fn add_to_bin(exponent: &mut i32, bins: &mut BTreeMap<i64, u64>, reward: f64, count: u64) {
    loop {
        let index = index(reward, *exponent);
        let first = bins.first_key_value().map_or(index, |(first, _)| index.min(*first as f64));
        let last = bins.last_key_value().map_or(index, |(last, _)| index.max(*last as f64));
        if *exponent == EXPONENT_MAX || (last - first < BINS_MAX && index.abs() <= INDEX_MAX) {
            *bins.entry(index as i64).or_default() += count;
            return;
        }
        *exponent += 1;
        let mut wider = BTreeMap::new();
        for (bin, count) in std::mem::take(bins) {
            *wider.entry(bin.div_euclid(10)).or_default() += count;
        }
        *bins = wider;
    }
}

/// Returns the number of the bin of a reward.
fn index(reward: f64, exponent: i32) -> f64 {
    let scaled = if exponent < 0 { reward * 10_f64.powi(-exponent) } else { reward / 10_f64.powi(exponent) };
    let nearest = scaled.round();
    // 0.29 × 100 is a little less than 29, the edge that 0.29 is.
    if (scaled - nearest).abs() <= scaled.abs() * 1e-15 { nearest } else { scaled.floor() }
}

/// Returns the lower edge of a bin. A division, because 3 × 0.1 is not 0.3.
fn edge(index: i64, exponent: i32) -> f64 {
    let index = index as f64;
    if exponent < 0 { index / 10_f64.powi(-exponent) } else { index * 10_f64.powi(exponent) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn histogram(rewards: impl IntoIterator<Item = f64>) -> RewardHistogram {
        let mut histogram = RewardHistogram::default();
        rewards.into_iter().for_each(|reward| histogram.add(reward));
        histogram
    }

    #[test]
    fn few_values_are_counted_one_by_one() {
        let bins = histogram([1.0, 0.0, -0.0, 1.0, 1.0]).bins();
        assert_eq!(bins, [RewardBin { from: 0.0, to: 0.0, count: 2 }, RewardBin { from: 1.0, to: 1.0, count: 3 }]);
        assert_eq!(histogram([]).bins(), []);
        assert_eq!(histogram([]).range(), None);
    }

    #[test]
    fn bins_have_round_edges_and_the_last_one_includes_the_largest_reward() {
        let bins = histogram((0..=100).map(|percent| f64::from(percent) / 100.0)).bins();
        let edges: Vec<(f64, f64)> = bins.iter().map(|bin| (bin.from, bin.to)).collect();
        let expected: Vec<(f64, f64)> =
            (0..10).map(|tenth| (f64::from(tenth) / 10.0, f64::from(tenth + 1) / 10.0)).collect();
        assert_eq!(edges, expected);
        let counts: Vec<u64> = bins.iter().map(|bin| bin.count).collect();
        assert_eq!(counts, [10, 10, 10, 10, 10, 10, 10, 10, 10, 11]);
        let signed = histogram((-50..=50).map(|step| f64::from(step) / 50.0)).bins();
        assert_eq!((signed[0].from, signed[9].to, signed.len()), (-1.0, 1.0, 10));
    }

    #[test]
    fn a_reward_far_away_widens_the_bins() {
        let mut histogram = histogram((0..20).map(|step| f64::from(step) / 1e6));
        histogram.add(1e15);
        histogram.add(-3.0);
        let bins = histogram.bins();
        assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), 22);
        assert_eq!(bins.last().map(|bin| bin.count), Some(1));
        let extreme = (0..20).map(|step| f64::MAX * (f64::from(step) / 10.0 - 1.0));
        assert_eq!(super::tests::histogram(extreme).bins().iter().map(|bin| bin.count).sum::<u64>(), 20);
    }

    fn reward() -> impl Strategy<Value = f64> {
        prop_oneof![
            Just(0.0),
            Just(1.0),
            (-20..=20_i32).prop_map(|step| f64::from(step) / 10.0),
            0.0..1.0,
            any::<f64>().prop_filter("finite", |reward| reward.is_finite()),
        ]
    }

    proptest! {
        #[test]
        fn the_counts_are_those_of_the_rewards_between_the_edges(rewards in prop::collection::vec(reward(), 1..300)) {
            let histogram = histogram(rewards.iter().copied());
            let bins = histogram.bins();
            prop_assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), rewards.len() as u64);
            prop_assert!(bins.len() <= 12, "{} bins", bins.len());
            let (min, max) = histogram.range().unwrap();
            for (at, bin) in bins.iter().enumerate() {
                let single = bin.from == bin.to;
                // The edge of a bin is rounded to a double, as is the reward: both may differ in the last digit.
                let tolerance = |edge: f64| edge.abs().max(min.abs()).max(max.abs()) * 2e-12;
                let from = |reward: f64, slack: f64| reward >= bin.from - slack;
                let to = |reward: f64, slack: f64| {
                    if single || at + 1 == bins.len() { reward <= bin.to + slack } else { reward < bin.to + slack }
                };
                let inside = |sign: f64| {
                    let slack = |edge| if single { 0.0 } else { sign * tolerance(edge) };
                    rewards.iter().filter(|reward| from(**reward, slack(bin.from)) && to(**reward, slack(bin.to))).count()
                };
                let count = usize::try_from(bin.count).unwrap();
                prop_assert!((inside(-1.0)..=inside(1.0)).contains(&count), "{:?}: {}..={}", bin, inside(-1.0), inside(1.0));
            }
        }
    }
}
