//! Prefix of every active message, in front of the header.
//!
//! ```text
//! receiver u64 | sequence u64 | version u8 | kind u8 | header length u16 | reserved u32 | header
//! ```
//!
//! Little endian. `receiver` is the id that the receiving end chose. `sequence` counts the ordered messages of one
//! direction from 0, and is 0 in all others. The header of a hello consists of the token and the sender's own id.

use crate::fabric::protocol::identity::{ConnectionId, Token};
use crate::ucx::HEADER_ROOM;

/// Maximum length of the header of an [`ActiveMessage`](crate::fabric::ActiveMessage). It is sent with its payload and
/// copied once.
pub const HEADER_BYTES_MAX: usize = 104;

/// Maximum length of the payload of an urgent message, which is always sent eagerly.
pub const URGENT_BYTES_MAX: usize = 4096;

/// Id of this crate's active messages within UCX.
pub(crate) const MESSAGE_ID: u16 = 0x67;

const VERSION: u8 = 1;
pub(crate) const PREFIX_BYTES: usize = 24;
const _: () = assert!(PREFIX_BYTES + HEADER_BYTES_MAX == HEADER_ROOM);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MessageKind {
    /// First message of the calling end, with its token.
    Hello = 1,
    /// First message of the answering end; ordered.
    Welcome = 2,
    /// Ordered message of a caller.
    Ordered = 3,
    /// Urgent message of a caller.
    Urgent = 4,
    /// The sender posts no more messages; ordered.
    Close = 5,
    /// The sender has received everything up to the peer's `Close`; ordered.
    Closed = 6,
    /// The sender has aborted the connection. Used where UCX does not report it.
    Aborted = 7,
    /// The sender has no operation in flight on an ended connection. Only between peer workers.
    Finished = 8,
    /// The sender destroys its worker next, without agreement, and reads and writes no more. Only between peer workers.
    WorkerDestroyed = 9,
}

/// A decoded prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MessagePrefix {
    pub(crate) receiver: ConnectionId,
    pub(crate) sequence: u64,
    pub(crate) kind: MessageKind,
}

impl MessagePrefix {
    /// Returns prefix and header as contiguous bytes, and their length. The caller has checked the header's length.
    pub(crate) fn encode(self, header: &[u8]) -> ([u8; HEADER_ROOM], usize) {
        let mut bytes = [0; HEADER_ROOM];
        bytes[..8].copy_from_slice(&self.receiver.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16] = VERSION;
        bytes[17] = self.kind as u8;
        let length = u16::try_from(header.len()).expect("at most HEADER_BYTES_MAX");
        bytes[18..20].copy_from_slice(&length.to_le_bytes());
        bytes[PREFIX_BYTES..PREFIX_BYTES + header.len()].copy_from_slice(header);
        (bytes, PREFIX_BYTES + header.len())
    }

    /// Decodes a prefix. Returns `None` if the kind is unknown, the version differs, or the length is wrong.
    pub(crate) fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (prefix, header) = message.split_at_checked(PREFIX_BYTES)?;
        let u64_at = |at: usize| Some(u64::from_le_bytes(prefix.get(at..at + 8)?.try_into().ok()?));
        let kind = match prefix[17] {
            1 => MessageKind::Hello,
            2 => MessageKind::Welcome,
            3 => MessageKind::Ordered,
            4 => MessageKind::Urgent,
            5 => MessageKind::Close,
            6 => MessageKind::Closed,
            7 => MessageKind::Aborted,
            8 => MessageKind::Finished,
            9 => MessageKind::WorkerDestroyed,
            _ => return None,
        };
        let length = usize::from(u16::from_le_bytes([prefix[18], prefix[19]]));
        if prefix[16] != VERSION || length != header.len() || length > HEADER_BYTES_MAX {
            return None;
        }
        Some((Self { receiver: ConnectionId(u64_at(0)?), sequence: u64_at(8)?, kind }, header))
    }
}

/// Returns the header of a hello.
pub(crate) fn hello(token: &Token, own: ConnectionId) -> [u8; Token::BYTES + 8] {
    let mut bytes = [0; Token::BYTES + 8];
    bytes[..Token::BYTES].copy_from_slice(&token.0);
    bytes[Token::BYTES..].copy_from_slice(&own.0.to_le_bytes());
    bytes
}

/// Returns the token of a hello and the sender's own id.
pub(crate) fn read_hello(header: &[u8]) -> Option<(&[u8], ConnectionId)> {
    let (token, own) = header.split_at_checked(Token::BYTES)?;
    Some((token, ConnectionId(u64::from_le_bytes(own.try_into().ok()?))))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = MessageKind> {
        use MessageKind::{Aborted, Close, Closed, Finished, Hello, Ordered, Urgent, Welcome, WorkerDestroyed};
        prop::sample::select(vec![Hello, Welcome, Ordered, Urgent, Close, Closed, Aborted, Finished, WorkerDestroyed])
    }

    proptest! {
        #[test]
        fn a_message_comes_back_as_it_went(
            receiver in any::<u64>(), sequence in any::<u64>(), kind in kinds(),
            header in prop::collection::vec(any::<u8>(), 0..=HEADER_BYTES_MAX),
        ) {
            let prefix = MessagePrefix { receiver: ConnectionId(receiver), sequence, kind };
            let (bytes, length) = prefix.encode(&header);
            prop_assert_eq!(MessagePrefix::decode(&bytes[..length]), Some((prefix, &header[..])));
            prop_assert_eq!(MessagePrefix::decode(&bytes[..length - 1]), None, "cut short");
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some((_, header)) = MessagePrefix::decode(&bytes) {
                let _ = read_hello(header);
            }
        }
    }

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        let (token, own) = (Token::random(), ConnectionId::random());
        let header = hello(&token, own);
        let (shown, read) = read_hello(&header).unwrap();
        assert!(token.matches(shown) && read == own);
        assert!(read_hello(&header[..39]).is_none());
    }
}
