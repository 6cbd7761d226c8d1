//! A value with a batch beside it: the arguments of a worker call, or its reply.
//!
//! The value is replicated to every rank, the batch is sharded over them. On the wire the head is a JSON object of both, the
//! segments are the columns.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::{Batch, BatchSchema};
use crate::message::{ContentType, Message};

/// A value with a batch beside it.
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
    /// As it travels. The segments are the columns' own memory; the head is written anew.
    ///
    /// # Errors
    /// `InvalidArgument` when the value cannot be written as JSON.
    pub fn to_message(&self) -> Result<Message> {
        let (batch, segments) = self.batch.encode();
        let head = serde_json::to_vec(&Head { value: &self.value, batch })
            .map_err(|error| Error::invalid("the value of a payload cannot be written as JSON").caused_by(error))?;
        Ok(Message { content_type: ContentType::Json, head: head.into(), segments })
    }
}

impl<T: DeserializeOwned> Payload<T> {
    /// What a message carries; the batch shares its segments.
    ///
    /// # Errors
    /// `InvalidArgument` when the head is no JSON of a `T`, `DataLoss` when head and segments do not fit each other. Both are
    /// `NotStarted`; whoever reads an *answer* says so with [`Error::with_execution`].
    pub fn from_message(message: Message) -> Result<Self> {
        let head: Head<T> = serde_json::from_slice(&message.head.to_bytes()).map_err(|error| {
            Error::not_started(Code::InvalidArgument, "the head of a payload is not what is asked for").caused_by(error)
        })?;
        Ok(Self { value: head.value, batch: Batch::decode(head.batch, message.segments)? })
    }
}
