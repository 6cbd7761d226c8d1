//! Connector and listener: implement the transport traits over a fabric, exchange addresses, and report UCX's state.

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

/// Scheme of UCX endpoints: `ucx://` and the address of the peer's bootstrap.
pub const SCHEME: &str = "ucx";
