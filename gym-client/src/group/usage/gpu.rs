//! How much GPU memory each process holds, as the driver's own tool tells it.
//!
//! `nvidia-smi` comes with every driver, and asking it needs neither a library nor `unsafe`. It takes 20-500 ms, so it is asked
//! rarely, beside everything else, and only where there are GPUs. Inside a container with process numbers of its own the driver
//! names processes that are not there: then nothing is known, which is not the same as nothing used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use crate::group::usage::devices::visible_gpus;

/// Pause between two questions: what a rank holds changes when models are loaded and freed.
const PERIOD: Duration = Duration::from_secs(5);
/// A driver in trouble keeps its tool waiting for ever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

/// GPU memory by process, in bytes.
type MemoryByProcess = BTreeMap<i32, u64>;

/// Asks in the background for as long as it lives.
#[derive(Debug)]
pub(crate) struct GpuMemoryMeter {
    held: Arc<Mutex<Option<MemoryByProcess>>>,
    _asking: AbortOnDropHandle<()>,
}

impl GpuMemoryMeter {
    /// `None` where there is no GPU or no tool to ask.
    pub(crate) fn start() -> Option<Self> {
        if visible_gpus().is_empty() {
            return None;
        }
        let Some(tool) = tool() else {
            tracing::warn!("there are GPUs but no nvidia-smi on the path: GPU memory of workers is not known");
            return None;
        };
        Some(Self::asking(tool))
    }

    fn asking(tool: PathBuf) -> Self {
        let held = Arc::new(Mutex::new(None));
        let asking = tokio::spawn(ask_on(tool, Arc::clone(&held)));
        Self { held, _asking: AbortOnDropHandle::new(asking) }
    }

    /// GPU memory that these processes hold together, in bytes. `None` when no answer has come yet, or the last question failed,
    /// or the driver knows none of them: it counts processes that use a GPU only.
    pub(crate) fn held_bytes(&self, processes: impl IntoIterator<Item = i32>) -> Option<u64> {
        let held = lock(&self.held);
        let held = held.as_ref()?;
        let known = processes.into_iter().filter_map(|process| held.get(&process));
        known.copied().reduce(u64::saturating_add)
    }
}

fn lock(held: &Mutex<Option<MemoryByProcess>>) -> MutexGuard<'_, Option<MemoryByProcess>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the driver's tool is, if it is on the path.
pub(super) fn tool() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("nvidia-smi")).find(|file| file.is_file())
}

/// Asks until it is aborted.
async fn ask_on(tool: PathBuf, held: Arc<Mutex<Option<MemoryByProcess>>>) {
    let mut tick = tokio::time::interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut complained = false;
    loop {
        tick.tick().await;
        let answer = ask(&tool).await;
        if let Err(error) = &answer
            && !std::mem::replace(&mut complained, true)
        {
            tracing::warn!(tool = %tool.display(), error, "GPU memory of workers is not known");
        }
        *lock(&held) = answer.ok();
    }
}

async fn ask(tool: &Path) -> Result<MemoryByProcess, String> {
    answer(tool, "--query-compute-apps=pid,used_gpu_memory").await.map(|text| read(&text))
}

/// What the tool answers to a query: cells by commas, memory in MiB.
pub(super) async fn answer(tool: &Path, query: &str) -> Result<String, String> {
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

/// Lines of `pid, MiB`. A process on several GPUs has several; `[N/A]`, which virtual machines give, is no number.
fn read(answer: &str) -> MemoryByProcess {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(folder: &Path, text: &str) -> PathBuf {
        let file = folder.join("nvidia-smi");
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).expect("writes");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("is ours");
        file
    }

    #[test]
    fn a_process_on_two_gpus_holds_the_sum_and_what_is_no_number_is_left_out() {
        let held = read("812, 1024\n97, 16\n812, 8\n5, [N/A]\nNo running processes found\n");
        assert_eq!(held, MemoryByProcess::from([(812, 1032 * MIB), (97, 16 * MIB)]));
    }

    #[tokio::test]
    async fn a_rank_holds_what_its_processes_hold_and_a_stranger_is_not_known() {
        let folder = tempfile::tempdir().expect("a folder");
        let tool = script(
            folder.path(),
            "[ \"$1\" = --query-compute-apps=pid,used_gpu_memory ] && echo '7, 3' && echo '8, 4'",
        );
        let meter = GpuMemoryMeter {
            held: Arc::new(Mutex::new(ask(&tool).await.ok())),
            _asking: AbortOnDropHandle::new(tokio::spawn(async {})),
        };
        assert_eq!(meter.held_bytes([7, 8, 9]), Some(7 * MIB));
        assert_eq!(meter.held_bytes([9]), None, "not known is not 0");
    }

    #[tokio::test]
    async fn a_tool_that_fails_says_why() {
        let folder = tempfile::tempdir().expect("a folder");
        let tool = script(folder.path(), "echo 'Failed to initialize NVML' >&2; exit 9");
        let error = ask(&tool).await.expect_err("it failed");
        assert!(error.contains("NVML") && error.contains('9'), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_tool_that_hangs_is_given_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let tool = script(folder.path(), "exec sleep 600");
        assert!(ask(&tool).await.expect_err("it hangs").contains("no answer"));
    }

    #[tokio::test]
    async fn the_meter_asks_by_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let meter = GpuMemoryMeter::asking(script(folder.path(), "echo '7, 3'"));
        let answered = async {
            while meter.held_bytes([7]) != Some(3 * MIB) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), answered).await.expect("an answer");
    }
}
