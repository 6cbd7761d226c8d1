//! GPU memory by process and usage by GPU, sampled from `nvidia-smi` by one task for the whole program.
//!
//! `nvidia-smi` comes with every driver and needs neither a library nor `unsafe`. A query takes 20-500 ms, so the sampler runs
//! queries rarely, in the background, and only on machines with GPUs. In a container with its own process IDs, the driver reports
//! IDs that do not exist there. The memory of a process is then unknown, which is not the same as 0.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use crate::usage::devices::visible_gpus;

/// Pause between two queries of the processes: their memory changes when models are loaded and freed.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);
/// The GPUs are queried every second time: a process that opens all of them costs tenths of a second.
const GPUS_EVERY: u32 = 2;
/// Limit for a query: if the driver hangs, so does `nvidia-smi`.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const PROCESSES: &str = "--query-compute-apps=pid,used_gpu_memory";
const GPUS: &str = "--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu";
const MIB: u64 = 1 << 20;

/// Usage of one GPU by all its processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GpuUsage {
    /// Its index, as in `nvidia-smi`.
    pub index: u32,
    /// Its identifier, `GPU-…`.
    pub uuid: String,
    /// Memory in use, in bytes.
    pub used_bytes: u64,
    /// The most memory in use since sampling began, in bytes.
    pub used_bytes_peak: u64,
    /// Total memory, in bytes.
    pub memory_bytes: u64,
    /// Share of the time in which the GPU was busy, in percent; `None` if the driver does not report it.
    pub busy_percent: Option<f64>,
}

/// GPU memory by process, in bytes.
type MemoryByProcess = BTreeMap<i32, u64>;

/// Samples in the background until it is dropped.
#[derive(Debug)]
pub(crate) struct GpuSampler {
    last: Arc<GpuSample>,
    task: AbortOnDropHandle<()>,
}

/// The last results of the driver's queries.
#[derive(Debug, Default)]
struct GpuSample {
    processes: Mutex<Option<MemoryByProcess>>,
    gpus: Mutex<Option<Vec<GpuUsage>>>,
    gpus_wanted: AtomicBool,
}

impl GpuSampler {
    /// Returns the sampler that all groups and clusters of the program share. Must be called within a tokio runtime. Returns
    /// `None` if there is no GPU or no `nvidia-smi`.
    pub(crate) fn shared() -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<GpuSampler>> = Mutex::new(Weak::new());
        if visible_gpus().is_empty() {
            return None;
        }
        let Some(tool) = tool() else {
            tracing::warn!("nvidia-smi is not on the path; GPU usage is unknown");
            return None;
        };
        let mut shared = SHARED.lock();
        // The runtime of an earlier sampler may have ended.
        let running = shared.upgrade().filter(|sampler| !sampler.task.is_finished());
        Some(running.unwrap_or_else(|| {
            let sampler = Arc::new(Self::start(tool));
            *shared = Arc::downgrade(&sampler);
            sampler
        }))
    }

    fn start(tool: PathBuf) -> Self {
        let last = Arc::new(GpuSample::default());
        let task = AbortOnDropHandle::new(tokio::spawn(sample(tool, Arc::clone(&last))));
        Self { last, task }
    }

    /// Returns the GPU memory of these processes, in bytes. Returns `None` before the first result and after a failed query. Also
    /// returns `None` if the driver lists none of the processes: it lists only those that use a GPU.
    pub(crate) fn held_bytes(&self, processes: impl IntoIterator<Item = i32>) -> Option<u64> {
        let held = self.last.processes.lock();
        let held = held.as_ref()?;
        let known = processes.into_iter().filter_map(|process| held.get(&process));
        known.copied().reduce(u64::saturating_add)
    }

    /// Returns the usage of all GPUs as last sampled; `None` before the first result. The first call starts the sampling of the
    /// GPUs.
    pub(crate) fn gpus(&self) -> Option<Vec<GpuUsage>> {
        self.last.gpus_wanted.store(true, Ordering::Relaxed);
        self.last.gpus.lock().clone()
    }
}

fn tool() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("nvidia-smi")).find(|file| file.is_file())
}

/// Samples until it is aborted.
async fn sample(tool: PathBuf, last: Arc<GpuSample>) {
    let mut tick = tokio::time::interval(SAMPLE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut warned, mut until_gpus) = (false, 0_u32);
    loop {
        tick.tick().await;
        let processes = ask_processes(&tool).await;
        if let Err(error) = &processes
            && !std::mem::replace(&mut warned, true)
        {
            tracing::warn!(tool = %tool.display(), error, "GPU memory of workers is unknown");
        }
        *last.processes.lock() = processes.ok();
        if !last.gpus_wanted.load(Ordering::Relaxed) {
            continue;
        }
        if until_gpus == 0 {
            until_gpus = GPUS_EVERY;
            // After a failed query, the previous result remains.
            if let Ok(text) = answer(&tool, GPUS).await {
                *last.gpus.lock() = Some(text.lines().filter_map(read_gpu).collect());
            }
        }
        until_gpus -= 1;
    }
}

async fn ask_processes(tool: &Path) -> Result<MemoryByProcess, String> {
    answer(tool, PROCESSES).await.map(|text| read_processes(&text))
}

/// Returns the output of a query: cells separated by commas, memory in MiB.
async fn answer(tool: &Path, query: &str) -> Result<String, String> {
    let mut command = Command::new(tool);
    command.args([query, "--format=csv,noheader,nounits"]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(ANSWER_TIMEOUT, command.output())
        .await
        .map_err(|_| format!("no answer within {ANSWER_TIMEOUT:?}"))?
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", output.status, said.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses lines of `pid, MiB`. A process on several GPUs has several lines; `[N/A]`, which virtual machines report, is not a
/// number.
fn read_processes(answer: &str) -> MemoryByProcess {
    let mut held = MemoryByProcess::new();
    for line in answer.lines() {
        let Some((process, mib)) = line.split_once(',') else { continue };
        if let (Ok(process), Ok(mib)) = (process.trim().parse(), mib.trim().parse::<u64>()) {
            let sum: &mut u64 = held.entry(process).or_default();
            *sum = sum.saturating_add(mib.saturating_mul(MIB));
        }
    }
    held
}

/// Parses one line of the output of [`GPUS`].
fn read_gpu(line: &str) -> Option<GpuUsage> {
    let mut cells = line.split(',').map(str::trim);
    let (index, uuid) = (cells.next()?.parse().ok()?, cells.next()?.to_owned());
    let mut bytes = || cells.next()?.parse::<u64>().ok()?.checked_mul(MIB);
    let (used_bytes, memory_bytes) = (bytes()?, bytes()?);
    let busy_percent = cells.next().and_then(|cell| cell.parse().ok());
    Some(GpuUsage { index, uuid, used_bytes, used_bytes_peak: used_bytes, memory_bytes, busy_percent })
}

#[cfg(test)]
mod tests {

    use super::*;

    /// Another process writes it: a file that this process has open for writing is open in each child that another test starts at that
    /// moment, and then it cannot be executed.
    fn script(folder: &Path, text: &str) -> PathBuf {
        let file = folder.join("nvidia-smi");
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&file).arg(text);
        assert!(shell.status().expect("a shell").success());
        file
    }

    #[test]
    fn a_process_on_two_gpus_holds_the_sum_and_what_is_no_number_is_left_out() {
        let held = read_processes("812, 1024\n97, 16\n812, 8\n5, [N/A]\nNo running processes found\n");
        assert_eq!(held, MemoryByProcess::from([(812, 1032 * MIB), (97, 16 * MIB)]));
    }

    #[tokio::test]
    async fn a_rank_holds_what_its_processes_hold_and_a_stranger_is_not_known() {
        let folder = tempfile::tempdir().expect("a folder");
        let tool = script(
            folder.path(),
            "[ \"$1\" = --query-compute-apps=pid,used_gpu_memory ] && echo '7, 3' && echo '8, 4'",
        );
        let last = GpuSample { processes: Mutex::new(ask_processes(&tool).await.ok()), ..GpuSample::default() };
        let meter = GpuSampler { last: Arc::new(last), task: AbortOnDropHandle::new(tokio::spawn(async {})) };
        assert_eq!(meter.held_bytes([7, 8, 9]), Some(7 * MIB));
        assert_eq!(meter.held_bytes([9]), None, "not known is not 0");
    }

    #[tokio::test]
    async fn a_tool_that_fails_says_why() {
        let folder = tempfile::tempdir().expect("a folder");
        let tool = script(folder.path(), "echo 'Failed to initialize NVML' >&2; exit 9");
        let error = ask_processes(&tool).await.expect_err("it failed");
        assert!(error.contains("NVML") && error.contains('9'), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_tool_that_hangs_is_given_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let tool = script(folder.path(), "exec sleep 600");
        assert!(ask_processes(&tool).await.expect_err("it hangs").contains("no answer"));
    }

    #[tokio::test]
    async fn the_meter_asks_by_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let meter = GpuSampler::start(script(folder.path(), "echo '7, 3'"));
        let answered = async {
            while meter.held_bytes([7]) != Some(3 * MIB) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), answered).await.expect("an answer");
    }

    #[test]
    fn what_the_driver_does_not_say_is_not_made_up() {
        let told = read_gpu("1, GPU-8f2a, 1024, 143771, 37").expect("a GPU");
        assert_eq!((told.index, told.used_bytes, told.memory_bytes), (1, 1024 * MIB, 143_771 * MIB));
        assert_eq!(told.busy_percent, Some(37.0));
        assert_eq!(read_gpu("1, GPU-8f2a, 1024, 143771, [N/A]").expect("a GPU").busy_percent, None);
        assert_eq!(read_gpu("1, GPU-8f2a, [N/A], 143771, 5"), None);
        assert_eq!(read_gpu("No devices were found"), None);
    }

    #[tokio::test]
    async fn one_task_samples_processes_and_the_gpus_that_are_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = "case $1 in --query-gpu*) echo '0, GPU-a, 10, 1000, 5';; *) echo '7, 3';; esac";
        let sampler = GpuSampler::start(script(folder.path(), text));
        let sampled = async {
            while sampler.gpus().is_none() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), sampled).await.expect("an answer");
        assert_eq!(sampler.gpus().expect("an answer")[0].used_bytes, 10 * MIB);
        assert_eq!(sampler.held_bytes([7]), Some(3 * MIB));
    }

    /// A GiB on the GPU, held until standard input closes.
    const HOLDER: &str = "import sys, torch\n\
        held = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n\
        torch.cuda.synchronize()\n\
        print('held', flush=True)\n\
        sys.stdin.read()";

    #[tokio::test]
    async fn a_process_on_a_real_gpu_is_seen_with_its_memory() {
        use tokio::io::{AsyncBufReadExt, BufReader};

        let Some(sampler) = GpuSampler::shared() else {
            eprintln!("NOT RUN: no GPU");
            return;
        };
        let torch = Command::new("python3").args(["-c", "import torch"]).stderr(Stdio::null()).status().await;
        if !torch.is_ok_and(|status| status.success()) {
            eprintln!("NOT RUN: no PyTorch");
            return;
        }
        let mut holder = Command::new("python3");
        holder.args(["-c", HOLDER]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut holder = holder.spawn().expect("python3 with PyTorch");
        let process = i32::try_from(holder.id().expect("it runs")).expect("a process id");
        let mut said = BufReader::new(holder.stdout.take().expect("a pipe")).lines();
        let seen = async {
            assert_eq!(said.next_line().await.expect("a line").as_deref(), Some("held"));
            loop {
                tokio::task::yield_now().await;
                if let (Some(held), Some(gpus)) = (sampler.held_bytes([process]), sampler.gpus())
                    && gpus.iter().any(|gpu| gpu.used_bytes >= held)
                {
                    return (held, gpus);
                }
            }
        };
        let (held, gpus) = tokio::time::timeout(Duration::from_secs(60), seen).await.expect("the driver lists it");
        assert!(held > 1 << 30, "PyTorch holds a GiB and its context: {held}");
        assert_eq!(visible_gpus().len(), gpus.len(), "{gpus:?}");
        assert!(gpus.iter().all(|gpu| gpu.uuid.starts_with("GPU-") && gpu.used_bytes <= gpu.memory_bytes), "{gpus:?}");
        eprintln!("process {process}: {held} bytes; {gpus:?}");
    }
}
