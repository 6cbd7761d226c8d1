//! Which cards and ports NCCL takes. Read in `transport/net_ib` and `misc/utils.cc` (`parseStringList`, `matchIfList`).

use super::{NameList, list};
use crate::tuning::finding::Finding;
use crate::tuning::host::{Card, Host, Port};
use crate::tuning::settings::Setting;

const NAME: &str = "NCCL_IB_HCA";

/// The ports that NCCL takes, and what asks for them.
pub(crate) struct Chosen<'h> {
    pub(crate) ports: Vec<&'h Port>,
    pub(crate) setting: Option<&'h Setting>,
}

impl Chosen<'_> {
    /// Returns `true` if `NCCL_IB_HCA` names a card, active or not.
    pub(super) fn names(&self, card: &str) -> bool {
        self.setting.is_some_and(|setting| {
            let listed = NameList::read(&setting.value);
            !listed.excludes && listed.names.iter().any(|name| listed.is(split(name).0, card))
        })
    }
}

/// Returns the active ports that `NCCL_IB_HCA` selects, or all of them. None, if RDMA is switched off.
pub(crate) fn chosen<'h>(host: &'h Host<'_>) -> Chosen<'h> {
    let setting = host.settings.nccl(NAME);
    let listed = setting.map(|setting| NameList::read(&setting.value));
    let takes = |port: &&Port| listed.as_ref().is_none_or(|listed| takes(listed, port));
    let active = host.cards.iter().flat_map(|card| &card.ports).filter(|port| port.is_active());
    let mut ports: Vec<&Port> = active.filter(takes).collect();
    if let Some(listed) = listed.as_ref().filter(|listed| !listed.excludes) {
        // In the order of the list.
        ports.sort_by_key(|port| listed.names.iter().position(|name| is(listed, name, port)));
    }
    Chosen { ports: if host.is_rdma_off() { Vec::new() } else { ports }, setting }
}

fn takes(listed: &NameList, port: &Port) -> bool {
    listed.names.iter().any(|name| is(listed, name, port)) != listed.excludes
}

fn is(listed: &NameList, name: &str, port: &Port) -> bool {
    let (card, number) = split(name);
    listed.is(card, &port.card) && number.is_none_or(|number| number == Some(port.number))
}

/// Splits `mlx5_0:1` into the card and the number of its port, if one is written.
fn split(name: &str) -> (&str, Option<Option<u32>>) {
    name.split_once(':').map_or((name, None), |(card, number)| (card, Some(number.parse().ok())))
}

pub(super) fn check(host: &Host<'_>, chosen: &Chosen<'_>, findings: &mut Vec<Finding>) {
    if host.cards.is_empty() || !host.may_use_rdma() {
        return;
    }
    if let Some(setting) = chosen.setting.filter(|setting| !setting.value.contains(['"', '\''])) {
        let finding = if host.is_rdma_off() { None } else { names(host, setting, chosen) };
        let wrong = finding.is_some();
        findings.extend(finding.map(|finding| finding.because(setting.origin())));
        if wrong {
            return;
        }
    }
    findings.extend(fabrics(chosen));
    findings.extend(without_row(host, chosen));
    findings.extend(autoconfigured(chosen));
    findings.extend(slower(chosen));
}

fn all_cards<'h>(host: &'h Host<'_>) -> Vec<&'h str> {
    host.cards.iter().filter(|card| card.ports.iter().any(Port::is_active)).map(|card| card.name.as_str()).collect()
}

fn names(host: &Host<'_>, setting: &Setting, chosen: &Chosen<'_>) -> Option<Finding> {
    let value = setting.value.trim_end_matches('\r');
    let listed = NameList::read(value);
    let error = |found: String, fix: String| Some(Finding::error(NAME, found, fix));
    let sockets = "NCCL takes sockets (TCP), and says nothing";
    let here = all_cards(host);
    if value.contains(' ') {
        let clean: String = value.chars().filter(|letter| *letter != ' ').collect();
        let spaced: Vec<String> =
            listed.names.iter().filter(|name| name.contains(' ')).map(|name| format!("\"{name}\"")).collect();
        return error(
            format!("the space belongs to the name {}, which matches no card", list(&spaced)),
            format!("write {NAME}={clean}"),
        );
    }
    if let Some(caret) = listed.names.iter().find(|name| name.starts_with('^')) {
        let bare = caret.trim_start_matches(['^', '=']);
        if listed.exact && listed.names.len() == 1 {
            return error(
                format!("`{value}` matches no card: `=^` is no exclusion; {sockets}"),
                format!("write {NAME}=^={bare}"),
            );
        }
        let found = format!("`{caret}` names no card: `^` works at the beginning of the list only");
        return Some(Finding::warning(NAME, found, format!("write {NAME}=^={bare}")));
    }
    if listed.excludes {
        let left = chosen.ports.is_empty() && !here.is_empty();
        return left.then(|| {
            let found =
                format!("`{value}` excludes all cards that are active ({}), so none is left; {sockets}", list(&here));
            Finding::error(NAME, found, format!("name fewer cards in {NAME}, or unset it"))
        });
    }
    let mut unknown: Vec<String> = Vec::new();
    let mut without_port: Vec<String> = Vec::new();
    let mut down: Vec<&Port> = Vec::new();
    for name in &listed.names {
        let (card, number) = split(name);
        let cards: Vec<&Card> = host.cards.iter().filter(|known| listed.is(card, &known.name)).collect();
        let ports: Vec<&Port> =
            cards.iter().flat_map(|card| &card.ports).filter(|port| is(&listed, name, port)).collect();
        if cards.is_empty() {
            unknown.push(card.to_owned());
        } else if ports.is_empty() {
            without_port.push(format!(
                "{card} has no port {}",
                number.flatten().map_or("of that number".to_owned(), |number| number.to_string())
            ));
        } else if !ports.iter().any(|port| port.is_active()) {
            down.extend(ports);
        }
    }
    if !unknown.is_empty() {
        let interfaces: Vec<&str> =
            unknown.iter().map(String::as_str).filter(|name| host.interface(name).is_some()).collect();
        let what = if interfaces.is_empty() {
            format!("there is no such card: {}", list(&unknown))
        } else {
            format!("{} is a network interface, not an RDMA device", list(&interfaces))
        };
        let rest = if chosen.ports.is_empty() { format!("; {sockets}") } else { String::new() };
        return error(format!("{what}{rest}; active here: {}", list(&here)), format!("write {NAME}={}", exact(&here)));
    }
    if !without_port.is_empty() {
        let rest = if chosen.ports.is_empty() { format!("; {sockets}") } else { String::new() };
        let first: Vec<String> = listed.names.iter().map(|name| format!("{}:1", split(name).0)).collect();
        return error(
            format!("{}{rest}", list(&without_port)),
            format!("write {NAME}={}{}", listed.sign(), first.join(",")),
        );
    }
    if let Some(port) = down.first() {
        let words: Vec<String> =
            down.iter().map(|port| format!("port {} of {} is {}", port.number, port.card, port.state)).collect();
        let lacks_identifier = host.cards.iter().any(|card| card.name == port.card && card.lacks_identifier);
        if matches!(port.state.as_str(), "INIT" | "ARMED") || (lacks_identifier && port.link_layer == "InfiniBand") {
            return None; // The subnet manager or the GUID is missing: a rule of its own.
        }
        return error(
            list(&words),
            "check its cable, bring its link up (ip link set INTERFACE up), or remove the card from the list"
                .to_owned(),
        );
    }
    let whole = |name: &str| host.cards.iter().any(|card| card.name == split(name).0);
    let mut more: Vec<&str> = Vec::new();
    for port in &chosen.ports {
        let by_prefix = |name: &String| is(&listed, name, port) && split(name).0 != port.card && whole(name);
        let named = listed.names.iter().any(|name| split(name).0 == port.card);
        if !named && listed.names.iter().any(by_prefix) {
            more.push(&port.card);
        }
    }
    (!listed.exact && !more.is_empty()).then(|| {
        let found = format!("names are prefixes: `{value}` also takes {}", list(&more));
        Finding::warning(
            NAME,
            found,
            format!("put = before the list, for exactly these: {NAME} is `={}`", listed.names.join(",")),
        )
    })
}

fn exact(cards: &[&str]) -> String {
    format!("={}", cards.join(","))
}

/// NCCL takes InfiniBand and Ethernet together, where the second is often for storage.
fn fabrics(chosen: &Chosen<'_>) -> Option<Finding> {
    let of = |layer: &str| -> Vec<&str> {
        let mut cards: Vec<&str> =
            chosen.ports.iter().filter(|port| port.link_layer == layer).map(|port| port.card.as_str()).collect();
        cards.dedup();
        cards
    };
    let (infiniband, ethernet) = (of("InfiniBand"), of("Ethernet"));
    if infiniband.is_empty() || ethernet.is_empty() {
        return None;
    }
    let (few, many, keep) = if ethernet.len() <= infiniband.len() {
        (&ethernet, "InfiniBand", &infiniband)
    } else {
        (&infiniband, "Ethernet", &ethernet)
    };
    let found = format!(
        "NCCL takes two fabrics together: {} on InfiniBand and {} on Ethernet",
        list(&infiniband),
        list(&ethernet)
    );
    let fix = format!("keep to {many}: {NAME}=^={}, or {NAME}={}", few.join(","), exact(keep));
    Some(Finding::warning(NAME, found, fix).because("/sys/class/infiniband/*/ports/*/link_layer"))
}

/// Cards that are visible, and cannot send: their interface is in another network namespace.
pub(crate) fn without_row(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    let roce: Vec<&&Port> = chosen.ports.iter().filter(|port| port.is_roce()).collect();
    let (good, bad): (Vec<&&Port>, Vec<&&Port>) = roce.into_iter().partition(|port| {
        port.rows
            .iter()
            .any(|row| row.is_version_2 && (row.interface.is_empty() || host.interface(&row.interface).is_some()))
            || (!port.rows.is_empty()
                && port.rows.iter().all(|row| !row.is_version_2 && host.interface(&row.interface).is_some()))
    });
    if bad.is_empty() {
        return None;
    }
    let keep: Vec<&str> = good.iter().map(|port| port.card.as_str()).collect();
    let here = bad.iter().find_map(|port| Some((port, own_interface(host, &port.card)?)));
    if let Some((port, interface)) = here {
        let found = format!("{} has no RoCE v2 address: its network interface {interface} has none", port.name());
        let give = format!("ip addr add ADDRESS dev {interface}, and ip link set {interface} up");
        let because = "/sys/class/infiniband/*/ports/*/gids";
        return Some(if keep.is_empty() {
            Finding::error("RoCE", found, give).because(because)
        } else {
            Finding::error(NAME, found, format!("{give}; or write {NAME}={}", exact(&keep))).because(because)
        });
    }
    let cards: Vec<&str> = bad.iter().map(|port| port.card.as_str()).collect();
    let one = cards.len() == 1;
    let found = format!(
        "{} {} active, but {} network interface is not here, and {} GID table has no GID for it: RoCE is addressed by it",
        list(&cards),
        if one { "is" } else { "are" },
        if one { "its" } else { "their" },
        if one { "its" } else { "their" },
    );
    let because = "/sys/class/infiniband/*/ports/*/gid_attrs/ndevs";
    if good.is_empty() {
        let fix = "give the container the interface: the host's network (network_mode: host), or in Kubernetes a further network (multus, host-device or SR-IOV CNI)";
        return Some(Finding::error("RoCE", found, fix).because(because));
    }
    Some(
        Finding::error(NAME, found, format!("write {NAME}={}, or give the container those interfaces", exact(&keep)))
            .because(because),
    )
}

/// Returns the network interface of a card, if this network namespace has it.
fn own_interface(host: &Host<'_>, card: &str) -> Option<String> {
    let names = host.machine.names(&format!("/sys/class/infiniband/{card}/device/net")).ok()?;
    names.into_iter().find(|name| host.interface(name).is_some())
}

pub(crate) fn autoconfigured(chosen: &Chosen<'_>) -> Option<Finding> {
    let roce: Vec<&&Port> = chosen.ports.iter().filter(|port| port.is_roce()).collect();
    let automatic = |port: &&&Port| port.best_row().is_some_and(|row| row.is_autoconfigured());
    let bad: Vec<&&&Port> = roce.iter().filter(|port| automatic(port)).collect();
    let first = bad.first()?;
    let row = first.best_row()?;
    let cards: Vec<&str> = bad.iter().map(|port| port.card.as_str()).collect();
    let good: Vec<&str> = roce.iter().filter(|port| !automatic(port)).map(|port| port.card.as_str()).collect();
    let found = format!(
        "{} has only the address {} (169.254: autoconfigured, without a route to other networks)",
        list(&cards),
        row.written()
    );
    let interface = if row.interface.is_empty() { "its interface".to_owned() } else { row.interface.clone() };
    let fix = if good.is_empty() {
        format!("give {interface} an address of your network")
    } else {
        format!("give {interface} an address of your network, or write {NAME}={}", exact(&good))
    };
    Some(Finding::warning(NAME, found, fix).because("the port's GID table"))
}

/// One link that has come up slower than those beside it holds all back.
fn slower(chosen: &Chosen<'_>) -> Option<Finding> {
    let fastest = chosen.ports.iter().filter_map(|port| port.gigabits).max()?;
    let of_fastest: Vec<&&Port> = chosen.ports.iter().filter(|port| port.gigabits == Some(fastest)).collect();
    let slow: Vec<&&Port> =
        chosen.ports.iter().filter(|port| port.gigabits.is_some_and(|rate| rate < fastest)).collect();
    let first = slow.first()?;
    let same_fabric = of_fastest.iter().all(|port| port.link_layer == first.link_layer);
    if !same_fabric || slow.len() >= of_fastest.len() {
        return None;
    }
    let cards: Vec<&str> = slow.iter().map(|port| port.card.as_str()).collect();
    let rate = |port: &Port| format!("{} Gb/s", port.gigabits.unwrap_or_default());
    let found = format!(
        "{} came up with {} ({}), and the others with {} ({})",
        list(&cards),
        rate(first),
        first.rate,
        rate(of_fastest[0]),
        of_fastest[0].rate
    );
    let fix =
        format!("check its cable, its link and the port of the switch, or exclude it: {NAME}=^={}", cards.join(","));
    Some(Finding::warning(first.card.clone(), found, fix).because("the port's rate"))
}
