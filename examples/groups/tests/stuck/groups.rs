//! Stalls of worker groups whose ranks are processes.

use std::time::Duration;

use gym_client::Transports;
use gym_client::registry::WaitsListener;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Result};
use gym_group::placement::ClusterSpec;
use gym_group::prelude::*;
use gym_group::{Group, GroupOptions, GroupRequest, Local, VirtualCluster, WorkerKind, Workers};

use crate::{Ground, stop};

const LONG: Duration = Duration::from_secs(3_600);

struct Rank;
worker! {
    impl Worker for Rank as rank {
        fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self) }
        /// Never ends.
        exclusive async fn train(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> {
            std::future::pending().await
        }
        /// Ends at once.
        exclusive async fn score(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> {
            Ok(7.into())
        }
    }
}

pub(crate) fn workers() -> Workers {
    Workers::new().with("rank", WorkerKind::of::<Rank>())
}

async fn start(cluster: &VirtualCluster, name: &str) -> Group {
    let options = GroupOptions::new(Transports::from_features(InProcess::new()));
    let request = GroupRequest::new(name, "rank", &(), options).expect("JSON");
    cluster.start(&CallContext::within(Duration::from_secs(60)), request).await.expect("starts")
}

/// Calls groups until it is killed. Prints the processes of the ranks.
pub(crate) fn be_controller(stall: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    runtime.block_on(async {
        let _waits = WaitsListener::start(&Transports::from_features(InProcess::new()), None, Vec::new())
            .await
            .expect("listens");
        let mut spec = ClusterSpec::new([2]);
        spec.use_gpus = false;
        spec.enable_colocation = Some(true);
        let cluster = VirtualCluster::new(spec, Local::new(workers())).expect("valid");
        let policy = start(&cluster, "policy").await;
        let pids: Vec<String> =
            policy.worker_status().iter().map(|rank| rank.pid.expect("a process").to_string()).collect();
        let other = if stall == "turn" { Some(start(&cluster, "logprob").await) } else { None };
        println!("ranks {}", pids.join(" "));
        if stall == "stopped" {
            // The test stops a rank before the call.
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).expect("a line");
            let _scored = policy.call(rank::score, ()).deadline(LONG).await;
            return;
        }
        let training = policy.call(rank::train, ()).deadline(LONG).start().await.expect("started");
        match (stall, other) {
            ("queued", _) => drop(policy.call(rank::score, ()).dispatch(Dispatch::rank(0)).deadline(LONG).await),
            (_, Some(other)) => drop(other.call(rank::score, ()).deadline(LONG).await),
            _ => drop(training.await),
        }
    });
}

pub(crate) fn ranks_and_turns_are_named() {
    for stall in ["hangs", "queued", "turn", "stopped"] {
        let ground = Ground::new();
        let mut command = ground.command(&["be-controller", stall]);
        let mut child =
            command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().expect("starts");
        let out = std::io::BufReader::new(child.stdout.take().expect("piped"));
        let mut input = child.stdin.take().expect("piped");
        let _controller = crate::Running(child);
        let line =
            std::io::BufRead::lines(out).map_while(std::result::Result::ok).find(|line| line.starts_with("ranks "));
        let line = line.expect("the ranks start");
        let pids: Vec<i32> = line.split(' ').skip(1).map(|pid| pid.parse().expect("a pid")).collect();
        let of = |rank: usize| format!("rank {rank} (pid {})", pids[rank]);
        match stall {
            "hangs" => {
                let words =
                    ["`rank.train` of group `policy` waits: ", &of(0), "has run `rank.train` call 0 for ", &of(1)];
                ground.expect("ranks that hang", None, &words);
            }
            "queued" => {
                let held = format!("{} is held by `rank.train` call 0, which has run for ", of(0));
                ground.expect("a call behind another one", None, &["`rank.score` of group `policy` waits: ", &held]);
            }
            "turn" => {
                // The chain goes on with the call that holds the turn.
                let words = ["`rank.train` of group `policy` waits: ", &of(0), &of(1)];
                ground.expect("a turn of another group", None, &words);
                ground.expect_hop(
                    "a turn of another group",
                    "`rank.score` of group `logprob` waits for its turn: policy has had its bundles for ",
                );
            }
            _ => {
                stop(pids[1]);
                std::io::Write::write_all(&mut input, b"go\n").expect("writes");
                let stopped = format!("pid {}: its process is stopped", pids[1]);
                ground.expect("a stopped rank", None, &["`rank.score` of group `policy` waits: ", &of(1), &stopped]);
                let _ = rustix::process::kill_process(
                    rustix::process::Pid::from_raw(pids[1]).expect("not zero"),
                    rustix::process::Signal::CONT,
                );
            }
        }
    }
}
