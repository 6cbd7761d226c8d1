//! Checks requests as NeMo Gym's schemas do: rejects unknown top-level keys, and requests without the required key.
//!
//! Bodies are not validated deeper: the upstream engine rejects values of a wrong type.

use gym_core::RawObject;
use gym_core::server::{RESPONSES_KEYS, ValidationProblem};
use serde_json::Value;

/// The keys of a chat completion request in NeMo Gym 0.7.0.
const CHAT_KEYS: &[&str] = &[
    "audio",
    "chat_template_kwargs",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "modalities",
    "model",
    "moderation",
    "n",
    "output_config",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "thinking",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
];

/// Three keys that a streaming chat client can send. They are dropped, not forwarded.
const CHAT_EXTENSIONS: &[&str] = &["chat_template_kwargs", "output_config", "thinking"];

/// The API of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Responses,
    Chat,
}

impl Dialect {
    fn known(self) -> &'static [&'static str] {
        match self {
            Self::Responses => RESPONSES_KEYS,
            Self::Chat => CHAT_KEYS,
        }
    }

    fn required(self) -> &'static str {
        match self {
            Self::Responses => "input",
            Self::Chat => "messages",
        }
    }

    /// Returns the problems of a request body. `within` is the path of `body` in the whole request.
    pub(crate) fn check(self, body: &RawObject, within: &[&str]) -> Vec<ValidationProblem> {
        let mut details = Vec::new();
        let path = |key| -> Vec<&str> { within.iter().copied().chain([key]).collect() };
        let value = |key: &str| body.get_as::<Value>(key).ok().flatten().unwrap_or_default();
        if !body.contains(self.required()) {
            details.push(ValidationProblem::missing(&path(self.required()), body.outline().unwrap_or(Value::Null)));
        }
        if let Some(given) = body.get(self.required()) {
            let key = self.required();
            // Parsed only for an error message: nearly all inputs are valid, and some are long.
            let list =
                |path: &[&str]| ValidationProblem::new("list_type", path, "Input should be a valid list", value(key));
            match (self, given.first()) {
                (_, Some(b'[')) | (Self::Responses, Some(b'"')) => {}
                (Self::Chat, _) => details.push(list(&path(key))),
                (Self::Responses, _) => {
                    let arm = |arm| [path(key), vec![arm]].concat();
                    let text = "Input should be a valid string";
                    details.push(ValidationProblem::new("string_type", &arm("str"), text, value(key)));
                    details.push(list(&arm("list")));
                }
            }
        }
        for key in body.keys() {
            if self.known().binary_search(&key).is_err() {
                let text = "Extra inputs are not permitted";
                details.push(ValidationProblem::new("extra_forbidden", &path(key), text, value(key)));
            } else if key == "stream" && !matches!(body.get(key).as_deref(), Some(b"false" | b"null")) {
                details.push(ValidationProblem::new("literal_error", &path(key), "Input should be False", value(key)));
            }
        }
        details
    }

    /// Converts the body of a streaming client to a request without streaming. Removes unknown keys and the keys that request a
    /// stream.
    pub(crate) fn without_stream(self, body: &RawObject) -> Result<RawObject, gym_core::message::JsonError> {
        let mut edit = body.edit();
        for key in body.keys() {
            let dropped = self.known().binary_search(&key).is_err()
                || matches!(key, "stream" | "stream_options")
                || (self == Self::Chat && CHAT_EXTENSIONS.contains(&key));
            if dropped {
                edit = edit.remove(key.to_owned());
            }
        }
        edit.to_object()
    }
}

#[cfg(test)]
mod tests {
    use gym_core::server::unprocessable;

    use super::*;

    #[test]
    fn the_lists_can_be_searched() {
        assert!(RESPONSES_KEYS.is_sorted() && CHAT_KEYS.is_sorted());
    }

    #[test]
    fn what_is_missing_or_unknown_is_named_as_pydantic_names_it() {
        let body = RawObject::parse(r#"{"model":"m","n":1,"stream":true}"#).unwrap();
        let text =
            unprocessable(&Dialect::Responses.check(&body, &["responses_create_params"])).message.head.to_bytes();
        let got: Value = serde_json::from_slice(&text).unwrap();
        let details = got["detail"].as_array().unwrap();
        assert_eq!(details[0]["type"], "missing");
        assert_eq!(details[0]["loc"], serde_json::json!(["body", "responses_create_params", "input"]));
        assert_eq!((&details[1]["type"], &details[1]["input"]), (&"extra_forbidden".into(), &1.into()));
        assert_eq!(details[2]["type"], "literal_error");
        let chat = RawObject::parse(r#"{"messages":[],"stream":null,"seed":1}"#).unwrap();
        assert_eq!(Dialect::Chat.check(&chat, &[]), []);
        let number = RawObject::parse(r#"{"input":3,"messages":"x"}"#).unwrap();
        let text = unprocessable(&Dialect::Responses.check(&number, &[])).message.head.to_bytes();
        let got: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(got["detail"][0]["loc"], serde_json::json!(["body", "input", "str"]));
        assert_eq!((&got["detail"][1]["type"], &got["detail"][1]["input"]), (&"list_type".into(), &3.into()));
    }
}
