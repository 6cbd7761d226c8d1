//! Writes the scalars of a running collection at an interval, and at its end.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_core::base::host_name;
use gym_core::{Error, Result, World};
use rustix::fs::{Access, access};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::collect::observe::tensorboard::record;
use crate::collect::run::{CollectProgress, ProgressSnapshot};

/// Interval of the scalars: a day of collecting is 8,640 points.
const WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// Limit for the last write of a run.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of scalars that wait for a disk: some hours.
const PENDING_BYTES_MAX: usize = 1 << 20;
/// The part of a file's name that TensorBoard looks for, and by which we know our own.
const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".gym";

/// The event file of one run.
#[derive(Debug)]
pub(in crate::collect) struct TensorBoardFile {
    path: PathBuf,
    end: Option<oneshot::Sender<()>>,
    /// Returns the reason why scalars are missing.
    writer: JoinSet<Option<String>>,
}

impl TensorBoardFile {
    /// Checks that files can be created in the directory. If the output begins, there may be none of another collection: TensorBoard would show
    /// both as one run.
    ///
    /// # Errors
    /// `InvalidArgument` with the fix.
    pub(in crate::collect) fn check(folder: &Path, continues: bool) -> Result<()> {
        match std::fs::metadata(folder) {
            Ok(found) if !found.is_dir() => {
                let wrong = Error::invalid("the path is no directory; name a directory");
                return Err(wrong.about(format!("write TensorBoard events to {}", folder.display())));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(unusable(folder, &error)),
        }
        access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| unusable(folder, &error.into()))?;
        let earlier = own_files(folder).map_err(|error| unusable(folder, &error))?;
        match earlier.first().filter(|_| !continues) {
            Some(first) => Err(Error::invalid(format!(
                "--tensorboard: {} is of another collection, and TensorBoard shows the files of a folder as one run\n  fix: name a folder of \
                 its own, such as {}; or remove the file",
                first.display(),
                folder.join("run-2").display()
            ))),
            None => Ok(()),
        }
    }

    /// Creates the directory if needed, and checks that it takes a file.
    ///
    /// # Errors
    /// `InvalidArgument` with the fix.
    pub(in crate::collect) fn check_folder(folder: &Path) -> Result<()> {
        let probe = folder.join(format!("{PREFIX}{}{SUFFIX}", std::process::id()));
        let created = std::fs::create_dir_all(folder)
            .and_then(|()| OpenOptions::new().append(true).create_new(true).open(&probe))
            .and_then(|_| std::fs::remove_file(&probe));
        created.map_err(|error| unusable(folder, &error))
    }

    /// Creates the file in the directory, which is created if needed. A resumed run keeps the files of earlier runs, which TensorBoard
    /// shows as one; any other run removes them. Files of other programs are kept.
    ///
    /// # Errors
    /// `InvalidArgument` if the file cannot be created.
    pub(in crate::collect) fn start(
        folder: &Path,
        resumes: bool,
        progress: Arc<CollectProgress>,
        world: &World,
        run_id: &str,
    ) -> Result<Self> {
        let host = host_name();
        let path = folder.join(format!("{PREFIX}{}.{host}.{run_id}{SUFFIX}", world.now().as_secs()));
        let create = || {
            std::fs::create_dir_all(folder)?;
            if !resumes {
                own_files(folder)?.iter().try_for_each(std::fs::remove_file)?;
            }
            OpenOptions::new().append(true).create_new(true).open(&path)
        };
        let file = create().map_err(|error| unusable(folder, &error))?;
        let mut pending = Vec::new();
        record::version(world.now(), &mut pending);
        let (end, ends) = oneshot::channel();
        let target = ScalarFile { file, length: 0, pending };
        let writer = ScalarWriter {
            target: Some(target),
            progress,
            world: world.clone(),
            before: (Instant::now(), 0),
            error: None,
        };
        let mut task = JoinSet::new();
        task.spawn(writer.run(ends).boxed());
        Ok(Self { path, end: Some(end), writer: task })
    }

    /// Writes the last scalars. Returns a warning if points are missing.
    pub(in crate::collect) async fn end(mut self) -> Option<String> {
        // The writer waits until the sender is dropped.
        drop(self.end.take());
        let error = match timeout(2 * END_TIMEOUT, self.writer.join_next()).await {
            Ok(Some(Ok(error))) => error?,
            Ok(_) => "the writer panicked".to_owned(),
            Err(_) => "a write did not end".to_owned(),
        };
        let file = self.path.display();
        Some(format!("{file}: scalars are missing: {error}; the rollouts are not affected"))
    }
}

/// Returns the event files of collections in a directory, the oldest first. An empty one was never written to.
fn own_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let own = name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
        if own && entry.metadata()?.len() > 0 {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn unusable(folder: &Path, error: &io::Error) -> Error {
    Error::invalid(format!("{error}; choose another directory"))
        .about(format!("write TensorBoard events to {}", folder.display()))
}

/// The file, the length of its whole records, and the records that it has not taken yet.
#[derive(Debug)]
struct ScalarFile {
    file: File,
    length: u64,
    pending: Vec<u8>,
}

impl ScalarFile {
    /// Appends the pending records, or leaves the file as it was: a reader stops at a torn record.
    fn write(&mut self) -> io::Result<()> {
        if let Err(error) = self.file.write_all(&self.pending) {
            self.file.set_len(self.length)?;
            return Err(error);
        }
        self.length += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

struct ScalarWriter {
    /// `None` after a write that did not end.
    target: Option<ScalarFile>,
    progress: Arc<CollectProgress>,
    world: World,
    /// When the last scalars were added, and how many rollouts had ended then.
    before: (Instant, u64),
    /// The reason why scalars are missing now.
    error: Option<String>,
}

impl ScalarWriter {
    async fn run(mut self, mut ends: oneshot::Receiver<()>) -> Option<String> {
        let mut last = false;
        while !last {
            tokio::select! {
                biased;
                _ = &mut ends => last = true,
                () = tokio::time::sleep(WRITE_INTERVAL) => {}
            }
            if let Some(target) = self.target.take() {
                self.write(target).await;
            }
        }
        self.error
    }

    async fn write(&mut self, mut target: ScalarFile) {
        let snapshot = self.progress.snapshot();
        let (now, ended) = (Instant::now(), snapshot.completed + snapshot.given_up);
        let (at, before) = std::mem::replace(&mut self.before, (now, ended));
        let seconds = now.duration_since(at).as_secs_f64();
        let per_second = if seconds > 0.0 { ended.saturating_sub(before) as f64 / seconds } else { 0.0 };
        let step = snapshot.completed + snapshot.already_completed;
        // While the disk takes nothing, the oldest scalars wait.
        if target.pending.len() < PENDING_BYTES_MAX {
            record::scalars(self.world.now(), step, &scalars(&snapshot, per_second), &mut target.pending);
        }
        let writing = tokio::task::spawn_blocking(move || {
            let written = target.write();
            (target, written)
        });
        let error = match timeout(END_TIMEOUT, writing).await {
            Ok(Ok((target, written))) => {
                self.target = Some(target);
                written.err().map(|error| error.to_string())
            }
            _ => Some("a write did not end".to_owned()),
        };
        if let (Some(error), None) = (&error, &self.error) {
            tracing::warn!(error, "TensorBoard events cannot be written now; rollouts continue");
        }
        self.error = error;
    }
}

/// Returns the scalars of a moment, by their tags.
fn scalars(snapshot: &ProgressSnapshot, per_second: f64) -> Vec<(String, f64)> {
    let mut scalars = Vec::new();
    let mut add = |tag: String, value: f64| scalars.push((tag, value));
    if let Some(mean) = snapshot.mean_reward() {
        add("reward/mean".to_owned(), mean);
    }
    for (agent, score) in snapshot.scores.iter().filter(|(_, score)| score.count > 0) {
        add(format!("reward/mean/{agent}"), score.reward_sum / score.count as f64);
    }
    add("rollouts/per_second".to_owned(), per_second);
    add("rollouts/in_flight".to_owned(), snapshot.in_flight as f64);
    add("rollouts/completed".to_owned(), (snapshot.completed + snapshot.already_completed) as f64);
    add("rollouts/failed".to_owned(), (snapshot.given_up + snapshot.already_given_up) as f64);
    for (class, attempts) in &snapshot.failures {
        add(format!("failed_attempts/{}", class.as_str()), *attempts as f64);
    }
    scalars
}

#[cfg(test)]
mod tests {
    use gym_core::rollout::FailureClass;

    use super::*;
    use crate::collect::run::AgentScore;

    #[test]
    fn a_moment_has_rewards_by_agent_rates_and_failures_by_class() {
        let score = |count, reward_sum| AgentScore { count, reward_sum, unscored: 1 };
        let snapshot = ProgressSnapshot {
            completed: 6,
            already_completed: 10,
            given_up: 2,
            in_flight: 3,
            scores: [("a".into(), score(4, 1.0)), ("b".into(), score(1, 1.0)), ("c".into(), score(0, 0.0))].into(),
            failures: [(FailureClass::ToolError, 5)].into(),
            ..ProgressSnapshot::default()
        };
        let expected = [
            ("reward/mean", 0.4),
            ("reward/mean/a", 0.25),
            ("reward/mean/b", 1.0),
            ("rollouts/per_second", 2.5),
            ("rollouts/in_flight", 3.0),
            ("rollouts/completed", 16.0),
            ("rollouts/failed", 2.0),
            ("failed_attempts/tool_error", 5.0),
        ];
        assert_eq!(scalars(&snapshot, 2.5), expected.map(|(tag, value)| (tag.to_owned(), value)));
    }

    #[tokio::test(start_paused = true)]
    async fn scalars_are_written_at_the_interval_and_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        let lengths =
            || own_files(&folder).unwrap().iter().map(|path| path.metadata().unwrap().len()).collect::<Vec<_>>();
        let start =
            |resumes, run| TensorBoardFile::start(&folder, resumes, Arc::default(), &World::real(), run).unwrap();
        let file = start(false, "1");
        assert_eq!(file.end().await, None);
        let [point] = lengths()[..] else { panic!("one file") };
        let file = start(true, "2");
        tokio::time::sleep(WRITE_INTERVAL * 3 + WRITE_INTERVAL / 2).await;
        assert_eq!(file.end().await, None);
        TensorBoardFile::check_folder(&folder).unwrap();
        TensorBoardFile::check_folder(Path::new("/proc")).unwrap_err();
        let version = 40;
        assert_eq!(lengths(), [point, version + 4 * (point - version)]);
        TensorBoardFile::check(&folder, true).unwrap();
        let refused = TensorBoardFile::check(&folder, false).unwrap_err().to_string();
        assert!(refused.contains("events.out.tfevents.") && refused.contains("name a folder of its own"), "{refused}");
        std::fs::write(folder.join("events.out.tfevents.1.host.2"), "of another program").unwrap();
        assert_eq!(start(false, "3").end().await, None);
        assert_eq!(lengths(), [point]);
        assert!(folder.join("events.out.tfevents.1.host.2").exists());
    }

    #[test]
    fn a_torn_record_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "whole").unwrap();
        // A file that is open for reading only fails each write.
        let mut target = ScalarFile { file: File::open(&path).unwrap(), length: 5, pending: b"more".to_vec() };
        target.write().unwrap_err();
        assert_eq!((std::fs::read(&path).unwrap(), target.pending.len()), (b"whole".to_vec(), 4));
        target.file = OpenOptions::new().append(true).open(&path).unwrap();
        target.write().unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), target.length), (b"wholemore".to_vec(), 9));
    }
}
