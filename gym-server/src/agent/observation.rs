//! The responses of tools as the model sees them, and the counts of the episode.

use gym_core::rollout::EpisodeRecord;
use gym_core::server::{ToolErrorCause, ToolErrors};
use gym_core::{Message, Response, Result};

use crate::agent::config::OutputLimits;

/// The rules for the responses of tools.
#[derive(Clone, Copy, Debug)]
pub(super) struct ToolRules<'a> {
    pub(super) errors: ToolErrors,
    pub(super) limits: Option<&'a OutputLimits>,
}

impl ToolRules<'_> {
    /// Returns the message for the model, and counts errors and cuts.
    ///
    /// # Errors
    /// The error of the tool if it must fail the attempt.
    pub(super) fn observe(&self, record: &mut EpisodeRecord, tool: &str, response: Response) -> Result<Message> {
        let (response, cause) = self.errors.admit(response)?;
        if let Some(cause) = cause {
            record.tool_errors += 1;
            if cause == ToolErrorCause::Server {
                record.tool_failures += 1;
                tracing::warn!(tool, status = response.status.0, "a tool failed, and its error goes to the model");
            }
        }
        let mut message = response.message;
        if let Some(max) = self.limit(tool)
            && message.head.len() > max
        {
            record.outputs_cut += 1;
            let text = message.head.to_bytes();
            message.head = cut(&String::from_utf8_lossy(&text), max).into();
        }
        Ok(message)
    }

    /// Returns the output of a tool that arrived as text, and counts a cut.
    pub(super) fn observe_text(&self, record: &mut EpisodeRecord, tool: &str, output: String) -> String {
        match self.limit(tool) {
            Some(max) if output.len() > max => {
                record.outputs_cut += 1;
                cut(&output, max)
            }
            _ => output,
        }
    }

    fn limit(&self, tool: &str) -> Option<usize> {
        self.limits?.of(tool)
    }
}

/// Returns the first bytes of a text, up to the start of a character, and a line that tells the model what is missing.
fn cut(text: &str, max: usize) -> String {
    let kept = text.floor_char_boundary(max);
    format!("{}\n[output cut: the first {kept} of {} bytes]", &text[..kept], text.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_cut_output_is_its_start_and_a_mark(text in ".{0,40}", max in 1usize..60) {
            let limits: OutputLimits = serde_json::from_value(serde_json::json!({"_default": max, "free": 1000})).unwrap();
            let rules = ToolRules { errors: ToolErrors::Auto, limits: Some(&limits) };
            let mut record = EpisodeRecord::default();
            let kept = rules.observe(&mut record, "free", Response::text(text.clone())).unwrap();
            prop_assert_eq!(kept.head.to_bytes(), text.as_bytes());
            prop_assert_eq!(record.outputs_cut, 0);
            let message = rules.observe(&mut record, "tool", Response::text(text.clone())).unwrap();
            let seen = String::from_utf8(message.head.to_bytes().to_vec()).unwrap();
            prop_assert_eq!(&rules.observe_text(&mut EpisodeRecord::default(), "tool", text.clone()), &seen);
            if text.len() <= max {
                prop_assert_eq!(seen, text);
            } else {
                let (start, mark) = seen.rsplit_once('\n').unwrap();
                prop_assert!(text.starts_with(start) && start.len() <= max && start.len() + 4 > max);
                prop_assert_eq!(mark, format!("[output cut: the first {} of {} bytes]", start.len(), text.len()));
                prop_assert_eq!(record.outputs_cut, 1);
            }
        }
    }
}
