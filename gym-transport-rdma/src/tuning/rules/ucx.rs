//! UCX: its devices, transports and rows. Read in `uct/ib/base/ib_device.c` and `ucp/core/ucp_context.c`.

use super::{list, rows};
use crate::tuning::finding::Finding;
use crate::tuning::host::{Host, Port};
use crate::tuning::settings::{Setting, Version};

const DEVICES: &str = "UCX_NET_DEVICES";
const TRANSPORTS: &str = "UCX_TLS";
const ROW: &str = "UCX_IB_GID_INDEX";
/// Since then, UCX hides a RoCE port whose row 0 is empty, unless a row is named (openucx/ucx#6467).
const HIDES_EMPTY_ROW: Version = Version(1, 11, 0);
/// Since then, a device may be named without its port (openucx/ucx#11142).
const NEEDS_NO_PORT: Version = Version(1, 21, 0);
/// Transports that lead to processes of the same host.
const LOCAL: [&str; 11] = ["all", "self", "sm", "shm", "posix", "sysv", "xpmem", "mm", "knem", "cma", "tcp"];
/// Transports of cards.
const OF_CARDS: [&str; 18] = [
    "all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x",
    "ud_verbs", "ud_mlx5", "srd", "gga", "gga_mlx5",
];

/// From 128 resources on, UCX 1.13 aborts the process (run: 127 interfaces and four transports of the host). A card has several for each port.
pub(crate) const INTERFACES_OF_CROWD: usize = 96;
/// The devices that UCX is kept to on such a machine.
const DEVICES_OF_CROWD_MAX: usize = 16;

/// Transports of GPUs, and some of older machines.
const OTHERS: [&str; 15] = [
    "cuda",
    "cuda_copy",
    "cuda_ipc",
    "gdr_copy",
    "rocm",
    "rocm_copy",
    "rocm_ipc",
    "rocm_gdr",
    "ze",
    "ze_copy",
    "ze_ipc",
    "ze_gdr",
    "ugni",
    "rdmacm",
    "sockcm",
];
/// Words that people write for a transport.
const MEANT: [(&str, &str); 5] =
    [("rdma", "rc"), ("roce", "rc"), ("infiniband", "ib"), ("verbs", "rc_verbs"), ("ethernet", "tcp")];

pub(super) fn check(host: &Host<'_>, findings: &mut Vec<Finding>) {
    if !host.has_ucx {
        return;
    }
    findings.extend(devices(host).or_else(|| interfaces_for_cards(host)).or_else(|| down(host)));
    findings.extend(empty(host));
    findings.extend(words(host).or_else(|| transports(host)).or_else(|| reach(host)));
    findings.extend(container_bridge(host));
    findings.extend(row(host));
    findings.extend(crowd(host));
}

/// Returns a setting without quotes. Those that have some mean something else, which another rule says.
fn unquoted<'h>(host: &'h Host<'_>, name: &str) -> Option<&'h Setting> {
    host.settings.ucx(name).filter(|setting| !setting.value.contains(['"', '\'']))
}

fn is_quoted(host: &Host<'_>, name: &str) -> bool {
    host.settings.ucx(name).is_some() && unquoted(host, name).is_none()
}

/// Returns `true` if `UCX_TLS` allows one of these transports.
fn allows(host: &Host<'_>, transports: &[&str]) -> bool {
    let Some(setting) = host.settings.ucx(TRANSPORTS) else { return true };
    match setting.value.strip_prefix('^') {
        Some(_) => true,
        None => setting.value.split(',').any(|name| transports.contains(&base(name))),
    }
}

/// The ways to other hosts that a list of transports has.
#[derive(Clone, Copy)]
pub(in crate::tuning) struct Ways {
    pub(in crate::tuning) cards: bool,
    pub(in crate::tuning) sockets: bool,
}

/// Returns the value of `UCX_TLS` and its ways to other hosts, if it is a plain list of known names.
pub(in crate::tuning) fn ways<'h>(host: &'h Host<'_>) -> Option<(&'h str, Ways)> {
    let setting = unquoted(host, TRANSPORTS).filter(|_| host.has_ucx)?;
    if !setting.value.split(',').all(is_known) || allows(host, &["all"]) {
        return None;
    }
    Some((&setting.value, Ways { cards: allows(host, &OF_CARDS), sockets: allows(host, &["tcp"]) }))
}

/// Returns the name of a transport: `\rc_x` and `rc_x:aux` are `rc_x`.
fn base(name: &str) -> &str {
    let name = name.trim_start_matches('\\');
    name.split_once(':').map_or(name, |(name, _)| name)
}

/// Returns `true` if `UCX_NET_DEVICES` has a port.
fn is_named(host: &Host<'_>, port: &Port) -> bool {
    let Some(setting) = host.settings.ucx(DEVICES) else { return true };
    if setting.value == "all" || setting.value.contains(['^', '~', '*', '?', '[']) {
        return true;
    }
    let needs_port = host.ucx.is_some_and(|version| version < NEEDS_NO_PORT);
    setting.value.split(',').any(|device| match device.split_once(':') {
        Some((card, number)) => card == port.card && number.parse() == Ok(port.number),
        None => device == port.card && !needs_port,
    })
}

/// Returns `true` if UCX can send from a port, by its settings and by its row.
pub(crate) fn takes(host: &Host<'_>, port: &Port) -> bool {
    allows(host, &OF_CARDS) && is_named(host, port) && !is_hidden(host, port)
}

/// Returns the row that a setting names.
fn named_row<'h>(host: &'h Host<'_>) -> Option<(&'h Setting, i64)> {
    let setting = host.settings.ucx(ROW).filter(|setting| setting.value != "auto")?;
    Some((setting, setting.value.parse().ok()?))
}

/// Returns `true` if UCX hides a RoCE port, because the row that it looks at is empty.
fn is_hidden(host: &Host<'_>, port: &Port) -> bool {
    port.is_roce()
        && host.ucx.is_some_and(|version| version >= HIDES_EMPTY_ROW)
        && port.row(named_row(host).map_or(0, |(_, row)| row)).is_none()
}

/// Returns the active RoCE ports that UCX may use.
fn roce<'h>(host: &'h Host<'_>) -> Vec<&'h Port> {
    let devices = host.settings.ucx(DEVICES).map(|setting| setting.value.as_str()).filter(|devices| *devices != "all");
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

/// Returns the devices that UCX is kept to if there are too many: those of cards, the main interface, and others that lead to other machines.
pub(crate) fn devices_of_crowd(host: &Host<'_>) -> Option<String> {
    if host.interfaces.len() < INTERFACES_OF_CROWD
        || host.settings.ucx(DEVICES).is_some_and(|named| named.value != "all")
    {
        return None;
    }
    let cards = host.cards.iter().flat_map(|card| &card.ports).filter(|port| port.is_active());
    let cards = cards.map(|port| format!("{}:{}", port.card, port.number));
    let main = host.main_interface().map(|interface| interface.name.clone());
    let others = host.interfaces.iter().filter(|interface| interface.is_usable() && !interface.is_container_bridge());
    let mut devices: Vec<String> = Vec::new();
    for device in cards.chain(main).chain(others.map(|interface| interface.name.clone())) {
        if devices.len() < DEVICES_OF_CROWD_MAX && !devices.contains(&device) {
            devices.push(device);
        }
    }
    (!devices.is_empty()).then(|| devices.join(","))
}

/// Says that there are more interfaces than UCX can take.
fn crowd(host: &Host<'_>) -> Option<Finding> {
    let devices = devices_of_crowd(host)?;
    let found = format!(
        "there are {} network interfaces, and UCX 1.13 aborts the process from 128 resources on; this program keeps UCX to {devices}, others do not",
        host.interfaces.len()
    );
    let fix =
        format!("write {DEVICES}={}, or the interfaces that lead to the other machines", host.main_interface_name());
    Some(Finding::warning(DEVICES, found, fix).because("/sys/class/net"))
}

/// Says which named devices are not here.
pub(crate) fn devices(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = DEVICES;
    let setting = unquoted(host, NAME)?;
    let value = Some(setting.value.as_str()).filter(|value| !value.starts_with(['^', '~']) && *value != "all")?;
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
    let known: Vec<String> =
        if allows(host, &OF_CARDS) { known } else { known.into_iter().filter(|name| !name.contains(':')).collect() };
    if !missing.is_empty() {
        let found = format!("{} is not here: UCX knows {}", list(&missing), list(&known));
        return Some(
            Finding::error(NAME, found, format!("write {NAME}={}", known.first().map_or("all", String::as_str)))
                .because(setting.origin()),
        );
    }
    (!without_port.is_empty()).then(|| {
        let version = host.ucx.map_or_else(String::new, |version| version.to_string());
        let with: Vec<String> = without_port.iter().map(|device| format!("{device}:1")).collect();
        let found = format!("UCX {version} wants the port of a card: {} matches no device", list(&without_port));
        Finding::error(NAME, found, format!("write {NAME}={}", with.join(","))).because(setting.origin())
    })
}

/// Returns the names of the active ports, as UCX writes them.
fn active(host: &Host<'_>) -> Vec<String> {
    let ports = host.cards.iter().flat_map(|card| &card.ports).filter(|port| port.is_active());
    ports.map(|port| format!("{}:{}", port.card, port.number)).collect()
}

/// The devices that a setting names, if it is a plain list of them.
fn plain_devices<'h>(host: &'h Host<'_>) -> Option<(&'h Setting, Vec<&'h str>)> {
    let setting = unquoted(host, DEVICES)
        .filter(|setting| setting.value != "all" && !setting.value.contains(['^', '~', '*', '?', '[', ' ']))?;
    Some((setting, setting.value.split(',').collect()))
}

/// Network interfaces are no devices of the transports of cards.
fn interfaces_for_cards(host: &Host<'_>) -> Option<Finding> {
    let (setting, names) = plain_devices(host)?;
    let transports = unquoted(host, TRANSPORTS).filter(|setting| !setting.value.starts_with('^'))?;
    let interfaces = names.iter().all(|name| host.interface(name).is_some());
    let active = active(host);
    if !interfaces || active.is_empty() || allows(host, &["all", "tcp"]) || !allows(host, &OF_CARDS) {
        return None;
    }
    let found = format!(
        "{} is a network interface, and {TRANSPORTS}=`{}` has transports of cards only: no other host is reached",
        list(&names),
        transports.value
    );
    Some(Finding::error(DEVICES, found, format!("write {DEVICES}={}", active.join(","))).because(setting.origin()))
}

/// A port that is named, and has no link.
fn down(host: &Host<'_>) -> Option<Finding> {
    let (setting, names) = plain_devices(host)?;
    let named = |port: &&Port| {
        names.iter().any(|name| {
            let (card, number) =
                name.split_once(':').map_or((*name, None), |(card, number)| (card, number.parse().ok()));
            card == port.card && number.is_none_or(|number: u32| number == port.number)
        })
    };
    let ports: Vec<&Port> = host.cards.iter().flat_map(|card| &card.ports).filter(named).collect();
    let down: Vec<&&Port> = ports.iter().filter(|port| port.state == "DOWN").collect();
    let first = down.first()?;
    let found = format!("port {} of {} is DOWN, so UCX does not use it", first.number, first.card);
    let others = active(host);
    let instead = if others.is_empty() { String::new() } else { format!(", or write {DEVICES}={}", others.join(",")) };
    let fix = format!("check its cable, bring its link up{instead}");
    let works = ports.len() > down.len() || names.iter().any(|name| host.interface(name).is_some());
    let severity = if works { Finding::warning } else { Finding::error };
    Some(severity(DEVICES, found, fix).because(setting.origin()))
}

fn empty(host: &Host<'_>) -> Option<Finding> {
    host.settings.variables.get(TRANSPORTS).filter(|value| value.is_empty())?;
    let found = "it is empty, and UCX does not start: \"The TLs list is empty\"";
    Some(
        Finding::error(TRANSPORTS, found, format!("unset it, or write {TRANSPORTS}=all"))
            .because("set in the environment"),
    )
}

fn is_known(word: &str) -> bool {
    [LOCAL.as_slice(), &OF_CARDS, &OTHERS].concat().contains(&base(word))
}

/// Words of `UCX_TLS` that are no transports for sure. A word that is like none may belong to a newer version.
fn words(host: &Host<'_>) -> Option<Finding> {
    let setting = unquoted(host, TRANSPORTS).filter(|setting| !setting.value.starts_with('^'))?;
    let value = &setting.value;
    let corrected = |word: &str| -> Option<String> {
        let clean = word.trim().to_ascii_lowercase();
        let meant = MEANT.iter().find(|(written, _)| *written == clean).map(|(_, meant)| (*meant).to_owned());
        meant.or_else(|| is_known(&clean).then_some(clean))
    };
    let listed: Vec<&str> = value.split(',').collect();
    let wrong: Vec<&str> = listed
        .iter()
        .copied()
        .filter(|word| !is_known(word) && (word.starts_with('^') || corrected(word).is_some()))
        .collect();
    let first = wrong.first()?;
    let right: Vec<String> =
        listed
            .iter()
            .filter(|word| !word.starts_with('^'))
            .map(|word| {
                if is_known(word) { (*word).to_owned() } else { corrected(word).unwrap_or_else(|| (*word).to_owned()) }
            })
            .collect();
    let why = if first.starts_with('^') {
        format!("`{first}` is no transport: `^` works at the beginning of the list only")
    } else if first.trim() != *first {
        format!("the space belongs to the name \"{first}\", which is no transport")
    } else {
        format!("`{first}` is no transport, and UCX ignores it")
    };
    let reaches = listed.iter().any(|word| is_known(word) && (OF_CARDS.contains(&base(word)) || base(word) == "tcp"));
    let starts = listed.iter().any(|word| is_known(word));
    let severity = if reaches && starts { Finding::warning } else { Finding::error };
    let found = if reaches { why } else { format!("{why}: no transport to other hosts is left") };
    Some(severity(TRANSPORTS, found, format!("write {TRANSPORTS}={}", right.join(","))).because(setting.origin()))
}

/// Says that no transport to other hosts is left, though there is a network.
fn reach(host: &Host<'_>) -> Option<Finding> {
    let setting = unquoted(host, TRANSPORTS).filter(|setting| !setting.value.starts_with('^'))?;
    let value = &setting.value;
    if !value.split(',').all(is_known) || allows(host, &["all", "tcp"]) {
        return None;
    }
    let (of_cards, active) = (allows(host, &OF_CARDS), active(host));
    let finding = match (of_cards, active.is_empty()) {
        (false, false) => Finding::warning(
            TRANSPORTS,
            format!("`{value}` has no network, so UCX reaches no other host, although {} is active", active[0]),
            format!("write {TRANSPORTS}=rc,{value}, or add tcp"),
        ),
        (true, true) if host.cards.is_empty() && !host.interfaces.is_empty() => Finding::warning(
            TRANSPORTS,
            format!(
                "`{value}` reaches other hosts by transports of RDMA cards (rc and the like) only, and there is no card"
            ),
            format!("unset it, or write {TRANSPORTS}={value},tcp"),
        ),
        _ => return None,
    };
    Some(finding.because(setting.origin()))
}

/// Says what `UCX_TLS` leaves out.
pub(crate) fn transports(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = TRANSPORTS;
    let setting = unquoted(host, NAME).filter(|setting| !setting.value.starts_with('^'))?;
    if allows(host, &LOCAL) {
        return None;
    }
    let value = &setting.value;
    let has_card = host.cards.iter().any(|card| card.ports.iter().any(Port::is_active));
    let of_gpus = host.gpus > 0 && value.split(',').any(|name| name.starts_with("cuda") || name.starts_with("rocm"));
    let finding = if of_gpus || (allows(host, &OF_CARDS) && has_card) {
        let found = format!(
            "`{value}` has neither self nor sm: processes of the same host do not reach each other through shared memory, and a process not itself"
        );
        Finding::warning(NAME, found, format!("write {NAME}={value},self,sm"))
    } else {
        let found = format!(
            "`{value}` leaves no transport that is here: UCX does not start; it has neither self nor sm, the shared memory of one host"
        );
        Finding::error(NAME, found, format!("unset it, or write {NAME}={value},self,sm,tcp"))
    };
    Some(finding.because(setting.origin()))
}

/// Returns what keeps UCX from starting, or from all cards, though it is there.
pub(crate) fn stops(host: &Host<'_>) -> Option<Finding> {
    if let Some((_, finding)) = crate::tuning::syntax::unreadable(&host.settings) {
        return Some(finding);
    }
    let quoted = host.settings.ucx(TRANSPORTS).filter(|_| is_quoted(host, TRANSPORTS));
    if let Some(setting) = quoted {
        let known = crate::tuning::table::variable(TRANSPORTS)?;
        let finding = crate::tuning::syntax::value_of_ucx(known, &setting.value);
        return finding.map(|finding| finding.because(setting.origin()));
    }
    transports(host).filter(|finding| finding.severity == crate::tuning::Severity::Error)
}

/// Says that `UCX_TLS` has no transport of cards, which may be meant so.
pub(crate) fn without_cards(host: &Host<'_>) -> Option<String> {
    let setting = host.settings.ucx(TRANSPORTS).filter(|_| !allows(host, &OF_CARDS))?;
    Some(format!("{TRANSPORTS}=`{}` ({}) names no transport of RDMA", setting.value, setting.source))
}

/// UCX takes every interface that is up, and the bridge of a container runtime has the same address on every machine.
fn container_bridge(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = DEVICES;
    let asks_for_tcp =
        unquoted(host, TRANSPORTS).is_some_and(|setting| setting.value.split(',').any(|name| name == "tcp"));
    if !asks_for_tcp || host.settings.ucx(NAME).is_some_and(|devices| devices.value != "all") {
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

/// Says what is wrong with the row that UCX takes.
pub(crate) fn row(host: &Host<'_>) -> Option<Finding> {
    const NAME: &str = ROW;
    let roce = roce(host);
    if !allows(host, &OF_CARDS) {
        return None;
    }
    if host.settings.ucx(NAME).is_some_and(|setting| setting.value != "auto") {
        let (setting, index) = named_row(host)?;
        let wrong = roce.iter().find_map(|port| rows::fault(port, index))?;
        let right = roce.iter().find_map(|port| port.best_row().map(|row| row.index.to_string()));
        let row = right.unwrap_or_else(|| "auto".to_owned());
        let fix = format!("remove it (auto), or write {NAME}={row}");
        return Some(Finding::error(NAME, wrong, fix).because(setting.origin()));
    }
    let port = roce.iter().find(|port| is_hidden(host, port) && port.best_row().is_some())?;
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
