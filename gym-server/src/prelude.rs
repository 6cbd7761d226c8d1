//! The names that servers and the programs around them use: `use gym_server::prelude::*`.

pub use gym_core::prelude::*;

pub use gym_client::prelude::*;

pub use crate::agent::Episode;
#[cfg(feature = "cli")]
pub use crate::cli;
#[cfg(feature = "http")]
pub use crate::stack::{Build, Servers, Stack};
