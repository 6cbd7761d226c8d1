//! A group that nobody does wrong to, groups for those that are done wrong to, and who is left of them.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use gym_core::testing::bad_input;
use gym_core::{CallContext, Error};
use gym_group::WorkerGroupExt;
use gym_group::placement::ClusterSpec;
use gym_group::{Group, GroupOptions, StartError};
use gym_group::{GroupRequest, LaunchSpec, Local, VirtualCluster};

use super::super::types::{Describe, Init};
use super::super::{LONG, local, options, spec, start, stop, until};
use super::{Got, outcome};

/// Every process of a case has it in its environment.
const MARK: &str = "GYM_BAD_INPUT_CASE";
/// How much of a text the table shows.
const SHOWN_CHARS: usize = 260;

pub(crate) struct Fixture {
    folder: tempfile::TempDir,
    /// Two obedient ranks.
    pub(crate) group: Group,
    pids: Vec<u32>,
    cases: Cell<u32>,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let group = start(spec("obedient", 2), options()).await.expect("starts");
        let folder = tempfile::tempdir().expect("a folder");
        let mut fixture = Self { folder, group, pids: Vec::new(), cases: Cell::new(0) };
        fixture.pids = fixture.describe().await;
        fixture
    }

    async fn describe(&self) -> Vec<u32> {
        let ranks = self.group.call(Describe, ()).deadline(LONG).await.expect("the bystanders answer").into_values();
        assert!(ranks.iter().all(|rank| rank.incarnation == 1), "a bystander was restarted");
        ranks.into_iter().map(|rank| rank.pid).collect()
    }

    fn mark(&self) -> String {
        format!("{MARK}={}-{}", std::process::id(), self.cases.get())
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A file with this text.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).expect("writes");
        path
    }

    /// Two ranks of this worker type, whose processes are this case's.
    pub(crate) fn spec(&self, worker: &str) -> LaunchSpec {
        let mut spec = spec(worker, 2);
        let mark = self.mark();
        let (name, value) = mark.split_once('=').expect("a variable");
        spec.variables.insert(name.to_owned(), value.to_owned());
        spec
    }

    pub(crate) async fn start(
        &self,
        local: &Local,
        spec: LaunchSpec,
        options: GroupOptions,
    ) -> Result<Group, StartError> {
        Group::start(&CallContext::within(LONG), local, spec, options).await
    }

    /// What a start comes to; a group that starts must answer, and is stopped.
    pub(crate) async fn starts(&self, worker: &str, change: impl FnOnce(&mut LaunchSpec)) -> Got {
        let mut spec = self.spec(worker);
        change(&mut spec);
        let started = self.start(&local(), spec, options()).await;
        if let Ok(group) = &started {
            group.call(Describe, ()).deadline(LONG).await.expect("who starts answers");
            stop(group).await;
        }
        outcome::started(started)
    }

    /// Does wrong to a group of its own, which must be usable afterwards, with a restart where a rank ended.
    pub(crate) async fn wronged(&self, spec: LaunchSpec, wrong: impl AsyncFnOnce(&Group) -> Got) -> Got {
        let group = self.start(&local(), spec, options()).await.expect("starts");
        let got = wrong(&group).await;
        group.restart_failed_workers(&CallContext::within(LONG)).await.expect("comes back");
        group.call(Describe, ()).deadline(LONG).await.expect("is usable");
        stop(&group).await;
        got
    }

    /// What a group on a cluster of two CPUs comes to.
    pub(crate) async fn on_a_cluster(&self, change: impl FnOnce(&mut GroupRequest)) -> Result<Group, Error> {
        let mut spec = ClusterSpec::new([2]);
        spec.use_gpus = false;
        let cluster = VirtualCluster::new(spec, local())?.simulate_nodes(&[2]);
        let mut request = GroupRequest::new("policy", "obedient", &Init::default(), options())?;
        request.variables = self.spec("obedient").variables;
        change(&mut request);
        cluster.start(&CallContext::within(LONG), request).await
    }

    pub(crate) async fn end(self) {
        stop(&self.group).await;
    }
}

impl bad_input::Ground for Fixture {
    /// The bystanders serve as before, and nothing is left of the case.
    async fn assert_well(&self) {
        assert_eq!(self.describe().await, self.pids);
        let mark = self.mark();
        until("all processes of the case are gone", || !anybody_has(&mark)).await;
        self.cases.set(self.cases.get() + 1);
    }

    fn shown(&self, text: &str, _: &[&str]) -> String {
        let text = text.replace(&self.folder.path().display().to_string(), "…");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
        let text = without(&text, "/gym-workers-", |c| c.is_ascii_hexdigit() || c == '-', "/…");
        let text = without(&text, "in range ", |c| c.is_ascii_digit() || c == '.', "in range PORTS");
        let text = without(&text, "it used ", |c| c.is_ascii_digit(), "it used N");
        match text.char_indices().nth(SHOWN_CHARS) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        }
    }
}

/// The text with what begins with `begin` and goes on with `more` written as `instead`.
fn without(text: &str, begin: &str, more: impl Fn(char) -> bool + Copy, instead: &str) -> String {
    let mut parts = text.split(begin);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + instead + part.trim_start_matches(more))
}

fn anybody_has(mark: &str) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return false };
    processes.filter_map(Result::ok).any(|process| {
        let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    })
}
