//! RDMA cards from sysfs.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::text;
use crate::machine::{Machine, Unknown};

const SYSFS: &str = "/sys/class/infiniband";

/// An RDMA card, in the order in which NCCL finds them.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) name: String,
    /// The folder of its PCI device; `None` for a card without one, such as `rxe0`.
    pub(crate) pci: Option<String>,
    /// Whether its GUID is 0, as that of a virtual function to which nobody has given one.
    pub(crate) lacks_identifier: bool,
    pub(crate) ports: Vec<Port>,
}

#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) card: String,
    pub(crate) number: u32,
    /// The word of the state, such as `ACTIVE`.
    pub(crate) state: String,
    pub(crate) link_layer: String,
    /// The rate as sysfs writes it, and in Gb/s.
    pub(crate) rate: String,
    pub(crate) gigabits: Option<u32>,
    /// The rows that are set, by index.
    pub(crate) rows: Vec<Row>,
    /// The rows that the table has.
    pub(crate) table: usize,
    pub(crate) pkeys: Vec<u16>,
    /// The traffic class that the driver sets for all connections.
    pub(crate) class: Option<u32>,
}

/// A row of the GID table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) index: u32,
    pub(crate) address: Ipv6Addr,
    pub(crate) is_version_2: bool,
    /// Version, as sysfs writes it.
    pub(crate) kind: String,
    pub(crate) interface: String,
}

impl Row {
    pub(crate) fn v4(&self) -> Option<Ipv4Addr> {
        self.address.to_ipv4_mapped()
    }

    pub(crate) fn is_link_local(&self) -> bool {
        self.address.is_unicast_link_local()
    }

    /// Returns `true` for an address that a machine gives itself where nobody gives it one.
    pub(crate) fn is_autoconfigured(&self) -> bool {
        self.v4().is_some_and(|address| address.is_link_local())
    }

    /// Returns the address as people write it.
    pub(crate) fn written(&self) -> String {
        self.v4().map_or_else(|| self.address.to_string(), |address| address.to_string())
    }
}

impl Port {
    pub(crate) fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }

    pub(crate) fn is_roce(&self) -> bool {
        self.link_layer == "Ethernet"
    }

    pub(crate) fn row(&self, index: i64) -> Option<&Row> {
        self.rows.iter().find(|row| i64::from(row.index) == index)
    }

    /// Returns the row that both NCCL and UCX can use: of version 2, IPv4 before IPv6, and not link-local.
    pub(crate) fn best_row(&self) -> Option<&Row> {
        self.best(|row| !row.is_link_local())
    }

    /// Returns the best row of version 2 among those that fit. An address of a link comes last.
    pub(crate) fn best(&self, fits: impl Fn(&Row) -> bool) -> Option<&Row> {
        let fit = self.rows.iter().filter(|row| row.is_version_2 && fits(row));
        fit.min_by_key(|row| (row.is_link_local(), row.v4().is_none(), row.is_autoconfigured(), row.index))
    }

    /// Returns the name for a text: `mlx5_0 port 1`.
    pub(crate) fn name(&self) -> String {
        format!("{} port {}", self.card, self.number)
    }
}

/// Returns the cards of a machine, sorted by name.
pub(super) fn cards(machine: &dyn Machine) -> Vec<Card> {
    let names = machine.names(SYSFS).unwrap_or_default();
    names.into_iter().map(|name| card(machine, name)).collect()
}

fn card(machine: &dyn Machine, name: String) -> Card {
    let base = format!("{SYSFS}/{name}");
    let mut ports: Vec<Port> = machine
        .names(&format!("{base}/ports"))
        .unwrap_or_default()
        .iter()
        .filter_map(|number| number.parse().ok())
        .map(|number| port(machine, &name, number))
        .collect();
    ports.sort_by_key(|port| port.number);
    let pci = machine.real(&format!("{base}/device")).ok().filter(|path| path.contains("/pci"));
    let guid = text(machine, &format!("{base}/node_guid"));
    let lacks_identifier =
        guid.is_some_and(|guid| guid.contains('0') && guid.bytes().all(|byte| b"0:".contains(&byte)));
    Card { name, pci, lacks_identifier, ports }
}

fn port(machine: &dyn Machine, card: &str, number: u32) -> Port {
    let base = format!("{SYSFS}/{card}/ports/{number}");
    let read = |name: &str| text(machine, &format!("{base}/{name}")).unwrap_or_default();
    let state = read("state");
    let rate = read("rate");
    let indices = machine.names(&format!("{base}/gids")).unwrap_or_default();
    let mut rows: Vec<Row> = indices.iter().filter_map(|index| row(machine, &base, index)).collect();
    rows.sort_by_key(|row| row.index);
    let pkey = |index: &String| u16::from_str_radix(read(&format!("pkeys/{index}")).trim_start_matches("0x"), 16).ok();
    let mut keys = machine.names(&format!("{base}/pkeys")).unwrap_or_default();
    keys.sort_by_key(|index| index.parse().unwrap_or(u32::MAX));
    let class = text(machine, &format!("{SYSFS}/{card}/tc/{number}/traffic_class"));
    let class = class.and_then(|class| class.rsplit('=').next()?.trim().parse().ok());
    Port {
        card: card.to_owned(),
        number,
        state: state.split_once(':').map_or(state.as_str(), |(_, word)| word.trim()).to_owned(),
        link_layer: read("link_layer"),
        gigabits: rate.split_whitespace().next().and_then(|number| number.split('.').next()?.parse().ok()),
        rate,
        rows,
        table: indices.len(),
        pkeys: keys.iter().map_while(pkey).collect(),
        class,
    }
}

fn row(machine: &dyn Machine, base: &str, index: &str) -> Option<Row> {
    let address: Ipv6Addr = text(machine, &format!("{base}/gids/{index}"))?.parse().ok()?;
    let interface = machine.text(&format!("{base}/gid_attrs/ndevs/{index}"));
    // InfiniBand has no interfaces, and a prefix in rows that are not set.
    let empty = address.is_unspecified() || (address.segments()[4..] == [0; 4] && interface.is_err());
    if empty && interface != Err(Unknown::NotRecorded) {
        return None;
    }
    let kind = text(machine, &format!("{base}/gid_attrs/types/{index}")).unwrap_or_default();
    Some(Row {
        index: index.parse().ok()?,
        address,
        is_version_2: kind == "RoCE v2",
        kind,
        interface: interface.map(|name| name.trim().to_owned()).unwrap_or_default(),
    })
}
