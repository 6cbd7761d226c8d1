//! The rows of a rollouts file and of its failures file: indexed once, read one at a time, filtered by their labels.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use gym_client::collect::{OutputFiles, fix_of_unopened};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::cli::args::range::RewardRange;
use crate::cli::console;
use crate::cli::exit::Failure;
use crate::head::page::conversation::{Rollout, RowLabel};

/// Maximum bytes of a line that is shown: a row with the token ids of a long episode is some tens of megabytes.
const LINE_BYTES_MAX: u64 = 1 << 30;

/// Names of agents and classes that a message can choose from.
const NAMES_MAX: usize = 100;
/// Bytes of a file that show whether it is text.
const BEGINNING_BYTES: u64 = 4_096;
/// The endings of the names of a collection's other files, with what they have.
const STATISTICS: [(&str, &str); 3] =
    [("_aggregate_metrics", "statistics"), ("_settings", "settings of servers"), ("_statistics", "statistics")];

/// Which rows to show. A row must meet all conditions.
#[derive(Debug, Default)]
pub(super) struct Filter {
    pub(super) task: Option<u64>,
    pub(super) agent: Option<String>,
    pub(super) class: Option<String>,
    pub(super) reward: Option<RewardRange>,
    /// Only failed attempts.
    pub(super) failed: bool,
}

impl Filter {
    fn takes(&self, label: &RowLabel) -> bool {
        self.task.is_none_or(|task| task == label.task)
            && self.agent.as_ref().is_none_or(|agent| *agent == label.agent)
            && self.class.as_ref().is_none_or(|class| Some(class) == label.class.as_ref())
            && self.reward.is_none_or(|range| label.reward.is_some_and(|reward| range.contains(reward)))
            && (!self.failed || label.class.is_some())
    }
}

/// The rows of one or two files that a filter takes.
#[derive(Debug)]
pub(super) struct RolloutFile {
    files: Vec<(PathBuf, File)>,
    rows: Vec<RowPlace>,
    /// The number of rows before the filter.
    pub(super) total: usize,
    /// The properties of the rows before the filter.
    pub(super) seen: Seen,
    /// Lines that are no rows, such as the last one of a file that is being written.
    pub(super) unreadable: Vec<String>,
}

/// The properties of the files' rows, whatever the filter takes.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) agents: BTreeSet<String>,
    pub(super) classes: BTreeSet<String>,
    /// A row has a response, a reward or the class of a failure.
    pub(super) rollouts: bool,
    /// A row has a request, so that it is at least a task.
    pub(super) tasks: bool,
}

/// The keys of a row that show what it is.
#[derive(Deserialize)]
struct RowKeys {
    #[serde(default)]
    reward: Option<IgnoredAny>,
    #[serde(default)]
    response: Option<IgnoredAny>,
    #[serde(default)]
    responses_create_params: Option<IgnoredAny>,
}

impl Seen {
    fn add(&mut self, label: &RowLabel, line: &[u8]) {
        for (names, name) in [(&mut self.agents, Some(&label.agent)), (&mut self.classes, label.class.as_ref())] {
            if let Some(name) = name.filter(|name| !name.is_empty() && !names.contains(*name))
                && names.len() < NAMES_MAX
            {
                names.insert(name.clone());
            }
        }
        self.rollouts |= label.class.is_some() || label.reward.is_some();
        // Known after the first rollout, so that a long file is not read twice.
        if !self.rollouts
            && let Ok(keys) = serde_json::from_slice::<RowKeys>(line)
        {
            self.rollouts = keys.reward.is_some() || keys.response.is_some();
            self.tasks |= keys.responses_create_params.is_some();
        }
    }
}

#[derive(Debug)]
struct RowPlace {
    label: RowLabel,
    file: usize,
    offset: u64,
    bytes: u64,
}

impl RolloutFile {
    /// Opens a file, and its failures file if there is one beside it. Rows are in the order of tasks, repeats and attempts.
    ///
    /// # Errors
    /// `Usage` if a file cannot be read, or no line of it is a JSON object.
    pub(super) fn open(path: &Path, filter: &Filter) -> Result<Self, Failure> {
        let seen = Seen::default();
        let mut file = Self { files: Vec::new(), rows: Vec::new(), total: 0, seen, unreadable: Vec::new() };
        file.add(path, filter)?;
        let failures = OutputFiles::beside(path).failures;
        if failures.is_file() {
            file.add(&failures, filter)?;
        }
        if file.total == 0 && !file.unreadable.is_empty() || file.total > 0 && !file.seen.rollouts && !file.seen.tasks {
            return Err(Failure::Usage(file.no_rollouts(path)));
        }
        file.rows.sort_by_key(|row| (row.label.task, row.label.repeat, row.label.attempt));
        Ok(file)
    }

    /// Says that a file has no rollouts, and what it seems to be.
    fn no_rollouts(&self, path: &Path) -> String {
        let name = path.display();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let statistics = STATISTICS.into_iter().find(|(suffix, _)| stem.ends_with(suffix));
        let what = match (statistics, self.unreadable.first()) {
            (Some((_, what)), _) => format!("{name}: the file has {what}, and no rollouts"),
            (None, Some(_)) if is_binary(path) => format!("{name}: the file is binary"),
            (None, Some(first)) => first.clone(),
            (None, None) => format!("{name}: none of the {} rows is a rollout or a task", self.total),
        };
        let beside = statistics.and_then(|(suffix, _)| {
            let rollouts = path.with_file_name(format!("{}.jsonl", stem.strip_suffix(suffix)?));
            rollouts.is_file().then_some(rollouts)
        });
        match beside {
            Some(rollouts) => {
                format!("{what}\n  fix: its rollouts are in {0}: {1} view {0}", rollouts.display(), console::program())
            }
            None => format!("{what}\n  fix: name a file of rollouts, which `{} collect` writes", console::program()),
        }
    }

    fn add(&mut self, path: &Path, filter: &Filter) -> Result<(), Failure> {
        let unreadable = |error: &io::Error| {
            let otherwise = format!("name a file of rollouts, which `{} collect` writes", console::program());
            let fix = fix_of_unopened(path, error, &otherwise);
            Failure::Usage(format!("read {}: {error}\n  fix: {fix}", path.display()))
        };
        let opened = File::open(path).map_err(|error| unreadable(&error))?;
        let mut lines = BufReader::with_capacity(1 << 18, opened.try_clone().map_err(|error| unreadable(&error))?);
        let (mut line, mut offset, mut number) = (Vec::new(), 0_u64, 0_u64);
        loop {
            line.clear();
            let bytes =
                lines.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(|error| unreadable(&error))?
                    as u64;
            if bytes == 0 {
                break;
            }
            number += 1;
            if !line.trim_ascii().is_empty() {
                let label = match line.trim_ascii_start().first() {
                    Some(b'[') => Err("it is a list".to_owned()),
                    _ => RowLabel::of(&line).map_err(|error| error.to_string()),
                };
                match label {
                    Ok(label) => {
                        self.total += 1;
                        self.seen.add(&label, &line);
                        if filter.takes(&label) {
                            self.rows.push(RowPlace { label, file: self.files.len(), offset, bytes });
                        }
                    }
                    Err(error) => {
                        self.unreadable.push(format!("{}, line {number}: not a JSON object: {error}", path.display()))
                    }
                }
            }
            offset += bytes;
        }
        self.files.push((path.to_owned(), opened));
        Ok(())
    }

    /// Returns the number of rows that the filter takes.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the labels in order.
    pub(super) fn labels(&self) -> impl Iterator<Item = &RowLabel> {
        self.rows.iter().map(|row| &row.label)
    }

    /// Returns the position of a rollout id: that of the rollout if there is one, else that of its first attempt.
    pub(super) fn position(&self, id: &str) -> Option<usize> {
        let rollout = |label: &RowLabel| format!("{}-{}", label.task, label.repeat) == id;
        self.labels().position(|label| label.id() == id).or_else(|| self.labels().position(rollout))
    }

    /// Reads a row.
    ///
    /// # Errors
    /// `Failed` if the file has changed since it was opened.
    pub(super) fn read(&mut self, position: usize) -> Result<Rollout, Failure> {
        let row = &self.rows[position];
        let (path, file) = &mut self.files[row.file];
        let mut line = Vec::new();
        let read = file.seek(SeekFrom::Start(row.offset)).and_then(|_| file.take(row.bytes).read_to_end(&mut line));
        let changed = |error: String| {
            Failure::Failed(format!(
                "read {}: {error}\n  fix: the file may have changed; repeat the command",
                path.display()
            ))
        };
        read.map_err(|error| changed(error.to_string()))?;
        Rollout::of(row.label.clone(), &line).map_err(|error| changed(error.to_string()))
    }
}

/// Returns `true` if a file begins with bytes that no text has.
fn is_binary(path: &Path) -> bool {
    let mut begins = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BEGINNING_BYTES).read_to_end(&mut begins));
    let text = match std::str::from_utf8(&begins) {
        // The last letter may be cut off.
        Err(error) => error.error_len().is_none(),
        Ok(_) => true,
    };
    read.is_ok() && (!text || begins.contains(&0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_rollouts_is_said_to_be_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let open = |name: &str, bytes: &[u8]| {
            std::fs::write(at(name), bytes).unwrap();
            RolloutFile::open(&at(name), &Filter::default())
        };
        let refused = |name: &str, bytes: &[u8]| open(name, bytes).unwrap_err().text().to_owned();
        let statistics = refused("r_aggregate_metrics.json", b"[{\"mean/reward\": 1}]");
        assert!(statistics.contains("the file has statistics, and no rollouts\n  fix: name a file"), "{statistics}");
        std::fs::write(at("r.jsonl"), ROLLOUTS).unwrap();
        let settings = refused("r_settings.json", b"{\"a\": 1}\n");
        assert!(
            settings.contains("settings of servers") && settings.contains("fix: its rollouts are in "),
            "{settings}"
        );
        let binary = refused("binary.jsonl", &[0x1f, 0x8b, 0xff, 0, b'\n', 7]);
        assert!(binary.contains("binary.jsonl: the file is binary\n  fix:"), "{binary}");
        let other = refused("other.jsonl", b"{\"a\": 1}\n{}\n");
        assert!(other.contains("none of the 2 rows is a rollout or a task\n  fix:"), "{other}");
        let tasks = open("tasks.jsonl", b"{\"responses_create_params\": {\"input\": \"x\"}}\n").unwrap();
        assert!(tasks.seen.tasks && !tasks.seen.rollouts);
        let near = RolloutFile::open(&at("taks.jsonl"), &Filter::default()).unwrap_err();
        assert!(
            near.text().contains("\n  fix: did you mean `") && near.text().contains("tasks.jsonl`?"),
            "{}",
            near.text()
        );
        let nothing = RolloutFile::open(&at("nope.json"), &Filter::default()).unwrap_err();
        assert!(nothing.text().contains("\n  fix: name a file of rollouts"), "{}", nothing.text());
    }

    fn folder(rollouts: &str, failures: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollouts.jsonl");
        std::fs::write(&path, rollouts).unwrap();
        std::fs::write(folder.path().join("rollouts_failures.jsonl"), failures).unwrap();
        (folder, path)
    }

    const ROLLOUTS: &str = concat!(
        r#"{"_ng_task_index":1,"_ng_rollout_index":0,"reward":1.0,"agent_ref":{"name":"a"}}"#,
        "\n\n",
        r#"{"_ng_task_index":0,"_ng_rollout_index":0,"reward":0.0,"agent_ref":{"name":"b"},"_ng_attempt_index":1}"#,
        "\n"
    );
    const FAILURES: &str = concat!(
        r#"{"_ng_task_index":0,"_ng_rollout_index":0,"_ng_failure_class":"tool_error","agent_ref":{"name":"b"}}"#,
        "\n"
    );

    #[test]
    fn rollouts_and_their_failures_are_in_the_order_of_tasks_and_attempts() {
        let (_folder, path) = folder(ROLLOUTS, FAILURES);
        let mut file = RolloutFile::open(&path, &Filter::default()).unwrap();
        assert_eq!(file.labels().map(RowLabel::id).collect::<Vec<_>>(), ["0-0", "0-0-a1", "1-0"]);
        assert_eq!(file.position("1-0"), Some(2));
        assert_eq!(file.position("0-0-a1"), Some(1));
        assert_eq!(file.position("7-0"), None);
        assert_eq!(file.read(2).unwrap().label.reward, Some(1.0));
        assert_eq!(file.read(0).unwrap().label.class.as_deref(), Some("tool_error"));
    }

    #[test]
    fn every_filter_takes_what_it_names() {
        let (_folder, path) = folder(ROLLOUTS, FAILURES);
        let ids = |filter: Filter| {
            let file = RolloutFile::open(&path, &filter).unwrap();
            assert_eq!(file.total, 3);
            file.labels().map(RowLabel::id).collect::<Vec<_>>()
        };
        assert_eq!(ids(Filter { task: Some(1), ..Filter::default() }), ["1-0"]);
        assert_eq!(ids(Filter { agent: Some("b".into()), ..Filter::default() }), ["0-0", "0-0-a1"]);
        assert_eq!(ids(Filter { class: Some("tool_error".into()), ..Filter::default() }), ["0-0"]);
        assert_eq!(ids(Filter { reward: Some("0".parse().unwrap()), ..Filter::default() }), ["0-0-a1"]);
        assert_eq!(ids(Filter { failed: true, ..Filter::default() }), ["0-0"]);
    }

    #[test]
    fn a_line_that_is_no_row_is_named() {
        let (_folder, path) = folder("{\"reward\":1}\nnot json\n{\"reward\":0.5,\"resp", "");
        let file = RolloutFile::open(&path, &Filter::default()).unwrap();
        assert_eq!((file.len(), file.total, file.unreadable.len()), (1, 1, 2));
        assert!(file.unreadable[0].contains("rollouts.jsonl, line 2: not a JSON object"), "{:?}", file.unreadable);
        let (_folder, path) = folder("not json\n", "");
        let failure = RolloutFile::open(&path, &Filter::default()).unwrap_err();
        assert!(failure.text().contains("rollouts.jsonl, line 1: not a JSON object"), "{}", failure.text());
    }

    #[test]
    fn an_odd_row_hides_no_other() {
        let odd = [
            r#"{"reward":1.0,"response":{"output":[{"type":"message","role":"assistant","content":[{"text":"a\ud83db"}]}]}}"#.to_owned(),
            format!(r#"{{"reward":1.0,"x":{}{}}}"#, "[".repeat(200), "]".repeat(200)),
            r#"{"reward":1e400,"_ng_task_index":"three","agent_ref":"a","_ng_failure_class":5}"#.to_owned(),
            r#"{"reward":{},"_ng_task_index":-1,"agent_ref":{"name":3},"response":5,"responses_create_params":[],"_gym_episode":7}"#.to_owned(),
            r#"{"reward":null,"response":{"output":{}},"_ng_failure_class":"x","_ng_failure_causes":[3,null,{}]}"#.to_owned(),
            "{}".to_owned(),
        ];
        let (_folder, path) = folder(&(odd.join("\n") + "\n" + ROLLOUTS), FAILURES);
        let mut file = RolloutFile::open(&path, &Filter::default()).unwrap();
        assert_eq!((file.len(), file.unreadable.len()), (odd.len() + 3, 0));
        for position in 0..file.len() {
            file.read(position).unwrap_or_else(|failure| panic!("{}", failure.text()));
        }
    }
}
