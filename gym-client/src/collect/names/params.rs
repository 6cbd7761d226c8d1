//! The check of a row's request for the model: its agent rejects what this finds, in each of the row's rollouts.

use gym_core::RawObject;
use gym_core::server::RESPONSES_KEYS;
use serde_json::value::RawValue;

use crate::config::nearest_name;

const PARAMS: &str = "responses_create_params";
const INPUT: &str = "input";
/// The roles of messages in the Responses API, and those of tools that engines accept.
const ROLES: [&str; 6] = ["user", "assistant", "system", "developer", "tool", "function"];

/// An item of the input, as far as it is checked.
#[derive(serde::Deserialize)]
struct Item<'a> {
    #[serde(borrow, default)]
    role: Option<&'a RawValue>,
    #[serde(rename = "type", default)]
    kind: Option<serde::de::IgnoredAny>,
}

/// Checks the keys of the request and the roles of its messages.
///
/// # Errors
/// The key, and the fix.
pub(super) fn check(row: &RawObject) -> Result<(), String> {
    let params = match row.get_object(PARAMS) {
        Ok(Some(params)) => params,
        // The materializer reports an absent one.
        Ok(None) => return Ok(()),
        Err(error) => return Err(format!("{PARAMS}: {error}")),
    };
    if let Some(key) = params.keys().find(|key| RESPONSES_KEYS.binary_search(key).is_err()) {
        return Err(format!("{PARAMS}.{key}: unknown key; {}", fix_of_key(key)));
    }
    let Some(input) = params.get(INPUT) else {
        return Err(format!("{PARAMS}.{INPUT} is missing; add it: a string, or a list of messages"));
    };
    match input.first() {
        Some(b'"') => return Ok(()),
        Some(b'[') => {}
        _ => return Err(format!("{PARAMS}.{INPUT} is neither a string nor a list of messages")),
    }
    let text = std::str::from_utf8(&input).map_err(|error| format!("{PARAMS}.{INPUT}: {error}"))?;
    let items: Vec<Option<Item<'_>>> = serde_json::from_str::<Vec<&RawValue>>(text)
        .map_err(|error| format!("{PARAMS}.{INPUT}: {error}"))?
        .into_iter()
        .map(|item| serde_json::from_str(item.get()).ok())
        .collect();
    for (index, item) in items.iter().enumerate() {
        let place = format!("{PARAMS}.{INPUT}[{index}]");
        let Some(item) = item else {
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
    }
    Ok(())
}

fn fix_of_key(key: &str) -> String {
    match key {
        "messages" => format!("write `{INPUT}`: a row has the request of the Responses API, not of chat completions"),
        "max_tokens" | "max_completion_tokens" => "write `max_output_tokens`".to_owned(),
        "response_format" => "write `text`: {\"format\": …}".to_owned(),
        "reasoning_effort" => "write `reasoning`: {\"effort\": …}".to_owned(),
        _ => match nearest_name(key, RESPONSES_KEYS.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("remove it; known are {}", RESPONSES_KEYS.join(", ")),
        },
    }
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
            (r#"{"input": "x", "seed": 1}"#, "responses_create_params.seed: unknown key; remove it; known are"),
            (r#"{"temperature": 1}"#, "responses_create_params.input is missing; add it"),
            (r#"{"input": {"role": "user"}}"#, "input is neither a string nor a list"),
            (
                r#"{"input": [{"role": "usr", "content": "x"}]}"#,
                r#"input[0].role: "usr" is no role; did you mean `user`?"#,
            ),
            (r#"{"input": [{"role": 3}]}"#, "input[0].role: 3 is no role; use user, assistant"),
            (r#"{"input": [{"content": "x"}]}"#, "input[0] has neither a role nor a type"),
            (r#"{"input": ["x"]}"#, "input[0] is no message; write"),
            ("3", "responses_create_params: "),
        ] {
            let row = RawObject::parse(format!(r#"{{"responses_create_params": {params}}}"#)).unwrap();
            let said = check(&row).err().unwrap_or_default();
            assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{params}: {said}");
        }
        assert_eq!(check(&RawObject::parse("{}".to_owned()).unwrap()), Ok(()));
    }
}
