//! Rewards that are no JSON.

/// Returns the reward of a row that is no JSON because Python's `json` wrote `NaN`, `Infinity` or `-Infinity` for it. A reader of JSON rejects the
/// row, and would blame its text.
#[must_use]
pub fn non_finite_reward(row: &[u8]) -> Option<&'static str> {
    const KEY: &[u8] = b"\"reward\"";
    memchr::memmem::find_iter(row, KEY).find_map(|at| {
        let value = row[at + KEY.len()..].trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
        ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| value.starts_with(word.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_words_of_python_are_found_and_only_for_the_reward() {
        for (row, found) in [
            (r#"{"reward": NaN}"#, Some("NaN")),
            ("{\"a\": 1, \"reward\" \n: -Infinity, \"b\": 2}", Some("-Infinity")),
            (r#"{"reward":Infinity}"#, Some("Infinity")),
            (r#"{"note": "reward", "reward":NaN}"#, Some("NaN")),
            (r#"{"reward": "NaN"}"#, None),
            (r#"{"reward": 1, "score": NaN}"#, None),
            (r#"{"reward""#, None),
            ("", None),
        ] {
            assert_eq!(non_finite_reward(row.as_bytes()), found, "{row}");
        }
    }
}
