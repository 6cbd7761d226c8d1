//! The fix of a key that the Responses API does not have: its name there, or where else the setting belongs.

use gym_core::server::RESPONSES_KEYS;

use crate::config::problem::nearest as nearest_name;

/// Keys of chat completions and of engines whose setting has another name in the Responses API, sorted, with what to write.
const RENAMED: &[(&str, &str)] = &[
    ("function_call", "`tool_choice`"),
    ("functions", "`tools`: [{\"type\": \"function\", \"name\": …, \"parameters\": …}]"),
    ("logprobs", "`top_logprobs` and `include`: [\"message.output_text.logprobs\"]"),
    ("max_completion_tokens", "`max_output_tokens`"),
    ("max_new_tokens", "`max_output_tokens`"),
    ("max_tokens", "`max_output_tokens`"),
    ("messages", "`input`: a row has the request of the Responses API, not of chat completions"),
    ("prompt_logprobs", "`top_logprobs` and `include`: [\"message.output_text.logprobs\"]"),
    ("reasoning_effort", "`reasoning`: {\"effort\": …}"),
    ("response_format", "`text`: {\"format\": …}"),
    ("system", "`instructions`, or a message of the role system in `input`"),
    ("system_prompt", "`instructions`, or a message of the role system in `input`"),
    ("thinking", "`reasoning`: {\"effort\": …}"),
    ("verbosity", "`text`: {\"verbosity\": …}"),
];

/// Keys of chat completions and of engines that the Responses API does not have, sorted. Model servers pass those of
/// `metadata.extra_body` on.
const OF_ENGINES: &[&str] = &[
    "bad_words",
    "best_of",
    "chat_template_kwargs",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "length_penalty",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "skip_special_tokens",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "top_k",
    "use_beam_search",
];

/// Keys of chat completions without a counterpart, sorted.
const WITHOUT: &[&str] = &["audio", "modalities", "output_config", "prediction", "web_search_options"];

/// Returns the fix of an unknown key.
pub(super) fn fix_of_key(key: &str) -> String {
    if let Ok(found) = RENAMED.binary_search_by_key(&key, |renamed| renamed.0) {
        return format!("write {}", RENAMED[found].1);
    }
    match key {
        "n" => {
            return "the Responses API has none: remove it, and collect each row N times with --num-repeats N".into();
        }
        "seed" => {
            return format!(
                "the Responses API has none: remove it, and give each rollout its own seed with --add-seed or write {}",
                extra_body(key)
            );
        }
        "extra_body" => return "write `metadata`: {\"extra_body\": \"{…}\"}, a string that holds a JSON object".into(),
        _ if OF_ENGINES.binary_search(&key).is_ok() => {
            return format!(
                "the Responses API has none: remove it, or write {} for an engine that has it",
                extra_body(key)
            );
        }
        _ if WITHOUT.binary_search(&key).is_ok() => return "the Responses API has none: remove it".into(),
        _ => {}
    }
    let others = RENAMED.iter().map(|renamed| renamed.0).chain(OF_ENGINES.iter().copied());
    match nearest_name(key, RESPONSES_KEYS.iter().copied().chain(others)) {
        Some(near) if RESPONSES_KEYS.contains(&near) => format!("did you mean `{near}`?"),
        Some(near) if near != key => fix_of_key(near),
        _ => format!("remove it; known are {}", RESPONSES_KEYS.join(", ")),
    }
}

fn extra_body(key: &str) -> String {
    format!(r#""metadata": {{"extra_body": "{{\"{key}\": …}}"}}"#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_can_be_searched_and_have_no_key_of_the_responses_api() {
        assert!(RENAMED.is_sorted() && OF_ENGINES.is_sorted() && WITHOUT.is_sorted());
        let all = RENAMED.iter().map(|renamed| &renamed.0).chain(OF_ENGINES).chain(WITHOUT);
        assert_eq!(all.filter(|key| RESPONSES_KEYS.contains(key)).count(), 0);
    }
}
