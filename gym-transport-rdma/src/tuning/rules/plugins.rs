//! Networks of NCCL, and the plug-ins that bring them. Read in `plugin/net.cc`.

use crate::tuning::finding::Finding;
use crate::tuning::host::Host;

pub(super) fn check(host: &Host<'_>, findings: &mut Vec<Finding>) {
    let mut add = |name: &str, finding: Option<Finding>| {
        let setting = host.settings.nccl_or_empty(name);
        findings.extend(finding.map(|finding| {
            finding.because(setting.map_or_else(String::new, crate::tuning::settings::Setting::origin))
        }));
    };
    add("NCCL_NET", network(host));
    add("NCCL_NET_PLUGIN", plugin(host));
    add("NCCL_IB_DISABLE", obeys_nothing(host));
    add("", efa(host));
}

fn network(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_NET";
    let setting = host.settings.nccl_or_empty(NAME)?;
    let value = setting.value.as_str();
    if value.is_empty() {
        return Some(Finding::error(
            NAME,
            "it is empty, and an empty name matches no network: NCCL does not start",
            "unset it",
        ));
    }
    if value.eq_ignore_ascii_case("Socket") {
        // Who also switches RDMA off means it.
        let is_meant = host.settings.number("NCCL_IB_DISABLE").is_some_and(|off| off != 0);
        let active = host.cards.iter().find(|card| card.ports.iter().any(|port| port.is_active()));
        let active = active.filter(|_| host.has_nccl && !is_meant)?;
        let found =
            format!("`{value}` keeps NCCL from RDMA, although the card {} is active: all goes over TCP", active.name);
        return Some(Finding::warning(NAME, found, format!("{}, or write {NAME}=IB", setting.remove())));
    }
    let has_card = host.cards.iter().any(|card| card.ports.iter().any(|port| port.is_active()));
    if value.eq_ignore_ascii_case("IB") {
        return (!has_card).then(|| {
            Finding::error(
                NAME,
                "it demands IB, and there is no RDMA device with an active port: NCCL does not start",
                format!("remove it, or write {NAME}=Socket"),
            )
        });
    }
    host.plugin().is_none().then(|| {
        let found = format!("it demands the network `{value}` of a plug-in, and NCCL finds no plug-in (libnccl-net.so): it does not start");
        Finding::error(NAME, found, "install the plug-in and name it in NCCL_NET_PLUGIN, or remove NCCL_NET (IB and Socket are built in)")
    })
}

fn plugin(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_NET_PLUGIN";
    let setting = host.settings.nccl(NAME)?;
    let value = setting.value.as_str();
    if value == "none" || value.contains(['"', '\'']) {
        return None;
    }
    let missing = if value.contains('/') {
        host.lacks(value)
    } else {
        let absent = |name: &str| host.machine.library(name) == Ok(None);
        absent(&format!("libnccl-net-{value}.so")) && absent(value)
    };
    missing.then(|| {
        let found = format!("{value} does not exist here: NCCL goes on with its own networks, and says nothing");
        Finding::warning(
            NAME,
            found,
            "remove it (unset), or write NCCL_NET_PLUGIN=none; such a path is that of one vendor's image",
        )
    })
}

/// Cards of Amazon (EFA), which NCCL reaches by a plug-in only.
fn efa(host: &Host<'_>) -> Option<Finding> {
    const AMAZON: &str = "0x1d0f";
    let is_efa =
        |name: &str| host.text(&format!("/sys/class/infiniband/{name}/device/vendor")).as_deref() == Some(AMAZON);
    let is_active = |card: &&crate::tuning::host::Card| {
        card.ports.iter().any(|port| port.is_active() && port.link_layer == "Unknown")
    };
    let card = host.cards.iter().filter(is_active).find(|card| is_efa(&card.name))?;
    let names = ["libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so"];
    let absent = names.iter().all(|name| host.machine.library(name) == Ok(None));
    let is_plain = host.settings.nccl_or_empty("NCCL_NET_PLUGIN").is_none() && host.settings.nccl("NCCL_NET").is_none();
    (host.has_nccl && host.gpus > 0 && absent && is_plain && !host.is_rdma_off()).then(|| {
        let found = format!("{} is an EFA card, which NCCL reaches by a plug-in only, and libnccl-net.so is not here: it takes sockets (TCP)", card.name);
        Finding::warning("NCCL_NET_PLUGIN", found, "install the plug-in aws-ofi-nccl, and put its folder into LD_LIBRARY_PATH")
            .because("/sys/class/infiniband/*/device/vendor")
    })
}

/// A plug-in that is loaded by itself does not obey NCCL's own switch.
fn obeys_nothing(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = "NCCL_IB_DISABLE";
    host.settings.number(NAME).filter(|off| *off != 0)?;
    if host.settings.nccl("NCCL_NET").is_some()
        || host.settings.number("NCCL_IBEXT_DISABLE").is_some_and(|off| off != 0)
    {
        return None;
    }
    let library = host.plugin()?;
    let found =
        format!("the plug-in {library} is loaded by itself, and does not obey {NAME}: RDMA is used all the same");
    Some(Finding::warning(
        NAME,
        found,
        "write NCCL_NET_PLUGIN=none or NCCL_NET=Socket (NCCL_IBEXT_DISABLE=1 for the plug-in of HPC-X)",
    ))
}
