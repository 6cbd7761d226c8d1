//! Rows of the GID tables, by which RoCE finds its address. Read in NCCL's `net_ib/connect.cc` (`ncclIbGetGidIndex`).

use std::net::IpAddr;

use super::Chosen;
use crate::tuning::finding::Finding;
use crate::tuning::host::{Host, Port, Row};
use crate::tuning::settings::Version;

const INDEX: &str = "NCCL_IB_GID_INDEX";
/// From this version on, NCCL searches the row; before, it takes row 0.
const SEARCHES: Version = Version(2, 21, 0);
const TABLE: &str = "/sys/class/infiniband/*/ports/*/gids";

pub(super) fn check(host: &Host<'_>, chosen: &Chosen<'_>, findings: &mut Vec<Finding>) {
    let fixed = fixed(host).and_then(|index| fixed_row(index, &roce(chosen)));
    findings.extend(fixed.map(|finding| with_origin(host, finding)).or_else(|| taken(host, chosen)));
}

/// Says what is wrong with the row that NCCL takes by itself.
pub(crate) fn taken(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    let roce = roce(chosen);
    if roce.is_empty() || fixed(host).is_some() {
        return None;
    }
    let older = host.nccl.is_some_and(|version| version < SEARCHES);
    let finding = if older { row_of_older(host, &roce) } else { searched(host, &roce) };
    finding.map(|finding| with_origin(host, finding))
}

fn roce<'h>(chosen: &Chosen<'h>) -> Vec<&'h Port> {
    chosen.ports.iter().copied().filter(|port| port.is_roce() && !port.rows.is_empty()).collect()
}

/// Returns the row that a setting names.
fn fixed(host: &Host<'_>) -> Option<i64> {
    let quoted = |name: &str| host.settings.nccl(name).is_some_and(|setting| setting.value.contains(['"', '\'']));
    host.settings.number(INDEX).filter(|index| *index >= 0 && !quoted(INDEX))
}

fn with_origin(host: &Host<'_>, finding: Finding) -> Finding {
    let setting = host.settings.nccl(&finding.about);
    let because = setting.map_or_else(|| TABLE.to_owned(), crate::tuning::settings::Setting::origin);
    finding.because(because)
}

/// Says what is wrong with a row as the source of RoCE v2; `None` if nothing is.
pub(super) fn fault(port: &Port, index: i64) -> Option<String> {
    let card = &port.card;
    if index >= port.table as i64 {
        return Some(format!("the table of {card} has {} rows, so {index} is out of its range", port.table));
    }
    match port.row(index) {
        None => Some(format!("row {index} of {card} is empty: there is no GID")),
        Some(row) if row.is_link_local() => {
            Some(format!("row {index} of {card} is link-local ({}), which is not routed", row.written()))
        }
        Some(row) if !row.is_version_2 => {
            Some(format!("row {index} of {card} is of RoCE v1 (version 1), which is not routed"))
        }
        Some(_) => None,
    }
}

fn fixed_row(index: i64, roce: &[&Port]) -> Option<Finding> {
    let wrong: Vec<(&&Port, String)> =
        roce.iter().filter_map(|port| fault(port, index).map(|fault| (port, fault))).collect();
    if wrong.is_empty() {
        return None;
    }
    let right: Vec<(&Port, u32)> =
        roce.iter().filter_map(|port| port.best_row().map(|row| (*port, row.index))).collect();
    let same = right.first().filter(|(_, row)| right.iter().all(|(_, other)| other == row));
    let faults: Vec<&str> = wrong.iter().map(|(_, fault)| fault.as_str()).collect();
    let mut found = format!("{index} is used for all cards, and {}", faults.join("; "));
    if same.is_none() && right.len() > 1 {
        let rows: Vec<String> = right.iter().map(|(port, row)| format!("{row} on {}", port.card)).collect();
        found += &format!("; the right rows differ: {}", rows.join(", "));
    }
    let fix = match same {
        Some((_, row)) => format!("unset {INDEX}, so that NCCL (since 2.21) searches the row; here it is {row}"),
        None => format!("unset {INDEX} or write -1, so that NCCL (since 2.21) searches the row of each card"),
    };
    Some(Finding::error(INDEX, found, fix))
}

fn row_of_older(host: &Host<'_>, roce: &[&Port]) -> Option<Finding> {
    let wrong = roce.iter().find_map(|port| fault(port, 0))?;
    let version = host.nccl?;
    let rows: Vec<String> = roce.iter().filter_map(|port| port.best_row().map(|row| row.index.to_string())).collect();
    let right = rows.first().cloned().unwrap_or_else(|| "ROW".to_owned());
    let found = format!("NCCL {version} searches no row, and takes row 0: {wrong}");
    Some(Finding::error(INDEX, found, format!("write {INDEX}={right}, or upgrade to NCCL 2.21 or later")))
}

/// Returns the result of NCCL's own search: a row of version 2, of the family, inside the range, and not link-local. If nothing fits, it stays at row 0.
fn searched(host: &Host<'_>, roce: &[&Port]) -> Option<Finding> {
    let wants_v6 = host.settings.nccl("NCCL_IB_ADDR_FAMILY").is_some_and(|family| family.value == "AF_INET6");
    let range = host.settings.nccl("NCCL_IB_ADDR_RANGE");
    let network = range.and_then(|range| Network::read(&range.value));
    if let (Some(range), None) = (range, &network) {
        let fix = "write the bits of the network behind it, such as /16".to_owned();
        let found = format!("`{}` has no prefix length (/BITS), and is ignored", range.value);
        return Some(Finding::warning("NCCL_IB_ADDR_RANGE", found, fix));
    }
    if let (Some(range), Some(network)) = (range, &network)
        && network.address.is_ipv6() != wants_v6
    {
        let (of_range, searched) = if wants_v6 { ("IPv4", "AF_INET6") } else { ("IPv6", "AF_INET") };
        let found =
            format!("`{}` is a range of {of_range}, and is ignored: NCCL searches the family {searched}", range.value);
        let other = if wants_v6 { "AF_INET" } else { "AF_INET6" };
        let fix = format!("unset NCCL_IB_ADDR_RANGE, or write NCCL_IB_ADDR_FAMILY={other}");
        return Some(Finding::warning("NCCL_IB_ADDR_RANGE", found, fix));
    }
    let of_family = |row: &&Row| row.is_version_2 && !row.is_link_local() && row.v4().is_none() == wants_v6;
    for port in roce {
        let mut rows = port.rows.iter().filter(of_family).peekable();
        if rows.peek().is_none() {
            let other = port.best_row();
            if !wants_v6 && let Some(row) = other.filter(|row| row.v4().is_none()) {
                let found = format!(
                    "{} has IPv6 addresses only ({}), and NCCL searches IPv4: it stays at row 0, which is {}",
                    port.card,
                    row.written(),
                    port.row(0).map_or_else(|| "empty".to_owned(), |row| row.written()),
                );
                return Some(Finding::error("NCCL_IB_ADDR_FAMILY", found, "write NCCL_IB_ADDR_FAMILY=AF_INET6"));
            }
            if wants_v6 && let Some(row) = other.filter(|row| row.v4().is_some()) {
                let found = format!(
                    "{} has no IPv6 address that is routed, and NCCL is told to search one: it stays at row 0",
                    port.card
                );
                let fix = format!("unset NCCL_IB_ADDR_FAMILY; {} is IPv4", row.written());
                return Some(Finding::error("NCCL_IB_ADDR_FAMILY", found, fix));
            }
            continue;
        }
        if let Some(network) = &network {
            let addresses: Vec<String> = port.rows.iter().filter(of_family).map(Row::written).collect();
            if !rows.any(|row| network.contains(row)) {
                let text = range.map(|range| range.value.clone()).unwrap_or_default();
                let found = format!(
                    "no address of {} is inside {text} (it has {}), so NCCL stays at row 0",
                    port.card,
                    addresses.join(", ")
                );
                let fix = format!("unset NCCL_IB_ADDR_RANGE, or write the network of {}", addresses.join(", "));
                return Some(Finding::error("NCCL_IB_ADDR_RANGE", found, fix));
            }
        }
    }
    None
}

/// A network, such as `10.0.0.0/8`.
struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    fn read(text: &str) -> Option<Self> {
        let (address, bits) = text.split_once('/')?;
        Some(Self { address: address.parse().ok()?, bits: bits.parse().ok()? })
    }

    fn contains(&self, row: &Row) -> bool {
        let prefix =
            |value: u128, width: u32| value.checked_shr(width.saturating_sub(u32::from(self.bits))).unwrap_or(0);
        match (self.address, row.v4()) {
            (IpAddr::V4(network), Some(address)) => {
                prefix(u128::from(network.to_bits()), 32) == prefix(u128::from(address.to_bits()), 32)
            }
            (IpAddr::V6(network), None) => prefix(network.to_bits(), 128) == prefix(row.address.to_bits(), 128),
            _ => false,
        }
    }
}
