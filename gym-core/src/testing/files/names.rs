//! The names of the files of a simulated disk, and which of them survive a power failure.
//!
//! A new, changed or removed name is durable after its directory was synced, not after the file was: `fsync(2)`,
//! "Calling fsync() does not necessarily ensure that the entry in the directory containing the file has also reached
//! disk. For that an explicit fsync() on a file descriptor for the directory is also needed." The journals of ext4 and
//! XFS keep changes of names in their order, so a crash leaves a prefix of them. A rename is atomic.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
enum Change {
    Add(PathBuf, u64),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

/// Names and the numbers of their files.
#[derive(Debug, Default)]
pub(super) struct Names {
    current: BTreeMap<PathBuf, u64>,
    durable: BTreeMap<PathBuf, u64>,
    /// The changes that are not on the disk.
    unsynced: Vec<Change>,
    /// The number of files so far.
    files: u64,
}

impl Names {
    pub(super) fn get(&self, path: &Path) -> Option<u64> {
        self.current.get(path).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&PathBuf, u64)> {
        self.current.iter().map(|(path, file)| (path, *file))
    }

    /// Gives the name to a new file, instead of the one that had it.
    pub(super) fn add(&mut self, path: &Path) -> u64 {
        self.files += 1;
        self.change(Change::Add(path.to_owned(), self.files));
        self.files
    }

    /// Returns `false` if there is no such file.
    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> bool {
        let exists = self.current.contains_key(from);
        if exists {
            self.change(Change::Rename(from.to_owned(), to.to_owned()));
        }
        exists
    }

    pub(super) fn remove(&mut self, path: &Path) {
        if self.current.contains_key(path) {
            self.change(Change::Remove(path.to_owned()));
        }
    }

    /// Syncs the directory of `path`.
    pub(super) fn sync(&mut self, path: &Path) {
        let folder = path.parent();
        let (synced, left) = std::mem::take(&mut self.unsynced).into_iter().partition(|change| {
            let (Change::Add(path, _) | Change::Rename(_, path) | Change::Remove(path)) = change;
            path.parent() == folder
        });
        self.unsynced = left;
        let synced: Vec<Change> = synced;
        synced.iter().for_each(|change| apply(&mut self.durable, change));
    }

    /// Loses all unsynced changes but a prefix.
    pub(super) fn crash(&mut self, rng: &mut fastrand::Rng) {
        let kept = rng.usize(0..=self.unsynced.len());
        for change in self.unsynced.drain(..).take(kept) {
            apply(&mut self.durable, &change);
        }
        self.current = self.durable.clone();
    }

    /// Returns `true` if the file has a name.
    pub(super) fn refers_to(&self, file: u64) -> bool {
        self.current.values().any(|named| *named == file)
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.current, &change);
        self.unsynced.push(change);
    }
}

fn apply(names: &mut BTreeMap<PathBuf, u64>, change: &Change) {
    match change {
        Change::Add(path, file) => {
            names.insert(path.clone(), *file);
        }
        Change::Rename(from, to) => {
            if let Some(file) = names.remove(from) {
                names.insert(to.clone(), file);
            }
        }
        Change::Remove(path) => {
            names.remove(path);
        }
    }
}
