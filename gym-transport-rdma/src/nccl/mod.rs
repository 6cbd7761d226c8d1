//! NCCL, loaded when it is used: its version, its texts of errors, and its unique id, none of which need a GPU. With the feature `nccl` also a backend of
//! collective operations for memory of GPUs.
//!
//! Source: `nccl.h` of NCCL 2.19 to 2.32. The functions that are bound have one signature in all of them.

#[cfg(feature = "nccl")]
mod backend;
#[cfg(feature = "nccl")]
mod bindings;
#[cfg(feature = "nccl")]
pub mod cuda;
#[cfg(feature = "nccl")]
pub mod devices;
#[cfg(feature = "nccl")]
mod engine;
#[cfg(feature = "nccl")]
mod failure;
mod library;
#[cfg(feature = "nccl")]
mod path;
#[cfg(feature = "nccl")]
mod raw;
mod unique_id;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

pub use crate::machine::{Attempt, CUDA_LIBRARY_VARIABLE, LoadOptions, NCCL_LIBRARY_VARIABLE};
#[cfg(feature = "nccl")]
pub use crate::nccl::backend::{NcclCollectives, NcclOptions};
pub(crate) use crate::nccl::library::cuda_driver_version;
use crate::nccl::library::{Functions, Library};
pub use crate::nccl::unique_id::{UNIQUE_ID_BYTES, UniqueId};

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclVersion {
    /// 2 in `2.27.3`.
    pub major: u32,
    /// 27 in `2.27.3`.
    pub minor: u32,
    /// 3 in `2.27.3`.
    pub patch: u32,
}

impl NcclVersion {
    /// The oldest version that is supported.
    pub const OLDEST: Self = Self { major: 2, minor: 19, patch: 0 };

    /// Reads the code of `ncclGetVersion`. Since 2.9 it is major · 10000 + minor · 100 + patch; before, major · 1000 + minor · 100 + patch.
    #[must_use]
    pub fn from_code(code: u32) -> Self {
        let of_major = if code >= 10_000 { 10_000 } else { 1_000 };
        let rest = code % of_major;
        Self { major: code / of_major, minor: rest / 100, patch: rest % 100 }
    }

    /// Returns the code of `ncclGetVersion`, in the form since 2.9.
    #[must_use]
    pub fn code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Why NCCL cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NcclError {
    /// No location has an NCCL of 2.19 or later that can be loaded.
    #[error("{}", library::NCCL.missing(tried))]
    NotFound {
        /// All locations that were tried, in order.
        tried: Vec<Attempt>,
    },
    /// A function has failed. NCCL adds codes with its versions.
    #[error("{function} failed with code {code} ({text})")]
    Failed {
        /// The function.
        function: &'static str,
        /// The `ncclResult_t`.
        code: i32,
        /// NCCL's text for the code.
        text: String,
    },
}

/// NCCL in this process. It is never unloaded, because it leaves threads and exit handlers behind.
#[derive(Clone, Debug)]
pub struct Nccl {
    functions: Functions,
    path: Arc<Path>,
}

impl Nccl {
    /// Loads the library. The search is that of [`LoadOptions`], and then the packages of Python: `nvidia/nccl/lib` and `torch/lib` below `site-packages` of
    /// `VIRTUAL_ENV`, `CONDA_PREFIX` and `/usr/local`. NCCL reads each of its settings once in a process, at the first call that needs it.
    ///
    /// # Errors
    /// [`NcclError::NotFound`], also if the library is older than 2.19.
    pub fn load(options: &LoadOptions) -> Result<Self, NcclError> {
        Library::load(&library::NCCL, options, Self::of).map_err(|tried| NcclError::NotFound { tried })
    }

    fn of(library: &Library) -> Result<Self, String> {
        let nccl = Self { functions: Functions::of(library)?, path: library.path().into() };
        let version = nccl.version().map_err(|error| error.to_string())?;
        if version < NcclVersion::OLDEST {
            return Err(format!("its version is {version}; install {} or later", NcclVersion::OLDEST));
        }
        Ok(nccl)
    }

    /// Returns the path from which the library was loaded.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the version.
    ///
    /// # Errors
    /// [`NcclError::Failed`].
    pub fn version(&self) -> Result<NcclVersion, NcclError> {
        self.functions.version()
    }

    /// Makes the id by which the ranks of a communicator find each other. NCCL chooses an interface by its settings, and a thread of it waits there for the
    /// ranks until the process ends.
    ///
    /// # Errors
    /// [`NcclError::Failed`]: code 5 (`ncclInvalidUsage`) or 3 (`ncclInternalError`) where no interface fits the settings. The reason is in NCCL's log
    /// (`NCCL_DEBUG=WARN`).
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        self.functions.unique_id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_versions_are_read_as_the_header_writes_them() {
        let written = |code| NcclVersion::from_code(code).to_string();
        assert_eq!(written(23_203), "2.32.3");
        assert_eq!(written(21_903), "2.19.3");
        assert_eq!(written(2_804), "2.8.4", "before 2.9");
    }

    fn tried(error: NcclError) -> Vec<Attempt> {
        let NcclError::NotFound { tried } = error else { panic!("{error}") };
        tried
    }

    #[test]
    fn what_is_no_library_and_what_is_another_one_are_errors_with_place_and_help() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = folder.path().join("libnccl.so.2");
        std::fs::write(&text, "no library").expect("writes");
        let refused = |path: &Path| Nccl::load(&LoadOptions::at(path)).expect_err("no NCCL");
        let error = refused(&text).to_string();
        let beginning = format!("NCCL 2.19 or later cannot be loaded: {}: ", text.display());
        assert!(error.starts_with(&beginning), "{error}");
        for help in ["pip install nvidia-nccl-cu12", "apt-get install libnccl2", NCCL_LIBRARY_VARIABLE] {
            assert!(error.contains(help), "{error}");
        }
        let missing = folder.path().join("missing.so");
        let why = "no such file or directory".to_owned();
        assert_eq!(tried(refused(&missing)), [Attempt { place: missing.display().to_string(), why }]);
        let why = "it has no function ncclGetVersion".to_owned();
        assert_eq!(tried(refused(Path::new("libc.so.6"))), [Attempt { place: "libc.so.6".to_owned(), why }]);
    }

    #[test]
    fn a_directory_is_searched_for_the_library_and_for_the_wheel() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = || tried(Nccl::load(&LoadOptions::at(folder.path())).expect_err("no NCCL"));
        let place = folder.path().display().to_string();
        assert_eq!(refused(), [Attempt { place, why: "has no libnccl.so.2".to_owned() }]);
        let files = ["nvidia/nccl/lib/libnccl.so.2", "torch/lib/libnccl.so.2"].map(|name| folder.path().join(name));
        for file in &files {
            std::fs::create_dir_all(file.parent().expect("a parent")).expect("creates");
            std::fs::write(file, "no library").expect("writes");
        }
        let places: Vec<String> = refused().into_iter().map(|attempt| attempt.place).collect();
        assert_eq!(places, files.map(|file| file.display().to_string()), "in this order");
    }
}
