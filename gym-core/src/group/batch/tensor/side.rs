//! The side on which the rows of a tensor are padded.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::Tensor;

/// The side on which padding is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Before the elements: for prompts of a generation, whose last tokens must be aligned.
    Left,
    /// After the elements: for all data of a training step.
    #[default]
    Right,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "left",
            Self::Right => "right",
        })
    }
}

impl Tensor {
    /// Declares the side on which dimension 1 is padded. Tensors that this crate pads are declared; others must be, if they are
    /// padded on the left. The declaration travels with the tensor, and takes part in comparisons.
    ///
    /// # Errors
    /// `InvalidArgument` if the tensor has less than two dimensions.
    pub fn padded_on(self, side: Side) -> Result<Self> {
        if self.shape().len() < 2 {
            return Err(Error::invalid(format!("{self:?} has no dimension 1 that could be padded")));
        }
        Ok(self.with_side(Some(side)))
    }

    /// Returns the side on which dimension 1 is padded; `None` if nothing declares it.
    #[must_use]
    pub fn padding_side(&self) -> Option<Side> {
        self.side
    }

    /// Declares the side of a tensor made from padded ones, unless it has no dimension 1.
    pub(crate) fn with_side(self, side: Option<Side>) -> Self {
        Self { side: side.filter(|_| self.shape.len() > 1), ..self }
    }
}
