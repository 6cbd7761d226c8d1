//! Advantages and baselines of group-relative policy optimization: the reward of a row compared with other responses to the same
//! prompt.
//!
//! The formulas are those of NeMo RL. The baseline of a row is the mean reward of its group; with leave-one-out, the row itself is
//! excluded. The deviation is the sample deviation of the same rewards. An invalid row, whose rollout failed, is compared with no row
//! and has no advantage.
//!
//! Three differences from NeMo RL:
//! - It computes in `f32`; these functions compute in `f64`, also for rewards that were `f32`.
//! - It divides by any deviation above 0. Here, a deviation that rounding alone can cause, at most 10⁻⁶ of the largest reward, counts as 0, so that the
//!   advantage is not divided. Otherwise 0.7, and 0.1 + 0.6 in `f32`, would have a deviation of 10⁻⁸, and an answer with 1.0 an advantage of 10⁷.
//! - The mean of equal rewards is that reward, and not its sum divided by their number, which rounds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use gym_core::group::batch::Batch;
use gym_core::group::batch::tensor::Tensor;
use gym_core::{Code, Error, Result};

/// The rewards with which a row is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Comparison {
    /// The other rows of its group, so that a reward does not lower its own advantage.
    #[default]
    LeaveOneOut,
    /// All rows of its group, including itself.
    WholeGroup,
}

/// A baseline and a deviation for each row.
#[derive(Clone, Debug, PartialEq)]
pub struct Baselines {
    /// The mean of the rewards with which the row is compared; its own reward if at most one row of the group is valid.
    pub mean: Vec<f64>,
    /// The sample deviation of the same rewards, in units of the reward; 0 if there are fewer than two, or if they differ by rounding only.
    pub deviation: Vec<f64>,
    /// Whether the row has a reward. The advantage of a row without one is 0.
    pub valid: Vec<bool>,
}

impl Baselines {
    /// Computes the baselines of rows. Rows with equal `prompts` form a group, in any order.
    ///
    /// The reward of an invalid row is not read. Such a row also gets NeMo RL's baseline, which has little meaning: with leave-one-out,
    /// the sum of the valid rewards is divided by one less than their number, as if the row had been one of them.
    ///
    /// # Errors
    /// `InvalidArgument` if there is not one prompt, reward and validity for each row.
    pub fn of_groups<K: Eq + Hash>(
        prompts: &[K],
        rewards: &[f64],
        valid: &[bool],
        compare: Comparison,
    ) -> Result<Self> {
        let rows = rewards.len();
        if (prompts.len(), valid.len()) != (rows, rows) {
            let (prompts, valid) = (prompts.len(), valid.len());
            return Err(Error::invalid(format!("{prompts} prompts and {valid} validities for {rows} rewards")));
        }
        let mut groups: HashMap<&K, Vec<usize>> = HashMap::new();
        prompts.iter().enumerate().for_each(|(row, prompt)| groups.entry(prompt).or_default().push(row));
        let own = rewards.iter().zip(valid).map(|(reward, valid)| if *valid { *reward } else { 0.0 }).collect();
        let mut baselines = Self { mean: own, deviation: vec![0.0; rows], valid: valid.to_vec() };
        // The order of the groups does not matter: each one sets its own rows.
        for group in groups.values() {
            let counted: Vec<usize> = group.iter().copied().filter(|row| valid[*row]).collect();
            if counted.len() < 2 {
                continue;
            }
            for row in group {
                let without = if compare == Comparison::LeaveOneOut { *row } else { usize::MAX };
                let others = counted.iter().filter(|other| **other != without).map(|other| rewards[*other]);
                let count = counted.len() - usize::from(compare == Comparison::LeaveOneOut);
                (baselines.mean[*row], baselines.deviation[*row]) = mean_and_deviation(others, count);
            }
        }
        Ok(baselines)
    }

    /// Returns each reward minus its baseline, and 0 for an invalid row. With `normalize`, divides by the deviation unless it is 0.
    ///
    /// # Errors
    /// `InvalidArgument` if there is not one reward for each baseline.
    pub fn advantages(&self, rewards: &[f64], normalize: bool) -> Result<Vec<f64>> {
        if rewards.len() != self.mean.len() {
            return Err(Error::invalid(format!("{} rewards for {} baselines", rewards.len(), self.mean.len())));
        }
        let advantage = |row: usize| {
            let deviation = self.deviation[row];
            let scale = if normalize && deviation > 0.0 { deviation } else { 1.0 };
            if self.valid[row] { (rewards[row] - self.mean[row]) / scale } else { 0.0 }
        };
        Ok((0..rewards.len()).map(advantage).collect())
    }
}

/// The share of the largest reward up to which a deviation counts as 0: eight roundings of `f32`, for rewards that are sums of a few parts.
const ROUNDING: f64 = 8.0 * f32::EPSILON as f64;

/// Returns the mean and the sample deviation of rewards whose number is taken to be `count`.
fn mean_and_deviation(rewards: impl Iterator<Item = f64> + Clone, count: usize) -> (f64, f64) {
    let mut seen = rewards.clone();
    if let Some(first) = seen.next()
        && rewards.clone().count() == count
        && seen.all(|reward| reward == first)
    {
        // The mean of equal numbers is rounded, and the remainder would be scaled up to an advantage of order one.
        return (first, 0.0);
    }
    let mean = rewards.clone().sum::<f64>() / count as f64;
    if count < 2 {
        return (mean, 0.0);
    }
    let largest = rewards.clone().map(f64::abs).fold(0.0, f64::max);
    let squares: f64 = rewards.map(|reward| (reward - mean).powi(2)).sum();
    let deviation = (squares / (count - 1) as f64).sqrt();
    (mean, if deviation <= ROUNDING * largest { 0.0 } else { deviation })
}

/// Returns the components of each row's reward as columns `reward/{name}`, `F64`, sorted by name; 0 if a row lacks the component. The 0 of
/// a row without a reward is no vote: statistics of a column must leave out the rows whose `sample_mask` is 0.
///
/// # Errors
/// `InvalidArgument` if the numbers of rows of components and rewards differ. `DataLoss` if a row has components whose sum
/// differs from its reward. The tolerance is 10⁻⁵ of the reward, and at least 10⁻⁶.
pub fn reward_components(rewards: &[f64], components: &[BTreeMap<String, f64>]) -> Result<Batch> {
    if rewards.len() != components.len() {
        return Err(Error::invalid(format!("{} rows of components for {} rewards", components.len(), rewards.len())));
    }
    for (row, (reward, parts)) in rewards.iter().zip(components).enumerate() {
        let sum: f64 = parts.values().sum();
        let near = (sum - reward).abs() <= (1e-5 * reward.abs().max(sum.abs())).max(1e-6);
        if !parts.is_empty() && !near {
            let message = format!("row {row}: the components of the reward add up to {sum}, the reward is {reward}");
            return Err(Error::not_started(Code::DataLoss, message));
        }
    }
    let names: BTreeSet<&String> = components.iter().flat_map(BTreeMap::keys).collect();
    let column = |name: &String| {
        let column = components.iter().map(|parts| parts.get(name).copied().unwrap_or(0.0)).collect();
        Ok((format!("reward/{name}"), Tensor::from_vec([rewards.len()], column)?.into()))
    };
    Batch::new(names.into_iter().map(column).collect::<Result<Vec<_>>>()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(baselines: Baselines) -> (Vec<f64>, Vec<f64>) {
        (baselines.mean, baselines.deviation)
    }

    fn baselines(prompts: &[i32], rewards: &[f64]) -> Baselines {
        Baselines::of_groups(prompts, rewards, &vec![true; rewards.len()], Comparison::LeaveOneOut).unwrap()
    }

    fn near(found: &[f64], expected: &[f64]) {
        let all = found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(all, "{found:?}, expected {expected:?}");
    }

    #[test]
    fn c223_a_row_is_compared_with_the_others_of_its_prompt() {
        let six = baselines(&[7, 7, 7, 8, 8, 8], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        near(&six.mean, &[2.5, 2.0, 1.5, 5.5, 5.0, 4.5]);
        let (half, two) = (0.5_f64.sqrt(), 2.0_f64.sqrt());
        near(&six.deviation, &[half, two, half, half, two, half]);
        let mixed = baselines(&[7, 8, 7, 8, 7, 8], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        near(&mixed.mean, &[2.5, 5.5, 2.0, 5.0, 1.5, 4.5]);
    }

    #[test]
    fn c224_a_row_alone_is_its_own_baseline() {
        assert_eq!(parts(baselines(&[1, 2], &[3.0, 4.0])), (vec![3.0, 4.0], vec![0.0; 2]));
    }

    #[test]
    fn c225_two_rows_are_each_others_baseline() {
        assert_eq!(parts(baselines(&[1, 1], &[1.0, 2.0])), (vec![2.0, 1.0], vec![0.0; 2]));
    }

    #[test]
    fn c226_equal_rewards_have_no_advantage_whatever_rounding_does() {
        for reward in [1.0, 0.1, 1.0 / 3.0] {
            for compare in [Comparison::LeaveOneOut, Comparison::WholeGroup] {
                let rewards = [reward; 6];
                let equal = Baselines::of_groups(&[0; 6], &rewards, &[true; 6], compare).unwrap();
                assert_eq!(equal.advantages(&rewards, true).unwrap(), [0.0; 6]);
                assert_eq!(parts(equal), (vec![reward; 6], vec![0.0; 6]));
            }
        }
    }

    /// The same reward, added up in another order.
    #[test]
    fn rewards_that_differ_by_rounding_only_divide_nothing() {
        let single = [0.7_f32, 0.1 + 0.6, 0.2 + 0.5, 0.3 + 0.4].map(f64::from);
        let double = [0.7_f64, 0.1 * 7.0, 0.1 + 0.6, 0.3 + 0.4];
        for equal in [single, double, double.map(|reward| -1e6 * reward), double.map(|reward| 1e-9 * reward)] {
            let scale = equal[0].abs();
            for compare in [Comparison::LeaveOneOut, Comparison::WholeGroup] {
                let of = |rewards: &[f64]| {
                    let valid = vec![true; rewards.len()];
                    let baselines = Baselines::of_groups(&vec![0; rewards.len()], rewards, &valid, compare).unwrap();
                    baselines.advantages(rewards, true).unwrap()
                };
                assert!(of(&equal).iter().all(|advantage| advantage.abs() <= 1e-6 * scale), "{equal:?}");
                // And with one better answer, whose advantage is its difference from the others, or normalized as ever.
                let odd = [&equal[..], &[equal[0] + 0.3 * scale]].concat();
                assert!(of(&odd).iter().all(|advantage| advantage.abs() <= 0.3 * scale.max(10.0)), "{odd:?}");
            }
            // Two rows are each other's baseline, and have no deviation.
            let two = Baselines::of_groups(&[0; 2], &equal[..2], &[true; 2], Comparison::LeaveOneOut).unwrap();
            assert_eq!(two.deviation, [0.0; 2]);
        }
        // A difference that is more than rounding counts, however small.
        let small = [1.0, 1.00001, 1.0, 1.00001];
        assert!(baselines(&[0; 4], &small).deviation.iter().all(|deviation| *deviation > 5e-6));
    }

    #[test]
    fn c227_an_invalid_reward_counts_for_nobody() {
        let rewards = [1.0, 999.0, 3.0];
        let masked = Baselines::of_groups(&[0; 3], &rewards, &[true, false, true], Comparison::LeaveOneOut).unwrap();
        assert_eq!(masked.advantages(&rewards, false).unwrap(), [-2.0, 0.0, 2.0]);
        assert_eq!(parts(masked), (vec![3.0, 4.0, 1.0], vec![0.0; 3]));
    }

    /// Rewards of rows in up to four groups, each with its validity. An invalid row may have any number.
    fn masked_rows() -> impl Strategy<Value = Vec<(u8, f64, bool)>> {
        let valid = prop_oneof![Just(0.0), Just(1.0), -2.0..2.0];
        let invalid = prop_oneof![Just(0.0), Just(f64::NAN), Just(f64::INFINITY), Just(1e300), -2.0..2.0];
        let row = (0..4_u8, valid, invalid, any::<bool>());
        let row = row.prop_map(|(group, reward, lost, valid)| (group, if valid { reward } else { lost }, valid));
        proptest::collection::vec(row, 0..24)
    }

    proptest! {
        #[test]
        fn rows_without_a_reward_change_nothing_for_the_others(
            rows in masked_rows(), whole in any::<bool>(), normalize in any::<bool>(),
        ) {
            let compare = if whole { Comparison::WholeGroup } else { Comparison::LeaveOneOut };
            let of = |rows: &[(u8, f64, bool)]| {
                let prompts: Vec<u8> = rows.iter().map(|row| row.0).collect();
                let rewards: Vec<f64> = rows.iter().map(|row| row.1).collect();
                let valid: Vec<bool> = rows.iter().map(|row| row.2).collect();
                let baselines = Baselines::of_groups(&prompts, &rewards, &valid, compare).unwrap();
                let advantages = baselines.advantages(&rewards, normalize).unwrap();
                let row = |row: usize| (valid[row], baselines.mean[row], baselines.deviation[row], advantages[row]);
                (0..rows.len()).map(row).collect::<Vec<_>>()
            };
            let with_lost = of(&rows);
            let counted: Vec<_> = rows.iter().copied().filter(|row| row.2).collect();
            let voting: Vec<_> = with_lost.iter().copied().filter(|row| row.0).collect();
            prop_assert_eq!(voting, of(&counted));
            for (valid, mean, deviation, advantage) in with_lost {
                prop_assert!(mean.is_finite() && deviation.is_finite() && (valid || advantage == 0.0));
            }
        }
    }

    #[test]
    fn c228_leaving_oneself_out_makes_the_advantage_larger() {
        let rewards = [1.0, 0.0, 0.0, 1.0];
        let without = baselines(&[0; 4], &rewards);
        near(&without.mean, &[1.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0, 1.0 / 3.0]);
        near(&without.deviation, &[0.57735; 4]);
        near(&without.advantages(&rewards, true).unwrap(), &[1.1547, -1.1547, -1.1547, 1.1547]);
        let whole = Baselines::of_groups(&[0; 4], &rewards, &[true; 4], Comparison::WholeGroup).unwrap();
        near(&whole.advantages(&rewards, true).unwrap(), &[0.866, -0.866, -0.866, 0.866]);
        near(&whole.advantages(&rewards, false).unwrap(), &[0.5, -0.5, -0.5, 0.5]);
    }

    #[test]
    fn rows_that_do_not_match_are_refused() {
        assert!(Baselines::of_groups(&[0; 2], &[1.0], &[true], Comparison::WholeGroup).is_err());
        assert!(Baselines::of_groups(&[0], &[1.0], &[true; 2], Comparison::WholeGroup).is_err());
        assert!(baselines(&[0], &[1.0]).advantages(&[1.0, 2.0], true).is_err());
    }

    #[test]
    fn c232_components_add_up_to_the_reward_and_become_columns() {
        let parts = |parts: &[(&str, f64)]| parts.iter().map(|(name, part)| ((*name).to_owned(), *part)).collect();
        let components = [parts(&[("style", 0.25), ("right", 0.5)]), parts(&[]), parts(&[("right", 1.0)])];
        let batch = reward_components(&[0.75, 0.5, 1.0], &components).unwrap();
        let columns: Vec<_> =
            batch.columns().map(|(name, column)| (name, column.dense().unwrap().to_f64s().unwrap())).collect();
        assert_eq!(columns, [("reward/right", vec![0.5, 0.0, 1.0]), ("reward/style", vec![0.25, 0.0, 0.0])]);
        let error = reward_components(&[0.75, 0.5, 1.1], &components).unwrap_err();
        assert!(error.code() == Code::DataLoss && error.message().contains("row 2"), "{error}");
        assert!(
            reward_components(&[0.75, f64::NAN, 1.0], &components).is_ok(),
            "a row without components says nothing"
        );
        assert!(reward_components(&[f64::NAN], &components[2..]).is_err());
        assert!(reward_components(&[1.0], &components).is_err());
    }
}
