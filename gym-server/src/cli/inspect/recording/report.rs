//! Records this machine, replays others, and reports both.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use gym_client::transport::rdma::probe::machine::{Live, Machine, Recorder, Recording, Redactor};
use gym_client::transport::rdma::probe::{Probe, Status, load};
use gym_client::transport::rdma::tuning;
use gym_core::World;
use serde::Serialize;
use serde_json::Value;

use crate::cli::args::options::DoctorArgs;
use crate::cli::console;
use crate::cli::exit::{FAULTY, Failure, Outcome};
use crate::cli::inspect::recording::machines::{Replayed, machines};

/// The name under which machines are compared.
const ALL: &str = "all";

/// A finding about a replayed machine.
#[derive(Debug, Serialize)]
struct Told {
    machine: String,
    /// The subject.
    about: String,
    /// `ok`, `not_needed`, `missing`, `warning` or `error`.
    severity: &'static str,
    found: String,
    fix: Option<String>,
    /// The source of the decision.
    because: String,
}

/// A machine that was judged.
#[derive(Debug, Serialize)]
struct Judged {
    name: String,
    path: PathBuf,
    /// When and by which version it was recorded; null for a folder.
    taken: Option<String>,
    program: Option<String>,
    redacted: bool,
    summary: String,
    ports: Value,
    /// Texts that the recording lacks because of their size.
    cut: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Replay {
    machines: Vec<Judged>,
    findings: Vec<Told>,
}

pub(in crate::cli::inspect) async fn record(file: &Path, args: &DoctorArgs) -> Outcome {
    // Before the machine is asked, so that the mistake shows at once.
    if file.exists() && !args.overwrite {
        let place = file.display();
        return Err(Failure::Usage(format!("{place} exists; fix: name another file, or add --overwrite")));
    }
    let world = World::real();
    let taken = rfc_3339(world.machine_time().as_secs());
    // The checks read files, and load NVIDIA's libraries: not for a thread that others wait for.
    let recording = world.blocking(move || take(&taken)).await?;
    let recording = match &args.redact {
        None => recording,
        Some(word) => {
            let word = if word.is_empty() { world.unique_id() } else { word.clone() };
            Redactor::new(&recording, &word).redact(&recording)
        }
    };
    let json = recording.to_json();
    write(file, &json, args.overwrite)?;
    let text =
        if args.json { contents_json(file, &recording, json.len()) } else { contents(file, &recording, json.len()) };
    console::print(&text);
    Ok(ExitCode::SUCCESS)
}

fn take(taken: &str) -> Recording {
    let recorder = Recorder::new(Live::new());
    let loaded = load(recorder.machine());
    // What the checks ask is what is noted.
    let _ = Probe::of(&recorder, &loaded);
    let _ = tuning::judge(&recorder);
    recorder.finish(env!("CARGO_PKG_VERSION"), taken, loaded)
}

/// Writes the whole file or nothing.
fn write(file: &Path, json: &str, overwrite: bool) -> Result<(), Failure> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = tempfile::NamedTempFile::new_in(folder).and_then(|mut temporary| {
        temporary.write_all(json.as_bytes())?;
        let kept = if overwrite { temporary.persist(file) } else { temporary.persist_noclobber(file) };
        kept.map(drop).map_err(|error| error.error)
    });
    let fix = "name a file in a folder that exists and that you may write to";
    written.map_err(|error| Failure::Failed(format!("cannot write {}: {error}; fix: {fix}", file.display())))
}

fn contents(file: &Path, recording: &Recording, bytes: usize) -> String {
    let host = recording.host().unwrap_or_else(|| "this machine".to_owned());
    let mut text = format!("recorded {host} in {} ({} KiB)\n", file.display(), bytes.div_ceil(1024));
    for (kind, count) in recording.contents() {
        let _ = write!(text, "\n{count:>6}  {kind}");
    }
    for cut in &recording.cut {
        let _ = write!(text, "\nleft out, because it is long: {} ({} KiB)", cut.path, cut.bytes.div_ceil(1024));
    }
    text += if recording.redacted {
        "\n\nNames of hosts and users, addresses and GUIDs are replaced. Names of devices and interfaces, versions and settings are not."
    } else {
        "\n\nIt has names and addresses of this machine: --redact replaces them. Of the variables it has those of this field, with secrets masked."
    };
    let _ = write!(text, "\nJudge it: {} doctor --replay {}", console::program(), file.display());
    text
}

fn contents_json(file: &Path, recording: &Recording, bytes: usize) -> String {
    let contents: serde_json::Map<String, Value> =
        recording.contents().into_iter().map(|(kind, count)| (kind.replace(' ', "_"), count.into())).collect();
    let report = serde_json::json!({
        "file": file, "bytes": bytes, "redacted": recording.redacted, "contents": contents, "cut": recording.cut,
    });
    format!("{report:#}")
}

pub(in crate::cli::inspect) fn replay(paths: &[PathBuf], json: bool) -> Outcome {
    let replay = judge(machines(paths)?);
    let text = if json {
        serde_json::to_string_pretty(&replay).map_err(|error| Failure::Failed(error.to_string()))?
    } else {
        replay.text()
    };
    console::print(&text);
    let is_faulty = replay.findings.iter().any(|finding| finding.severity == "error");
    Ok(if is_faulty { ExitCode::from(FAULTY) } else { ExitCode::SUCCESS })
}

fn judge(replayed: Vec<Replayed>) -> Replay {
    let mut replay = Replay { machines: Vec::new(), findings: Vec::new() };
    let nodes: Vec<(String, &dyn Machine)> =
        replayed.iter().map(|machine| (machine.name.clone(), machine.machine())).collect();
    if nodes.len() > 1 {
        replay.findings.extend(tuning::compare(&nodes).into_iter().map(|finding| Told::tuned(ALL, finding)));
    }
    drop(nodes);
    let several = replayed.len() > 1;
    for machine in replayed {
        let probe = Probe::of(machine.machine(), machine.loaded());
        let tuned = tuning::judge(machine.machine());
        let mut told = findings(&machine.name, &probe, tuned);
        if several {
            told.iter_mut().for_each(|finding| finding.found = format!("{}: {}", machine.name, finding.found));
        }
        replay.findings.extend(told);
        let recording = machine.recording();
        replay.machines.push(Judged {
            taken: recording.map(|recording| recording.taken.clone()),
            program: recording.map(|recording| recording.program.clone()),
            redacted: recording.is_some_and(|recording| recording.redacted),
            summary: probe.summary,
            ports: serde_json::to_value(&probe.ports).unwrap_or_default(),
            cut: recording.iter().flat_map(|recording| &recording.cut).map(|cut| cut.path.clone()).collect(),
            name: machine.name,
            path: machine.path,
        });
    }
    replay
}

/// Returns the findings of a machine, the gravest first.
fn findings(machine: &str, probe: &Probe, tuned: Vec<tuning::Finding>) -> Vec<Told> {
    let probed = probe.findings.iter().map(|finding| {
        let about = serde_json::to_value(finding.topic).ok();
        let because = if finding.because.is_empty() { finding.topic.source() } else { &finding.because };
        Told {
            machine: machine.to_owned(),
            about: about.and_then(|about| about.as_str().map(str::to_owned)).unwrap_or_default(),
            severity: severity(finding.status),
            found: finding.found.clone(),
            fix: finding.fix.clone(),
            because: because.to_owned(),
        }
    });
    let mut told: Vec<Told> = probed.collect();
    told.extend(probe.beside(tuned).into_iter().map(|finding| Told::tuned(machine, finding)));
    let order = ["error", "warning", "missing"];
    told.sort_by_key(|finding| order.iter().position(|severity| *severity == finding.severity).unwrap_or(order.len()));
    told
}

impl Told {
    fn write(&self, text: &mut String) {
        let severity = self.severity.replace('_', " ");
        let _ = write!(text, "\n{severity:<10}  {:<14}  {}", self.about, self.found);
        if let Some(fix) = &self.fix {
            let _ = write!(text, "\n{:<10}  {:<14}  fix: {fix}", "", "");
        }
        if matches!(self.severity, "warning" | "error") && !self.because.is_empty() {
            let _ = write!(text, "\n{:<10}  {:<14}  because: {}", "", "", self.because);
        }
    }

    fn tuned(machine: &str, finding: tuning::Finding) -> Self {
        Self {
            machine: machine.to_owned(),
            about: finding.about,
            severity: finding.severity.as_str(),
            found: finding.found,
            fix: Some(finding.fix).filter(|fix| !fix.is_empty()),
            because: finding.because,
        }
    }
}

fn severity(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Error => "error",
        Status::Missing => "missing",
        Status::NotNeeded => "not_needed",
    }
}

impl Replay {
    fn text(&self) -> String {
        let mut text = String::new();
        for machine in &self.machines {
            if !text.is_empty() {
                text.push_str("\n\n");
            }
            text.push_str(&machine.name);
            match (&machine.taken, &machine.program) {
                (Some(taken), Some(program)) => {
                    let redacted = if machine.redacted { ", redacted" } else { "" };
                    let _ =
                        write!(text, " ({}, recorded {taken} by version {program}{redacted})", machine.path.display());
                }
                _ => {
                    let _ = write!(text, " ({})", machine.path.display());
                }
            }
            text.push('\n');
            let own = self.findings.iter().filter(|finding| finding.machine == machine.name);
            own.for_each(|finding| finding.write(&mut text));
            for path in &machine.cut {
                let _ = write!(text, "\n{:<10}  {path} is not in the recording, because it is long", "");
            }
            let _ = write!(text, "\n\n{}", machine.summary);
        }
        if self.machines.len() > 1 {
            text += "\n\nall machines, side by side\n";
            let before = text.len();
            self.findings.iter().filter(|finding| finding.machine == ALL).for_each(|finding| finding.write(&mut text));
            if text.len() == before {
                text += "\nnothing differs that must not";
            }
        }
        text
    }
}

/// Writes seconds since the Unix epoch as `2026-11-29T16:20:00Z`.
fn rfc_3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days of the proleptic Gregorian calendar, in years that begin in March (Hinnant, chrono-compatible low-level date algorithms).
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", era * 400 + year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_rfc_3339_says() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc_3339(seconds), text);
        }
    }
}
