//! Conversion between a batch and a `.safetensors` file.
//!
//! A dense column is the tensor of its name. Other columns have dotted names, which Python reads as tensors too. A ragged or JSON
//! column `c` is stored as `c.offsets` and `c.values` (texts as `U8`). A packed column is stored as `c.offsets`, `c.references` and
//! `c.segment.{i}`. The metadata entry `gym.batch` holds the schema, which describes the columns and their order.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::safetensors::SafeTensors;
use crate::group::batch::tensor::{DType, Tensor};
use crate::group::batch::{Batch, BatchSchema, ColumnSchema, Offsets};

/// Metadata key of the schema of the batch.
const SCHEMA: &str = "gym.batch";

impl SafeTensors {
    /// Converts a batch to tensors and its schema.
    ///
    /// # Errors
    /// `AlreadyExists` if a column has the name of a part of another one, such as `tokens.values` next to a ragged `tokens`.
    pub fn from_batch(batch: &Batch) -> Result<Self> {
        let (schema, segments) = batch.encode();
        let text = serde_json::to_string(&schema)
            .map_err(|error| Error::invalid("the schema of a batch cannot be written as JSON").caused_by(error))?;
        let mut tensors = BTreeMap::new();
        for (part, bytes) in schema.columns.iter().flat_map(parts_of).zip(segments) {
            // The boundaries of a slice begin where they do in the whole column; a reader of the file expects them to begin at 0.
            let bytes =
                if part.is_boundaries { Offsets::decode(bytes, schema.rows)?.rebased().bytes().clone() } else { bytes };
            let shape = part.shape.unwrap_or_else(|| vec![bytes.len() / part.dtype.size()]);
            if tensors.insert(part.name.clone(), Tensor::new(part.dtype, shape, bytes)?).is_some() {
                return Err(Error::not_started(
                    Code::AlreadyExists,
                    format!("two columns write tensor {:?}", part.name),
                ));
            }
        }
        Ok(Self { tensors, metadata: BTreeMap::from([(SCHEMA.into(), text)]) })
    }

    /// Converts the tensors to a batch. Without the schema, the batch has one column for each tensor, sorted by name.
    ///
    /// # Errors
    /// `DataLoss` if schema and tensors do not match; without a schema, if a tensor is a scalar or the numbers of rows differ.
    pub fn into_batch(mut self) -> Result<Batch> {
        let lost = |message: String| Error::not_started(Code::DataLoss, message).about("read a batch from safetensors");
        let Some(text) = self.metadata.get(SCHEMA) else {
            return Batch::new(self.tensors.into_iter().map(|(name, tensor)| (name, tensor.into())))
                .map_err(|error| lost(error.message().to_owned()));
        };
        let schema: BatchSchema =
            serde_json::from_str(text).map_err(|error| lost(format!("{SCHEMA} is no schema of a batch: {error}")))?;
        let mut segments: Vec<Bytes> = Vec::new();
        for Part { name, .. } in schema.columns.iter().flat_map(parts_of) {
            let tensor = self.tensors.remove(&name).ok_or_else(|| lost(format!("tensor {name:?} is missing")))?;
            segments.push(tensor.bytes().clone());
        }
        if let Some(name) = self.tensors.keys().next() {
            return Err(lost(format!("tensor {name:?} belongs to no column")));
        }
        Batch::decode(schema, segments)
    }
}

/// A tensor that stores one segment of a batch.
struct Part {
    name: String,
    dtype: DType,
    /// `None` for one dimension, as long as the segment.
    shape: Option<Vec<usize>>,
    is_boundaries: bool,
}

/// Returns the tensors of the segments of a column, in order.
fn parts_of(column: &ColumnSchema) -> Vec<Part> {
    let part = |name, dtype, shape| Part { name, dtype, shape, is_boundaries: false };
    let boundaries = |name: &str| Part { is_boundaries: true, ..part(format!("{name}.offsets"), DType::U64, None) };
    match column {
        ColumnSchema::Dense { name, dtype, shape, .. } => vec![part(name.clone(), *dtype, Some(shape.clone()))],
        ColumnSchema::Ragged { name, dtype, shape } => {
            vec![boundaries(name), part(format!("{name}.values"), *dtype, Some(shape.clone()))]
        }
        ColumnSchema::Json { name } => vec![boundaries(name), part(format!("{name}.values"), DType::U8, None)],
        ColumnSchema::Packed { name, segments, .. } => {
            let references = part(format!("{name}.references"), DType::U64, None);
            let segments = segments
                .iter()
                .enumerate()
                .map(|(at, segment)| part(format!("{name}.segment.{at}"), segment.dtype, Some(segment.shape.clone())));
            [boundaries(name), references].into_iter().chain(segments).collect()
        }
    }
}
