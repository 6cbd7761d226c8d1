//! Which of several replicas or ranks a call goes to, when any will do.

use serde::{Deserialize, Serialize};

/// How one is chosen. In a configuration `round_robin`, `least_pending` (or `least_outstanding`), `weighted`,
/// `power_of_two_choices`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Picker {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest calls under way; in turn among equals.
    #[default]
    #[serde(alias = "least_outstanding")]
    LeastPending,
    /// In turn, each as often as its weight says.
    Weighted,
    /// The less busy of two that are drawn: nearly as even as the least busy, and many callers who know only their own calls do
    /// not all run to the same one.
    PowerOfTwoChoices,
}

/// One that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// What it is called by: the value that [`Picker::pick`] returns.
    pub index: usize,
    /// Calls under way at it.
    pub pending: usize,
    /// Its share among the others, for [`Picker::Weighted`].
    pub weight: u32,
}

impl Picker {
    /// The index of the chosen one; `turn` moves on with every call, and decides what is drawn, so that runs can be repeated.
    /// `None` when there is none, or, if weighted, none has a weight.
    #[must_use]
    pub fn pick(self, turn: usize, open: &[Load]) -> Option<usize> {
        let from = turn.checked_rem(open.len())?;
        let in_turn = open[from..].iter().chain(&open[..from]);
        let chosen = match self {
            Self::RoundRobin => &open[from],
            Self::LeastPending => in_turn.min_by_key(|load| load.pending)?,
            Self::Weighted => {
                let total: u64 = open.iter().map(|load| u64::from(load.weight)).sum();
                let mut at = (turn as u64).checked_rem(total)?;
                open.iter().find(|load| match at.checked_sub(u64::from(load.weight)) {
                    Some(rest) => {
                        at = rest;
                        false
                    }
                    None => true,
                })?
            }
            Self::PowerOfTwoChoices => {
                let mut random = fastrand::Rng::with_seed(turn as u64);
                let first = random.usize(..open.len());
                let second = (first + random.usize(1..open.len().max(2))) % open.len();
                [&open[first], &open[second]].into_iter().min_by_key(|load| load.pending)?
            }
        };
        Some(chosen.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(pending: &[usize]) -> Vec<Load> {
        pending.iter().enumerate().map(|(index, pending)| Load { index, pending: *pending, weight: 1 }).collect()
    }

    fn turns(picker: Picker, open: &[Load], turns: usize) -> Vec<usize> {
        (0..turns).map(|turn| picker.pick(turn, open).unwrap()).collect()
    }

    #[test]
    fn round_robin_takes_turns_and_least_pending_avoids_the_busy() {
        assert_eq!(turns(Picker::RoundRobin, &loads(&[0, 9, 0]), 4), [0, 1, 2, 0]);
        assert_eq!(turns(Picker::LeastPending, &loads(&[1, 1, 0]), 6), [2; 6]);
        assert_eq!(turns(Picker::LeastPending, &loads(&[0, 0, 1]), 3), [0, 1, 0]);
    }

    #[test]
    fn weighted_turns_are_as_many_as_the_weights() {
        let open = [(0, 3), (1, 0), (2, 1)].map(|(index, weight)| Load { index, pending: 0, weight });
        assert_eq!(turns(Picker::Weighted, &open, 8), [0, 0, 0, 2, 0, 0, 0, 2]);
        assert_eq!(Picker::Weighted.pick(0, &open[1..2]), None);
    }

    #[test]
    fn the_busiest_of_all_is_never_the_better_of_two() {
        let chosen = turns(Picker::PowerOfTwoChoices, &loads(&[0, 9, 0, 0]), 400);
        assert!(!chosen.contains(&1));
        for index in [0, 2, 3] {
            assert!(chosen.iter().filter(|one| **one == index).count() > 80, "{index}");
        }
    }

    #[test]
    fn without_replicas_there_is_nothing_to_choose_and_with_one_no_choice() {
        for picker in [Picker::RoundRobin, Picker::LeastPending, Picker::Weighted, Picker::PowerOfTwoChoices] {
            assert_eq!(picker.pick(7, &[]), None);
            assert_eq!(turns(picker, &loads(&[3]), 5), [0; 5]);
        }
    }
}
