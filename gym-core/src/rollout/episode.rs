//! The course of one episode: turns, tool calls and their errors, and whether a limit ended it.

use std::time::Duration;

use serde::Serialize;

use crate::message::Edit;
use crate::rollout::phases::Phases;

/// Metadata key of the response to `/run` with an [`EpisodeRecord`]: `turns=1, truncated="max_steps", phases="seed 0+310, model 402+1200"`.
/// Collectors in other languages ignore it.
pub const EPISODE_METADATA: &str = "x-gym-episode";

/// Key of a scored row with the episode's course. NeMo Gym computes no metrics of keys that begin with `_`.
pub const EPISODE_KEY: &str = "_gym_episode";

/// Key of a model's response with what the engine reported about each turn: a list with one object for each response of the model, in
/// order. It is a key of the response, not of its items or of the row: Python verifiers return only the former unchanged.
pub const TURNS_KEY: &str = "_gym_turns";

/// Key of a model's response whose completeness could not be checked: `true`, or absent. The engine is one that calls an aborted response
/// `completed`, and that does not tell which requests it aborted.
pub const UNVERIFIED_KEY: &str = "_gym_completion_unverified";

/// Key of a model's response with the settings of the model server that shaped the prompt, as the engine received them.
pub const PROMPT_KEY: &str = "_gym_prompt";

/// Maximum bytes of a reason; the reasons of model servers are single words.
const REASON_BYTES_MAX: usize = 64;

/// The keys of the numbers: first the counts, which are always known, then those that may be unknown.
const KEYS: [&str; 8] = [
    "turns",
    "tool_calls",
    "tool_errors",
    "tool_failures",
    "outputs_cut",
    "input_tokens",
    "output_tokens",
    "prefix_breaks",
];
/// The same keys as they are written into a row, each in one piece.
const ROW_KEYS: [&str; 8] = [
    r#""turns":"#,
    r#","tool_calls":"#,
    r#","tool_errors":"#,
    r#","tool_failures":"#,
    r#","outputs_cut":"#,
    r#","input_tokens":"#,
    r#","output_tokens":"#,
    r#","prefix_breaks":"#,
];
/// The number of counts.
const COUNTS: usize = 5;
const TRUNCATED: &str = "truncated";
const PHASES: &str = "phases";
const UNVERIFIED: &str = "completion_unverified";

/// Usual bytes of the metadata, and of the value in a row.
const METADATA_BYTES: usize = 80;
const VALUE_BYTES: usize = 192;

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
    /// Tokens that the model read in all turns; `None` if no response told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<u32>,
    /// Tokens that the model wrote in all turns; `None` if no response told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u32>,
    /// Turns whose prompt does not begin with the token ids of prompt and generation of the turn before; `None` if no two turns have ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_breaks: Option<u32>,
    /// The reason why the episode ended early; `None` if it ended by itself. `max_steps` is the limit of the agent, `environment` that
    /// of the environment; other reasons are those of the model's `incomplete_details`.
    pub truncated: Option<String>,
    /// The calls of the episode with their times.
    #[serde(skip_serializing_if = "Phases::is_empty")]
    pub phases: Phases,
    /// `true` if a response of the model has [`UNVERIFIED_KEY`]: the engine may have aborted it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub completion_unverified: bool,
}

impl EpisodeRecord {
    /// Records that a limit ended the episode. Characters that a header cannot hold are replaced.
    pub fn truncate(&mut self, reason: &str) {
        let plain = |c: char| if is_plain(c) { c } else { '_' };
        self.truncated = Some(reason.chars().take(REASON_BYTES_MAX).map(plain).collect());
    }

    /// Adds the tokens of one turn, as far as the model told them.
    pub fn add_tokens(&mut self, input: Option<u64>, output: Option<u64>) {
        for (total, tokens) in [(&mut self.input_tokens, input), (&mut self.output_tokens, output)] {
            if let Some(tokens) = tokens {
                let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
                *total = Some(total.unwrap_or(0).saturating_add(tokens));
            }
        }
    }

    /// Returns the value of [`EPISODE_METADATA`]: a dictionary of structured fields (RFC 9651), without the counts that are 0. Each
    /// hop copies it, so it is short.
    #[must_use]
    pub fn to_text(&self) -> String {
        // By hand, because each rollout pays for it: `format!` costs some thousand instructions more.
        let mut text = String::with_capacity(METADATA_BYTES);
        for (at, (key, number)) in KEYS.iter().zip(self.numbers()).enumerate() {
            if let Some(number) = number.filter(|number| *number > 0 || is_zero_written(at)) {
                text.push_str(if at == 0 { "" } else { ", " });
                text.push_str(key);
                text.push('=');
                push_number(&mut text, number.into());
            }
        }
        if let Some(reason) = &self.truncated {
            for part in [", ", TRUNCATED, "=\"", reason, "\""] {
                text.push_str(part);
            }
        }
        if !self.phases.is_empty() {
            for part in [", ", PHASES, "=\""] {
                text.push_str(part);
            }
            self.phases.write(&mut text);
            text.push('"');
        }
        if self.completion_unverified {
            // A key without a value is true.
            text.push_str(", ");
            text.push_str(UNVERIFIED);
        }
        text
    }

    /// Returns the record of a text that [`EpisodeRecord::to_text`] wrote; `None` if it has another form.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let mut numbers = [None; KEYS.len()];
        let mut rest = text;
        for (at, key) in KEYS.iter().enumerate() {
            let member = if at == 0 { Some(rest) } else { rest.strip_prefix(", ") };
            let Some(value) = member.and_then(|member| member.strip_prefix(key)?.strip_prefix('=')) else { continue };
            let digits = value.bytes().take_while(u8::is_ascii_digit).count();
            let (number, after) = value.split_at(digits);
            // No leading zeros, and no count that is not written.
            let canonical = !number.starts_with('0') || (number == "0" && is_zero_written(at));
            numbers[at] = Some(number.parse().ok().filter(|_| canonical)?);
            rest = after;
        }
        let truncated = match member(&mut rest, TRUNCATED)? {
            Some(reason) if reason.len() > REASON_BYTES_MAX || !reason.chars().all(is_plain) => return None,
            reason => reason.map(str::to_owned),
        };
        let phases = match member(&mut rest, PHASES)? {
            Some(text) => Phases::from_text(text).filter(|phases| !phases.is_empty())?,
            None => Phases::default(),
        };
        let unverified = rest.strip_prefix(", ").and_then(|member| member.strip_prefix(UNVERIFIED));
        if !unverified.unwrap_or(rest).is_empty() {
            return None;
        }
        let [turns, tool_calls, tool_errors, tool_failures, outputs_cut, input_tokens, output_tokens, prefix_breaks] =
            numbers;
        turns.map(|turns| Self {
            turns,
            tool_calls: tool_calls.unwrap_or(0),
            tool_errors: tool_errors.unwrap_or(0),
            tool_failures: tool_failures.unwrap_or(0),
            outputs_cut: outputs_cut.unwrap_or(0),
            input_tokens,
            output_tokens,
            prefix_breaks,
            truncated,
            phases,
            completion_unverified: unverified.is_some(),
        })
    }

    /// Sets [`EPISODE_KEY`] of a row: what the agent counted, if it is one of this SDK, the number of attempts, and the seconds of the
    /// last one.
    pub fn write<'a>(record: Option<&Self>, attempts: u32, took: Duration, row: Edit<'a>) -> Edit<'a> {
        let mut text = String::with_capacity(VALUE_BYTES);
        text.push('{');
        if let Some(record) = record {
            for (key, number) in ROW_KEYS.iter().zip(record.numbers()) {
                let Some(number) = number else { continue };
                text.push_str(key);
                push_number(&mut text, number.into());
            }
            match &record.truncated {
                Some(reason) => [",\"truncated\":\"", reason, "\","].iter().for_each(|part| text.push_str(part)),
                None => text.push_str(",\"truncated\":null,"),
            }
            if !record.phases.is_empty() {
                text.push_str("\"phases\":");
                record.phases.write_json(&mut text);
                text.push(',');
            }
            if record.completion_unverified {
                text.push_str("\"completion_unverified\":true,");
            }
        }
        text.push_str("\"attempts\":");
        push_number(&mut text, attempts.into());
        text.push_str(",\"seconds\":");
        push_number(&mut text, took.as_secs());
        // Six digits after the point, with their zeros.
        let micros = text.len();
        push_number(&mut text, 1_000_000 + u64::from(took.subsec_micros()));
        text.replace_range(micros..=micros, ".");
        text.push('}');
        row.set_json(EPISODE_KEY, text)
    }

    fn numbers(&self) -> [Option<u32>; KEYS.len()] {
        let counts = [self.turns, self.tool_calls, self.tool_errors, self.tool_failures, self.outputs_cut].map(Some);
        let [turns, tool_calls, tool_errors, tool_failures, outputs_cut] = counts;
        let Self { input_tokens, output_tokens, prefix_breaks, .. } = *self;
        [turns, tool_calls, tool_errors, tool_failures, outputs_cut, input_tokens, output_tokens, prefix_breaks]
    }
}

/// Takes the text of a key from the front of the rest, if the key is the next one; `None` if its text does not end.
fn member<'a>(rest: &mut &'a str, key: &str) -> Option<Option<&'a str>> {
    let value = rest.strip_prefix(", ").and_then(|member| member.strip_prefix(key)?.strip_prefix("=\""));
    let Some(value) = value else { return Some(None) };
    let (text, after) = value.split_once('"')?;
    *rest = after;
    Some(Some(text))
}

/// Returns `true` if the metadata has the number also when it is 0: `turns`, so that the text is not empty, and the last ones, because
/// without a number they are not known.
fn is_zero_written(at: usize) -> bool {
    at == 0 || at >= COUNTS
}

fn push_number(text: &mut String, number: u64) {
    text.push_str(itoa::Buffer::new().format(number));
}

/// Characters of a reason that need no escape in JSON or a header, and that do not separate the members of a dictionary.
fn is_plain(c: char) -> bool {
    c.is_ascii_graphic() && !matches!(c, '"' | '\\' | ',')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::RawObject;
    use crate::rollout::phases::{Phase, PhaseSpan};

    proptest! {
        #[test]
        fn a_record_comes_back_as_it_was_written(counts: [u32; 5], tokens: [Option<u32>; 3], completion_unverified: bool, reason: Option<String>, spans: Vec<(u8, u64, u64)>) {
            let [turns, tool_calls, tool_errors, tool_failures, outputs_cut] = counts;
            let [input_tokens, output_tokens, prefix_breaks] = tokens;
            let mut record = EpisodeRecord {
                turns,
                tool_calls,
                tool_errors,
                tool_failures,
                outputs_cut,
                input_tokens,
                output_tokens,
                prefix_breaks,
                truncated: None,
                phases: Phases::default(),
                completion_unverified,
            };
            for (phase, start_us, took_us) in spans {
                record.phases.push(PhaseSpan { phase: Phase::ALL[usize::from(phase % 4)], start_us, took_us });
            }
            if let Some(reason) = reason {
                record.truncate(&reason);
            }
            let text = record.to_text();
            prop_assert!(text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' '), "{text}");
            prop_assert_eq!(EpisodeRecord::from_text(&text), Some(record.clone()));
            let row = RawObject::parse("{}").unwrap();
            let row = EpisodeRecord::write(Some(&record), 2, Duration::from_micros(1_000_001), row.edit()).to_rope();
            let row: serde_json::Value = serde_json::from_slice(&row.to_bytes()).unwrap();
            let mut expected = serde_json::to_value(&record).unwrap();
            expected["attempts"] = 2.into();
            expected["seconds"] = 1.000_001.into();
            prop_assert_eq!(&row[EPISODE_KEY], &expected);
        }

        #[test]
        fn a_damaged_text_is_no_record_or_one_of_the_same_form(at: prop::sample::Index, byte in 0x20u8..0x7f, reason: bool) {
            let mut record = EpisodeRecord { turns: 12, tool_calls: 3, ..EpisodeRecord::default() };
            record.add_tokens(Some(17), Some(0));
            record.prefix_breaks = Some(0);
            record.completion_unverified = reason;
            if reason {
                record.truncate("max_steps");
            }
            for phase in Phase::ALL {
                record.phases.push(PhaseSpan { phase, start_us: 10, took_us: 205 });
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
