//! The reports of model servers about the turns of an episode, as one list: a response has only the report of its own turn.

use bytes::Bytes;
use gym_core::rollout::TURNS_KEY;
use gym_core::{ModelResponse, RawObject, Result};

/// The reports of the turns so far, as JSON text.
#[derive(Debug, Default)]
pub(super) struct TurnReports {
    turns: u32,
    /// The turns before the first report. Most model servers report nothing, and then nothing is written.
    silent: u32,
    /// The entries of the list, without brackets.
    entries: String,
}

impl TurnReports {
    /// Adds a response of the model. A turn without a report is an empty object, so that entries and turns have the same order.
    pub(super) fn add(&mut self, response: &RawObject) {
        self.turns += 1;
        let report = response.get(TURNS_KEY).filter(|list| list.starts_with(b"[")).map(|list| inside(&list));
        match report.as_deref().map(std::str::from_utf8) {
            Some(Ok(report)) if !report.is_empty() => {
                for _ in 0..std::mem::take(&mut self.silent) {
                    self.push("{}");
                }
                self.push(report);
            }
            _ if self.entries.is_empty() => self.silent += 1,
            _ => self.push("{}"),
        }
    }

    fn push(&mut self, entry: &str) {
        if !self.entries.is_empty() {
            self.entries.push(',');
        }
        self.entries.push_str(entry);
    }

    /// Returns the list of all turns; `None` if no turn has a report.
    pub(super) fn list(&self) -> Option<Bytes> {
        (!self.entries.is_empty()).then(|| format!("[{}]", self.entries).into())
    }

    /// Sets the list in the last response of an episode.
    pub(super) fn write(&self, response: ModelResponse) -> Result<ModelResponse> {
        match self.list() {
            // The only response of the model has it already.
            Some(_) if self.turns == 1 && response.0.contains(TURNS_KEY) => Ok(response),
            Some(list) => Ok(ModelResponse(response.0.edit().set(TURNS_KEY, list).to_object()?)),
            None => Ok(response),
        }
    }
}

/// Returns the text of a list without its brackets and the adjacent whitespace.
pub(super) fn inside(list: &Bytes) -> Bytes {
    let blank = |byte: &u8| byte.is_ascii_whitespace();
    let Some(text) = list.get(1..list.len().saturating_sub(1)) else { return Bytes::new() };
    let start = 1 + text.iter().take_while(|byte| blank(byte)).count();
    let end = list.len() - 1 - text.iter().rev().take_while(|byte| blank(byte)).count();
    if start < end { list.slice(start..end) } else { Bytes::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_and_turns_have_the_same_order() {
        let reported = |turns: &[&str]| {
            let mut reports = TurnReports::default();
            for turn in turns {
                reports.add(&RawObject::parse(format!("{{{turn}}}")).unwrap());
            }
            reports.list().map(|list| String::from_utf8(list.to_vec()).unwrap())
        };
        let (a, b) = (r#""_gym_turns":[{"a":1E5}]"#, r#""_gym_turns": [ {"b": "é"} ]"#);
        for (turns, expected) in [
            (&[a, b][..], Some(r#"[{"a":1E5},{"b": "é"}]"#)),
            (&["", "", a, "", b], Some(r#"[{},{},{"a":1E5},{},{"b": "é"}]"#)),
            (&[r#""_gym_turns":null"#, r#""_gym_turns":[]"#, r#""_gym_turns":3"#, a], Some(r#"[{},{},{},{"a":1E5}]"#)),
            (&["", ""], None),
            (&[a], Some(r#"[{"a":1E5}]"#)),
            (&[], None),
        ] {
            assert_eq!(reported(turns).as_deref(), expected, "{turns:?}");
        }
    }
}
