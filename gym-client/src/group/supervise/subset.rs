//! A subset of ranks as a separate group, which prepares ranks that accept no calls yet.

use std::sync::Arc;

use gym_core::Result;
use gym_core::group::watch;
use gym_core::group::{Gate, GroupView, Member, RankLayout, RankState, WorkerGroup};

/// A group of some ranks of another group. The ranks are called in any state.
#[derive(Debug)]
pub(crate) struct RankSubset {
    name: Arc<str>,
    layout: RankLayout,
    view: watch::Sender<Arc<GroupView>>,
    gate: Option<Arc<dyn Gate>>,
}

impl RankSubset {
    /// Creates the subset; `gate` is the gate of the other group.
    pub(crate) fn of(name: Arc<str>, members: Vec<Member>, gate: Option<Arc<dyn Gate>>) -> Result<Self> {
        let ranks = members.iter().map(|member| member.rank).collect();
        let layout = RankLayout::from_ranks([("rank".to_owned(), members.len())], ranks)?;
        let members = members.into_iter().map(|member| member.in_state(RankState::Healthy)).collect();
        let view = GroupView::new(1, members);
        Ok(Self { name, layout, view: watch::Sender::new(Arc::new(view)), gate })
    }
}

impl WorkerGroup for RankSubset {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn layout(&self) -> &RankLayout {
        &self.layout
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.view.subscribe()
    }

    fn gate(&self) -> Option<Arc<dyn Gate>> {
        self.gate.clone()
    }
}
