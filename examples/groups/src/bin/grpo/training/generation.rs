//! The ranks of the generation engine.

use gym_core::{CallContext, Error, RawObject, Result};
use gym_group::{Handles, HandlesShared, JsonRows, Method, Methods, Payload, Tensor, Worker, WorkerEnv};
use serde::Deserialize;
use serde_json::json;

use super::model::{Choice, OPERATORS, Table};

/// Answers each row. The input batch has the columns `operator` int64 \[rows\] and `task` JSON. The output has the same rows with
/// `choice` int64 \[rows\] and `generation_logprobs` float32 \[rows\]. The answer's text is in the task's `metadata.generation`,
/// from which the scripted model reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Generate;

impl Method for Generate {
    const NAME: &'static str = "generation.generate";
    /// The seed.
    type Args = u64;
    type Reply = ();
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadWeights;

impl Method for LoadWeights {
    const NAME: &'static str = "generation.load_weights";
    const IDEMPOTENT: bool = true;
    type Args = Table;
    type Reply = ();
}

/// One rank of the generation engine.
#[derive(Debug)]
pub(crate) struct GenerationWorker {
    rank: u32,
    table: Table,
}

impl Worker for GenerationWorker {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self { rank: env.rank, table: Table::default() })
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.shared(Generate).exclusive(LoadWeights);
    }
}

impl Handles<LoadWeights> for GenerationWorker {
    async fn handle(&mut self, _: &CallContext, call: Payload<Table>) -> Result<Payload<()>> {
        self.table = call.value;
        Ok(().into())
    }
}

impl HandlesShared<Generate> for GenerationWorker {
    async fn handle(&self, _: &CallContext, call: Payload<u64>) -> Result<Payload<()>> {
        let mut random = fastrand::Rng::with_seed(call.value ^ (u64::from(self.rank) << 32));
        let operators = call.batch.column("operator")?.dense()?.view::<i64>()?;
        let tasks = call.batch.column("task")?.json()?;
        let (mut chosen, mut log_probs, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for (row, operator) in operators.iter().enumerate() {
            let operator = usize::try_from(*operator).ok().filter(|operator| *operator < OPERATORS);
            let operator = operator.ok_or_else(|| Error::invalid(format!("row {row} has an unknown operator")))?;
            let choice = self.table.sample(operator, &mut random);
            chosen.push(choice as i64);
            log_probs.push(self.table.probabilities(operator)[choice].ln());
            rows.push(answered(&tasks.read(row)?, choice)?);
        }
        let batch = call
            .batch
            .clone()
            .with("choice", Tensor::from_vec([chosen.len()], chosen)?)?
            .with("generation_logprobs", Tensor::from_vec([log_probs.len()], log_probs)?)?
            .with("task", JsonRows::from_values(rows)?)?;
        Ok(Payload { value: (), batch })
    }
}

/// Returns the task with its answer.
fn answered(task: &RawObject, choice: usize) -> Result<RawObject> {
    #[derive(Deserialize)]
    struct Operands {
        left: i64,
        right: i64,
    }
    let operands: Operands = task.view()?;
    let choice = Choice::of_column(choice).ok_or_else(|| Error::internal("a choice beyond the table"))?;
    let text = choice.answer(operands.left, operands.right);
    let params = task.get_object("responses_create_params")?.unwrap_or_else(RawObject::empty);
    let params = params.edit().set_value("metadata", &json!({ "generation": text }))?.to_object()?;
    Ok(task.edit().set("responses_create_params", params.into_text()).to_object()?)
}
