//! Baselines and advantages of rollouts that answer the same prompt, as NeMo RL's GRPO computes them.
//!
//! A row without a reward is left out of every baseline and has the advantage 0.

use crate::error::{Error, Result};

/// What each row's reward is compared with: the rewards of the other rows of its prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Baselines {
    /// Mean reward, by row.
    pub baseline: Vec<f32>,
    /// Sample standard deviation of the same rewards, by row; 0 of fewer than two.
    pub std: Vec<f32>,
}

/// Sums over the scored rows of one prompt.
#[derive(Clone, Copy, Default)]
struct Group {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Group {
    fn add(&mut self, reward: f64) {
        self.count += 1.0;
        self.sum += reward;
        self.squares += reward * reward;
    }

    fn without(mut self, reward: f64) -> Self {
        self.count -= 1.0;
        self.sum -= reward;
        self.squares -= reward * reward;
        self
    }

    fn mean(self) -> f64 {
        if self.count > 0.0 { self.sum / self.count } else { 0.0 }
    }

    fn std(self) -> f64 {
        if self.count < 2.0 {
            return 0.0;
        }
        // Rounding may leave less than nothing of equal rewards.
        ((self.squares - self.sum * self.sum / self.count) / (self.count - 1.0)).max(0.0).sqrt()
    }
}

impl Baselines {
    /// Baselines where rows `k·group .. (k+1)·group` answer the same prompt, as `repeat_interleave` leaves them.
    ///
    /// With `leave_one_out` a row's own reward stays out of its baseline; a row that is alone is its own baseline.
    ///
    /// # Errors
    /// `InvalidArgument` when the rows are no multiple of `group`.
    pub fn of_neighbours(rewards: &[Option<f32>], group: usize, leave_one_out: bool) -> Result<Self> {
        if group == 0 || !rewards.len().is_multiple_of(group) {
            return Err(Error::invalid(format!("{} rows are no multiple of {group} generations", rewards.len())));
        }
        let prompts: Vec<usize> = (0..rewards.len()).map(|row| row / group).collect();
        Self::of_prompts(rewards, &prompts, leave_one_out)
    }

    /// Baselines where rows of the same number in `prompts` answer the same prompt; the numbers are below the rows' number.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of prompts than of rewards, or a number that is too large.
    pub fn of_prompts(rewards: &[Option<f32>], prompts: &[usize], leave_one_out: bool) -> Result<Self> {
        if prompts.len() != rewards.len() || prompts.iter().any(|prompt| *prompt >= rewards.len()) {
            return Err(Error::invalid(format!("{} rewards need as many prompt numbers below that", rewards.len())));
        }
        let mut groups = vec![Group::default(); rewards.len()];
        for (reward, prompt) in rewards.iter().zip(prompts) {
            if let Some(reward) = reward {
                groups[*prompt].add(f64::from(*reward));
            }
        }
        let mut baselines = Self::default();
        for (reward, prompt) in rewards.iter().zip(prompts) {
            let compared = match reward {
                Some(reward) if leave_one_out && groups[*prompt].count > 1.0 => {
                    groups[*prompt].without(f64::from(*reward))
                }
                _ => groups[*prompt],
            };
            baselines.baseline.push(compared.mean() as f32);
            baselines.std.push(compared.std() as f32);
        }
        Ok(baselines)
    }

    /// Reward less baseline; with `normalize` divided by the standard deviation where there is one.
    ///
    /// # Panics
    /// When the rewards are not those that the baselines were made of.
    #[must_use]
    pub fn advantages(&self, rewards: &[Option<f32>], normalize: bool) -> Vec<f32> {
        assert_eq!(rewards.len(), self.baseline.len(), "other rewards than those of the baselines");
        let rows = rewards.iter().zip(&self.baseline).zip(&self.std);
        rows.map(|((reward, baseline), std)| match reward {
            None => 0.0,
            Some(reward) if normalize && *std > 0.0 => (reward - baseline) / std,
            Some(reward) => reward - baseline,
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(rewards: &[f32]) -> Vec<Option<f32>> {
        rewards.iter().copied().map(Some).collect()
    }

    fn close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
        }
    }

    #[test]
    fn c223_a_rows_own_reward_stays_out_of_its_baseline() {
        let baselines = Baselines::of_neighbours(&scored(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 3, true).unwrap();
        close(&baselines.baseline, &[2.5, 2.0, 1.5, 5.5, 5.0, 4.5]);
        close(&baselines.std, &[0.7071, 1.4142, 0.7071, 0.7071, 1.4142, 0.7071]);
    }

    #[test]
    fn c224_a_row_that_is_alone_is_its_own_baseline() {
        let rewards = scored(&[3.0, 7.0]);
        let baselines = Baselines::of_neighbours(&rewards, 1, true).unwrap();
        close(&baselines.baseline, &[3.0, 7.0]);
        close(&baselines.std, &[0.0, 0.0]);
        close(&baselines.advantages(&rewards, true), &[0.0, 0.0]);
    }

    #[test]
    fn c225_of_two_rows_each_is_the_others_baseline() {
        let baselines = Baselines::of_neighbours(&scored(&[1.0, 2.0]), 2, true).unwrap();
        close(&baselines.baseline, &[2.0, 1.0]);
        close(&baselines.std, &[0.0, 0.0]);
    }

    #[test]
    fn c226_equal_rewards_have_no_advantage() {
        let rewards = scored(&[0.1, 0.1, 0.1]);
        let baselines = Baselines::of_neighbours(&rewards, 3, true).unwrap();
        close(&baselines.baseline, &[0.1, 0.1, 0.1]);
        close(&baselines.advantages(&rewards, true), &[0.0, 0.0, 0.0]);
    }

    #[test]
    fn c227_a_row_without_a_reward_is_in_no_baseline() {
        let rewards = [Some(1.0), None, Some(3.0)];
        let baselines = Baselines::of_neighbours(&rewards, 3, true).unwrap();
        // NeMo RL writes 4 for the masked row, a sum divided by one row too few; nobody reads it. Here it is the mean, 2.
        close(&baselines.baseline, &[3.0, 2.0, 1.0]);
        close(&baselines.advantages(&rewards, true), &[-2.0, 0.0, 2.0]);
    }

    #[test]
    fn c228_advantages_with_and_without_the_own_reward() {
        let rewards = scored(&[1.0, 0.0, 0.0, 1.0]);
        let others = Baselines::of_neighbours(&rewards, 4, true).unwrap();
        close(&others.baseline, &[1.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0, 1.0 / 3.0]);
        close(&others.std, &[0.57735; 4]);
        close(&others.advantages(&rewards, true), &[1.1547, -1.1547, -1.1547, 1.1547]);
        let all = Baselines::of_neighbours(&rewards, 4, false).unwrap();
        close(&all.advantages(&rewards, true), &[0.866, -0.866, -0.866, 0.866]);
    }

    #[test]
    fn rows_that_are_no_multiple_of_the_group_are_refused() {
        assert!(Baselines::of_neighbours(&scored(&[1.0; 5]), 2, true).is_err());
        assert!(Baselines::of_neighbours(&scored(&[1.0; 4]), 0, true).is_err());
        assert!(Baselines::of_prompts(&scored(&[1.0]), &[7], true).is_err());
    }
}
