//! The checks of two ranks, which are processes with one GPU.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use gym_client::transport::Transports;
use gym_core::group::DType;
use gym_core::group::collective::{Collective, Collectives, Meeting, ReduceOp, Seat};
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Incarnation};
use gym_group::collective::{HostCollectives, Sharing};
use gym_transport_rdma::nccl::NcclCollectives;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::checks::{LONG, millis, same_as_host, up};
use crate::{CHECK, Outcome, by_size, device, options, text};

/// Folder, rank and task of a process that is a rank.
const RANK: &str = "GYM_GPU_RANK";
/// The deadline of each sum of which a rank is lost.
const SUM: Duration = Duration::from_secs(3);

struct Rank {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    /// Returns the rest of the next line that begins with this word.
    async fn told(&mut self, word: &str) -> Result<String, String> {
        let line = async {
            while let Some(line) = self.lines.next_line().await.map_err(text)? {
                if let Some(rest) = line.strip_prefix(word) {
                    return Ok(rest.trim().to_owned());
                }
            }
            let status = self.process.wait().await.map_err(text)?;
            Err(format!("a rank has ended, {status}, before it said `{word}`"))
        };
        timeout(LONG, line).await.map_err(|_| format!("a rank has not said `{word}` within {} s", LONG.as_secs()))?
    }

    fn signal(&self, signal: Signal) -> Result<(), String> {
        let id = self.process.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or("a rank has ended")?;
        kill_process(id, signal).map_err(text)
    }
}

fn spawn(folder: &Path, rank: u32, task: &str) -> Result<Rank, String> {
    let mut command = Command::new(std::env::current_exe().map_err(text)?);
    command.args(["--ignored", "--exact", "--nocapture", "one_check"]).env(CHECK, "rank");
    command.env(RANK, format!("{}:{rank}:{task}", folder.display())).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = command.kill_on_drop(true).spawn().map_err(text)?;
    let lines = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
    Ok(Rank { process, lines })
}

/// g4: two ranks make every call with one GPU.
pub(crate) async fn two_ranks_on_one_gpu() -> Outcome {
    device()?;
    let folder = tempfile::tempdir().map_err(text)?;
    let mut ranks = [spawn(folder.path(), 0, "same")?, spawn(folder.path(), 1, "same")?];
    let mut told = Vec::new();
    for rank in &mut ranks {
        let line = rank.told("told ").await?;
        let line: Value = serde_json::from_str(&line).map_err(text)?;
        match line["error"].as_str() {
            Some(error) => return Err(error.to_owned().into()),
            None => told.push(line),
        }
    }
    Ok(json!({ "ranks": told }))
}

/// g5: a rank is killed, and another one is stopped, while both sum. The other one names it.
pub(crate) async fn a_rank_is_lost() -> Outcome {
    device()?;
    let mut measured = json!({});
    // Here no supervisor tells that a process has ended, so both are found at the deadline.
    for (name, signal, words) in [
        ("killed", Signal::KILL, "rank 1 has left"),
        ("stopped", Signal::STOP, "rank 1 does not answer rank 0: stopped, or cut off"),
    ] {
        let folder = tempfile::tempdir().map_err(text)?;
        let [mut survivor, mut lost] = [spawn(folder.path(), 0, "sum")?, spawn(folder.path(), 1, "sum")?];
        survivor.told("summing").await?;
        lost.told("summing").await?;
        sleep(Duration::from_millis(50)).await;
        let began = Instant::now();
        lost.signal(signal)?;
        let line = survivor.told("told ").await?;
        let took = began.elapsed();
        let line: Value = serde_json::from_str(&line).map_err(text)?;
        let error = line["error"].as_str().unwrap_or_default();
        if !error.contains(words) || took > by_size(SUM * 2, LONG) {
            return Err(format!("rank 1 is {name}, and rank 0 says after {:.0} ms: {error}", millis(took)).into());
        }
        measured[name] = json!({ "after_ms": millis(took), "error": error });
        // Its abort ends, or the process with code 70.
        let ended = timeout(LONG, survivor.process.wait()).await.map_err(|_| "the survivor does not end".to_owned())?;
        let ended = ended.map_err(text)?;
        if !ended.success() {
            return Err(format!("rank 1 is {name}, and the process of rank 0 ends with {ended}").into());
        }
    }
    Ok(measured)
}

/// The process of a rank.
pub(crate) async fn rank() -> Result<(), String> {
    let role = std::env::var(RANK).map_err(text)?;
    let [folder, rank, task] = role.split(':').collect::<Vec<_>>()[..] else { return Err(role.clone()) };
    println!();
    let outcome = play(folder.into(), rank.parse().map_err(text)?, task == "sum").await;
    println!("told {}", outcome.unwrap_or_else(|error| json!({ "error": error })));
    Ok(())
}

async fn play(folder: PathBuf, rank: u32, sums: bool) -> Result<Value, String> {
    let ended = CancelToken::new();
    let transports = Transports::standard();
    let host = HostCollectives::sharing(transports.clone(), Sharing::Never, 0);
    let socket = folder.join(format!("rank-{rank}.socket"));
    let handler = host.handler().ok_or("no handler")?;
    let listened = transports.listen(ListenOptions::default().socket(socket), handler, &[]).await.map_err(text)?;
    let (listener, handler) = listened;
    let endpoints: Vec<String> = listener.endpoints().iter().map(ToString::to_string).collect();
    tokio::spawn(serve(listener, handler, ended.clone(), Duration::ZERO));
    let file = |rank: u32| folder.join(format!("rank-{rank}"));
    let part = folder.join(format!("rank-{rank}.part"));
    std::fs::write(&part, endpoints.join("\n")).map_err(text)?;
    std::fs::rename(part, file(rank)).map_err(text)?;
    let mut seats = Vec::new();
    for rank in 0..2 {
        let begun = Instant::now();
        let endpoints = loop {
            match std::fs::read_to_string(file(rank)) {
                Ok(endpoints) => break endpoints,
                Err(_) if begun.elapsed() < LONG => sleep(Duration::from_millis(10)).await,
                Err(_) => return Err(format!("rank {rank} is not there")),
            }
        };
        let endpoints: Result<Vec<Endpoint>, _> = endpoints.lines().map(Endpoint::parse).collect();
        seats.push(Seat::new(rank, Incarnation(1)).serving_at(endpoints.map_err(text)?));
    }
    let backend = NcclCollectives::open(Arc::new(host), &options()).map_err(text)?;
    let meeting = Meeting::new("gpu", 1, rank, seats).map_err(text)?;
    let began = Instant::now();
    let communicator = backend.join(&CallContext::within(LONG), meeting).await.map_err(text)?;
    let joined = millis(began.elapsed());
    let device = backend.device().cloned().ok_or("the backend has no GPU")?;
    if !sums {
        let operations = same_as_host(&*communicator, &device).await?;
        // The other rank may not have all of the last answer.
        sleep(Duration::from_millis(500)).await;
        return Ok(json!({ "join_ms": joined, "operations": operations }));
    }
    let bytes = vec![0; by_size(1 << 30, 2 << 20)];
    let mut buffer = up(&device, DType::F32, &bytes)?;
    for number in 0_u64.. {
        // The first one also loads kernels.
        let cx = CallContext::within(if number == 0 { LONG } else { SUM });
        let moved = communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), buffer).await;
        if let Err(error) = moved.result {
            return Err(format!("{error} (sum {number})"));
        }
        buffer = moved.buffer;
        if number == 0 {
            println!("summing");
        }
    }
    Err("no failure".to_owned())
}
