//! Judges the response to `GET /models`: whether the endpoint serves the configured model.

use std::sync::Arc;

use gym_core::message::readable;
use gym_core::server::EndpointState;
use serde_json::Value;

use crate::model::upstream::health::EndpointFailure;
use crate::model::upstream::keys::EndpointKeys;
use crate::model::upstream::response::EndpointResponse;

/// Maximum names of models that a message lists.
const NAMES_MAX: usize = 5;

/// Facts about the engine, from its list of models.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Engine {
    /// Tokens of the model's context, if it tells.
    pub(super) context_tokens: Option<u64>,
    /// The owner of the model, which of vLLM, SGLang and llama.cpp is their own name.
    pub(super) owner: Option<Arc<str>>,
}

impl Engine {
    pub(super) fn is_vllm(&self) -> bool {
        self.owner.as_deref() == Some("vllm")
    }
}

/// Returns the failure that the response shows; its state is `Ready` if it may be none. `Ok` if the endpoint lists the model.
pub(super) fn judge(answer: &EndpointResponse, keys: EndpointKeys, model: &str) -> Result<(), EndpointFailure> {
    let EndpointKeys { url, model: key, uses_responses, .. } = keys;
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
    let Some(listed) = listed(&list) else {
        return Err(not_checked("answered GET /models in a form that is not known"));
    };
    let mut names: Vec<String> = listed.iter().filter_map(named).map(|name| format!("`{name}`")).collect();
    if names.is_empty() || names.contains(&format!("`{model}`")) {
        if uses_responses && engine(answer, model).is_some_and(|engine| engine.is_vllm()) {
            return Err(EndpointFailure {
                state: EndpointState::Ready,
                reason: "it is a vLLM, which calls a response that it aborted `completed` over the Responses API".to_owned(),
                fix: "use `vllm_model` without `is_responses_native`: over chat, an aborted response says so; here, GET /metrics is asked \
                      before each response is accepted, and a row that cannot be checked has `completion_unverified`"
                    .to_owned(),
            });
        }
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

/// The models of a list: OpenAI's form, a bare list (Together AI), and `models` (Ollama, llama.cpp).
fn listed(list: &Value) -> Option<&Vec<Value>> {
    [&list["data"], list, &list["models"]].into_iter().find_map(Value::as_array)
}

fn named(model: &Value) -> Option<&str> {
    ["id", "name", "model"].iter().find_map(|key| model[*key].as_str())
}

/// Returns what the list tells about the engine; `None` if it is no list. The tokens of the context are in the forms of vLLM and SGLang, of llama.cpp for one of its
/// slots, and of gateways.
pub(super) fn engine(answer: &EndpointResponse, model: &str) -> Option<Engine> {
    let list: Value = serde_json::from_slice(&answer.body).ok().filter(|_| (200..300).contains(&answer.status))?;
    let entries = listed(&list)?;
    let context = |found: &Value| {
        let told =
            [&found["max_model_len"], &found["meta"]["n_ctx"], &found["context_length"], &found["context_window"]];
        told.into_iter().find_map(Value::as_u64).filter(|tokens| *tokens > 0)
    };
    let found = entries.iter().find(|entry| named(entry) == Some(model));
    let owner = found.into_iter().chain(entries).find_map(|entry| entry["owned_by"].as_str());
    Some(Engine { context_tokens: found.and_then(context), owner: owner.map(Arc::from) })
}

/// Returns what the status of a response says about the endpoint; `None` if it says nothing.
pub(super) fn of_status(answer: &EndpointResponse, keys: EndpointKeys, model: &str) -> Option<EndpointFailure> {
    if answer.is_aborted() {
        return Some(EndpointFailure {
            state: EndpointState::Unavailable,
            reason: "it aborts responses, as vLLM does when it pauses or sleeps".to_owned(),
            fix: "resume the engine (POST /resume, /wake_up); pause it with mode=wait or mode=keep".to_owned(),
        });
    }
    let EndpointKeys { url, api_key, model: key, .. } = keys;
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn the_context_of_the_model_is_read_in_each_form_and_of_no_other_model() {
        for (body, expected) in [
            (
                r#"{"object":"list","data":[{"id":"a","max_model_len":8},{"id":"m","owned_by":"vllm","max_model_len":4096}]}"#,
                Some(4096),
            ),
            (
                r#"{"models":[{"name":"m"}],"data":[{"id":"m","owned_by":"llamacpp","meta":{"n_ctx":4096,"n_ctx_train":32768}}]}"#,
                Some(4096),
            ),
            (r#"[{"id":"m","context_length":131072}]"#, Some(131_072)),
            (r#"{"data":[{"id":"m","context_window":8192}]}"#, Some(8_192)),
            (r#"{"data":[{"id":"other","max_model_len":8}]}"#, None),
            (r#"{"data":[{"id":"m","max_model_len":0}]}"#, None),
            (r#"{"data":[{"id":"m","max_model_len":"8","meta":7}]}"#, None),
            ("[3, null]", None),
            ("no JSON", None),
        ] {
            let answer = EndpointResponse::new(200, None, None, Bytes::from_static(body.as_bytes()));
            let engine = engine(&answer, "m").unwrap_or_default();
            assert_eq!(engine.context_tokens, expected, "{body}");
            assert_eq!(engine.is_vllm(), body.contains("vllm"), "{body}");
        }
    }
}
