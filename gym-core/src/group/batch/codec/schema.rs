//! Encoding of a batch as a schema and segments. The schema is JSON of a few hundred bytes; the segments share the columns' memory.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{DType, Side, Tensor};
use crate::group::batch::{Batch, Column, JsonRows, MicroBatches, Offsets, Packed, Ragged, Segment, SegmentId};

/// Description of the segments of a batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSchema {
    /// Number of rows of every column.
    #[serde(default)]
    pub rows: usize,
    /// The columns, in order.
    #[serde(default)]
    pub columns: Vec<ColumnSchema>,
    /// Metadata of the batch as a whole.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// The plan of micro-batches, if the batch is a shard that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<MicroBatches>,
}

impl BatchSchema {
    /// Returns `true` if the batch has neither columns nor metadata.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty() && self.metadata.is_empty()
    }
}

/// One column of a [`BatchSchema`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum ColumnSchema {
    /// One segment: the elements.
    Dense {
        /// Name of the column.
        name: String,
        /// Type of the elements.
        dtype: DType,
        /// Sizes of the dimensions; the first one is the number of rows.
        shape: Vec<usize>,
        /// The side on which dimension 1 is padded, if it is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        padding: Option<Side>,
    },
    /// Two segments: the boundaries of the rows, then the elements of all rows.
    Ragged {
        /// Name of the column.
        name: String,
        /// Type of the elements.
        dtype: DType,
        /// Sizes of the dimensions of all rows together; the first one is the last boundary minus the first.
        shape: Vec<usize>,
    },
    /// Two segments: the boundaries of the rows, then the JSON texts of all rows.
    Json {
        /// Name of the column.
        name: String,
    },
    /// Two segments, then the listed ones: the boundaries of the rows among the references, the references, then the tensors.
    Packed {
        /// Name of the column.
        name: String,
        /// The dimension along which the tensors are packed; a negative number counts from the last dimension.
        dimension: isize,
        /// `true` if the other dimensions are padded.
        pad_to_max_shape: bool,
        /// The tensors that rows refer to, each once.
        segments: Vec<SegmentSchema>,
    },
}

/// One tensor of a packed column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSchema {
    /// The segment's identity, 32 hexadecimal digits.
    pub id: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
}

impl Batch {
    /// Encodes the batch as a schema and segments. The segments share the memory of the columns.
    #[must_use]
    pub fn encode(&self) -> (BatchSchema, Vec<Bytes>) {
        let mut segments = Vec::with_capacity(2 * self.columns.len());
        let mut encode = |(name, column): (&str, &Column)| {
            let name = name.into();
            match column {
                Column::Dense(tensor) => {
                    segments.push(tensor.bytes().clone());
                    let (dtype, shape, padding) = (tensor.dtype(), tensor.shape().to_vec(), tensor.padding_side());
                    ColumnSchema::Dense { name, dtype, shape, padding }
                }
                Column::Ragged(ragged) => {
                    let values = ragged.values();
                    segments.extend([ragged.offsets().bytes().clone(), values.bytes().clone()]);
                    ColumnSchema::Ragged { name, dtype: values.dtype(), shape: values.shape().to_vec() }
                }
                Column::Json(json) => {
                    segments.extend([json.offsets().bytes().clone(), json.text().clone()]);
                    ColumnSchema::Json { name }
                }
                Column::Packed(packed) => {
                    let references = packed.references().iter().map(|reference| *reference as u64).collect::<Vec<_>>();
                    let count = references.len();
                    let references =
                        Tensor::from_vec([count], references).expect("the shape is the vector's own length");
                    segments
                        .extend([Offsets::from_lengths(packed.counts()).bytes().clone(), references.bytes().clone()]);
                    segments.extend(packed.segments().iter().map(|segment| segment.tensor().bytes().clone()));
                    ColumnSchema::Packed {
                        name,
                        dimension: packed.dimension(),
                        pad_to_max_shape: packed.pads_to_max_shape(),
                        segments: packed.segments().iter().map(SegmentSchema::of).collect(),
                    }
                }
            }
        };
        let columns = self.columns().map(&mut encode).collect();
        let (metadata, micro_batches) = ((*self.metadata).clone(), self.micro_batches().cloned());
        (BatchSchema { rows: self.rows(), columns, metadata, micro_batches }, segments)
    }

    /// Decodes a batch, which shares the memory of the segments. Every length is checked against the received bytes, and no
    /// allocation depends on a number that the peer wrote.
    ///
    /// # Errors
    /// `DataLoss`, with the name of the column, if schema and segments do not match.
    pub fn decode(schema: BatchSchema, segments: Vec<Bytes>) -> Result<Self> {
        let (rows, mut segments, mut batch) = (schema.rows, segments.into_iter(), Self::empty());
        for column in schema.columns {
            let (name, column) = column.decode(rows, &mut segments)?;
            if batch.get(&name).is_some() {
                return Err(lost(format!("column {name:?} comes twice")));
            }
            batch.insert(name, column).map_err(|error| as_lost(&error))?;
        }
        if batch.rows() != rows {
            return Err(lost(format!("the schema says {rows} rows, the columns have {}", batch.rows())));
        }
        if segments.len() > 0 {
            return Err(lost(format!("{} segments belong to no column", segments.len())));
        }
        if schema.micro_batches.as_ref().is_some_and(|plan| !plan.fits(rows)) {
            return Err(lost(format!("the plan of micro-batches does not cover the {rows} rows in order")));
        }
        batch.metadata = schema.metadata.into();
        batch.micro_batches = schema.micro_batches.map(Arc::new);
        Ok(batch)
    }
}

impl ColumnSchema {
    fn decode(self, rows: usize, segments: &mut impl Iterator<Item = Bytes>) -> Result<(String, Column)> {
        let mut next =
            |name: &str| segments.next().ok_or_else(|| lost(format!("no segment is left for column {name:?}")));
        let (name, column) = match self {
            Self::Dense { name, dtype, shape, padding } => {
                let tensor = Tensor::new(dtype, shape, next(&name)?);
                let tensor = tensor.and_then(|tensor| match padding {
                    Some(side) => tensor.padded_on(side),
                    None => Ok(tensor),
                });
                (name, tensor.map(Column::Dense))
            }
            Self::Ragged { name, dtype, shape } => {
                let (offsets, bytes) = (next(&name)?, next(&name)?);
                let column = Offsets::decode(offsets, rows)
                    .and_then(|offsets| Ragged::new(Tensor::new(dtype, shape, bytes)?, offsets));
                (name, column.map(Column::Ragged))
            }
            Self::Json { name } => {
                let (offsets, text) = (next(&name)?, next(&name)?);
                let column = Offsets::decode(offsets, rows).and_then(|offsets| JsonRows::new(text, offsets));
                (name, column.map(Column::Json))
            }
            Self::Packed { name, dimension, pad_to_max_shape, segments: known } => {
                let (offsets, references) = (next(&name)?, next(&name)?);
                let bytes = known.iter().map(|_| next(&name)).collect::<Result<Vec<_>>>()?;
                let column = Offsets::decode(offsets, rows).and_then(|offsets| {
                    let segments = known.into_iter().zip(bytes).map(|(known, bytes)| known.decode(bytes));
                    let references = Tensor::new(DType::U64, [references.len() / 8], references)?.to_i64s()?;
                    let references = references.into_iter().map(|at| usize::try_from(at).unwrap_or(usize::MAX));
                    let segments = segments.collect::<Result<_>>()?;
                    Packed::decode(segments, &offsets, references.collect(), dimension, pad_to_max_shape)
                });
                (name, column.map(Column::Packed))
            }
        };
        let column = column.map_err(|error| as_lost(&error).about(format!("column {name:?}")))?;
        Ok((name, column))
    }
}

impl SegmentSchema {
    fn of(segment: &Segment) -> Self {
        let tensor = segment.tensor();
        Self { id: format!("{:032x}", segment.id().0), dtype: tensor.dtype(), shape: tensor.shape().to_vec() }
    }

    fn decode(self, bytes: Bytes) -> Result<Segment> {
        let id = u128::from_str_radix(&self.id, 16)
            .map_err(|_| Error::invalid(format!("{:?} identifies no segment", self.id)))?;
        Ok(Segment::known(SegmentId(id), Tensor::new(self.dtype, self.shape, bytes)?))
    }
}

fn lost(message: String) -> Error {
    Error::not_started(Code::DataLoss, message).about("read a batch")
}

/// Reports an error in received data as `DataLoss`: the peer is at fault, not an argument of the caller.
fn as_lost(error: &Error) -> Error {
    lost(error.message().to_owned())
}
