//! Tensors in a `.safetensors` file: eight bytes of header length, a JSON header, the elements.
//!
//! The format is <https://github.com/huggingface/safetensors>. Tensors have the same layout as in memory. A file is therefore
//! read as slices of one block, and written without a copy of the elements. A file can also store a batch. Columns that are not
//! dense are stored as tensors with dotted names, which a schema in the metadata describes.

mod batch;
mod header;

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{DType, Tensor};
use crate::message::Rope;
use header::{Entry, Header};

/// Maximum length of a header, the same as in the reference implementation.
pub const HEADER_BYTES_MAX: usize = 100_000_000;
/// Tensors begin at a multiple of this number of bytes, so that they can be viewed in place.
const ALIGNMENT: usize = 8;
/// Bytes of the header length.
const LENGTH_BYTES: usize = 8;

/// The content of a `.safetensors` file: named tensors and metadata.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SafeTensors {
    /// The tensors, by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Metadata strings, by name.
    pub metadata: BTreeMap<String, String>,
}

impl SafeTensors {
    /// Encodes the file: the header, then the memory of each tensor, not copied. Tensors with the widest elements come first, so
    /// that all are aligned.
    ///
    /// # Errors
    /// `InvalidArgument` if a tensor is named `__metadata__`, or if the header exceeds [`HEADER_BYTES_MAX`].
    pub fn encode(&self) -> Result<Rope> {
        let mut sorted: Vec<(&String, &Tensor)> = self.tensors.iter().collect();
        sorted.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype().size()));
        let mut at = 0;
        let mut header = Header::new(&self.metadata);
        for (name, tensor) in &sorted {
            let end = at + tensor.bytes().len();
            let entry = Entry {
                dtype: tensor.dtype().as_str().into(),
                shape: tensor.shape().to_vec(),
                data_offsets: [at, end],
            };
            header.insert(name, &entry)?;
            at = end;
        }
        let mut text = header.into_text();
        // The format pads with spaces, so that the elements begin aligned.
        text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
        if text.len() > HEADER_BYTES_MAX {
            return Err(Error::invalid(format!("a header of {} bytes exceeds {HEADER_BYTES_MAX}", text.len())));
        }
        let length = Bytes::copy_from_slice(&(text.len() as u64).to_le_bytes());
        let elements = sorted.into_iter().map(|(_, tensor)| tensor.bytes().clone());
        Ok([length, text.into()].into_iter().chain(elements).collect())
    }

    /// Decodes the tensors of a file, which share its bytes.
    ///
    /// # Errors
    /// `DataLoss` if the bytes are not a valid file:
    /// - the header is too long, is not JSON, or names a tensor twice;
    /// - a tensor has an unknown type, or a size that does not match its shape;
    /// - tensors overlap, leave gaps, or do not end at the end of the file.
    pub fn decode(file: &Bytes) -> Result<Self> {
        Self::parse(file)
            .map_err(|error| Error::not_started(Code::DataLoss, error.message().to_owned()).about("read safetensors"))
    }

    fn parse(file: &Bytes) -> Result<Self> {
        let length = file.first_chunk::<LENGTH_BYTES>().map(|length| u64::from_le_bytes(*length));
        let length = length.ok_or_else(|| Error::invalid(format!("{} bytes hold no header length", file.len())))?;
        let length = usize::try_from(length).ok().filter(|length| *length <= HEADER_BYTES_MAX);
        let length = length.ok_or_else(|| Error::invalid(format!("the header exceeds {HEADER_BYTES_MAX} bytes")))?;
        let Some(text) = file.get(LENGTH_BYTES..LENGTH_BYTES + length) else {
            return Err(Error::invalid(format!("the file of {} bytes ends within its header of {length}", file.len())));
        };
        let (entries, metadata) = header::parse(text)?;
        let elements = file.slice(LENGTH_BYTES + length..);
        check_covered(&entries, elements.len())?;
        let tensors = entries.into_iter().map(|(name, entry)| {
            let dtype = DType::ALL.into_iter().find(|dtype| dtype.as_str() == entry.dtype);
            let dtype =
                dtype.ok_or_else(|| Error::invalid(format!("tensor {name:?} is of unknown type {:?}", entry.dtype)))?;
            let [begin, end] = entry.data_offsets;
            let tensor = Tensor::new(dtype, entry.shape, elements.slice(begin..end))
                .map_err(|error| Error::invalid(format!("tensor {name:?}: {}", error.message())))?;
            Ok((name, tensor))
        });
        Ok(Self { tensors: tensors.collect::<Result<_>>()?, metadata })
    }
}

/// Rejects tensors that overlap, or bytes that belong to no tensor: the format does not allow them, and hidden bytes would be
/// copied unnoticed.
fn check_covered(entries: &BTreeMap<String, Entry>, bytes: usize) -> Result<()> {
    let mut spans: Vec<([usize; 2], &String)> =
        entries.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
    spans.sort_unstable();
    let mut at = 0;
    for ([begin, end], name) in spans {
        if begin != at || end < begin || end > bytes {
            return Err(Error::invalid(format!(
                "tensor {name:?} lies at {begin}..{end} of {bytes} bytes; it should begin at {at}"
            )));
        }
        at = end;
    }
    if at != bytes {
        return Err(Error::invalid(format!("the tensors end at {at}, the file has {bytes} bytes for them")));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
