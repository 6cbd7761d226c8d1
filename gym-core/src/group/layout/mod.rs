//! Named axes over the ranks of a group: coordinates of a rank, and ranks that hold the same data.
//!
//! ```text
//!                tensor 0   tensor 1
//!     data 0        0          1          RankLayout::new([("data", 2), ("tensor", 2)])
//!     data 1        2          3          Dispatch::shard("data"): shard 0 to rank 0, shard 1 to rank 2
//! ```
//!
//! Pure arithmetic with the semantics of NeMo RL's `NamedSharding`: an array of distinct ranks, with axes named from the outermost to
//! the innermost. [`Dispatch`](crate::group::Dispatch) plans a call over a layout.
//!
//! ```
//! use gym_core::group::RankLayout;
//!
//! let layout = RankLayout::new([("data", 2), ("tensor", 2)])?;
//! assert_eq!((layout.size(), layout.ranks()), (4, &[0, 1, 2, 3][..]));
//! # Ok::<(), gym_core::group::LayoutError>(())
//! ```

pub mod dispatch;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::base::error::Error;

/// The number of a worker within its group, from 0.
///
/// ```
/// use gym_core::group::{Rank, RankLayout};
///
/// let ranks: Vec<Rank> = RankLayout::line(3)?.ranks().to_vec();
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), gym_core::Error>(())
/// ```
pub type Rank = u32;

/// Axes whose ranks hold copies of the same data in a training layout.
pub const REPLICATED_AXES: [&str; 3] = ["tensor_parallel", "context_parallel", "pipeline_parallel"];

/// Maximum number of ranks of a layout. Larger than the largest clusters, but a typo in a size cannot exhaust the memory.
pub const RANKS_MAX: usize = 1 << 20;

/// A named dimension of a [`RankLayout`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Axis {
    /// The name, such as `data_parallel`.
    pub name: String,
    /// Number of coordinates; at least 1.
    pub size: usize,
}

/// Distinct ranks in a row-major array with named axes, outermost first.
///
/// ```
/// use gym_core::group::RankLayout;
///
/// let layout = RankLayout::new([("data", 2), ("tensor", 2)])?;
/// assert_eq!(layout.size(), 4);
/// assert_eq!(layout.ranks_by_coordinates(&[("data", 1)])?, [2, 3]);
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "LayoutFields")]
pub struct RankLayout {
    axes: Vec<Axis>,
    ranks: Vec<Rank>,
}

/// A layout as it was written, before it is checked.
#[derive(Deserialize)]
struct LayoutFields {
    axes: Vec<Axis>,
    ranks: Vec<Rank>,
}

impl TryFrom<LayoutFields> for RankLayout {
    type Error = LayoutError;

    fn try_from(LayoutFields { axes, ranks }: LayoutFields) -> Result<Self, LayoutError> {
        Self::checked(axes, ranks)
    }
}

/// The rest of a layout after some axes are fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubLayout {
    /// The ranks over the axes that were not fixed.
    Layout(RankLayout),
    /// Every axis was fixed.
    Rank(Rank),
}

/// The degrees of model parallelism of a worker group; 1 means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallelism {
    /// Stages of the pipeline.
    pub pipeline: usize,
    /// Ranks that share one sequence.
    pub context: usize,
    /// Ranks that share one layer.
    pub tensor: usize,
}

impl Default for Parallelism {
    fn default() -> Self {
        Self { pipeline: 1, context: 1, tensor: 1 }
    }
}

/// The reason why a layout, or a rank in it, is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The layout contains a value that is not a rank.
    #[error("layout must contain only integer rank IDs, found {0}")]
    NotARank(String),
    /// The rows of the layout differ in length or depth.
    #[error("layout is ragged: {0}")]
    Ragged(String),
    /// The number of names differs from the number of dimensions.
    #[error("number of dimensions ({dimensions}) must match the number of axis names ({names})")]
    DimensionMismatch {
        /// Depth of the layout.
        dimensions: usize,
        /// Number of names.
        names: usize,
    },
    /// The number of entries of the array differs from the product of the axis sizes.
    #[error("the axes hold {expected} ranks, {found} were given")]
    SizeMismatch {
        /// The product of the axis sizes.
        expected: usize,
        /// Number of ranks in the array.
        found: usize,
    },
    /// There are more than [`RANKS_MAX`] ranks.
    #[error("the axes hold {0} ranks; a layout has at most {RANKS_MAX}")]
    TooManyRanks(usize),
    /// A rank occurs twice.
    #[error("duplicate ranks found: {0}")]
    DuplicateRank(Rank),
    /// An axis name occurs twice.
    #[error("axis '{0}' is named twice")]
    DuplicateAxis(String),
    /// An axis has no coordinates.
    #[error("axis '{0}' has size 0")]
    EmptyAxis(String),
    /// No axis has this name.
    #[error("unknown axis '{axis}'; this layout has {known}")]
    UnknownAxis {
        /// The requested name.
        axis: String,
        /// The known names.
        known: String,
    },
    /// No worker has this rank.
    #[error("worker ID {0} not found in sharding layout")]
    UnknownRank(Rank),
    /// The axis does not have this coordinate.
    #[error("index {index} is out of bounds for axis '{axis}' with size {size}")]
    OutOfBounds {
        /// The requested coordinate.
        index: usize,
        /// The axis.
        axis: String,
        /// The size of the axis.
        size: usize,
    },
    /// The number of ranks is not a multiple of the ranks of a model replica.
    #[error("world size {world_size} must be a positive multiple of {replica} (the product of {degrees})")]
    Indivisible {
        /// Number of ranks.
        world_size: usize,
        /// Number of ranks of one model replica.
        replica: usize,
        /// The degrees, as text.
        degrees: String,
    },
}

impl From<LayoutError> for Error {
    fn from(error: LayoutError) -> Self {
        Self::invalid(error.to_string()).about("rank layout")
    }
}

impl RankLayout {
    /// Creates a layout of the ranks `0..n` in row-major order over these axes, outermost first: `arange(n).reshape(sizes)`.
    ///
    /// # Errors
    /// If an axis has size 0, or if two axes have the same name.
    pub fn new<N: Into<String>>(axes: impl IntoIterator<Item = (N, usize)>) -> Result<Self, LayoutError> {
        let axes: Vec<Axis> = axes.into_iter().map(|(name, size)| Axis { name: name.into(), size }).collect();
        let size = product(&axes);
        if size > RANKS_MAX {
            return Err(LayoutError::TooManyRanks(size));
        }
        Self::checked(axes, (0..size as Rank).collect())
    }

    /// Creates a layout of these ranks in row-major order over these axes, outermost first.
    ///
    /// # Errors
    /// The errors of [`RankLayout::new`]; also if a rank is repeated, or if the number of ranks differs from the size of the axes.
    pub fn from_ranks<N: Into<String>>(
        axes: impl IntoIterator<Item = (N, usize)>,
        ranks: Vec<Rank>,
    ) -> Result<Self, LayoutError> {
        let axes = axes.into_iter().map(|(name, size)| Axis { name: name.into(), size }).collect();
        Self::checked(axes, ranks)
    }

    /// Creates a layout from nested arrays of ranks, as in a configuration or in NeMo RL: `[[0, 1], [2, 3]]`. 1.0 is a rank, 1.5
    /// is not.
    ///
    /// # Errors
    /// The errors of [`RankLayout::from_ranks`]; also if the arrays are ragged or not integral, or if their depth differs from the
    /// number of names.
    pub fn from_nested<N: Into<String>>(
        layout: &serde_json::Value,
        names: impl IntoIterator<Item = N>,
    ) -> Result<Self, LayoutError> {
        let mut sizes = Vec::new();
        let mut level = layout;
        while let Some(items) = level.as_array() {
            sizes.push(items.len());
            let Some(first) = items.first() else { break };
            level = first;
        }
        let mut ranks = Vec::new();
        flatten(layout, &sizes, &mut ranks)?;
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        if names.len() != sizes.len() {
            return Err(LayoutError::DimensionMismatch { dimensions: sizes.len(), names: names.len() });
        }
        Self::from_ranks(names.into_iter().zip(sizes), ranks)
    }

    /// Creates a layout of the ranks `0..world_size` along one axis named `rank`: the layout of a group without named axes.
    ///
    /// # Errors
    /// If there are no ranks.
    pub fn line(world_size: usize) -> Result<Self, LayoutError> {
        Self::new([("rank", world_size)])
    }

    /// Creates the layout of a training group: `pipeline_parallel`, `data_parallel`, `context_parallel`, `tensor_parallel`.
    ///
    /// # Errors
    /// If `world_size` is not a positive multiple of the ranks of one model replica.
    pub fn training(world_size: usize, degrees: Parallelism) -> Result<Self, LayoutError> {
        let Parallelism { pipeline, context, tensor } = degrees;
        let replicas = divide(world_size, &[("pipeline", pipeline), ("context", context), ("tensor", tensor)])?;
        Self::new([
            ("pipeline_parallel", pipeline),
            ("data_parallel", replicas),
            ("context_parallel", context),
            ("tensor_parallel", tensor),
        ])
    }

    /// Creates the layout of a generation group: `data_parallel`, `pipeline_parallel`, `tensor_parallel`. The ranks of each
    /// engine are consecutive, and the first one is the leader. `degrees.context` must be 1.
    ///
    /// # Errors
    /// If `world_size` is not a positive multiple of the ranks of one engine.
    pub fn generation(world_size: usize, degrees: Parallelism) -> Result<Self, LayoutError> {
        let Parallelism { pipeline, context, tensor } = degrees;
        if context != 1 {
            return Err(LayoutError::UnknownAxis {
                axis: "context_parallel".to_owned(),
                known: "data_parallel, pipeline_parallel, tensor_parallel".to_owned(),
            });
        }
        let replicas = divide(world_size, &[("pipeline", pipeline), ("tensor", tensor)])?;
        Self::new([("data_parallel", replicas), ("pipeline_parallel", pipeline), ("tensor_parallel", tensor)])
    }

    fn checked(axes: Vec<Axis>, ranks: Vec<Rank>) -> Result<Self, LayoutError> {
        let mut names = HashSet::new();
        for axis in &axes {
            if axis.size == 0 {
                return Err(LayoutError::EmptyAxis(axis.name.clone()));
            }
            if !names.insert(&axis.name) {
                return Err(LayoutError::DuplicateAxis(axis.name.clone()));
            }
        }
        if ranks.len() != product(&axes) {
            return Err(LayoutError::SizeMismatch { expected: product(&axes), found: ranks.len() });
        }
        let mut seen = HashSet::new();
        if let Some(twice) = ranks.iter().find(|rank| !seen.insert(**rank)) {
            return Err(LayoutError::DuplicateRank(*twice));
        }
        Ok(Self { axes, ranks })
    }

    /// Returns the axes, outermost first.
    #[must_use]
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Returns the ranks in row-major order.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Returns the number of axes.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.axes.len()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the position of an axis; the outermost axis has position 0.
    ///
    /// # Errors
    /// [`LayoutError::UnknownAxis`].
    pub fn axis_index(&self, name: &str) -> Result<usize, LayoutError> {
        self.axes.iter().position(|axis| axis.name == name).ok_or_else(|| LayoutError::UnknownAxis {
            axis: name.to_owned(),
            known: self.axes.iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns the number of coordinates of an axis.
    ///
    /// # Errors
    /// [`LayoutError::UnknownAxis`].
    pub fn axis_size(&self, name: &str) -> Result<usize, LayoutError> {
        Ok(self.axes[self.axis_index(name)?].size)
    }

    /// Returns the coordinate of a rank on each axis, in the order of [`RankLayout::axes`].
    ///
    /// # Errors
    /// [`LayoutError::UnknownRank`].
    pub fn coordinates(&self, rank: Rank) -> Result<Vec<usize>, LayoutError> {
        let position = self.ranks.iter().position(|known| *known == rank).ok_or(LayoutError::UnknownRank(rank))?;
        Ok(self.coordinates_at(position))
    }

    /// Returns the coordinates of the rank at `position` of [`RankLayout::ranks`].
    pub(crate) fn coordinates_at(&self, mut position: usize) -> Vec<usize> {
        let mut coordinates = vec![0; self.axes.len()];
        for (coordinate, axis) in coordinates.iter_mut().zip(&self.axes).rev() {
            *coordinate = position % axis.size;
            position /= axis.size;
        }
        coordinates
    }

    /// Returns `true` if a rank has coordinate 0 on each of these axes. An axis that the layout lacks counts as 0.
    ///
    /// # Errors
    /// [`LayoutError::UnknownRank`].
    pub fn is_axis_zero(&self, rank: Rank, axes: &[&str]) -> Result<bool, LayoutError> {
        let coordinates = self.coordinates(rank)?;
        Ok(self.axes.iter().zip(coordinates).all(|(axis, at)| at == 0 || !axes.contains(&axis.name.as_str())))
    }

    /// Returns the ranks at these coordinates, ascending. Returns no ranks if a coordinate is out of range.
    ///
    /// # Errors
    /// [`LayoutError::UnknownAxis`].
    pub fn ranks_by_coordinates(&self, fixed: &[(&str, usize)]) -> Result<Vec<Rank>, LayoutError> {
        let fixed = self.resolve(fixed)?;
        let mut ranks: Vec<Rank> = self.at(&fixed).collect();
        ranks.sort_unstable();
        Ok(ranks)
    }

    /// Returns the layout over the remaining axes when these axes are fixed, or the single rank if all axes are fixed.
    ///
    /// # Errors
    /// [`LayoutError::UnknownAxis`], [`LayoutError::OutOfBounds`].
    pub fn fix(&self, fixed: &[(&str, usize)]) -> Result<SubLayout, LayoutError> {
        let fixed = self.resolve(fixed)?;
        for (axis, index) in &fixed {
            let Axis { name, size } = &self.axes[*axis];
            if index >= size {
                return Err(LayoutError::OutOfBounds { index: *index, axis: name.clone(), size: *size });
            }
        }
        let ranks: Vec<Rank> = self.at(&fixed).collect();
        let kept = |index: &usize| fixed.iter().all(|(axis, _)| axis != index);
        let axes: Vec<Axis> = (0..self.ndim()).filter(kept).map(|index| self.axes[index].clone()).collect();
        match ranks[..] {
            [rank] if axes.is_empty() => Ok(SubLayout::Rank(rank)),
            _ => Ok(SubLayout::Layout(Self { axes, ranks })),
        }
    }

    fn resolve(&self, fixed: &[(&str, usize)]) -> Result<Vec<(usize, usize)>, LayoutError> {
        fixed.iter().map(|(name, index)| Ok((self.axis_index(name)?, *index))).collect()
    }

    fn at(&self, fixed: &[(usize, usize)]) -> impl Iterator<Item = Rank> {
        self.ranks.iter().enumerate().filter_map(|(position, rank)| {
            let coordinates = self.coordinates_at(position);
            fixed.iter().all(|(axis, index)| coordinates[*axis] == *index).then_some(*rank)
        })
    }
}

fn product(axes: &[Axis]) -> usize {
    axes.iter().fold(1, |product, axis| product.saturating_mul(axis.size))
}

fn divide(world_size: usize, degrees: &[(&str, usize)]) -> Result<usize, LayoutError> {
    let replica: usize = degrees.iter().map(|(_, degree)| degree).product();
    match world_size.checked_div(replica) {
        Some(replicas) if replicas > 0 && replicas * replica == world_size => Ok(replicas),
        _ => {
            let degrees =
                degrees.iter().map(|(name, degree)| format!("{name} {degree}")).collect::<Vec<_>>().join(", ");
            Err(LayoutError::Indivisible { world_size, replica, degrees })
        }
    }
}

fn flatten(value: &serde_json::Value, sizes: &[usize], ranks: &mut Vec<Rank>) -> Result<(), LayoutError> {
    match (value.as_array(), sizes) {
        (Some(items), [size, inner @ ..]) if items.len() == *size => {
            items.iter().try_for_each(|item| flatten(item, inner, ranks))
        }
        (None, []) => {
            let integral =
                value.as_f64().filter(|number| (0.0..=f64::from(Rank::MAX)).contains(number) && number.fract() == 0.0);
            ranks.push(integral.ok_or_else(|| LayoutError::NotARank(value.to_string()))? as Rank);
            Ok(())
        }
        (Some(items), [size, ..]) => Err(LayoutError::Ragged(format!("a row of {} beside one of {size}", items.len()))),
        (Some(_), []) => Err(LayoutError::Ragged("an array beside a number".to_owned())),
        (None, _) => Err(LayoutError::Ragged("a number beside an array".to_owned())),
    }
}

#[cfg(test)]
mod tests;
