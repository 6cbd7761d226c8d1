//! Loads UCX into the process, once and permanently.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_LAZY};
use parking_lot::Mutex;

use super::directory::{self, LIBRARIES};
use super::hooks::FunctionStarts;
use super::signals;
use super::ucp::{UCP_API_MAJOR, UCP_API_MINOR, Ucp};
use crate::machine::{Attempt, LoadOptions, Location, loader_message, path_of};

/// Environment variable that locates UCX: a directory with libucm, libucs, libuct and libucp, or the path of libucp.
pub const LIBRARY_VARIABLE: &str = "GYM_UCX_LIBRARY";

const SONAME: &str = "libucp.so.0";

/// The loaded library, and the effects of loading it on the process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryInfo {
    /// Version of UCX, such as `1.13.1`.
    pub version: String,
    /// Path of libucp.
    pub path: PathBuf,
    /// Signals whose handlers UCX had replaced and this crate restored.
    pub signals_restored: Vec<i32>,
    /// Functions of libc that are now patched in memory (`mmap`, …). `UCX_MEM_MMAP_HOOK_MODE=none` in the environment
    /// prevents it, if it is set before the process starts.
    pub patched: Vec<&'static str>,
}

/// Reason why UCX cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// No location has a UCX that can be loaded.
    NotFound {
        /// All locations that were tried, in order.
        tried: Vec<Attempt>,
    },
    /// The library is older than 1.13, or lacks a function.
    Unfit {
        /// Path of libucp.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// The process has loaded another UCX already, and cannot load two.
    AnotherLoaded {
        /// Path of the loaded one.
        loaded: PathBuf,
        /// Path of the requested one.
        wanted: PathBuf,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { tried } => {
                write!(f, "UCX {UCP_API_MAJOR}.{UCP_API_MINOR} or later cannot be loaded: looked for {SONAME} ")?;
                write!(
                    f,
                    "{}. Install it (Debian, Ubuntu: apt-get install libucx0; Fedora: dnf install ucx; ",
                    Attempt::list(tried)
                )?;
                write!(f, "pip install libucx-cu12, without RDMA) or set {LIBRARY_VARIABLE} to its directory")
            }
            Self::Unfit { path, why } => write!(
                f,
                "{} is not a UCX {UCP_API_MAJOR}.{UCP_API_MINOR} or later: {why}. Install a newer one or set {LIBRARY_VARIABLE} to its directory",
                path.display()
            ),
            Self::AnotherLoaded { loaded, wanted } => write!(
                f,
                "load UCX from {}: this process has already loaded {}; use the same path for both",
                wanted.display(),
                loaded.display()
            ),
        }
    }
}

impl std::error::Error for LoadError {}

/// The library in this process. Never unloaded, because it leaves threads, exit handlers and patches behind.
pub(crate) struct Library {
    pub(crate) api: Ucp,
    version: String,
    path: PathBuf,
    wanted: Option<PathBuf>,
    signals_restored: Vec<i32>,
    before: FunctionStarts,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UCX {} from {}", self.version, self.path.display())
    }
}

impl Library {
    pub(crate) fn info(&self) -> LibraryInfo {
        LibraryInfo {
            version: self.version.clone(),
            path: self.path.clone(),
            signals_restored: self.signals_restored.clone(),
            patched: self.before.patched(),
        }
    }
}

/// Loads the library with the first call. Later calls return the same library.
///
/// # Errors
/// [`LoadError`], also if a later call requests another path.
pub(crate) fn load(options: &LoadOptions) -> Result<&'static Library, LoadError> {
    static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
    let mut loaded = LOADED.lock();
    if let Some(library) = *loaded {
        return match &options.path {
            Some(wanted) if library.wanted.as_ref() != Some(wanted) && *wanted != library.path => {
                Err(LoadError::AnotherLoaded { loaded: library.path.clone(), wanted: wanted.clone() })
            }
            _ => Ok(library),
        };
    }
    let library = load_first(&options.locations(std::env::var_os(LIBRARY_VARIABLE)), options.path.clone())?;
    let library = &*Box::leak(Box::new(library));
    *loaded = Some(library);
    Ok(library)
}

fn load_first(locations: &[Location], wanted: Option<PathBuf>) -> Result<Library, LoadError> {
    let mut tried = Vec::new();
    for place in locations {
        let before = FunctionStarts::now();
        let (opened, signals_restored) = signals::preserving(|| open(place));
        match opened {
            Ok(loaded) => return bind(loaded, wanted, signals_restored, before),
            Err(attempt) => tried.push(attempt),
        }
    }
    Err(LoadError::NotFound { tried })
}

/// Flags of `dlopen`. With `RTLD_NODELETE`, a library stays in the process even if its handle is closed.
const FLAGS: i32 = RTLD_LAZY | RTLD_GLOBAL | libc::RTLD_NODELETE;

fn open(place: &Location) -> Result<Loaded, Attempt> {
    let failed = |place: String, why: String| Err(Attempt { place, why });
    let (files, library) = match place {
        Location::Loader => (Vec::new(), PathBuf::from(SONAME)),
        Location::Path(path) if path.is_dir() => match directory::find(path) {
            Some([ucm, ucs, uct, ucp]) => (vec![ucm, ucs, uct], ucp),
            None => return failed(path.display().to_string(), format!("has no {}", LIBRARIES.join(", "))),
        },
        Location::Path(path) if path.is_file() => {
            let same_directory = path.parent().and_then(directory::find).map(|[ucm, ucs, uct, _]| vec![ucm, ucs, uct]);
            (same_directory.unwrap_or_default(), path.clone())
        }
        Location::Path(path) => return failed(path.display().to_string(), "no such file or directory".to_owned()),
    };
    let open = |file: &PathBuf| {
        // SAFETY: loading runs the library's constructors. This is UCX, under its own name from the loader's
        // directories or from the user's location. The caller undoes or reports the known effects of its constructors:
        // signal handlers and patches of libc. It holds the lock that makes this the only load.
        unsafe { Loaded::open(Some(file), FLAGS) }.map_err(|error| {
            let place = match place {
                Location::Loader => "in the loader's directories".to_owned(),
                Location::Path(_) => file.display().to_string(),
            };
            Attempt { place, why: loader_message(&error) }
        })
    };
    for file in &files {
        open(file)?;
    }
    open(&library)
}

fn bind(
    loaded: Loaded,
    wanted: Option<PathBuf>,
    signals_restored: Vec<i32>,
    before: FunctionStarts,
) -> Result<Library, LoadError> {
    // SAFETY: `Ucp`'s fields have the types of the headers of 1.13. An older library is rejected below before any
    // function is called except the version function, whose type never changed.
    let api = match unsafe { Ucp::from_library(loaded) } {
        Ok(api) => api,
        Err(error) => return Err(LoadError::Unfit { path: PathBuf::from(SONAME), why: loader_message(&error) }),
    };
    let path = path_of(api.ucp_get_version as *const c_void).unwrap_or_else(|| PathBuf::from(SONAME));
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three valid places for one unsigned integer each.
    unsafe { (api.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut patch) };
    let version = format!("{major}.{minor}.{patch}");
    if (major, minor) < (UCP_API_MAJOR, UCP_API_MINOR) {
        return Err(LoadError::Unfit { path, why: format!("its version is {version}") });
    }
    Ok(Library { api, version, path, wanted, signals_restored, before })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(locations: &[Location]) -> String {
        load_first(locations, None).unwrap_err().to_string()
    }

    #[test]
    fn a_missing_library_is_told_with_every_place_and_how_to_install_it() {
        let empty = tempfile::tempdir().unwrap();
        let message = message(&[Location::Path("/nowhere/libucp.so.0".into()), Location::Path(empty.path().into())]);
        assert!(message.contains("/nowhere/libucp.so.0: no such file or directory"), "{message}");
        assert!(message.contains(&format!("{}: has no libucm, libucs", empty.path().display())), "{message}");
        assert!(message.contains("apt-get install libucx0") && message.contains(LIBRARY_VARIABLE), "{message}");
    }

    #[test]
    fn a_file_that_is_no_library_is_told_in_the_loaders_words() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libucp.so.0");
        std::fs::write(&file, "rubbish").unwrap();
        let message = message(&[Location::Path(file.clone())]);
        assert!(message.contains(&format!("{}: ", file.display())) && message.contains("too short"), "{message}");
    }

    #[test]
    fn a_library_without_the_functions_is_unfit() {
        // Any library other than UCX serves. A link, because a UCX may be in the same directory as the file itself.
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("libucp.so.0");
        std::os::unix::fs::symlink(path_of(libc::malloc as *const c_void).unwrap(), &link).unwrap();
        let Ok(opened) = open(&Location::Path(link)) else { panic!("libc can be opened again") };
        let error = bind(opened, None, Vec::new(), FunctionStarts::now()).unwrap_err();
        assert!(matches!(&error, LoadError::Unfit { why, .. } if why.contains("uc")), "{error}");
    }
}
