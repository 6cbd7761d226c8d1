//! The registry of live servers by name, the members of a cluster, and the choice among several replicas.
//!
//! ```text
//!   server ── register, renew ──► Registry ◄── resolve, watch ── client ── Picker ──► one replica
//!               (Lease)          a lease that is not renewed expires
//!   process ── join, heartbeat ──► MemberRegistry ◄── roster ── client: calls to a lost server end at once
//!             (MemberLease)    a member that is silent is suspect, and then gone with all its servers
//! ```

mod lease;
mod member;
mod membership;
mod memory;
mod pick;
mod state;
mod table;
mod tuning;

pub use lease::{DEFAULT_TTL, Instance, Lease, Registration, Registry};
pub use member::{
    DEFAULT_HEARTBEAT_INTERVAL, DEFAULT_MEMBER_TIMEOUT, DEFAULT_RECONNECT_TIMEOUT, GoneServer, Heartbeat,
    HeartbeatReply, JoinedMember, MISSED_MAX, Member, MemberLease, MemberLimits, MemberNode, MemberServer, MemberSpec,
    MemberState, MemberTiming, RosterUpdate, RosterVersion, ServerChange, SuspectMember,
};
pub use membership::MemberRegistry;
pub use memory::MemoryRegistry;
pub use pick::{Affinity, AffinityCounts, AffinityKey, AffinityOptions, Balance, Load, Picker};
pub use tuning::{MemberTuning, TUNING_SETTINGS_MAX, TuningDifference, tuning_differences};
