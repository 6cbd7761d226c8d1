//! Scores programs that a model wrote against tests, in parallel: `cargo run --release -p gym-group-examples --bin comp_coding`.
//!
//! Each rank runs one program at a time in a process below a guard, with limits on time, memory, output and processes. What a program does to its parent hits the
//! guard. That is no sandbox: real answers of a model need ranks in containers. The nodes need `python3`.
//!
//! A solution that is wrong, runs for ever or crashes has reward 0. One that could not be run, because its interpreter is missing on all ranks, has no reward.
//!
//! The ranks are processes of this machine, or run on the nodes of the Ray cluster in `RAY_ADDRESS`.

use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_client::launch::{LimitedProgram, Limits};
use gym_group::BatchOptions;
use gym_group::health::RetryBudgets;
use gym_group::prelude::*;
use gym_group::ray::{RayAddress, ray_or_local};
use gym_group::{Group, GroupOptions, LaunchSpec, RankPlace, WorkerKind, Workers};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

const RANKS: u32 = 2;

/// The task: print the sum of two numbers.
const TESTS: [(&str, &str); 3] = [("2 3\n", "5\n"), ("-7 7\n", "0\n"), ("10000000000 1\n", "10000000001\n")];

const SOLUTIONS: [(&str, &str, &str); 8] = [
    ("right", "python3", "a, b = map(int, input().split())\nprint(a + b)"),
    ("wrong for a negative number", "python3", "a, b = input().split()\nprint(int(a.strip('-')) + int(b))"),
    ("runs for ever", "python3", "while True: pass"),
    ("crashes", "python3", "a, b = map(int, input().split())\nprint(a // (b - b))"),
    ("floods its output", "python3", "while True: print('5')"),
    ("kills its parent", "python3", "import os\nos.kill(os.getppid(), 9)\nwhile True: pass"),
    (
        "stops its parent",
        "python3",
        "import os\nos.kill(os.getppid(), 19)\na, b = map(int, input().split())\nprint(a + b)",
    ),
    ("in a language that no rank has", "no-such-language", "print(5)"),
];

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Test {
    input: String,
    expected: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Solution {
    interpreter: String,
    code: String,
}

/// The reward of a solution, and the first test that failed with its reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Score {
    reward: f64,
    failed: Option<(usize, String)>,
}

struct Judge(Limits);
worker! {
    impl Worker for Judge as judge {
        fn start(_: WorkerEnv, (): ()) -> Result<Self> {
            let mut limits = Limits::default();
            (limits.cpu, limits.wall) = (Duration::from_millis(500), Duration::from_secs(5));
            (limits.memory_bytes, limits.output_bytes) = (512 << 20, 64 << 10);
            Ok(Self(limits))
        }
        /// Runs each solution on the tests. An error means that this rank cannot run one of them, which says nothing about the solution.
        exclusive(idempotent) async fn score(
            &mut self, cx: &CallContext, call: Payload<(Vec<Test>, Vec<Solution>)>
        ) -> Result<Payload<Vec<Score>>> {
            let (tests, solutions) = call.value;
            let mut scores = Vec::new();
            for solution in solutions {
                scores.push(self.run(cx, &tests, solution).await?);
            }
            Ok(scores.into())
        }
    }
}

impl Judge {
    async fn run(&self, cx: &CallContext, tests: &[Test], solution: Solution) -> Result<Score> {
        let program = LimitedProgram::new(solution.interpreter).args(["-I", "main.py"]).file("main.py", solution.code);
        let program = program.limits(self.0.clone());
        for (at, test) in tests.iter().enumerate() {
            let run = program.clone().stdin(test.input.clone()).run(cx).await?;
            let why = match run.succeeded() {
                true if run.stdout_text() == test.expected => continue,
                true => format!("printed {:?} instead of {:?}", run.stdout_text(), test.expected),
                false => run.to_string(),
            };
            return Ok(Score { reward: 0.0, failed: Some((at + 1, why)) });
        }
        Ok(Score { reward: 1.0, failed: None })
    }
}

fn workers() -> Workers {
    Workers::new().with("judge", WorkerKind::of::<Judge>())
}

fn main() -> anyhow::Result<()> {
    // First, because ranks run this program too.
    workers().enter();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(score())
}

async fn score() -> anyhow::Result<()> {
    let cx = CallContext::within(Duration::from_secs(300));
    let address = RayAddress::of_environment()?;
    let places = (0..RANKS).map(|rank| RankPlace::on_one_node(rank, RANKS)).collect();
    let spec = LaunchSpec::new("judges", "judge", serde_json::value::to_raw_value(&())?, places);
    let options = GroupOptions::new(Transports::standard()).restarting(3);
    let group = Arc::new(Group::start(&cx, &ray_or_local(address, workers()), spec, options).await?);

    let tests = TESTS.map(|(input, expected)| Test { input: input.to_owned(), expected: expected.to_owned() });
    let solutions =
        SOLUTIONS.map(|(_, interpreter, code)| Solution { interpreter: interpreter.to_owned(), code: code.to_owned() });
    // What one rank cannot run, another one may: twice here, so that this example ends soon.
    let mut again = RetryBudgets::default();
    again.infrastructure_attempts = 2;
    again.backoff_min = Duration::from_millis(50);
    let begin = Instant::now();
    let balancer = group.balancer()?.again(again);
    let arguments = |batch| (tests.to_vec(), batch);
    let scores =
        balancer.map_batched_with(&cx, judge::score, solutions.to_vec(), arguments, &BatchOptions::default()).await;
    let seconds = begin.elapsed().as_secs_f64();

    for ((name, ..), score) in SOLUTIONS.iter().zip(&scores) {
        match score {
            Ok(Score { reward, failed: None }) => println!("{name}: reward {reward}"),
            Ok(Score { reward, failed: Some((test, why)) }) => println!("{name}: reward {reward}, test {test}: {why}"),
            Err(error) => println!("{name}: no reward, {:?}: {error}", error.origin()),
        }
    }
    println!("{} solutions in {seconds:.1} s on {RANKS} ranks", scores.len());
    group.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}
