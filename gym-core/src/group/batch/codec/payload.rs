//! A value and a batch: the arguments of a worker call, or its reply.
//!
//! The value is replicated to every rank, and the batch is sharded over the ranks. On the wire, the head is a JSON object with the
//! value and the schema of the batch, and the segments are the columns. Numbers that are not finite arrive as they are, as in one
//! process; [`json`] has the rule.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::json::{self, Marking};
use crate::group::batch::{Batch, BatchSchema};
use crate::message::{ContentType, Message};

/// A value and a batch.
///
/// ```
/// use gym_core::group::Payload;
///
/// let call: Payload<f64> = 0.01.into();
/// assert_eq!(Payload::<f64>::from_message(call.to_message()?)?, call);
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Payload<T> {
    /// The small, typed part.
    pub value: T,
    /// The large part; [`Batch::empty`] when there is none.
    pub batch: Batch,
}

impl<T> From<T> for Payload<T> {
    fn from(value: T) -> Self {
        Self { value, batch: Batch::empty() }
    }
}

#[derive(Serialize, Deserialize)]
struct Head<T> {
    value: T,
    #[serde(default, skip_serializing_if = "BatchSchema::is_empty")]
    batch: BatchSchema,
}

impl<T: Serialize> Payload<T> {
    /// Encodes the payload as a message. The segments share the memory of the columns; the head is serialized again.
    ///
    /// # Errors
    /// `InvalidArgument` if the value cannot be serialized as JSON, such as a map with the key NaN.
    pub fn to_message(&self) -> Result<Message> {
        let (batch, segments) = self.batch.encode();
        let head = serde_json::to_vec(&Marking(&Head { value: &self.value, batch }))
            .map_err(|error| Error::invalid("the value of a payload cannot be written as JSON").caused_by(error))?;
        Ok(Message { content_type: ContentType::Json, head: head.into(), segments })
    }
}

impl<T: DeserializeOwned> Payload<T> {
    /// Decodes the payload of a message. The batch shares the memory of its segments.
    ///
    /// # Errors
    /// `InvalidArgument` if the head is not JSON of a `T`; `DataLoss` if head and segments do not match. Both are `NotStarted`.
    /// To decode a *reply*, set the execution of the error with [`Error::with_execution`].
    pub fn from_message(message: Message) -> Result<Self> {
        let head: Head<T> = json::read(&message.head.to_bytes()).map_err(|error| {
            Error::not_started(Code::InvalidArgument, "the head of a payload is not what is asked for").caused_by(error)
        })?;
        Ok(Self { value: head.value, batch: Batch::decode(head.batch, message.segments)? })
    }
}
