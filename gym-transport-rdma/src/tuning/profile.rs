//! One profile for a machine with RoCE: the variables of NCCL and of UCX that name the same cards, the same traffic class and the same rows.

use super::host::{Host, Port};
use super::settings::Version;
use crate::machine::Machine;

/// From this version on, NCCL looks for the row itself.
const NCCL_FINDS_ROW: Version = Version(2, 21, 0);
/// Queue pairs on a bond, so that both of its links carry data.
const QUEUE_PAIRS_ON_BOND: &str = "4";

/// Facts about its fabric that a machine does not tell. The default takes what the driver says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fabric {
    /// The traffic class of the switch's lossless queue: 4 · DSCP + ECN. Default: that of the driver, if it has one for all cards.
    pub traffic_class: Option<u8>,
    /// The service level, from 0 to 15. Default: unset.
    pub service_level: Option<u8>,
}

impl Fabric {
    /// Takes what the driver says.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the traffic class.
    #[must_use]
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = Some(class);
        self
    }

    /// Sets the service level.
    #[must_use]
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = Some(level);
        self
    }
}

/// The variables of a machine with RoCE.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Profile {
    /// Names and values, those of NCCL first.
    pub variables: Vec<(&'static str, String)>,
    /// Facts about them that a person has to know.
    pub notes: Vec<String>,
}

/// Returns the variables of NCCL and UCX for the active RoCE ports of a machine; `None` if it has none that can send.
///
/// A row is named only where a library does not find it: indices differ between cards and nodes.
#[must_use]
pub fn profile(machine: &dyn Machine, fabric: Fabric) -> Option<Profile> {
    let host = Host::of(machine);
    let ports: Vec<&Port> = host
        .cards
        .iter()
        .flat_map(|card| &card.ports)
        .filter(|port| port.is_active() && port.is_roce())
        .filter(|port| {
            port.best_row().is_some_and(|row| {
                !row.is_autoconfigured() && (row.interface.is_empty() || host.interface(&row.interface).is_some())
            })
        })
        .collect();
    if ports.is_empty() {
        return None;
    }
    let mut profile = Profile::default();
    let devices: Vec<String> = ports.iter().map(|port| format!("{}:{}", port.card, port.number)).collect();
    let class = fabric.traffic_class.map(u32::from).or_else(|| same(ports.iter().map(|port| port.class)));
    let level = fabric.service_level;
    profile.set("NCCL_IB_HCA", format!("={}", devices.join(",")));
    if let Some(interface) = host.main_interface() {
        profile.set("NCCL_SOCKET_IFNAME", format!("={}", interface.name));
    }
    profile.set_if("NCCL_IB_TC", class);
    profile.set_if("NCCL_IB_SL", level);
    if class.is_none() {
        profile.notes.push(
            "no traffic class is set: name the one of the switch's lossless queue, which is 4 · DSCP + ECN".to_owned(),
        );
    } else if level.is_none() {
        profile.notes.push("no service level is set: name the priority of the lossless queue".to_owned());
    }
    let row = same(ports.iter().map(|port| port.best_row().map(|row| row.index)));
    let is_v6_only = ports.iter().all(|port| port.best_row().is_some_and(|row| row.v4().is_none()));
    match host.nccl {
        Some(version) if version < NCCL_FINDS_ROW => match row {
            Some(row) => profile.set("NCCL_IB_GID_INDEX", row.to_string()),
            None => profile.notes.push(format!(
                "NCCL {version} takes one row for all cards, and theirs differ: update it to 2.21 or later, or name one card"
            )),
        },
        _ if is_v6_only => profile.set("NCCL_IB_ADDR_FAMILY", "AF_INET6".to_owned()),
        _ => {}
    }
    let is_bond = |port: &Port| {
        let interface = port.best_row().and_then(|row| host.interface(&row.interface));
        interface.is_some_and(|interface| interface.balances && interface.members.len() > 1)
    };
    if ports.iter().any(|port| is_bond(port)) {
        profile.set("NCCL_IB_QPS_PER_CONNECTION", QUEUE_PAIRS_ON_BOND.to_owned());
        profile.set("NCCL_IB_SPLIT_DATA_ON_QPS", "0".to_owned());
    }
    profile.set("UCX_NET_DEVICES", devices.join(","));
    profile.set_if("UCX_IB_TRAFFIC_CLASS", class);
    profile.set_if("UCX_IB_SL", level);
    // UCX hides a port whose row 0 is empty, unless a row is named.
    if ports.iter().any(|port| port.row(0).is_none()) {
        match row {
            Some(row) => profile.set("UCX_IB_GID_INDEX", row.to_string()),
            None => profile.notes.push(
                "row 0 of a card is empty, and the rows of the cards differ: UCX uses only those for which UCX_IB_GID_INDEX is right"
                    .to_owned(),
            ),
        }
    }
    Some(profile)
}

impl Profile {
    fn set(&mut self, name: &'static str, value: String) {
        self.variables.push((name, value));
    }

    fn set_if(&mut self, name: &'static str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.set(name, value.to_string());
        }
    }
}

/// Returns what all have, if it is the same.
fn same<T: PartialEq + Copy>(mut values: impl Iterator<Item = Option<T>>) -> Option<T> {
    let first = values.next()??;
    values.all(|value| value == Some(first)).then_some(first)
}
