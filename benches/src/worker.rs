//! The worker whose calls are measured, in one process and between processes.

use gym_core::{CallContext, Result};
use gym_group::{Handles, Method, Methods, Payload, Worker, WorkerEnv};

/// Returns the number.
#[derive(Clone, Copy, Debug)]
pub struct Ping;

impl Method for Ping {
    const NAME: &'static str = "bench.ping";
    type Args = u64;
    type Reply = u64;
}

/// Returns the batch.
#[derive(Clone, Copy, Debug)]
pub struct Echo;

impl Method for Echo {
    const NAME: &'static str = "bench.echo";
    type Args = ();
    type Reply = ();
}

/// Reads the first and the last byte of its shard.
#[derive(Clone, Copy, Debug)]
pub struct Ends;

impl Method for Ends {
    const NAME: &'static str = "bench.ends";
    type Args = ();
    type Reply = u64;
}

/// Handles all three, one call after another.
#[derive(Debug)]
pub struct Bencher;

impl Worker for Bencher {
    type Init = ();

    fn start(_: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Ping).exclusive(Echo).exclusive(Ends);
    }
}

impl Handles<Ping> for Bencher {
    async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
        Ok(call)
    }
}

impl Handles<Echo> for Bencher {
    async fn handle(&mut self, _: &CallContext, call: Payload<()>) -> Result<Payload<()>> {
        Ok(call)
    }
}

impl Handles<Ends> for Bencher {
    async fn handle(&mut self, _: &CallContext, call: Payload<()>) -> Result<Payload<u64>> {
        let bytes = call.batch.column("data")?.dense()?.bytes();
        let ends = bytes.first().zip(bytes.last());
        Ok(ends.map_or(0, |(first, last)| u64::from(*first) + u64::from(*last)).into())
    }
}
