//! UCX: its devices, transports and rows. Read in `uct/ib/base/ib_device.c` and `ucp/core/ucp_context.c`.

use super::{list, rows};
use crate::tuning::finding::Finding;
use crate::tuning::host::{Host, Port};
use crate::tuning::settings::Version;

/// Since then, UCX hides a RoCE port whose row 0 is empty, unless a row is named (openucx/ucx#6467).
const HIDES_EMPTY_ROW: Version = Version(1, 11, 0);
/// Since then, a device may be named without its port (openucx/ucx#11142).
const NEEDS_NO_PORT: Version = Version(1, 21, 0);
const ENVIRONMENT: &str = "set in the environment";

pub(super) fn check(host: &Host<'_>, findings: &mut Vec<Finding>) {
    if host.ucx.is_none() {
        return;
    }
    let quoted = |name: &str| host.settings.variable(name).is_some_and(|value| value.contains(['"', '\'']));
    if !quoted("UCX_NET_DEVICES") {
        findings.extend(devices(host));
    }
    if !quoted("UCX_TLS") {
        findings.extend(transports(host));
        findings.extend(container_bridge(host));
    }
    findings.extend(row(host));
}

/// Returns the active RoCE ports that UCX may use.
fn roce<'h>(host: &'h Host<'_>) -> Vec<&'h Port> {
    let devices = host.settings.variable("UCX_NET_DEVICES").filter(|devices| *devices != "all");
    let named = |port: &&Port| {
        devices
            .is_none_or(|devices| devices.split(',').any(|device| device.split(':').next() == Some(port.card.as_str())))
    };
    host.cards
        .iter()
        .flat_map(|card| &card.ports)
        .filter(|port| port.is_active() && port.is_roce())
        .filter(named)
        .collect()
}

fn devices(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "UCX_NET_DEVICES";
    let value = host.settings.variable(NAME).filter(|value| !value.starts_with(['^', '~']) && *value != "all")?;
    if host.interfaces.is_empty() {
        return None;
    }
    let (mut missing, mut without_port) = (Vec::new(), Vec::new());
    for device in value.split(',').filter(|device| !device.contains(['*', '?', '['])) {
        let (name, port) = device.split_once(':').map_or((device, None), |(name, port)| (name, Some(port)));
        let card = host.cards.iter().find(|card| card.name == name);
        match (card, port) {
            (None, None) if host.interface(name).is_some() => {}
            (None, _) => missing.push(device),
            (Some(_), None) if host.ucx.is_some_and(|version| version < NEEDS_NO_PORT) => without_port.push(device),
            (Some(card), Some(port)) if !card.ports.iter().any(|known| port.parse() == Ok(known.number)) => {
                missing.push(device)
            }
            _ => {}
        }
    }
    let known: Vec<String> = host
        .cards
        .iter()
        .flat_map(|card| &card.ports)
        .filter(|port| port.is_active())
        .map(|port| format!("{}:{}", port.card, port.number))
        .chain(host.main_interface().map(|interface| interface.name.clone()))
        .collect();
    if !missing.is_empty() {
        let found = format!("{} is not here: UCX knows {}", list(&missing), list(&known));
        return Some(
            Finding::error(NAME, found, format!("write {NAME}={}", known.first().map_or("all", String::as_str)))
                .because(ENVIRONMENT),
        );
    }
    (!without_port.is_empty()).then(|| {
        let version = host.ucx.map_or_else(String::new, |version| version.to_string());
        let with: Vec<String> = without_port.iter().map(|device| format!("{device}:1")).collect();
        let found = format!("UCX {version} wants the port of a card: {} matches no device", list(&without_port));
        Finding::error(NAME, found, format!("write {NAME}={}", with.join(","))).because(ENVIRONMENT)
    })
}

fn transports(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "UCX_TLS";
    let value = host.settings.variable(NAME).filter(|value| !value.starts_with('^') && *value != "all")?;
    let names: Vec<&str> = value.split(',').collect();
    // Those that lead to processes of the same host.
    let local = ["all", "self", "sm", "shm", "posix", "sysv", "xpmem", "mm", "knem", "cma", "tcp"];
    (!names.iter().any(|name| local.contains(name))).then(|| {
        let found = format!("`{value}` has neither self nor sm: processes of the same host do not reach each other through shared memory, and a process not itself");
        Finding::warning(NAME, found, format!("write {NAME}={value},self,sm")).because(ENVIRONMENT)
    })
}

/// UCX takes every interface that is up, and the bridge of a container runtime has the same address on every machine.
fn container_bridge(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "UCX_NET_DEVICES";
    let asks_for_tcp =
        host.settings.variable("UCX_TLS").is_some_and(|value| value.split(',').any(|name| name == "tcp"));
    if !asks_for_tcp || host.settings.variable(NAME).is_some_and(|devices| devices != "all") {
        return None;
    }
    let bridge = host.interfaces.iter().find(|interface| interface.is_usable() && interface.is_container_bridge())?;
    let address = bridge.first_address().map_or_else(String::new, |address| format!(" ({address})"));
    let found = format!(
        "{}{address} is up, and UCX takes it for a way to other hosts, which have the same address",
        bridge.name
    );
    Some(
        Finding::warning(NAME, found, format!("write {NAME}={}", host.main_interface_name())).because("/sys/class/net"),
    )
}

fn row(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "UCX_IB_GID_INDEX";
    let roce = roce(host);
    let right =
        || -> Vec<String> { roce.iter().filter_map(|port| port.best_row().map(|row| row.index.to_string())).collect() };
    let rdma_is_wanted = host.settings.variable("UCX_TLS").is_none_or(|value| {
        value == "all"
            || value.starts_with('^')
            || value.split(',').any(|name| {
                ["ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x"]
                    .contains(&name)
            })
    });
    if !rdma_is_wanted {
        return None;
    }
    match host.settings.variable(NAME).filter(|value| *value != "auto") {
        Some(value) => {
            let index = value.parse().ok()?;
            let wrong = roce.iter().find_map(|port| rows::fault(port, index))?;
            let row = right().into_iter().next().unwrap_or_else(|| "auto".to_owned());
            Some(Finding::error(NAME, wrong, format!("remove it (auto), or write {NAME}={row}")).because(ENVIRONMENT))
        }
        None => {
            let hides = host.ucx.is_some_and(|version| version >= HIDES_EMPTY_ROW);
            let port = roce.iter().find(|port| hides && port.row(0).is_none() && port.best_row().is_some())?;
            let index = port.best_row()?.index;
            let found = format!(
                "row 0 of {} is empty, and UCX then hides the port and goes on with TCP, unless a row is named",
                port.card
            );
            Some(
                Finding::error(NAME, found, format!("write {NAME}={index}"))
                    .because("uct_ib_device_port_check of UCX, since 1.11"),
            )
        }
    }
}
