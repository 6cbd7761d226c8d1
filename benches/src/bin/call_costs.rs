//! Runs a number of calls to a worker group of one rank in this process. Use it to count the cost of a call on a machine that is
//! too busy for timings.
//!
//! `call_costs call|pipelined CALLS`. Run it twice under `valgrind --tool=callgrind`; the difference is the cost of the additional
//! calls.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use gym_benches::worker::{Bencher, Ping};
use gym_core::CallContext;
use gym_core::message::TraceContext;
use gym_group::{Dispatch, InProcessGroup, RankLayout, WorkerGroupExt};

/// Calls in flight in a pipeline, as in the timed benchmark.
const WINDOW: u64 = 1_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [how, calls] = &arguments[..] else { bail!("call_costs call|pipelined CALLS") };
    let calls: u64 = calls.parse()?;
    let group = InProcessGroup::start::<Bencher>("bench", RankLayout::line(1)?, ()).await?;
    let mut context = CallContext::within(Duration::from_secs(600));
    context.trace = TraceContext { trace_id: 7, span_id: 7, sampled: false };
    match how.as_str() {
        "call" => one_by_one(&group, &context, calls).await,
        "pipelined" => pipelined(&group, &context, calls).await,
        _ => bail!("{how} is neither call nor pipelined"),
    }
}

async fn one_by_one(group: &InProcessGroup, context: &CallContext, calls: u64) -> Result<()> {
    for number in 0..calls {
        let answer = group.call(Ping, number).context(context).await?;
        ensure!(answer.into_one()?.value == number, "what is sent comes back");
    }
    Ok(())
}

async fn pipelined(group: &InProcessGroup, context: &CallContext, calls: u64) -> Result<()> {
    let mut pending = Vec::with_capacity(WINDOW as usize);
    for _ in 0..calls / WINDOW {
        for number in 0..WINDOW {
            pending.push(group.call(Ping, number).dispatch(Dispatch::rank(0)).context(context).start().await?);
        }
        for (number, call) in pending.drain(..).enumerate() {
            ensure!(call.await?.into_one()?.value == number as u64, "each call has its own answer");
        }
    }
    Ok(())
}
