//! The dispatch of a call: the ranks that are called, the part of the batch for each, and the ranks whose replies are collected.
//!
//! [`Dispatch::plan`] computes one [`Assignment`] for each called rank of a [`RankLayout`], without I/O. Axes have the semantics
//! of NeMo RL's `run_all_workers_sharded_data`:
//!
//! - A *sharded* axis splits the batch, and a *replicated* axis gets copies.
//! - An axis that is neither is *free*: only coordinate 0 runs the call.
//!
//! The replies of all ranks that run the call are collected, unless `collect_once` restricts them.

use smallvec::SmallVec;

use crate::base::error::Error;
use crate::group::layout::{LayoutError, Rank, RankLayout};

/// The treatment of the axes of a group's layout in a group call.
///
/// ```
/// use gym_core::group::{Dispatch, RankLayout};
///
/// let layout = RankLayout::new([("data", 2), ("tensor", 2)])?;
/// let plan = Dispatch::shard("data").replicate(["tensor"]).collect_once(["tensor"]).plan(&layout)?;
/// let shards: Vec<_> = plan.iter().map(|part| (part.rank, part.shard)).collect();
/// assert_eq!(shards, [(0, Some(0)), (1, Some(0)), (2, Some(1)), (3, Some(1))]);
/// let answering: Vec<_> = plan.iter().filter(|part| part.collect).map(|part| part.rank).collect();
/// assert_eq!(answering, [0, 2]);
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dispatch {
    rank: Option<Rank>,
    /// Boxed, because most calls name no axis.
    axes: Option<Box<Axes>>,
}

/// The axes that a caller named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Axes {
    sharded: Vec<String>,
    replicated: Vec<String>,
    rank_0_only: Vec<String>,
    collect_once: Vec<String>,
    free: Free,
}

/// The behavior of ranks beyond coordinate 0 of a free axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Free {
    /// They are not called.
    #[default]
    Idle,
    /// They are called without a batch, and their replies are dropped: for methods that run a collective.
    Dummy,
}

/// The part of one rank in a group call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// The called rank.
    pub rank: Rank,
    /// Index of the shard, below [`Dispatch::shards`]; `None` for the whole batch, or for no data if `dummy`.
    pub shard: Option<usize>,
    /// `true` if the reply is part of the result.
    pub collect: bool,
    /// `true` if the rank is called without data, only to take part in a collective.
    pub dummy: bool,
}

/// The reason why a dispatch does not match a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The layout does not have such an axis, or the group does not have such a rank.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// An axis has two of the roles sharded, replicated and rank 0 only, or has one of them twice.
    #[error("axis '{axis}' is both {first} and {second}")]
    TwoRoles {
        /// The axis.
        axis: String,
        /// The role given first.
        first: &'static str,
        /// The other role.
        second: &'static str,
    },
    /// A call to one rank cannot have axes.
    #[error("a call to rank {0} alone takes no axes")]
    OneRank(Rank),
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Self::invalid(error.to_string()).about("plan group call")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Sharded,
    Replicated,
    Free,
}

impl Dispatch {
    /// Sends the whole batch to every rank, and collects every reply.
    #[must_use]
    pub fn all() -> Self {
        Self::default()
    }

    /// Calls only one rank, with the whole batch.
    #[must_use]
    pub fn rank(rank: Rank) -> Self {
        Self { rank: Some(rank), ..Self::all() }
    }

    /// Splits the batch along this axis. Axes that are not named are free.
    #[must_use]
    pub fn shard(axis: impl Into<String>) -> Self {
        Self::all().and_shard(axis)
    }

    /// Splits along another axis, within each shard of the previous axes.
    #[must_use]
    pub fn and_shard(mut self, axis: impl Into<String>) -> Self {
        self.axes_mut().sharded.push(axis.into());
        self
    }

    /// Sends the same shard to every coordinate of these axes.
    #[must_use]
    pub fn replicate<A: Into<String>>(mut self, axes: impl IntoIterator<Item = A>) -> Self {
        self.axes_mut().replicated.extend(axes.into_iter().map(Into::into));
        self
    }

    /// Collects the replies of coordinate 0 of these axes only; the other ranks still run the call.
    #[must_use]
    pub fn collect_once<A: Into<String>>(mut self, axes: impl IntoIterator<Item = A>) -> Self {
        self.axes_mut().collect_once.extend(axes.into_iter().map(Into::into));
        self
    }

    /// Sets the behavior of ranks beyond coordinate 0 of a free axis. The default is [`Free::Idle`].
    #[must_use]
    pub fn free(mut self, free: Free) -> Self {
        self.axes_mut().free = free;
        self
    }

    /// Makes these axes free: only coordinate 0 is called. As in NeMo RL, axes that the layout lacks are ignored, so that
    /// [`REPLICATED_AXES`](crate::group::REPLICATED_AXES) is valid for every layout.
    #[must_use]
    pub fn run_rank_0_only_axes<A: Into<String>>(mut self, axes: impl IntoIterator<Item = A>) -> Self {
        self.axes_mut().rank_0_only.extend(axes.into_iter().map(Into::into));
        self
    }

    /// Returns the number of shards; `None` if the batch is not split.
    ///
    /// # Errors
    /// If the layout lacks an axis.
    pub fn shards(&self, layout: &RankLayout) -> Result<Option<usize>, PlanError> {
        let Some(axes) = self.axes.as_deref().filter(|axes| !axes.sharded.is_empty()) else { return Ok(None) };
        let sizes: Result<Vec<usize>, _> = axes.sharded.iter().map(|axis| layout.axis_size(axis)).collect();
        Ok(Some(sizes?.into_iter().product()))
    }

    /// Returns one assignment for each called rank, ascending by rank. Results are returned in the same order.
    ///
    /// # Errors
    /// If the layout lacks an axis or rank, if an axis has two roles, or if a call to one rank has axes.
    pub fn plan(&self, layout: &RankLayout) -> Result<Vec<Assignment>, PlanError> {
        Ok(self.assignments(layout)?.into_vec())
    }

    /// Like [`Dispatch::plan`], without an allocation for one rank.
    pub fn assignments(&self, layout: &RankLayout) -> Result<SmallVec<[Assignment; 1]>, PlanError> {
        let whole = |rank| Assignment { rank, shard: None, collect: true, dummy: false };
        match (self.rank, self.axes.as_deref()) {
            (Some(rank), Some(axes)) if axes.are_named() => Err(PlanError::OneRank(rank)),
            (Some(rank), _) if !layout.ranks().contains(&rank) => Err(LayoutError::UnknownRank(rank).into()),
            (Some(rank), _) => Ok(SmallVec::from_buf([whole(rank)])),
            (None, Some(axes)) => Ok(axes.plan(layout)?.into()),
            (None, None) => {
                let mut plan: SmallVec<[Assignment; 1]> = layout.ranks().iter().copied().map(whole).collect();
                plan.sort_unstable_by_key(|part| part.rank);
                Ok(plan)
            }
        }
    }

    fn axes_mut(&mut self) -> &mut Axes {
        self.axes.get_or_insert_default()
    }
}

impl Axes {
    fn are_named(&self) -> bool {
        let axes = [&self.sharded, &self.replicated, &self.rank_0_only, &self.collect_once];
        axes.iter().any(|axes| !axes.is_empty())
    }

    fn plan(&self, layout: &RankLayout) -> Result<Vec<Assignment>, PlanError> {
        let roles = self.roles(layout)?;
        let sharded = indices(&self.sharded, layout)?;
        let collect_once = indices(&self.collect_once, layout)?;
        let mut plan: Vec<Assignment> = (0..layout.size())
            .filter_map(|position| {
                let at = layout.coordinates_at(position);
                let dummy = roles.iter().zip(&at).any(|(role, at)| *role == Role::Free && *at > 0);
                if dummy && self.free == Free::Idle {
                    return None;
                }
                let shard = sharded.iter().fold(0, |shard, axis| shard * layout.axes()[*axis].size + at[*axis]);
                Some(Assignment {
                    rank: layout.ranks()[position],
                    shard: (!dummy && !sharded.is_empty()).then_some(shard),
                    collect: !dummy && collect_once.iter().all(|axis| at[*axis] == 0),
                    dummy,
                })
            })
            .collect();
        plan.sort_unstable_by_key(|part| part.rank);
        Ok(plan)
    }

    /// Returns the role of each axis of the layout. Without a sharded axis, unnamed axes get the whole batch; otherwise they are
    /// free.
    fn roles(&self, layout: &RankLayout) -> Result<Vec<Role>, PlanError> {
        let mut given: Vec<Option<(Role, &'static str)>> = vec![None; layout.ndim()];
        let known = |axis: &&String| layout.axis_index(axis).is_ok();
        let named = (self.sharded.iter().map(|axis| (axis, Role::Sharded, "sharded")))
            .chain(self.replicated.iter().map(|axis| (axis, Role::Replicated, "replicated")))
            .chain(self.rank_0_only.iter().filter(known).map(|axis| (axis, Role::Free, "rank 0 only")));
        for (axis, role, second) in named {
            match &mut given[layout.axis_index(axis)?] {
                Some((_, first)) => return Err(PlanError::TwoRoles { axis: axis.clone(), first, second }),
                none => *none = Some((role, second)),
            }
        }
        let default = if self.sharded.is_empty() { Role::Replicated } else { Role::Free };
        Ok(given.into_iter().map(|role| role.map_or(default, |(role, _)| role)).collect())
    }
}

fn indices(axes: &[String], layout: &RankLayout) -> Result<Vec<usize>, LayoutError> {
    axes.iter().map(|axis| layout.axis_index(axis)).collect()
}

#[cfg(test)]
mod tests;
