//! The course of one episode: turns, tool calls and their errors, and whether a limit ended it.

use std::fmt::Write as _;

use serde::Serialize;

/// Metadata key of the response to `/run` with an [`EpisodeRecord`]. Collectors in other languages ignore it.
pub const EPISODE_METADATA: &str = "x-gym-episode";

/// Key of a scored row with the episode's course. NeMo Gym computes no metrics of keys that begin with `_`.
pub const EPISODE_KEY: &str = "_gym_episode";

/// Maximum bytes of a reason; the reasons of model servers are single words.
const REASON_BYTES_MAX: usize = 64;

/// The text before each count.
const COUNTS: [&str; 5] =
    ["{\"turns\":", ",\"tool_calls\":", ",\"tool_errors\":", ",\"tool_failures\":", ",\"outputs_cut\":"];
const TRUNCATED: &str = ",\"truncated\":";
const NOT_TRUNCATED: &str = ",\"truncated\":null}";

/// The usual bytes of a text, with room for what the collector adds.
const TEXT_BYTES: usize = 160;

/// The course of one episode, as its agent counted it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EpisodeRecord {
    /// Responses of the model.
    pub turns: u32,
    /// Tool calls of the model.
    pub tool_calls: u32,
    /// Tool calls whose error went to the model.
    pub tool_errors: u32,
    /// Those of `tool_errors` that the model did not cause.
    pub tool_failures: u32,
    /// Outputs of tools that were cut at their limit.
    pub outputs_cut: u32,
    /// The reason why the episode ended early; `None` if it ended by itself. `max_steps` is the limit of the agent, `environment` that
    /// of the environment; other reasons are those of the model's `incomplete_details`.
    pub truncated: Option<String>,
}

impl EpisodeRecord {
    /// Records that a limit ended the episode. Characters that a header cannot hold are replaced.
    pub fn truncate(&mut self, reason: &str) {
        let plain = |c: char| if is_plain(c) { c } else { '_' };
        self.truncated = Some(reason.chars().take(REASON_BYTES_MAX).map(plain).collect());
    }

    /// Returns the value of [`EPISODE_METADATA`]: a JSON object in ASCII.
    #[must_use]
    pub fn to_text(&self) -> String {
        // By hand, because each rollout pays for it: `format!` and serde cost some thousand instructions more in both directions.
        let mut text = String::with_capacity(TEXT_BYTES);
        for (key, count) in COUNTS.iter().zip(self.counts()) {
            text.push_str(key);
            match u8::try_from(count) {
                Ok(digit @ ..=9) => text.push(char::from(b'0' + digit)),
                // Writing to a string cannot fail.
                _ => drop(write!(text, "{count}")),
            }
        }
        match &self.truncated {
            Some(reason) => {
                text.push_str(TRUNCATED);
                text.push('"');
                text.push_str(reason);
                text.push_str("\"}");
            }
            None => text.push_str(NOT_TRUNCATED),
        }
        text
    }

    /// Returns the record of a text that [`EpisodeRecord::to_text`] wrote; `None` if it has another form.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let mut counts = [0; COUNTS.len()];
        let mut rest = text;
        for (key, count) in COUNTS.iter().zip(&mut counts) {
            rest = rest.strip_prefix(key)?;
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            // JSON has no leading zeros.
            if digits > 1 && rest.starts_with('0') {
                return None;
            }
            *count = rest[..digits].parse().ok()?;
            rest = &rest[digits..];
        }
        let [turns, tool_calls, tool_errors, tool_failures, outputs_cut] = counts;
        let mut record = Self { turns, tool_calls, tool_errors, tool_failures, outputs_cut, truncated: None };
        if rest != NOT_TRUNCATED {
            let reason = rest.strip_prefix(TRUNCATED)?.strip_prefix('"')?.strip_suffix("\"}")?;
            if reason.len() > REASON_BYTES_MAX || !reason.chars().all(is_plain) {
                return None;
            }
            record.truncated = Some(reason.to_owned());
        }
        Some(record)
    }

    fn counts(&self) -> [u32; COUNTS.len()] {
        [self.turns, self.tool_calls, self.tool_errors, self.tool_failures, self.outputs_cut]
    }
}

/// Characters of a reason that need no escape, neither in JSON nor in a header.
fn is_plain(c: char) -> bool {
    c.is_ascii_graphic() && !matches!(c, '"' | '\\')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_comes_back_as_it_was_written(counts: [u32; 5], reason: Option<String>) {
            let [turns, tool_calls, tool_errors, tool_failures, outputs_cut] = counts;
            let mut record =
                EpisodeRecord { turns, tool_calls, tool_errors, tool_failures, outputs_cut, truncated: None };
            if let Some(reason) = reason {
                record.truncate(&reason);
            }
            let text = record.to_text();
            prop_assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
            prop_assert_eq!(EpisodeRecord::from_text(&text), Some(record.clone()));
            prop_assert_eq!(text, serde_json::to_string(&record).unwrap());
        }

        #[test]
        fn a_damaged_text_is_no_record_or_one_of_the_same_form(at: prop::sample::Index, byte in 0x20u8..0x7f, reason: bool) {
            let mut record = EpisodeRecord { turns: 12, tool_calls: 3, ..EpisodeRecord::default() };
            if reason {
                record.truncate("max_steps");
            }
            let mut text = record.to_text().into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            let text = String::from_utf8(text).unwrap();
            if let Some(record) = EpisodeRecord::from_text(&text) {
                prop_assert_eq!(record.to_text(), text);
            }
        }
    }
}
