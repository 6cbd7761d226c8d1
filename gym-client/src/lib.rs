//! Client library of the gym SDK: calls servers by name, and collects rollouts.
//!
//! ```text
//!   tasks.jsonl ──► collect ──► ServerClient ── resolve ──► Registry (head server)
//!   rollouts.jsonl ◄── ledger ◄───┘    └─ pick a replica ──► Transports ──► Channel ──► server
//! ```
//!
//! A server in this process, and a call of it by its name:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use gym_client::{CallOptions, ServerClient, Transports};
//! use gym_core::registry::{MemoryRegistry, Registration, Registry};
//! use gym_core::server::ServerKind;
//! use gym_core::transport::{InProcess, Listener, handler_fn, serve};
//! use gym_core::{CallContext, Request, Response, Result, World};
//!
//! #[tokio::main]
//! async fn main() -> Result<()> {
//!     let cx = CallContext::within(Duration::from_secs(5));
//!     let (in_process, registry) = (InProcess::new(), MemoryRegistry::new());
//!     let listener = in_process.listen("policy_model")?;
//!     registry.register(&cx, Registration::new("policy_model", ServerKind::Model, listener.endpoints())).await?;
//!     let echo = handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) });
//!     tokio::spawn(serve(Box::new(listener), Arc::new(echo), Default::default(), Duration::ZERO));
//!
//!     // Servers of other processes are found with a `RemoteRegistry`, and called over `Transports::standard()`.
//!     let client = ServerClient::new(Arc::new(registry), Transports::from(in_process), &World::real());
//!     let body = r#"{"input": "hi"}"#;
//!     let response = client.post(&cx, "policy_model", "/v1/responses", body, CallOptions::default()).await?;
//!     assert_eq!(&response.message.head.to_bytes()[..], body.as_bytes());
//!     Ok(())
//! }
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`prelude`] | the names that most programs use |
//! | [`collect`] | runs rollouts and records them in JSONL files |
//! | [`config`] | NeMo Gym's YAML as a typed configuration |
//! | [`registry`] | server names and leases: those of a head server, or of a file |
//! | [`work`] | pulled work: pools, and workers that take rollouts when they have capacity |
//! | [`values`] | large values by reference: put once, fetched once by each node |
//! | [`transport`] | the transports of a program, and the choice among them |
//! | `launch` | child processes, such as Python servers (Linux) |
//! | [`metrics`] | the text of `GET /metrics`, and the metrics of every process |
//!
//! [`ServerClient`], [`Session`] and [`CookieJar`] are at the root. To choose among the crates, see [`gym_core`].
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod client;
pub mod collect;
pub mod config;
#[cfg(target_os = "linux")]
pub mod launch;
pub mod metrics;
pub mod prelude;
pub mod registry;
pub mod transport;
pub mod work;

#[doc(hidden)]
pub use client::url as client_url;
pub use client::values;
pub use client::{
    AwaitedServer, AwaitedServers, CallOptions, CookieJar, JOINS_RUNS_LABEL, SERVER_TIMEOUT, ServerClient, Session,
};
pub use transport::Transports;

/// The program of README.md, as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
