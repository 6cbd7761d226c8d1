//! Lists of CPUs in the format of the Linux kernel (`/sys/devices/system/node/node0/cpulist`).

use std::collections::BTreeSet;

use gym_core::{Error, Result};

/// Parses a list of CPUs such as `0-3,8-11`. Spaces around numbers and commas are ignored.
///
/// # Errors
/// `InvalidArgument` for an entry that is not a number, a reversed range, and numbers beyond 65535, which no kernel has.
pub fn parse_cpu_list(text: &str) -> Result<BTreeSet<u16>> {
    let mut cpus = BTreeSet::new();
    for part in text.split(',').map(str::trim) {
        let number = |text: &str| text.trim().parse::<u16>();
        let range = match part.split_once('-') {
            Some((first, last)) => number(first).and_then(|first| Ok(first..=number(last)?)),
            None => number(part).map(|one| one..=one),
        };
        match range {
            Ok(range) if !range.is_empty() => cpus.extend(range),
            _ => {
                return Err(Error::invalid(format!(
                    "'{part}' in the CPU list '{text}' is neither a CPU nor a range of them"
                )));
            }
        }
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c194_cpu_lists_of_numbers_and_ranges() {
        let parsed = |text: &str| parse_cpu_list(text).unwrap().into_iter().collect::<Vec<_>>();
        assert_eq!(parsed("0-71"), (0..=71).collect::<Vec<_>>());
        assert_eq!(parsed("0-3,8-11"), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(parsed("0,4,8"), [0, 4, 8]);
        assert_eq!(parsed(" 0-3 , 8 "), [0, 1, 2, 3, 8]);
        assert_eq!(parsed("42"), [42]);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["", "a", "3-1", "1-", "1,,2", "70000"] {
            assert!(parse_cpu_list(text).is_err(), "{text}");
        }
    }
}
