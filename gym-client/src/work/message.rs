//! The messages of `POST /work/next`. Bodies travel as segments beside the JSON, so that no row and no response is parsed or
//! written again on the way.

use std::borrow::Cow;

use bytes::Bytes;
use gym_core::message::{CALL_METADATA, CALL_WAIT_METADATA, ContentType};
use gym_core::registry::MemberTiming;
use gym_core::{Code, Error, Message, Metadata, Response, Result, Status};
use serde::{Deserialize, Serialize};

/// The route over which workers take work and return responses.
pub const WORK_ROUTE: &str = "/work/next";

/// The body of a poll.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PollBody {
    pub(super) worker: String,
    pub(super) incarnation: u64,
    /// The incarnation of the cluster's member of this name, if the worker is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) member: Option<u64>,
    /// The intervals of that member's heartbeats. Workers of earlier versions do not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) timing: Option<MemberTiming>,
    /// The queue that answered the worker's first poll; 0 before.
    #[serde(default)]
    pub(super) queue: u64,
    /// The number of the poll: 1 for the first of an incarnation.
    pub(super) poll: u64,
    pub(super) capacity: u32,
    /// Maximum milliseconds to wait for work.
    pub(super) wait_ms: u64,
    /// Servers that the worker serves; without it, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) servers: Option<Vec<String>>,
    /// The finished work. The bodies are the segments, in this order.
    #[serde(default)]
    pub(super) done: Vec<DoneBody>,
    /// The worker ends: it holds nothing and polls no more.
    #[serde(default)]
    pub(super) leave: bool,
}

/// The response of one item.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DoneBody {
    pub(super) id: u64,
    pub(super) status: u16,
    /// The call failed on the worker, and the response is that of its error.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(super) failed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) content_type: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) metadata: Vec<(String, String)>,
    /// Number of segments: the head of the response, and its own segments.
    pub(super) segments: usize,
}

/// The answer to a poll.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct AnswerBody {
    pub(super) queue: u64,
    /// Items to run. The bodies are the segments, in this order.
    #[serde(default)]
    pub(super) items: Vec<ItemBody>,
    /// Items that nobody waits for any more.
    #[serde(default)]
    pub(super) cancel: Vec<u64>,
    /// The queue does not know this incarnation: the worker stops all that it runs, and begins as a new incarnation.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(super) restart: bool,
    /// The pool ends: nobody waits for what the worker runs, and the worker polls no more.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(super) closed: bool,
}

/// One item of work: a `POST` to a server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ItemBody {
    pub(super) id: u64,
    pub(super) server: String,
    pub(super) route: String,
    /// Remaining time until the deadline.
    pub(super) timeout_ms: u64,
    pub(super) reply_bytes_max: usize,
    /// The item can run twice without harm.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(super) repeatable: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) traceparent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) content_type: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) metadata: Vec<(String, String)>,
    pub(super) segments: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde passes a reference.
fn is_false(value: &bool) -> bool {
    !value
}

/// Appends a message to the segments; returns its content type, unless it is JSON, and the number of segments.
pub(super) fn append(message: &Message, segments: &mut Vec<Bytes>) -> (Option<String>, usize) {
    let json = message.content_type == ContentType::Json;
    segments.push(message.head.to_bytes());
    segments.extend(message.segments.iter().cloned());
    ((!json).then(|| message.content_type.as_str().to_owned()), 1 + message.segments.len())
}

/// Takes the next message from the segments.
///
/// # Errors
/// `InvalidArgument` if there are too few segments.
pub(super) fn next(
    segments: &mut impl Iterator<Item = Bytes>,
    content_type: Option<&str>,
    count: usize,
) -> Result<Message> {
    let missing =
        || Error::invalid("the message has fewer segments than its JSON names; send each body as one segment");
    let head = segments.next().filter(|_| count > 0).ok_or_else(missing)?;
    let own: Vec<Bytes> = segments.by_ref().take(count - 1).collect();
    if own.len() + 1 < count {
        return Err(missing());
    }
    let content_type = content_type.map_or(ContentType::Json, ContentType::from_media_type);
    Ok(Message { content_type, head: head.into(), segments: own })
}

/// Returns the metadata without the call id and its wait. The worker's call to its server is one of its own, and an item is begun once.
pub(super) fn pairs(metadata: &Metadata) -> Vec<(String, String)> {
    let kept = metadata.iter().filter(|(name, _)| ![CALL_METADATA, CALL_WAIT_METADATA].contains(name));
    kept.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

pub(super) fn metadata(pairs: Vec<(String, String)>) -> Metadata {
    let mut metadata = Metadata::new();
    pairs.into_iter().for_each(|(name, value)| metadata.push(Cow::Owned(name), value));
    metadata
}

/// Returns the result of an item as its worker saw it.
pub(super) fn result(done: DoneBody, message: Message) -> Result<Response> {
    let response = Response { status: Status(done.status), metadata: metadata(done.metadata), message };
    match done.failed {
        false => Ok(response),
        true => Err(match response.into_result() {
            Err(error) => error,
            Ok(_) => Error::finished(Code::DataLoss, "the worker reported a failure without an error"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_bit_for_bit() {
        let with_segments = Message {
            content_type: ContentType::Text,
            head: "x".into(),
            segments: vec![Bytes::new(), Bytes::from_static(&[0, 255])],
        };
        let messages = [Message::json("{\"a\" : 1E5}"), with_segments, Message::json("")];
        let mut segments = Vec::new();
        let heads: Vec<_> = messages.iter().map(|message| append(message, &mut segments)).collect();
        let mut segments = segments.into_iter();
        for (message, (content_type, count)) in messages.iter().zip(heads) {
            assert_eq!(&next(&mut segments, content_type.as_deref(), count).unwrap(), message);
        }
        assert_eq!(next(&mut segments, None, 1).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(next(&mut [Bytes::new()].into_iter(), None, 0).unwrap_err().code(), Code::InvalidArgument);
    }
}
