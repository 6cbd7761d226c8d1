//! Connector and listener: the transport traits over a fabric, how two ends find each other, and what UCX reports of itself.

pub(crate) mod bootstrap;
pub(crate) mod config;
pub(crate) mod connector;
pub(crate) mod host;
pub(crate) mod listener;
pub(crate) mod report;

pub use crate::messaging::round_trips::RoundTrips;
pub use bootstrap::ROUTE;
pub use config::{ConnectionReport, Ucx, UcxConfig, UcxStats};
pub use connector::UcxConnector;
pub use listener::{UcxIncoming, UcxListener};
pub use report::UcxReport;

/// The scheme of UCX connections: `ucx://` and the address at which the peer's bootstrap answers.
pub const SCHEME: &str = "ucx";
