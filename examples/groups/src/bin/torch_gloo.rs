//! Torch in ranks, each in a Python child process: `cargo run --release -p gym-group-examples --bin torch_gloo [PYTHON]`.
//!
//! A rank has the variables that `init_process_group` reads, and its children inherit them. They are those of the group also where torchrun has started
//! this program. The interpreter, `python3` unless another one is given, needs torch.
//!
//! The ranks are processes of this machine, or run on the nodes of the Ray cluster in `RAY_ADDRESS`.

use std::time::Duration;

use anyhow::ensure;
use gym_client::Transports;
use gym_core::Code;
use gym_group::prelude::*;
use gym_group::ray::{RayAddress, ray_or_local};
use gym_group::{Group, GroupOptions, LaunchSpec, RankPlace, WorkerKind, Workers};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

const RANKS: u32 = 2;

const JOIN: &str = r#"
import datetime, json, os
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
torchrun = [name for name in os.environ if name.startswith("TORCHELASTIC_")]
print(json.dumps(dict(rank=dist.get_rank(), ranks=dist.get_world_size(), sum=total.item(), threads=torch.get_num_threads(),
    ranks_of_node=os.environ.get("LOCAL_WORLD_SIZE"), threads_variable=os.environ.get("OMP_NUM_THREADS"), torchrun=torchrun)))
"#;

/// What torch in a rank sees.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Joined {
    rank: Rank,
    ranks: u32,
    sum: u32,
    threads: u32,
    ranks_of_node: Option<String>,
    threads_variable: Option<String>,
    torchrun: Vec<String>,
}

struct Torch;
worker! {
    impl Worker for Torch as torch {
        fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self) }
        /// Joins the process group with an interpreter and sums over the ranks.
        exclusive async fn join(&mut self, _: &CallContext, python: Payload<String>) -> Result<Payload<Joined>> {
            let output = Command::new(&python.value).args(["-c", JOIN]).kill_on_drop(true).output().await;
            let output = output.map_err(|error| failed(&python.value, error.to_string()))?;
            let text = if output.status.success() { output.stdout } else { output.stderr };
            let text = String::from_utf8_lossy(&text).into_owned();
            let joined: Joined = serde_json::from_str(&text).map_err(|_| failed(&python.value, text))?;
            Ok(joined.into())
        }
    }
}

fn failed(python: &str, why: String) -> Error {
    Error::finished(Code::FailedPrecondition, why).about(format!("join with torch of {python}"))
}

fn workers() -> Workers {
    Workers::new().with("torch", WorkerKind::of::<Torch>())
}

fn main() -> anyhow::Result<()> {
    // First, because ranks run this program too.
    workers().enter();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(join())
}

async fn join() -> anyhow::Result<()> {
    let python = std::env::args().nth(1).unwrap_or_else(|| "python3".to_owned());
    let cx = CallContext::within(Duration::from_secs(120));
    let places = (0..RANKS).map(|rank| RankPlace::on_one_node(rank, RANKS)).collect();
    let spec = LaunchSpec::new("torch", "torch", serde_json::value::to_raw_value(&())?, places);
    let provisioner = ray_or_local(RayAddress::of_environment()?, workers());
    let group = Group::start(&cx, &*provisioner, spec, GroupOptions::new(Transports::standard())).await?;

    let joined = group.call(torch::join, python).context(&cx).await?.into_values();
    let unset = || "unset".to_owned();
    for Joined { rank, ranks, sum, threads, ranks_of_node, threads_variable, torchrun } in joined {
        let (of_node, variable) = (ranks_of_node.unwrap_or_else(unset), threads_variable.unwrap_or_else(unset));
        println!(
            "rank {rank} of {ranks}: sum {sum}, threads {threads}, LOCAL_WORLD_SIZE {of_node}, OMP_NUM_THREADS {variable}, of torchrun {torchrun:?}"
        );
        ensure!((ranks, sum) == (RANKS, (1..=RANKS).sum()), "the ranks did not all join");
    }
    group.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}
