//! The stand-in for a model: a table of preferences, and the softmax over one of its rows.

use serde::{Deserialize, Serialize};

/// The operator of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    /// `a + b`
    Add,
    /// `a - b`
    Subtract,
    /// `a * b`
    Multiply,
}

/// The policy's choice for a task: the one "token" that it generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Answers with the result of this operation.
    Carry(Operator),
    /// Answers "I do not know."
    GiveUp,
}

/// Number of operators, which are the rows of the table.
pub(super) const OPERATORS: usize = 3;
/// Number of choices, which are the columns of the table.
pub(super) const CHOICES: usize = 4;

impl Operator {
    /// All operators, in the order of the table's rows.
    pub(crate) const ALL: [Self; OPERATORS] = [Self::Add, Self::Subtract, Self::Multiply];

    /// Returns the symbol between the operands.
    #[must_use]
    pub(crate) fn symbol(self) -> char {
        match self {
            Self::Add => '+',
            Self::Subtract => '-',
            Self::Multiply => '*',
        }
    }

    /// Returns the result of the operation.
    #[must_use]
    pub(crate) fn apply(self, left: i64, right: i64) -> i64 {
        match self {
            Self::Add => left + right,
            Self::Subtract => left - right,
            Self::Multiply => left * right,
        }
    }
}

impl Choice {
    /// Returns the choice of a column of the table; `None` beyond the last column.
    #[must_use]
    pub(crate) fn of_column(column: usize) -> Option<Self> {
        match column {
            OPERATORS => Some(Self::GiveUp),
            _ => Operator::ALL.get(column).copied().map(Self::Carry),
        }
    }

    /// Returns the answer for two operands.
    #[must_use]
    pub(crate) fn answer(self, left: i64, right: i64) -> String {
        match self {
            Self::Carry(operator) => format!("That makes \\boxed{{{}}}.", operator.apply(left, right)),
            Self::GiveUp => "I do not know.".to_owned(),
        }
    }
}

/// The "weights": a preference (logit) for each choice, by operator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table(pub [[f32; CHOICES]; OPERATORS]);

impl Table {
    /// Returns the probability of each choice.
    ///
    /// # Panics
    /// If the table has no such row.
    #[must_use]
    pub(crate) fn probabilities(&self, operator: usize) -> [f32; CHOICES] {
        let logits = self.0[operator];
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights = logits.map(|logit| (logit - greatest).exp());
        let sum: f32 = weights.iter().sum();
        weights.map(|weight| weight / sum)
    }

    /// Draws a choice.
    #[must_use]
    pub(crate) fn sample(&self, operator: usize, random: &mut fastrand::Rng) -> usize {
        let mut left = random.f32();
        let probabilities = self.probabilities(operator);
        probabilities
            .iter()
            .position(|probability| {
                left -= probability;
                left < 0.0
            })
            .unwrap_or(CHOICES - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_equal_preferences_is_a_fair_die() {
        let table = Table::default();
        assert_eq!(table.probabilities(0), [0.25; CHOICES]);
        let mut random = fastrand::Rng::with_seed(1);
        let mut seen = [0; CHOICES];
        for _ in 0..4_000 {
            seen[table.sample(0, &mut random)] += 1;
        }
        assert!(seen.iter().all(|count| (900..1_100).contains(count)), "{seen:?}");
    }

    #[test]
    fn every_column_is_a_choice_and_no_other_number_is() {
        assert_eq!(Choice::of_column(0), Some(Choice::Carry(Operator::Add)));
        assert_eq!(Choice::of_column(CHOICES - 1), Some(Choice::GiveUp));
        assert_eq!(Choice::of_column(CHOICES), None);
        assert_eq!(Choice::Carry(Operator::Multiply).answer(6, 7), "That makes \\boxed{42}.");
    }
}
