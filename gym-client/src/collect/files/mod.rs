//! The output files of a collection: their names, and the checks that no file is destroyed by mistake.

pub(super) mod chunks;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use gym_core::base::Files;
use gym_core::{Error, Result};

use crate::collect::ledger::index_path;

/// Links that are followed to the end of a chain; Linux follows as many.
const LINKS_MAX: usize = 40;

/// What a collection does if its output exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExistingOutput {
    /// The collection is rejected before it opens a file for writing.
    #[default]
    Reject,
    /// The collection continues. It may request more rows and more repeats; rows that were requested before must be
    /// unchanged.
    Resume,
    /// The files of the earlier collection are replaced.
    Overwrite,
}

/// The output files of a collection, named after its rollouts file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFiles {
    /// `<stem>.jsonl`: the scored rollouts.
    pub rollouts: PathBuf,
    /// `<stem>_materialized_inputs.jsonl`: the rows as they were sent.
    pub materialized: PathBuf,
    /// `<stem>_failures.jsonl`: the failed attempts.
    pub failures: PathBuf,
    /// `<stem>_aggregate_metrics.json`: the statistics of the environment servers.
    pub aggregate: PathBuf,
    /// `<stem>_settings.json`: the settings of the servers that made the rewards.
    pub settings: PathBuf,
}

impl OutputFiles {
    /// Returns the names of the output files in the directory of `rollouts`.
    #[must_use]
    pub fn beside(rollouts: impl Into<PathBuf>) -> Self {
        let rollouts: PathBuf = rollouts.into();
        let stem = rollouts.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let named = |suffix: &str| rollouts.with_file_name(format!("{stem}{suffix}"));
        Self {
            materialized: named("_materialized_inputs.jsonl"),
            failures: named("_failures.jsonl"),
            aggregate: named("_aggregate_metrics.json"),
            settings: named("_settings.json"),
            rollouts,
        }
    }

    fn named(&self) -> [(&'static str, &Path); 5] {
        [
            ("rollouts", &self.rollouts),
            ("failures", &self.failures),
            ("materialized inputs", &self.materialized),
            ("statistics", &self.aggregate),
            ("settings", &self.settings),
        ]
    }

    /// Checks that the input, all output files and the events file are different files, also behind hard links and symbolic links.
    ///
    /// # Errors
    /// `InvalidArgument`, with both paths.
    pub(super) fn check_distinct(&self, input: &Path, events: Option<&Path>) -> Result<()> {
        let index = index_path(&self.rollouts);
        let more = [("index", index.as_path())].into_iter().chain(events.map(|events| ("events", events)));
        let mut known = vec![("input", input, FileIdentity::of(input))];
        for (what, path) in self.named().into_iter().chain(more) {
            let identity = FileIdentity::of(path);
            if let Some((other, at, _)) = known.iter().find(|(_, _, known)| *known == identity) {
                return Err(Error::invalid(format!(
                    "the {other} {} and the {what} {} are the same file, so the collection would destroy it\n  fix: name \
                     another output",
                    at.display(),
                    path.display()
                )));
            }
            known.push((what, path, identity));
        }
        Ok(())
    }

    /// Returns the output files that exist and are not empty.
    pub(super) async fn existing(&self, files: &dyn Files) -> Result<Vec<PathBuf>> {
        let mut existing = Vec::new();
        for (_, path) in self.named() {
            if files.length(path).await?.is_some_and(|length| length > 0) {
                existing.push(path.to_owned());
            }
        }
        Ok(existing)
    }
}

/// Returns the error for output files that exist although the collection was to be a new one.
pub(super) fn output_exists(existing: &Path) -> Error {
    Error::invalid(format!(
        "{} exists, and a new collection would replace it\n  fix: add --resume to continue its collection, or --overwrite to \
         replace its files, or name another output",
        existing.display()
    ))
}

/// Identifies a file: by its inode, or by the path at which it would be created.
#[derive(Debug, PartialEq, Eq)]
enum FileIdentity {
    Inode(u64, u64),
    Path(PathBuf),
}

impl FileIdentity {
    fn of(path: &Path) -> Self {
        let folder = |path: &Path| {
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
        };
        let mut path = path.to_owned();
        for _ in 0..LINKS_MAX {
            if let Ok(found) = std::fs::metadata(&path) {
                return Self::Inode(found.dev(), found.ino());
            }
            // A link whose target does not exist yet: a write creates the target.
            let Ok(target) = std::fs::read_link(&path) else { break };
            path = folder(&path).join(target);
        }
        let folder = folder(&path);
        let folder = std::fs::canonicalize(&folder).unwrap_or(folder);
        Self::Path(folder.join(path.file_name().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use gym_core::base::RealFiles;

    use super::*;

    fn rejection(files: &OutputFiles, input: &Path) -> Option<String> {
        files.check_distinct(input, None).err().map(|error| error.to_string())
    }

    #[test]
    fn the_input_is_never_an_output_whatever_the_paths_are() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let files = OutputFiles::beside(at("r.jsonl"));
        std::fs::create_dir(at("below")).unwrap();
        for output in [
            "r.jsonl",
            "r_failures.jsonl",
            "r_materialized_inputs.jsonl",
            "r_aggregate_metrics.json",
            "r_settings.json",
            "r.jsonl.index",
        ] {
            std::fs::write(at(output), "{}\n").unwrap();
            symlink(at(output), at("soft")).unwrap();
            symlink("soft", at("softer")).unwrap();
            std::fs::hard_link(at(output), at("hard")).unwrap();
            for input in [at(output), at("below").join("..").join(output), at("soft"), at("softer"), at("hard")] {
                let text = rejection(&files, &input).expect("the same file");
                assert!(text.contains(output) && text.contains(&input.display().to_string()), "{text}");
            }
            for used in [output, "soft", "softer", "hard"] {
                std::fs::remove_file(at(used)).unwrap();
            }
        }
        std::fs::write(at("tasks.jsonl"), "{}\n").unwrap();
        assert_eq!(rejection(&files, &at("tasks.jsonl")), None);
    }

    #[test]
    fn outputs_that_a_link_joins_are_rejected_before_they_exist() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("tasks.jsonl"), "{}\n").unwrap();
        let files = OutputFiles::beside(at("r.jsonl"));
        assert_eq!(rejection(&files, &at("tasks.jsonl")), None);
        symlink("r.jsonl", at("r_failures.jsonl")).unwrap();
        let text = rejection(&files, &at("tasks.jsonl")).expect("the same file");
        assert!(text.contains("r.jsonl") && text.contains("r_failures.jsonl"), "{text}");
    }

    #[test]
    fn the_events_file_is_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("tasks.jsonl"), "{}\n").unwrap();
        let files = OutputFiles::beside(at("r.jsonl"));
        for name in ["tasks.jsonl", "r.jsonl", "r_failures.jsonl"] {
            let error = files.check_distinct(&at("tasks.jsonl"), Some(&at(name))).unwrap_err().to_string();
            assert!(error.contains("events") && error.contains(name), "{error}");
        }
        files.check_distinct(&at("tasks.jsonl"), Some(&at("events.jsonl"))).unwrap();
    }

    #[test]
    fn links_in_a_circle_end() {
        let folder = tempfile::tempdir().unwrap();
        symlink("b", folder.path().join("a")).unwrap();
        symlink("a", folder.path().join("b")).unwrap();
        assert!(matches!(FileIdentity::of(&folder.path().join("a")), FileIdentity::Path(_)));
    }

    #[tokio::test]
    async fn only_files_with_content_exist() {
        let folder = tempfile::tempdir().unwrap();
        let files = OutputFiles::beside(folder.path().join("r.jsonl"));
        std::fs::write(&files.rollouts, "").unwrap();
        assert_eq!(files.existing(&RealFiles::new()).await.unwrap(), [] as [&Path; 0]);
        std::fs::write(&files.aggregate, "[]").unwrap();
        assert_eq!(files.existing(&RealFiles::new()).await.unwrap(), [files.aggregate]);
    }
}
