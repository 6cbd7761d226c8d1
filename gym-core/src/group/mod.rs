//! Ranks that work as one: typed calls to all of them, some of them, or the one that is free.
//!
//! ```text
//!   group.call(Train, args).batch(b).dispatch(d).deadline(t)
//!        │ Dispatch::plan            who, which shard, who answers             pure
//!        │ one GroupView             ranks, incarnations and channels of one moment
//!        ▼
//!   send to every rank and read every answer, together ──► Gathered: in rank order; batches put together in shard order
//!        └── a rank fails, or is replaced ──► the others are told and not waited for ──► GroupError: every rank's outcome
//! ```
//!
//! A backend implements [`WorkerGroup`], three methods; everybody calls through [`WorkerGroupExt`].

mod view;

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

pub use view::{ExitCause, GroupView, Member, RankExit, RankState};

use crate::layout::RankLayout;

/// Ranks that work as one. Object-safe core; call it through [`WorkerGroupExt`].
pub trait WorkerGroup: fmt::Debug + Send + Sync + 'static {
    /// The group's name, as in logs and errors.
    fn name(&self) -> &str;

    /// Its ranks and their axes.
    fn layout(&self) -> &RankLayout;

    /// Who is there now, and every later moment. A call keeps the view it started with, and ends if a rank it waits for is
    /// replaced.
    fn view(&self) -> watch::Receiver<Arc<GroupView>>;
}
