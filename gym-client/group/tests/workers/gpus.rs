//! The GPUs of one machine, divided between clusters of one process, of several, and node agents.
//!
//! No GPU is needed: `CUDA_VISIBLE_DEVICES` names two, and a temporary folder of the case keeps other programs out.

use std::collections::BTreeMap;
use std::process::Stdio;

use gym_core::{CallContext, Result};
use gym_group::WorkerGroupExt;
use gym_group::placement::{ClusterSpec, GpuIds};
use gym_group::{Group, GroupRequest, NodeAgent, NodeOptions, Nodes, NodesOptions, VirtualCluster};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use super::types::{Describe, Init, workers};
use super::{LONG, local, options, transports};

const SECRET: &str = "a secret of the tests";

/// A program that does what each line of its input says: `start NAME [node] [share] [gpus=N]` starts a cluster of one rank, on this machine or by a
/// node agent; `shutdown NAME` and `drop NAME` end it. It answers each with a line.
pub(crate) async fn obeys() {
    let options = NodeOptions::new(SECRET);
    let agent = NodeAgent::start(workers(), options).await.expect("starts");
    let mut clusters: BTreeMap<String, (VirtualCluster, Group)> = BTreeMap::new();
    // This thread is none of the runtime's.
    for line in std::io::stdin().lines() {
        let line = line.expect("reads");
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["start", name, ref how @ ..] => match start(&agent, name, how).await {
                Ok((cluster, group)) => {
                    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
                    clusters.insert(name.to_owned(), (cluster, group));
                    format!("GPU {}", ranks[0].variables["CUDA_VISIBLE_DEVICES"])
                }
                Err(error) => format!("{}: {error}", error.code().as_str()).replace('\n', " "),
            },
            // The group stays, as a caller may keep it.
            ["shutdown", name] => {
                clusters[name].0.shutdown(LONG).await.map_or_else(|e| e.to_string(), |()| "ended".to_owned())
            }
            ["drop", name] => clusters.remove(name).map_or_else(|| "unknown".to_owned(), |_| "ended".to_owned()),
            _ => panic!("{line}"),
        };
        println!("@ {answer}");
    }
}

async fn start(agent: &NodeAgent, name: &str, how: &[&str]) -> Result<(VirtualCluster, Group)> {
    let mut spec = ClusterSpec::new([1]);
    (spec.name, spec.share_gpus) = (name.to_owned(), how.contains(&"share"));
    if let Some(gpu) = how.iter().find_map(|word| word.strip_prefix("gpus=")) {
        spec.gpu_ids = GpuIds::Flat(vec![gpu.parse().expect("a number")]);
    }
    let cluster = if how.contains(&"node") {
        let mut options = NodesOptions::default();
        options.wait_for_room = std::time::Duration::ZERO;
        let endpoint = agent.endpoints().last().expect("it listens").clone();
        VirtualCluster::new(spec, Nodes::at(vec![endpoint], transports(), SECRET).with(options))?
    } else {
        VirtualCluster::new(spec, local())?
    };
    let request = GroupRequest::new("policy", "obedient", &Init::default(), options())?;
    let group = cluster.start(&CallContext::within(LONG), request).await?;
    Ok((cluster, group))
}

struct Program {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Program {
    fn start(folder: &std::path::Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("own path"))
            .arg("be-gpu-program")
            .env("TMPDIR", folder)
            .env("CUDA_VISIBLE_DEVICES", "0,1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("starts");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { child, input, output: BufReader::new(output).lines() }
    }

    async fn tell(&mut self, line: &str) -> String {
        self.input.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
        loop {
            let line = timeout(LONG, self.output.next_line()).await.expect("in time").expect("reads").expect("it runs");
            if let Some(answer) = line.strip_prefix("@ ") {
                return answer.to_owned();
            }
        }
    }
}

pub(crate) async fn clusters_of_a_machine_divide_its_gpus() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut programs = [(); 3].map(|()| Program::start(folder.path()));
    let pid = |program: &Program| format!("process {}", program.child.id().expect("it runs"));
    let pids = [pid(&programs[0]), pid(&programs[1])];
    let steps: [(usize, &str, &[&str]); 21] = [
        (0, "start train", &["GPU 0"]),
        (0, "start generate", &["GPU 1"]),
        (
            0,
            "start third",
            &[
                "resource_exhausted",
                "place cluster third",
                "GPU 0 is held by this process",
                "cluster generate, GPUs [1]",
            ],
        ),
        (0, "start third share", &["resource_exhausted", "cluster train, GPUs [0]", "share_gpus"]),
        (1, "start other", &["resource_exhausted", "GPU 0 is held by", &pids[0]]),
        (1, "start other node", &["resource_exhausted", "GPU 1 is held by", &pids[0]]),
        (0, "shutdown generate", &["ended"]),
        (1, "start other gpus=0", &["resource_exhausted", "GPU 0 is held by", &pids[0]]),
        (1, "start other node gpus=0", &["resource_exhausted", "GPU 0 is held by", &pids[0]]),
        (1, "start other node", &["GPU 1"]),
        (0, "start generate", &["resource_exhausted", "GPU 1 is held by", &pids[1], "node"]),
        (1, "shutdown other", &["ended"]),
        (1, "start local", &["GPU 1"]),
        (1, "kill", &[]),
        // Its ranks have a moment to end.
        (0, "start generate", &["GPU 1"]),
        (0, "drop generate", &["ended"]),
        (0, "shutdown train", &["ended"]),
        (0, "start actor share", &["GPU 0"]),
        (2, "start critic share node", &["GPU 0"]),
        (2, "start alone gpus=0", &["resource_exhausted", "GPU 0 is held by", &pids[0], " and this process"]),
        (2, "start alone", &["GPU 1"]),
    ];
    for (at, (program, line, says)) in steps.into_iter().enumerate() {
        let program = &mut programs[program];
        if line == "kill" {
            program.child.kill().await.expect("kill -9");
            continue;
        }
        let answer = program.tell(line).await;
        assert!(says.iter().all(|word| answer.contains(word)), "{at}: {line}: {answer}");
    }
}
