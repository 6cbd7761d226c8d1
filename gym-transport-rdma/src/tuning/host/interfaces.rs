//! Network interfaces from sysfs, with the addresses that netlink tells.

use std::net::IpAddr;

use super::text;
use crate::machine::{InterfaceAddress, Machine};

const SYSFS: &str = "/sys/class/net";

/// A network interface, in the order of the kernel, which NCCL follows.
#[derive(Debug)]
pub(crate) struct Interface {
    pub(crate) name: String,
    /// Whether it is up, and has a carrier.
    pub(crate) is_running: bool,
    /// Whether it is known to be down.
    pub(crate) is_down: bool,
    pub(crate) addresses: Vec<InterfaceAddress>,
    pub(crate) mtu: Option<u32>,
    /// The interfaces of a bond.
    pub(crate) members: Vec<String>,
    /// Whether all of them carry data at once.
    pub(crate) balances: bool,
    /// Whether one of them does at a time.
    pub(crate) is_active_backup: bool,
    /// How many of them are together by 802.3ad.
    pub(crate) aggregated: Option<usize>,
    is_bridge: bool,
}

impl Interface {
    /// Returns `true` if NCCL would take it: it runs, and has an address.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_running && self.addresses.iter().any(|address| !is_link_local(address.address))
    }

    /// Returns `true` if it leads to no other machine: the loopback, or a bridge of containers.
    pub(crate) fn is_local(&self) -> bool {
        self.name == "lo" || self.is_container_bridge()
    }

    /// Returns `true` for the bridge of a container runtime, whose address is the same on every machine.
    pub(crate) fn is_container_bridge(&self) -> bool {
        let known = ["docker", "virbr", "cni", "podman", "br-"].iter().any(|prefix| self.name.starts_with(prefix));
        known && (self.is_bridge || self.members.is_empty())
    }

    pub(crate) fn has_v4(&self) -> bool {
        self.addresses.iter().any(|address| address.address.is_ipv4())
    }

    /// Returns `true` if it has an IPv6 address that leads beyond its link.
    pub(crate) fn has_v6(&self) -> bool {
        self.addresses.iter().any(|address| address.address.is_ipv6() && !is_link_local(address.address))
    }

    /// Returns the first address, for a text.
    pub(crate) fn first_address(&self) -> Option<IpAddr> {
        self.addresses.first().map(|address| address.address)
    }
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

pub(super) fn interfaces(machine: &dyn Machine) -> Vec<Interface> {
    let addresses = machine.addresses().unwrap_or_default();
    let mut interfaces: Vec<(u32, Interface)> = machine
        .names(SYSFS)
        .unwrap_or_default()
        .into_iter()
        .map(|name| {
            let read = |attribute: &str| text(machine, &format!("{SYSFS}/{name}/{attribute}"));
            let state = read("operstate").unwrap_or_default();
            // An interface that cannot tell its state, such as a tunnel, is `unknown` and works.
            let is_running =
                state == "up" || (state == "unknown" && read("carrier").is_none_or(|carrier| carrier != "0"));
            let members = read("bonding/slaves").unwrap_or_default();
            let interface = Interface {
                is_running,
                is_down: state == "down",
                addresses: addresses.iter().filter(|address| address.interface == name).cloned().collect(),
                mtu: read("mtu").and_then(|mtu| mtu.parse().ok()),
                members: members.split_whitespace().map(str::to_owned).collect(),
                balances: read("bonding/mode")
                    .is_some_and(|mode| mode.starts_with("802.3ad") || mode.starts_with("balance-")),
                is_active_backup: read("bonding/mode").is_some_and(|mode| mode.starts_with("active-backup")),
                aggregated: read("bonding/ad_num_ports").and_then(|number| number.parse().ok()),
                is_bridge: machine.exists(&format!("{SYSFS}/{name}/bridge")) == Ok(true),
                name,
            };
            (
                machine
                    .text(&format!("{SYSFS}/{}/ifindex", interface.name))
                    .ok()
                    .and_then(|index| index.trim().parse().ok())
                    .unwrap_or(u32::MAX),
                interface,
            )
        })
        .collect();
    interfaces.sort_by(|(index, one), (other_index, other)| (index, &one.name).cmp(&(other_index, &other.name)));
    interfaces.into_iter().map(|(_, interface)| interface).collect()
}
