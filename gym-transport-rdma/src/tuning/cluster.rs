//! The third validation: the nodes of a cluster side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::finding::Finding;
use super::host::Host;
use super::rules::{chosen, taken};
use super::table::NCCL;

/// A node and its name.
pub(super) type Node<'n, 'm> = (&'n str, &'n Host<'m>);

pub(super) fn check(nodes: &[Node<'_, '_>], findings: &mut Vec<Finding>) {
    settings(nodes, findings);
    findings.extend(versions(nodes));
    findings.extend(transfer_units(nodes));
    findings.extend(pairs(nodes));
    findings.extend(numbers_of_cards(nodes));
    findings.extend(interfaces(nodes));
    findings.extend(names_of_interfaces(nodes));
    findings.extend(first_node(nodes));
    findings.extend(own_addresses(nodes));
    findings.extend(loopback_of_ucx(nodes));
    findings.extend(interface_of_gloo(nodes));
    findings.extend(transports(nodes));
    findings.extend(plugins(nodes));
    findings.extend(families_of_rows(nodes));
    findings.extend(first_of_nccl(nodes));
    findings.extend(infiniband_here_and_not_there(nodes));
}

/// Returns `value on NODES; value on NODES`.
fn by_value<'n>(values: impl IntoIterator<Item = (&'n str, String)>) -> String {
    let mut nodes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut order = Vec::new();
    for (node, value) in values {
        if !nodes.contains_key(&value) {
            order.push(value.clone());
        }
        nodes.entry(value).or_default().push(node);
    }
    order.iter().map(|value| format!("{value} on {}", nodes[value].join(", "))).collect::<Vec<_>>().join("; ")
}

/// Variables that must be the same, and those that one node has and another has not.
fn settings(nodes: &[Node<'_, '_>], findings: &mut Vec<Finding>) {
    for variable in
        NCCL.iter().filter(|variable| !variable.name.starts_with("NCCL_DEBUG") && variable.name != "NCCL_CONF_FILE")
    {
        let values: Vec<(&str, Option<&str>)> = nodes
            .iter()
            .map(|(name, host)| (*name, host.settings.nccl(variable.name).map(|setting| setting.value.as_str())))
            .collect();
        let different: BTreeSet<Option<&str>> = values.iter().map(|(_, value)| *value).collect();
        if different.len() < 2 {
            continue;
        }
        let lacking: Vec<&str> = values.iter().filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
        let shown =
            by_value(values.iter().map(|(name, value)| {
                (*name, value.map_or_else(|| "not set".to_owned(), |value| format!("`{value}`")))
            }));
        if variable.same_everywhere {
            let found = format!("the nodes differ: {shown}; {}", variable.text);
            findings.push(Finding::error(variable.name, found, "set the same value on every node"));
        } else if !lacking.is_empty() {
            let found = format!("it is not set on {}, only on others: {shown}", lacking.join(", "));
            let fix = "set it where ray start runs on every node, or in runtime_env: a Ray worker has the environment of its raylet, not that of the driver";
            findings.push(Finding::error(variable.name, found, fix));
        }
    }
}

fn versions(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    let known: Vec<(&str, String)> =
        nodes.iter().filter_map(|(name, host)| Some((*name, host.nccl?.to_string()))).collect();
    let different: BTreeSet<&String> = known.iter().map(|(_, version)| version).collect();
    (different.len() > 1).then(|| {
        let found = format!("the nodes have different versions of NCCL: {}", by_value(known.clone()));
        Finding::error("NCCL", found, "install the same version on every node").because("libnccl.so.2 of each node")
    })
}

/// The MTU of the interfaces behind the cards. Sockets agree on the size of their packets, and interfaces of another kind have another MTU by right.
fn transfer_units(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    let of = |host: &Host<'_>| -> Vec<u32> {
        let ports = chosen(host).ports;
        ports
            .iter()
            .filter(|port| port.is_roce())
            .filter_map(|port| host.interface(&port.best_row()?.interface)?.mtu)
            .collect()
    };
    let units: Vec<(&str, Vec<u32>)> = nodes.iter().map(|(name, host)| (*name, of(host))).collect();
    let most = units.iter().map(|(_, units)| units.len()).min()?;
    let differs = (0..most).find(|at| units.iter().map(|(_, units)| units[*at]).collect::<BTreeSet<_>>().len() > 1)?;
    let largest = units.iter().map(|(_, units)| units[differs]).max()?;
    let shown = by_value(units.iter().map(|(name, units)| (*name, units[differs].to_string())));
    let fix = format!("set the same MTU on all nodes and on the switch: {largest}");
    Some(
        Finding::error(
            "MTU",
            format!("the nodes have different MTUs: {shown}; large packets of one are lost at the other"),
            fix,
        )
        .because("/sys/class/net/*/mtu"),
    )
}

/// NCCL pairs the cards of two nodes by their position.
fn pairs(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    let networks = |host: &Host<'_>| -> Vec<(String, String)> {
        let ports = chosen(host).ports;
        let network = |port: &super::host::Port| {
            let row = port.best_row()?;
            let interface = host.interface(&row.interface)?;
            let own = interface.addresses.iter().find(|address| Some(address.address) == row.v4().map(IpAddr::V4))?;
            let (IpAddr::V4(address), bits) = (own.address, u32::from(own.prefix)) else { return None };
            let base = address.to_bits().checked_shr(32 - bits).unwrap_or(0).checked_shl(32 - bits).unwrap_or(0);
            Some((port.card.clone(), format!("{}/{bits}", std::net::Ipv4Addr::from_bits(base))))
        };
        ports.iter().filter(|port| port.is_roce()).filter_map(|port| network(port)).collect()
    };
    let all: Vec<(&str, Vec<(String, String)>)> = nodes.iter().map(|(name, host)| (*name, networks(host))).collect();
    let (first_name, first) = all.first()?;
    for (name, other) in &all[1..] {
        for (at, ((card, network), (other_card, other_network))) in first.iter().zip(other).enumerate() {
            let elsewhere = other.iter().any(|(_, known)| known == network)
                || first.iter().any(|(_, known)| known == other_network);
            if network != other_network && elsewhere {
                let common: Vec<(&str, &str)> = other
                    .iter()
                    .filter_map(|(there, wanted)| {
                        let here = first.iter().find(|(_, known)| known == wanted)?;
                        Some((here.0.as_str(), there.as_str()))
                    })
                    .collect();
                let (here, there): (Vec<&str>, Vec<&str>) = common.into_iter().unzip();
                let found = format!(
                    "cards are paired by position, and number {at} is {card} in {network} on {first_name}, and {other_card} in {other_network} on {name}: a pair must be in the same network"
                );
                let fix = format!(
                    "name them in the same order of networks: NCCL_IB_HCA is `={}` on {first_name}, and `={}` on {name}",
                    here.join(","),
                    there.join(",")
                );
                return Some(
                    Finding::error("NCCL_IB_HCA", found, fix).because("the GID tables and addresses of the nodes"),
                );
            }
        }
    }
    None
}

fn numbers_of_cards(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_IGNORE_NET_MISMATCH";
    nodes.iter().find(|(_, host)| host.settings.number(NAME).is_some_and(|on| on != 0))?;
    let numbers: Vec<(&str, usize)> = nodes.iter().map(|(name, host)| (*name, chosen(host).ports.len())).collect();
    let different: BTreeSet<usize> = numbers.iter().map(|(_, number)| *number).collect();
    (different.len() > 1).then(|| {
        let shown = by_value(numbers.iter().map(|(name, number)| (*name, format!("{number} cards"))));
        let found =
            format!("the nodes differ in their cards ({shown}), and the check for that is switched off: the job hangs");
        Finding::error(NAME, found, "remove it, and let NCCL_IB_HCA name the same number of cards on every node")
    })
}

/// The interface that NCCL takes leads to no other node.
fn interfaces(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_SOCKET_IFNAME";
    let mut first_of: BTreeMap<IpAddr, (&str, String)> = BTreeMap::new();
    for (name, host) in nodes {
        let interface = taken(host).into_iter().next()?;
        let address = interface
            .addresses
            .iter()
            .map(|address| address.address)
            .find(IpAddr::is_ipv4)
            .or_else(|| interface.first_address())?;
        let main = host.main_interface_name();
        if address.is_loopback() {
            let found = format!(
                "{name} takes {}, whose address {address} is loopback: other nodes do not reach it",
                interface.name
            );
            return Some(Finding::error(NAME, found, format!("write {NAME}={main}, or unset it")));
        }
        if let Some((other, of_other)) = first_of.get(&address).filter(|_| interface.is_container_bridge()) {
            let found = format!(
                "{other} takes {of_other} and {name} takes {}, with the same address {address}: they do not reach each other",
                interface.name
            );
            return Some(Finding::error(NAME, found, format!("write {NAME}={main}")));
        }
        first_of.insert(address, (name, interface.name.clone()));
    }
    None
}

fn is_loopback(address: &str) -> bool {
    address == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns the address that other machines reach a node by.
fn address_of(host: &Host<'_>) -> String {
    let main = host.main_interface();
    let address = main.and_then(|main| {
        let mut addresses = main.addresses.iter().map(|address| address.address);
        addresses.find(IpAddr::is_ipv4).or_else(|| main.first_address())
    });
    address.map_or_else(|| "ADDRESS".to_owned(), |address| address.to_string())
}

/// All nodes of one job look for its first process on themselves.
fn first_node(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "MASTER_ADDR";
    let ranks = ["NODE_RANK", "RANK", "SLURM_NODEID"];
    let is_later = |host: &Host<'_>| {
        let rank = ranks.iter().find_map(|name| host.settings.variable(name)?.parse::<u32>().ok());
        rank.is_some_and(|rank| rank > 0)
    };
    let (name, host) =
        nodes.iter().find(|(_, host)| is_later(host) && host.settings.variable(NAME).is_some_and(is_loopback))?;
    let first = nodes.iter().find(|(other, host)| other != name && !is_later(host))?;
    let value = host.settings.variable(NAME)?;
    let found = format!(
        "`{value}` is the loopback of each node, so {name} does not find the first process of the job on {}",
        first.0
    );
    let fix = format!("write the address of the first node, the same on every node: {NAME}={}", address_of(first.1));
    Some(Finding::error(NAME, found, fix).because("set in the environment"))
}

/// Several nodes say that they have one address.
fn own_addresses(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "VLLM_HOST_IP";
    let mut first_of: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, host) in nodes {
        let Some(value) = host.settings.variable(NAME) else { continue };
        let address: Option<IpAddr> = value.parse().ok();
        let of_bridge = host.interfaces.iter().any(|interface| {
            interface.is_container_bridge() && interface.addresses.iter().any(|own| Some(own.address) == address)
        });
        if let Some(other) = first_of.get(value).filter(|_| is_loopback(value) || of_bridge) {
            let found = format!(
                "{other} and {name} both say that they are {value}, which leads to each itself: they do not find each other"
            );
            let fix = format!("write the own address of each node, on {name} {NAME}={}", address_of(host));
            return Some(Finding::error(NAME, found, fix).because("set in the environment"));
        }
        first_of.insert(value, name);
    }
    None
}

fn loopback_of_ucx(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "UCX_NET_DEVICES";
    let only = |host: &Host<'_>| host.has_ucx && host.settings.ucx(NAME).is_some_and(|setting| setting.value == "lo");
    let (name, host) = nodes.iter().find(|(_, host)| only(host)).filter(|_| nodes.len() > 1)?;
    let setting = host.settings.ucx(NAME)?;
    let found = format!("`lo` is the only device of UCX on {name}, and leads to no other node");
    let fix = format!("write {NAME}={}", host.main_interface_name());
    Some(Finding::error(NAME, found, fix).because(setting.origin()))
}

fn interface_of_gloo(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "GLOO_SOCKET_IFNAME";
    let (with, without): (Vec<&Node<'_, '_>>, Vec<&Node<'_, '_>>) =
        nodes.iter().partition(|(_, host)| host.settings.variable(NAME).is_some());
    let (first, value) = with.first().and_then(|(name, host)| Some((name, host.settings.variable(NAME)?)))?;
    let lacking: Vec<&str> = without.iter().map(|(name, _)| *name).collect();
    (!lacking.is_empty()).then(|| {
        let found = format!("it is not set on {}, only on others (`{value}` on {first})", lacking.join(", "));
        let fix = "set it where ray start runs on every node, or in runtime_env: a Ray worker has the environment of its raylet, not that of the driver";
        Finding::warning(NAME, found, fix).because("set in the environment")
    })
}

/// UCX has no transport to other hosts that two nodes share.
fn transports(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "UCX_TLS";
    let ways: Vec<(&str, &str, super::rules::ucx::Ways)> = nodes
        .iter()
        .filter_map(|(name, host)| {
            let (value, ways) = super::rules::ucx::ways(host)?;
            Some((*name, value, ways))
        })
        .collect();
    let (first, value, ways_of_first) = ways.first()?;
    let (name, other, _) = ways[1..].iter().find(|(_, _, ways)| {
        let (here, there) = (ways_of_first, ways);
        (here.cards || here.sockets)
            && (there.cards || there.sockets)
            && !(here.cards && there.cards)
            && !(here.sockets && there.sockets)
    })?;
    let found = format!(
        "the nodes differ: `{value}` on {first}; `{other}` on {name}: they have no transport in common, and do not reach each other"
    );
    Some(Finding::error(NAME, found, "set the same value on every node, or unset it").because("set in the environment"))
}

/// A plug-in is a network of its own, which does not speak to the built-in one.
fn plugins(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_NET_PLUGIN";
    let is_default = |host: &Host<'_>| {
        host.has_nccl && host.settings.nccl_or_empty(NAME).is_none() && host.settings.nccl("NCCL_NET").is_none()
    };
    if !nodes.iter().all(|(_, host)| is_default(host)) {
        return None;
    }
    let lacks = |host: &Host<'_>| host.machine.library("libnccl-net.so") == Ok(None);
    let (first, _) = nodes.iter().find(|(_, host)| host.plugin().is_some())?;
    let lacking: Vec<&str> = nodes.iter().filter(|(_, host)| lacks(host)).map(|(name, _)| *name).collect();
    (!lacking.is_empty()).then(|| {
        let found = format!(
            "{first} has the plug-in libnccl-net.so, and {} has none: NCCL takes different networks, which do not connect",
            lacking.join(", ")
        );
        let fix = format!("install the same plug-in on every node, or set {NAME}=none on every node");
        Finding::error(NAME, found, fix).because("the libraries of each node")
    })
}

/// A row that is right on each node, and of another family on one.
fn families_of_rows(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_GID_INDEX";
    let of = |host: &Host<'_>| -> Option<(i64, bool)> {
        let index = host.settings.number(NAME).filter(|index| *index >= 0)?;
        let ports = chosen(host).ports;
        let row = ports.iter().find(|port| port.is_roce())?.row(index)?;
        (row.is_version_2 && !row.is_link_local()).then(|| (index, row.v4().is_some()))
    };
    let families: Vec<(&str, i64, bool)> =
        nodes.iter().filter_map(|(name, host)| of(host).map(|(index, v4)| (*name, index, v4))).collect();
    let (six, four): (Vec<_>, Vec<_>) = families.into_iter().partition(|(_, _, v4)| !v4);
    let (_, index, _) = six.first().filter(|_| !four.is_empty())?;
    let names = |nodes: &[(&str, i64, bool)]| nodes.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join(", ");
    let found = format!(
        "row {index} is an IPv6 address on {}, and an IPv4 one on {}: they do not connect",
        names(&six),
        names(&four)
    );
    let fix = format!("unset {NAME} or write -1, so that NCCL (since 2.21) searches the row of each node");
    Some(Finding::error(NAME, found, fix).because("the GID tables of the nodes"))
}

/// All nodes of one job look for NCCL's start on themselves.
fn first_of_nccl(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_COMM_ID";
    let to_itself = |setting: &&super::settings::Setting| {
        let address = setting.value.rsplit_once(':').map(|(address, _)| address.trim_matches(['[', ']']));
        address.is_some_and(is_loopback)
    };
    let all: Vec<&super::settings::Setting> =
        nodes.iter().filter_map(|(_, host)| host.settings.nccl(NAME)).filter(to_itself).collect();
    let setting = all.first().filter(|_| nodes.len() > 1 && all.len() == nodes.len())?;
    let found = format!("`{}` is the loopback of each node, so the others do not find the first one", setting.value);
    let first = address_of(nodes.first()?.1);
    let fix = format!("unset it, or write an address of the first node, such as {first}, with a port");
    Some(Finding::error(NAME, found, fix).because(setting.origin()))
}

/// Without a setting, NCCL prefers IPoIB, which only some nodes have an address for.
fn infiniband_here_and_not_there(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_SOCKET_IFNAME";
    if nodes.iter().any(|(_, host)| host.settings.nccl_or_empty(NAME).is_some()) {
        return None;
    }
    let is_ib = |name: &str| name.starts_with("ib");
    let (with, first) = nodes.iter().find_map(|(node, host)| {
        let first = taken(host).into_iter().next().filter(|interface| is_ib(&interface.name))?;
        Some(((*node, *host), first.name.as_str()))
    })?;
    let lacking = nodes.iter().find_map(|(node, host)| {
        let other = taken(host).into_iter().next().filter(|interface| !is_ib(&interface.name))?;
        // There it is, without an address.
        let same = host.interface(first).filter(|same| same.addresses.is_empty())?;
        Some((*node, other.name.as_str(), same.name.as_str()))
    });
    let (node, other, same) = lacking?;
    let found = format!(
        "NCCL prefers interfaces whose names begin with ib, so {} takes {first}, and {node} takes {other}, because {same} has no address there: they do not reach each other",
        with.0
    );
    let fix =
        format!("write {NAME}={} on every node, or give {same} of {node} an address", with.1.main_interface_name());
    Some(Finding::error(NAME, found, fix).because("the interfaces of the nodes"))
}

/// A name that one node has and another has not.
fn names_of_interfaces(nodes: &[Node<'_, '_>]) -> Option<Finding> {
    const NAME: &str = "NCCL_SOCKET_IFNAME";
    let set = nodes.iter().filter(|(_, host)| host.settings.nccl(NAME).is_some());
    let (with, without): (Vec<&Node<'_, '_>>, Vec<&Node<'_, '_>>) = set.partition(|(_, host)| !taken(host).is_empty());
    let (_, first) = with.first()?;
    let (name, host) = without.first()?;
    let value = &host.settings.nccl(NAME)?.value;
    let (here, there) = (first.main_interface_name(), host.main_interface_name());
    let found = format!("`{value}` matches no interface of {name}, whose interface is {there}");
    let fix = format!("name both on every node: {NAME}={here},{there}; or per node, in /etc/nccl.conf");
    Some(Finding::error(NAME, found, fix))
}
