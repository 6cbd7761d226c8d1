//! The checks that need a GPU. Each prints one line of JSON: `{"check":"g1","result":"passed"|"failed"|"not run",…}`, with the reason unless it passed.
//!
//! The tier `gpu` runs [`all_checks`], with the libraries of `GYM_NCCL_WHEELS`. The gate runs the same code over the library that answers as NCCL and CUDA's
//! driver, with `GYM_GPU_FAKE`, which no check passes without. Each check is a process group of its own with a deadline, so that one that hangs has failed.
#![allow(clippy::unwrap_used)]

mod checks;
#[path = "../fake_nccl/mod.rs"]
mod fake_nccl;
mod ranks;

use std::process::Stdio;
use std::time::Duration;

use gym_transport_rdma::nccl::cuda::CudaDevice;
use gym_transport_rdma::nccl::{LoadOptions, NcclOptions};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value, json};
use tokio::process::Command;
use tokio::time::timeout;

/// The check that a child process makes.
const CHECK: &str = "GYM_GPU_CHECK";
/// Allows the library of the tests, and makes the checks small.
const FAKE: &str = "GYM_GPU_FAKE";
const NCCL: &str = "GYM_NCCL_LIBRARY";

/// Why a check has not passed.
#[derive(Debug)]
pub(crate) enum Failure {
    Failed(String),
    NotRun(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// What a check has measured, an object.
pub(crate) type Outcome = Result<Value, Failure>;

/// Returns the text of any error.
#[allow(clippy::needless_pass_by_value)] // For `map_err`.
pub(crate) fn text(error: impl ToString) -> String {
    error.to_string()
}

pub(crate) fn is_fake() -> bool {
    std::env::var_os(FAKE).is_some()
}

/// Returns the first number with a GPU, the second one over the library of the tests.
pub(crate) fn by_size<T>(on_a_gpu: T, over_the_fake: T) -> T {
    if is_fake() { over_the_fake } else { on_a_gpu }
}

/// Opens the GPU. Its absence is no failure.
pub(crate) fn device() -> Result<CudaDevice, Failure> {
    let device = CudaDevice::open(&LoadOptions::default(), 0).map_err(|error| Failure::NotRun(error.to_string()))?;
    if device.name().map_err(text)? == "fake GPU" && !is_fake() {
        return Err(Failure::NotRun("the library of CUDA's driver is that of the tests".to_owned()));
    }
    Ok(device)
}

pub(crate) fn options() -> NcclOptions {
    let mut options = NcclOptions::default();
    // NCCL allows it by a variable, which only the checks with two ranks set.
    options.share_gpu = true;
    options
}

/// A check in a process of its own.
struct Check {
    name: &'static str,
    limit: Duration,
    variables: Vec<(&'static str, String)>,
}

impl Check {
    fn new(name: &'static str, seconds: u64) -> Self {
        Self { name, limit: Duration::from_secs(seconds), variables: Vec::new() }
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// Runs it, and returns its line.
    async fn line(&self) -> Value {
        let outcome = self.outcome().await.unwrap_or_else(|why| json!({ "result": "failed", "reason": why }));
        let mut line = Map::from_iter([("check".to_owned(), self.name.into())]);
        line.extend(self.variables.iter().map(|(name, value)| ((*name).to_owned(), value.as_str().into())));
        line.extend(outcome.as_object().cloned().unwrap_or_default());
        Value::Object(line)
    }

    async fn outcome(&self) -> Result<Value, String> {
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.args(["--ignored", "--exact", "--nocapture", "one_check"]).env(CHECK, self.name);
        command.envs(self.variables.iter().map(|(name, value)| (*name, value.as_str())));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(text)?;
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let output = timeout(self.limit, child.wait_with_output()).await;
        // Also what it has left behind, such as a rank that is stopped.
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        let output = output.map_err(|_| format!("it has not ended after {} s", self.limit.as_secs()))?.map_err(text)?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        match out.lines().rev().find_map(|line| line.strip_prefix("outcome ")) {
            Some(line) => serde_json::from_str(line).map_err(text),
            None => {
                let last = err.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it has printed nothing");
                Err(format!("it has ended without an outcome, {}: {last}", output.status))
            }
        }
    }
}

/// The body of a child process.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs in a child process"]
async fn one_check() {
    let Ok(check) = std::env::var(CHECK) else { return };
    let outcome = match check.as_str() {
        "g1" => checks::driver_and_versions(),
        "g2" => checks::one_rank_and_a_wrong_magic().await,
        "g3" => checks::every_operation_of_one_rank().await,
        "g4" => ranks::two_ranks_on_one_gpu().await,
        "g5" => ranks::a_rank_is_lost().await,
        "g6" => checks::aborts_give_memory_back().await,
        "rank" => return ranks::rank().await.unwrap(),
        "panics" => panic!("as it should"),
        _ => std::future::pending().await,
    };
    let mut line = match outcome {
        Ok(measured) => measured,
        Err(Failure::Failed(why)) => return println!("\noutcome {}", json!({ "result": "failed", "reason": why })),
        Err(Failure::NotRun(why)) => return println!("\noutcome {}", json!({ "result": "not run", "reason": why })),
    };
    line["result"] = "passed".into();
    println!("\noutcome {line}");
}

/// Returns all checks: the one of configurations with each library, the others with the last one.
fn all(libraries: &[String]) -> Vec<Check> {
    let newest = libraries.last().map_or("", String::as_str);
    let with = |check: Check| if newest.is_empty() { check } else { check.with(NCCL, newest) };
    let mut checks = vec![with(Check::new("g1", 60))];
    match libraries {
        [] => checks.push(Check::new("g2", 120)),
        libraries => checks.extend(libraries.iter().map(|library| Check::new("g2", 120).with(NCCL, library))),
    }
    checks.push(with(Check::new("g3", 180)));
    let two_ranks = |name, seconds| with(Check::new(name, seconds)).with("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    checks.push(two_ranks("g4", 180));
    let over_sockets = [("NCCL_NET", "Socket"), ("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")];
    checks.push(over_sockets.into_iter().fold(two_ranks("g4", 180), |check, (name, value)| check.with(name, value)));
    checks.push(two_ranks("g5", 180));
    checks.push(with(Check::new("g6", 300)));
    checks
}

/// One after the other, because they share the GPU.
#[tokio::test]
#[ignore = "needs a GPU; the tier `gpu` runs it"]
async fn all_checks() {
    let libraries = std::env::var("GYM_NCCL_WHEELS").unwrap_or_default();
    let libraries: Vec<String> = libraries.split(':').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    let mut failed = Vec::new();
    println!();
    for check in all(&libraries) {
        let line = check.line().await;
        println!("{line}");
        if line["result"] == "failed" {
            failed.push(line);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

fn over_the_fake(check: Check) -> Check {
    let (nccl, cuda) = fake_nccl::libraries();
    let [nccl, cuda] = [nccl, cuda].map(|path| path.display().to_string());
    check.with(NCCL, &nccl).with("GYM_CUDA_LIBRARY", &cuda)
}

#[tokio::test]
async fn all_checks_pass_over_a_library_without_a_gpu() {
    let checks = all(&[]).into_iter().map(|check| over_the_fake(check).with(FAKE, "1"));
    let lines = futures_util::future::join_all(checks.map(async |check| check.line().await)).await;
    for line in lines {
        println!("{line}");
        assert_eq!(line["result"], "passed", "{line}");
    }
}

#[tokio::test]
async fn a_check_without_a_gpu_is_not_run_and_one_that_ends_or_hangs_has_failed() {
    let without = |name| async move {
        over_the_fake(Check::new(name, 60)).with(FAKE, "1").with("FAKE_NCCL_DEVICES", "0").line().await
    };
    for name in ["g1", "g2", "g3", "g4", "g5", "g6"] {
        let line = without(name).await;
        assert_eq!((&line["check"], &line["result"]), (&name.into(), &"not run".into()), "{line}");
        assert!(line["reason"].as_str().unwrap().contains("cuDeviceGet failed with code 101"), "{line}");
    }
    let line = over_the_fake(Check::new("g1", 60)).line().await;
    assert_eq!(
        (&line["result"], &line["reason"]),
        (&"not run".into(), &"the library of CUDA's driver is that of the tests".into())
    );
    let line = Check::new("g1", 60).with("GYM_CUDA_LIBRARY", "/no/such").line().await;
    assert!(line["result"] == "not run" && line["reason"].as_str().unwrap().contains("docker: --gpus all"), "{line}");
    let line = Check::new("panics", 60).line().await;
    assert!(line["result"] == "failed" && line["reason"].as_str().unwrap().contains("without an outcome"), "{line}");
    let line = Check::new("hangs", 1).line().await;
    assert_eq!((&line["result"], &line["reason"]), (&"failed".into(), &"it has not ended after 1 s".into()));
}

/// Checks that find a fault say so: a sum that NCCL refuses, a version that is too old, an abort that hangs.
#[tokio::test]
async fn a_check_that_finds_a_fault_has_failed() {
    for (name, variable, value, reason) in [
        ("g1", "FAKE_NCCL_VERSION", "21805", "its version is 2.18.5"),
        ("g2", "FAKE_NCCL_ANY_MAGIC", "1", "a wrong magic is accepted"),
        ("g3", "FAKE_NCCL_WRONG", "3", "all_gather of"),
        ("g4", "FAKE_NCCL_FAIL", "3:2", "code 2"),
        ("g6", "FAKE_NCCL_LEAKS", "1", "of memory is free after"),
    ] {
        let line = over_the_fake(Check::new(name, 120)).with(FAKE, "1").with(variable, value).line().await;
        assert!(line["result"] == "failed" && line["reason"].as_str().unwrap().contains(reason), "{line}");
    }
}
