//! The checks of a worker's start: a pure function of a machine, so that a recorded one is judged as the one that runs.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use gym_client::transport::rdma::probe::machine::{Loaded, Machine};
use gym_client::transport::rdma::probe::{Finding as Probed, Probe, Status, Topic};
use gym_client::transport::rdma::tuning::{self, Severity};

use super::asked::Asked;
use crate::cli::args::options::ChecksMode;
use crate::cli::exit::Failure;

/// The report of the checks: lines in their order, and the failures that end the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StartReport {
    pub(super) lines: Vec<String>,
    pub(super) warnings: Vec<String>,
    pub(super) failures: Vec<String>,
}

impl StartReport {
    /// Runs the checks. Without a request only what is wrong is told, as warnings.
    pub(super) fn of(machine: &dyn Machine, asked: &Asked, mode: ChecksMode) -> Self {
        let mut report = Self::default();
        if mode == ChecksMode::Off {
            return report;
        }
        let tuned = tuning::judge(machine);
        if !asked.is_nothing() {
            report.probe(&Probe::of(machine, &Loaded::default()), asked);
        }
        for finding in &tuned {
            let fails = finding.severity == Severity::Error && is_asked(&finding.about, asked);
            let text = said(&finding.about, &finding.found, &finding.because, &finding.fix);
            report.add(fails, finding.severity == Severity::Ok, text);
        }
        if !asked.is_nothing() && tuned.is_empty() {
            report.lines.push("settings ok".to_owned());
        }
        if mode == ChecksMode::Warn {
            report.warnings.splice(0..0, std::mem::take(&mut report.failures));
        }
        report
    }

    fn add(&mut self, fails: bool, is_ok: bool, text: String) {
        match (fails, is_ok) {
            (true, _) => self.failures.push(text),
            (_, true) => self.lines.push(text),
            _ => self.warnings.push(text),
        }
    }

    /// Takes what is asked for from the state of the machine.
    fn probe(&mut self, probe: &Probe, asked: &Asked) {
        let mut told = BTreeSet::new();
        for (topic, why) in required(asked) {
            let Some(finding) = probe.finding(topic) else { continue };
            // What a rule about settings says is told below.
            if !finding.because.is_empty() || !told.insert(name(topic)) {
                continue;
            }
            let Request { by, needs } = why;
            match finding.status {
                Status::Ok => self.lines.push(format!("{} ok: {}", name(topic), finding.found)),
                // The recording lacks it, or nothing needs it.
                Status::NotNeeded => {}
                _ if needs == Needs::Nothing => self.lines.push(format!("{}: {}", name(topic), finding.found)),
                status => {
                    let fails = matches!(status, Status::Missing | Status::Error) || needs == Needs::Whole;
                    self.add(fails, false, of_topic(finding, &by));
                }
            }
        }
    }

    /// Returns the lines for a person, without the failures.
    pub(super) fn said(&self) -> impl Iterator<Item = String> {
        let lines = self.lines.iter().map(|line| format!("checks: {line}"));
        lines.chain(self.warnings.iter().map(|warning| format!("checks: warning: {warning}")))
    }

    /// Returns the end of the start, if a check has failed.
    pub(super) fn failure(&self) -> Option<Failure> {
        if self.failures.is_empty() {
            return None;
        }
        let count = self.failures.len();
        let mut text = format!(
            "the checks have found {count} error{} in what the configuration or the environment of this worker asks for",
            if count == 1 { "" } else { "s" }
        );
        for failure in &self.failures {
            // Writing to a string cannot fail.
            let _ = write!(text, "\n{failure}");
        }
        text += "\n  note: --checks warn starts the worker all the same, and --checks off looks at nothing";
        Some(Failure::Usage(text))
    }
}

fn said(about: &str, found: &str, because: &str, fix: &str) -> String {
    let fix = if fix.is_empty() { String::new() } else { format!("\n  fix: {fix}") };
    format!("{about}: {}{fix}", tuning::with_reason(found, because))
}

fn of_topic(finding: &Probed, by: &str) -> String {
    let because = format!("asked for by {by}");
    let mut fix = finding.fix.clone().unwrap_or_default();
    if finding.topic == Topic::Gpu && by.starts_with("NCCL_") {
        let _ = write!(fix, "; or unset these variables for a worker without GPUs");
    }
    said(name(finding.topic), &finding.found, &because, &fix)
}

/// How much of a topic a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// A person wants to know it; nothing fails without it.
    Nothing,
    /// It must be there.
    Presence,
    /// It must be there, and work.
    Whole,
}

/// A request for a topic.
struct Request {
    by: String,
    needs: Needs,
}

/// Returns what the requests need of the machine, in the order of the seed: GPU, RDMA, libraries, memory.
fn required(asked: &Asked) -> Vec<(Topic, Request)> {
    let mut all = Vec::new();
    let mut add = |topic, by: &Option<String>, needs| {
        if let Some(by) = by.clone() {
            all.push((topic, Request { by, needs }));
        }
    };
    let nccl = asked.for_nccl();
    add(Topic::Gpu, &asked.gpus, Needs::Presence);
    add(Topic::Gpu, &nccl, Needs::Presence);
    add(Topic::Nccl, &asked.nccl, Needs::Presence);
    // A Python package may bring its own, in a folder that only Python knows.
    add(Topic::Nccl, &nccl, Needs::Nothing);
    let rdma = asked.transport.as_ref().filter(|name| *name == "rdma").map(|name| format!("require_transport: {name}"));
    for topic in
        [Topic::RdmaDevices, Topic::DeviceNodes, Topic::Container, Topic::RoceGid, Topic::LockedMemory, Topic::Verbs]
    {
        add(topic, &rdma, Needs::Whole);
    }
    add(Topic::Ucx, &rdma, Needs::Whole);
    let of_nccl = asked.for_rdma_of_nccl();
    for topic in [Topic::RdmaDevices, Topic::DeviceNodes, Topic::Verbs] {
        add(topic, &of_nccl, Needs::Presence);
    }
    // Its details are judged with the settings.
    add(Topic::LockedMemory, &of_nccl, Needs::Nothing);
    let transport = asked.transport.as_ref().and_then(|_| asked.for_ucx());
    add(Topic::Ucx, &transport, Needs::Presence);
    add(Topic::SharedMemory, &transport, Needs::Presence);
    add(Topic::SharedMemory, &nccl, Needs::Nothing);
    all
}

/// Returns `true` if an error of this subject is one of what is asked for.
fn is_asked(about: &str, asked: &Asked) -> bool {
    if asked.variables.contains(about) {
        return true;
    }
    let (nccl, ucx) = (asked.for_nccl().is_some(), asked.for_ucx().is_some());
    match about {
        "/dev/shm" => nccl || asked.gpus.is_some(),
        _ if about.starts_with("UCX_") => ucx,
        _ if about.starts_with("NCCL") || about.contains("nccl.conf") => nccl,
        // Of other programs.
        _ if about.starts_with("GLOO_") || about.starts_with("VLLM_") || about.starts_with("RAY_") => false,
        _ => nccl || ucx,
    }
}

fn name(topic: Topic) -> &'static str {
    match topic {
        Topic::RdmaDevices => "RDMA",
        Topic::DeviceNodes => "device nodes",
        Topic::Container => "container",
        Topic::RoceGid => "RoCE address",
        Topic::LockedMemory => "memlock",
        Topic::Verbs => "verbs",
        Topic::Ucx => "UCX",
        Topic::Gpu => "GPU",
        Topic::Nccl => "NCCL",
        Topic::GpuDirect => "GPUDirect",
        Topic::SharedMemory => "/dev/shm",
        _ => "machine",
    }
}
