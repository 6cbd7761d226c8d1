//! Recognizes the errors with which engines reject a request that does not fit into the model's context.
//!
//! Only such an error may become a truncated response: NeMo Gym scores those. Any other error that mentions `max_tokens` or the context
//! length is an error of the configuration or of the engine, and must not become a reward.

use gym_core::message::readable;

use crate::model::upstream::EndpointResponse;

/// The codes and types that say it: those of OpenAI (also of newer engines) and of llama.cpp.
const CODES: [&str; 2] = ["context_length_exceeded", "exceed_context_size_error"];

/// The phrases before the model's maximum, in lower case. The tests have the complete texts.
const MAXIMUM_FOLLOWS: [&str; 9] = [
    "maximum context length is",
    "maximum context length of",
    "the model's context length (",
    "maximum model length of",
    "into the model (context length",
    "maximum allowed length (",
    "maximum input length (",
    "should not exceed max_num_tokens (",
    "should not exceed max_seq_len (",
];

/// The phrases after and before the number of tokens that the request reserves for the response.
const OUTPUT_BEFORE: [&str; 3] = ["in the completion", "for the completion", "output tokens and your prompt"];
const OUTPUT_AFTER: [&str; 2] = ["is too large:", "and max_tokens ("];

/// The phrases after and before the number of tokens of the prompt, in messages without the sum.
const INPUT_BEFORE: [&str; 1] = ["input tokens"];
const INPUT_AFTER: [&str; 1] = ["prompt length ("];

/// Returns the engine's message if the response rejects a request that does not fit into the model's context. `output` is the limit of the response
/// that the request sets.
pub(super) fn of(answer: &EndpointResponse, output: Option<u64>) -> Option<String> {
    if !matches!(answer.status, 400 | 413 | 422) {
        return None;
    }
    let text = readable(&answer.body);
    let coded = answer.codes().iter().any(|code| CODES.contains(&code.as_str()));
    (coded || exceeds(&text) || leaves_no_room(&text, output)).then_some(text)
}

/// Returns `true` for the messages of vLLM about a prompt that is exactly as long as the context: no token is left for a response. A request that
/// itself asks for a response without tokens gets the first text too, and is wrong.
fn leaves_no_room(text: &str, output: Option<u64>) -> bool {
    let text = text.to_lowercase();
    let computed = text.contains("max_tokens must be at least 1, got 0") && output != Some(0);
    let after = |phrase: &str| numbers(&text[text.find(phrase)? + phrase.len()..]).next().map(|(_, number)| number);
    // The length of the prompt, and the model's maximum.
    let lengths = [
        ("engine prompt length", "exceeds the max_model_len"),
        ("prompt (length", "is longer than the maximum model length of"),
    ];
    let full = lengths.into_iter().any(|(prompt, maximum)| {
        let at = text.find(prompt).filter(|at| text[*at..].contains(maximum));
        at.is_some() && after(prompt).zip(after(maximum)).is_some_and(|(prompt, maximum)| prompt >= maximum)
    });
    computed || full
}

/// Returns `true` if the message names the model's maximum and a larger request. A request whose response alone reaches the maximum has a
/// wrong option: it would fail with any prompt.
fn exceeds(text: &str) -> bool {
    let text = text.to_lowercase();
    let Some((maximum_at, maximum)) = MAXIMUM_FOLLOWS.iter().find_map(|phrase| {
        let at = text.find(phrase)? + phrase.len();
        let (digits, maximum) = numbers(&text[at..]).next()?;
        Some((at + digits, maximum))
    }) else {
        return false;
    };
    let after = |phrase: &&str| Some(numbers(&text[text.find(*phrase)? + phrase.len()..]).next()?.1);
    let before = |phrase: &&str| Some(numbers(&text[..text.find(*phrase)?]).last()?.1);
    let output = OUTPUT_AFTER.iter().find_map(after).or_else(|| OUTPUT_BEFORE.iter().find_map(before));
    let input = INPUT_AFTER.iter().find_map(after).or_else(|| INPUT_BEFORE.iter().find_map(before));
    if output.is_some_and(|output| output >= maximum) {
        return false;
    }
    let sum = input.unwrap_or(0).saturating_add(output.unwrap_or(0));
    let mut others = numbers(&text).filter(|(at, _)| *at != maximum_at).map(|(_, number)| number);
    sum > maximum || others.any(|number| number > maximum)
}

/// Returns the natural numbers of a text with their positions: `72,417` and `72417.0` are 72417.
fn numbers(text: &str) -> impl Iterator<Item = (usize, u64)> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + text[at..].find(|c: char| c.is_ascii_digit())?;
        let rest = &text[start..];
        let bytes = rest.as_bytes();
        let mut end = 0;
        while end < bytes.len() {
            let thousands =
                bytes[end] == b',' && bytes.len() >= end + 4 && bytes[end + 1..end + 4].iter().all(u8::is_ascii_digit);
            if !bytes[end].is_ascii_digit() && !thousands {
                break;
            }
            end += 1;
        }
        let number = rest[..end].replace(',', "").parse().unwrap_or(u64::MAX);
        // The digits behind a decimal point belong to the number.
        let fraction = rest[end..].strip_prefix('.').map_or(0, |rest| {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            if digits == 0 { 0 } else { digits + 1 }
        });
        at = start + end + fraction;
        Some((start, number))
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn is_overflow(status: u16, body: &str) -> bool {
        of(&EndpointResponse::new(status, None, None, Bytes::copy_from_slice(body.as_bytes())), None).is_some()
    }

    fn vllm(message: &str) -> String {
        json!({"object": "error", "message": message, "type": "BadRequestError", "param": null, "code": 400})
            .to_string()
    }

    #[test]
    fn a_request_that_exceeds_the_models_context_is_one() {
        for message in [
            // vLLM until 0.9, with its own trailing `None`.
            "This model's maximum context length is 32768 tokens. However, you requested 32818 tokens in the messages, Please reduce the length of the messages. None",
            "This model's maximum context length is 16384 tokens. However, you requested 19591 tokens (9591 in the messages, 10000 in the completion). Please reduce the length of the messages or completion. None",
            // vLLM 0.10 to 0.14.
            "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context length is 4096 tokens and your request has 100 input tokens (4000 > 4096 - 100). None",
            "The decoder prompt (length 5951) is longer than the maximum model length of 4096. Make sure that `max_model_len` is no smaller than the number of text tokens.",
            "The prompt (total length 25938) is too long to fit into the model (context length 4096). Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens.",
            // vLLM from 0.15 on.
            "This model's maximum context length is 32768 tokens. However, you requested 4096 output tokens and your prompt contains at least 28673 input tokens, for a total of at least 32769 tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
            "This model's maximum context length is 32768 tokens. However, you requested 4096 output tokens and your prompt contains 200000 characters (more than 130688 characters, which is the upper bound for 28672 input tokens). Please reduce the length of the input prompt or the number of requested output tokens.",
            // SGLang.
            "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
            "Requested token count exceeds the model's maximum context length of 202752 tokens. You requested a total of 202941 tokens: 170941 tokens from the input messages and 32000 tokens for the completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit.",
            "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens). Use a shorter input or enable --allow-auto-truncate.",
            // TensorRT-LLM.
            "The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)",
            "The sum of prompt length (8000), query length (0) and max_tokens (512) should not exceed max_seq_len (8192)",
            "Encountered an error when fetching new request: Prompt length (5056) exceeds maximum input length (2048)",
            // OpenAI before it had a code.
            "This model's maximum context length is 4097 tokens, however you requested 4226 tokens (226 in your prompt; 4000 for the completion). Please reduce your prompt; or completion length.",
            "This model's maximum context length is 131,072 tokens. However, your request has 140,000 tokens.",
        ] {
            assert!(is_overflow(400, &vllm(message)), "{message}");
            assert!(!is_overflow(500, &vllm(message)), "only a rejected request is one: {message}");
        }
        for body in [
            json!({"error": {"message": "Your input exceeds the context window of this model. Please adjust your input and try again.", "type": "invalid_request_error", "param": "input", "code": "context_length_exceeded"}}),
            json!({"object": "error", "message": "too long", "type": "BadRequestError", "code": "context_length_exceeded"}),
            json!({"error": {"code": 400, "message": "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it", "type": "exceed_context_size_error", "n_prompt_tokens": 5000, "n_ctx": 4096}}),
        ] {
            assert!(is_overflow(400, &body.to_string()), "{body}");
        }
    }

    #[test]
    fn a_prompt_as_long_as_the_context_is_one() {
        let no_room = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)";
        for (message, output, expected) in [
            (no_room, None, true),
            (no_room, Some(16), true),
            // The request asks for a response without tokens.
            (no_room, Some(0), false),
            ("max_tokens must be at least 1, got -1", None, false),
            (
                "The decoder prompt (length 4096) plus the number of requested output tokens (at least 1) is longer than the maximum model length of 4096. Make sure that",
                None,
                true,
            ),
            ("The engine prompt length 4096 exceeds the max_model_len 4096. Please reduce prompt.", None, true),
            ("The engine prompt length 5 exceeds the max_model_len 4096", None, false),
            ("the max_model_len 4096 exceeds the engine prompt length 5", None, false),
        ] {
            let answer = EndpointResponse::new(400, None, None, vllm(message).into());
            assert_eq!(of(&answer, output).is_some(), expected, "{message} {output:?}");
        }
    }

    #[test]
    fn other_errors_about_tokens_are_errors() {
        for message in [
            "max_tokens must be at least 1, got -186.",
            "min_tokens must be less than or equal to max_tokens=16, got 32.",
            "max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided 100000.",
            // The response alone does not fit: every prompt would fail.
            "'max_tokens' or 'max_completion_tokens' is too large: 40000. This model's maximum context length is 32768 tokens and your request has 12 input tokens (40000 > 32768 - 12). None",
            "This model's maximum context length is 32768 tokens. However, you requested 40012 tokens (12 in the messages, 40000 in the completion). Please reduce the length of the messages or completion.",
            "This model's maximum context length is 32768 tokens. However, you requested 40000 output tokens and your prompt contains 12 input tokens, for a total of 40012 tokens.",
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
            "maximum context length is 5 tokens",
            "the context length option cannot be combined with `truncation`",
            "1 validation error for ChatCompletionRequest: max_tokens: Input should be a valid integer",
            "",
        ] {
            assert!(!is_overflow(400, &vllm(message)), "{message}");
        }
        for body in ["", "{}", "<html>maximum context length</html>", "[1]", r#"{"detail":"max_tokens"}"#] {
            assert!(!is_overflow(400, body), "{body}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_judged(text in ".{0,80}(maximum context length is|is too large:)?.{0,80}") {
            let _ = exceeds(&text);
        }

        #[test]
        fn a_prompt_overflows_exactly_if_prompt_and_response_exceed_the_maximum(
            maximum in 2..200_000_u64, input in 0..400_000_u64, share in 0..100_u64,
        ) {
            let output = (maximum - 1) * share / 100;
            let total = input + output;
            let text = format!("This model's maximum context length is {maximum} tokens. However, you requested {total} tokens ({input} in the messages, {output} in the completion).");
            prop_assert_eq!(is_overflow(400, &vllm(&text)), total > maximum);
        }
    }
}
