//! Decoding of a message prefix without a fabric.

use crate::fabric::protocol::prefix::{MessagePrefix, read_hello};

/// Decodes the header of a UCX active message, also as a hello, and encodes it again. Returns `None` if it is
/// malformed.
#[must_use]
pub fn read_prefix(bytes: &[u8]) -> Option<Vec<u8>> {
    let (prefix, header) = MessagePrefix::decode(bytes)?;
    if let Some((token, own)) = read_hello(header) {
        assert_eq!(token.len() + own.0.to_le_bytes().len(), header.len());
    }
    let (written, length) = prefix.encode(header);
    Some(written[..length].to_vec())
}
