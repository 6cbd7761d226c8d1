//! Holds GPUs by locking a file for each, so that the clusters and node agents of a machine divide them, whatever process they are in.
//!
//! ```text
//!   <temporary folder>/gym-gpus      locked by whoever looks at the GPUs or takes some, for a moment: each takes all that it needs, or none
//!     gpu-0000:1b:00.0               locked by the cluster that holds the GPU, or by several that share it; its text says who they are
//!     gpu-0000:1b:00.0.ranks         locked by the watchdogs of the ranks: the GPU is free when the ranks have ended, not when their controller has
//! ```
//!
//! The kernel releases the locks of a process that ends, however it ends. Programs with another temporary folder, as in containers, do not see each
//! other.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::mem;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gym_core::base::process;
use gym_core::base::temporary_folder;
use gym_core::{CallContext, Code, Error, Result};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::usage::devices::gpu_identity;

/// Pause between two attempts to look. A look takes microseconds.
const TURN_INTERVAL: Duration = Duration::from_millis(2);
/// Limit for the wait for a turn: a program that was stopped during its look would hold up all others.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum text of the holders of a GPU that is read, in bytes: some hundred lines.
const HOLDERS_BYTES_MAX: u64 = 1 << 16;

/// The folder of the locks.
#[derive(Clone, Debug)]
pub(crate) struct GpuFolder(PathBuf);

/// The GPUs that were free at a look, and the others. No other program looks or takes while it exists.
#[derive(Debug)]
pub(crate) struct GpuLook {
    free: Vec<FreeGpu>,
    taken: Vec<TakenGpu>,
    shared: bool,
    _turn: Lock,
}

/// GPUs that are held until they are released or this is dropped.
#[derive(Debug, Default)]
pub(crate) struct HeldGpus(Mutex<Vec<HeldGpu>>);

#[derive(Debug)]
struct FreeGpu {
    name: String,
    lock: Lock,
    /// Nobody else shares it.
    first: bool,
}

#[derive(Debug)]
struct TakenGpu {
    name: String,
    why: String,
    ending: bool,
}

#[derive(Debug)]
struct HeldGpu {
    folder: GpuFolder,
    lock: Lock,
    /// Our line in its text, if others can have lines there.
    line: Option<String>,
}

/// A locked file. It is unlocked when this is dropped, although a process that is being started may have the file open a moment longer.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // The kernel does it when the file is closed, at the latest.
        let _ = self.0.unlock();
    }
}

impl Lock {
    /// Locks a file; `None` if another one has locked it.
    fn attempt(file: File, lock: impl FnOnce(&File) -> Result<(), TryLockError>) -> io::Result<Result<Self, File>> {
        match lock(&file) {
            Ok(()) => Ok(Ok(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(Err(file)),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl GpuFolder {
    /// Returns the folder that all programs of this machine use.
    pub(crate) fn of_this_machine() -> Self {
        Self(temporary_folder(usize::MAX).join("gym-gpus"))
    }

    #[cfg(test)]
    pub(crate) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// Looks which of these GPUs are free. If `shared`, those that others share are free, too.
    ///
    /// # Errors
    /// `FailedPrecondition` if the folder cannot be used, `Unavailable` if another program keeps it; the errors of `cx`.
    pub(crate) async fn look(&self, cx: &CallContext, names: &[String], shared: bool) -> Result<GpuLook> {
        let turn = self.turn(cx).await?;
        let (mut free, mut taken, mut known) = (Vec::new(), Vec::new(), BTreeMap::<String, &String>::new());
        for name in names {
            let identity = gpu_identity(name);
            let found = match known.insert(identity.clone(), name) {
                Some(first) => Err((format!("is GPU {first} by another name"), false)),
                None => self.lock(&identity, shared).map_err(|error| self.unusable(&error))?,
            };
            match found {
                Ok((lock, first)) => free.push(FreeGpu { name: name.clone(), lock, first }),
                Err((why, ending)) => taken.push(TakenGpu { name: name.clone(), why, ending }),
            }
        }
        Ok(GpuLook { free, taken, shared, _turn: turn })
    }

    /// Returns the files that the watchdogs of ranks on these GPUs lock.
    pub(crate) fn rank_files<'a>(&self, names: impl Iterator<Item = &'a String>) -> Vec<PathBuf> {
        let files = names.map(|name| self.file(&gpu_identity(name), ".ranks"));
        files.filter(|file| file.exists()).collect()
    }

    async fn turn(&self, cx: &CallContext) -> Result<Lock> {
        let mut folder = self.open().map_err(|error| self.unusable(&error))?;
        let until = Instant::now() + TURN_TIMEOUT;
        loop {
            cx.check()?;
            folder = match Lock::attempt(folder, File::try_lock).map_err(|error| self.unusable(&error))? {
                Ok(turn) => return Ok(turn),
                Err(folder) => folder,
            };
            if Instant::now() >= until {
                let message = format!(
                    "{} is locked by another program for {TURN_TIMEOUT:?}\n  fix: continue or end the program that is stopped",
                    self.0.display()
                );
                return Err(Error::not_started(Code::Unavailable, message).about("hold GPUs"));
            }
            sleep(TURN_INTERVAL).await;
        }
    }

    fn open(&self) -> io::Result<File> {
        match DirBuilder::new().create(&self.0) {
            // Every user of the machine locks files here, and removes only those that are theirs.
            Ok(()) => fs::set_permissions(&self.0, Permissions::from_mode(0o1777))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
        OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(&self.0)
    }

    /// Locks a GPU, and returns whether nobody else does. Or returns why it is not free, and whether it will be in a moment.
    fn lock(&self, identity: &str, shared: bool) -> io::Result<Result<(Lock, bool), (String, bool)>> {
        let file = match Lock::attempt(lock_file(&self.file(identity, ""))?, File::try_lock)? {
            Ok(lock) => {
                let ranks = Lock::attempt(lock_file(&self.file(identity, ".ranks"))?, File::try_lock)?;
                let ending = || ("is free when the ranks have ended that still run on it".to_owned(), true);
                return Ok(ranks.map(|_| (lock, true)).map_err(|_| ending()));
            }
            Err(file) => file,
        };
        let locked = if shared { Lock::attempt(file, File::try_lock_shared)? } else { Err(file) };
        Ok(match locked {
            Ok(lock) => Ok((lock, false)),
            Err(file) => Err((format!("is held by {}", holders(&text(&file)?)), false)),
        })
    }

    fn file(&self, identity: &str, ending: &str) -> PathBuf {
        let safe = |letter: char| if letter.is_ascii_alphanumeric() || "-:.".contains(letter) { letter } else { '_' };
        self.0.join(format!("gpu-{}{ending}", identity.chars().map(safe).collect::<String>()))
    }

    fn unusable(&self, error: &io::Error) -> Error {
        let message = format!(
            "the programs of this machine divide its GPUs by files in {}: {error}\n  fix: let all users read and write there, or set \
             TMPDIR to a folder that they can use",
            self.0.display()
        );
        Error::not_started(Code::FailedPrecondition, message).about("hold GPUs")
    }
}

/// Opens the file of a lock, which every user of the machine can.
fn lock_file(path: &Path) -> io::Result<File> {
    // Linux may forbid to create a file that another user has in such a folder (fs.protected_regular), but not to open it.
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let file = options.create_new(true).open(path)?;
            file.set_permissions(Permissions::from_mode(0o666))?;
            Ok(file)
        }
        opened => opened,
    }
}

fn text(mut file: &File) -> io::Result<String> {
    let mut text = Vec::new();
    file.rewind()?;
    file.take(HOLDERS_BYTES_MAX).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn rewrite(mut file: &File, text: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(text.as_bytes())
}

/// Returns the holders that the lines of a file name: `PID WHAT`.
fn holders(text: &str) -> String {
    let holder = |line: &str| {
        let (pid, what) = line.split_once(' ')?;
        let pid: u32 = pid.parse().ok()?;
        let ended = if process::exists(pid) { "" } else { ", which has ended" };
        let process = if pid == std::process::id() { "this process".to_owned() } else { format!("process {pid}") };
        Some(format!("{process}{ended} ({what})"))
    };
    let all: Vec<String> = text.lines().filter_map(holder).collect();
    if all.is_empty() { "a program that does not say its name".to_owned() } else { all.join(" and ") }
}

impl GpuLook {
    /// Returns the names of the GPUs that are free.
    pub(crate) fn free(&self) -> Vec<String> {
        self.free.iter().map(|gpu| gpu.name.clone()).collect()
    }

    /// Returns for each GPU that is not free why it is not.
    pub(crate) fn taken(&self) -> Vec<String> {
        self.taken.iter().map(|gpu| format!("GPU {} {}", gpu.name, gpu.why)).collect()
    }

    /// Returns `true` if a GPU will be free when ranks have ended whose cluster no longer holds it.
    pub(crate) fn is_ending(&self) -> bool {
        self.taken.iter().any(|gpu| gpu.ending)
    }

    /// Holds those of the free GPUs that `wanted` names, for `holder`, which errors of others name.
    ///
    /// # Errors
    /// `FailedPrecondition` if the files cannot be written.
    pub(crate) fn hold(self, folder: &GpuFolder, wanted: &[String], holder: &str) -> Result<HeldGpus> {
        let program = std::env::current_exe().ok();
        let program = program.as_ref().and_then(|path| path.file_name()).unwrap_or_default().to_string_lossy();
        let mut line = format!("{} {program}: {holder}, GPUs [{}]", std::process::id(), wanted.join(", "));
        line.retain(|letter| !letter.is_control());
        line.push('\n');
        let mut held = Vec::new();
        for FreeGpu { name, lock, first } in self.free {
            if !wanted.contains(&name) {
                continue;
            }
            let noted = || {
                let before = if first { String::new() } else { text(&lock.0)? };
                rewrite(&lock.0, &format!("{before}{line}"))?;
                // The first one has locked it alone. Nobody else locks it meanwhile, because it is our turn.
                if self.shared { lock.0.try_lock_shared().map_err(io::Error::from) } else { Ok(()) }
            };
            noted().map_err(|error| folder.unusable(&error))?;
            held.push(HeldGpu { folder: folder.clone(), lock, line: self.shared.then(|| line.clone()) });
        }
        Ok(HeldGpus(Mutex::new(held)))
    }
}

impl HeldGpus {
    /// Releases the GPUs.
    pub(crate) fn release(&self) {
        drop(mem::take(&mut *self.0.lock()));
    }
}

impl Drop for HeldGpu {
    fn drop(&mut self) {
        let Some(line) = self.line.take() else { return };
        // If another one has its turn, the line stays: the error of a third may name us, but the GPU is free.
        let folder = self.folder.open().and_then(|folder| Lock::attempt(folder, File::try_lock));
        if let Ok(Ok(_turn)) = folder
            && let Ok(text) = text(&self.lock.0)
            && let Err(error) = rewrite(&self.lock.0, &text.replacen(&line, "", 1))
        {
            tracing::debug!(%error, "the holders of a GPU were not written");
        }
    }
}

/// Returns the lines of an error that says who holds what.
pub(crate) fn listed(taken: &[String]) -> String {
    taken.iter().fold(String::new(), |mut all, one| {
        let _ = write!(all, "\n  {one}");
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    async fn look(folder: &GpuFolder, of: &[&str], shared: bool) -> GpuLook {
        folder.look(&CallContext::default(), &names(of), shared).await.unwrap()
    }

    async fn hold(folder: &GpuFolder, gpu: &str, shared: bool, holder: &str) -> HeldGpus {
        look(folder, &[gpu], shared).await.hold(folder, &names(&[gpu]), holder).unwrap()
    }

    #[tokio::test]
    async fn a_gpu_is_held_alone_or_by_those_that_share_it_until_they_release_it() {
        let parent = tempfile::tempdir().unwrap();
        let folder = GpuFolder(parent.path().join("gpus"));
        let alone = hold(&folder, "MIG-a", false, "cluster a").await;
        let left = hold(&folder, "MIG-b", true, "cluster left").await;
        let right = hold(&folder, "MIG-b", true, "cluster right").await;
        for (shared, free) in [(false, vec!["MIG-c"]), (true, vec!["MIG-b", "MIG-c"])] {
            let look = look(&folder, &["MIG-a", "MIG-b", "MIG-c"], shared).await;
            assert_eq!(look.free(), free, "shared: {shared}");
            let said = listed(&look.taken());
            assert!(
                said.contains("GPU MIG-a is held by this process (") && said.contains(": cluster a, GPUs [MIG-a])"),
                "{said}"
            );
            let sharing = said.contains("cluster left, ") && said.contains("cluster right, ");
            assert!(sharing != shared && !look.is_ending(), "{said}");
        }
        left.release();
        let said = listed(&look(&folder, &["MIG-b"], false).await.taken());
        assert!(said.contains("cluster right") && !said.contains("left"), "{said}");
        // The files stay open in a process that is being started: the locks must not.
        alone.release();
        drop(right);
        assert_eq!(look(&folder, &["MIG-a", "MIG-b"], false).await.free(), ["MIG-a", "MIG-b"]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&folder.0), mode(&folder.file("MIG-a", ""))), (0o1777, 0o666), "other users can, too");
    }

    #[tokio::test]
    async fn a_gpu_is_free_when_the_ranks_on_it_have_ended() {
        let parent = tempfile::tempdir().unwrap();
        let folder = GpuFolder(parent.path().join("gpus"));
        let held = hold(&folder, "MIG-a", true, "a").await;
        let files = folder.rank_files(names(&["MIG-a", "MIG-unknown"]).iter());
        let [ranks] = &files[..] else { panic!("{files:?}") };
        let ranks = File::open(ranks).unwrap();
        ranks.try_lock_shared().unwrap();
        let joined = hold(&folder, "MIG-a", true, "b").await;
        held.release();
        joined.release();
        for shared in [false, true] {
            let look = look(&folder, &["MIG-a"], shared).await;
            assert!(look.free().is_empty() && look.is_ending(), "{look:?}");
        }
        ranks.unlock().unwrap();
        assert_eq!(look(&folder, &["MIG-a"], false).await.free(), ["MIG-a"]);
    }

    #[tokio::test]
    async fn a_gpu_with_two_names_is_one() {
        let parent = tempfile::tempdir().unwrap();
        let look = look(&GpuFolder(parent.path().join("gpus")), &["901", "0901", "902"], false).await;
        assert_eq!(look.free(), ["901", "902"]);
        assert_eq!(look.taken(), ["GPU 0901 is GPU 901 by another name"]);
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_used_is_an_error_with_its_path() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(parent.path(), parent.path().join("link")).unwrap();
        for path in [file.clone(), file.join("gpus"), parent.path().join("missing/gpus"), parent.path().join("link")] {
            let look = GpuFolder(path.clone()).look(&CallContext::default(), &names(&["MIG-a"]), false).await;
            let error = look.expect_err("no folder");
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            assert!(
                error.to_string().contains(path.to_str().unwrap()) && error.to_string().contains("TMPDIR"),
                "{error}"
            );
        }
    }

    /// Another program is stopped in its turn.
    #[tokio::test(start_paused = true)]
    async fn a_turn_that_does_not_come_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let folder = GpuFolder(parent.path().join("gpus"));
        let _turn = look(&folder, &[], false).await;
        let error = folder.look(&CallContext::default(), &[], false).await.expect_err("not our turn");
        assert!(
            error.code() == Code::Unavailable && error.to_string().contains("is locked by another program"),
            "{error}"
        );
    }
}
