//! A batch as a `.safetensors` file and back.
//!
//! A dense column is the tensor of its name. What else a batch has lies under dotted names that Python reads as tensors too:
//! a ragged or JSON column `c` as `c.offsets` and `c.values` (texts as `U8`), a packed one as `c.offsets`, `c.references` and
//! `c.segment.{i}`. The member `gym.batch` of the metadata holds the schema, which says what is what and in which order.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::safetensors::SafeTensors;
use crate::group::batch::tensor::{DType, Tensor};
use crate::group::batch::{Batch, BatchSchema, ColumnSchema, Offsets};

/// The member of the metadata with the batch's schema.
const SCHEMA: &str = "gym.batch";

impl SafeTensors {
    /// The tensors of a batch, and its schema.
    ///
    /// # Errors
    /// `AlreadyExists` when a column has the name of a part of another one, such as `tokens.values` beside a ragged `tokens`.
    pub fn from_batch(batch: &Batch) -> Result<Self> {
        let (schema, segments) = batch.encode();
        let text = serde_json::to_string(&schema)
            .map_err(|error| Error::invalid("the schema of a batch cannot be written as JSON").caused_by(error))?;
        let mut tensors = BTreeMap::new();
        for (part, bytes) in schema.columns.iter().flat_map(parts_of).zip(segments) {
            // A slice's boundaries begin where they do in the whole; a reader of the file expects them to begin at 0.
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

    /// The batch of a file. One without our schema is a batch of its tensors, sorted by name.
    ///
    /// # Errors
    /// `DataLoss` when schema and tensors do not fit each other; without a schema, when a tensor is a scalar or the rows differ.
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

/// A tensor that one segment of a batch is written as.
struct Part {
    name: String,
    dtype: DType,
    /// None for one dimension, as long as the segment.
    shape: Option<Vec<usize>>,
    is_boundaries: bool,
}

/// What the segments of a column are called, in their order.
fn parts_of(column: &ColumnSchema) -> Vec<Part> {
    let part = |name, dtype, shape| Part { name, dtype, shape, is_boundaries: false };
    let boundaries = |name: &str| Part { is_boundaries: true, ..part(format!("{name}.offsets"), DType::U64, None) };
    match column {
        ColumnSchema::Dense { name, dtype, shape } => vec![part(name.clone(), *dtype, Some(shape.clone()))],
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
