//! The calling side of the gym SDK: names, configuration, collector, launcher.
#![forbid(unsafe_code)]

mod client;
pub mod collect;
pub mod config;
#[cfg(all(feature = "groups", target_os = "linux"))]
pub mod group;
#[cfg(target_os = "linux")]
pub mod launch;
pub mod prelude;
pub mod registry;
pub mod transport;

pub use client::{CallOptions, CookieJar, ServerClient, Session};
pub use transport::Transports;
