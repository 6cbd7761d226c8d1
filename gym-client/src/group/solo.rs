//! One rank as a group of its own, so that a rank that takes no calls yet can be made fit to.

use std::sync::Arc;

use gym_core::{Axis, GroupView, Member, RankLayout, RankState, Result, WorkerGroup};
use tokio::sync::watch;

/// A group of one rank, which is called whatever its state.
#[derive(Debug)]
pub(crate) struct Solo {
    name: Arc<str>,
    layout: RankLayout,
    view: watch::Sender<Arc<GroupView>>,
}

impl Solo {
    pub(crate) fn of(name: Arc<str>, member: Member) -> Result<Self> {
        let axis = Axis { name: "rank".to_owned(), size: 1 };
        let layout = RankLayout::from_ranks([(axis.name, axis.size)], vec![member.rank])?;
        let view = GroupView::new(1, vec![member.in_state(RankState::Healthy)]);
        Ok(Self { name, layout, view: watch::Sender::new(Arc::new(view)) })
    }
}

impl WorkerGroup for Solo {
    fn name(&self) -> &str {
        &self.name
    }

    fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    fn layout(&self) -> &RankLayout {
        &self.layout
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.view.subscribe()
    }
}
