//! How the generation of a response ended. Only a generation that the model itself ended is scored as complete.
//!
//! The lists have what is known to be good; any other word is an interruption, because engines invent new ones. Sources: OpenAI's references of Chat
//! Completions (`finish_reason`) and Responses (`status`); the words of engines and gateways that translate less: Hugging Face TGI (`eos_token`,
//! `stop_sequence`), Together (`eos`), Anthropic (`end_turn`, `tool_use`, `max_tokens`, `model_context_window_exceeded`), vLLM (`repetition`).

use serde_json::Value;

use crate::base::error::{Code, Error, Result};
use crate::base::failure::FailureClass;
use crate::message::RawObject;

/// Words of a finish reason with which the model ended its response, in lower case.
const STOPPED: [&str; 5] = ["stop", "eos", "eos_token", "stop_sequence", "end_turn"];

/// Words of a finish reason with which the model called tools, in lower case.
const CALLED: [&str; 3] = ["tool_calls", "function_call", "tool_use"];

/// Words of a finish reason for a response that reached a limit, in lower case.
const AT_A_LIMIT: [&str; 4] = ["length", "max_tokens", "model_context_window_exceeded", "repetition"];

/// Maximum characters of an endpoint's error in an error message.
const ERROR_CHARS_MAX: usize = 500;

/// How the generation of a response ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseEnd {
    /// The model ended it.
    Complete,
    /// It reached a limit: `max_output_tokens`, `content_filter`, another reason of its `incomplete_details`, or `incomplete` if it has none.
    Truncated(String),
    /// Something else ended it, in the endpoint's words: `finish_reason "abort"`. What was generated until then is no answer of the model.
    Interrupted(String),
}

impl ResponseEnd {
    /// Returns the end of a choice of a chat completion: its `finish_reason`, in any case of letters, unless it has an `error`.
    #[must_use]
    pub fn of_choice(choice: &RawObject) -> Self {
        if let Some(error) = error_of(choice) {
            return error;
        }
        let Some(reason) = choice.get("finish_reason") else {
            return Self::Interrupted("no `finish_reason`".to_owned());
        };
        let word = serde_json::from_slice::<String>(&reason).unwrap_or_default().to_lowercase();
        if Self::is_stop(&word) || CALLED.contains(&word.as_str()) {
            Self::Complete
        } else if AT_A_LIMIT.contains(&word.as_str()) {
            Self::Truncated("max_output_tokens".to_owned())
        } else if word == "content_filter" {
            Self::Truncated(word)
        } else {
            Self::Interrupted(format!("finish_reason {}", shown(&reason)))
        }
    }

    /// Returns `true` for a word of a finish reason that says that the model itself ended the response, in any case of letters. A word for tool calls
    /// does not: some engines use it also for a call that was cut off.
    #[must_use]
    pub fn is_stop(word: &str) -> bool {
        STOPPED.iter().any(|stopped| stopped.eq_ignore_ascii_case(word))
    }

    /// Returns the end of a response of the Responses API: its `status`, unless it has an `error`.
    #[must_use]
    pub fn of_response(response: &RawObject) -> Self {
        if let Some(error) = error_of(response) {
            return error;
        }
        let details = || response.get("incomplete_details").filter(|details| &details[..] != b"null");
        let reason = |details: &[u8]| {
            let details: Value = serde_json::from_slice(details).unwrap_or_default();
            details["reason"].as_str().unwrap_or("incomplete").to_owned()
        };
        match response.get("status").as_deref() {
            Some(br#""completed""#) => details().map_or(Self::Complete, |details| Self::Truncated(reason(&details))),
            Some(br#""incomplete""#) => Self::Truncated(reason(&details().unwrap_or_default())),
            // Some servers leave the status out, and say why the response is incomplete.
            None | Some(b"null") if let Some(details) = details() => Self::Truncated(reason(&details)),
            Some(status) => Self::Interrupted(format!("status {}", shown(status))),
            None => Self::Interrupted("no `status`".to_owned()),
        }
    }

    /// Returns the reason of a truncated response, and `None` for a complete one.
    ///
    /// # Errors
    /// `Internal` with the class `model_error` for an interrupted response, in the endpoint's words.
    pub fn truncation(self) -> Result<Option<String>> {
        match self {
            Self::Complete => Ok(None),
            Self::Truncated(reason) => Ok(Some(reason)),
            Self::Interrupted(how) => {
                let text = format!(
                    "the engine ended the response with {how}; a response that its model did not end is not scored"
                );
                Err(Error::finished(Code::Internal, text).with_class(FailureClass::ModelError))
            }
        }
    }
}

fn error_of(object: &RawObject) -> Option<ResponseEnd> {
    let error = object.get("error").filter(|error| &error[..] != b"null")?;
    Some(ResponseEnd::Interrupted(format!("the error {}", shown(&error))))
}

fn shown(json: &[u8]) -> String {
    String::from_utf8_lossy(json).chars().take(ERROR_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> RawObject {
        RawObject::parse(text.to_owned()).unwrap()
    }

    #[test]
    fn only_a_word_that_is_known_to_be_good_makes_a_choice_complete() {
        let truncated = |reason: &str| ResponseEnd::Truncated(reason.to_owned());
        for (reasons, expected) in [
            (
                &[
                    "stop",
                    "tool_calls",
                    "function_call",
                    "eos",
                    "Eos_Token",
                    "Stop",
                    "stop_sequence",
                    "end_turn",
                    "tool_use",
                ][..],
                ResponseEnd::Complete,
            ),
            (
                &["length", "max_tokens", "Max_Tokens", "model_context_window_exceeded", "repetition"],
                truncated("max_output_tokens"),
            ),
            (&["content_filter", "Content_Filter"], truncated("content_filter")),
        ] {
            for reason in reasons {
                assert_eq!(
                    ResponseEnd::of_choice(&object(&format!(r#"{{"finish_reason":"{reason}"}}"#))),
                    expected,
                    "{reason}"
                );
            }
        }
        // Also words that nobody thought of, and values that are no words.
        for reason in [
            r#""abort""#,
            r#""aborted""#,
            r#""cancelled""#,
            r#""error""#,
            r#""network_error""#,
            r#""insufficient_system_resource""#,
            r#""queued""#,
            r#""zebra""#,
            r#"" stop""#,
            r#""""#,
            "null",
            "3",
            "true",
            r#"{"stop":1}"#,
            r#"["stop"]"#,
        ] {
            let end = ResponseEnd::of_choice(&object(&format!(r#"{{"finish_reason":{reason},"error":null}}"#)));
            assert_eq!(end, ResponseEnd::Interrupted(format!("finish_reason {reason}")));
            let error = end.truncation().unwrap_err();
            assert!(error.class() == Some(FailureClass::ModelError) && error.to_string().contains(reason), "{error}");
        }
        assert_eq!(ResponseEnd::of_choice(&object("{}")), ResponseEnd::Interrupted("no `finish_reason`".to_owned()));
        for error in [r#"{"code":502}"#, r#""lost""#, "1", "false", "{}"] {
            let end = ResponseEnd::of_choice(&object(&format!(r#"{{"finish_reason":"stop","error":{error}}}"#)));
            assert_eq!(end, ResponseEnd::Interrupted(format!("the error {error}")));
        }
    }

    #[test]
    fn only_the_status_completed_makes_a_response_complete() {
        let end = |text: &str| ResponseEnd::of_response(&object(text));
        assert_eq!(end(r#"{"status":"completed","error":null,"incomplete_details":null}"#), ResponseEnd::Complete);
        for (text, reason) in [
            (r#"{"status":"incomplete"}"#, "incomplete"),
            (r#"{"status":"incomplete","incomplete_details":null}"#, "incomplete"),
            (r#"{"status":"incomplete","incomplete_details":{}}"#, "incomplete"),
            (r#"{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}"#, "max_output_tokens"),
            (r#"{"status":"completed","incomplete_details":{"reason":"content_filter"}}"#, "content_filter"),
            (r#"{"status":"incomplete","incomplete_details":3}"#, "incomplete"),
            (r#"{"incomplete_details":{"reason":"max_output_tokens"}}"#, "max_output_tokens"),
            (r#"{"status":null,"incomplete_details":{}}"#, "incomplete"),
        ] {
            assert_eq!(end(text), ResponseEnd::Truncated(reason.to_owned()), "{text}");
        }
        for status in [
            r#""failed""#,
            r#""cancelled""#,
            r#""in_progress""#,
            r#""queued""#,
            r#""Completed""#,
            r#""zebra""#,
            r#""""#,
            "null",
            "1",
            "{}",
            "[]",
        ] {
            assert_eq!(end(&format!(r#"{{"status":{status}}}"#)), ResponseEnd::Interrupted(format!("status {status}")));
        }
        assert_eq!(end("{}"), ResponseEnd::Interrupted("no `status`".to_owned()));
        let failed = end(r#"{"status":"completed","error":{"message":"lost"}}"#);
        assert_eq!(failed, ResponseEnd::Interrupted(r#"the error {"message":"lost"}"#.to_owned()));
    }
}
