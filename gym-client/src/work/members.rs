//! The members of a cluster as its head server last listed them, for a pool whose workers are members.

use std::collections::BTreeMap;

use gym_core::Incarnation;
use gym_core::registry::{GoneServer, Instance, RosterUpdate, ServerChange};

/// The members that have servers, by name. The head server bounds their number.
#[derive(Debug, Default)]
pub(super) struct ListedMembers {
    members: BTreeMap<String, ListedMember>,
    /// `true` after the first update.
    heard: bool,
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
    /// Applies an update, and returns the members that are lost. While a restarted head server recovers, members that it does not list yet
    /// remain.
    pub(super) fn apply(&mut self, update: &RosterUpdate) -> Vec<LostMember> {
        let changed = update.changes.iter().filter_map(|change| match change {
            ServerChange::Present(server) => self.list(server),
            ServerChange::Gone(gone) => self.remove(gone),
        });
        let mut lost: Vec<LostMember> = changed.collect();
        if update.complete && !update.recovering && self.heard {
            lost.extend(self.keep_only(&update.changes));
        }
        self.heard = true;
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
    fn keep_only(&mut self, listed: &[ServerChange]) -> Vec<LostMember> {
        let listed: BTreeMap<&str, Incarnation> = listed
            .iter()
            .filter_map(|change| match change {
                ServerChange::Present(server) => Some((server.member.as_deref()?, server.incarnation)),
                ServerChange::Gone(_) => None,
            })
            .collect();
        let mut lost = Vec::new();
        self.members.retain(|name, member| {
            let lives = listed.get(name.as_str()) == Some(&member.incarnation);
            if !lives {
                let reason = format!("{name} is gone: the head server no longer lists it");
                lost.push(LostMember { name: name.clone(), incarnation: member.incarnation, reason });
            }
            lives
        });
        lost
    }

    /// Returns the processes of these members that are gone because a newer process has their name. The list may never have had them.
    ///
    /// A list that is older than a process has its predecessor, so only a higher incarnation is newer. If the clock of a machine was set back
    /// between two processes, the first one is gone when it has been silent for long enough.
    pub(super) fn replaced<'a>(&self, members: impl Iterator<Item = (&'a str, Incarnation)>) -> Vec<LostMember> {
        let newer = |name: &str, incarnation| self.members.get(name).is_some_and(|now| now.incarnation > incarnation);
        members
            .filter(|(name, incarnation)| newer(name, *incarnation))
            .map(|(name, older)| replaced(name, older))
            .collect()
    }

    /// Returns `true` if the member gets work.
    pub(super) fn serves(&self, name: &str, incarnation: Incarnation) -> bool {
        self.members.get(name).is_some_and(|member| member.incarnation == incarnation && !member.paused)
    }
}

fn replaced(name: &str, incarnation: Incarnation) -> LostMember {
    let reason = format!("{name} is gone: a newer process has its name");
    LostMember { name: name.to_owned(), incarnation, reason }
}

#[cfg(test)]
mod tests {
    use gym_core::Endpoint;
    use gym_core::registry::RosterVersion;
    use gym_core::server::ServerKind;

    use super::*;

    fn server(member: &str, incarnation: u64, paused: bool) -> ServerChange {
        ServerChange::Present(Instance {
            name: "agent".to_owned(),
            rank: 0,
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
            rank: 0,
            incarnation: Incarnation(incarnation),
            member: Some(member.to_owned()),
            lost: lost.map(str::to_owned),
        })
    }

    fn update(complete: bool, recovering: bool, changes: &[ServerChange]) -> RosterUpdate {
        RosterUpdate { now: RosterVersion::default(), complete, recovering, changes: changes.to_vec() }
    }

    fn names(lost: Vec<LostMember>) -> Vec<(String, u64)> {
        lost.into_iter().map(|lost| (lost.name, lost.incarnation.0)).collect()
    }

    #[test]
    fn a_member_serves_while_it_is_listed_and_not_paused() {
        let mut listed = ListedMembers::default();
        listed.apply(&update(true, false, &[server("a", 1, true), server("b", 1, false)]));
        let serves = |listed: &ListedMembers, name| listed.serves(name, Incarnation(1));
        assert!(!serves(&listed, "a") && serves(&listed, "b") && !serves(&listed, "c"));
        assert!(!listed.serves("b", Incarnation(2)), "it is another process");
        listed.apply(&update(false, false, &[server("a", 1, false), server("b", 1, true)]));
        assert!(serves(&listed, "a") && !serves(&listed, "b"));
    }

    #[test]
    fn a_member_that_is_lost_is_returned_once_and_one_that_left_is_not() {
        let mut listed = ListedMembers::default();
        listed.apply(&update(true, false, &[server("a", 1, false), server("b", 1, false)]));
        assert_eq!(listed.apply(&update(false, false, &[gone("b", 1, None)])), []);
        let lost = [gone("a", 1, Some("its connection broke")), gone("a", 1, Some("its connection broke"))];
        assert_eq!(names(listed.apply(&update(false, false, &lost))), [("a".to_owned(), 1)]);
        listed.apply(&update(false, false, &[server("a", 2, false)]));
        assert_eq!(listed.apply(&update(false, false, &[gone("a", 1, Some("late"))])), []);
        assert_eq!(names(listed.apply(&update(false, false, &[server("a", 3, false)]))), [("a".to_owned(), 2)]);
    }

    #[test]
    fn a_process_that_was_never_listed_is_gone_if_a_newer_one_has_its_name() {
        let mut listed = ListedMembers::default();
        listed.apply(&update(true, false, &[server("a", 2, true), server("b", 1, false)]));
        let held = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1)].map(|(name, life)| (name, Incarnation(life)));
        assert_eq!(names(listed.replaced(held.into_iter())), [("a".to_owned(), 1)]);
    }

    #[test]
    fn a_recovering_head_removes_nobody_until_it_has_recovered() {
        let mut listed = ListedMembers::default();
        listed.apply(&update(true, false, &[server("a", 1, false), server("b", 1, false)]));
        assert_eq!(listed.apply(&update(true, true, &[])), []);
        assert!(listed.serves("a", Incarnation(1)));
        listed.apply(&update(false, true, &[server("a", 1, true)]));
        assert!(!listed.serves("a", Incarnation(1)) && listed.serves("b", Incarnation(1)));
        let recovered = update(true, false, &[server("a", 1, false)]);
        assert_eq!(names(listed.apply(&recovered)), [("b".to_owned(), 1)]);
        assert!(listed.serves("a", Incarnation(1)));
    }
}
