//! The tuning of a member: the settings of its communication libraries that must be the same on all members.
//!
//! A ring of ranks is as fast as its slowest setting, and some that differ make it hang. No node sees the settings of another one, so the head server compares.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result};

/// Most settings of one member. The tables of NCCL and UCX have fewer that must agree.
pub const TUNING_SETTINGS_MAX: usize = 64;

/// Longest value that is told as it is. Of a longer one, its digest is told.
const VALUE_BYTES_MAX: usize = 200;

/// Most members that a warning names for one value.
const NAMES_MAX: usize = 8;

/// The settings of a member that must be the same on all members with such libraries. A member without them has no tuning, and is compared with none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberTuning {
    /// A short digest of the settings, for logs: equal settings have equal digests.
    pub digest: String,
    /// The settings by name, such as `NCCL_IB_TC`, and the version of NCCL as `NCCL`. One that is not set is not here.
    pub settings: BTreeMap<String, String>,
}

impl MemberTuning {
    /// Creates a tuning with its digest. A value that is too long to be told is replaced by a digest of its own.
    #[must_use]
    pub fn new(settings: impl IntoIterator<Item = (String, String)>) -> Self {
        let short = |value: String| {
            if value.len() > VALUE_BYTES_MAX {
                format!("({} bytes, digest {})", value.len(), hash([&value]))
            } else {
                value
            }
        };
        let settings: BTreeMap<String, String> =
            settings.into_iter().map(|(name, value)| (name, short(value))).take(TUNING_SETTINGS_MAX).collect();
        Self { digest: hash(settings.iter().flat_map(|(name, value)| [name, value])), settings }
    }

    /// Returns the bytes of the texts that a head server stores.
    pub(super) fn bytes(&self) -> usize {
        self.digest.len() + self.settings.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
    }

    /// Checks the number of settings.
    pub(super) fn check(&self) -> Result<()> {
        let settings = self.settings.len();
        if settings <= TUNING_SETTINGS_MAX {
            return Ok(());
        }
        Err(Error::invalid(format!("its tuning has {settings} settings; the limit is {TUNING_SETTINGS_MAX}")))
    }
}

/// A setting in which members differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TuningDifference {
    /// The setting.
    pub setting: String,
    /// The differences, with their members, for people.
    pub text: String,
    /// Whether the last of the members has a value that none of the others has.
    pub is_new: bool,
}

/// Compares the tuning of members, the one that has joined last at the end.
#[must_use]
pub fn tuning_differences(members: &[(&str, &MemberTuning)]) -> Vec<TuningDifference> {
    let names: BTreeSet<&String> = members.iter().flat_map(|(_, tuning)| tuning.settings.keys()).collect();
    let value = |tuning: &MemberTuning, name: &String| {
        tuning.settings.get(name).map_or_else(|| "not set".to_owned(), |value| format!("`{value}`"))
    };
    let mut differences = Vec::new();
    for name in names {
        let mut members_of: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (member, tuning) in members {
            members_of.entry(value(tuning, name)).or_default().push(member);
        }
        if members_of.len() < 2 {
            continue;
        }
        let is_new = members.last().is_some_and(|(_, tuning)| members_of[&value(tuning, name)].len() == 1);
        let mut text = format!("{name} differs between workers: ");
        for (at, (value, on)) in members_of.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            let shown = on[..on.len().min(NAMES_MAX)].join(", ");
            // Writing to a string cannot fail.
            let _ = write!(text, "{separator}{value} on {shown}");
            if let Some(more) = on.len().checked_sub(NAMES_MAX).filter(|more| *more > 0) {
                let _ = write!(text, " and {more} more");
            }
        }
        text += if name == "NCCL" {
            "; install the same version on all workers"
        } else {
            "; set the same value on all workers"
        };
        differences.push(TuningDifference { setting: name.clone(), text, is_new });
    }
    differences
}

/// The hash FNV-1a, which every build computes alike. It finds differences, and withstands no attack.
fn hash<'a>(texts: impl IntoIterator<Item = &'a String>) -> String {
    let mut sum: u64 = 0xcbf2_9ce4_8422_2325;
    for text in texts {
        // The zero ends a text, so that moving a letter to the next one changes the sum.
        for byte in text.bytes().chain([0]) {
            sum = (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{:08x}", (sum >> 32) ^ (sum & 0xffff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuning(settings: &[(&str, &str)]) -> MemberTuning {
        MemberTuning::new(settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn equal_settings_have_equal_digests() {
        let one = tuning(&[("NCCL_IB_TC", "106"), ("NCCL_IB_SL", "3")]);
        assert_eq!(one, tuning(&[("NCCL_IB_SL", "3"), ("NCCL_IB_TC", "106")]));
        assert_eq!(one.digest.len(), 8);
        for other in [&[("NCCL_IB_TC", "106")][..], &[("NCCL_IB_TC", "10"), ("6NCCL_IB_SL", "3")], &[]] {
            assert_ne!(one.digest, tuning(other).digest, "{other:?}");
        }
    }

    #[test]
    fn what_differs_is_named_with_the_members() {
        let (a, b) = (
            tuning(&[("NCCL_IB_TC", "106"), ("NCCL", "2.27.3")]),
            tuning(&[("NCCL_IB_TC", "104"), ("NCCL", "2.27.3")]),
        );
        let none = tuning(&[("NCCL", "2.26.2")]);
        assert_eq!(tuning_differences(&[("worker-1", &a), ("worker-2", &a)]), []);
        let found = tuning_differences(&[("worker-1", &a), ("worker-2", &a), ("worker-3", &b)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            found[0].text,
            "NCCL_IB_TC differs between workers: `104` on worker-3; `106` on worker-1, worker-2; set the same value on all workers"
        );
        assert!(found[0].is_new);
        let again = tuning_differences(&[("worker-1", &a), ("worker-3", &b), ("worker-4", &b)]);
        assert!(!again[0].is_new, "the head server has logged it: {again:?}");
        let texts: Vec<String> =
            tuning_differences(&[("worker-1", &a), ("worker-5", &none)]).into_iter().map(|one| one.text).collect();
        assert!(texts[0].contains("`2.26.2` on worker-5; `2.27.3` on worker-1; install the same version"), "{texts:?}");
        assert!(texts[1].contains("`106` on worker-1; not set on worker-5"), "{texts:?}");
    }

    #[test]
    fn long_values_and_long_lists_are_cut() {
        let long = tuning(&[("NCCL_ALGO", &"x".repeat(5_000))]);
        assert!(long.bytes() < 100 && long.settings["NCCL_ALGO"].starts_with("(5000 bytes, digest "), "{long:?}");
        assert_ne!(long.digest, tuning(&[("NCCL_ALGO", &"y".repeat(5_000))]).digest);
        let many: Vec<(String, String)> = (0..1_000).map(|n| (format!("NCCL_{n:04}"), "1".to_owned())).collect();
        assert_eq!(MemberTuning::new(many).settings.len(), TUNING_SETTINGS_MAX);
        let (one, other) = (tuning(&[("NCCL_IB_TC", "106")]), tuning(&[]));
        let names: Vec<String> = (0..12).map(|n| format!("w{n}")).collect();
        let mut members: Vec<(&str, &MemberTuning)> = names.iter().map(|name| (name.as_str(), &one)).collect();
        members.push(("last", &other));
        let text = &tuning_differences(&members)[0].text;
        assert!(text.contains("w7 and 4 more; not set on last"), "{text}");
    }
}
