//! UCX's functions and structures, and the loader of the library.
//!
//! The declarations are generated and committed, and the symbols are resolved at run time, so everything builds without
//! UCX. The published `ucx-sys` crate would serve this purpose, but it no longer builds.

mod directory;
mod hooks;
#[cfg(test)]
mod layout;
mod load;
mod signals;
pub(crate) mod ucp;

pub use crate::machine::LoadOptions;
pub use load::{LIBRARY_VARIABLE, LibraryInfo, LoadError};
pub(crate) use load::{Library, load};
