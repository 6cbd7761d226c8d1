//! Plain HTTP/1.1: our own pooled client, and a server based on hyper. A connection carries one call at a time.

mod activity;
pub(crate) mod config;
mod connector;
mod exchange;
mod incoming;
mod listener;
mod pool;

pub use config::HttpConfig;
pub use connector::HttpConnector;
pub use incoming::HttpIncoming;
pub use listener::HttpListener;

/// The scheme of plain HTTP endpoints: `http://host:port`.
pub const SCHEME: &str = "http";
