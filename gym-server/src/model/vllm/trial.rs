//! Trial calls at the start: what each rollout would run into is said before the first one.
//!
//! A trial is made for engines that a user starts: vLLM, SGLang and llama.cpp, and wherever token ids are requested. Hosted models bill each call.

use std::time::Duration;

use bytes::Bytes;
use gym_core::message::readable;
use gym_core::server::{EndpointReport, EndpointState};
use gym_core::{CallContext, RawObject};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::model::upstream::{EndpointResponse, Upstream};

/// Limit of a trial: it is one token. An engine that is busy or compiles says nothing about its abilities.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(4);

/// Owners that lists of models name: the engines that are tried.
const OWN_ENGINES: [&str; 3] = ["vllm", "sglang", "llamacpp"];

/// Returns the request of a trial, with or without a tool, in the Responses dialect.
pub(in crate::model) fn request(with_tool: bool) -> RawObject {
    let mut request = json!({"input": "Say yes.", "max_output_tokens": 1});
    if with_tool {
        let parameters = json!({"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]});
        request["tools"] = json!([{
            "type": "function", "name": "move_boxes", "description": "Moves boxes.", "parameters": parameters, "strict": false,
        }]);
    }
    RawObject::parse(request.to_string()).expect("a JSON object")
}

/// Returns `true` if the engine is tried.
pub(in crate::model) fn is_due(engine: &Upstream, report: &EndpointReport, needs_ids: bool) -> bool {
    let owned = engine.owner().is_some_and(|owner| OWN_ENGINES.contains(&&*owner));
    report.state == EndpointState::Ready && (needs_ids || owned)
}

/// Makes the trial calls: `bodies` are those of [`request`] without and with a tool, as the engine gets them. Adds to the report what they show.
/// `check` looks at the response to the first.
pub(in crate::model) async fn run(
    cx: &CallContext,
    engine: &Upstream,
    path: &str,
    bodies: [Bytes; 2],
    check: impl Fn(&EndpointResponse) -> Result<(), Finding>,
    report: &mut EndpointReport,
) {
    let mut cx = cx.child();
    cx.deadline = cx.deadline.min(Instant::now() + TRIAL_TIMEOUT);
    let [plain, tool] = bodies;
    let Ok(plain) = engine.try_once(&cx, path, plain).await else { return };
    if plain.status >= 300 {
        // The rollouts tell what is wrong with each call.
        return;
    }
    let tool = engine.try_once(&cx, path, tool).await.ok();
    let findings = [check(&plain).err(), tool.and_then(|tool| of_tools(&plain, &tool))];
    for Finding { state, reason, fix } in findings.into_iter().flatten() {
        for (known, more) in [(&mut report.reason, reason), (&mut report.fix, fix)] {
            if !known.is_empty() {
                known.push_str("; ");
            }
            known.push_str(&more);
        }
        if state == EndpointState::Misconfigured {
            report.state = state;
        }
    }
}

/// The result of a trial.
#[derive(Debug)]
pub(in crate::model) struct Finding {
    /// `Misconfigured` if each rollout would fail.
    pub(in crate::model) state: EndpointState,
    pub(in crate::model) reason: String,
    pub(in crate::model) fix: String,
}

/// Compares the responses without and with a tool.
fn of_tools(plain: &EndpointResponse, tool: &EndpointResponse) -> Option<Finding> {
    let (reason, fix) = if matches!(tool.status, 400 | 422) {
        let said: String = readable(&tool.body).chars().take(200).collect();
        let fix = "start the engine with tools, as vLLM with --enable-auto-tool-choice --tool-call-parser NAME";
        (format!("it rejects a request with a tool: {said}"), fix)
    } else {
        let (without, with) = (prompt_tokens(plain)?, prompt_tokens(tool)?);
        if without != with {
            return None;
        }
        let reason =
            format!("its chat template ignores `tools`: a prompt has {with} tokens with a tool and without it");
        (reason, "use a model whose template has tools, or give the engine another template")
    };
    let fix = format!("{fix}; tasks without tools need nothing");
    Some(Finding { state: EndpointState::Ready, reason, fix })
}

/// Returns the tokens of the prompt, in either dialect.
fn prompt_tokens(answer: &EndpointResponse) -> Option<u64> {
    let usage: Value = RawObject::parse(answer.body.clone()).ok()?.get_as("usage").ok().flatten()?;
    ["prompt_tokens", "input_tokens"].iter().find_map(|key| usage[*key].as_u64()).filter(|_| answer.status < 300)
}
