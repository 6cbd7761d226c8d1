//! Connector and listener: implement the transport traits over a fabric, exchange addresses, and report UCX's state.

pub(crate) mod bootstrap;
pub(crate) mod config;
pub(crate) mod connector;
pub(crate) mod host;
pub(crate) mod listener;
pub(crate) mod report;

use gym_core::transport::Transport;

pub use crate::fabric::{
    ConnectionStats, Driver, FabricError, FabricOptions, FabricStats, Lanes, LoadError, LoadOptions,
};
pub use crate::messaging::round_trips::RoundTrips;
pub use bootstrap::ROUTE;
pub use config::{ConnectionReport, Ucx, UcxConfig, UcxStats};
pub use connector::UcxConnector;
pub use listener::{UcxIncoming, UcxListener};
pub use report::UcxReport;

/// `shm`: UCX over memory shared by two processes of one host.
pub const SHM: Transport = Transport::new("shm", 100).on_request();
/// `rdma`: UCX over an RDMA device.
pub const RDMA: Transport = Transport::new("rdma", 200).on_request();
/// `ucx_tcp`: UCX over TCP.
pub const UCX_TCP: Transport = Transport::new("ucx_tcp", 300).on_request();

/// Scheme of UCX endpoints: `ucx://` and the address of the peer's bootstrap.
pub const SCHEME: &str = "ucx";
