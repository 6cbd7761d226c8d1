//! The choice of a replica or rank for a call that any of them can run.

mod affinity;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use affinity::{Affinity, AffinityCounts, AffinityKey, AffinityOptions};

/// Adds the other name of `least_pending` to the schema; schemars ignores aliases.
#[cfg(feature = "schemars")]
fn with_alias(schema: &mut schemars::Schema) {
    if let Some(serde_json::Value::Array(forms)) = schema.get_mut("oneOf") {
        forms.push(serde_json::json!({"description": "As `least_pending`.", "const": "least_outstanding"}));
    }
}

/// A strategy of load balancing. Default: `LeastPending`.
///
/// In a configuration: `round_robin`, `least_pending` (or `least_outstanding`), `power_of_two_choices`, `affinity`, or
/// `{"weighted": [3, 1]}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(transform = with_alias))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Balance {
    /// Takes turns.
    RoundRobin,
    /// Chooses the replica with the fewest calls in flight, and takes turns among equals. Without turns, clients that
    /// know only their own calls would all begin with the same replica. NeMo RL calls this `least_outstanding`.
    #[default]
    #[serde(alias = "least_outstanding")]
    LeastPending,
    /// Chooses in proportion to these weights, by index. Further replicas have weight 1; weight 0 is never chosen. The
    /// turns are interleaved as in nginx, so the heaviest replica does not get its share in one burst.
    Weighted(Vec<u32>),
    /// Draws two replicas and chooses the one with fewer calls in flight. The load is nearly as even as with
    /// `LeastPending`, and clients that know only their own calls spread out.
    PowerOfTwoChoices,
    /// Chooses the replica that the session, or another attempt at the same prompt, was sent to, unless too many calls are in flight
    /// there. For replicas of models, whose caches have the prompts; worker groups reject it. A call without a session and a
    /// prompt goes to the less loaded of two replicas.
    Affinity,
}

impl Balance {
    /// Returns `true` if the replica with this index can be chosen: its weight is not 0.
    #[must_use]
    pub fn chooses(&self, index: usize) -> bool {
        !matches!(self, Self::Weighted(weights) if weights.get(index) == Some(&0))
    }
}

/// Chooses among replicas by a [`Balance`], and stores the turns.
#[derive(Debug, Default)]
pub struct Picker {
    balance: Balance,
    turn: AtomicUsize,
    /// The current credit of each index, for weights.
    owed: Mutex<BTreeMap<usize, i64>>,
    affinity: Affinity,
}

/// A candidate for [`Picker::pick`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The index that [`Picker::pick`] returns.
    pub index: usize,
    /// The number of its calls in flight.
    pub pending: usize,
}

impl Picker {
    /// Creates a picker. Two pickers choose alike: random draws depend on the turn only, so that runs can be repeated.
    #[must_use]
    pub fn new(balance: Balance) -> Self {
        Self { balance, ..Self::default() }
    }

    /// Returns the strategy.
    #[must_use]
    pub fn balance(&self) -> &Balance {
        &self.balance
    }

    /// Returns the decisions so far, if the strategy is [`Balance::Affinity`].
    #[must_use]
    pub fn affinity(&self) -> Option<AffinityCounts> {
        (self.balance == Balance::Affinity).then(|| self.affinity.counts())
    }

    /// Records the replica of a session, as [`Affinity::remember`] does. Has no effect with other strategies.
    pub fn remember(&self, session: AffinityKey, index: usize) {
        if self.balance == Balance::Affinity {
            self.affinity.remember(session, index);
        }
    }

    /// Returns the index of the chosen candidate; `None` if there is no candidate, or all weights are 0.
    #[must_use]
    pub fn pick(&self, open: &[Load]) -> Option<usize> {
        self.pick_for(None, || None, open)
    }

    /// Like [`Picker::pick`], for a call of a session. The keys are those of [`Affinity::pick`]; other strategies ignore them.
    #[must_use]
    pub fn pick_for(
        &self,
        session: Option<AffinityKey>,
        prompt: impl FnOnce() -> Option<AffinityKey>,
        open: &[Load],
    ) -> Option<usize> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let from = turn.checked_rem(open.len())?;
        let chosen = match &self.balance {
            Balance::RoundRobin => &open[from],
            Balance::LeastPending => open[from..].iter().chain(&open[..from]).min_by_key(|load| load.pending)?,
            Balance::Weighted(weights) => return self.weighted(weights, open),
            Balance::Affinity => return self.affinity.pick(session, prompt, open),
            Balance::PowerOfTwoChoices => {
                let mut random = fastrand::Rng::with_seed(turn as u64);
                let first = random.usize(..open.len());
                let second = (first + random.usize(1..open.len().max(2))) % open.len();
                [&open[first], &open[second]].into_iter().min_by_key(|load| load.pending)?
            }
        };
        Some(chosen.index)
    }

    /// Adds its weight to the credit of each candidate, chooses the largest credit, and subtracts the total from it.
    fn weighted(&self, weights: &[u32], open: &[Load]) -> Option<usize> {
        let weight = |load: &Load| i64::from(weights.get(load.index).copied().unwrap_or(1));
        let mut owed = self.owed.lock();
        let mut total = 0;
        for load in open.iter().filter(|load| weight(load) > 0) {
            *owed.entry(load.index).or_default() += weight(load);
            total += weight(load);
        }
        let of_use = open.iter().filter(|load| weight(load) > 0).map(|load| load.index);
        let chosen = of_use.max_by_key(|index| (owed.get(index).copied(), std::cmp::Reverse(*index)))?;
        *owed.entry(chosen).or_default() -= total;
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads(pending: &[usize]) -> Vec<Load> {
        pending.iter().enumerate().map(|(index, pending)| Load { index, pending: *pending }).collect()
    }

    fn turns(balance: Balance, open: &[Load], turns: usize) -> Vec<usize> {
        let picker = Picker::new(balance);
        (0..turns).map(|_| picker.pick(open).unwrap()).collect()
    }

    #[test]
    fn round_robin_takes_turns_and_least_pending_avoids_the_busy() {
        assert_eq!(turns(Balance::RoundRobin, &loads(&[0, 9, 0]), 4), [0, 1, 2, 0]);
        assert_eq!(turns(Balance::LeastPending, &loads(&[1, 1, 0]), 6), [2; 6]);
        assert_eq!(turns(Balance::LeastPending, &loads(&[0, 0, 1]), 3), [0, 1, 0]);
    }

    #[test]
    fn the_heaviest_does_not_get_its_share_in_one_burst() {
        assert_eq!(turns(Balance::Weighted(vec![3, 0, 1]), &loads(&[0; 3]), 8), [0, 0, 2, 0, 0, 0, 2, 0]);
        assert_eq!(turns(Balance::Weighted(vec![2]), &loads(&[0; 2]), 3), [0, 1, 0]);
        assert_eq!(Picker::new(Balance::Weighted(vec![1, 0])).pick(&loads(&[0; 2])[1..]), None);
    }

    proptest! {
        #[test]
        fn weighted_turns_are_as_many_as_the_weights(weights in proptest::collection::vec(0_u32..6, 1..6)) {
            let total: u32 = weights.iter().sum();
            prop_assume!(total > 0);
            let chosen = turns(Balance::Weighted(weights.clone()), &loads(&vec![0; weights.len()]), total as usize * 3);
            for (index, weight) in weights.iter().enumerate() {
                prop_assert_eq!(chosen.iter().filter(|one| **one == index).count(), *weight as usize * 3);
            }
        }
    }

    #[test]
    fn the_busiest_of_all_is_never_the_better_of_two() {
        let chosen = turns(Balance::PowerOfTwoChoices, &loads(&[0, 9, 0, 0]), 400);
        assert!(!chosen.contains(&1));
        for index in [0, 2, 3] {
            assert!(chosen.iter().filter(|one| **one == index).count() > 80, "{index}");
        }
    }

    #[test]
    fn without_replicas_there_is_nothing_to_choose_and_with_one_no_choice() {
        let weighted = Balance::Weighted(vec![2]);
        let others = [Balance::RoundRobin, Balance::LeastPending, Balance::PowerOfTwoChoices, Balance::Affinity];
        for balance in others.into_iter().chain([weighted]) {
            assert_eq!(Picker::new(balance.clone()).pick(&[]), None);
            assert_eq!(turns(balance, &loads(&[3]), 5), [0; 5]);
        }
    }

    #[test]
    fn strategies_are_read_by_their_names_and_the_rest_is_told_what_there_is() {
        let read = |text: &str| serde_json::from_str::<Balance>(text);
        assert_eq!(read(r#""least_outstanding""#).unwrap(), Balance::LeastPending);
        assert_eq!(read(r#""affinity""#).unwrap(), Balance::Affinity);
        assert_eq!(read(r#""power_of_two_choices""#).unwrap(), Balance::PowerOfTwoChoices);
        assert_eq!(read(r#"{"weighted": [3, 1]}"#).unwrap(), Balance::Weighted(vec![3, 1]));
        let error = read(r#""fastest""#).unwrap_err().to_string();
        assert!(error.contains("round_robin") && error.contains("least_pending"), "{error}");
    }
}
