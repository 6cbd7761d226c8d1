//! The rows of a rollouts file and of its failures file: indexed once, read one at a time, filtered by their labels.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use gym_client::collect::OutputFiles;

use crate::cli::args::range::RewardRange;
use crate::cli::console;
use crate::cli::exit::Failure;
use crate::head::page::conversation::{Rollout, RowLabel};

/// Maximum bytes of a line that is shown: a row with the token ids of a long episode is some tens of megabytes.
const LINE_BYTES_MAX: u64 = 1 << 30;

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
    /// Lines that are no rows, such as the last one of a file that is being written.
    pub(super) unreadable: Vec<String>,
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
        let mut file = Self { files: Vec::new(), rows: Vec::new(), total: 0, unreadable: Vec::new() };
        file.add(path, filter)?;
        let failures = OutputFiles::beside(path).failures;
        if failures.is_file() {
            file.add(&failures, filter)?;
        }
        if let (0, Some(first)) = (file.total, file.unreadable.first()) {
            let program = console::program();
            return Err(Failure::Usage(format!(
                "{first}\n  fix: name a file of rollouts, which `{program} collect` writes"
            )));
        }
        file.rows.sort_by_key(|row| (row.label.task, row.label.repeat, row.label.attempt));
        Ok(file)
    }

    fn add(&mut self, path: &Path, filter: &Filter) -> Result<(), Failure> {
        let unreadable = |error: &io::Error| Failure::Usage(format!("read {}: {error}", path.display()));
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
                match RowLabel::of(&line) {
                    Ok(label) => {
                        self.total += 1;
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
        let changed =
            |error: String| Failure::Failed(format!("read {}: {error}; has the file changed?", path.display()));
        read.map_err(|error| changed(error.to_string()))?;
        Rollout::of(row.label.clone(), &line).map_err(|error| changed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
