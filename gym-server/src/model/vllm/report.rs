//! The reports of a response beyond the Responses API: the words of the engine about the turn, and what shaped its prompt.
//!
//! The reports are keys of the response: NeMo Gym's agents and verifiers in Python drop unknown keys of its items, and keep those of
//! the response itself. Values keep the engine's text.

use bytes::Bytes;
use gym_core::RawObject;

use crate::model::vllm::request::ObjectText;

/// The keys of engines: the version that ended the generation, and the versions of its tokens if the weights changed meanwhile.
const WEIGHT_KEYS: [&str; 2] = ["weight_version", "weight_versions"];

/// The objects in a response or a choice that have these keys. SGLang writes them into `metadata`, newer versions into `sglext`, and
/// with `return_meta_info` into `meta_info` of the choice.
const WEIGHT_OBJECTS: [&str; 3] = ["metadata", "sglext", "meta_info"];

/// The keys of a choice with its end: the engine's word, and that of the provider behind a gateway.
const END_KEYS: [&str; 2] = ["finish_reason", "native_finish_reason"];

/// Keys of an engine's request that shape the prompt, besides messages and tools: those of vLLM's `ChatCompletionRequest`.
const PROMPT_KEYS: [&str; 13] = [
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "truncate_prompt_tokens",
    "truncation_side",
    "echo",
    "reasoning_effort",
    "tool_choice",
];

fn known(object: &RawObject, key: &str) -> Option<Bytes> {
    object.get(key).filter(|value| &value[..] != b"null")
}

fn add(report: &mut ObjectText, key: &str, value: &Bytes) {
    report.add(key, &String::from_utf8_lossy(value));
}

/// Returns the report of a turn, as a list with one object; `None` if the engine reported nothing. `choice` is that of a chat
/// completion.
pub(super) fn turn(response: &RawObject, choice: Option<&RawObject>) -> Option<String> {
    let mut report = ObjectText::default();
    for key in END_KEYS {
        if let Some(word) = choice.and_then(|choice| known(choice, key)) {
            add(&mut report, key, &word);
        }
    }
    let owners: Vec<&RawObject> = choice.into_iter().chain([response]).collect();
    let nested = owners.iter().flat_map(|owner| WEIGHT_OBJECTS.iter().map(move |key| owner.get_object(key)));
    let nested: Vec<RawObject> = nested.filter_map(|object| object.ok().flatten()).collect();
    for key in WEIGHT_KEYS {
        if let Some(version) = owners.iter().copied().chain(&nested).find_map(|object| known(object, key)) {
            add(&mut report, key, &version);
        }
    }
    (!report.is_empty()).then(|| format!("[{}]", report.finish()))
}

/// Returns what the server added or changed of the keys that shape the prompt; `None` if there is nothing.
pub(super) fn prompt(request: &RawObject, sent: &RawObject) -> Option<String> {
    let mut report = ObjectText::default();
    for key in PROMPT_KEYS {
        if let Some(value) = known(sent, key).filter(|value| request.get(key).as_ref() != Some(value)) {
            add(&mut report, key, &value);
        }
    }
    (!report.is_empty()).then(|| report.finish())
}
