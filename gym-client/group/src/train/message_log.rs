//! Extraction of the training tokens of a rollout from a model response with several turns.
//!
//! Every trainable item of the response contains the whole prompt from which it was generated. The tokens of the prompt after
//! those of earlier items are new context. The prompt must begin with exactly the earlier tokens; otherwise, the log-probs would
//! belong to other tokens.

use gym_core::{Code, Error, Result};
use serde::Deserialize;

/// The tokens of one item in the `output` of a response. Items without generated tokens are not used for training.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct OutputTokens {
    /// The `type` of the item, such as `message`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The whole prompt of this generation.
    pub prompt_token_ids: Vec<i64>,
    /// The generated tokens.
    pub generation_token_ids: Vec<i64>,
    /// The log-prob of each generated token.
    pub generation_log_probs: Vec<f32>,
}

/// One turn of a training conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum LoggedMessage {
    /// Tokens of the prompt.
    Given(Vec<i64>),
    /// Tokens that the model generated, and the log-prob of each.
    Written(Vec<i64>, Vec<f32>),
}

impl LoggedMessage {
    /// Returns the tokens of the turn.
    #[must_use]
    pub fn token_ids(&self) -> &[i64] {
        match self {
            Self::Given(tokens) | Self::Written(tokens, _) => tokens,
        }
    }
}

/// Returns the prompt and generated tokens of a response, alternating. `prompt_tokens` is the length of the first prompt, if
/// known. It is reported if there is nothing to train on, because a prompt that leaves no space for a response is the usual
/// reason.
///
/// # Errors
/// `DataLoss` in these cases:
/// - no item was generated;
/// - a prompt does not begin with the tokens of earlier items;
/// - a generated token has no log-prob, or one that is not a finite number; a number beyond an `f32` is read as an infinity.
pub fn message_log(output: &[OutputTokens], prompt_tokens: Option<usize>) -> Result<Vec<LoggedMessage>> {
    let lost = |message: String| Error::not_started(Code::DataLoss, message).about("read the tokens of an answer");
    let (mut seen, mut log) = (Vec::new(), Vec::new());
    for (at, item) in output.iter().enumerate().filter(|(_, item)| !item.generation_token_ids.is_empty()) {
        let Some(given) = item.prompt_token_ids.strip_prefix(seen.as_slice()) else {
            let same = seen.iter().zip(&item.prompt_token_ids).take_while(|(seen, prompt)| seen == prompt).count();
            return Err(lost(format!(
                "non-contiguous messages found: the prompt of item {at} differs at token {same} of the {} seen before",
                seen.len()
            )));
        };
        let (tokens, log_probs) = (&item.generation_token_ids, &item.generation_log_probs);
        if tokens.len() != log_probs.len() || log_probs.iter().any(|log_prob| !log_prob.is_finite()) {
            let (tokens, log_probs) = (tokens.len(), log_probs.len());
            return Err(lost(format!(
                "item {at} has {tokens} generated tokens and {log_probs} log-probs, all to be finite numbers"
            )));
        }
        log.push(LoggedMessage::Given(given.to_vec()));
        log.push(LoggedMessage::Written(tokens.clone(), log_probs.clone()));
        seen.extend_from_slice(given);
        seen.extend_from_slice(tokens);
    }
    if log.is_empty() {
        let kinds: Vec<&str> = output.iter().map(|item| item.kind.as_str()).collect();
        let prompt = prompt_tokens.map_or("of unknown length".into(), |tokens| format!("of {tokens} tokens"));
        return Err(lost(format!("no generation data: prompt {prompt}, output items {kinds:?}")));
    }
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(prompt: &[i64], generation: &[i64]) -> OutputTokens {
        let generation_log_probs = generation.iter().map(|_| -0.5).collect();
        let (prompt_token_ids, generation_token_ids) = (prompt.to_vec(), generation.to_vec());
        OutputTokens { kind: "message".into(), prompt_token_ids, generation_token_ids, generation_log_probs }
    }

    #[test]
    fn c229_each_turn_adds_what_its_prompt_has_beyond_the_seen() {
        let output = [item(&[1, 2], &[3]), item(&[], &[]), item(&[1, 2, 3, 4, 5], &[6, 7])];
        let log = message_log(&output, None).unwrap();
        let tokens: Vec<&[i64]> = log.iter().map(LoggedMessage::token_ids).collect();
        assert_eq!(tokens, [[1, 2].as_slice(), &[3], &[4, 5], &[6, 7]]);
        assert_eq!(log[1], LoggedMessage::Written(vec![3], vec![-0.5]));
    }

    #[test]
    fn c230_a_prompt_that_does_not_continue_the_seen_is_refused() {
        for prompt in [vec![1, 2, 9, 4], vec![1, 2]] {
            let error = message_log(&[item(&[1, 2], &[3]), item(&prompt, &[6])], None).unwrap_err();
            assert!(
                error.message().contains("non-contiguous messages found") && error.message().contains("token 2"),
                "{error}"
            );
        }
    }

    #[test]
    fn c231_an_answer_without_generated_tokens_says_what_it_had() {
        let reasoning = OutputTokens { kind: "reasoning".into(), ..OutputTokens::default() };
        let text = message_log(&[reasoning.clone(), item(&[1], &[])], Some(1234)).unwrap_err().to_string();
        assert!(text.contains("1234 tokens") && text.contains(r#"["reasoning", "message"]"#), "{text}");
        let text = message_log(&[reasoning], None).unwrap_err().to_string();
        assert!(text.contains("no generation data") && text.contains("reasoning"), "{text}");
    }

    #[test]
    fn a_token_without_a_log_prob_is_refused() {
        let mut short = item(&[1], &[2, 3]);
        short.generation_log_probs.pop();
        let mut none = item(&[1], &[2]);
        none.generation_log_probs[0] = f32::NAN;
        // A text with this number is refused; a value becomes an infinity.
        let mut infinite = serde_json::json!({ "prompt_token_ids": [1], "generation_token_ids": [2] });
        infinite["generation_log_probs"] = vec![-1e300].into();
        let infinite: OutputTokens = serde_json::from_value(infinite).unwrap();
        for output in [short, none, infinite] {
            assert_eq!(message_log(&[output], None).unwrap_err().code(), Code::DataLoss);
        }
    }

    #[test]
    fn an_item_is_read_from_what_the_model_server_wrote() {
        let text = r#"{"type":"message","id":"x","prompt_token_ids":[1],"generation_token_ids":[2],"generation_log_probs":[-1e-1]}"#;
        let read: OutputTokens = serde_json::from_str(text).unwrap();
        assert_eq!((read.prompt_token_ids, read.generation_log_probs), (vec![1], vec![-0.1]));
    }
}
