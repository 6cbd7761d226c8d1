//! Server library of the gym SDK: serves environments, agents and models, composes them from a configuration, and provides the
//! `rgym` command line.
//!
//! ```text
//!   rgym ─► cli ─► stack ─┬─► head          names of live servers
//!                         ├─► environment   /run ─► agent
//!                         ├─► agent         /run ─► model, resources
//!                         ├─► model         /v1/responses
//!                         └─► yours         tools, /verify       each served by role::RoleServer
//! ```
//!
//! A program that has every command of `rgym`, and a resources server of its own:
//!
//! ```
//! use gym_server::prelude::*;
//!
//! struct Exact;
//!
//! #[derive(serde::Deserialize)]
//! struct Task {
//!     expected: String,
//! }
//!
//! impl ResourcesServer for Exact {
//!     type Task = Task;
//!     async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
//!         Ok(Verdict::correct(response.last_text()?.trim() == task.expected))
//!     }
//! }
//!
//! # #[cfg(feature = "cli")]
//! fn main() -> std::process::ExitCode {
//!     let servers = Servers::stock().resources("exact", |_| Ok(Exact));
//! #   if std::env::args_os().len() == 1 {
//! #       return cli::main_with(servers, ["exact", "aliases"].map(Into::into)); // A documentation test has no arguments.
//! #   }
//!     cli::main(servers)
//! }
//! # #[cfg(not(feature = "cli"))]
//! # fn main() {}
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`prelude`] | the names that most programs use |
//! | `cli` | the `rgym` command line as a function (feature `cli`) |
//! | `stack` | starts the servers of a configuration in one process (feature `http`) |
//! | [`head`] | the head server: names of live servers, and the merged configuration |
//! | [`environment`], [`agent`], [`model`] | the servers that the SDK ships |
//! | [`role`] | serves an implementation of a role |
//! | [`metrics`] | Prometheus metrics of the process |
//!
//! Programs reach the other crates as `gym_server::gym_core`, `gym_server::gym_client` and `gym_server::gym_group` (feature `groups`). To choose among the crates, see [`gym_core`].
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod agent;
#[cfg(feature = "cli")]
pub mod cli;
pub mod environment;
pub mod head;
pub mod metrics;
pub mod model;
pub mod prelude;
pub mod role;

#[cfg(feature = "http")]
pub mod stack;
#[cfg(test)]
mod testing;

#[cfg(feature = "groups")]
pub use gym_group;
pub use {gym_client, gym_core};

#[cfg(feature = "http")]
pub use stack::{Build, Servers, Stack, StackOptions};

/// The program of README.md, as a documentation test.
#[cfg(all(doctest, feature = "cli"))]
#[doc = include_str!("../README.md")]
struct Readme;
