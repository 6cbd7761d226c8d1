//! The seam between the checks and what they look at: this machine, a folder that holds one, or a recording.
//!
//! A check asks a [`Machine`] and nothing else, so it is a pure function of the answers: a recording of what was asked is judged like the machine itself. Paths
//! are absolute, `/`-separated, and those of the machine that is judged.

mod folder;
mod library;
mod live;
mod recorder;
mod recording;
mod redaction;
mod root;
mod variables;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use crate::machine::folder::Folder;
pub use crate::machine::library::{Attempt, CUDA_LIBRARY_VARIABLE, LoadOptions, NCCL_LIBRARY_VARIABLE};
pub(crate) use crate::machine::library::{
    CUDA_FOLDERS, Location, NCCL_IN_PACKAGES, check_whole, loader_message, path_of, python_packages,
};
pub use crate::machine::live::Live;
pub use crate::machine::recorder::Recorder;
pub use crate::machine::recording::{Cut, RECORDING_FORMAT, Recording, RecordingError};
pub use crate::machine::redaction::Redactor;

/// Maximum length of a text. A longer file answers `EFBIG` 27, because half of a file would be judged wrongly.
const TEXT_BYTES_MAX: u64 = 4 << 20;
/// Maximum length of [`Machine::bytes`].
const BYTES_MAX: u64 = 4096;

/// Why a machine does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unknown {
    /// The system has refused, with this error number (`ENOENT` 2, `EACCES` 13, `EINVAL` 22). Reading a folder as a file is `EISDIR` 21.
    Errno(i32),
    /// The recording does not have it: nobody asked when it was made. It is not absent.
    NotRecorded,
}

impl Unknown {
    /// No such file or directory.
    pub const ENOENT: Self = Self::Errno(2);

    /// Returns `true` if what was asked for is known not to exist.
    #[must_use]
    pub fn is_absent(self) -> bool {
        // ENOENT, ENOTDIR
        matches!(self, Self::Errno(2 | 20))
    }
}

impl From<Errno> for Unknown {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno.raw_os_error())
    }
}

impl From<std::io::Error> for Unknown {
    fn from(error: std::io::Error) -> Self {
        Self::Errno(error.raw_os_error().unwrap_or_else(|| Errno::IO.raw_os_error()))
    }
}

/// An answer of a machine.
pub type Answer<T> = Result<T, Unknown>;

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// The interface, such as `eth0`.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
    /// The bits of its network.
    pub prefix: u8,
}

/// A shared library, as the loader of the machine would find it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// Its path on the machine, by its soname.
    pub path: String,
    /// Its version, if its file tells it: by the name that the soname leads to (`libnccl.so.2.27.3`), or within the file.
    pub version: Option<String>,
}

/// The answers of libraries about themselves when they were loaded, which only the live machine does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// The version of NCCL, or why it cannot be loaded; `None` if it was not loaded.
    pub nccl: Option<Result<String, String>>,
    /// The newest version of CUDA that the driver supports.
    pub cuda: Option<Result<String, String>>,
}

/// The space of a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// The size of the file system.
    pub total: u64,
    /// The bytes that an unprivileged user may still write.
    pub free: u64,
}

/// A machine, as checks look at it.
pub trait Machine: fmt::Debug {
    /// Returns the contents of a text file, untrimmed, with U+FFFD for what is not UTF-8.
    fn text(&self, path: &str) -> Answer<String>;

    /// Returns the first bytes of a binary file, at most 4,096, such as the configuration space of a PCI device.
    fn bytes(&self, path: &str) -> Answer<Vec<u8>>;

    /// Returns the sorted names in a folder.
    fn names(&self, folder: &str) -> Answer<Vec<String>>;

    /// Returns the path without links, on the machine, of something that exists.
    fn real(&self, path: &str) -> Answer<String>;

    /// Opens a device node for reading and writing, and closes it.
    fn open_node(&self, path: &str) -> Answer<()>;

    /// Returns the first library with this soname; `None` if the loader would find none.
    fn library(&self, soname: &str) -> Answer<Option<Library>>;

    /// Returns the variables of the process, as far as they are of this field.
    fn variables(&self) -> Answer<BTreeMap<String, String>>;

    /// Returns the addresses of all interfaces, in the order of the interfaces' indices.
    fn addresses(&self) -> Answer<Vec<InterfaceAddress>>;

    /// Returns the space of the file system at a mount point.
    fn space(&self, path: &str) -> Answer<Space>;

    /// Returns `true` if something exists, `false` if it is known not to.
    fn exists(&self, path: &str) -> Answer<bool> {
        match self.real(path) {
            Ok(_) => Ok(true),
            Err(unknown) if unknown.is_absent() => Ok(false),
            Err(unknown) => Err(unknown),
        }
    }
}

/// Reads a text, with U+FFFD for what is not UTF-8.
fn read_text(file: File) -> Answer<String> {
    let mut bytes = Vec::new();
    file.take(TEXT_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(Errno::FBIG.into());
    }
    let lossy = |error: std::string::FromUtf8Error| String::from_utf8_lossy(error.as_bytes()).into_owned();
    Ok(String::from_utf8(bytes).unwrap_or_else(lossy))
}
