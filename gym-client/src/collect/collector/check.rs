//! The checks of a collection before its servers start, which may take minutes: its paths, its rows, what was recorded, and the folders of its files.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use gym_core::base::Files;
use gym_core::rollout::metrics::{JsonFields, ROLLOUT_INDEX};
use gym_core::{Code, Error, Result, World};

use crate::collect::collector::collection::{compare_rows, compare_settings, has_outcomes, partial_of};
use crate::collect::collector::{CollectOptions, blocking, discard, invalid};
use crate::collect::files::{ExistingOutput, OutputFiles, output_exists};
use crate::collect::input::source::InputSource;
use crate::collect::input::{InputError, Materializer};
use crate::collect::ledger::lock_output;
use crate::collect::names::ServerNames;
use crate::collect::observe::{EventTarget, TensorBoardFile};

/// Rows that are checked before servers start, in less than a second.
const CHECKED_ROWS: u64 = 1_000;

/// Bytes of recorded rows up to which they are compared before servers start: about a second. The collection compares those of any size.
const COMPARED_BYTES: u64 = 256 << 20;

impl CollectOptions {
    /// Checks the paths, and returns the output files that have content. Call this before servers start;
    /// [`RolloutCollector::collect`](crate::collect::RolloutCollector::collect) does the same before it opens a file for writing.
    ///
    /// # Errors
    /// `InvalidArgument` if the input cannot be used, if two of the files are the same file, if an output exists and `existing` rejects that, if
    /// a file of its name is no output of a collection, or if the events file or the directory for TensorBoard cannot be written. The errors
    /// of the disk.
    pub async fn check_output(&self, disk: &dyn Files) -> Result<Vec<PathBuf>> {
        let files = OutputFiles::beside(&self.output);
        let source = InputSource::find(&self.input).map_err(|error| invalid(&error))?;
        for input in source.files() {
            files.check_distinct(input, self.events.as_deref())?;
        }
        source.check().map_err(|error| invalid(&error))?;
        self.materialize.check().map_err(|error| invalid(&error))?;
        if std::fs::metadata(&files.rollouts).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            let output = files.rollouts.display();
            return Err(Error::invalid(format!(
                "{output}: this is no regular file, and rollouts need one\n  fix: name a file"
            )));
        }
        check_is_written(&files.rollouts, ROLLOUT_INDEX, "output of a collection")?;
        check_alone(&files)?;
        let existing = files.existing(disk).await?;
        if let (ExistingOutput::Reject, Some(first)) = (self.existing, existing.first()) {
            return Err(output_exists(first));
        }
        if let Some(events) = &self.events {
            check_is_written(events, "event", "events file of a collection (--events)")?;
            EventTarget::check(events, self.existing)?;
        }
        if let Some(folder) = &self.tensorboard {
            TensorBoardFile::check(folder, !existing.is_empty())?;
        }
        Ok(existing)
    }

    /// Checks the first thousand rows of the input. Call this before servers start, which may take minutes;
    /// [`RolloutCollector::collect`](crate::collect::RolloutCollector::collect) checks all rows. What only a running server knows, such as the
    /// type of its task, is not checked.
    ///
    /// # Errors
    /// `InvalidArgument`, with the file and the line or the row.
    pub async fn check_rows(&self, names: &ServerNames) -> Result<()> {
        let mut options = self.materialize.clone();
        let limit = options.limit.filter(|limit| *limit > 0).unwrap_or(u64::MAX).min(CHECKED_ROWS);
        (options.limit, options.interleave) = (Some(limit), false);
        let materializer = Materializer::new(options, names.clone()).map_err(|error| invalid(&error))?;
        let input = self.input.clone();
        let checking = blocking(move || {
            let source = InputSource::find(&input).map_err(|error| invalid(&error))?;
            // The rows of Parquet files are converted into an unnamed file first.
            let (reader, places) = match source.open(&std::env::temp_dir(), Some(limit)) {
                // This folder cannot be written, and the collection uses that of its output.
                Err(InputError::Io { .. }) => return Ok(None),
                opened => opened.map_err(|error| invalid(&error))?,
            };
            match materializer.each_row(reader, |_, _, _, _| Ok(())) {
                Ok(summary) => Ok(Some((summary, places))),
                Err(error) => Err(invalid(&error.with_places(places.as_ref()))),
            }
        });
        match checking.await? {
            Some((summary, places)) => self.check_targets(names, &summary, places.as_ref()),
            None => Ok(()),
        }
    }

    /// Compares a resumed collection with what was recorded, and checks that the output, the events and the scalars can be written. Call this
    /// after the other checks, and before servers start: a collection does the same. Folders that are missing are created.
    ///
    /// # Errors
    /// Those of [`RolloutCollector::collect`](crate::collect::RolloutCollector::collect) before its first rollout.
    pub async fn check_start(&self, names: &ServerNames, world: &World) -> Result<()> {
        let (files, disk) = (OutputFiles::beside(&self.output), &*world.files);
        if disk.length(&files.rollouts).await?.is_some() {
            drop(lock_output(disk, &files.rollouts).await?);
        }
        let partial = partial_of(&files);
        if self.existing == ExistingOutput::Resume && has_outcomes(&files)? {
            self.check_recorded(names, disk, &files, &partial).await?;
        }
        let created = disk.append(&partial, &[], false).await;
        discard(disk, &partial).await;
        created.map_err(|error| {
            let problem = match error.code() {
                Code::NotFound => "no file can be created in this folder; choose another path".to_owned(),
                Code::InvalidArgument => error.message().to_owned(),
                _ => return error,
            };
            Error::invalid(problem).about(format!("write {}", files.rollouts.display()))
        })?;
        if let Some(events) = &self.events {
            EventTarget::check_folder(events)?;
        }
        self.tensorboard.as_deref().map_or(Ok(()), TensorBoardFile::check_folder)
    }

    /// Compares the requested rows and the settings of the servers with the recorded ones.
    async fn check_recorded(
        &self,
        names: &ServerNames,
        disk: &dyn Files,
        files: &OutputFiles,
        partial: &Path,
    ) -> Result<()> {
        if disk.length(&files.materialized).await?.is_some_and(|bytes| bytes > COMPARED_BYTES) {
            return Ok(());
        }
        let requested = match self.match_recorded(names, &files.materialized).await? {
            Some(requested) => requested,
            None => {
                let requested = self.materialize(names, disk, partial).await?;
                let compared = compare_rows(files, partial).await;
                discard(disk, partial).await;
                compared.map(|_| requested)?
            }
        };
        compare_settings(self, names, files, &requested, 0).await.map(drop)
    }
}

/// Endings of outputs. The other files of a collection are named after the stem alone.
const ENDINGS: [&str; 4] = ["", "json", "jsonl", "ndjson"];

/// Checks that the other files of a new output are not those of an output with another ending.
fn check_alone(files: &OutputFiles) -> Result<()> {
    let has = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0);
    if has(&files.rollouts) || !has(&files.materialized) {
        return Ok(());
    }
    let mut others = ENDINGS.into_iter().map(|ending| files.rollouts.with_extension(ending));
    // A collection that runs may have no rollout yet.
    let is_output = |other: &PathBuf| {
        *other != files.rollouts && other.is_file() && check_is_written(other, ROLLOUT_INDEX, "output").is_ok()
    };
    let Some(other) = others.find(is_output) else { return Ok(()) };
    Err(Error::invalid(format!(
        "{}: {} is an output whose other files, such as {}, would have the same names\n  fix: name another output, or {1} to continue that one",
        files.rollouts.display(),
        other.display(),
        files.materialized.display(),
    )))
}

/// Bytes of a first line that are read to see what wrote it. A longer one may be a row.
const FIRST_LINE_BYTES: u64 = 16 << 20;

/// Checks that a file, if it exists, may be one that a collection has written: lines of JSON objects with a key. `--overwrite` is no leave to
/// replace another file.
fn check_is_written(path: &Path, key: &str, what: &str) -> Result<()> {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    let Ok(file) = File::open(path) else { return Ok(()) };
    let (mut lines, mut line) = (BufReader::new(file.take(FIRST_LINE_BYTES)), Vec::new());
    // A file system may leave zeros at the end of a file after a crash.
    let is_blank = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0;
    while line.iter().all(is_blank) {
        line.clear();
        if !lines.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            return Ok(());
        }
    }
    let first = line.iter().find(|byte| !is_blank(byte));
    // A line without an end was torn, or is longer.
    let whole = line.strip_suffix(b"\n").and_then(|line| std::str::from_utf8(line).ok());
    let fields = whole.and_then(|line| JsonFields::parse(line).ok());
    let problem = match (first, fields) {
        (Some(b'{'), Some(fields)) if fields.get(key).is_none() => format!("its first line has no `{key}`"),
        (Some(b'{'), _) => return Ok(()),
        _ => "it does not begin with a JSON object".to_owned(),
    };
    let path = path.display();
    Err(Error::invalid(format!(
        "{path}: this file is no {what}: {problem}\n  fix: name another file, or remove this one"
    )))
}
