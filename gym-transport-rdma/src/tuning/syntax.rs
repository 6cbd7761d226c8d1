//! The first validation: how the libraries read the values, without a look at the machine.

use super::finding::Finding;
use super::settings::{Number, Setting, Settings, read_number};
use super::table::{INTEGERS, Kind, LEVELS, NCCL, OTHER_NCCL, OTHER_UCX, REPLACED, UCX, Variable, variable};

pub(super) fn check(settings: &Settings, findings: &mut Vec<Finding>) {
    for setting in settings.all_of_nccl() {
        match variable(&setting.name) {
            Some(known) => findings.extend(value(known, setting).map(|finding| finding.because(setting.origin()))),
            None => {
                let finding = integer(setting).or_else(|| unknown_name(&setting.name));
                findings.extend(finding.map(|finding| finding.because(setting.origin())));
            }
        }
    }
    for setting in settings.all_of_ucx() {
        let finding = match variable(&setting.name) {
            Some(known) => value_of_ucx(known, &setting.value),
            None => misspelt(&setting.name, UCX, OTHER_UCX, "UCX"),
        };
        findings.extend(finding.map(|finding| finding.because(setting.origin())));
    }
    for name in settings.variables.keys() {
        // The first letter was lost when it was copied.
        if name.starts_with("CCL_") || name.starts_with("NCLL_") || name.starts_with("NCCL-") {
            findings.extend(
                misspelt(name, NCCL, OTHER_NCCL, "NCCL").map(|finding| finding.because("set in the environment")),
            );
        }
    }
}

/// Says how NCCL reads one of the numbers whose range nobody has written down.
fn integer(setting: &Setting) -> Option<Finding> {
    let value = setting.value.trim_end_matches('\r');
    if value.is_empty() || !INTEGERS.contains(&setting.name.as_str()) {
        return None;
    }
    let bare = value.trim_matches(['"', '\'']);
    if bare.len() != value.len() {
        let found = format!("the quotes belong to the value `{value}`: it is read as 0");
        return Some(Finding::error(&setting.name, found, format!("write it without quotes: {}={bare}", setting.name)));
    }
    number(&setting.name, value, i64::MIN, i64::MAX, "")
}

fn value(known: &Variable, setting: &Setting) -> Option<Finding> {
    let (name, value) = (setting.name.as_str(), setting.value.trim_end_matches('\r'));
    if value.is_empty() {
        let hidden = setting.hides.iter().find(|(_, hidden)| !hidden.is_empty());
        return hidden.map(|(source, hidden)| {
            let found = format!(
                "{name} is empty in {}, and hides `{hidden}` of {source}: it means the default, {}",
                setting.source, known.default
            );
            Finding::warning(name, found, format!("unset {name}, or give it a value"))
        });
    }
    let bare = value.trim_matches(['"', '\'']);
    if bare.len() != value.len() {
        let read = match known.kind {
            Kind::Number(..) | Kind::Switch => "it is read as 0",
            _ => "it names nothing that exists",
        };
        let found = format!("the quotes belong to the value `{value}`: {read}");
        return Some(Finding::error(
            name,
            found,
            format!("write it without quotes: {name}={bare}; docker run --env-file keeps quotes"),
        ));
    }
    match known.kind {
        Kind::Number(least, most) => number(name, value, least, most, known.default),
        Kind::Switch => number(name, value, 0, 1, known.default),
        Kind::Level => level(name, value),
        Kind::Words(words) if name == "NCCL_DEBUG" => {
            let known = words.iter().any(|word| word.eq_ignore_ascii_case(value));
            (!known).then(|| {
                Finding::warning(
                    name,
                    format!("`{value}` is unknown, and ignored"),
                    format!("write one of {}", words.join(", ")),
                )
            })
        }
        Kind::Words(words) => {
            let near = words.iter().find(|word| word.ends_with('6') == value.contains('6')).unwrap_or(&words[0]);
            (!words.contains(&value)).then(|| {
                Finding::warning(
                    name,
                    format!("`{value}` is unknown, and ignored: NCCL knows {}", words.join(", ")),
                    format!("write {name}={near}"),
                )
            })
        }
        Kind::Cards | Kind::Interfaces | Kind::Path | Kind::Text | Kind::Memory => None,
    }
}

/// Values with which NCCL's source says that a variable is unset, where that is not 0 or a number of its range.
const UNSET: [(&str, i64); 8] = [
    ("NCCL_BUFFSIZE", -2),
    ("NCCL_IB_SL", -1),
    ("NCCL_IB_TC", -1),
    ("NCCL_MAX_NCHANNELS", -2),
    ("NCCL_MIN_NCHANNELS", -2),
    ("NCCL_NET_GDR_READ", -2),
    ("NCCL_NSOCKS_PERTHREAD", -2),
    ("NCCL_SOCKET_NTHREADS", -2),
];

/// Smaller buffers are meant in KiB or MiB.
const BUFFER_MIN: i64 = 1_024;

fn number(name: &str, text: &str, least: i64, most: i64, default: &str) -> Option<Finding> {
    let range = || if most == i64::MAX { format!("at least {least}") } else { format!("{least} to {most}") };
    let Number::Read { value, used, octal } = read_number(text) else {
        return Some(Finding::error(
            name,
            format!("{text} is too large, and the default is used"),
            format!("write a number, {}", range()),
        ));
    };
    let rest = text[used..].trim();
    if used == 0 {
        let meant = match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "enable" | "enabled" => "1".to_owned(),
            "false" | "no" | "off" | "disable" | "disabled" => "0".to_owned(),
            _ => format!("a number, {}", range()),
        };
        // Words for 0 are read as what they mean.
        if meant == "0" {
            return None;
        }
        return Some(Finding::error(
            name,
            format!("`{text}` is no number, and is read as 0"),
            format!("write {name}={meant}"),
        ));
    }
    if !rest.is_empty() {
        let times = match rest.trim_end_matches(['b', 'B', 'i']).to_ascii_uppercase().as_str() {
            "K" => Some(1_i64 << 10),
            "M" => Some(1 << 20),
            "G" => Some(1 << 30),
            _ => None,
        };
        let unit = if name.ends_with("SIZE") { " bytes" } else { "" };
        // A number with an exponent, such as 5e5.
        let whole = text.parse::<f64>().ok().filter(|whole| (1.0..1e15).contains(whole) && whole.fract() == 0.0);
        let meant = match (times, whole) {
            (Some(times), _) => value.saturating_mul(times),
            (None, Some(whole)) => whole as i64,
            (None, None) => value,
        };
        return Some(Finding::error(
            name,
            format!("`{text}` is read as {value}{unit}: the unit `{rest}` behind the number is ignored"),
            format!("write {name}={meant}"),
        ));
    }
    if octal {
        let meant = text.trim_start_matches('0');
        return Some(Finding::error(
            name,
            format!("`{text}` is octal, and is read as {value}"),
            format!("write {name}={}", if meant.is_empty() { "0" } else { meant }),
        ));
    }
    if name == "NCCL_IB_RETRY_CNT" && value > most {
        let found =
            format!("{value} does not fit into three bits, so that cards take {}; the largest value is 7", value & 7);
        return Some(Finding::error(name, found, format!("write {name}=7")));
    }
    if name == "NCCL_BUFFSIZE" && (1..BUFFER_MIN).contains(&value) {
        let found = format!(
            "{value} is read as bytes, and a buffer of {value} bytes holds no message: it looks like another unit"
        );
        return Some(Finding::error(
            name,
            found,
            format!("write {name}={}", if value <= 64 { value << 20 } else { value << 10 }),
        ));
    }
    if (least..=most).contains(&value) || UNSET.contains(&(name, value)) {
        return None;
    }
    let near = match name {
        "NCCL_IB_SL" => "0, or 3 where the switches say so".to_owned(),
        "NCCL_IB_GID_INDEX" => {
            return Some(Finding::error(
                name,
                format!("{value} is beyond the rows of a GID table, whose range is 0 to 255"),
                format!("unset {name}, so that NCCL searches the row"),
            ));
        }
        "NCCL_IB_PKEY" => {
            let found = format!(
                "{text} is no index of the table of partitions, which has 128 rows at most: it looks like the key itself"
            );
            return Some(Finding::error(
                name,
                found,
                format!("unset {name}, or write the index of that key (/sys/class/infiniband/*/ports/*/pkeys)"),
            ));
        }
        // 0 is in the range, and waits for ever.
        "NCCL_IB_TIMEOUT" => "20, or 22 for large fabrics".to_owned(),
        _ if default.starts_with(|letter: char| letter.is_ascii_digit()) => format!("the default is {default}"),
        _ => format!("or unset {name}"),
    };
    Some(Finding::error(
        name,
        format!("{value} is out of its range, {}", range()),
        format!("write a number, {}: {near}", range()),
    ))
}

fn level(name: &str, value: &str) -> Option<Finding> {
    if LEVELS.contains(&value) {
        return None;
    }
    if value.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let upper = value.to_ascii_uppercase();
    let fix = match LEVELS.iter().find(|level| **level == upper) {
        Some(level) => format!("write {name}={level}"),
        None => format!("write one of {}; nvidia-smi's NODE is PHB here", LEVELS.join(", ")),
    };
    Some(Finding::error(name, format!("`{value}` is unknown and ignored: words of levels are compared exactly"), fix))
}

fn unknown_name(name: &str) -> Option<Finding> {
    if INTEGERS.contains(&name) {
        return None;
    }
    if OTHER_NCCL.contains(&name) && !REPLACED.iter().any(|(old, _)| *old == name) {
        return None;
    }
    if let Some((_, fix)) = REPLACED.iter().find(|(old, _)| *old == name) {
        return Some(Finding::warning(name, format!("NCCL does not read {name}, and says nothing"), *fix));
    }
    misspelt(name, NCCL, OTHER_NCCL, "NCCL")
}

/// Returns a finding about a name that is nearly that of a variable. A name that is like none may belong to a newer version.
fn misspelt(name: &str, known: &[Variable], others: &[&str], library: &str) -> Option<Finding> {
    let names = known.iter().map(|variable| variable.name).chain(others.iter().copied());
    let (distance, near) = names.map(|known| (distance(name, known), known)).min()?;
    let most = if name.len() < 14 { 1 } else { 2 };
    (1..=most).contains(&distance).then(|| {
        Finding::warning(name, format!("{library} does not know {name}, and ignores it"), format!("write {near}"))
    })
}

/// The number of letters that are inserted, removed or replaced.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], index + 1);
        for (at, other_letter) in other.iter().enumerate() {
            let replaced = before + usize::from(letter != *other_letter);
            before = row[at + 1];
            row[at + 1] = replaced.min(before + 1).min(row[at] + 1);
        }
    }
    row[other.len()]
}

/// Numbers of UCX with the largest value and the bits that packets have for them.
const FIELDS: [(&str, u16, u32); 2] = [("UCX_IB_SL", 15, 4), ("UCX_IB_TRAFFIC_CLASS", 255, 8)];

pub(super) fn value_of_ucx(known: &Variable, value: &str) -> Option<Finding> {
    let name = known.name;
    let bare = value.trim_matches(['"', '\'']);
    if bare.len() != value.len() {
        let found = format!("{name}: the quotes belong to the value `{value}`, and UCX finds nothing of that name");
        return Some(Finding::error(name, found, format!("write it without quotes: {name}={bare}")));
    }
    let unreadable = |expected: &str| {
        let found = format!("UCX cannot read {name}=`{value}`, and does not start; UCX 1.13 may even end the process");
        Finding::error(name, found, format!("write {expected}, or unset {name}"))
    };
    match known.kind {
        Kind::Memory => (!is_memory(value)).then(|| unreadable("a number or a size such as 64k, auto or inf")),
        Kind::Number(..) => (!is_number(value)).then(|| unreadable("a number")),
        Kind::Words(words) if !words.iter().any(|word| word.eq_ignore_ascii_case(value)) => {
            Some(unreadable(&format!("one of {}", words.join(", "))))
        }
        _ if matches!(name, "UCX_IB_GID_INDEX" | "UCX_IB_TRAFFIC_CLASS" | "UCX_IB_SL")
            && value != "auto"
            && value.parse::<u16>().is_err() =>
        {
            Some(unreadable("a number or auto"))
        }
        _ if let Some((_, most, bits)) = FIELDS.iter().find(|(field, ..)| *field == name)
            && let Ok(number) = value.parse::<u16>()
            && number > *most =>
        {
            let found = format!(
                "{number} is out of its range, 0 to {most}: the field of a packet has {bits} bits, and UCX refuses the card"
            );
            Some(Finding::error(name, found, format!("write auto or a number of that range, or unset {name}")))
        }
        _ => None,
    }
}

/// Returns a setting that keeps UCX from starting for sure, because it cannot read it, and what is found about it.
pub(super) fn unreadable(settings: &Settings) -> Option<(&Setting, Finding)> {
    settings.all_of_ucx().find_map(|setting| {
        let known = variable(&setting.name)?;
        let stops = match known.kind {
            Kind::Number(..) => !is_number(&setting.value),
            Kind::Memory => !is_memory(&setting.value),
            // The settings of a transport are read when there is a device for it.
            _ => false,
        };
        let finding = value_of_ucx(known, &setting.value).filter(|_| stops)?;
        Some((setting, finding.because(setting.origin())))
    })
}

/// Reads a number as `ucs_config_sscanf_uint` does: with `sscanf`, which ignores what is behind it.
fn is_number(text: &str) -> bool {
    let text = text.trim_start();
    text.to_ascii_lowercase().starts_with("inf")
        || text.strip_prefix(['-', '+']).unwrap_or(text).starts_with(|letter: char| letter.is_ascii_digit())
}

/// Reads a size as `ucs_str_to_memunits` does. A list by kind of memory has `:` before each value.
fn is_memory(text: &str) -> bool {
    let one = |text: &str| {
        let text = text.rsplit(':').next().unwrap_or_default();
        if ["auto", "inf", "infinity"].contains(&text) {
            return true;
        }
        let digits = text.trim_end_matches(['b', 'B']).trim_end_matches(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
        !digits.is_empty() && digits.parse::<f64>().is_ok()
    };
    !text.is_empty() && text.split(',').all(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_near_by_their_letters() {
        assert_eq!(distance("UCX_NET_DEVICE", "UCX_NET_DEVICES"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }

    #[test]
    fn no_variable_of_the_table_is_taken_for_a_mistake() {
        for name in NCCL.iter().chain(UCX).map(|variable| variable.name).chain(OTHER_NCCL.iter().copied()) {
            let replaced = REPLACED.iter().any(|(old, _)| *old == name);
            assert!(variable(name).is_some() || replaced || unknown_name(name).is_none(), "{name}");
        }
    }
}
