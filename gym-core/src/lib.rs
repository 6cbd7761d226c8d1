//! Core types of the gym SDK, and the traits that environments, agents, models, transports and workers implement.
//!
//! ```text
//!   caller ── Request ──► Channel ──► Link ═══ transport ═══ Incoming ──► Handler ──► your server
//!      ▲                                                                                 │
//!      └───────────── Response, or Error: what failed, and whether it may have run ◄─────┘
//! ```
//!
//! An environment that scores one answer, and a test of it. It needs neither a server nor a network:
//!
//! ```
//! use gym_core::prelude::*;
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
//! #[tokio::main]
//! async fn main() -> Result<()> {
//!     let answer = r#"{"output": [{"type": "message", "content": [{"type": "output_text", "text": "4 "}]}]}"#;
//!     let (task, answer) = (Task { expected: "4".into() }, ModelResponse(RawObject::parse(answer)?));
//!     let verdict = Exact.verify(&CallContext::default(), &SessionId::new("1"), task, &answer).await?;
//!     assert_eq!(verdict.reward, 1.0);
//!     Ok(())
//! }
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`prelude`] | the names with which environments, agents and models are written |
//! | [`server`] | roles: environments, agents and models, with sessions, tool arguments and model responses |
//! | [`message`] | calls: context, request, response, JSON objects that are edited without parsing them |
//! | [`transport`] | channels to a peer, the traits of a transport, the transport within one process |
//! | [`registry`] | names of live servers, leases, choice of a replica |
//! | [`rollout`] | task keys, attempts, outcomes, the ledger, exact statistics |
//! | `group` | what a worker is written with: typed methods, batches, rank layouts (feature `groups`); `gym-group` has the rest of worker groups |
//! | [`observe`] | work in flight, waits and stalls |
//! | [`base`] | errors, cancellation, progress, files, time and randomness |
//! | `testing` | conformance suites, simulated disk and network (feature `testing`) |
//!
//! # Which crate do I need?
//!
//! | to | depend on |
//! |---|---|
//! | write an environment, an agent or a model, and run it with the `rgym` command line | `gym-server`, which re-exports `gym-core` and `gym-client` |
//! | call servers, or collect rollouts, from a program of your own | `gym-client` with the feature `http`, and `gym-core` |
//! | run worker groups | `gym-group`, with the feature `http` for ranks in processes and on nodes, and `ray` for those on a Ray cluster |
//! | write a transport, a registry or a ledger | `gym-core`; its feature `testing` has their conformance suites |
//! | use HTTP, TCP or Unix sockets | the feature `http` of `gym-client`; `gym-server` has it by default |
//! | use shared memory or RDMA through UCX | the feature `rdma` of `gym-client` or `gym-server` |
//!
//! `gym-core` and `gym-client` have no default features, so that naming them beside `gym-server` changes nothing. By default, `gym-server` has `http`, `cli` and
//! `tls` (https towards model endpoints); `groups`, `rdma`, `ray` and `parquet` are named by whoever wants them, and `full` has all.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod base;
#[cfg(feature = "groups")]
pub mod group;
pub mod message;
pub mod observe;
pub mod prelude;
pub mod registry;
pub mod rollout;
pub mod server;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transport;

pub use base::{CancelToken, Code, Error, Execution, Result, World};
pub use message::{
    CallContext, Incarnation, Message, Metadata, RawObject, Request, Response, Rope, Route, Status, Verb,
};
pub use server::{AgentServer, ModelResponse, ModelServer, ResourcesServer, RolloutServer, SessionId, Verdict};
pub use transport::{Channel, Endpoint, Handler};

/// The program of README.md, as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
