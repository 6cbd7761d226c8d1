//! Elision of the training arrays from a large JSON text before it is parsed.
//!
//! A rollout of 64k tokens is 1.2 MB, nearly all of it digits under keys that end in `_token_ids` or `_log_probs`. A vectorized
//! search for those arrays, and a parse of only the rest, costs a seventh of parsing everything.
//!
//! The result is correct for two reasons:
//!
//! - Inside a JSON string, a quote is always escaped. The bytes `s"` can therefore only end a key or a whole string, and a whole
//!   string is never followed by a colon.
//! - An elision contains only digits, signs, dots, exponents, commas and white space, between a `[` and the next `]`. All other
//!   arrays are kept and parsed.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// For a shorter text, the search costs more than the parse that it saves.
const BYTES_MIN: usize = 16 << 10;

/// A text without the contents of its training arrays, and the positions of those contents.
#[derive(Clone, Debug)]
pub(super) struct ElidedJson {
    skeleton: Bytes,
    elisions: Arc<[Elision]>,
    /// The elisions within this slice. The two fields below are subtracted from their `at` and `removed`.
    range: Range<usize>,
    skeleton_start: usize,
    removed_before: usize,
}

#[derive(Clone, Copy, Debug)]
struct Elision {
    /// Position in the whole skeleton of the byte that follows the elision.
    at: usize,
    /// Total bytes removed by this elision and all before it.
    removed: usize,
}

impl ElidedJson {
    /// Elides a large text; returns `None` if the text is small or has no training array.
    pub(super) fn of(text: &[u8]) -> Option<Self> {
        if text.len() < BYTES_MIN {
            return None;
        }
        let mut skeleton = BytesMut::new();
        let mut elisions = Vec::new();
        let (mut copied, mut removed) = (0, 0);
        for inside in arrays(text) {
            skeleton.extend_from_slice(&text[copied..inside.start]);
            copied = inside.end;
            removed += inside.len();
            elisions.push(Elision { at: skeleton.len(), removed });
        }
        if elisions.is_empty() {
            return None;
        }
        skeleton.extend_from_slice(&text[copied..]);
        let range = 0..elisions.len();
        Some(Self {
            skeleton: skeleton.freeze(),
            elisions: elisions.into(),
            range,
            skeleton_start: 0,
            removed_before: 0,
        })
    }

    /// Returns the text without the contents of the arrays.
    pub(super) fn skeleton(&self) -> &Bytes {
        &self.skeleton
    }

    /// Returns the position in the text of a position in the skeleton.
    pub(super) fn original(&self, position: usize) -> usize {
        let elisions = &self.elisions[self.range.clone()];
        let before = elisions.partition_point(|elision| elision.at <= position + self.skeleton_start);
        let removed = before.checked_sub(1).map_or(self.removed_before, |last| elisions[last].removed);
        position + removed - self.removed_before
    }

    /// Returns the elided form of one value of the text, given its range in the skeleton.
    pub(super) fn slice(&self, value: &Range<usize>) -> Self {
        let elisions = &self.elisions[self.range.clone()];
        let (start, end) = (value.start + self.skeleton_start, value.end + self.skeleton_start);
        let first = elisions.partition_point(|elision| elision.at <= start);
        let last = elisions.partition_point(|elision| elision.at < end);
        Self {
            skeleton: self.skeleton.slice(value.clone()),
            elisions: Arc::clone(&self.elisions),
            range: self.range.start + first..self.range.start + last.max(first),
            skeleton_start: start,
            removed_before: first.checked_sub(1).map_or(self.removed_before, |before| elisions[before].removed),
        }
    }
}

/// Returns the contents of the training arrays, in order. Searches for the underscore in their keys: arrays have none, so one
/// search skips each array.
fn arrays(text: &[u8]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = memchr(b'_', &text[from..]) {
        let key = &text[from + at..];
        from += at + 1;
        let ending = ["_token_ids\"", "_log_probs\""].into_iter().find(|ending| key.starts_with(ending.as_bytes()));
        let Some(ending) = ending else { continue };
        from += ending.len() - 1;
        let Some(start) = array_start(text, from) else { continue };
        let Some(length) = memchr(b']', &text[start..]) else { break };
        let inside = start..start + length;
        if is_numeric(&text[inside.clone()]) {
            from = inside.end;
            if !inside.is_empty() {
                found.push(inside);
            }
        }
    }
    found
}

/// Returns the position after `: [`, if these tokens come next.
fn array_start(text: &[u8], mut at: usize) -> Option<usize> {
    for expected in [b':', b'['] {
        while text.get(at)?.is_ascii_whitespace() {
            at += 1;
        }
        if text[at] != expected {
            return None;
        }
        at += 1;
    }
    Some(at)
}

/// Returns `true` if there are only bytes of numbers, commas and white space. Nearly all blocks have only digits, signs, dots,
/// commas and blanks. They need three comparisons, without an early exit, so that the code vectorizes.
fn is_numeric(bytes: &[u8]) -> bool {
    let is_rare = |byte: &u8| matches!(byte, b'e' | b'E' | b'\n' | b'\t' | b'\r');
    // Between the plus sign and the nine, only one character occurs in no number.
    let is_usual = |byte: &u8| ((b'+'..=b'9').contains(byte) & (*byte != b'/')) | (*byte == b' ');
    let (blocks, rest) = bytes.as_chunks::<64>();
    let usual = |block: &[u8; 64]| block.iter().fold(0, |wrong, byte| wrong | u8::from(!is_usual(byte))) == 0;
    let slowly = |bytes: &[u8]| bytes.iter().all(|byte| is_usual(byte) || is_rare(byte));
    blocks.iter().all(|block| usual(block) || slowly(block)) && slowly(rest)
}

#[cfg(test)]
mod tests {
    use super::is_numeric;

    #[test]
    fn numbers_commas_and_white_space_are_numeric_wherever_they_are_and_nothing_else_is() {
        for at in 0..130 {
            for byte in 0..=u8::MAX {
                let mut text = vec![b'7'; 130];
                text[at] = byte;
                let numeric = byte.is_ascii_digit() || b"+-.,eE \n\t\r".contains(&byte);
                assert_eq!(is_numeric(&text), numeric, "{byte} at {at}");
            }
        }
    }
}
