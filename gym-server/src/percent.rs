//! Percent-encoding of URLs (RFC 3986, section 2.1), read.

use std::borrow::Cow;

/// The text behind `%20` and its like. A `%` without two hexadecimal digits stands for itself, and bytes that are no UTF-8
/// leave the text as it was written.
pub(crate) fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = (*first == b'%').then(|| tail.get(..2)).flatten().and_then(|pair| {
            let digit = |byte: u8| char::from(byte).to_digit(16);
            u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok()
        });
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8(bytes).map_or(Cow::Borrowed(text), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_become_the_text_they_stand_for() {
        for (written, meant) in [
            ("plain", "plain"),
            ("get%20weather", "get weather"),
            ("%C3%A9t%c3%a9", "été"),
            ("a%2Fb", "a/b"),
            ("100%", "100%"),
            ("%zz%2", "%zz%2"),
            ("%ff", "%ff"),
        ] {
            assert_eq!(decoded(written), meant);
        }
    }
}
