//! The calling side of the gym SDK: names, configuration, collector, launcher.
#![forbid(unsafe_code)]

pub mod collect;
pub mod config;
mod cookies;
#[cfg(all(feature = "groups", target_os = "linux"))]
pub mod group;
#[cfg(target_os = "linux")]
pub mod launch;
mod peer;
mod pick;
#[cfg(all(feature = "groups", target_os = "linux"))]
pub mod provision;
pub mod registry;
mod serve;
mod server_client;
#[cfg(feature = "groups")]
pub mod train;
mod transports;

pub use cookies::CookieJar;
pub use gym_core::Balance;
#[cfg(feature = "http")]
pub use gym_transport_http as http;
#[cfg(feature = "rdma")]
pub use gym_transport_rdma as rdma;
pub use serve::serve;
pub use server_client::{CallOptions, ServerClient, Session};
#[cfg(all(feature = "http", feature = "rdma"))]
pub use transports::UcxMetrics;
pub use transports::{Offer, PathMetrics, PeerPath, Refusal, Transports};
