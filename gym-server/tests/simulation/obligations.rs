//! What the cases of a setting must reach together, and the seeds that once failed.

use gym_core::testing::net::kind;

use crate::groups::{COUNTED_IN_GROUPS, INJECTED_IN_GROUPS};
use crate::plan::{INJECTED, INJECTED_IN_CLUSTERS, Setting};
use crate::script::SHARED;
use crate::values::{COUNTED_IN_VALUES, INJECTED_IN_VALUES};
use crate::whole::COUNTED_IN_WHOLE;

/// Seeds that once found a failure: rows that were synced again after a failed sync instead of written again. Since the disk
/// loses pages, this defect shows in the last three and in 30031.
const PAST_FAILURES: &[u64] = &[4943, 9429, 18251, 30031, 39419, 669, 799, 933];

/// Seeds of clusters that once found a failure: a pool that was first told of the members after the death of one waited for its work.
const PAST_FAILURES_OF_CLUSTERS: &[u64] = &[68269];

/// Seeds of groups that find a failure which once was there. Each fails if its defect is put back:
///
/// - tied ranks started again before the exits of their old incarnations were reported;
/// - a lost response to `on_restart` held a rank for 600 s;
/// - so did a lost message to an agent, because one attempt had the time of the whole restart;
/// - and a lost reservation, for the same reason;
/// - a node that was killed and restarted during a start failed it as `NotFound`;
/// - a broken connection to a living rank was not opened again.
const PAST_FAILURES_OF_GROUPS: &[u64] = &[237, 265, 320, 189, 1024, 37, 69, 95, 127, 5, 100, 6, 56];

/// Seeds of everything at once that once failed: a message that a fault had delayed ended the reservation of ranks that served again, and the
/// controller no longer looked after them.
const PAST_FAILURES_OF_WHOLE: &[u64] = &[37709];

/// What some seed of a cluster must have: members that the head server gave up, workers that a pool gave up, their late responses, workers
/// that return to a restarted head server, and pools that keep all workers through such restarts.
const COUNTED: [&str; 5] = [
    "member gone",
    "worker lost by a pool",
    "late response",
    "worker back after a restart of the head",
    "pool kept its workers through restarts of the head",
];

impl Setting {
    /// Returns the seeds, with the faults of the first plans, that once failed.
    pub(crate) fn past_failures(self) -> &'static [u64] {
        match self {
            Self::Servers => PAST_FAILURES,
            Self::Cluster => PAST_FAILURES_OF_CLUSTERS,
            Self::Groups => PAST_FAILURES_OF_GROUPS,
            Self::Whole => PAST_FAILURES_OF_WHOLE,
            Self::Values => &[],
        }
    }

    /// Returns the faults and the states of which some case must have each: a fault that is never injected tests nothing.
    pub(crate) fn obligations(self) -> Vec<&'static str> {
        let added = [kind::CORRUPTED, kind::SLOWED, kind::MUTE];
        let of_setting = match self {
            Self::Servers => [&[kind::REORDERED, kind::DUPLICATED][..], &INJECTED[..]].concat(),
            Self::Cluster => {
                [&[kind::REORDERED, kind::DUPLICATED, kind::TWICE][..], &INJECTED_IN_CLUSTERS[..], &COUNTED[..]]
                    .concat()
            }
            // Calls of groups need ordered connections, and no request of one may arrive twice.
            Self::Groups => [&INJECTED_IN_GROUPS[..], &COUNTED_IN_GROUPS[..]].concat(),
            Self::Whole => {
                let of_group = [&INJECTED_IN_GROUPS[..], &COUNTED_IN_GROUPS[..]].concat();
                [&INJECTED_IN_CLUSTERS[..], &COUNTED[..], &of_group, &COUNTED_IN_WHOLE].concat()
            }
            Self::Values => {
                [&[kind::REORDERED, kind::DUPLICATED][..], &INJECTED_IN_VALUES[..], &COUNTED_IN_VALUES[..]].concat()
            }
        };
        let of_network = kind::ALL.into_iter().filter(|kind| *kind != kind::REORDERED);
        of_network.chain(added).chain(SHARED).chain(of_setting).collect()
    }
}
