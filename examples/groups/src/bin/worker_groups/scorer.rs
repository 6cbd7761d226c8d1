//! The worker of all chapters of this program.

use gym_core::{CallContext, Result};
use gym_group::{Handles, Method, Methods, Payload, Worker, WorkerEnv};

/// Returns the mean of the column `score` of the rank's shard, and the rank that computed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mean;
impl Method for Mean {
    const NAME: &'static str = "scorer.mean";
    const IDEMPOTENT: bool = true;
    type Args = ();
    type Reply = (u32, f32);
}

/// Greets the given name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greet;
impl Method for Greet {
    const NAME: &'static str = "scorer.greet";
    const IDEMPOTENT: bool = true;
    type Args = String;
    type Reply = String;
}

/// Allocates this many bytes of memory and keeps them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hoard;
impl Method for Hoard {
    const NAME: &'static str = "scorer.hoard";
    type Args = usize;
    type Reply = usize;
}

pub(crate) struct Scorer {
    env: WorkerEnv,
    hoard: Vec<u8>,
}

impl Worker for Scorer {
    type Init = ();
    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self { env, hoard: Vec::new() })
    }
    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Mean).exclusive(Greet).exclusive(Hoard);
    }
}

impl Handles<Mean> for Scorer {
    async fn handle(&mut self, _: &CallContext, call: Payload<()>) -> Result<Payload<(u32, f32)>> {
        let scores = call.batch.column("score")?.dense()?.view::<f32>()?;
        Ok((self.env.rank, scores.iter().sum::<f32>() / scores.len() as f32).into())
    }
}

impl Handles<Greet> for Scorer {
    async fn handle(&mut self, _: &CallContext, call: Payload<String>) -> Result<Payload<String>> {
        let WorkerEnv { rank, incarnation, variables, .. } = &self.env;
        let engine = variables.get("VLLM_PORT").map(|port| format!(", whose engine meets at port {port},"));
        let engine = engine.unwrap_or_default();
        Ok(format!("rank {rank} in its life {incarnation}{engine} greets {}", call.value).into())
    }
}

impl Handles<Hoard> for Scorer {
    async fn handle(&mut self, _: &CallContext, call: Payload<usize>) -> Result<Payload<usize>> {
        self.hoard.resize(call.value, 1);
        Ok(self.hoard.len().into())
    }
}
