//! Ports of RDMA devices, and the address (GID) that RoCE v2 uses on each port.
//!
//! A RoCE port has a table of up to 256 GIDs, with one row per address of its interface and version of RoCE. The index
//! of the right row differs between hosts (0, 1 and 3 are common), so it is computed here. Rows in the middle can be
//! empty; reading the attributes of an empty row fails with `EINVAL`.

use serde::Serialize;

use crate::tuning::host::{self, Host};

/// One port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Port {
    /// Name of the device, such as `mlx5_0`.
    pub device: String,
    /// Number of the port, from 1.
    pub port: u32,
    /// State of the port, such as `ACTIVE` or `DOWN`.
    pub state: String,
    /// Whether the port is active.
    pub active: bool,
    /// `Ethernet` (RoCE) or `InfiniBand`.
    pub link_layer: String,
    /// Rate of the port, such as `400 Gb/sec (4X NDR)`.
    pub rate: String,
    /// GID to use: for RoCE the best row of version 2, for InfiniBand the first row. `None` if there is none.
    pub gid: Option<Gid>,
}

/// One row of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Gid {
    /// Index of the row, for `UCX_IB_GID_INDEX` and `NCCL_IB_GID_INDEX`.
    pub index: u32,
    /// Address in IPv6 notation, or in IPv4 notation if it is mapped.
    pub address: String,
    /// Version, `RoCE v2` or `IB/RoCE v1`; empty if the kernel does not report it.
    pub kind: String,
    /// Network interface; empty for InfiniBand.
    pub interface: String,
}

/// Returns all ports of all devices, sorted by name.
pub(crate) fn ports(host: &Host<'_>) -> Vec<Port> {
    let ports = host.cards.iter().flat_map(|card| &card.ports);
    ports.map(|port| written(host, port)).collect()
}

fn written(host: &Host<'_>, port: &host::Port) -> Port {
    let or_unknown = |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
    let gid = row(host, port).map(|row| Gid {
        index: row.index,
        address: row.written(),
        kind: row.kind.clone(),
        interface: row.interface.clone(),
    });
    Port {
        device: port.card.clone(),
        port: port.number,
        state: or_unknown(&port.state),
        active: port.is_active(),
        link_layer: or_unknown(&port.link_layer),
        rate: or_unknown(&port.rate),
        gid,
    }
}

/// Selects the row. For RoCE: version 2, interface not down, the address of a link last. For InfiniBand: the first.
pub(crate) fn row<'h>(host: &Host<'_>, port: &'h host::Port) -> Option<&'h host::Row> {
    if !port.is_roce() {
        return port.rows.first();
    }
    port.best(|row| host.interface(&row.interface).is_none_or(|interface| !interface.is_down))
}
