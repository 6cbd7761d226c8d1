//! Classes, time-outs, partitions and the subnet manager.

use super::{Chosen, list};
use crate::tuning::finding::Finding;
use crate::tuning::host::{Card, Host, Port};
use crate::tuning::settings::Setting;

/// Numbers that people write for the DSCP of RoCE traffic. A class is four times that, plus the bits of ECN.
const DSCP_FOR_CLASS: [i64; 5] = [24, 26, 34, 46, 48];
/// The time after which a dead peer should be known, in seconds.
const NOTICED_WITHIN: f64 = 130.0;
/// Shorter time-outs break connections that are merely busy: 4.096 µs · 2^12 is 17 ms.
const TIMEOUT_MIN: i64 = 12;

pub(super) fn check(host: &Host<'_>, chosen: &Chosen<'_>, findings: &mut Vec<Finding>) {
    let mut add = |name: &str, finding: Option<Finding>| {
        let origin = host.settings.nccl(name).map_or_else(String::new, Setting::origin);
        findings
            .extend(finding.map(|finding| if finding.because.is_empty() { finding.because(origin) } else { finding }));
    };
    add("NCCL_IB_TC", class(host, chosen));
    add("NCCL_IB_TC", two_classes(host));
    add("NCCL_IB_TIMEOUT", timeout(host));
    add("", subnet_manager(host).filter(|_| !host.is_rdma_off()));
    add("NCCL_IB_PKEY", partition(host, chosen));
    add("NCCL_IB_QPS_PER_CONNECTION", bond(host, chosen));
    add("", links_of_bond(host, chosen));
    add("", virtual_function(host, chosen));
    add("", limited(host, chosen));
    add("NCCL_IB_RETRY_CNT", retries(host));
    add("NCCL_IB_ROCE_VERSION_NUM", version(host, chosen));
}

fn class(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_TC";
    let class = host.settings.number(NAME).filter(|class| (0..=255).contains(class))?;
    if DSCP_FOR_CLASS.contains(&class) {
        let found = format!(
            "{class} is DSCP {} and ECN {}: it looks like a DSCP, and a class is 4 · DSCP + ECN",
            class >> 2,
            class & 3
        );
        return Some(Finding::warning(
            NAME,
            found,
            format!("write {NAME}={} for DSCP {class}, with {} if ECN is to be on", 4 * class, 4 * class + 2),
        ));
    }
    if (1..8).contains(&class) && chosen.ports.iter().any(|port| port.is_roce()) {
        let found = format!(
            "{class} is DSCP {} and ECN {}: it looks like a priority, and a class is 4 · DSCP + ECN",
            class >> 2,
            class & 3
        );
        let fix = format!(
            "write the class of your switches' lossless traffic, often {NAME}=104 or 106 (DSCP 26) or 96 (DSCP 24)"
        );
        return Some(Finding::warning(NAME, found, fix));
    }
    let port = chosen.ports.iter().find(|port| port.class.is_some_and(|of_kernel| i64::from(of_kernel) != class))?;
    let of_kernel = i64::from(port.class?);
    let found = format!(
        "NCCL asks for class {class} (DSCP {}), and the driver of {} has {of_kernel} (DSCP {}) for all connections: switches are usually lossless for one of them only",
        class >> 2,
        port.card,
        of_kernel >> 2,
    );
    Some(
        Finding::warning(NAME, found, format!("write {NAME}={of_kernel}, or remove it"))
            .because("/sys/class/infiniband/*/tc/*/traffic_class"),
    )
}

fn two_classes(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "UCX_IB_TRAFFIC_CLASS";
    let setting = host.settings.ucx(NAME)?;
    let of_ucx: i64 = setting.value.parse().ok()?;
    let of_nccl = host.settings.number("NCCL_IB_TC").filter(|class| *class != of_ucx)?;
    let found = format!(
        "UCX asks for class {of_ucx}, and NCCL for {of_nccl}, on one fabric: only one of them is likely to be lossless"
    );
    Some(
        Finding::warning(NAME, found, format!("write the same class for both: {NAME}={of_nccl}"))
            .because(setting.origin()),
    )
}

fn timeout(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_TIMEOUT";
    let value = host.settings.number(NAME).filter(|value| (0..=31).contains(value))?;
    if host.settings.nccl(NAME).is_some_and(|setting| setting.value.trim() != value.to_string()) {
        return None; // It does not mean what is written, which another rule says.
    }
    if value == 0 {
        return Some(Finding::error(
            NAME,
            "0 is infinite, not off: a dead peer is never noticed",
            format!("write {NAME}=20, or up to 22 for large fabrics"),
        ));
    }
    let retries = host.settings.number("NCCL_IB_RETRY_CNT").filter(|retries| (0..=7).contains(retries)).unwrap_or(7);
    let one = 4.096e-6 * 2_f64.powi(i32::try_from(value).unwrap_or(31));
    let all = one * retries as f64;
    if value < TIMEOUT_MIN {
        let found = format!("{value} is {:.1} µs for each attempt, too short for a fabric that is busy", one * 1e6);
        return Some(Finding::warning(NAME, found, format!("unset it, or write {NAME}=20")));
    }
    (all > NOTICED_WITHIN).then(|| {
        let found = format!("{value} is {one:.0} s for each attempt, and {retries} retries take {all:.0} s ({:.0} min) until a dead peer is noticed", all / 60.0);
        Finding::warning(NAME, found, format!("write {NAME}=20, or 22 for large fabrics; the deadline of a call ends it before"))
    })
}

pub(crate) fn subnet_manager(host: &Host<'_>) -> Option<Finding> {
    let port = host
        .cards
        .iter()
        .flat_map(|card| &card.ports)
        .find(|port| port.link_layer == "InfiniBand" && matches!(port.state.as_str(), "INIT" | "ARMED"))?;
    let what = if port.state == "INIT" {
        "no subnet manager has configured it"
    } else {
        "the subnet manager has not finished"
    };
    let found =
        format!("port {} of {} is in the state {}: its link is up, and {what}", port.number, port.card, port.state);
    let fix = "start a subnet manager: opensm on one machine of the fabric, or that of a managed switch";
    Some(Finding::error(port.card.clone(), found, fix).because("/sys/class/infiniband/*/ports/*/state"))
}

fn partition(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_PKEY";
    let index = host.settings.number(NAME).unwrap_or(0);
    let at = usize::try_from(index).ok()?;
    let port = chosen.ports.iter().find(|port| {
        port.link_layer == "InfiniBand"
            && port.pkeys.get(at).is_some_and(|key| *key & 0x7fff == 0)
            && port.pkeys.iter().any(|key| key & 0x7fff != 0)
    })?;
    let (right, key) = port.pkeys.iter().enumerate().find(|(_, key)| **key & 0x7fff != 0)?;
    let found = format!(
        "NCCL takes the partition at index {index}, which is empty (0x0000) in the table of {}; its partition {key:#06x} is at index {right}",
        port.card
    );
    Some(Finding::error(NAME, found, format!("write {NAME}={right}")).because("/sys/class/infiniband/*/ports/*/pkeys"))
}

/// A virtual function without an identifier: its link stays down, whatever its cable is.
fn virtual_function(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    let is_asked = |card: &Card| match chosen.setting {
        Some(_) => chosen.names(&card.name),
        None => chosen.ports.is_empty(),
    };
    let down = |card: &&Card| {
        card.lacks_identifier && card.ports.iter().any(|port| port.link_layer == "InfiniBand" && port.state == "DOWN")
    };
    let card = host.cards.iter().filter(down).find(|card| is_asked(card)).filter(|_| !host.is_rdma_off())?;
    let found = format!("{} is a virtual function (VF) without a GUID, so its port stays DOWN", card.name);
    let fix = "on the host of the card, give it a node GUID and a port GUID, and the policy Follow: ip link set INTERFACE vf NUMBER node_guid GUID (port_guid GUID, state auto), or sriov/NUMBER/{node,port,policy} of its driver";
    Some(Finding::error(card.name.clone(), found, fix).because("/sys/class/infiniband/*/node_guid"))
}

/// A limited member of a partition speaks to full members only.
fn limited(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const FULL: u16 = 0x8000;
    let is_limited = |port: &&&Port| {
        let mut keys = port.pkeys.iter().filter(|key| *key & !FULL != 0).peekable();
        port.link_layer == "InfiniBand" && keys.peek().is_some() && keys.all(|key| key & FULL == 0)
    };
    let port = chosen.ports.iter().find(is_limited).filter(|_| host.may_use_rdma())?;
    let key = port.pkeys.iter().find(|key| **key & !FULL != 0)?;
    let found = format!(
        "{} is only a limited member of its partition ({key:#06x}): it does not reach others that are limited too",
        port.card
    );
    let fix = format!(
        "make it a full member in the subnet manager (partitions.conf: =full), so that the key is {:#06x}",
        key | FULL
    );
    Some(Finding::warning(port.card.clone(), found, fix).because("/sys/class/infiniband/*/ports/*/pkeys"))
}

fn version(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_ROCE_VERSION_NUM";
    let setting = host.settings.nccl(NAME).filter(|setting| setting.value.trim() == "1")?;
    chosen.ports.iter().find(|port| port.is_roce())?;
    let found = "1 searches rows of RoCE v1, which is not routed, and has no class for lossless traffic";
    Some(Finding::warning(NAME, found, format!("{}, or write {NAME}=2", setting.remove())))
}

fn retries(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_RETRY_CNT";
    let setting = host.settings.nccl(NAME).filter(|setting| setting.value.trim() == "0")?;
    let found = "0 sends no packet again: the first one that is lost ends the job";
    Some(Finding::warning(NAME, found, format!("{}, or write {NAME}=7", setting.remove())))
}

/// A bond that has fewer links than interfaces.
fn links_of_bond(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    for port in chosen.ports.iter().filter(|port| port.is_roce()) {
        let Some(bond) = port.best_row().and_then(|row| host.interface(&row.interface)) else { continue };
        let all = bond.members.len();
        if all < 2 {
            continue;
        }
        let about = bond.name.clone();
        if bond.is_active_backup {
            let found = format!(
                "{} is on {about} in the mode active-backup, which uses one link of {all} at a time",
                port.card
            );
            let fix = "use the mode 802.3ad (LACP), here and at the switch";
            return Some(Finding::warning(about, found, fix).because("/sys/class/net/*/bonding/mode"));
        }
        let is_down = |name: &&String| host.interface(name).is_some_and(|member| member.is_down);
        let down: Vec<&String> = bond.members.iter().filter(is_down).collect();
        let together = bond.aggregated.filter(|together| *together > 0).unwrap_or(all).min(all - down.len());
        if bond.balances && together > 0 && together < all {
            let which = if down.is_empty() { String::new() } else { format!(" ({} is down)", list(&down)) };
            let found = format!(
                "only {together} of {all} links of {about} carry data{which}, so {} has a part of its rate",
                port.card
            );
            let fix = "check the cable, the link and the port of the switch (802.3ad on both sides)";
            return Some(Finding::warning(about, found, fix).because("/sys/class/net/*/bonding"));
        }
    }
    None
}

/// A connection with one queue pair is hashed to one link of a bond.
fn bond(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_QPS_PER_CONNECTION";
    if host.settings.number(NAME).unwrap_or(1) > 1 {
        return None;
    }
    let bonded = chosen.ports.iter().find_map(|port| {
        let row = port.best_row()?;
        let interface = host.interface(&row.interface)?;
        (interface.members.len() > 1 && interface.balances).then_some((port, interface))
    })?;
    let (port, interface) = bonded;
    let found = format!(
        "{} is a bond ({}: {}), and a connection with one queue pair uses one link of it",
        port.card,
        interface.name,
        interface.members.join(", ")
    );
    Some(
        Finding::warning(NAME, found, format!("write {NAME}=4 (with NCCL_IB_SPLIT_DATA_ON_QPS=0)"))
            .because("/sys/class/net/*/bonding/slaves"),
    )
}
