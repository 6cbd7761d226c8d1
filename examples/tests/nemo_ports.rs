//! Checks that the ports answer like the Python originals.
//!
//! `tests/python/golden_envs.py` creates the recorded calls. Tool responses and rejections are compared as text. Verdicts are
//! compared by the reward and by every field that the environment adds. With `NEMO_RECORDED=FOLDER`, the calls in that directory
//! are replayed instead of the committed ones; see the script.
#![allow(clippy::unwrap_used)] // Also in what the tests share, which the lint does not know for tests.

use gym_core::{CallContext, Code, ModelResponse, RawObject, ResourcesServer, SessionId};
use gym_examples::nemo::{MultiStep, SessionState, SingleToolCall, ToolCallMultiReward};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Call {
    session: u32,
    path: String,
    body: String,
    status: u16,
    reply: String,
}

/// Keys of a verify response that every server has and that the port's caller adds.
const COMMON: [&str; 5] = ["responses_create_params", "response", "mask_sample", "failure_kind", "failure_reason"];

fn recorded(name: &str) -> String {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/nemo");
    let folder = std::env::var("NEMO_RECORDED").unwrap_or_else(|_| committed.to_owned());
    let path = format!("{folder}/{name}.jsonl");
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

async fn replay<S: ResourcesServer>(server: S, name: &str) {
    let cx = CallContext::default();
    let recorded = recorded(name);
    let mut compared = 0;
    for (at, line) in recorded.lines().enumerate() {
        let call: Call = serde_json::from_str(line).unwrap();
        let session = SessionId::new(call.session.to_string());
        let body = RawObject::parse(call.body.clone()).unwrap();
        let place = format!("line {}: {} {:.200}", at + 1, call.path, call.body);
        match call.path.as_str() {
            "/seed_session" => match server.seed_session(&cx, &session, &body).await {
                Ok(reply) => assert_eq!((200, call.reply.as_bytes()), (call.status, &reply.text()[..]), "{place}"),
                Err(error) => {
                    assert_eq!(error.code().status(), call.status, "{place}");
                    assert!(error.message().contains(&call.reply), "{place}: {error}");
                }
            },
            "/verify" => {
                let response = ModelResponse(body.get_object("response").unwrap().unwrap());
                let verdict = match body.view::<S::Task>() {
                    Ok(task) => server.verify(&cx, &session, task, &response).await,
                    Err(error) => Err(error),
                };
                match verdict {
                    Ok(verdict) => {
                        assert_eq!(call.status, 200, "{place}");
                        let mut theirs: Map<String, Value> = serde_json::from_str(&call.reply).unwrap();
                        theirs.retain(|key, _| !COMMON.contains(&key.as_str()));
                        let mut ours = Map::from_iter([("reward".to_owned(), json!(verdict.reward))]);
                        ours.extend(verdict.fields.into_iter().map(|(key, value)| (key.to_owned(), value)));
                        // Compared as text, so that the order of keys and `1` versus `1.0` count.
                        assert_eq!(Value::from(ours).to_string(), Value::from(theirs).to_string(), "{place}");
                    }
                    // A crash of the original (500) is a failed attempt of the port, with any error code.
                    Err(error) => assert!(matches!(call.status, 422 | 500), "{place}: {error}"),
                }
            }
            path => match server.call_tool(&cx, &session, &path[1..], &body).await {
                Ok(reply) => {
                    let text = reply.message.head.to_bytes();
                    assert_eq!(
                        (reply.status.0, String::from_utf8_lossy(&text)),
                        (call.status, call.reply.as_str().into()),
                        "{place}"
                    );
                }
                Err(error) => assert_eq!((error.code(), call.status), (Code::NotFound, 404), "{place}: {error}"),
            },
        }
        compared += 1;
    }
    assert!(compared >= 10, "only {compared} calls were recorded");
}

#[tokio::test]
async fn single_tool_call_answers_as_the_original() {
    replay(SingleToolCall, "single_tool_call").await;
}

#[tokio::test]
async fn multi_step_answers_as_the_original() {
    replay(MultiStep, "multi_step").await;
}

#[tokio::test]
async fn session_state_mgmt_answers_as_the_original() {
    replay(SessionState::default(), "session_state_mgmt").await;
}

#[tokio::test]
async fn tool_call_multireward_answers_as_the_original() {
    replay(ToolCallMultiReward, "tool_call_multireward").await;
}
