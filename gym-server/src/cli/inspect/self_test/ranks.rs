//! A sum of two ranks, in processes.

use std::time::Duration;

use gym_client::Transports;
use gym_client::launch::SelfTest;
use gym_core::{CallContext, Result, worker};
use gym_group::collective::{CommunicatorExt as _, Peers, ReduceOp};
use gym_group::prelude::*;
use gym_group::{Group, GroupOptions, LaunchSpec, Local, RankPlace, WorkerKind, Workers};
use tokio::time::Instant;

/// The kind of the workers.
const KIND: &str = "rgym.self_test";
const SMALL: usize = 16;
const SMALL_SUMS: usize = 200;
const LARGE: usize = 4 << 20;
const LARGE_SUMS: u32 = 8;
/// The time for the ranks to exit.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Adds the workers of the self-test to those of a program.
pub(in crate::cli) fn workers(of_program: &Workers) -> Workers {
    of_program.clone().with(KIND, WorkerKind::of::<Summing>())
}

struct Summing(Peers);

worker! {
    impl Worker for Summing as summing {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> { Ok(Self(env.peers)) }
        /// Sums small arrays and large ones. Returns the median time of a small sum, and the mean time of a large one, in seconds.
        exclusive async fn measure(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<(f64, f64)>> {
            let all = self.0.all(cx).await?;
            let ones = |count: usize| Tensor::from_vec([count], vec![1.0_f32; count]);
            let mut times = Vec::with_capacity(SMALL_SUMS);
            for _ in 0..SMALL_SUMS {
                let (array, begin) = (ones(SMALL)?, Instant::now());
                all.all_reduce(cx, array, ReduceOp::Sum).await?;
                times.push(begin.elapsed().as_secs_f64());
            }
            times.sort_by(f64::total_cmp);
            // The first one pays for memory.
            let mut array = all.all_reduce(cx, ones(LARGE)?, ReduceOp::Max).await?;
            all.barrier(cx).await?;
            let begin = Instant::now();
            for _ in 0..LARGE_SUMS {
                array = all.all_reduce(cx, array, ReduceOp::Max).await?;
            }
            Ok((times[times.len() / 2], begin.elapsed().as_secs_f64() / f64::from(LARGE_SUMS)).into())
        }
    }
}

/// Has two ranks sum arrays of 32-bit floats, over the way that a group of one machine takes.
///
/// # Errors
/// Why the ranks do not start, meet or sum.
pub(super) async fn all_reduce(within: Duration) -> std::result::Result<SelfTest, String> {
    measure(within).await.map_err(|error| error.to_string())
}

async fn measure(within: Duration) -> Result<SelfTest> {
    let cx = CallContext::within(within);
    let places = (0..2).map(|rank| RankPlace::on_one_node(rank, 2)).collect();
    let nothing = serde_json::value::to_raw_value(&()).map_err(|error| gym_core::Error::internal(error.to_string()))?;
    let spec = LaunchSpec::new("self-test", KIND, nothing, places);
    let local = Local::new(workers(&Workers::new()));
    let group = Group::start(&cx, &local, spec, GroupOptions::new(Transports::standard())).await?;
    let measured = group.call(summing::measure, ()).deadline(within).await;
    let ended = group.shutdown(STOP_TIMEOUT).await;
    let times = measured?.into_values();
    ended?;
    let slowest = |of: fn(&(f64, f64)) -> f64| times.iter().map(of).fold(0.0, f64::max);
    let (small, large) = (slowest(|times| times.0), slowest(|times| times.1));
    let bytes = (LARGE * size_of::<f32>()) as f64;
    Ok(SelfTest { round_trip_us: small * 1e6, gb_per_s: bytes / large / 1e9, lanes: String::new() })
}
