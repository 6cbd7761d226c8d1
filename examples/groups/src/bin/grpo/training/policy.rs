//! The ranks of the policy: log probabilities, gradients of a stand-in loss, updates.

use gym_core::{CallContext, Error, Result};
use gym_group::{Batch, Handles, HandlesShared, Method, Methods, Payload, Tensor, Worker, WorkerEnv};
use serde::{Deserialize, Serialize};

use super::model::{CHOICES, OPERATORS, Table};

/// Computes the log probabilities of the rows' choices. The input batch has the columns `operator` and `choice`, int64 \[rows\].
/// The output has one float32 column \[rows\], `prev_logprobs` or `reference_policy_logprobs`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogProbs;

impl Method for LogProbs {
    const NAME: &'static str = "policy.log_probs";
    const IDEMPOTENT: bool = true;
    type Args = Weights;
    type Reply = ();
}

/// Selects the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Weights {
    /// The weights that are being trained.
    Current,
    /// The weights at the start of the training.
    Reference,
}

/// Computes the gradient of a stand-in loss over the rows, not yet divided by their number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gradient;

impl Method for Gradient {
    const NAME: &'static str = "policy.gradient";
    const IDEMPOTENT: bool = true;
    type Args = Loss;
    type Reply = Update;
}

/// A stand-in for GRPO's loss: the policy gradient with a penalty for divergence from the reference. It does not clip: there is one
/// update for each batch, so the probability ratio is 1.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Loss {
    /// Weight of the divergence from the reference.
    pub(crate) reference_policy_kl_penalty: f32,
}

/// A sum of gradients over rows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Update {
    gradient: [[f32; CHOICES]; OPERATORS],
    loss: f32,
    rows: f32,
    /// Step length.
    pub(crate) learning_rate: f32,
}

impl Update {
    /// Adds the gradients of another rank.
    pub(crate) fn add(&mut self, other: &Self) {
        for (sum, more) in self.gradient.iter_mut().flatten().zip(other.gradient.iter().flatten()) {
            *sum += more;
        }
        self.loss += other.loss;
        self.rows += other.rows;
    }

    /// Returns the mean loss over rows that have a reward.
    #[must_use]
    pub(crate) fn mean_loss(&self) -> f32 {
        self.loss / self.rows.max(1.0)
    }

    /// Returns the Euclidean norm of the mean gradient.
    #[must_use]
    pub(crate) fn gradient_norm(&self) -> f32 {
        let squares: f32 = self.gradient.iter().flatten().map(|value| value * value).sum();
        squares.sqrt() / self.rows.max(1.0)
    }
}

/// Applies one step against the gradient.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Apply;

impl Method for Apply {
    const NAME: &'static str = "policy.apply";
    type Args = Update;
    type Reply = ();
}

/// Returns the current weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadWeights;

impl Method for ReadWeights {
    const NAME: &'static str = "policy.read_weights";
    const IDEMPOTENT: bool = true;
    type Args = ();
    type Reply = Table;
}

/// One rank of the policy.
#[derive(Debug)]
pub(crate) struct PolicyWorker {
    table: Table,
    reference: Table,
}

impl Worker for PolicyWorker {
    type Init = Table;

    fn start(_: WorkerEnv, table: Table) -> Result<Self> {
        Ok(Self { reference: table.clone(), table })
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.shared(LogProbs).shared(Gradient).shared(ReadWeights).exclusive(Apply);
    }
}

impl HandlesShared<LogProbs> for PolicyWorker {
    async fn handle(&self, _: &CallContext, call: Payload<Weights>) -> Result<Payload<()>> {
        let (table, name) = match call.value {
            Weights::Current => (&self.table, "prev_logprobs"),
            Weights::Reference => (&self.reference, "reference_policy_logprobs"),
        };
        let choices = choices(&call.batch)?;
        let log_probs: Vec<f32> =
            choices.iter().map(|(operator, choice)| table.probabilities(*operator)[*choice].ln()).collect();
        let batch = Batch::empty().with(name, Tensor::from_vec([log_probs.len()], log_probs)?)?;
        Ok(Payload { value: (), batch })
    }
}

impl HandlesShared<Gradient> for PolicyWorker {
    async fn handle(&self, _: &CallContext, call: Payload<Loss>) -> Result<Payload<Update>> {
        let column = |name: &str| call.batch.column(name)?.dense()?.view::<f32>().map(|values| values.into_owned());
        let (advantages, mask) = (column("advantages")?, column("sample_mask")?);
        let (current, reference) = (column("prev_logprobs")?, column("reference_policy_logprobs")?);
        let mut update = Update::default();
        for (row, (operator, choice)) in choices(&call.batch)?.into_iter().enumerate() {
            if mask[row] == 0.0 {
                continue;
            }
            // d(-advantage · log p + penalty · (log p - log p_reference)) / d(log p), at the sampled choice.
            let slope = call.value.reference_policy_kl_penalty - advantages[row];
            let probabilities = self.table.probabilities(operator);
            for (column, value) in update.gradient[operator].iter_mut().enumerate() {
                let taken = f32::from(u8::from(column == choice));
                *value += slope * (taken - probabilities[column]);
            }
            let divergence = current[row] - reference[row];
            update.loss += call.value.reference_policy_kl_penalty * divergence - advantages[row] * current[row];
            update.rows += 1.0;
        }
        Ok(update.into())
    }
}

impl HandlesShared<ReadWeights> for PolicyWorker {
    async fn handle(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<Table>> {
        Ok(self.table.clone().into())
    }
}

impl Handles<Apply> for PolicyWorker {
    async fn handle(&mut self, _: &CallContext, call: Payload<Update>) -> Result<Payload<()>> {
        let Update { gradient, rows, learning_rate, .. } = call.value;
        for (weight, slope) in self.table.0.iter_mut().flatten().zip(gradient.iter().flatten()) {
            *weight -= learning_rate * slope / rows.max(1.0);
        }
        Ok(().into())
    }
}

/// Returns the rows' operators and choices, as positions in the table.
fn choices(batch: &Batch) -> Result<Vec<(usize, usize)>> {
    let column = |name: &str, below: usize| -> Result<Vec<usize>> {
        let values = batch.column(name)?.dense()?.view::<i64>()?.into_owned();
        let position = |value: i64| usize::try_from(value).ok().filter(|value| *value < below);
        let found: Option<Vec<usize>> = values.into_iter().map(position).collect();
        found.ok_or_else(|| Error::invalid(format!("column {name:?} has values that are not in 0..{below}")))
    };
    Ok(column("operator", OPERATORS)?.into_iter().zip(column("choice", CHOICES)?).collect())
}
