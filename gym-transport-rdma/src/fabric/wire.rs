//! What stands before the header of every active message.
//!
//! ```text
//! receiver u64 | sequence u64 | version u8 | kind u8 | header length u16 | reserved u32 | header
//! ```
//!
//! Little endian. `receiver` is the id that the receiving end made up; `sequence` counts the ordered messages of one
//! direction from 0, and is 0 in the others. A hello's header is the token and the sender's own id.

use super::{ConnectionId, HEADER_BYTES_MAX, Token};
use crate::ucx::HEADER_ROOM;

/// The id of UCX's active messages that are ours.
pub(super) const MESSAGE_ID: u16 = 0x67;

const VERSION: u8 = 1;
pub(super) const PREFIX_BYTES: usize = 24;
const _: () = assert!(PREFIX_BYTES + HEADER_BYTES_MAX == HEADER_ROOM);

/// What a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The calling end's first, with its token.
    Hello = 1,
    /// The answering end's first; ordered.
    Welcome = 2,
    /// A parcel; ordered.
    Parcel = 3,
    /// A parcel outside of the order.
    Urgent = 4,
    /// Nothing more will be posted; ordered.
    Bye = 5,
    /// Everything up to the peer's goodbye has come; ordered.
    Gone = 6,
    /// The sender has broken it off. Only where UCX does not tell.
    Broken = 7,
    /// The connection is over for the sender, and nothing of it is under way there. Only between berths.
    Last = 8,
    /// The sender's worker is destroyed next, although nothing was agreed: nothing more is read or written there. Only between berths.
    Destroyed = 9,
}

/// The prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Prefix {
    pub(super) receiver: ConnectionId,
    pub(super) sequence: u64,
    pub(super) kind: Kind,
}

impl Prefix {
    /// Prefix and header in one piece, and how much of it there is. The header's length was checked by the caller.
    pub(super) fn encode(self, header: &[u8]) -> ([u8; HEADER_ROOM], usize) {
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

    /// `None` when it is not ours, of another version, or not as long as it says.
    pub(super) fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (prefix, header) = message.split_at_checked(PREFIX_BYTES)?;
        let u64_at = |at: usize| Some(u64::from_le_bytes(prefix.get(at..at + 8)?.try_into().ok()?));
        let kind = match prefix[17] {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Parcel,
            4 => Kind::Urgent,
            5 => Kind::Bye,
            6 => Kind::Gone,
            7 => Kind::Broken,
            8 => Kind::Last,
            9 => Kind::Destroyed,
            _ => return None,
        };
        let length = usize::from(u16::from_le_bytes([prefix[18], prefix[19]]));
        if prefix[16] != VERSION || length != header.len() || length > HEADER_BYTES_MAX {
            return None;
        }
        Some((Self { receiver: ConnectionId(u64_at(0)?), sequence: u64_at(8)?, kind }, header))
    }
}

/// A hello's header.
pub(super) fn hello(token: &Token, own: ConnectionId) -> [u8; Token::BYTES + 8] {
    let mut bytes = [0; Token::BYTES + 8];
    bytes[..Token::BYTES].copy_from_slice(&token.0);
    bytes[Token::BYTES..].copy_from_slice(&own.0.to_le_bytes());
    bytes
}

/// The token that was shown, and the id of the one who shows it.
pub(super) fn read_hello(header: &[u8]) -> Option<(&[u8], ConnectionId)> {
    let (token, own) = header.split_at_checked(Token::BYTES)?;
    Some((token, ConnectionId(u64::from_le_bytes(own.try_into().ok()?))))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        use Kind::{Broken, Bye, Destroyed, Gone, Hello, Last, Parcel, Urgent, Welcome};
        prop::sample::select(vec![Hello, Welcome, Parcel, Urgent, Bye, Gone, Broken, Last, Destroyed])
    }

    proptest! {
        #[test]
        fn a_message_comes_back_as_it_went(
            receiver in any::<u64>(), sequence in any::<u64>(), kind in kinds(),
            header in prop::collection::vec(any::<u8>(), 0..=HEADER_BYTES_MAX),
        ) {
            let prefix = Prefix { receiver: ConnectionId(receiver), sequence, kind };
            let (bytes, length) = prefix.encode(&header);
            prop_assert_eq!(Prefix::decode(&bytes[..length]), Some((prefix, &header[..])));
            prop_assert_eq!(Prefix::decode(&bytes[..length - 1]), None, "cut short");
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some((_, header)) = Prefix::decode(&bytes) {
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
