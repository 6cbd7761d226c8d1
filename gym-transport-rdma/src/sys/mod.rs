//! UCX's functions and structures, and how the library gets into the process.
//!
//! The declarations are generated and committed; the symbols are resolved at run time, so everything builds where there
//! is no UCX. The published `ucx-sys` crate, which one may expect in this place, no longer builds.

mod folder;
mod hooks;
#[cfg(test)]
mod layout;
mod load;
mod signals;
pub(crate) mod ucp;

pub use load::{LIBRARY_VARIABLE, LibraryInfo, LoadError, LoadOptions};
pub(crate) use load::{Library, load};
