//! Replaces named fields of a JSON object and leaves every other byte unchanged.
//!
//! Rows contain numbers that parsers do not preserve (`1E5`, 23-digit integers) and unknown fields, so a parsed and
//! reprinted row would differ. `RawObject::edit` does the same for messages. This module works on [`JsonFields`], which
//! borrow from a line, and writes to a reused buffer.

use gym_core::message::push_json_string;
use gym_core::rollout::metrics::JsonFields;

/// Fields to set, in the order in which Python would set them in a dict. A key that is set twice keeps its first
/// position.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemberEdits<'a> {
    sets: Vec<(&'a str, &'a str)>,
}

impl<'a> MemberEdits<'a> {
    pub(crate) fn set(&mut self, key: &'a str, value: &'a str) {
        match self.sets.iter_mut().find(|(other, _)| *other == key) {
            Some(set) => set.1 = value,
            None => self.sets.push((key, value)),
        }
    }

    /// Appends the object `text`, whose fields are `members`, with the edits applied. Existing keys keep their
    /// position; new keys follow at the end.
    pub(crate) fn apply(&self, text: &str, members: &JsonFields<'_>, into: &mut String) {
        let mut replaced: Vec<(usize, usize, &str)> = Vec::new();
        let mut added: Vec<(&str, &str)> = Vec::new();
        for (key, value) in &self.sets {
            match members.get(key) {
                Some(old) => {
                    // Both slices lie in the same string, so the difference of the pointers is the value's offset.
                    let start = old.as_ptr() as usize - text.as_ptr() as usize;
                    replaced.push((start, start + old.len(), value));
                }
                None => added.push((key, value)),
            }
        }
        replaced.sort_unstable_by_key(|(start, _, _)| *start);
        let end = text.rfind('}').map_or(text.len(), |brace| text[..brace].trim_end().len());
        let mut done = 0;
        for (start, stop, value) in replaced {
            into.push_str(&text[done..start]);
            into.push_str(value);
            done = stop;
        }
        into.push_str(&text[done..end]);
        let mut empty = members.is_empty();
        for (key, value) in added {
            if !empty {
                into.push(',');
            }
            empty = false;
            push_json_string(into, key);
            into.push(':');
            into.push_str(value);
        }
        into.push('}');
    }

    pub(crate) fn applied(&self, text: &str, members: &JsonFields<'_>) -> String {
        let mut out = String::with_capacity(text.len() + 64);
        self.apply(text, members, &mut out);
        out
    }
}

/// Returns `text` as a JSON string.
pub(crate) fn json_string(text: &str) -> String {
    let mut string = String::with_capacity(text.len() + 2);
    push_json_string(&mut string, text);
    string
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn edited(text: &str, sets: &[(&str, &str)]) -> String {
        let members = JsonFields::parse(text).unwrap();
        let mut edits = MemberEdits::default();
        for (key, value) in sets {
            edits.set(key, value);
        }
        edits.applied(text, &members)
    }

    #[test]
    fn untouched_text_stays_bit_for_bit() {
        let text = r#"{ "n" : 1E5, "a":12345678901234567890123 ,"u":"\u00e9", "b":{"c":[ ]} }"#;
        assert_eq!(
            edited(text, &[("a", "1"), ("z", "2"), ("z", "3")]),
            r#"{ "n" : 1E5, "a":1 ,"u":"\u00e9", "b":{"c":[ ]},"z":3}"#
        );
        assert_eq!(edited("{ }", &[("z", "2"), ("y", "[]")]), r#"{"z":2,"y":[]}"#);
    }

    #[test]
    fn of_a_repeated_key_the_value_that_counts_is_replaced() {
        assert_eq!(edited(r#"{"a":1,"b":2,"a":3}"#, &[("a", "9")]), r#"{"a":1,"b":2,"a":9}"#);
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            ".{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(2, 8, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Into::into),
                proptest::collection::vec((".{0,4}", inner), 0..3)
                    .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn editing_changes_only_what_is_named(
            members in proptest::collection::vec(("[a-e\\\\\"é😀]{0,3}", json()), 0..6),
            sets in proptest::collection::vec(("[a-e\\\\\"é😀]{0,3}", json()), 0..4),
            pretty in any::<bool>(),
        ) {
            let mut expected: serde_json::Map<String, serde_json::Value> = members.into_iter().collect();
            let value = serde_json::Value::Object(expected.clone());
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let sets: Vec<_> = sets.into_iter().map(|(key, value)| (key, value.to_string())).collect();
            let borrowed: Vec<_> = sets.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            for (key, value) in &sets {
                expected.insert(key.clone(), serde_json::from_str(value).unwrap());
            }
            let got = edited(&text, &borrowed);
            // Compared as serialized JSON, so that key order counts.
            let got: serde_json::Value = serde_json::from_str(&got).unwrap();
            prop_assert_eq!(got.to_string(), serde_json::Value::Object(expected).to_string());
        }
    }
}
