//! The machines that a replay judges: recordings, and folders with the root of a machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use gym_client::transport::rdma::probe::machine::{Folder, Loaded, Machine, Recording};

use crate::cli::exit::Failure;

/// Maximum length of a file that is read. A recording has at most 4 MiB.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// A machine to judge.
#[derive(Debug)]
pub(super) struct Replayed {
    pub(super) name: String,
    pub(super) path: PathBuf,
    source: Source,
    nothing: Loaded,
}

#[derive(Debug)]
enum Source {
    Recording(Box<Recording>),
    Folder(Folder),
}

impl Replayed {
    fn new(name: String, path: &Path, source: Source) -> Self {
        Self { name, path: path.to_owned(), source, nothing: Loaded::default() }
    }

    pub(super) fn machine(&self) -> &dyn Machine {
        match &self.source {
            Source::Recording(recording) => &**recording,
            Source::Folder(folder) => folder,
        }
    }

    /// Returns what libraries said when the machine was recorded. Those of a folder are not loaded.
    pub(super) fn loaded(&self) -> &Loaded {
        self.recording().map_or(&self.nothing, |recording| &recording.loaded)
    }

    pub(super) fn recording(&self) -> Option<&Recording> {
        match &self.source {
            Source::Recording(recording) => Some(recording),
            Source::Folder(_) => None,
        }
    }
}

/// Returns the machines at these paths. Each has a name of its own.
pub(super) fn machines(paths: &[PathBuf]) -> Result<Vec<Replayed>, Failure> {
    let mut machines = Vec::new();
    for path in paths {
        if path.is_dir() {
            machines.extend(in_folder(path)?);
        } else {
            machines.push(recorded(path)?);
        }
    }
    let mut names: BTreeMap<String, u32> = BTreeMap::new();
    for machine in &machines {
        *names.entry(machine.name.clone()).or_default() += 1;
    }
    for machine in machines.iter_mut().filter(|machine| names.get(&machine.name) > Some(&1)) {
        machine.name = format!("{} ({})", machine.name, machine.path.display());
    }
    Ok(machines)
}

fn recorded(path: &Path) -> Result<Replayed, Failure> {
    let place = path.display();
    let mut text = String::new();
    let read = fs::File::open(path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            let fix = "fix: name a file that doctor --record has written, or a folder with the root of a machine";
            return Err(Failure::Usage(format!("{place}: no recording of a machine: it is no text; {fix}")));
        }
        Err(error) => {
            let fix = "name a file that doctor --record has written, or a folder with the root of a machine";
            return Err(Failure::Usage(format!("cannot read {place}: {error}; fix: {fix}")));
        }
    }
    let recording = Recording::from_json(&text).map_err(|error| Failure::Usage(format!("{place}: {error}")))?;
    let name = recording.host().unwrap_or_else(|| name_of(path));
    Ok(Replayed::new(name, path, Source::Recording(Box::new(recording))))
}

/// Returns the machine whose root a folder is, or those whose roots are in it, sorted by name.
fn in_folder(path: &Path) -> Result<Vec<Replayed>, Failure> {
    if is_root(path) {
        let folder = Folder::new(path);
        let host = folder.text("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned());
        let name = host.ok().filter(|name| !name.is_empty()).unwrap_or_else(|| name_of(path));
        return Ok(vec![Replayed::new(name, path, Source::Folder(folder))]);
    }
    let place = path.display();
    let entries = fs::read_dir(path).map_err(|error| Failure::Usage(format!("cannot read {place}: {error}")))?;
    // A link is no folder of this one.
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut roots: Vec<PathBuf> = folders.map(|entry| entry.path()).filter(|path| is_root(path)).collect();
    roots.sort();
    if roots.is_empty() {
        return Err(Failure::Usage(format!(
            "{place} holds no machine: neither it nor a folder in it has proc or sys; fix: name the root of a machine, a folder of such roots, or recordings"
        )));
    }
    Ok(roots.iter().map(|root| Replayed::new(name_of(root), root, Source::Folder(Folder::new(root)))).collect())
}

/// Returns `true` for a folder with `proc` or `sys`. Links are none: they may lead to this machine.
fn is_root(folder: &Path) -> bool {
    let is_folder = |name| fs::symlink_metadata(folder.join(name)).is_ok_and(|metadata| metadata.is_dir());
    is_folder("proc") || is_folder("sys")
}

fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_stem().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
