//! Errors, cancellation, progress, time, files and randomness: the base of all other modules.

pub(crate) mod cancel;
#[cfg(target_os = "linux")]
pub mod cgroup;
pub(crate) mod error;
pub(crate) mod failure;
pub(crate) mod hex;
pub(crate) mod machine;
pub mod process;
pub(crate) mod progress;
pub mod watch;
pub(crate) mod world;

pub use cancel::{CancelOnDrop, CancelToken, Cancelled};
pub use error::{Code, Error, ErrorLink, Execution, Result};
pub use failure::FailureClass;
pub use machine::{host_name, temporary_folder};
#[doc(hidden)]
pub use machine::{is_out_of_descriptors, raise_descriptors, runtime_threads};
pub use progress::CallProgress;
pub use world::{FileLock, Files, RealFiles, World};
