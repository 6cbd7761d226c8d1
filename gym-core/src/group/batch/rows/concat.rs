//! Concatenation of batches row by row: one copy, into memory of the right size.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value};

use crate::base::error::{Error, Result};
use crate::group::batch::rows::sides::common_side;
use crate::group::batch::tensor::Tensor;
use crate::group::batch::{Batch, Column, JsonRows, Offsets, Packed, Ragged};

impl Batch {
    /// Concatenates the rows of all parts, in order. Parts without columns are skipped; a single part is shared, not copied.
    ///
    /// The columns have the order of the first part. Metadata entries are kept if they are equal in all parts.
    ///
    /// # Errors
    /// `InvalidArgument` if the parts have different columns, or columns of different kinds, types or row shapes; also if columns
    /// of one name are padded on different sides.
    pub fn concat(parts: &[Self]) -> Result<Self> {
        let parts: Vec<&Self> = parts.iter().filter(|part| !part.is_empty()).collect();
        let Some((first, rest)) = parts.split_first() else { return Ok(Self::empty()) };
        if rest.is_empty() {
            return Ok((*first).clone());
        }
        if let Some((at, odd)) = rest.iter().enumerate().find(|(_, part)| part.columns.len() != first.columns.len()) {
            let (wanted, found) = (first.names().collect::<Vec<_>>(), odd.names().collect::<Vec<_>>());
            return Err(Error::invalid(format!("part {} has the columns {found:?}, part 0 has {wanted:?}", at + 1)));
        }
        let concat_column = |(name, _): &(Arc<str>, Column)| -> Result<(Arc<str>, Column)> {
            let columns = parts.iter().map(|part| part.column(name)).collect::<Result<Vec<_>>>()?;
            let column = Column::concat(&columns).map_err(|error| error.about(format!("concat of column {name:?}")))?;
            Ok((Arc::clone(name), column))
        };
        let columns = first.columns.iter().map(concat_column).collect::<Result<_>>()?;
        let metadata = common_metadata(&parts).into();
        Ok(Self { columns, metadata, micro_batches: None })
    }
}

/// Returns the metadata entries that are equal in all parts.
pub(in crate::group::batch) fn common_metadata(parts: &[&Batch]) -> Map<String, Value> {
    let mut metadata = parts.first().map(|first| (*first.metadata).clone()).unwrap_or_default();
    metadata.retain(|name, value| parts.iter().all(|part| part.metadata.get(name) == Some(value)));
    metadata
}

impl Column {
    /// Concatenates the rows of all columns, in order. There must be at least one column.
    ///
    /// # Errors
    /// `InvalidArgument` if the columns have different kinds, types or row shapes.
    pub(crate) fn concat(columns: &[&Self]) -> Result<Self> {
        Ok(match columns[0] {
            Self::Dense(_) => Self::Dense(concat_tensors(&all(columns, Self::dense)?)?),
            Self::Ragged(_) => {
                let parts = all(columns, Self::ragged)?;
                let values = concat_tensors(&parts.iter().map(|part| part.values()).collect::<Vec<_>>())?;
                Self::Ragged(Ragged::new(values, concat_offsets(parts.iter().map(|part| part.offsets())))?)
            }
            Self::Json(_) => {
                let parts = all(columns, Self::json)?;
                let text = concat_bytes(parts.iter().map(|part| part.text()));
                Self::Json(JsonRows::new(text, concat_offsets(parts.iter().map(|part| part.offsets())))?)
            }
            Self::Packed(_) => Self::Packed(Packed::concat(&all(columns, Self::packed)?)?),
        })
    }
}

fn all<'a, T>(columns: &[&'a Column], of: fn(&'a Column) -> Result<&'a T>) -> Result<Vec<&'a T>> {
    columns.iter().map(|column| of(column)).collect()
}

/// Concatenates tensors of one type and row shape along dimension 0.
pub(crate) fn concat_tensors(parts: &[&Tensor]) -> Result<Tensor> {
    let first = parts[0];
    if let Some(odd) =
        parts.iter().find(|part| part.dtype() != first.dtype() || part.shape()[1..] != first.shape()[1..])
    {
        return Err(Error::invalid(format!("{odd:?} does not fit under {first:?}; pad it first")));
    }
    let side = common_side(&parts.iter().map(|part| (part.rows(), part.padding_side())).collect::<Vec<_>>())?;
    let mut shape = first.shape().to_vec();
    shape[0] = parts.iter().map(|part| part.rows()).sum();
    Ok(Tensor::new(first.dtype(), shape, concat_bytes(parts.iter().map(|part| part.bytes())))?.with_side(side))
}

fn concat_bytes<'a>(parts: impl Iterator<Item = &'a Bytes> + Clone) -> Bytes {
    let mut whole = BytesMut::with_capacity(parts.clone().map(Bytes::len).sum());
    parts.for_each(|part| whole.extend_from_slice(part));
    whole.freeze()
}

fn concat_offsets<'a>(parts: impl Iterator<Item = &'a Offsets> + Clone) -> Offsets {
    Offsets::from_lengths(parts.flat_map(Offsets::lengths))
}
