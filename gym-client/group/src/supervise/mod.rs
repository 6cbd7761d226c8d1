//! The supervisor of a group: connects to its ranks, probes them, and restarts them.

mod group;
mod metrics;
mod options;
mod record;
mod registration;
mod reports;
mod seating;
mod status;
mod subset;
mod supervisor;

pub use group::{Group, StartError};
pub use metrics::GroupMetrics;
pub use options::{DEFAULT_MAX_RESTARTS, GroupOptions};
pub(crate) use registration::{ClusterBinding, ClusterGroups};
pub use status::{RankStatus, RankUsage, StuckRank, StuckReason};
