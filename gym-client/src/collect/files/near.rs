//! The file of a folder that a misspelled path probably means.

use std::io;
use std::path::{Path, PathBuf};

use crate::config::{LET_READ, nearest_name};

/// Entries of a folder that are compared with a name. More are the results of a program, not of a person who types their names.
pub(super) const ENTRIES_MAX: usize = 10_000;

/// Returns the file beside a path that does not exist whose name is nearest to its own, if it differs by at most a typing mistake.
#[must_use]
pub fn nearest_file(path: &Path) -> Option<PathBuf> {
    let wanted = path.file_name()?.to_str()?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(folder).ok()?.take(ENTRIES_MAX).filter_map(Result::ok);
    let files = entries.filter(|entry| entry.path().is_file());
    let mut names: Vec<String> = files.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    nearest_name(wanted, names.iter().map(String::as_str)).map(|near| path.with_file_name(near))
}

/// Returns the fix of a file that cannot be opened: the nearest name, or the permission. `otherwise` is the fix without either.
#[must_use]
pub fn fix_of_unopened(path: &Path, error: &io::Error, otherwise: &str) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => match nearest_file(path) {
            Some(near) => format!("did you mean `{}`?", near.display()),
            None => otherwise.to_owned(),
        },
        io::ErrorKind::PermissionDenied => LET_READ.to_owned(),
        _ => otherwise.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_file_is_beside_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("tasks.jsonl"), "{}\n").unwrap();
        std::fs::create_dir(at("taks.json")).unwrap();
        assert_eq!(nearest_file(&at("taks.jsonl")), Some(at("tasks.jsonl")));
        assert_eq!(nearest_file(&at("other.jsonl")), None);
        assert_eq!(nearest_file(&at("no/taks.jsonl")), None);
        let fix = |kind: io::ErrorKind| fix_of_unopened(&at("taks.jsonl"), &kind.into(), "name a file");
        assert!(fix(io::ErrorKind::NotFound).ends_with("tasks.jsonl`?"));
        assert_eq!(fix(io::ErrorKind::PermissionDenied), "let this user read the file and its directory");
        assert_eq!(fix(io::ErrorKind::IsADirectory), "name a file");
    }
}
