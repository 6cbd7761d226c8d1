//! Interfaces of NCCL and Gloo. Read in NCCL's `misc/socket.cc` and `os/linux.cc`.

use std::net::IpAddr;

use super::{NameList, list};
use crate::tuning::finding::Finding;
use crate::tuning::host::{Host, Interface};
use crate::tuning::settings::Setting;

const NAME: &str = "NCCL_SOCKET_IFNAME";

/// Returns the interfaces that NCCL takes, in its order.
pub(in crate::tuning) fn taken<'h>(host: &'h Host<'_>) -> Vec<&'h Interface> {
    let usable = host.interfaces.iter().filter(|interface| interface.is_usable());
    match host.settings.nccl(NAME) {
        Some(setting) => {
            let listed = NameList::read(setting.value.trim_end_matches('\r'));
            usable.filter(|interface| listed.takes(&interface.name)).collect()
        }
        None => {
            let all: Vec<&Interface> = usable.collect();
            let of_infiniband: Vec<&Interface> =
                all.iter().copied().filter(|interface| interface.name.starts_with("ib")).collect();
            if !of_infiniband.is_empty() {
                return of_infiniband;
            }
            let usual: Vec<&Interface> = all
                .iter()
                .copied()
                .filter(|interface| !["docker", "lo", "virbr"].iter().any(|prefix| interface.name.starts_with(prefix)))
                .collect();
            if usual.is_empty() { all } else { usual }
        }
    }
}

pub(super) fn check(host: &Host<'_>, findings: &mut Vec<Finding>) {
    let quoted = |setting: &Setting| setting.value.contains(['"', '\'']);
    if host.interfaces.is_empty() {
        return;
    }
    if let Some(setting) = host.settings.nccl(NAME).filter(|setting| !quoted(setting)) {
        let finding = names(host, setting).or_else(|| family(host));
        findings.extend(finding.map(|finding| finding.because(setting.origin())));
    } else {
        findings.extend(family(host));
    }
    findings.extend(gloo(host));
    findings.extend(own_address(host));
    findings.extend(without_port(host));
}

/// NCCL's start is at an address with a port.
fn without_port(host: &Host<'_>) -> Option<Finding> {
    const START: &str = "NCCL_COMM_ID";
    let setting = host.settings.nccl(START).filter(|setting| !setting.value.contains(':'))?;
    setting.value.parse::<std::net::Ipv4Addr>().ok()?;
    let found = format!("`{}` has no port, and NCCL does not start", setting.value);
    Some(
        Finding::error(
            START,
            found,
            format!("write {START}={}:29500, or with another port that is free", setting.value),
        )
        .because(setting.origin()),
    )
}

/// vLLM offers this address to the other nodes.
fn own_address(host: &Host<'_>) -> Option<Finding> {
    const OWN: &str = "VLLM_HOST_IP";
    let value = host.settings.variable(OWN)?;
    let address: IpAddr = value.parse().ok()?;
    let known: Vec<&Interface> = host.interfaces.iter().filter(|interface| !interface.addresses.is_empty()).collect();
    if known.is_empty() || known.iter().any(|interface| interface.addresses.iter().any(|own| own.address == address)) {
        return None;
    }
    let main = host
        .main_interface()
        .and_then(Interface::first_address)
        .map_or_else(|| "ADDRESS".to_owned(), |own| own.to_string());
    let found = format!(
        "{} says that it is {value}, which is no address of it: it is never copied between nodes, and is set before ray start",
        host.name
    );
    Some(Finding::error(OWN, found, format!("write {OWN}={main} on this node")).because("set in the environment"))
}

fn names(host: &Host<'_>, setting: &Setting) -> Option<Finding> {
    let value = setting.value.trim_end_matches('\r');
    let listed = NameList::read(value);
    let (main, remove) = (host.main_interface_name(), setting.remove());
    if let Some(inside) = listed.names.iter().find(|name| name.starts_with('^')) {
        let found = format!("`{inside}` names nothing: `^` works at the beginning of the list only");
        return Some(Finding::error(NAME, found, format!("write {NAME}=^{}", value.replace('^', ""))));
    }
    if listed.excludes {
        let taken = taken(host);
        let found = match taken.first() {
            None => "it leaves no interface".to_owned(),
            Some(first) if first.name == "lo" => format!(
                "`{value}` lets lo in, which NCCL then takes first: an exclusion of one's own replaces the usual one of lo"
            ),
            Some(first) if first.is_container_bridge() && first.name != main => {
                let found = format!(
                    "`{value}` lets {} in, which NCCL then takes first, and which leads to no other machine: an exclusion of one's own replaces the usual one of lo, docker and virbr",
                    first.name
                );
                let mut names = listed.names.clone();
                let usual = ["lo", "docker", "virbr"].map(str::to_owned);
                names.extend(usual.into_iter().filter(|name| !listed.names.contains(name)));
                if !["docker", "virbr"].iter().any(|prefix| first.name.starts_with(prefix)) {
                    names.push(first.name.clone());
                }
                return Some(Finding::error(
                    NAME,
                    found,
                    format!("write {NAME}=^{}, or {NAME}={main}", names.join(",")),
                ));
            }
            Some(_) => return None,
        };
        let also = if listed.exact { "^=" } else { "^" };
        return Some(Finding::error(
            NAME,
            found,
            format!("write {NAME}={also}{},lo, or remove it", listed.names.join(",")),
        ));
    }
    let here: Vec<&Interface> = host.interfaces.iter().filter(|interface| listed.names(&interface.name)).collect();
    let usable: Vec<&&Interface> = here.iter().filter(|interface| interface.is_usable()).collect();
    if here.is_empty() {
        let known: Vec<&str> = host.interfaces.iter().map(|interface| interface.name.as_str()).collect();
        let spaced = if value.contains(' ') { "; a space belongs to its name" } else { "" };
        let found = format!("`{value}` matches no interface{spaced}; here are {}", list(&known));
        let fix = if setting.hides.is_empty() {
            format!("write {NAME}={main}, or unset it")
        } else {
            format!("{remove}, or write {NAME}={main}")
        };
        return Some(Finding::error(NAME, found, fix));
    }
    if usable.is_empty() {
        let words: Vec<String> = here
            .iter()
            .map(|interface| match interface.is_running {
                false => format!("{} is down, or has no carrier", interface.name),
                true => format!("{} has no address", interface.name),
            })
            .collect();
        let fix =
            format!("bring it up and give it an address (ip link set {0} up), or write {NAME}={main}", here[0].name);
        return Some(Finding::error(NAME, format!("NCCL finds no interface: {}", list(&words)), fix));
    }
    // One that is named whole, and others that only begin like it.
    let (whole, beginning): (Vec<&str>, Vec<&str>) = usable
        .iter()
        .map(|interface| interface.name.as_str())
        .partition(|name| listed.names.iter().any(|listed| listed == name));
    let extra: Vec<&str> = beginning
        .into_iter()
        .filter(|name| {
            whole.iter().any(|whole| name.starts_with(whole))
                && !listed
                    .names
                    .iter()
                    .any(|other| !whole.contains(&other.as_str()) && name.starts_with(other.as_str()))
        })
        .collect();
    (!listed.exact && !extra.is_empty()).then(|| {
        let found = format!("`{value}` is a prefix, and also takes {}", list(&extra));
        Finding::warning(
            NAME,
            found,
            format!("put = before the list, for exactly these: {NAME} is `={}`", listed.names.join(",")),
        )
    })
}

fn family(host: &Host<'_>) -> Option<Finding> {
    let setting = host.settings.nccl("NCCL_SOCKET_FAMILY")?;
    let wants_v6 = match setting.value.as_str() {
        "AF_INET6" => true,
        "AF_INET" => false,
        _ => return None,
    };
    let taken = taken(host);
    let fits = |interface: &&Interface| if wants_v6 { interface.has_v6() } else { interface.has_v4() };
    if taken.is_empty() || taken.iter().any(fits) {
        return None;
    }
    let names: Vec<&str> = taken.iter().map(|interface| interface.name.as_str()).collect();
    let (word, other) = if wants_v6 { ("IPv6", "AF_INET") } else { ("IPv4", "AF_INET6") };
    let found = format!(
        "{} has no {word} address that leads beyond its link, and `{}` demands one",
        list(&names),
        setting.value
    );
    let fix = format!("write NCCL_SOCKET_FAMILY={other}, unset it, or give the interface such an address");
    Some(Finding::error("NCCL_SOCKET_FAMILY", found, fix).because(setting.origin()))
}

fn gloo(host: &Host<'_>) -> Option<Finding> {
    const GLOO: &str = "GLOO_SOCKET_IFNAME";
    let main = host.main_interface_name();
    let Some(value) = host.settings.variable(GLOO) else { return own_name_is_loopback(host) };
    let finding = if value.starts_with(['^', '=']) {
        let found =
            format!("Gloo takes names of interfaces, and does not know NCCL's exclusion: `{value}` is no interface");
        Finding::error(GLOO, found, format!("write {GLOO}={main}"))
    } else {
        let missing: Vec<&str> = value.split(',').filter(|name| host.interface(name).is_none()).collect();
        if missing.is_empty() {
            return None;
        }
        Finding::error(
            GLOO,
            format!("`{}` is no interface here; Gloo compares whole names", list(&missing)),
            format!("write {GLOO}={main}"),
        )
    };
    Some(finding.because("set in the environment"))
}

/// Without a name, Gloo takes the address that the host's own name leads to.
fn own_name_is_loopback(host: &Host<'_>) -> Option<Finding> {
    let other = host.settings.variable("MASTER_ADDR")?;
    if other == "localhost" || other.starts_with("127.") || other == "::1" {
        return None;
    }
    let hosts = host.text("/etc/hosts")?;
    let line = hosts.lines().map(|line| line.split('#').next().unwrap_or_default()).find_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next()?;
        words.any(|word| word == host.name).then(|| address.to_owned())
    })?;
    (line.starts_with("127.") || line == "::1").then(|| {
        let found =
            format!("/etc/hosts says that {} is {line}, so Gloo offers the loopback address to other nodes", host.name);
        let fix = format!("set GLOO_SOCKET_IFNAME={}, or correct /etc/hosts", host.main_interface_name());
        Finding::warning("GLOO_SOCKET_IFNAME", found, fix).because("/etc/hosts")
    })
}
