//! Grades findings against what a case expects.

use std::collections::BTreeSet;

use serde_json::Value;

/// Words that name the same thing in a finding.
const ALIASES: [(&str, &[&str]); 8] = [
    ("memlock", &["memlock", "locked_memory", "pinned"]),
    ("/dev/shm", &["/dev/shm", "shared_memory"]),
    ("/dev/infiniband", &["/dev/infiniband", "device_nodes", "uverbs"]),
    ("GPUDirect", &["gpudirect", "gpu_direct", "peermem"]),
    ("nofile", &["nofile", "descriptors", "ulimit -n"]),
    ("RoCE", &["roce", "container"]),
    ("NCCL", &["nccl"]),
    ("MTU", &["mtu"]),
];

/// What a checker says.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) severity: String,
    pub(crate) about: String,
    pub(crate) found: String,
    pub(crate) fix: String,
}

/// How well an expectation is met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Grade {
    Hit,
    /// What the nearest finding lacks.
    Weak(Vec<String>),
    Missed,
}

/// The grades of a case.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// The subject of each expectation, with its grade.
    pub(crate) expected: Vec<(String, Grade)>,
    pub(crate) false_alarms: BTreeSet<String>,
}

impl Verdict {
    pub(crate) fn is_good(&self) -> bool {
        self.false_alarms.is_empty() && self.expected.iter().all(|(_, grade)| *grade == Grade::Hit)
    }
}

impl Said {
    /// Reads a finding of `rgym doctor --json`.
    pub(crate) fn of(finding: &Value) -> Self {
        let first = |names: &[&str]| {
            let texts = names.iter().filter_map(|name| finding.get(name).and_then(Value::as_str));
            texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default().to_owned()
        };
        let severity = first(&["severity", "status"]).to_lowercase();
        Self {
            severity: if severity.is_empty() { "ok".to_owned() } else { severity },
            about: first(&["about", "topic", "variable"]),
            found: first(&["found", "message"]),
            fix: first(&["fix"]),
        }
    }

    fn rank(&self) -> u32 {
        rank(&self.severity)
    }

    fn names(&self, about: &str) -> bool {
        let text = format!("{} {} {}", self.about, self.found, self.fix).to_lowercase();
        let aliases = ALIASES.iter().find(|(name, _)| *name == about);
        match aliases {
            Some((_, words)) => words.iter().any(|word| text.contains(word)),
            None => text.contains(&about.to_lowercase()),
        }
    }

    /// Returns what an expectation asks for and the finding lacks.
    fn lacks(&self, expected: &Value) -> Vec<String> {
        let lacking = |key: &str, text: &str| -> Vec<String> {
            let wanted = expected[key].as_array().unwrap().iter();
            wanted.filter(|wanted| !has(text, wanted)).map(|wanted| format!("{key} {wanted}")).collect()
        };
        let mut lacks = lacking("says", &format!("{} {}", self.about, self.found));
        lacks.extend(lacking("fix", &self.fix));
        let wanted = expected["severity"].as_str().unwrap();
        if self.rank() < rank(wanted) {
            lacks.push(format!("severity {}, not {wanted}", self.severity));
        }
        lacks
    }
}

/// Grades what a checker said about a case.
pub(crate) fn grade(case: &Value, findings: &[Said]) -> Verdict {
    let expectations = case["expected"].as_array().unwrap();
    let about = |expected: &Value| expected["about"].as_str().unwrap().to_owned();
    let graded = |expected: &Value| (about(expected), grade_one(expected, findings));
    let expected = expectations.iter().map(graded).collect();
    let wanted = expectations.iter().filter(|expected| expected["severity"] != "ok").map(about);
    let may = case.get("may").and_then(Value::as_array).into_iter().flatten();
    let allowed: Vec<String> = wanted.chain(may.map(|about| about.as_str().unwrap().to_owned())).collect();
    let mut false_alarms = BTreeSet::new();
    for rule in case["must_not"].as_array().unwrap() {
        let about = rule["about"].as_str().unwrap();
        for finding in findings {
            let level = match finding.rank() {
                0 => continue,
                1 => "warning",
                _ => "error",
            };
            let is_forbidden = finding.severity != "missing"
                && has_level(&rule["severity"], level)
                && (about == "*" || finding.names(about))
                && !allowed.iter().any(|about| finding.names(about));
            if is_forbidden {
                false_alarms.insert(format!("{}: {} {}", finding.severity, finding.about, finding.found));
            }
        }
    }
    Verdict { expected, false_alarms }
}

fn grade_one(expected: &Value, findings: &[Said]) -> Grade {
    let about = expected["about"].as_str().unwrap();
    let candidates = findings.iter().filter(|finding| finding.names(about));
    if rank(expected["severity"].as_str().unwrap()) == 0 {
        // It may be mentioned, and must not be an alarm.
        let is_loud = |finding: &Said| finding.rank() > 0 && finding.severity != "missing";
        return if candidates.clone().any(is_loud) { Grade::Missed } else { Grade::Hit };
    }
    let loud = candidates.filter(|finding| finding.rank() > 0);
    match loud.map(|finding| finding.lacks(expected)).min_by_key(Vec::len) {
        None => Grade::Missed,
        Some(lacks) if lacks.is_empty() => Grade::Hit,
        Some(lacks) => Grade::Weak(lacks),
    }
}

/// Every severity that is not known is an alarm.
fn rank(severity: &str) -> u32 {
    match severity {
        "ok" | "not_needed" | "info" | "note" | "skip" | "skipped" => 0,
        "missing" | "error" | "fail" | "failed" => 2,
        _ => 1,
    }
}

/// Looks for a word, or for one of several, ignoring case.
fn has(text: &str, wanted: &Value) -> bool {
    let text = text.to_lowercase();
    let contains = |word: &Value| text.contains(&word.as_str().unwrap().to_lowercase());
    wanted.as_array().map_or_else(|| contains(wanted), |words| words.iter().any(contains))
}

fn has_level(levels: &Value, level: &str) -> bool {
    levels.as_array().map_or_else(|| levels == level, |levels| levels.iter().any(|one| one == level))
}
