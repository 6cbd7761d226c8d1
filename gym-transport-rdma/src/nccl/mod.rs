//! NCCL, loaded when it is used: its version, its texts of errors, and its unique id, none of which need a GPU. With the feature `nccl` also a backend of
//! collective operations for memory of GPUs.
//!
//! Source: `nccl.h` of NCCL 2.19 to 2.32. The functions that are bound have one signature in all of them.

#[cfg(feature = "nccl")]
mod backend;
#[cfg(feature = "nccl")]
mod bindings;
#[cfg(feature = "nccl")]
mod communicator;
#[cfg(feature = "nccl")]
pub mod cuda;
#[cfg(feature = "nccl")]
pub mod devices;
mod elf;
#[cfg(feature = "nccl")]
mod engine;
#[cfg(feature = "nccl")]
mod failure;
mod library;
#[cfg(feature = "nccl")]
mod raw;
mod unique_id;

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

#[cfg(feature = "nccl")]
pub use crate::nccl::backend::{NcclCollectives, NcclOptions};
use crate::nccl::library::Functions;
pub(crate) use crate::nccl::library::loader_message;
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
    /// The file is no library that this process can load.
    #[error("NCCL cannot be loaded from {path}: {why}")]
    Load {
        /// The file.
        path: PathBuf,
        /// The words of the dynamic loader.
        why: String,
    },
    /// The library lacks a function, so it is not NCCL.
    #[error("{path} is not NCCL: it has no function {function}")]
    NotNccl {
        /// The file.
        path: PathBuf,
        /// The function.
        function: &'static str,
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
}

impl Nccl {
    /// Loads the library at this path. NCCL reads each of its settings once in a process, at the first call that needs it.
    ///
    /// # Errors
    /// [`NcclError::Load`] and [`NcclError::NotNccl`].
    pub fn load(path: &Path) -> Result<Self, NcclError> {
        Functions::load(path).map(|functions| Self { functions })
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

    #[test]
    fn what_is_no_library_and_what_is_another_one_are_errors() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = folder.path().join("libnccl.so.2");
        std::fs::write(&text, "no library").expect("writes");
        let error = Nccl::load(&text).expect_err("a text");
        assert!(matches!(&error, NcclError::Load { .. }), "{error}");
        assert!(error.to_string().contains("libnccl.so.2"), "{error}");
        let missing = Nccl::load(&folder.path().join("missing.so")).expect_err("not there");
        assert!(matches!(missing, NcclError::Load { .. }), "{missing}");
        let other = Nccl::load(Path::new("libc.so.6")).expect_err("another library");
        assert_eq!(other.to_string(), "libc.so.6 is not NCCL: it has no function ncclGetVersion");
    }
}
