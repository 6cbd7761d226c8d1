use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gym_client::CallOptions;
use gym_core::rollout::EPISODE_METADATA;
use gym_core::server::ToolErrors;
use gym_core::{
    CallContext, Code, Error, Handler, ModelResponse, ModelServer, RawObject, Request, ResourcesServer, Response,
    Result, SessionId, Status, Verdict,
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::environment::{Relay, RelayConfig};
use crate::metrics::Metrics;
use crate::role::{RoleServer, ServerContext};
use crate::testing::{TestNetwork, world};

/// A model that returns the given responses in order, and records the requests and their sessions.
#[derive(Clone, Default)]
struct RecordingModel(Arc<Mutex<ModelRecord>>);

#[derive(Default)]
struct ModelRecord {
    answers: VecDeque<Result<String, Code>>,
    asked: Vec<(String, String)>,
}

impl ModelServer for RecordingModel {
    async fn responses(&self, _: &CallContext, session: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let mut state = self.0.lock();
        let text = String::from_utf8(body.text().to_vec()).unwrap();
        state.asked.push((session.as_str().to_owned(), text));
        match state.answers.pop_front().expect("one answer too few") {
            Ok(text) => Ok(ModelResponse(RawObject::parse(text)?)),
            Err(code) => Err(Error::finished(code, "the engine is on fire")),
        }
    }

    async fn chat_completions(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<RawObject> {
        Err(Error::internal("nobody calls this"))
    }
}

/// An environment that records the calls of its sessions. `fail` always returns 500, `panic` panics, `closed` rejects its account,
/// `lost` has lost its session; `slow` takes a minute.
#[derive(Clone, Default)]
struct RecordingEnvironment(Arc<Mutex<Vec<(String, String)>>>);

impl RecordingEnvironment {
    fn log(&self, session: &SessionId, what: String) {
        self.0.lock().push((session.as_str().to_owned(), what));
    }
}

impl ResourcesServer for RecordingEnvironment {
    type Task = serde::de::IgnoredAny;

    async fn seed_session(&self, _: &CallContext, session: &SessionId, _: &RawObject) -> Result<RawObject> {
        self.log(session, "seed".into());
        Ok(RawObject::empty())
    }

    async fn call_tool(
        &self,
        _: &CallContext,
        session: &SessionId,
        tool: &str,
        arguments: &RawObject,
    ) -> Result<Response> {
        self.log(session, format!("{tool} {}", String::from_utf8_lossy(arguments.text())));
        match tool {
            "echo" => Ok(Response::json(arguments.text().clone())),
            "fail" => Err(Error::internal("the tool broke")),
            "panic" => panic!("index out of range"),
            "closed" => Err(Error::finished(Code::FailedPrecondition, "the account is closed")),
            "account" => Err(Error::not_started(Code::NotFound, "there is no account 7")),
            "lost" => Err(gym_core::server::session_lost(session)),
            "slow" => {
                tokio::time::sleep(Duration::from_secs(60)).await;
                Ok(Response::json("{}"))
            }
            _ => Err(gym_core::server::unknown_tool(tool)),
        }
    }

    async fn verify(
        &self,
        _: &CallContext,
        session: &SessionId,
        _: Self::Task,
        response: &ModelResponse,
    ) -> Result<Verdict> {
        self.log(session, "verify".into());
        Ok(Verdict::correct(response.last_text()? == "done"))
    }
}

/// The model, environment, agent and relay of one process.
struct TestStack {
    model: RecordingModel,
    env: RecordingEnvironment,
    client: ServerClient,
    metrics: Metrics,
    _net: TestNetwork,
}

fn stack(config: impl FnOnce(&mut SimpleAgentConfig), answers: &[&str]) -> TestStack {
    stack_of(config, answers.iter().map(|text| Ok((*text).to_owned())).collect())
}

fn stack_of(config: impl FnOnce(&mut SimpleAgentConfig), answers: VecDeque<Result<String, Code>>) -> TestStack {
    stack_with(config, answers, None)
}

/// Creates the servers, with another environment than [`RecordingEnvironment`] if one is given.
fn stack_with(
    config: impl FnOnce(&mut SimpleAgentConfig),
    answers: VecDeque<Result<String, Code>>,
    other: Option<Arc<dyn Handler>>,
) -> TestStack {
    let (model, env, mut net) = (RecordingModel::default(), RecordingEnvironment::default(), TestNetwork::new());
    model.0.lock().answers = answers;
    let client = net.client(&["model", "env", "agent", "relay", "own"]);
    let mut agent = SimpleAgentConfig::new("model", "env");
    config(&mut agent);
    let context = |name: &str| ServerContext::new(name, "Test", &world());
    net.serve("model", RoleServer::model(model.clone(), &context("model")));
    match other {
        Some(other) => net.serve("env", other),
        None => net.serve("env", RoleServer::resources(env.clone(), &context("env"))),
    }
    let agent_context = context("agent");
    let metrics = agent_context.metrics.clone();
    net.serve("agent", RoleServer::agent(SimpleAgent::new(agent, client.clone()), &agent_context));
    net.serve("own", RoleServer::agent(OneCall(client.clone()), &agent_context));
    net.serve(
        "relay",
        RoleServer::environment(Relay::new(RelayConfig::new("agent"), client.clone()), &context("relay")),
    );
    TestStack { model, env, client, metrics, _net: net }
}

impl TestStack {
    async fn post(&self, server: &str, route: &'static str, body: &str) -> Response {
        self.post_with(CallContext::default(), server, route, body).await
    }

    async fn post_with(&self, cx: CallContext, server: &str, route: &'static str, body: &str) -> Response {
        let request = Request::post(cx, route, body.to_owned());
        self.client.send(server, &request, CallOptions::default()).await.unwrap()
    }

    fn asked(&self) -> Vec<String> {
        self.model.0.lock().asked.iter().map(|(_, text)| text.clone()).collect()
    }

    fn calls(&self) -> Vec<String> {
        self.env.0.lock().iter().map(|(_, what)| what.clone()).collect()
    }
}

fn text(response: &Response) -> String {
    String::from_utf8(response.message.head.to_bytes().to_vec()).unwrap()
}

fn value(response: &Response) -> Value {
    serde_json::from_slice(&response.message.head.to_bytes()).unwrap()
}

const ROW: &str = r#"{"responses_create_params":{"input":"add","temperature":1E0},"big":12345678901234567890123,"_ng_task_index":1,"_ng_rollout_index":0}"#;
const DONE: &str = r#"{"id":"r2","status":"completed","output":[{"type":"message","role":"assistant","content":[{"type":"output_text","text":"done"}],"generation_log_probs":[-1E5,-0.0]}],"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":2},"output_tokens":7,"output_tokens_details":{"reasoning_tokens":null},"total_tokens":12},"tools":[]}"#;

fn asks(tool: &str, arguments: &str) -> String {
    let arguments = Value::from(arguments);
    format!(
        r#"{{"id":"r1","status":"completed","output":[{{"type":"reasoning","summary":[]}},{{"type":"function_call","call_id":"c1","name":"{tool}","arguments":{arguments},"prompt_token_ids":[1,2],"x":1e2}}],"usage":{{"input_tokens":1,"input_tokens_details":{{"cached_tokens":1}},"output_tokens":2,"output_tokens_details":{{"reasoning_tokens":3}},"total_tokens":3,"extra":1E5}}}}"#
    )
}

#[tokio::test(start_paused = true)]
async fn one_turn_comes_back_as_the_model_wrote_it_with_the_reward() {
    let stack = stack(|_| (), &[DONE]);
    let answer = stack.post("relay", "/run", ROW).await;
    assert_eq!(answer.status, Status::OK);
    let row = ROW.strip_suffix('}').unwrap();
    assert_eq!(text(&answer), format!(r#"{row},"response":{DONE},"reward":1.0}}"#));
    assert_eq!(stack.asked(), [r#"{"input":[{"role":"user","content":"add"}],"temperature":1E0}"#]);
    assert_eq!(stack.calls(), ["seed", "verify"]);
}

#[tokio::test(start_paused = true)]
async fn a_tool_s_answer_goes_to_the_model_and_every_text_is_kept() {
    let call = asks("echo", r#"{"n": 1E5}"#);
    let stack = stack(|_| (), &[&call, DONE]);
    let answer = stack.post("agent", "/run", ROW).await;
    let items = r#"{"type":"reasoning","summary":[]},{"type":"function_call","call_id":"c1","name":"echo","arguments":"{\"n\": 1E5}","prompt_token_ids":[1,2],"x":1e2},{"type":"function_call_output","call_id":"c1","output":"{\"n\": 1E5}"}"#;
    let last = r#"{"type":"message","role":"assistant","content":[{"type":"output_text","text":"done"}],"generation_log_probs":[-1E5,-0.0]}"#;
    let usage = r#"{"input_tokens":6,"input_tokens_details":{"cached_tokens":3},"output_tokens":9,"output_tokens_details":{"reasoning_tokens":null},"total_tokens":15,"extra":1E5}"#;
    let row = ROW.strip_suffix('}').unwrap();
    let response =
        format!(r#"{{"id":"r2","status":"completed","output":[{items},{last}],"usage":{usage},"tools":[]}}"#);
    assert_eq!(text(&answer), format!(r#"{row},"response":{response},"reward":1.0}}"#));
    let user = r#"{"role":"user","content":"add"}"#;
    assert_eq!(stack.asked()[1], format!(r#"{{"input":[{user},{items}],"temperature":1E0}}"#));
    assert_eq!(stack.calls(), ["seed", r#"echo {"n": 1E5}"#, "verify"]);
    let sessions: Vec<String> = stack.env.0.lock().iter().map(|(session, _)| session.clone()).collect();
    assert!(sessions.iter().all(|session| *session == sessions[0]), "one session: {sessions:?}");
    let asked = &stack.model.0.lock().asked;
    assert_eq!(asked[0].0, asked[1].0);
}

#[tokio::test(start_paused = true)]
async fn the_mistakes_of_the_model_are_data_for_the_model() {
    for (tool, arguments, told, reached) in [
        (
            "echo",
            "{",
            r#"{"error": "Invalid tool call arguments: JSONDecodeError('Expecting property name enclosed in double quotes: line 1 column 2 (char 1)')"}"#,
            false,
        ),
        ("nothing", "{}", r#"{"detail":"Not Found"}"#, true),
        ("closed", "{}", r#""the account is closed""#, true),
        ("account", "{}", r#"{"detail":"there is no account 7"}"#, true),
        ("odd name/é", "{}", r#"{"detail":"Not Found"}"#, true),
    ] {
        let call = asks(tool, arguments);
        let stack = stack(|_| (), &[&call, DONE]);
        let answer = stack.post("agent", "/run", ROW).await;
        assert_eq!(value(&answer)["reward"], 1.0, "{tool}");
        assert_eq!(value(&answer)["response"]["output"][2]["output"], told);
        assert_eq!(stack.calls().len(), if reached { 3 } else { 2 });
        let record = record(&answer);
        assert_eq!((record.tool_calls, record.tool_errors, record.tool_failures), (1, 1, 0));
        let counted = r#"gym_tool_errors_total{server="agent",cause="model"} 1"#;
        assert!(stack.metrics.text().contains(counted), "{}", stack.metrics.text());
    }
}

fn record(answer: &Response) -> EpisodeRecord {
    EpisodeRecord::from_text(answer.metadata.get(EPISODE_METADATA).expect("the response has a record")).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_broken_tool_fails_the_attempt_unless_the_configuration_passes_its_error_on() {
    for (tool, class, said) in [
        ("fail", FailureClass::ToolError, "POST env/fail: the tool broke"),
        ("panic", FailureClass::ToolError, "POST env/panic: the handler panicked: index out of range"),
        ("lost", FailureClass::SessionLost, "is unknown"),
    ] {
        for rule in [ToolErrors::Auto, ToolErrors::Fail, ToolErrors::ToModel] {
            let call = asks(tool, "{}");
            let stack = stack(|config| config.tool_errors = rule, &[&call, DONE]);
            let answer = stack.post("relay", "/run", ROW).await;
            if rule == ToolErrors::ToModel && class == FailureClass::ToolError {
                assert_eq!(value(&answer)["reward"], 1.0, "{tool}");
                let record = record(&answer);
                assert_eq!((record.tool_calls, record.tool_errors, record.tool_failures), (1, 1, 1));
                let counted = r#"gym_tool_errors_total{server="agent",cause="server"} 1"#;
                assert!(stack.metrics.text().contains(counted), "{}", stack.metrics.text());
            } else {
                assert!(!answer.status.is_success(), "{tool}, {rule:?}: {}", text(&answer));
                let error = answer.into_result().unwrap_err();
                assert_eq!(error.failure_class(), class, "{error}");
                assert!(error.to_string().contains(said), "{error}");
                assert_eq!(stack.calls().len(), 2, "nothing is verified");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failing_tool_of_a_python_server_is_data_for_the_model_unless_the_configuration_forbids_it() {
    let python = || {
        gym_core::transport::handler_fn(|request: Request| async move {
            Ok(match request.route.path() {
                "/seed_session" => Response::json("{}"),
                "/verify" => Response::json(r#"{"reward":1.0}"#),
                _ => Response::new(Status(500), gym_core::Message::json(r#""Internal Server Error""#)),
            })
        })
    };
    let call = asks("search", "{}");
    for (rule, scored) in [(ToolErrors::Auto, true), (ToolErrors::ToModel, true), (ToolErrors::Fail, false)] {
        let answers = [&call, DONE].map(|text| Ok(text.to_owned())).into();
        let stack = stack_with(|config| config.tool_errors = rule, answers, Some(Arc::new(python())));
        let answer = stack.post("agent", "/run", ROW).await;
        if scored {
            assert_eq!(value(&answer)["reward"], 1.0);
            assert_eq!((record(&answer).tool_errors, record(&answer).tool_failures), (1, 1));
            assert!(stack.asked()[1].contains(r#""output":"\"Internal Server Error\"""#), "{}", stack.asked()[1]);
        } else {
            let error = answer.into_result().unwrap_err();
            assert_eq!(error.failure_class(), FailureClass::ToolError);
            assert!(error.to_string().contains("POST env/search: answered 500: Internal Server Error"), "{error}");
        }
    }
}

/// An agent of a user: it calls the tool that the row names, and scores what the tool returned.
struct OneCall(ServerClient);

impl AgentServer for OneCall {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        let tool: String = row.get_as("tool")?.unwrap();
        let mut episode = crate::agent::Episode::seed(cx, &self.0, "env", row).await?;
        let output = episode.call_tool(&tool, "{}").await?;
        let answer =
            json!({"status": "completed", "output": [], "said": String::from_utf8_lossy(&output.head.to_bytes())});
        episode.verify(ModelResponse(RawObject::parse(answer.to_string())?)).await
    }
}

#[tokio::test(start_paused = true)]
async fn agents_of_users_follow_the_same_rule() {
    for (tool, said) in [
        ("closed", Some(r#""the account is closed""#)),
        ("nothing", Some(r#"{"detail":"Not Found"}"#)),
        ("fail", None),
        ("panic", None),
    ] {
        let stack = stack(|_| (), &[]);
        let row = json!({"responses_create_params": {"input": "x"}, "tool": tool}).to_string();
        let answer = stack.post("own", "/run", &row).await;
        match said {
            Some(said) => {
                assert_eq!(value(&answer)["response"]["said"], said);
                assert_eq!((record(&answer).tool_calls, record(&answer).tool_errors), (1, 1));
            }
            None => {
                let error = answer.into_result().unwrap_err();
                assert_eq!(error.failure_class(), FailureClass::ToolError, "{error}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_output_of_a_tool_is_cut_with_a_mark() {
    let call = asks("echo", r#"{"text": "ééééé"}"#);
    let stack = stack(
        |config| {
            config.tool_output_bytes_max = Some(serde_json::from_value(json!({"echo": 12, "_default": 1})).unwrap())
        },
        &[&call, DONE],
    );
    let answer = stack.post("agent", "/run", ROW).await;
    let seen = value(&answer)["response"]["output"][2]["output"].take();
    assert_eq!(seen, "{\"text\": \"é\n[output cut: the first 12 of 22 bytes]");
    assert_eq!(record(&answer).outputs_cut, 1);
}

#[tokio::test(start_paused = true)]
async fn the_loop_ends_at_max_steps_and_where_the_model_ran_out_of_tokens() {
    let call = asks("echo", "{}");
    let limited = stack(|config| config.max_steps = Some(2), &[&call, &call]);
    let answer = limited.post("relay", "/run", ROW).await;
    let mut course = json!(record(&answer));
    let phases = course["phases"].take();
    let phases: Vec<&str> = phases.as_array().unwrap().iter().map(|span| span["phase"].as_str().unwrap()).collect();
    assert_eq!(phases, ["seed", "model", "tool", "model", "tool", "verify"]);
    let answer = value(&answer);
    assert_eq!(answer["reward"], 0.0);
    assert_eq!(answer["response"]["output"].as_array().unwrap().len(), 6);
    assert_eq!(answer["response"]["usage"]["total_tokens"], 6);
    assert_eq!(
        course,
        json!({"turns": 2, "tool_calls": 2, "tool_errors": 0, "tool_failures": 0, "outputs_cut": 0,
            "input_tokens": 2, "output_tokens": 4, "truncated": "max_steps", "phases": null})
    );

    let cut = call.replace(r#""id":"r1""#, r#""id":"r1","incomplete_details":{"reason":"max_output_tokens"}"#);
    let stack = stack(|_| (), &[&cut]);
    let answer = stack.post("agent", "/run", ROW).await;
    assert_eq!(record(&answer).truncated.as_deref(), Some("max_output_tokens"));
    assert_eq!(record(&answer).tool_calls, 0, "the calls of an incomplete response are not run");
    let answer = value(&answer);
    assert_eq!(answer["response"]["output"].as_array().unwrap().len(), 2);
    assert_eq!(stack.calls(), ["seed", "verify"]);
}

#[tokio::test(start_paused = true)]
async fn without_max_steps_an_episode_of_a_thousand_turns_fails_and_is_not_scored() {
    for max_steps in [None, Some(0)] {
        let call = asks("echo", "{}");
        let stack = stack(|config| config.max_steps = max_steps, &vec![&*call; 1_000]);
        let answer = stack.post("relay", "/run", ROW).await;
        assert_eq!(answer.status, Status(500));
        assert!(!stack.calls().contains(&"verify".to_owned()));
        let error = answer.into_result().unwrap_err();
        assert_eq!(error.failure_class(), FailureClass::AgentRunError);
        let said = error.to_string();
        for words in ["after 1000 turns and 1000 tool calls", "`max_steps: 50`", "agent's block"] {
            assert!(said.contains(words), "{said}");
        }
    }
    let call = asks("echo", "{}");
    let mut answers = vec![&*call; 1_000];
    answers.push(DONE);
    let longer = stack(|config| config.max_steps = Some(2_000), &answers);
    assert_eq!(record(&longer.post("relay", "/run", ROW).await).turns, 1_001);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_of_a_long_loop_names_its_turns_and_max_steps() {
    let (quick, slow) = (asks("echo", "{}"), asks("slow", "{}"));
    for (turns, max_steps, words) in [
        (2, None, None),
        (40, None, Some("after 41 turns and 41 tool calls; the agent has no `max_steps`: add it to its block")),
        (40, Some(90), Some("after 41 turns and 41 tool calls; the agent's `max_steps` is 90")),
    ] {
        let mut answers = vec![&*quick; turns];
        answers.push(&slow);
        let stack = stack(|config| config.max_steps = max_steps, &answers);
        let cx = CallContext::within(Duration::from_secs(5));
        let request = Request::post(cx, "/run", ROW.to_owned());
        let answer = stack.client.send("agent", &request, CallOptions::default()).await;
        let error = answer.and_then(Response::into_result).unwrap_err();
        let said = error.to_string();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{said}");
        match words {
            Some(words) => assert!(said.contains(words) && said.contains("POST env/slow"), "{said}"),
            None => assert!(!said.contains("turns"), "{said}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_nothing_is_marked_incomplete() {
    for (output, reason) in [("[]", "empty_output"), (r#"[{"type":"reasoning","summary":[]}]"#, "incomplete_reasoning")]
    {
        let nothing = format!(r#"{{"output":{output},"status":"completed","metadata":{{"k":"v"}},"usage":null}}"#);
        let stack = stack(|_| (), &[&nothing]);
        let response = value(&stack.post("agent", "/run", ROW).await)["response"].take();
        assert_eq!(response["status"], "incomplete");
        assert_eq!(response["metadata"]["ng_termination_reason"], reason);
        assert_eq!(response["metadata"]["k"], "v");
        assert_eq!(response["output"], serde_json::from_str::<Value>(output).unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_failing_model_fails_the_run_and_is_never_a_reward() {
    for (code, status) in [
        (Code::Internal, 500),
        (Code::InvalidArgument, 500),
        (Code::ResourceExhausted, 429),
        (Code::Unavailable, 503),
        (Code::DeadlineExceeded, 504),
    ] {
        let stack = stack_of(|_| (), VecDeque::from([Err(code)]));
        let answer = stack.post("relay", "/run", ROW).await;
        assert_eq!(answer.status, Status(status));
        let said = value(&answer);
        let said = said.as_str().unwrap();
        assert!(said.starts_with("POST model/v1/responses: ") && said.contains("the engine is on fire"), "{said}");
        let error = answer.into_result().unwrap_err();
        assert!(!error.may_resend(true), "{error:?}");
        assert_eq!(stack.calls(), ["seed"]);
    }
    let garbage = stack(|_| (), &[r#"{"object":"error"}"#]);
    let answer = garbage.post("agent", "/run", ROW).await;
    assert_eq!(answer.status, Status(500));
    assert!(text(&answer).contains("invalid response from model server"));
}

#[tokio::test(start_paused = true)]
async fn the_time_limit_ends_a_slow_episode() {
    let call = asks("slow", "{}");
    let stack = stack(|config| config.max_seconds = Some(Seconds(Duration::from_secs(10))), &[&call]);
    let began = tokio::time::Instant::now();
    let answer = stack.post("agent", "/run", ROW).await;
    // Not 504, which collectors treat as busy and retry immediately.
    assert_eq!((answer.status, began.elapsed().as_secs()), (Status(500), 10));
    assert!(text(&answer).contains("`max_seconds` = 10"), "{}", text(&answer));
}

#[tokio::test(start_paused = true)]
async fn a_model_cannot_call_the_protocol_as_a_tool() {
    for name in ["verify", "seed_session", "close_session/", "/aggregate_metrics", "verify?x=1", "ng-rollout/a/verify"]
    {
        let stack = stack(|_| (), &[&asks(name, "{}"), DONE]);
        let answer = stack.post("agent", "/run", ROW).await;
        assert_eq!(stack.calls(), ["seed", "verify"], "{name}");
        assert!(text(&answer).contains("there is no tool"), "{}", text(&answer));
    }
}

#[tokio::test(start_paused = true)]
async fn a_tool_is_called_by_the_name_that_the_model_wrote() {
    let stack = stack(|_| (), &[&asks("wéather now#1", "{}"), DONE]);
    stack.post("agent", "/run", ROW).await;
    assert_eq!(stack.calls(), ["seed", "wéather now#1 {}", "verify"]);
}

#[tokio::test(start_paused = true)]
async fn an_unverified_episode_gets_the_configured_reward() {
    let config = |config: &mut SimpleAgentConfig| {
        config.skip_verification = true;
        config.skip_verification_reward = 0.5;
    };
    let stack = stack(config, &[DONE]);
    let answer = text(&stack.post("agent", "/run", ROW).await);
    assert!(answer.ends_with(r#","reward":0.5,"verification_skipped":true}"#), "{answer}");
    assert_eq!(stack.calls(), ["seed"]);
    let metrics = value(&stack.post("agent", "/aggregate_metrics", r#"{"verify_responses":[]}"#).await);
    assert_eq!(metrics["group_level_metrics"], json!([]));
}

#[tokio::test(start_paused = true)]
async fn the_loop_alone_passes_cookies_both_ways() {
    let call = asks("echo", "{}");
    let stack = stack(|_| (), &[&call, DONE]);
    let cx = CallContext::default().with_metadata("cookie", "Test___env=abc; other=1");
    let answer = stack.post_with(cx, "agent", "/v1/responses", r#"{"input":[]}"#).await;
    assert_eq!(stack.env.0.lock()[0].0, "abc");
    let cookies: Vec<&str> = answer.metadata.all("set-cookie").collect();
    assert!(cookies.contains(&"Test___env=abc; Path=/; SameSite=lax"), "{cookies:?}");
    assert!(cookies.iter().any(|cookie| cookie.starts_with("Test___model=")));
    assert_eq!(value(&answer)["output"].as_array().unwrap().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn bodies_that_the_schema_forbids_are_refused_before_anything_runs() {
    let stack = stack(|_| (), &[]);
    for (body, kind, loc) in [
        ("{}", "missing", json!(["body", "responses_create_params"])),
        (r#"{"responses_create_params":{}}"#, "missing", json!(["body", "responses_create_params", "input"])),
        (r#"{"responses_create_params":3}"#, "model_type", json!(["body", "responses_create_params"])),
        (
            r#"{"responses_create_params":{"input":"x","seed":1}}"#,
            "extra_forbidden",
            json!(["body", "responses_create_params", "seed"]),
        ),
    ] {
        let answer = stack.post("agent", "/run", body).await;
        assert_eq!(answer.status, Status(422));
        let detail = &value(&answer)["detail"][0];
        assert_eq!((&detail["type"], &detail["loc"]), (&kind.into(), &loc));
    }
    assert_eq!(stack.calls(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_replayed_run_is_one_episode_even_when_its_first_caller_vanished() {
    let call = asks("slow", "{}");
    let stack = stack(|_| (), &[&call, DONE]);
    let first = tokio::time::timeout(Duration::from_secs(5), stack.post("relay", "/run", ROW)).await;
    assert!(first.is_err());
    let answer = stack.post("relay", "/run", ROW).await;
    assert_eq!(value(&answer)["reward"], 1.0);
    assert_eq!(stack.calls(), ["seed", "slow {}", "verify"]);
}

#[tokio::test(start_paused = true)]
async fn token_arrays_of_a_large_answer_come_through_bit_for_bit() {
    let numbers: String = (0..20_000).map(|n| format!("{n}.{n}E-0,")).collect();
    let numbers = numbers.trim_end_matches(',');
    let call = asks("echo", "{}").replace("[1,2]", &format!("[{numbers}]"));
    let stack = stack(|_| (), &[&call, DONE]);
    let answer = text(&stack.post("relay", "/run", ROW).await);
    assert!(answer.contains(&format!(r#""prompt_token_ids":[{numbers}]"#)));
    assert!(stack.asked()[1].contains(numbers));
}

#[test]
fn a_verdict_without_a_reward_is_an_error_and_one_of_true_is_a_number() {
    let scored = |text: &'static str| crate::agent::episode::scored(Bytes::from_static(text.as_bytes()).into());
    assert_eq!(scored(r#"{"reward":true,"x":1E5}"#).unwrap().to_bytes(), r#"{"reward":1.0,"x":1E5}"#);
    for wrong in ["{}", r#"{"reward":null}"#, r#"{"reward":"x"}"#, "[]", "nothing"] {
        assert_eq!(scored(wrong).unwrap_err().code(), Code::DataLoss, "{wrong}");
    }
}

/// Converts numbers to floats and removes null keys, because NeMo Gym's schemas treat both forms alike.
fn plain(value: Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(items) => items.into_iter().map(plain).collect(),
        Value::Object(fields) => {
            fields.into_iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key, plain(value))).collect()
        }
        other => other,
    }
}

/// `golden.json` was recorded from NeMo Gym 0.7.0's `simple_agent` with the same responses of model and tools. It does not look at the status of a
/// response, which this agent requires: `completed` is added where the recorded ones have none.
#[tokio::test(start_paused = true)]
async fn episodes_are_those_of_nemo_gym_s_agent() {
    let golden: Value = serde_json::from_str(include_str!("golden.json")).unwrap();
    let completed = |response: &Value| {
        let mut response = response.clone();
        if response["status"].is_null() && response["incomplete_details"].is_null() {
            response["status"] = json!("completed");
        }
        response
    };
    for (name, case) in golden.as_object().unwrap() {
        let (model, mut net) = (RecordingModel::default(), TestNetwork::new());
        let answers = case["answers"].as_array().unwrap();
        model.0.lock().answers = answers.iter().map(|answer| Ok(completed(answer).to_string())).collect();
        let client = net.client(&["model", "env", "agent"]);
        let mut config = SimpleAgentConfig::new("model", "env");
        config.max_steps = serde_json::from_value(case["max_steps"].clone()).unwrap();
        let context = |name: &str| ServerContext::new(name, "Test", &world());
        let tools = gym_core::transport::handler_fn(|request: Request| async move {
            let body = String::from_utf8(request.message.head.to_bytes().to_vec()).unwrap();
            let got = if body.is_empty() { "null" } else { &body };
            Ok(Response::json(format!(r#"{{"path": "{}", "got": {got}}}"#, request.route)))
        });
        net.serve("model", RoleServer::model(model.clone(), &context("model")));
        net.serve("env", tools);
        net.serve("agent", RoleServer::agent(SimpleAgent::new(config, client.clone()), &context("agent")));
        let request = Request::post(CallContext::default(), "/v1/responses", case["params"].to_string());
        let answer = client.send("agent", &request, CallOptions::default()).await.unwrap();
        assert_eq!(plain(value(&answer)), plain(completed(&case["response"])), "{name}");
        let asked: Vec<Value> =
            model.0.lock().asked.iter().map(|(_, text)| serde_json::from_str(text).unwrap()).collect();
        let requests = case["requests"].as_array().unwrap();
        let expected: Vec<&Value> = requests.iter().filter(|to| to[0] == "model").map(|to| &to[2]).collect();
        assert_eq!(plain(json!(asked)), plain(json!(expected)), "{name}");
    }
}
