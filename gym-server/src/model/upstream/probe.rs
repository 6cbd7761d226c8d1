//! Judges the response to `GET /models`: whether the endpoint serves the configured model.

use gym_core::message::readable;
use gym_core::server::EndpointState;
use serde_json::Value;

use crate::model::upstream::health::EndpointFailure;
use crate::model::upstream::keys::EndpointKeys;
use crate::model::upstream::response::EndpointResponse;

/// Maximum names of models that a message lists.
const NAMES_MAX: usize = 5;

/// Returns the failure that the response shows; its state is `Ready` if it may be none. `Ok` if the endpoint lists the model.
pub(super) fn judge(answer: &EndpointResponse, keys: EndpointKeys, model: &str) -> Result<(), EndpointFailure> {
    let EndpointKeys { url, model: key, .. } = keys;
    let not_checked = |why: &str| EndpointFailure {
        state: EndpointState::Ready,
        reason: format!("{why}, so the name of the model is not checked"),
        fix: format!("if the rollouts fail too, correct `{url}`"),
    };
    match answer.status {
        200..300 => {}
        401 | 403 | 429 | 500 | 502..600 => return of_status(answer, keys, model).map_or(Ok(()), Err),
        // Some gateways do not have the route.
        status => return Err(not_checked(&format!("answered {status} to GET /models"))),
    }
    // Whatever else a program says there, its rollouts decide; a page for a browser comes from another program.
    if answer.body.trim_ascii_start().starts_with(b"<") {
        return Err(keys.not_an_endpoint(&answer.body));
    }
    let list: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    // OpenAI's form, a bare list (Together AI), and `models` (Ollama, llama.cpp).
    let listed = [&list["data"], &list, &list["models"]].into_iter().find_map(Value::as_array);
    let Some(listed) = listed else { return Err(not_checked("answered GET /models in a form that is not known")) };
    let named = |model: &Value| ["id", "name", "model"].iter().find_map(|key| model[*key].as_str().map(str::to_owned));
    let mut names: Vec<String> = listed.iter().filter_map(named).map(|name| format!("`{name}`")).collect();
    if names.is_empty() || names.contains(&format!("`{model}`")) {
        return Ok(());
    }
    if names.len() > NAMES_MAX {
        let more = names.len() - NAMES_MAX;
        names.truncate(NAMES_MAX);
        names.push(format!("{more} more"));
    }
    Err(EndpointFailure {
        state: EndpointState::Misconfigured,
        reason: format!("it does not list the model `{model}`; it lists {}", names.join(", ")),
        fix: format!("correct `{key}`, or start the engine with this model"),
    })
}

/// Returns what the status of a response says about the endpoint; `None` if it says nothing.
pub(super) fn of_status(answer: &EndpointResponse, keys: EndpointKeys, model: &str) -> Option<EndpointFailure> {
    let EndpointKeys { url, api_key, model: key } = keys;
    let said = || readable(&answer.body).chars().take(200).collect::<String>();
    let (state, fix) = match answer.status {
        401 | 403 => {
            (EndpointState::Misconfigured, format!("correct the API key: `{api_key}`, or the variable OPENAI_API_KEY"))
        }
        429 if answer.exhausted_quota().is_some() => {
            (EndpointState::Misconfigured, "pay the account of this API key, or use another key".to_owned())
        }
        429 => (EndpointState::Unavailable, "wait, or lower the concurrency".to_owned()),
        404 => (
            EndpointState::Misconfigured,
            format!(
                "check that the endpoint serves `{model}` (`{key}`), and that `{url}` ends with the version, such as /v1"
            ),
        ),
        500..600 => (EndpointState::Unavailable, "see the log of the engine; wait if it is still starting".to_owned()),
        _ => return None,
    };
    let reason = format!("answered {}: {}", answer.status, said());
    Some(EndpointFailure { state, reason, fix })
}
