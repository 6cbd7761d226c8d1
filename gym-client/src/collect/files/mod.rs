//! The output files of a collection: their names, and the checks that no file is destroyed by mistake.

pub(super) mod chunks;
mod near;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use gym_core::base::Files;
use gym_core::{Error, Result};

use crate::collect::files::near::ENTRIES_MAX;
pub use crate::collect::files::near::{fix_of_unopened, nearest_file};
use crate::collect::ledger::index_path;
use crate::config::nearest_name;

/// Links that are followed to the end of a chain; Linux follows as many.
const LINKS_MAX: usize = 40;

/// Characters of a part of a name from which another letter in it is a typing mistake, and not another run.
const PART_CHARS_MIN: usize = 3;

/// The behavior of a collection if its output exists.
///
/// ```
/// use gym_client::collect::ExistingOutput;
///
/// fn of_a_restart(restarted: bool) -> ExistingOutput {
///     if restarted { ExistingOutput::Resume } else { ExistingOutput::default() }
/// }
/// assert_eq!(of_a_restart(false), ExistingOutput::Reject);
/// ```
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

    /// Returns the rollouts file of a collection whose path differs from this one by a typing mistake, in the name of the file or of its
    /// folder. Names that differ in a number or in a part of one or two characters are those of other runs.
    #[must_use]
    pub fn misspelled_of(&self) -> Option<PathBuf> {
        let near_in = |folder: &Path, wanted: &str, has: &dyn Fn(&str) -> bool| {
            let entries = std::fs::read_dir(folder).ok()?;
            let names = entries.take(ENTRIES_MAX).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            let mut names: Vec<String> = names.filter(|name| is_typing_mistake(wanted, name) && has(name)).collect();
            names.sort();
            nearest_name(wanted, names.iter().map(String::as_str)).map(|near| folder.join(near))
        };
        let has_collection = |rollouts: &Path| {
            let other = Self::beside(rollouts);
            [&other.rollouts, &other.materialized].into_iter().all(|file| file.is_file())
        };
        let folder_of = |path: &Path| path.parent().map(Path::to_owned);
        let folder = folder_of(&self.rollouts)?;
        let reachable = |folder: &Path| match folder.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => folder.to_owned(),
        };
        let name = self.rollouts.file_name()?.to_str()?;
        if reachable(&folder).is_dir() {
            let near = near_in(&reachable(&folder), name, &|other| has_collection(&folder.join(other)))?;
            return Some(folder.join(near.file_name()?));
        }
        let above = folder_of(&folder)?;
        let near = near_in(&reachable(&above), folder.file_name()?.to_str()?, &|other| {
            has_collection(&above.join(other).join(name))
        })?;
        Some(above.join(near.file_name()?).join(name))
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

/// Returns `true` if two names may be meant to be the same. `step-1` and `step-2`, or `run_a` and `run_b`, are the names of two runs.
fn is_typing_mistake(wanted: &str, name: &str) -> bool {
    let numbers = |text: &str| text.chars().filter(char::is_ascii_digit).collect::<String>();
    let parts = |text: &str| -> Vec<String> {
        text.split(|letter: char| !letter.is_alphanumeric()).map(str::to_owned).collect()
    };
    let (wanted_parts, name_parts) = (parts(wanted), parts(name));
    let short = |(wanted, name): (&String, &String)| wanted != name && wanted.len().max(name.len()) < PART_CHARS_MIN;
    numbers(wanted) == numbers(name)
        && !(wanted_parts.len() == name_parts.len() && wanted_parts.iter().zip(&name_parts).any(short))
        && nearest_name(wanted, [name]).is_some()
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

    #[test]
    fn a_misspelled_output_is_found_and_the_output_of_another_run_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["results/long.jsonl", "results/step-1.jsonl", "results/run_a.jsonl", "results/eval.jsonl"] {
            let files = OutputFiles::beside(at(name));
            std::fs::create_dir_all(at("results")).unwrap();
            std::fs::write(&files.rollouts, "{}\n").unwrap();
            std::fs::write(&files.materialized, "{}\n").unwrap();
        }
        std::fs::write(at("results/other.jsonl"), "no rollouts").unwrap();
        for (wanted, found) in [
            ("results/logn.jsonl", Some("results/long.jsonl")),
            ("resluts/long.jsonl", Some("results/long.jsonl")),
            ("results/evals.jsonl", Some("results/eval.jsonl")),
            ("results/step-2.jsonl", None),
            ("results/step1-1.jsonl", None),
            ("results/run_b.jsonl", None),
            ("results/otehr.jsonl", None),
            ("results/fresh.jsonl", None),
            ("resluts/fresh.jsonl", None),
            ("nowhere/at/all.jsonl", None),
        ] {
            assert_eq!(OutputFiles::beside(at(wanted)).misspelled_of(), found.map(at), "{wanted}");
        }
    }

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
