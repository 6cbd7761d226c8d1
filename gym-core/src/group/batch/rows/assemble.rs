//! Concatenation of batches from different sources: their rows may have different widths, and columns may be missing.
//!
//! [`Batch::concat`] is for parts of one batch, and rejects parts that do not match. This module is for batches of different
//! generations, whose widths differ by chance.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::rows::concat::common_metadata;
use crate::group::batch::rows::sides::common_side;
use crate::group::batch::tensor::{Scalar, Side, Tensor};
use crate::group::batch::{Batch, Column, Padding};

/// Options of [`Batch::from_batches`]. The defaults pad with 0 and reject missing columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assembly {
    padding: BTreeMap<String, Scalar>,
    packed_may_miss: bool,
}

impl Assembly {
    /// Pads the column with this value instead of 0.
    #[must_use]
    pub fn pad(mut self, column: impl Into<String>, value: impl Into<Scalar>) -> Self {
        self.padding.insert(column.into(), value.into());
        self
    }

    /// Accepts parts that lack a packed column, and adds rows without segments for them. The default is to reject such parts.
    #[must_use]
    pub fn packed_may_miss(self) -> Self {
        Self { packed_may_miss: true, ..self }
    }
}

impl Batch {
    /// Concatenates the rows of all parts, in order. The columns are sorted by name.
    ///
    /// Dense columns of two or more dimensions are padded in dimension 1 to the widest part, on the side on which they are padded
    /// already ([`Batch::truncate`] says how it is found). All others are concatenated unchanged. Parts without rows are skipped, whatever columns they have, unless no part has rows.
    ///
    /// # Errors
    /// `NotFound` if a part that has rows lacks a column that another one has. `InvalidArgument` if columns of one name have
    /// different kinds, types, sizes beyond dimension 1, or sides of padding.
    pub fn from_batches(parts: &[Self], assembly: &Assembly) -> Result<Self> {
        let mut filled: Vec<(usize, &Self)> = parts.iter().enumerate().filter(|(_, part)| part.rows() > 0).collect();
        if filled.is_empty() {
            filled.extend(parts.iter().enumerate().find(|(_, part)| !part.is_empty()));
        }
        let names: BTreeSet<&str> = filled.iter().flat_map(|(_, part)| part.names()).collect();
        let mut whole = Self::empty();
        for name in names {
            let padding = assembly.padding.get(name).copied().unwrap_or(Scalar::Int(0));
            let columns = columns_of(&filled, name, assembly)?;
            let columns: Vec<&Column> = columns.iter().map(AsRef::as_ref).collect();
            let sides = filled.iter().map(|(_, part)| part.side_of(name)).collect::<Result<Vec<_>>>()?;
            let column =
                put_together(&columns, &sides, padding).map_err(|error| error.about(format!("column {name:?}")))?;
            whole.insert(name, column)?;
        }
        whole.metadata = common_metadata(&filled.iter().map(|(_, part)| *part).collect::<Vec<_>>()).into();
        Ok(whole)
    }
}

/// Returns the column of that name of every part.
fn columns_of<'a>(parts: &[(usize, &'a Batch)], name: &str, assembly: &Assembly) -> Result<Vec<Cow<'a, Column>>> {
    let lacking: Vec<usize> = parts.iter().filter(|(_, part)| part.get(name).is_none()).map(|(at, _)| *at).collect();
    let packed = parts.iter().find_map(|(_, part)| part.get(name)?.packed().ok()).filter(|_| assembly.packed_may_miss);
    if !lacking.is_empty() && packed.is_none() {
        let message = format!("column {name:?} is missing from the non-empty batches {lacking:?}");
        return Err(Error::not_started(Code::NotFound, message));
    }
    let column = |(_, part): &(usize, &'a Batch)| match (part.get(name), packed) {
        (Some(column), _) => Some(Cow::Borrowed(column)),
        (None, like) => like.map(|like| Cow::Owned(Column::Packed(like.empty_rows_like(part.rows())))),
    };
    Ok(parts.iter().filter_map(column).collect())
}

fn put_together(columns: &[&Column], sides: &[Option<Side>], padding: Scalar) -> Result<Column> {
    let tensors: Option<Vec<&Tensor>> = columns.iter().map(|column| column.dense().ok()).collect();
    match tensors {
        Some(tensors) if tensors.iter().any(|tensor| tensor.shape().len() > 1) => {
            pad(&tensors, sides, padding).map(Column::Dense)
        }
        _ => Column::concat(columns),
    }
}

/// Concatenates the rows of all tensors in one pass, padded in dimension 1 to the widest tensor.
fn pad(tensors: &[&Tensor], sides: &[Option<Side>], padding: Scalar) -> Result<Tensor> {
    let first = tensors[0];
    let alike = |tensor: &&&Tensor| {
        tensor.dtype() == first.dtype()
            && tensor.shape().len() == first.shape().len()
            && tensor.shape().get(2..) == first.shape().get(2..)
    };
    if let Some(odd) = tensors.iter().find(|tensor| !alike(tensor)) {
        return Err(Error::invalid(format!("{odd:?} does not fit under {first:?}: only dimension 1 is padded")));
    }
    let width = tensors.iter().map(|tensor| tensor.shape()[1]).max().unwrap_or(0);
    let step = first.dtype().size() * first.shape()[2..].iter().product::<usize>();
    let rows: Vec<&[u8]> = tensors.iter().flat_map(|tensor| rows_of(tensor)).collect();
    let shape = [rows.len(), width].into_iter().chain(first.shape()[2..].iter().copied()).collect::<Vec<_>>();
    let side = common_side(&tensors.iter().map(|tensor| tensor.rows()).zip(sides.iter().copied()).collect::<Vec<_>>())?;
    let padding = Padding::new(padding, side.unwrap_or_default());
    let block = padding.block(first.dtype(), width, step, rows.into_iter())?;
    Ok(Tensor::new(first.dtype(), shape, block.into())?.with_side(side))
}

fn rows_of(tensor: &Tensor) -> impl Iterator<Item = &[u8]> {
    let row = tensor.row_bytes();
    (0..tensor.rows()).map(move |at| &tensor.bytes()[at * row..(at + 1) * row])
}
