//! The forms of `tools` and `tool_choice`. A type of tools that is not known here passes.

use serde_json::Value;

use crate::config::params::values::problem;
use crate::config::problem::nearest as nearest_name;

/// The texts that `tool_choice` may be.
const CHOICES: [&str; 3] = ["auto", "none", "required"];

/// The form of a function in the Responses API.
const FORM: &str = r#"{"type": "function", "name": …, "description": …, "parameters": {…}}"#;

/// Checks a list of tools.
///
/// # Errors
/// The path below `tools`, and the problem with its fix.
pub(super) fn check(text: &str) -> Result<(), (String, String)> {
    let Ok(tools) = serde_json::from_str::<Value>(text) else { return Ok(()) };
    if tools.is_null() {
        return Ok(());
    }
    let Some(tools) = tools.as_array() else {
        return Err((String::new(), problem(&tools, &format!("write a list: [{FORM}]"))));
    };
    for (index, tool) in tools.iter().enumerate() {
        let at = |path: &str| format!("[{index}]{path}");
        let Some(members) = tool.as_object() else {
            return Err((at(""), problem(tool, &format!("write an object: {FORM}"))));
        };
        let chat_form = members.get("function").is_some_and(Value::is_object) && !members.contains_key("name");
        if chat_form {
            return Err((
                at(""),
                format!(
                    "has the form of chat completions; move name, description and parameters out of \
                 `function`, beside `type`: {FORM}"
                ),
            ));
        }
        let kind = match members.get("type") {
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => return Err((at(".type"), problem(other, "write a string: \"function\""))),
            None => return Err((at(""), "has no type; add \"type\": \"function\"".to_owned())),
        };
        if !matches!(kind, "function" | "custom") {
            continue;
        }
        match members.get("name") {
            Some(Value::String(name)) if !name.is_empty() => {}
            Some(Value::String(_)) => return Err((at(".name"), "is empty; write the name of the tool".to_owned())),
            Some(other) => return Err((at(".name"), problem(other, "write a string: the name of the tool"))),
            None => {
                let near = nearest_name("name", members.keys().map(String::as_str));
                let fix = match near {
                    Some(near) => format!("write `name` for `{near}`"),
                    None => format!("add it beside `type`: {FORM}"),
                };
                return Err((at(""), format!("has no name; {fix}")));
            }
        }
        match members.get("parameters") {
            None | Some(Value::Null | Value::Object(_)) => {}
            Some(other) => {
                let fix = r#"write a JSON schema: {"type": "object", "properties": {…}}"#;
                return Err((at(".parameters"), problem(other, fix)));
            }
        }
    }
    Ok(())
}

/// Checks the choice of a tool.
///
/// # Errors
/// The path below `tool_choice`, and the problem with its fix.
pub(super) fn check_choice(text: &str) -> Result<(), (String, String)> {
    let Ok(choice) = serde_json::from_str::<Value>(text) else { return Ok(()) };
    let here = |problem: String| Err((String::new(), problem));
    let form = r#"write auto, none, required or {"type": "function", "name": …}"#;
    match &choice {
        Value::Null => Ok(()),
        Value::String(given) if CHOICES.contains(&given.as_str()) => Ok(()),
        Value::String(given) => match nearest_name(given, CHOICES) {
            Some(near) => here(format!("is {choice}; did you mean `{near}`?")),
            None if given == "any" => here(format!("is {choice}; write `required`")),
            None => here(format!("is {choice}; {form}")),
        },
        Value::Object(members) => match members.get("type") {
            Some(Value::String(kind)) if matches!(kind.as_str(), "function" | "custom") => match members.get("name") {
                Some(Value::String(_)) => Ok(()),
                Some(other) => Err((".name".to_owned(), problem(other, "write a string: the name of the tool"))),
                None if members.contains_key(kind) => {
                    here(format!("has the form of chat completions; write {{\"type\": \"{kind}\", \"name\": …}}"))
                }
                None => here(format!("has no name; write {{\"type\": \"{kind}\", \"name\": …}}")),
            },
            Some(Value::String(_)) => Ok(()),
            Some(other) => Err((".type".to_owned(), problem(other, "write a string: \"function\""))),
            None => here(format!("has no type; {form}")),
        },
        other => here(problem(other, form)),
    }
}
