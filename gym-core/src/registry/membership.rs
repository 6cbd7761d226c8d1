//! The interface of a cluster's membership.

use std::time::Duration;

use async_trait::async_trait;

use super::lease::Registry;
use super::member::{
    Heartbeat, HeartbeatReply, JoinedMember, Member, MemberLease, MemberSpec, RosterUpdate, RosterVersion,
};
use crate::base::error::Result;
use crate::message::CallContext;

/// A registry that processes join as members, with all their servers.
///
/// A call may be repeated if its response was lost. A member calls [`join`](Self::join) once, then [`heartbeat`](Self::heartbeat) again and
/// again, and [`leave`](Self::leave) at the end. It may call `heartbeat` before the call before has a response: the newest one counts.
#[async_trait]
pub trait MemberRegistry: Registry {
    /// Adds a member. Its servers get no work before its first healthy heartbeat.
    ///
    /// # Errors
    /// `AlreadyExists` if another process is a member under this name. `InvalidArgument` if the name, the intervals or a server is invalid, or if
    /// the texts are too long. `ResourceExhausted` if the cluster is full.
    async fn join(&self, cx: &CallContext, spec: MemberSpec) -> Result<JoinedMember>;

    /// Sends a heartbeat, and waits until the member's state differs from the one that it knows, at most for the interval of its
    /// heartbeats. Dropping the future of the newest heartbeat means that the connection broke: the member is suspect.
    ///
    /// # Errors
    /// `NotFound` if the member is gone, or if the head server was restarted: join again.
    async fn heartbeat(&self, cx: &CallContext, heartbeat: &Heartbeat) -> Result<HeartbeatReply>;

    /// Returns at once, so that a member measures the round trip to the head server. A registry in this process has nothing to do.
    async fn ping(&self, _: &CallContext) -> Result<()> {
        Ok(())
    }

    /// Ends a membership. Calls in flight are not ended. Succeeds if the membership has ended.
    async fn leave(&self, cx: &CallContext, lease: MemberLease) -> Result<()>;

    /// Requests that a member finish its work, take no more, and leave.
    ///
    /// # Errors
    /// `NotFound`, with the known names.
    async fn drain(&self, cx: &CallContext, name: &str) -> Result<()>;

    /// Returns the members by name, and after them those that left or were lost recently.
    async fn members(&self, cx: &CallContext) -> Result<Vec<Member>>;

    /// Waits until the servers differ from a version, at most for `wait`, and returns the changes.
    async fn roster(&self, cx: &CallContext, seen: Option<RosterVersion>, wait: Duration) -> Result<RosterUpdate>;
}
