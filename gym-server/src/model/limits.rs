//! Whether a response used up its tokens. Some engines call such a response `completed` (llama.cpp over Responses), or name its tool calls and not its
//! end (vLLM over chat), although its text may stop in the middle of a word.

use gym_core::RawObject;
use gym_core::server::ResponseEnd;
use serde_json::{Map, Value, json};

/// The tokens that a response may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenLimits {
    /// Those of the response, as the request says.
    output: Option<u64>,
    /// Those of prompt and response, if the endpoint has told the model's context.
    context: Option<u64>,
}

/// The keys of a request with the limit of its response.
const OUTPUT_KEYS: [&str; 3] = ["max_output_tokens", "max_completion_tokens", "max_tokens"];

impl TokenLimits {
    /// Returns the limits of a request, in either dialect.
    pub(super) fn of(request: &RawObject, context: Option<u64>) -> Self {
        Self::with_added(request, &Map::new(), context)
    }

    /// Returns the limits of a request to which these keys are added.
    pub(super) fn with_added(request: &RawObject, added: &Map<String, Value>, context: Option<u64>) -> Self {
        let limit = |key: &&str| request.get_as::<u64>(key).ok().flatten().or_else(|| added.get(*key)?.as_u64());
        Self { output: OUTPUT_KEYS.iter().find_map(limit), context }
    }

    /// Returns the limit of the response, if the request sets one.
    pub(super) fn output(self) -> Option<u64> {
        self.output
    }

    /// Returns a sentence if the response has used up its tokens, and the engine does not say that the model ended it. `word` is what the engine says.
    fn reached(self, usage: &Value, word: Option<&Value>) -> Option<String> {
        if word.and_then(Value::as_str).is_some_and(ResponseEnd::is_stop) {
            return None;
        }
        let count = |keys: [&str; 2]| keys.iter().find_map(|key| usage[*key].as_u64());
        let output = count(["output_tokens", "completion_tokens"])?;
        if let Some(limit) = self.output.filter(|limit| output >= *limit) {
            return Some(format!("the response has {output} tokens, and the request allows {limit}"));
        }
        let total =
            usage["total_tokens"].as_u64().or_else(|| Some(count(["input_tokens", "prompt_tokens"])? + output))?;
        let limit = self.context.filter(|limit| total >= *limit)?;
        Some(format!("prompt and response have {total} tokens, and the model's context has {limit}"))
    }

    /// Returns a sentence if a chat completion has used up its tokens.
    pub(super) fn reached_by_chat(self, chat: &RawObject, choice: &RawObject) -> Option<String> {
        let usage: Value = chat.get_as("usage").ok().flatten()?;
        self.reached(&usage, choice.get_as::<Value>("finish_reason").ok().flatten().as_ref())
    }

    /// Returns a Responses response as incomplete if it has used up its tokens and does not say so; `None` if it stays.
    pub(super) fn cut(self, response: &RawObject) -> gym_core::Result<Option<RawObject>> {
        let says = response.get("incomplete_details").is_some_and(|details| &details[..] != b"null");
        if says || self == (Self { output: None, context: None }) {
            return Ok(None);
        }
        let value = |key: &str| response.get_as::<Value>(key).ok().flatten();
        let word = ["native_finish_reason", "finish_reason"].iter().find_map(|key| value(key).filter(Value::is_string));
        let Some(why) = value("usage").and_then(|usage| self.reached(&usage, word.as_ref())) else { return Ok(None) };
        let details = json!({"reason": "max_output_tokens", "message": why});
        let edit = response.edit().set("status", r#""incomplete""#).set("incomplete_details", details.to_string());
        Ok(Some(edit.to_object()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: &Value) -> RawObject {
        RawObject::parse(value.to_string()).unwrap()
    }

    #[test]
    fn a_response_that_used_up_its_tokens_is_cut_unless_the_engine_says_that_it_ended() {
        let usage = |input: u64, output: u64| json!({"input_tokens": input, "output_tokens": output, "total_tokens": input + output});
        for (request, context, response, cut) in [
            (json!({"max_output_tokens": 5}), None, json!({"usage": usage(9, 5)}), true),
            (json!({"max_output_tokens": 5}), None, json!({"usage": usage(9, 7)}), true),
            (json!({"max_output_tokens": 5}), None, json!({"usage": usage(9, 4)}), false),
            (json!({}), Some(4_096), json!({"usage": usage(4_000, 96)}), true),
            (json!({}), Some(4_096), json!({"usage": usage(4_000, 95)}), false),
            (json!({}), None, json!({"usage": usage(4_000, 96)}), false),
            // What the engine says is more than what its numbers suggest.
            (
                json!({"max_output_tokens": 5}),
                None,
                json!({"usage": usage(9, 5), "native_finish_reason": "STOP"}),
                false,
            ),
            (json!({"max_output_tokens": 5}), None, json!({"usage": usage(9, 5), "finish_reason": "tool_calls"}), true),
            // It says itself that it is incomplete.
            (
                json!({"max_output_tokens": 5}),
                None,
                json!({"usage": usage(9, 5), "incomplete_details": {"reason": "x"}}),
                false,
            ),
            // Odd numbers say nothing.
            (json!({"max_output_tokens": "5"}), None, json!({"usage": usage(9, 5)}), false),
            (json!({"max_output_tokens": null}), None, json!({"usage": usage(9, 5)}), false),
            (json!({"max_output_tokens": 5}), None, json!({"usage": null}), false),
            (json!({"max_output_tokens": 5}), None, json!({"usage": {"output_tokens": "5"}}), false),
            (json!({"max_output_tokens": 5}), None, json!({"usage": [5]}), false),
        ] {
            let mut response = response;
            response["status"] = json!("completed");
            let got = TokenLimits::of(&object(&request), context).cut(&object(&response)).unwrap();
            assert_eq!(got.is_some(), cut, "{request} {response}");
            if let Some(got) = got {
                assert_eq!(ResponseEnd::of_response(&got).truncation().unwrap().as_deref(), Some("max_output_tokens"));
            }
        }
    }

    #[test]
    fn the_same_holds_for_a_chat_completion() {
        for (reason, output, cut) in
            [("tool_calls", 9, true), ("tool_calls", 8, false), ("stop", 9, false), ("Stop", 9, false)]
        {
            let chat = object(&json!({"usage": {"prompt_tokens": 2, "completion_tokens": output}}));
            let choice = object(&json!({"finish_reason": reason}));
            for key in ["max_tokens", "max_completion_tokens"] {
                let limits = TokenLimits::of(&object(&json!({key: 9})), None);
                assert_eq!(limits.reached_by_chat(&chat, &choice).is_some(), cut, "{reason} {output}");
            }
        }
    }
}
