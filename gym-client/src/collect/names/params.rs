//! The check of a row's request for the model: its agent rejects what this finds, in each of the row's rollouts.

use gym_core::RawObject;
use serde_json::value::RawValue;

use crate::collect::names::content;
use crate::config::nearest_name;
use crate::config::params::{self, ParamMistake};

const PARAMS: &str = "responses_create_params";
const INPUT: &str = "input";
/// The roles of messages in the Responses API, and those of tools that engines accept.
const ROLES: [&str; 6] = ["user", "assistant", "system", "developer", "tool", "function"];

/// The roles of messages whose content is checked.
const WRITTEN_BY_PEOPLE: [&str; 3] = ["user", "system", "developer"];

/// An item of the input, as far as it is checked.
#[derive(serde::Deserialize)]
struct Item<'a> {
    #[serde(borrow, default)]
    role: Option<&'a RawValue>,
    #[serde(rename = "type", default, borrow)]
    kind: Option<&'a RawValue>,
}

impl Item<'_> {
    fn is_message(&self) -> bool {
        self.kind.is_none_or(|kind| matches!(kind.get(), "null" | r#""message""#))
    }
}

/// Keys that begin a conversation without a message in `input`.
const BEGIN_A_CONVERSATION: [&str; 4] = ["conversation", "instructions", "previous_response_id", "prompt"];

/// Checks the keys of the request, the types of their values, its tools and the roles of its messages. `begins` is `true` if the agent
/// adds no message before it calls the model.
///
/// # Errors
/// The key, and the fix.
pub(super) fn check(row: &RawObject, begins: bool) -> Result<(), String> {
    let request = match row.get_object(PARAMS) {
        Ok(Some(request)) => request,
        // The materializer reports an absent one.
        Ok(None) => return Ok(()),
        Err(error) => return Err(format!("{PARAMS}: {error}")),
    };
    for key in request.keys() {
        let Some(value) = request.get(key) else { continue };
        let value = std::str::from_utf8(&value).map_err(|error| format!("{PARAMS}.{key}: {error}"))?;
        params::check(key, value).map_err(|mistake| match mistake {
            ParamMistake::UnknownKey(fix) => format!("{PARAMS}.{key}: unknown key; {fix}"),
            ParamMistake::Value(path, problem) => format!("{PARAMS}.{key}{path} {problem}"),
        })?;
    }
    let Some(input) = request.get(INPUT) else {
        return Err(format!("{PARAMS}.{INPUT} is missing; add it: a string, or a list of messages"));
    };
    let has = |key: &&str| request.get(key).is_some_and(|value| value != "null");
    let empty = begins && !BEGIN_A_CONVERSATION.iter().any(has);
    match input.first() {
        Some(b'"') if empty && serde_json::from_slice::<&str>(&input).is_ok_and(|text| text.trim().is_empty()) => {
            return Err(format!("{PARAMS}.{INPUT} is an empty string; write the text of the task"));
        }
        Some(b'"') => return Ok(()),
        Some(b'[') => {}
        _ => return Err(format!("{PARAMS}.{INPUT} is neither a string nor a list of messages")),
    }
    let text = std::str::from_utf8(&input).map_err(|error| format!("{PARAMS}.{INPUT}: {error}"))?;
    let items: Vec<&RawValue> = serde_json::from_str(text).map_err(|error| format!("{PARAMS}.{INPUT}: {error}"))?;
    if items.is_empty() && empty {
        return Err(format!(
            "{PARAMS}.{INPUT} is an empty list; add a message: {{\"role\": \"user\", \"content\": \"…\"}}"
        ));
    }
    for (index, raw) in items.iter().enumerate() {
        let place = format!("{PARAMS}.{INPUT}[{index}]");
        let Ok(item) = serde_json::from_str::<Item<'_>>(raw.get()) else {
            return Err(format!("{place} is no message; write {{\"role\": \"user\", \"content\": \"…\"}}"));
        };
        let Some(role) = item.role else {
            if item.kind.is_none() {
                return Err(format!("{place} has neither a role nor a type; add \"role\": \"user\""));
            }
            continue;
        };
        let known = serde_json::from_str::<&str>(role.get()).unwrap_or_default();
        if !ROLES.contains(&known) {
            let fix = match nearest_name(known, ROLES) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "use user, assistant, system or developer".to_owned(),
            };
            return Err(format!("{place}.role: {} is no role; {fix}", role.get()));
        }
        if WRITTEN_BY_PEOPLE.contains(&known) && item.is_message() {
            let members = serde_json::from_str(raw.get()).map_err(|error| format!("{place}: {error}"))?;
            content::check(&members).map_err(|(below, problem)| format!("{place}{below} {problem}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_each_agent_rejects_is_named_with_its_key_and_the_fix() {
        for (params, expected) in [
            (r#"{"input": "x", "temperature": 1, "metadata": {"a": "b"}}"#, ""),
            (r#"{"input": [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}]}"#, ""),
            (r#"{"input": [{"role": "tool", "content": "x"}]}"#, ""),
            (r#"{"messages": []}"#, "responses_create_params.messages: unknown key; write `input`: a row has"),
            (
                r#"{"input": "x", "temprature": 1}"#,
                "responses_create_params.temprature: unknown key; did you mean `temperature`?",
            ),
            (r#"{"input": "x", "max_tokens": 1}"#, "unknown key; write `max_output_tokens`"),
            (
                r#"{"input": "x", "seed": 1}"#,
                "seed: unknown key; the Responses API has none: remove it, and give each rollout",
            ),
            (
                r#"{"input": "x", "stop": ["x"]}"#,
                r#"none: remove it, or write "metadata": {"extra_body": "{\"stop\": …}"} for an engine that has it"#,
            ),
            (
                r#"{"input": "x", "n": 4}"#,
                "responses_create_params.n: unknown key; the Responses API has none: remove it, and collect each row N times",
            ),
            (r#"{"input": "x", "response_format": {}}"#, r#"write `text`: {"format": …}"#),
            (r#"{"input": "x", "functions": []}"#, "write `tools`: ["),
            (r#"{"input": "x", "max_token": 5}"#, "write `max_output_tokens`"),
            (r#"{"input": "x", "nonsense": 5}"#, "unknown key; remove it; known are"),
            // The types, in pydantic's lax mode.
            (
                r#"{"input": "x", "temperature": "hot"}"#,
                r#"responses_create_params.temperature is a string: "hot"; write a number"#,
            ),
            (r#"{"input": "x", "temperature": [1]}"#, "temperature is a list: [1]; write a number"),
            (r#"{"input": "x", "temperature": "0.5", "top_p": " 0_9.5e-1 ", "max_output_tokens": "12"}"#, ""),
            (r#"{"input": "x", "temperature": null, "top_p": true, "max_output_tokens": 12.0}"#, ""),
            (r#"{"input": "x", "temperature": "1__0"}"#, "temperature is a string"),
            (r#"{"input": "x", "max_output_tokens": 1.5}"#, "max_output_tokens is a number: 1.5; write a whole number"),
            (r#"{"input": "x", "max_output_tokens": 123456789012345678901234567890}"#, ""),
            // Ranges: only what no engine accepts.
            (r#"{"input": "x", "temperature": 3, "top_p": 0, "max_output_tokens": 1}"#, ""),
            (
                r#"{"input": "x", "temperature": -5}"#,
                "responses_create_params.temperature is a number: -5; write 0 or more, such as 0.7",
            ),
            (r#"{"input": "x", "temperature": "nan"}"#, r#"temperature is a string: "nan"; write 0 or more"#),
            (r#"{"input": "x", "top_p": 3}"#, "top_p is a number: 3; write a number from 0 to 1"),
            (
                r#"{"input": "x", "max_output_tokens": 0}"#,
                "max_output_tokens is a number: 0; write 1 or more, or remove",
            ),
            (r#"{"input": "x", "max_output_tokens": -1}"#, ""),
            (r#"{"input": "x", "max_output_tokens": "-5"}"#, r#"max_output_tokens is a string: "-5"; write 1 or more"#),
            (r#"{"input": "x", "parallel_tool_calls": "Yes", "store": 0}"#, ""),
            (
                r#"{"input": "x", "parallel_tool_calls": "maybe"}"#,
                r#"parallel_tool_calls is a string: "maybe"; write true or false"#,
            ),
            (r#"{"input": "x", "instructions": ["be brief"]}"#, "instructions is a list"),
            (r#"{"input": "x", "text": "json"}"#, r#"text is a string: "json"; write an object, such as {"format""#),
            (r#"{"input": "x", "include": "logprobs"}"#, "include is a string"),
            (r#"{"input": "x", "metadata": {"id": 7}}"#, r#"metadata.id is a number: 7; write a string: "7""#),
            (r#"{"input": "x", "metadata": "a"}"#, "metadata is a string"),
            (r#"{"input": "x", "stream": true}"#, "stream is a boolean: true; remove it"),
            (r#"{"input": "x", "stream": false, "moderation": 3}"#, ""),
            // Tools.
            (
                r#"{"input": "x", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}, {"type": "new"}]}"#,
                "",
            ),
            (r#"{"input": "x", "tools": null, "tool_choice": null}"#, ""),
            (
                r#"{"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
                "responses_create_params.tools[0] has the form of chat completions; move name",
            ),
            (
                r#"{"input": "x", "tools": [{"type": "function", "nme": "f"}]}"#,
                "tools[0] has no name; write `name` for `nme`",
            ),
            (r#"{"input": "x", "tools": [{"type": "function"}]}"#, "tools[0] has no name; add it beside `type`"),
            (r#"{"input": "x", "tools": [{"type": "custom", "name": 3}]}"#, "tools[0].name is a number: 3"),
            (r#"{"input": "x", "tools": [{"name": "f"}]}"#, r#"tools[0] has no type; add "type": "function""#),
            (r#"{"input": "x", "tools": ["f"]}"#, r#"tools[0] is a string: "f"; write an object"#),
            (r#"{"input": "x", "tools": {"type": "function"}}"#, "tools is an object"),
            (
                r#"{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": "none"}]}"#,
                r#"tools[0].parameters is a string: "none"; write a JSON schema"#,
            ),
            (r#"{"input": "x", "tool_choice": "required"}"#, ""),
            (r#"{"input": "x", "tool_choice": {"type": "function", "name": "f"}}"#, ""),
            (r#"{"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}"#, ""),
            (r#"{"input": "x", "tool_choice": "requird"}"#, r#"tool_choice is "requird"; did you mean `required`?"#),
            (r#"{"input": "x", "tool_choice": "any"}"#, r#"tool_choice is "any"; write `required`"#),
            (
                r#"{"input": "x", "tool_choice": {"type": "function", "function": {"name": "f"}}}"#,
                "tool_choice has the form of chat completions; write",
            ),
            (r#"{"input": "x", "tool_choice": {"name": "f"}}"#, "tool_choice has no type"),
            (r#"{"input": "x", "tool_choice": 1}"#, "tool_choice is a number: 1; write auto, none"),
            // An input without a task.
            (r#"{"input": ""}"#, "responses_create_params.input is an empty string; write the text"),
            (r#"{"input": []}"#, "responses_create_params.input is an empty list; add a message"),
            (r#"{"input": [], "instructions": "Begin."}"#, ""),
            (r#"{"temperature": 1}"#, "responses_create_params.input is missing; add it"),
            (r#"{"input": {"role": "user"}}"#, "input is neither a string nor a list"),
            (
                r#"{"input": [{"role": "usr", "content": "x"}]}"#,
                r#"input[0].role: "usr" is no role; did you mean `user`?"#,
            ),
            (r#"{"input": [{"role": 3}]}"#, "input[0].role: 3 is no role; use user, assistant"),
            (r#"{"input": [{"content": "x"}]}"#, "input[0] has neither a role nor a type"),
            // The content of messages.
            (
                r#"{"input": [{"role": "user", "contnt": "x"}]}"#,
                "responses_create_params.input[0] has no content; write `content` for `contnt`",
            ),
            (r#"{"input": [{"role": "user"}]}"#, "input[0] has no content; add it"),
            (
                r#"{"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}"#,
                r#"input[0].content[0].type is "text"; write `input_text`"#,
            ),
            (
                r#"{"input": [{"role": "user", "content": [{"type": "input_txt", "text": "x"}]}]}"#,
                r#"input[0].content[0].type is "input_txt"; did you mean `input_text`?"#,
            ),
            (
                r#"{"input": [{"type": "message", "role": "system", "content": [{"type": "input_text", "txt": "x"}]}]}"#,
                "input[0].content[0] has no text; write `text` for `txt`",
            ),
            (r#"{"input": [{"role": "user", "content": [{"text": "x"}]}]}"#, "content[0] has no type; add it"),
            (r#"{"input": [{"role": "user", "content": ["x"]}]}"#, "content[0] is no object; write"),
            (
                r#"{"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}, {"type": "sensor"}]}]}"#,
                "",
            ),
            (r#"{"input": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]}"#, ""),
            (r#"{"input": [{"role": "assistant", "tool_calls": []}]}"#, ""),
            (r#"{"input": ["x"]}"#, "input[0] is no message; write"),
            ("3", "responses_create_params: "),
        ] {
            let row = RawObject::parse(format!(r#"{{"responses_create_params": {params}}}"#)).unwrap();
            let said = check(&row, true).err().unwrap_or_default();
            assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{params}: {said}");
        }
        for row in
            ["{}", r#"{"responses_create_params": {"input": []}}"#, r#"{"responses_create_params": {"input": ""}}"#]
        {
            assert_eq!(check(&RawObject::parse(row).unwrap(), false), Ok(()), "the agent adds the first message");
        }
    }
}
