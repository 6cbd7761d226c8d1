//! Loading a library into this process: where it is looked for, and what was wrong there.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, OsString, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Location of a library that is loaded when it is used.
///
/// The search order is `path`, the library's environment variable (`GYM_UCX_LIBRARY`, `GYM_NCCL_LIBRARY`, `GYM_CUDA_LIBRARY`), the dynamic loader's
/// directories, then `search`. If `path` or the variable is set, no other location is tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The file of the library, or a directory with it. For UCX: a directory with the four libraries, or the path of libucp.
    pub path: Option<PathBuf>,
    /// Directories that are searched after those of the dynamic loader, such as Python's `site-packages`.
    pub search: Vec<PathBuf>,
}

impl LoadOptions {
    /// Returns the options for the library at this path.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), search: Vec::new() }
    }

    /// Returns the locations in their order. `variable` is the value of the library's variable.
    pub(crate) fn locations(&self, variable: Option<OsString>) -> Vec<Location> {
        if let Some(path) = &self.path {
            return vec![Location::Path(path.clone())];
        }
        if let Some(path) = variable.filter(|path| !path.is_empty()) {
            return vec![Location::Path(path.into())];
        }
        std::iter::once(Location::Loader).chain(self.search.iter().cloned().map(Location::Path)).collect()
    }
}

/// A location to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// A directory, or the path of the library.
    Path(PathBuf),
    /// The dynamic loader's directories.
    Loader,
}

/// A location that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The location.
    pub place: String,
    /// Reason why it was not used.
    pub why: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}

impl Attempt {
    /// Returns all attempts in one line.
    pub(crate) fn list(tried: &[Self]) -> String {
        tried.iter().map(Self::to_string).collect::<Vec<_>>().join("; ")
    }

    /// Returns the reasons alone, for a message that names the place already.
    pub(crate) fn reasons(tried: &[Self]) -> String {
        tried.iter().map(|attempt| attempt.why.as_str()).collect::<Vec<_>>().join("; ")
    }
}

/// Returns the loader's own message, which is the source of libloading's error.
pub(crate) fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the file from which the dynamic loader loaded this function.
pub(crate) fn path_of(function: *const c_void) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is a valid place; dladdr only compares the address with the loaded libraries.
    if unsafe { libc::dladdr(function, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: filled by dladdr, and all zeros before, which is a valid value. The name is a C string that the loader
    // keeps while the library is loaded, which is permanent.
    let name = unsafe { CStr::from_ptr(info.assume_init().dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Returns the directories with the packages of Python in the environment of this process, and those of `/usr/local`.
pub(crate) fn python_packages() -> Vec<PathBuf> {
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os);
    let prefixes = environments.filter(|prefix| !prefix.is_empty()).map(PathBuf::from);
    prefixes.chain([PathBuf::from("/usr/local")]).flat_map(|prefix| packages_of(&prefix)).collect()
}

/// Returns `lib/python3.N/site-packages` below the prefix of a Python, and `dist-packages`, which Debian's has.
fn packages_of(prefix: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"python3"));
    let mut versions: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_python).collect();
    versions.sort();
    let both = versions.iter().flat_map(|version| ["site-packages", "dist-packages"].map(|name| version.join(name)));
    both.filter(|packages| packages.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_comes_before_the_variable_and_both_exclude_everything_else() {
        let options = LoadOptions { path: Some("/opt/ucx".into()), search: vec!["/site".into()] };
        assert_eq!(options.locations(Some("/env".into())), [Location::Path("/opt/ucx".into())]);
        let options = LoadOptions { path: None, ..options };
        assert_eq!(options.locations(Some("/env".into())), [Location::Path("/env".into())]);
        assert_eq!(options.locations(Some("".into())), [Location::Loader, Location::Path("/site".into())]);
    }

    #[test]
    fn the_packages_of_a_python_are_found_below_its_prefix() {
        let prefix = tempfile::tempdir().expect("a folder");
        for folder in ["lib/python3.13/site-packages", "lib/python3.11/dist-packages", "lib/other/site-packages"] {
            std::fs::create_dir_all(prefix.path().join(folder)).expect("creates");
        }
        let expected = ["lib/python3.11/dist-packages", "lib/python3.13/site-packages"];
        assert_eq!(packages_of(prefix.path()), expected.map(|folder| prefix.path().join(folder)));
        assert_eq!(packages_of(Path::new("/nowhere/at/all")), [] as [PathBuf; 0]);
    }
}
