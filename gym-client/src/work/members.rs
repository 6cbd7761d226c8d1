//! The members of a cluster as its head server last listed them, for a pool whose workers are members.

use std::collections::BTreeMap;

use gym_core::Incarnation;
use gym_core::registry::{GoneServer, Instance, RosterUpdate, ServerChange, SuspectMember};
use tokio::time::Instant;

/// The members that have servers, by name. The head server bounds their number.
#[derive(Debug, Default)]
pub(super) struct ListedMembers {
    members: BTreeMap<String, ListedMember>,
    /// Those that are suspect, with the time at which each is gone.
    suspects: BTreeMap<String, (SuspectMember, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct ListedMember {
    incarnation: Incarnation,
    /// It gets no new work: it is joining, suspect or draining.
    paused: bool,
}

/// A member that is gone, and did not leave by itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LostMember {
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    pub(super) reason: String,
}

impl ListedMembers {
    /// Applies an update, and returns the members that are lost. A member that a complete list does not have is not lost, because a restarted
    /// head server may not have heard of it yet: it gets no new work, unless the head server recovers.
    pub(super) fn apply(&mut self, now: Instant, update: &RosterUpdate) -> Vec<LostMember> {
        let changed = update.changes.iter().filter_map(|change| match change {
            ServerChange::Present(server) => self.list(server),
            ServerChange::Gone(gone) => self.remove(gone),
        });
        let lost: Vec<LostMember> = changed.collect();
        if update.complete && !update.recovering {
            self.keep_only(&update.changes);
        }
        let suspects =
            update.suspects.iter().map(|suspect| (suspect.name.clone(), (suspect.clone(), now + suspect.gone_in)));
        self.suspects = suspects.collect();
        lost
    }

    /// Lists the member of a server. Returns the earlier process of its name, which is then gone.
    fn list(&mut self, server: &Instance) -> Option<LostMember> {
        let name = server.member.as_ref()?;
        let Instance { incarnation, paused, .. } = *server;
        let earlier = self.members.insert(name.clone(), ListedMember { incarnation, paused });
        let earlier = earlier.filter(|earlier| earlier.incarnation != incarnation)?;
        Some(replaced(name, earlier.incarnation))
    }

    /// Removes the member of a server that is gone: it has lost all its servers.
    fn remove(&mut self, gone: &GoneServer) -> Option<LostMember> {
        let name = gone.member.as_ref()?;
        self.members.get(name).filter(|member| member.incarnation == gone.incarnation)?;
        self.members.remove(name);
        let reason = gone.lost.clone()?;
        Some(LostMember { name: name.clone(), incarnation: gone.incarnation, reason })
    }

    /// Removes the members that are not listed.
    fn keep_only(&mut self, listed: &[ServerChange]) {
        let listed: BTreeMap<&str, Incarnation> = listed
            .iter()
            .filter_map(|change| match change {
                ServerChange::Present(server) => Some((server.member.as_deref()?, server.incarnation)),
                ServerChange::Gone(_) => None,
            })
            .collect();
        self.members.retain(|name, member| listed.get(name.as_str()) == Some(&member.incarnation));
    }

    /// Returns the processes of these members that are gone because a newer process has their name, or had it within this update. The list may never
    /// have had them.
    ///
    /// A list that is older than a process has its predecessor, so only a higher incarnation is newer. If the clock of a machine was set back
    /// between two processes, the first one is gone when it has been silent for long enough.
    pub(super) fn replaced<'a>(
        &self,
        update: &RosterUpdate,
        members: impl Iterator<Item = (&'a str, Incarnation)>,
    ) -> Vec<LostMember> {
        let gone: Vec<&GoneServer> = update.changes.iter().filter_map(ServerChange::gone).collect();
        let newer = |name: &str, incarnation| {
            self.members.get(name).is_some_and(|now| now.incarnation > incarnation)
                || gone.iter().any(|gone| gone.member.as_deref() == Some(name) && gone.incarnation > incarnation)
        };
        members
            .filter(|(name, incarnation)| newer(name, *incarnation))
            .map(|(name, older)| replaced(name, older))
            .collect()
    }

    /// Returns `true` if the head server lists this process of the member, in whichever state.
    pub(super) fn lists(&self, name: &str, incarnation: Incarnation) -> bool {
        self.members.get(name).is_some_and(|member| member.incarnation == incarnation)
    }

    /// Returns `true` if the member gets work.
    pub(super) fn serves(&self, name: &str, incarnation: Incarnation) -> bool {
        self.members.get(name).is_some_and(|member| member.incarnation == incarnation && !member.paused)
    }

    /// Returns why the head server calls a member suspect, with the time that it has left; `None` if it does not.
    pub(super) fn suspect(&self, now: Instant, name: &str, incarnation: Incarnation) -> Option<String> {
        let (suspect, gone_at) = self.suspects.get(name).filter(|(suspect, _)| suspect.incarnation == incarnation)?;
        Some(SuspectMember { gone_in: gone_at.saturating_duration_since(now), ..suspect.clone() }.why())
    }
}

fn replaced(name: &str, incarnation: Incarnation) -> LostMember {
    let reason = format!("{name} is gone: a newer process has its name");
    LostMember { name: name.to_owned(), incarnation, reason }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gym_core::Endpoint;
    use gym_core::registry::RosterVersion;
    use gym_core::server::ServerKind;

    use super::*;

    fn server(member: &str, incarnation: u64, paused: bool) -> ServerChange {
        ServerChange::Present(Instance {
            name: "agent".to_owned(),
            replica: 0,
            kind: ServerKind::Agent,
            implementation: String::new(),
            endpoints: vec![Endpoint::parse("http://h:1").unwrap()],
            incarnation: Incarnation(incarnation),
            labels: BTreeMap::new(),
            member: Some(member.to_owned()),
            paused,
        })
    }

    fn gone(member: &str, incarnation: u64, lost: Option<&str>) -> ServerChange {
        ServerChange::Gone(GoneServer {
            name: "agent".to_owned(),
            replica: 0,
            incarnation: Incarnation(incarnation),
            member: Some(member.to_owned()),
            lost: lost.map(str::to_owned),
        })
    }

    fn update(complete: bool, recovering: bool, changes: &[ServerChange]) -> RosterUpdate {
        let (now, suspects) = (RosterVersion::default(), Vec::new());
        RosterUpdate { now, complete, recovering, suspects, changes: changes.to_vec() }
    }

    fn apply(listed: &mut ListedMembers, update: &RosterUpdate) -> Vec<(String, u64)> {
        names(listed.apply(Instant::now(), update))
    }

    fn names(lost: Vec<LostMember>) -> Vec<(String, u64)> {
        lost.into_iter().map(|lost| (lost.name, lost.incarnation.0)).collect()
    }

    #[test]
    fn a_member_serves_while_it_is_listed_and_not_paused() {
        let mut listed = ListedMembers::default();
        apply(&mut listed, &update(true, false, &[server("a", 1, true), server("b", 1, false)]));
        let serves = |listed: &ListedMembers, name| listed.serves(name, Incarnation(1));
        assert!(!serves(&listed, "a") && serves(&listed, "b") && !serves(&listed, "c"));
        assert!(!listed.serves("b", Incarnation(2)), "it is another process");
        apply(&mut listed, &update(false, false, &[server("a", 1, false), server("b", 1, true)]));
        assert!(serves(&listed, "a") && !serves(&listed, "b"));
    }

    #[test]
    fn a_member_that_is_lost_is_returned_once_and_one_that_left_is_not() {
        let mut listed = ListedMembers::default();
        apply(&mut listed, &update(true, false, &[server("a", 1, false), server("b", 1, false)]));
        assert_eq!(apply(&mut listed, &update(false, false, &[gone("b", 1, None)])), []);
        let lost = [gone("a", 1, Some("its connection broke")), gone("a", 1, Some("its connection broke"))];
        assert_eq!(apply(&mut listed, &update(false, false, &lost)), [("a".to_owned(), 1)]);
        apply(&mut listed, &update(false, false, &[server("a", 2, false)]));
        assert_eq!(apply(&mut listed, &update(false, false, &[gone("a", 1, Some("late"))])), []);
        assert_eq!(apply(&mut listed, &update(false, false, &[server("a", 3, false)])), [("a".to_owned(), 2)]);
    }

    #[test]
    fn a_process_that_was_never_listed_is_gone_if_a_newer_one_has_its_name() {
        let mut listed = ListedMembers::default();
        apply(&mut listed, &update(true, false, &[server("a", 2, true), server("b", 1, false)]));
        let held = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1)].map(|(name, life)| (name, Incarnation(life)));
        let none = update(false, false, &[]);
        assert_eq!(names(listed.replaced(&none, held.into_iter())), [("a".to_owned(), 1)]);
        // One that came and went within an update is newer too: its predecessor does not live.
        let came_and_went = update(false, false, &[server("c", 2, true), gone("c", 2, Some("no heartbeat"))]);
        apply(&mut listed, &came_and_went);
        let lost = names(listed.replaced(&came_and_went, held.into_iter()));
        assert_eq!(lost, [("a".to_owned(), 1), ("c".to_owned(), 1)]);
    }

    #[test]
    fn a_recovering_head_removes_nobody_until_it_has_recovered() {
        let mut listed = ListedMembers::default();
        apply(&mut listed, &update(true, false, &[server("a", 1, false), server("b", 1, false)]));
        assert_eq!(apply(&mut listed, &update(true, true, &[])), []);
        assert!(listed.serves("a", Incarnation(1)));
        apply(&mut listed, &update(false, true, &[server("a", 1, true)]));
        assert!(!listed.serves("a", Incarnation(1)) && listed.serves("b", Incarnation(1)));
        let recovered = update(true, false, &[server("a", 1, false)]);
        assert_eq!(apply(&mut listed, &recovered), [], "a young head may not have heard of it yet");
        assert!(listed.serves("a", Incarnation(1)) && !listed.serves("b", Incarnation(1)));
        apply(&mut listed, &update(false, false, &[server("b", 1, false)]));
        assert!(listed.serves("b", Incarnation(1)));
    }

    #[test]
    fn a_suspect_member_has_a_reason_and_the_time_that_is_left() {
        let mut listed = ListedMembers::default();
        let (name, reason) = ("a".to_owned(), "no heartbeat for 2.0 s".to_owned());
        let suspect = SuspectMember { name, incarnation: Incarnation(1), reason, gone_in: Duration::from_secs(8) };
        let now = Instant::now();
        let changes = [server("a", 1, true)];
        listed.apply(now, &RosterUpdate { suspects: vec![suspect], ..update(true, false, &changes) });
        let why = |after, incarnation| listed.suspect(now + Duration::from_secs(after), "a", Incarnation(incarnation));
        assert_eq!(why(5, 1).as_deref(), Some("no heartbeat for 2.0 s; gone in 3 s unless it returns"));
        assert_eq!(why(5, 2), None, "another process");
        apply(&mut listed, &update(false, false, &[server("a", 1, false)]));
        assert_eq!(listed.suspect(now, "a", Incarnation(1)), None);
    }
}
