//! A subset of ranks as a separate group, which prepares ranks that accept no calls yet.

use std::sync::Arc;

use gym_core::Result;
use gym_core::base::watch;
use gym_core::group::{GroupView, RankLayout, RankState, RankView, WorkerGroup};

use crate::call::{CallSupport, WorkerGroupExt};

/// A group of some ranks of another group. The ranks are called in any state.
#[derive(Debug)]
pub(crate) struct RankSubset {
    name: Arc<str>,
    layout: RankLayout,
    view: watch::Sender<Arc<GroupView>>,
    support: CallSupport,
}

impl RankSubset {
    /// Creates the subset; `support` is that of the other group.
    pub(crate) fn of(name: Arc<str>, members: Vec<RankView>, support: CallSupport) -> Result<Self> {
        let ranks = members.iter().map(|member| member.rank).collect();
        let layout = RankLayout::from_ranks([("rank".to_owned(), members.len())], ranks)?;
        let members = members.into_iter().map(|member| member.in_state(RankState::Healthy)).collect();
        let view = GroupView::new(1, members);
        Ok(Self { name, layout, view: watch::Sender::new(Arc::new(view)), support })
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
}

impl WorkerGroupExt for RankSubset {
    fn call_support(&self) -> CallSupport {
        self.support.clone()
    }
}
