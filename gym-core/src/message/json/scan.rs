//! Finds the top-level keys of a JSON object in one pass, checking the grammar of everything on the way.
//!
//! Every hop indexes every row, so the scan is on the path of each request. It costs a third of a general parser that ignores
//! values. The scan leaves three cases to the general parser: escaped keys, more than 64 levels, and every error. The result of
//! the general parser is final, and its errors contain the position.

use std::ops::Range;

/// A top-level key and the range of its value. Ranges are positions in the skeleton if there is one, otherwise in the text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Field {
    pub(super) key: Key,
    pub(super) value: Range<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Key {
    /// Without escapes: a range of the skeleton.
    Plain(Range<usize>),
    Decoded(Box<str>),
}

impl Key {
    /// Returns the UTF-8 of the key. Most uses compare keys, which needs no check that the bytes are UTF-8.
    pub(super) fn bytes<'a>(&'a self, indexed: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Plain(range) => &indexed[range.clone()],
            Self::Decoded(key) => key.as_bytes(),
        }
    }

    /// Returns the key in a text in which the bytes at `from` are at `to`.
    pub(super) fn moved(&self, from: usize, to: usize) -> Self {
        match self {
            // Wrapping: the positions in a large text are not used and may have any value.
            Self::Plain(range) => {
                let moved = |at: usize| at.wrapping_sub(from).wrapping_add(to);
                Self::Plain(moved(range.start)..moved(range.end))
            }
            Self::Decoded(key) => Self::Decoded(key.clone()),
        }
    }
}

/// Maximum nesting: one bit of a word per level, list or object.
const DEPTH_MAX: u32 = 64;

/// Returns the members of an object, in order; `None` if the general parser must decide.
pub(super) fn members(text: &[u8]) -> Option<Vec<Field>> {
    // Once for all strings: one vectorized pass over the text is cheaper than one for each string.
    std::str::from_utf8(text).ok()?;
    let mut scan = Scan { text, at: 0 };
    let mut members = Vec::with_capacity(16);
    scan.blanks();
    scan.eat(b'{')?;
    scan.blanks();
    if scan.eat(b'}').is_none() {
        loop {
            let start = scan.at + 1;
            let plain = scan.string()?;
            let key = start..scan.at - 1;
            if !plain {
                return None;
            }
            scan.blanks();
            scan.eat(b':')?;
            scan.blanks();
            let value = scan.at;
            scan.value()?;
            members.push(Field { key: Key::Plain(key), value: value..scan.at });
            scan.blanks();
            if scan.eat(b',').is_none() {
                scan.eat(b'}')?;
                break;
            }
            scan.blanks();
        }
    }
    scan.blanks();
    (scan.at == text.len()).then_some(members)
}

/// Returns `true` if the text is one JSON value, from its first byte to its last; `false` also if the general parser must decide.
pub(super) fn is_value(text: &[u8]) -> bool {
    let mut scan = Scan { text, at: 0 };
    let starts = text.first().is_some_and(|byte| !byte.is_ascii_whitespace());
    starts && std::str::from_utf8(text).is_ok() && scan.value().is_some() && scan.at == text.len()
}

/// Returns `true` if a text needs no escape between quotes.
pub(super) fn is_plain(text: &str) -> bool {
    plain_length(text.as_bytes()) == text.len()
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn eat(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    /// Scans a string with its quotes; returns `true` if it has no escape.
    fn string(&mut self) -> Option<bool> {
        self.eat(b'"')?;
        let mut plain = true;
        loop {
            self.at += plain_length(&self.text[self.at..]);
            match self.peek()? {
                b'"' => {
                    self.at += 1;
                    return Some(plain);
                }
                b'\\' => {
                    plain = false;
                    let escaped = *self.text.get(self.at + 1)?;
                    self.at += 2;
                    match escaped {
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => {}
                        b'u' => {
                            let digits = self.text.get(self.at..self.at + 4)?;
                            if !digits.iter().all(u8::is_ascii_hexdigit) {
                                return None;
                            }
                            self.at += 4;
                        }
                        _ => return None,
                    }
                }
                _ => return None,
            }
        }
    }

    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    fn number(&mut self) -> Option<()> {
        let _ = self.eat(b'-');
        if self.eat(b'0').is_none() {
            self.digits()?;
        }
        if self.eat(b'.').is_some() {
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Some(())
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        self.text[self.at..].starts_with(word).then(|| self.at += word.len())
    }

    /// Scans a key of an inner object and its colon.
    fn key(&mut self) -> Option<()> {
        self.blanks();
        self.string()?;
        self.blanks();
        self.eat(b':')
    }

    /// Scans any value, without recursion, so that no text can exhaust the stack.
    fn value(&mut self) -> Option<()> {
        // One bit for each open level, the innermost lowest: 1 for an object.
        let (mut depth, mut objects) = (0_u32, 0_u64);
        loop {
            self.blanks();
            match self.peek()? {
                b'"' => drop(self.string()?),
                open @ (b'{' | b'[') => {
                    self.at += 1;
                    self.blanks();
                    // The closing bracket lies two after the opening one, in ASCII, for both.
                    if self.eat(open + 2).is_none() {
                        if depth == DEPTH_MAX {
                            return None;
                        }
                        depth += 1;
                        objects = objects << 1 | u64::from(open == b'{');
                        if open == b'{' {
                            self.key()?;
                        }
                        continue;
                    }
                }
                b't' => self.word(b"true")?,
                b'f' => self.word(b"false")?,
                b'n' => self.word(b"null")?,
                b'-' | b'0'..=b'9' => self.number()?,
                _ => return None,
            }
            loop {
                if depth == 0 {
                    return Some(());
                }
                self.blanks();
                let object = objects & 1 == 1;
                if self.eat(b',').is_some() {
                    if object {
                        self.key()?;
                    }
                    break;
                }
                self.eat(if object { b'}' } else { b']' })?;
                depth -= 1;
                objects >>= 1;
            }
        }
    }
}

/// Returns the number of leading bytes that are neither quote, backslash nor control character: eight bytes at a time.
fn plain_length(text: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = ONES << 7;
    let mut at = 0;
    let (chunks, _) = text.as_chunks::<8>();
    for chunk in chunks {
        let bytes = u64::from_le_bytes(*chunk);
        // A borrow can only mark bytes above one that is correctly marked, and only the lowest mark is used.
        let below = |bytes: u64, bound: u64| bytes.wrapping_sub(ONES * bound) & !bytes;
        let quote = bytes ^ (ONES * u64::from(b'"'));
        let backslash = bytes ^ (ONES * u64::from(b'\\'));
        let marked = (below(bytes, 0x20) | below(quote, 1) | below(backslash, 1)) & HIGHS;
        if marked != 0 {
            return at + (marked.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    at + text[at..].iter().take_while(|byte| !matches!(byte, b'"' | b'\\' | 0..0x20)).count()
}

/// Appends a text as a JSON string.
pub fn push_json_string(into: &mut String, text: &str) {
    // Nearly every key is identical to its JSON form.
    if is_plain(text) {
        into.push('"');
        into.push_str(text);
        into.push('"');
    } else {
        into.push_str(&serde_json::Value::from(text).to_string());
    }
}

/// Returns a text as a JSON string.
#[must_use]
pub fn json_string(text: &str) -> String {
    let mut string = String::with_capacity(text.len() + 2);
    push_json_string(&mut string, text);
    string
}

/// Returns the length of the JSON string at the start of a text, with its quotes; all of the text if the string does not end.
#[must_use]
pub fn json_string_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}
