//! Runs cases beside each other and waits for all that they started.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{WaitOptions, WaitStatus, wait};
use tempfile::TempDir;

use crate::cases::Case;
use crate::process::{self, MARK};

/// Time between two looks at the processes.
const INTERVAL: Duration = Duration::from_millis(3);

/// What all cases did.
pub(crate) struct Outcome {
    pub(crate) results: Vec<CaseResult>,
    /// What is on the machine that was not there before.
    pub(crate) remains: Vec<String>,
    pub(crate) took: Duration,
}

pub(crate) struct CaseResult {
    pub(crate) name: String,
    pub(crate) verdict: Verdict,
    pub(crate) took: Duration,
    /// File with all that it printed.
    pub(crate) output: PathBuf,
}

pub(crate) enum Verdict {
    Passed,
    /// Why it cannot run here.
    NotRun(String),
    Failed(String),
}

impl Outcome {
    pub(crate) fn passed(&self) -> bool {
        self.remains.is_empty() && !self.results.iter().any(|case| matches!(case.verdict, Verdict::Failed(_)))
    }

    /// Returns the names of the cases that ran.
    pub(crate) fn ran(&self) -> BTreeSet<String> {
        let ran = self.results.iter().filter(|case| !matches!(case.verdict, Verdict::NotRun(_)));
        ran.map(|case| case.name.clone()).collect()
    }
}

/// A case under way.
struct Running<'a> {
    case: &'a Case,
    pid: i32,
    mark: String,
    output: PathBuf,
    began: Instant,
    /// When and how its own process ended.
    ended: Option<(Instant, WaitStatus)>,
    /// Why it was killed.
    hung: Option<String>,
    /// `true` if the last look after its end found no process.
    clear: bool,
    /// Its folder for temporary files.
    _folder: TempDir,
}

/// Runs all cases: first those that compute, as many as the machine has cores, then those that wait, so many at a time. None waits beside one that
/// computes.
pub(crate) fn run(cases: &[Case], jobs: usize, ending: Duration, outputs: &Path) -> Result<Outcome> {
    let began = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut results = Vec::new();
    let total = cases.len();
    let (computing, waiting): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(|case| case.cores > 0);
    for (cases, room) in [(computing, cores), (waiting, jobs)] {
        // The longest first, so that none is left alone at the end.
        let mut queue = cases;
        queue.sort_by_key(|case| (case.limit, std::cmp::Reverse(&case.name)));
        let mut running: BTreeMap<i32, Running<'_>> = BTreeMap::new();
        while !queue.is_empty() || !running.is_empty() {
            let needs = |case: &Case| case.cores.clamp(1, room);
            let used =
                |running: &BTreeMap<i32, Running<'_>>| running.values().map(|one| needs(one.case)).sum::<usize>();
            while let Some(case) = queue.pop_if(|case| used(&running) + needs(case) <= room) {
                let number = results.len() + running.len();
                let started = start(case, number, outputs)?;
                running.insert(started.pid, started);
            }
            reap(&mut running);
            let mut over = Vec::new();
            let known: BTreeSet<i32> = running.keys().copied().collect();
            for (pid, one) in &mut running {
                if let Some(verdict) = look_at(one, &known, ending) {
                    over.push((*pid, verdict));
                }
            }
            for (pid, verdict) in over {
                let one = running.remove(&pid).context("it was just there")?;
                let result =
                    CaseResult { name: one.case.name.clone(), verdict, took: one.began.elapsed(), output: one.output };
                if let Verdict::Failed(why) = &result.verdict {
                    println!("FAILED {}: {}", result.name, why.lines().next().unwrap_or_default());
                }
                results.push(result);
            }
            if process::is_interrupted() {
                running.values().flat_map(|one| process::of_case(&one.mark, |_| false).pids).for_each(process::kill);
                bail!("interrupted after {} of {total} cases", results.len());
            }
            std::thread::sleep(INTERVAL);
        }
    }
    results.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Outcome { results, remains: Vec::new(), took: began.elapsed() })
}

fn start<'a>(case: &'a Case, number: usize, outputs: &Path) -> Result<Running<'a>> {
    let folder = tempfile::Builder::new().prefix("gym-").tempdir().context("a folder for temporary files")?;
    let name = case.name.replace(['/', ' '], "-");
    let output = outputs.join(format!("{}.log", name.chars().take(200).collect::<String>()));
    let file = File::create(&output).with_context(|| output.display().to_string())?;
    let mark = format!("{}-{number}", std::process::id());
    let mut command = Command::new(&case.program);
    command.args(&case.arguments).current_dir(&case.folder).env("CARGO_MANIFEST_DIR", &case.folder).env(MARK, &mark);
    // What a program writes for all processes of a user is this case's alone.
    command.env("TMPDIR", folder.path()).env("XDG_RUNTIME_DIR", folder.path());
    command.env("GYM_VALUES_DIR", folder.path().join("values"));
    // Signals to a group of processes reach this case alone.
    command.process_group(0).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let child = command.spawn().with_context(|| format!("start {}", case.program.display()))?;
    let pid = child.id().cast_signed();
    Ok(Running {
        case,
        pid,
        mark,
        output,
        began: Instant::now(),
        ended: None,
        hung: None,
        clear: false,
        _folder: folder,
    })
}

/// Notes which processes have ended. Others are orphans of a case, which this process has adopted.
fn reap(running: &mut BTreeMap<i32, Running<'_>>) {
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if let Some(one) = running.get_mut(&pid.as_raw_pid()) {
            one.ended = Some((Instant::now(), status));
        }
    }
}

/// Returns the verdict on a case if it is over. Kills it at its limit, and what outlives it for longer than `ending`. `known` are the
/// processes of all cases under way.
fn look_at(one: &mut Running<'_>, known: &BTreeSet<i32>, ending: Duration) -> Option<Verdict> {
    let Some((at, status)) = one.ended else {
        if one.began.elapsed() > one.case.limit && one.hung.is_none() {
            let processes = process::of_case(&one.mark, |pid| known.contains(&pid)).pids;
            one.hung = Some(process::autopsy(&processes));
            processes.into_iter().for_each(process::kill);
            process::kill(one.pid);
        }
        return None;
    };
    let processes = process::of_case(&one.mark, |pid| known.contains(&pid));
    // Two looks in a row: a process that was just forked may be in no list yet.
    let clear = processes.pids.is_empty() && !processes.may_have_more;
    let was_clear = std::mem::replace(&mut one.clear, clear);
    if !(clear && was_clear) && one.hung.is_none() && at.elapsed() < ending {
        return None;
    }
    let left = processes.pids;
    let descriptions: Vec<String> = left.iter().map(|pid| process::describe(*pid)).collect();
    left.into_iter().for_each(process::kill);
    let printed = || String::from_utf8_lossy(&fs::read(&one.output).unwrap_or_default()).into_owned();
    if let Some(autopsy) = &one.hung {
        return Some(Verdict::Failed(format!("killed at its limit of {} s\n{autopsy}", one.case.limit.as_secs())));
    }
    if status.exit_status() != Some(0) {
        let how = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "an unknown end".to_owned(),
        };
        return Some(Verdict::Failed(how));
    }
    if !descriptions.is_empty() {
        return Some(Verdict::Failed(format!("its processes outlive it\n{}\n", descriptions.join("\n"))));
    }
    let reason = printed().lines().find_map(|line| line.split_once("NOT RUN: ").map(|(_, reason)| reason.to_owned()));
    Some(reason.map_or(Verdict::Passed, Verdict::NotRun))
}
