//! Prefix breaks: turns whose prompt does not begin with the token ids that the model read and wrote in the turn before.
//!
//! A trainer that joins the turns of an episode to one sequence needs this. A chat template breaks it where it writes a response again in
//! other words: `"quantity":15` of a tool call becomes `"quantity": 15`.

use bytes::Bytes;
use gym_core::RawObject;
use serde_json::value::RawValue;

/// Keys of the item of a response with the token ids.
const PROMPT_IDS: &str = "prompt_token_ids";
const GENERATION_IDS: &str = "generation_token_ids";

/// The token ids of the last turn of each model.
#[derive(Debug, Default)]
pub(super) struct PrefixIds(Vec<(String, TurnIds)>);

/// The token ids of one turn, as JSON lists.
#[derive(Debug)]
struct TurnIds {
    prompt: Bytes,
    generation: Bytes,
}

impl PrefixIds {
    /// Adds a turn of a model. Returns `true` if its prompt does not begin with prompt and generation of the model's turn before; `None` if one of
    /// both turns has no ids.
    pub(super) fn add(&mut self, model: &str, response: &RawObject) -> Option<bool> {
        let at = self.0.iter().position(|(known, _)| known == model);
        let last = at.map(|at| self.0.swap_remove(at).1);
        let next = TurnIds::of(response)?;
        let breaks = last.and_then(|last| last.continued_by(&next.prompt)).map(|continued| !continued);
        self.0.push((model.to_owned(), next));
        breaks
    }
}

impl TurnIds {
    /// Returns the ids of the last item that has them.
    fn of(response: &RawObject) -> Option<Self> {
        let output = response.get("output")?;
        memchr::memmem::find(&output, PROMPT_IDS.as_bytes())?;
        let items: Vec<&RawValue> = serde_json::from_slice(&output).ok()?;
        items.into_iter().rev().find_map(|item| {
            let item = RawObject::parse(output.slice_ref(item.get().as_bytes())).ok()?;
            Some(Self { prompt: item.get(PROMPT_IDS)?, generation: item.get(GENERATION_IDS)? })
        })
    }

    /// Returns `true` if a prompt begins with these ids; `None` if one of the lists is none of ids.
    fn continued_by(&self, prompt: &[u8]) -> Option<bool> {
        // An engine writes the same ids in the same way, so most of them are compared as one text.
        let same = self.prompt.strip_suffix(b"]").filter(|same| prompt.starts_with(same)).map_or(0, <[u8]>::len);
        // The text may end within an id.
        let same = self.prompt[..same].iter().rposition(|byte| *byte == b',').unwrap_or(0);
        let mut next = Ids(prompt.get(same..)?);
        for list in [&self.prompt[same..], &self.generation[..]] {
            let mut ids = Ids(list);
            while let Some(id) = ids.next()? {
                if next.next()? != Some(id) {
                    return Some(false);
                }
            }
        }
        Some(true)
    }
}

/// The rest of a list of natural numbers.
struct Ids<'a>(&'a [u8]);

impl<'a> Ids<'a> {
    /// Takes the next id; `Some(None)` at the end, and `None` if the list has something else.
    fn next(&mut self) -> Option<Option<&'a [u8]>> {
        let separator = |byte: &u8| byte.is_ascii_whitespace() || matches!(byte, b'[' | b',' | b']');
        let start = self.0.iter().position(|byte| !separator(byte)).unwrap_or(self.0.len());
        let rest = &self.0[start..];
        let end = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
        let (id, rest) = rest.split_at(end);
        self.0 = rest;
        match (id.is_empty(), rest.first()) {
            (true, None) => Some(None),
            (false, after) if after.is_none_or(separator) => Some(Some(id)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn response(item: &serde_json::Value) -> RawObject {
        let output = json!([{"type": "reasoning"}, item, {"type": "function_call_output"}]);
        RawObject::parse(json!({"output": output}).to_string()).unwrap()
    }

    fn turn(prompt: &[u32], generation: &[u32]) -> RawObject {
        response(&json!({"type": "message", "prompt_token_ids": prompt, "generation_token_ids": generation}))
    }

    #[test]
    fn a_turn_without_ids_is_compared_with_no_other() {
        let mut ids = PrefixIds::default();
        assert_eq!(ids.add("m", &turn(&[1, 2], &[3])), None);
        assert_eq!(ids.add("m", &turn(&[1, 2, 3, 4], &[5])), Some(false));
        assert_eq!(ids.add("m", &turn(&[1, 2, 3, 4], &[5])), Some(true));
        assert_eq!(ids.add("m", &turn(&[1, 2, 3, 4, 55], &[6])), Some(true));
        assert_eq!(ids.add("m", &response(&json!({"type": "message"}))), None);
        assert_eq!(ids.add("m", &turn(&[9], &[])), None);
        assert_eq!(ids.add("m", &turn(&[9], &[7])), Some(false));
        // Another model has a conversation of its own.
        assert_eq!(ids.add("judge", &turn(&[1], &[2])), None);
        assert_eq!(ids.add("m", &turn(&[9, 7, 8], &[])), Some(false));
        assert_eq!(ids.add("judge", &turn(&[1, 3], &[2])), Some(true));
    }

    #[test]
    fn lists_that_are_not_of_ids_are_not_compared() {
        for wrong in [json!([1.5]), json!(["1"]), json!([-1]), json!([[1], null]), json!(null), json!({"a": 1})] {
            let mut ids = PrefixIds::default();
            let item = json!({"type": "message", "prompt_token_ids": [1], "generation_token_ids": wrong});
            assert_eq!(ids.add("m", &response(&item)), None);
            assert_eq!(ids.add("m", &turn(&[1, 1], &[2])), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn ids_are_compared_as_numbers_whatever_the_whitespace(
            prompt in prop::collection::vec(0..40_u32, 0..12),
            generation in prop::collection::vec(0..40_u32, 0..12),
            next in prop::collection::vec(0..40_u32, 0..6),
            change in prop::option::of((any::<prop::sample::Index>(), 0..40_u32)),
            spaced: [bool; 3],
        ) {
            let text = |ids: &[u32], spaced: bool| {
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                Bytes::from(if spaced { format!("[ {}\n]", ids.join(" , ")) } else { format!("[{}]", ids.join(",")) })
            };
            let whole = [&prompt[..], &generation[..]].concat();
            let mut later = [&whole[..], &next[..]].concat();
            if let Some((at, id)) = change.filter(|_| !later.is_empty()) {
                let at = at.index(later.len());
                later[at] = id;
                later.truncate(later.len() - usize::from(id % 2 == 0));
            }
            let turn = TurnIds { prompt: text(&prompt, spaced[0]), generation: text(&generation, spaced[1]) };
            prop_assert_eq!(turn.continued_by(&text(&later, spaced[2])), Some(later.starts_with(&whole)));
        }
    }
}
