//! Ports of RDMA devices from sysfs, and the address (GID) that RoCE v2 uses on each port.
//!
//! A RoCE port has a table of up to 256 GIDs, with one row per address of its interface and version of RoCE. The index
//! of the right row differs between hosts (0, 1 and 3 are common), so it is computed here. Rows in the middle can be
//! empty; reading the attributes of an empty row fails with `EINVAL`.

use std::net::Ipv6Addr;

use serde::Serialize;

use crate::probe::files::Files;

const SYSFS: &str = "/sys/class/infiniband";

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

/// A row with the properties that determine its rank.
struct Row {
    gid: Gid,
    address: Ipv6Addr,
    /// `false` only if the interface is known to be down.
    up: bool,
}

impl Port {
    pub(crate) fn is_ethernet(&self) -> bool {
        self.link_layer == "Ethernet"
    }

    pub(crate) fn name(&self) -> String {
        format!("{} port {}", self.device, self.port)
    }
}

/// Returns all ports of all devices, sorted by name.
pub(crate) fn ports(files: &Files<'_>) -> Vec<Port> {
    let devices = files.names(SYSFS).into_iter();
    devices.flat_map(|device| ports_of(files, &device)).collect()
}

fn ports_of(files: &Files<'_>, device: &str) -> Vec<Port> {
    let mut ports: Vec<Port> = Vec::new();
    for name in files.names(&format!("{SYSFS}/{device}/ports")) {
        let Ok(port) = name.parse() else { continue };
        let base = format!("{SYSFS}/{device}/ports/{name}");
        let read = |name: &str| files.text(&format!("{base}/{name}")).unwrap_or_else(|| "unknown".to_owned());
        let state = read("state");
        let link_layer = read("link_layer");
        let gid = choose(rows(files, &base), link_layer == "Ethernet");
        ports.push(Port {
            device: device.to_owned(),
            port,
            // The format is "4: ACTIVE". Only the number is compared.
            active: state.split(':').next() == Some("4"),
            state: state.split_once(':').map_or(state.as_str(), |(_, word)| word.trim()).to_owned(),
            link_layer,
            rate: read("rate"),
            gid,
        });
    }
    ports.sort_by_key(|port| port.port);
    ports
}

fn rows(files: &Files<'_>, base: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for name in files.names(&format!("{base}/gids")) {
        let address = files.text(&format!("{base}/gids/{name}")).and_then(|text| text.parse::<Ipv6Addr>().ok());
        let (Ok(index), Some(address)) = (name.parse(), address) else { continue };
        if address.is_unspecified() {
            continue;
        }
        let attribute = |of: &str| files.text(&format!("{base}/gid_attrs/{of}/{name}")).unwrap_or_default();
        let interface = attribute("ndevs");
        let state = files.text(&format!("/sys/class/net/{interface}/operstate"));
        let written = address.to_ipv4_mapped().map_or_else(|| address.to_string(), |address| address.to_string());
        let gid = Gid { index, address: written, kind: attribute("types"), interface };
        rows.push(Row { gid, address, up: state.is_none_or(|state| state != "down") });
    }
    rows
}

/// Selects the GID. For RoCE: version 2, interface up, IPv4 before global IPv6 before link-local, then the lowest
/// index.
fn choose(rows: Vec<Row>, ethernet: bool) -> Option<Gid> {
    let fit = rows.into_iter().filter(|row| !ethernet || (row.gid.kind == "RoCE v2" && row.up));
    let rank = |row: &Row| match row.address {
        address if address.to_ipv4_mapped().is_some() => 0_u8,
        address if !address.is_unicast_link_local() => 1,
        _ => 2,
    };
    let order = |row: &Row| if ethernet { (rank(row), row.gid.index) } else { (0, row.gid.index) };
    fit.min_by_key(order).map(|row| row.gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(index: u32, address: &str, kind: &str, up: bool) -> Row {
        let address = address.parse().expect("an address");
        let gid = Gid { index, address: String::new(), kind: kind.to_owned(), interface: "eth0".to_owned() };
        Row { gid, address, up }
    }

    fn chosen(rows: Vec<Row>, ethernet: bool) -> Option<u32> {
        choose(rows, ethernet).map(|gid| gid.index)
    }

    #[test]
    fn ipv4_of_version_2_goes_before_global_and_link_local_addresses() {
        let table = || {
            vec![
                row(0, "fe80::1", "IB/RoCE v1", true),
                row(1, "fe80::1", "RoCE v2", true),
                row(2, "::ffff:10.0.0.1", "IB/RoCE v1", true),
                row(3, "::ffff:10.0.0.1", "RoCE v2", true),
                row(5, "2001:db8::1", "RoCE v2", true),
            ]
        };
        assert_eq!(chosen(table(), true), Some(3));
        let without = |address: &str| {
            let address: Ipv6Addr = address.parse().expect("an address");
            table().into_iter().filter(|row| row.address != address).collect::<Vec<_>>()
        };
        assert_eq!(chosen(without("::ffff:10.0.0.1"), true), Some(5));
        assert_eq!(chosen(vec![row(1, "fe80::1", "RoCE v2", true)], true), Some(1));
    }

    #[test]
    fn an_interface_that_is_down_and_version_1_are_no_choice() {
        assert_eq!(chosen(vec![row(3, "::ffff:10.0.0.1", "RoCE v2", false)], true), None);
        assert_eq!(chosen(vec![row(2, "::ffff:10.0.0.1", "IB/RoCE v1", true)], true), None);
        assert_eq!(chosen(vec![row(0, "fe80::1", "", true)], false), Some(0), "InfiniBand has no versions");
    }
}
