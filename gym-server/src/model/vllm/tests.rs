use gym_client::{CallOptions, ServerClient};
use gym_core::rollout::{PROMPT_KEY, TURNS_KEY};
use gym_core::server::EndpointState;
use gym_core::{AgentServer, Code, Request, ResourcesServer, Response, Verdict};

use super::*;
use crate::agent::{Episode, SimpleAgent};
use crate::model::mock::{MockEndpoint, answer};
use crate::role::{RoleServer, ServerContext};
use crate::testing::{TestNetwork, world};

fn model(mock: &MockEndpoint, change: impl FnOnce(&mut VllmModelConfig)) -> VllmModel {
    let mut config = VllmModelConfig::new(mock.url(), "qwen");
    config.retry_backoff_ms = 1;
    change(&mut config);
    VllmModel::new(config, &world()).unwrap()
}

async fn ask(model: &VllmModel, body: &str) -> Result<(Value, String)> {
    let body = RawObject::parse(body.to_owned()).unwrap();
    let answer = model.responses(&CallContext::default(), &SessionId::new("s"), &body).await?;
    let text = String::from_utf8(answer.0.into_text().to_vec()).unwrap();
    Ok((serde_json::from_str(&text).unwrap(), text))
}

const CHAT_ANSWER: &str = r#"{"id":"c","created":17,"object":"chat.completion","choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant","content":"so","reasoning_content":"hm","tool_calls":[{"id":"t1","type":"function","function":{"name":"add","arguments":"{}"}}]}}],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"cached_input_tokens":2}}"#;

const REQUEST: &str = r#"{"input":[
    {"role":"developer","content":"be brief"},
    {"role":"user","content":[{"type":"input_text","text":"2+2?"}]},
    {"type":"reasoning","summary":[{"type":"summary_text","text":"think"}]},
    {"type":"message","role":"assistant","content":[{"type":"output_text","text":"calling"}]},
    {"type":"function_call","call_id":"t0","name":"add","arguments":"{\"a\":2}","prompt_token_ids":[1, 2],"generation_token_ids":[3],"generation_log_probs":[-1E0]},
    {"type":"function_call_output","call_id":"t0","output":"4"}
  ],"instructions":"system","temperature":0.70,"max_output_tokens":9,"parallel_tool_calls":false,
  "tools":[{"type":"function","name":"add","parameters":{"type":"object"},"strict":true,"description":null}],
  "metadata":{"extra_body":"{\"seed\": 5}","chat_template_kwargs":"{\"enable_thinking\": false}"}}"#;

#[tokio::test]
async fn a_responses_request_is_asked_as_chat_and_answered_as_a_response() {
    let mock = MockEndpoint::new(vec![answer(200, CHAT_ANSWER)]).await;
    let (got, _) = ask(&model(&mock, |_| ()), REQUEST).await.unwrap();
    let asked = mock.body(0);
    assert_eq!(
        asked["messages"],
        json!([
            {"content": "system\n\nbe brief", "role": "system"},
            {"content": [{"type": "text", "text": "2+2?"}], "role": "user"},
            {"content": "calling", "role": "assistant", "tool_calls": [
                {"id": "t0", "function": {"arguments": "{\"a\":2}", "name": "add"}, "type": "function"}
            ], "reasoning_content": "think", "reasoning": "think"},
            {"content": "4", "role": "tool", "tool_call_id": "t0"},
        ])
    );
    assert_eq!(
        asked["tools"],
        json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    );
    let rest = ["model", "max_tokens", "seed", "chat_template_kwargs", "parallel_tool_calls", "temperature"];
    let rest: Vec<&Value> = rest.iter().map(|key| &asked[*key]).collect();
    assert_eq!(json!(rest), json!(["qwen", 9, 5, {"enable_thinking": false}, false, 0.7]));
    assert!(asked.get("input").is_none() && asked.get("instructions").is_none());

    assert_eq!(got["output"][0]["summary"], json!([{"text": "hm", "type": "summary_text"}]));
    assert_eq!(got["output"][1]["content"][0]["text"], "so");
    assert_eq!((&got["output"][2]["call_id"], &got["output"][2]["name"]), (&"t1".into(), &"add".into()));
    assert_eq!((&got["model"], &got["created_at"], &got["status"]), (&"qwen".into(), &17.into(), &"completed".into()));
    assert_eq!(
        got["usage"],
        json!({"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": null}, "total_tokens": 7})
    );
}

#[tokio::test]
async fn arguments_of_a_tool_call_may_be_an_object_and_what_is_missing_is_named() {
    for (call, expected) in [
        (r#"{"id":"t","function":{"name":"add","arguments":{"b":1,"a":[2]}}}"#, Ok(r#"{"b":1,"a":[2]}"#)),
        (r#"{"id":"t","function":{"name":"add","arguments":"{}"}}"#, Ok("{}")),
        (r#"{"id":"t","function":{"name":"add"}}"#, Err("has no arguments")),
        (r#"{"id":"t","function":{"arguments":"{}"}}"#, Err("has no name")),
        (r#"{"function":{"name":"add","arguments":"{}"}}"#, Err("has no id")),
        (r#"{"id":"t"}"#, Err("has no name")),
        (
            r#"{"id":"t","function":{"name":"add","arguments":[1]}}"#,
            Err("the arguments of the engine's tool call are no string, but [1]"),
        ),
        (
            r#"{"id":{},"function":{"name":"add","arguments":"{}"}}"#,
            Err("the id of the engine's tool call are no string"),
        ),
        ("3", Err("has no id")),
    ] {
        let chat = format!(
            r#"{{"choices":[{{"finish_reason":"tool_calls","message":{{"role":"assistant","tool_calls":[{call}]}}}}]}}"#
        );
        let mock = MockEndpoint::new(vec![answer(200, &chat)]).await;
        match (ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await, expected) {
            (Ok((got, _)), Ok(arguments)) => assert_eq!(got["output"][0]["arguments"], arguments),
            (Err(error), Err(says)) => assert!(error.to_string().contains(says), "{error}"),
            (other, expected) => panic!("{call}: {expected:?}, {other:?}"),
        }
        assert_eq!(mock.body(0)["stream"], false);
    }
}

#[tokio::test]
async fn token_ids_and_log_probabilities_keep_their_text() {
    let logprobs = r#"{"content":[{"token":"token_id:11","logprob":-1E-5,"top_logprobs":[]},{"token":"token_id:012","logprob":-0.10000000000000001}]}"#;
    let chat = format!(
        r#"{{"id":"c","created":1,"choices":[{{"finish_reason":"length","message":{{"role":"assistant","content":"x"}},"logprobs":{logprobs}}}]}}"#
    );
    let mock = MockEndpoint::new(vec![answer(200, &chat), answer(200, r#"{"tokens":[7, 8],"count":2}"#)]).await;
    let (got, text) = ask(&model(&mock, |config| config.return_token_id_information = true), REQUEST).await.unwrap();
    let fields = r#""prompt_token_ids":[7, 8],"generation_token_ids":[11,12],"generation_log_probs":[-1E-5,-0.10000000000000001]"#;
    assert!(text.contains(fields), "{text}");
    assert_eq!(got["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let asked = mock.request(0);
    assert!(asked.contains(r#""prompt_token_ids":[1, 2],"generation_token_ids":[3],"generation_log_probs":[-1E0]"#));
    let wants = mock.body(0);
    assert_eq!(
        (&wants["logprobs"], &wants["top_logprobs"], &wants["return_tokens_as_token_ids"]),
        (&true.into(), &0.into(), &true.into())
    );
    assert!(mock.request(1).starts_with("POST /tokenize "));
    let keys: Vec<String> = mock.body(1).as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["model", "messages", "tools", "chat_template_kwargs"]);
}

#[tokio::test]
async fn token_ids_of_the_engine_s_answer_need_no_second_request() {
    let chat = r#"{"created":1,"prompt_token_ids":[5, 6],"choices":[{"finish_reason":"stop","token_ids":[11],"message":{"role":"assistant","content":"x"},"logprobs":{"content":[{"token":"token_id:11","logprob":-2.50}]}}]}"#;
    let mock = MockEndpoint::new(vec![answer(200, chat)]).await;
    let model = model(&mock, |config| config.return_token_id_information = true);
    let body = RawObject::parse(r#"{"messages":[{"role":"user","content":"x"}]}"#).unwrap();
    let got = model.chat_completions(&CallContext::default(), &SessionId::new("s"), &body).await.unwrap();
    assert_eq!(
        got.text(),
        r#"{"created":1,"choices":[{"finish_reason":"stop","message":{"role":"assistant","content":"x","prompt_token_ids":[5, 6],"generation_token_ids":[11],"generation_log_probs":[-2.50]}}]}"#
    );
}

#[tokio::test]
async fn token_metadata_that_disagree_or_miss_are_errors() {
    let choice = r#""finish_reason":"stop","message":{"role":"assistant","content":"x"},"logprobs":{"content":[{"token":"token_id:11","logprob":-2.5}]}"#;
    for (chat, says) in [
        (format!(r#"{{"prompt_token_ids":[1],"choices":[{{{choice}}}]}}"#), "missing: choice.token_ids"),
        (format!(r#"{{"prompt_token_ids":[1],"choices":[{{"token_ids":[12],{choice}}}]}}"#), "disagree"),
        (r#"{"choices":[{"finish_reason":"stop","message":{"role":"assistant","content":"x"}}]}"#.into(), "gave none"),
        (
            r#"{"choices":[{"finish_reason":"stop","message":{"role":"assistant","prompt_token_ids":[1]}}]}"#.into(),
            "partial",
        ),
        (choice_with_token("11"), "token_id:<int>"),
        (r#"{"choices":[]}"#.into(), "no `choices`"),
    ] {
        let mock = MockEndpoint::new(vec![answer(200, &chat)]).await;
        let model = model(&mock, |config| config.return_token_id_information = true);
        let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!(error.code(), Code::DataLoss, "{chat}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

fn choice_with_token(token: &str) -> String {
    format!(
        r#"{{"choices":[{{"finish_reason":"stop","message":{{"role":"assistant"}},"logprobs":{{"content":[{{"token":"{token}","logprob":-1}}]}}}}]}}"#
    )
}

#[tokio::test]
async fn a_context_overflow_is_a_response_that_was_cut_and_says_so() {
    let text = "The input (61709 tokens) is longer than the model's context length (40960 tokens).";
    let overflow = json!({"object": "error", "message": text, "type": "BadRequestError", "code": 400}).to_string();
    let mock = MockEndpoint::new(vec![answer(400, &overflow), answer(400, &overflow), answer(400, &overflow)]).await;
    let (got, _) = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap();
    let details = json!({"reason": "max_output_tokens", "code": "context_length_exceeded", "message": text});
    assert_eq!((&got["incomplete_details"], &got["status"]), (&details, &json!("incomplete")));
    assert_eq!(got["output"][0]["content"][0]["text"], "");
    let body = RawObject::parse(r#"{"messages":[{"role":"user","content":"x"}]}"#).unwrap();
    let chat = model(&mock, |_| ()).chat_completions(&CallContext::default(), &SessionId::new("s"), &body).await;
    assert_eq!(chat.unwrap().get_as::<Value>("choices").unwrap().unwrap()[0]["finish_reason"], "length");
    let strict = model(&mock, |config| config.propagate_context_overflow_errors = true);
    let error = ask(&strict, r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!((error.code(), error.failure_class()), (Code::InvalidArgument, FailureClass::Truncated));
    assert!(error.to_string().ends_with(&format!("answered 400: {text}")), "{error}");
}

#[tokio::test]
async fn any_other_error_of_the_engine_fails_the_attempt() {
    for message in ["max_tokens must be at least 1, got -1.", "no such thing", "maximum context length is 5 tokens"] {
        let body = json!({"object": "error", "message": message, "code": 400}).to_string();
        let mock = MockEndpoint::new(vec![answer(400, &body)]).await;
        let error = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!((error.code(), error.failure_class()), (Code::InvalidArgument, FailureClass::ModelError));
        assert!(error.to_string().ends_with(&format!("answered 400: {message}")), "{error}");
    }
}

#[tokio::test]
async fn a_success_without_a_response_of_a_model_fails_the_attempt() {
    for (body, says) in [
        ("{}", "no list `choices`, so it is no response of a model: {}"),
        ("<html><head><title>Jupyter</title></head></html>", "an HTML page with the title `Jupyter`"),
        (r#"{"error":{"message":"the engine is dead"}}"#, "the engine is dead"),
        (r#"{"choices":null}"#, "no list `choices`"),
        (
            r#"{"choices":[{"finish_reason":"cancelled","message":{"role":"assistant","content":"a"}}]}"#,
            "finish_reason \"cancelled\"",
        ),
    ] {
        for native in [false, true] {
            let mock = MockEndpoint::new(vec![answer(200, body)]).await;
            let error =
                ask(&model(&mock, |config| config.is_responses_native = native), r#"{"input":"x"}"#).await.unwrap_err();
            let says = if native { says.replace("choices", "output") } else { says.to_owned() };
            assert!(native || error.to_string().contains(&says), "{error}");
            assert_eq!(error.execution(), gym_core::Execution::Finished);
        }
    }
}

#[tokio::test]
async fn what_chat_cannot_say_is_refused_before_the_engine_is_asked() {
    let mock = MockEndpoint::new(Vec::new()).await;
    let model = model(&mock, |_| ());
    for (body, says) in [
        (r#"{"input":"x","previous_response_id":"r"}"#, "previous_response_id"),
        (r#"{"input":[{"type":"web_search_call"}]}"#, "web_search_call"),
        (r#"{"input":"x","tools":[{"type":"web_search"}]}"#, "web_search"),
        (r#"{"input":"x","tool_choice":"required"}"#, "at least one tool"),
        (r#"{"input":"x","reasoning":{"summary":"auto"}}"#, "summary"),
        (r#"{"input":"x","metadata":{"audio_path":"a.wav"}}"#, "metadata.audio_path"),
    ] {
        let error = ask(&model, body).await.unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(mock.count(), 0);
}

#[tokio::test]
async fn metadata_that_names_no_audio_file_is_not_audio() {
    for nothing in [json!(null), json!(false), json!(0), json!(0.0), json!(""), json!([]), json!({})] {
        let metadata = serde_json::Map::from_iter([
            ("audio_paths".to_owned(), nothing.clone()),
            ("audio_data".to_owned(), nothing),
        ]);
        assert_eq!(audio::of(&metadata).unwrap(), None, "{metadata:?}");
    }
    assert!(audio::of(&serde_json::Map::from_iter([("audio_paths".to_owned(), json!(["a.wav"]))])).is_err());
}

#[tokio::test]
async fn audio_of_the_metadata_stands_before_the_last_words_of_the_user() {
    let audio = json!({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}});
    let text = json!({"type": "text", "text": "x"});
    let earlier = json!({"role": "assistant", "content": "y"});
    for (messages, metadata, expected) in [
        (
            json!([{"role": "user", "content": "x"}, earlier]),
            json!({}),
            json!([{"role": "user", "content": [audio, text]}, earlier]),
        ),
        (
            json!([{"role": "user", "content": [text]}]),
            json!({"extra_body": "{}"}),
            json!([{"role": "user", "content": [audio, text]}]),
        ),
        (json!([earlier]), json!({}), json!([earlier, {"role": "user", "content": [audio]}])),
    ] {
        let mock = MockEndpoint::new(vec![answer(200, CHAT_ANSWER)]).await;
        let mut with_audio = metadata.clone();
        with_audio["audio_data"] = "data:audio/wav;base64,AA==".into();
        let body = RawObject::from_value(&json!({"messages": messages, "metadata": with_audio})).unwrap();
        model(&mock, |_| ()).chat_completions(&CallContext::default(), &SessionId::new("s"), &body).await.unwrap();
        let asked = mock.body(0);
        assert_eq!(asked["messages"], expected);
        assert_eq!(asked.get("metadata").cloned().unwrap_or_else(|| json!({})), metadata);
    }
}

#[test]
fn the_environment_chooses_the_reasoning_field_that_no_configuration_names() {
    let chosen = |configured, variable| {
        let mut config = VllmModelConfig::new("http://a/v1", "m");
        config.reasoning_field = configured;
        config.choose_reasoning_field(variable).map(|()| config.reasoning_field.unwrap_or_default())
    };
    assert_eq!(chosen(None, None).unwrap(), ReasoningField::Both);
    assert_eq!(chosen(None, Some(" reasoning ")).unwrap(), ReasoningField::Reasoning);
    assert_eq!(chosen(Some(ReasoningField::Both), Some("reasoning")).unwrap(), ReasoningField::Both);
    let error = chosen(None, Some("content")).unwrap_err();
    assert!(error.to_string().contains("NEMO_GYM_REASONING_FIELD"), "{error}");
}

const CHAT_SHORT: &str =
    r#"{"created":1,"choices":[{"finish_reason":"stop","message":{"role":"assistant","content":"x"}}]}"#;

fn several(mocks: &[&MockEndpoint], change: impl FnOnce(&mut VllmModelConfig)) -> VllmModel {
    model(mocks[0], |config| {
        config.base_url = OneOrMany::Many(mocks.iter().map(|mock| mock.url().to_owned()).collect());
        change(config);
    })
}

async fn chat(model: &VllmModel, session: &str, prompt: &str) -> Result<RawObject> {
    let body = json!({"messages": [{"role": "user", "content": prompt}]}).to_string();
    let session = SessionId::new(session);
    model.chat_completions(&CallContext::default(), &session, &RawObject::parse(body).unwrap()).await
}

#[tokio::test]
async fn a_session_and_a_prompt_stay_with_one_engine_and_prompts_spread() {
    let answers = || vec![answer(200, CHAT_SHORT); 200];
    let (a, b) = (MockEndpoint::new(answers()).await, MockEndpoint::new(answers()).await);
    let metrics = Metrics::new();
    let model = several(&[&a, &b], |_| ()).with_metrics("policy", &metrics);
    for prompt in 0..30 {
        let before = (a.count(), b.count());
        // Three attempts at a prompt, each of two turns. The second turn has another prompt, as if its session had no cookie.
        for attempt in 0..3 {
            let session = format!("{prompt}-{attempt}");
            chat(&model, &session, &format!("prompt {prompt}")).await.unwrap();
            chat(&model, &session, "another prompt").await.unwrap();
        }
        let sent = (a.count() - before.0, b.count() - before.1);
        assert!(matches!(sent, (6, 0) | (0, 6)), "{prompt}: {sent:?}");
    }
    assert!(a.count() >= 30 && b.count() >= 30, "{} and {}", a.count(), b.count());
    let text = metrics.text();
    for line in [
        r#"gym_model_affinity_hits_total{server="policy",among="endpoints"} 150"#,
        r#"gym_model_affinity_placed_total{server="policy",among="endpoints"} 30"#,
        r#"gym_model_affinity_sheds_total{server="policy",among="endpoints"} 0"#,
        r#"gym_model_affinity_skew{server="policy",among="endpoints"} 2"#,
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[tokio::test]
async fn an_engine_that_rejects_a_call_or_is_gone_is_left_and_the_session_stays_where_it_went() {
    let full = MockEndpoint::new(vec![answer(503, "{}"); 50]).await;
    let open = MockEndpoint::new(vec![answer(200, CHAT_SHORT); 50]).await;
    // Nothing listens at the third: its port is taken back when the listener is dropped.
    let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let model = several(&[&full, &open], |config| {
        if let OneOrMany::Many(urls) = &mut config.base_url {
            urls.push(format!("http://{gone}/v1"));
        }
    });
    for prompt in 0..20 {
        chat(&model, &format!("s{prompt}"), &format!("prompt {prompt}")).await.unwrap();
    }
    let rejected = full.count();
    assert_eq!(open.count(), 20);
    // At most one call a second.
    assert!((1..=5).contains(&rejected), "{rejected}");
    let unavailable = model.reports().iter().filter(|report| report.state == EndpointState::Unavailable).count();
    assert_eq!(unavailable, 2, "{:?}", model.reports());
    for prompt in 0..20 {
        chat(&model, &format!("s{prompt}"), &format!("prompt {prompt}")).await.unwrap();
    }
    assert_eq!(open.count(), 40);
    assert_eq!(full.count(), rejected, "each session stays where it went");
}

#[tokio::test]
async fn a_call_that_every_engine_rejects_waits_and_is_repeated_as_with_one() {
    let answers = || vec![answer(503, "{}"), answer(503, "{}"), answer(200, CHAT_SHORT), answer(200, CHAT_SHORT)];
    let (a, b) = (MockEndpoint::new(answers()).await, MockEndpoint::new(answers()).await);
    let model = several(&[&a, &b], |_| ());
    chat(&model, "s", "prompt").await.unwrap();
    // One is left after a rejection. The call waits at the other one.
    assert_eq!((a.count().min(b.count()), a.count().max(b.count())), (1, 3));
}

#[tokio::test]
async fn the_choice_among_engines_can_be_set_and_one_engine_needs_a_weight() {
    let answers = || vec![answer(200, CHAT_SHORT); 4];
    let (a, b) = (MockEndpoint::new(answers()).await, MockEndpoint::new(answers()).await);
    let model = several(&[&a, &b], |config| config.load_balancing_strategy = Some(Balance::RoundRobin));
    for _ in 0..4 {
        chat(&model, "s", "prompt").await.unwrap();
    }
    assert_eq!((a.count(), b.count()), (2, 2));
    let mut config = VllmModelConfig::new(a.url(), "m");
    config.load_balancing_strategy = Some(Balance::Weighted(vec![0]));
    let error = VllmModel::new(config, &world()).unwrap_err().to_string();
    assert!(error.contains("`load_balancing_strategy`: each engine of `base_url` has weight 0"), "{error}");
}

/// An environment with one tool.
struct Bell;

impl ResourcesServer for Bell {
    type Task = serde::de::IgnoredAny;

    gym_core::tools! { |self, _cx, _session|
        /// Rings.
        ring() => json!("rang"),
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
        Ok(Verdict::correct(true))
    }
}

/// An agent of a user: it calls the model until there is no tool call, and keeps the items of all turns.
struct OwnLoop(ServerClient);

impl AgentServer for OwnLoop {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        let mut episode = Episode::seed(cx, &self.0, "bell", row).await?;
        let mut output: Vec<Value> = Vec::new();
        loop {
            let answer = episode.ask("policy", r#"{"input":"ring"}"#).await?;
            output.extend(answer.0.get_as::<Vec<Value>>("output")?.unwrap_or_default());
            if answer.outline()?.function_calls().next().is_none() {
                let whole = answer.0.edit().set_value("output", &output)?.to_object()?;
                return episode.verify(ModelResponse(whole)).await;
            }
        }
    }
}

/// Returns a chat completion with a tool call or a text; `reports` are further members of the completion.
fn completion(finish_reason: &str, reports: &str) -> String {
    let message = match finish_reason {
        "tool_calls" => {
            r#"{"role":"assistant","content":null,"tool_calls":[{"id":"t","type":"function","function":{"name":"ring","arguments":"{}"}}]}"#
        }
        _ => r#"{"role":"assistant","content":"done"}"#,
    };
    let choice = format!(r#"{{"index":0,"finish_reason":"{finish_reason}","message":{message}}}"#);
    answer(200, &format!(r#"{{"id":"c","created":1,"choices":[{choice}]{reports}}}"#))
}

/// Returns the row of an episode of an agent, with these answers of the engine.
async fn scored(agent: &str, answers: Vec<String>, change: impl FnOnce(&mut VllmModelConfig)) -> Value {
    let mock = MockEndpoint::new(answers).await;
    let mut net = TestNetwork::new();
    let client = net.client(&["policy", "bell", "agent", "own"]);
    let context = |name: &str| ServerContext::new(name, "Test", &world());
    net.serve("policy", RoleServer::model(model(&mock, change), &context("policy")));
    net.serve("bell", RoleServer::resources(Bell, &context("bell")));
    let simple = SimpleAgent::between("policy", "bell", client.clone());
    net.serve("agent", RoleServer::agent(simple, &context("agent")));
    net.serve("own", RoleServer::agent(OwnLoop(client.clone()), &context("own")));
    let row = r#"{"responses_create_params":{"input":"ring"}}"#;
    let request = Request::post(CallContext::default(), "/run", row);
    let response = client.send(agent, &request, CallOptions::default()).await.unwrap().into_result().unwrap();
    serde_json::from_slice(&response.message.head.to_bytes()).unwrap()
}

#[tokio::test]
async fn a_row_has_the_finish_reason_and_the_weight_version_of_every_turn() {
    let version = |version: &str| format!(r#","metadata":{{"weight_version":"{version}"}}"#);
    let answers = [("tool_calls", "v1"), ("tool_calls", "v1"), ("stop", "v2")];
    let answers: Vec<String> = answers.iter().map(|(reason, weights)| completion(reason, &version(weights))).collect();
    for agent in ["agent", "own"] {
        let row = scored(agent, answers.clone(), |_| ()).await;
        assert_eq!(
            row["response"][TURNS_KEY],
            json!([
                {"finish_reason": "tool_calls", "weight_version": "v1"},
                {"finish_reason": "tool_calls", "weight_version": "v1"},
                {"finish_reason": "stop", "weight_version": "v2"},
            ]),
            "{agent}"
        );
        assert_eq!(row["responses_create_params"]["tools"], json!(Bell.tools()));
    }
    let one = scored("own", vec![completion("stop", &version("v3"))], |_| ()).await;
    assert_eq!(one["response"][TURNS_KEY], json!([{"finish_reason": "stop", "weight_version": "v3"}]));
}

#[tokio::test]
async fn a_weight_version_is_kept_as_the_engine_wrote_it() {
    let spans = r#"[{"version":"v1","start":0,"end":3},{"version":"v2","start":3,"end":9}]"#;
    for (reports, expected) in [
        // SGLang: in `metadata`, later in `sglext`; with the versions of the tokens if they differ.
        (r#","metadata":{"weight_version":"default"}"#.to_owned(), r#","weight_version":"default""#.to_owned()),
        (
            format!(r#","metadata":{{"weight_version":"v2","weight_versions":{spans}}}"#),
            format!(r#","weight_version":"v2","weight_versions":{spans}"#),
        ),
        (
            format!(r#","sglext":{{"weight_versions":{spans},"weight_version":"v2"}}"#),
            format!(r#","weight_version":"v2","weight_versions":{spans}"#),
        ),
        (r#","meta_info":{"weight_version":"step-7"}"#.to_owned(), r#","weight_version":"step-7""#.to_owned()),
        (r#","weight_version":17"#.to_owned(), r#","weight_version":17"#.to_owned()),
        // Values of other types, unchanged; the first one that is not null.
        (r#","weight_version":1E5"#.to_owned(), r#","weight_version":1E5"#.to_owned()),
        (r#","weight_version":{"rank": [0, 3]}"#.to_owned(), r#","weight_version":{"rank": [0, 3]}"#.to_owned()),
        (r#","weight_version":"""#.to_owned(), r#","weight_version":"""#.to_owned()),
        (r#","weight_version":false"#.to_owned(), r#","weight_version":false"#.to_owned()),
        (
            r#","weight_version":null,"metadata":{"weight_version":"v3"}"#.to_owned(),
            r#","weight_version":"v3""#.to_owned(),
        ),
        (r#","metadata":{"weight_version":null}"#.to_owned(), String::new()),
        (r#","metadata":null,"sglext":"x","meta_info":[1]"#.to_owned(), String::new()),
        (String::new(), String::new()),
    ] {
        let mock = MockEndpoint::new(vec![completion("stop", &reports)]).await;
        let (_, text) = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap();
        let turns = format!(r#""{TURNS_KEY}":[{{"finish_reason":"stop"{expected}}}]"#);
        assert!(text.contains(&turns), "{reports}: {text}");
    }
    // SGLang with `return_meta_info`, and a gateway that translates the engine's word.
    let choice = r#"{"finish_reason":"STOP","native_finish_reason":"end_turn","meta_info":{"weight_version":"v4"},"message":{"role":"assistant","content":"x"}}"#;
    let mock = MockEndpoint::new(vec![answer(200, &format!(r#"{{"choices":[{choice}]}}"#))]).await;
    let (got, _) = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap();
    let turn = json!({"finish_reason": "STOP", "native_finish_reason": "end_turn", "weight_version": "v4"});
    assert_eq!(got[TURNS_KEY], json!([turn]));
}

#[tokio::test]
async fn a_native_response_has_the_weight_version_and_no_key_of_ours_without_one() {
    let native = |more: &str| answer(200, &format!(r#"{{"id":"r","status":"completed","output":[]{more}}}"#));
    for (more, expected) in [
        (r#","metadata":{"weight_version":"v5"}"#, Some(json!([{"weight_version": "v5"}]))),
        ("", None),
        (r#","metadata":{}"#, None),
    ] {
        let mock = MockEndpoint::new(vec![native(more)]).await;
        let model = model(&mock, |config| config.is_responses_native = true);
        let (got, _) = ask(&model, r#"{"input":"x"}"#).await.unwrap();
        assert_eq!(got.get(TURNS_KEY), expected.as_ref(), "{more}");
    }
}

#[tokio::test]
async fn a_response_has_the_settings_of_the_server_that_shape_the_prompt() {
    let thinking = |config: &mut VllmModelConfig| {
        config.chat_template_kwargs = json!({"enable_thinking": true, "depth": 2}).as_object().cloned();
        config.extra_body = json!({"add_generation_prompt": true, "top_k": 3}).as_object().cloned();
    };
    let of_row = r#"{"input":"x","metadata":{"chat_template_kwargs":"{\"enable_thinking\": false}"}}"#;
    let native = r#"{"id":"r","status":"completed","output":[]}"#;
    let mock = MockEndpoint::new(vec![completion("stop", ""), completion("stop", ""), answer(200, native)]).await;
    let (plain, _) = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap();
    assert_eq!(plain.get(PROMPT_KEY), None);
    let (got, _) = ask(&model(&mock, thinking), of_row).await.unwrap();
    let sent = json!({"chat_template_kwargs": {"enable_thinking": false, "depth": 2}, "add_generation_prompt": true});
    assert_eq!(got[PROMPT_KEY], sent);
    assert_eq!(mock.body(1)["chat_template_kwargs"], sent["chat_template_kwargs"]);
    let native = |config: &mut VllmModelConfig| {
        thinking(config);
        config.is_responses_native = true;
    };
    let (got, _) = ask(&model(&mock, native), r#"{"input":"x","add_generation_prompt":true}"#).await.unwrap();
    assert_eq!(got[PROMPT_KEY], json!({"chat_template_kwargs": {"enable_thinking": true, "depth": 2}}));
}

fn choice(finish_reason: &str) -> String {
    format!(
        r#"{{"choices":[{{"finish_reason":"{finish_reason}","message":{{"role":"assistant","content":"half"}}}}],"usage":{{"prompt_tokens":3,"completion_tokens":9,"total_tokens":12}}}}"#
    )
}

#[tokio::test]
async fn an_aborted_completion_is_requested_again_as_if_the_engine_were_busy() {
    let mock = MockEndpoint::new(vec![
        answer(200, &choice("abort")),
        answer(200, &choice("abort")),
        answer(200, &choice("stop")),
    ])
    .await;
    // A limit of errors does not matter: the engine has done nothing.
    let model = model(&mock, |_| ());
    let (got, _) = ask(&model, r#"{"input":"x"}"#).await.unwrap();
    assert_eq!((&got["status"], mock.count()), (&json!("completed"), 3));
}

#[tokio::test]
async fn an_engine_that_aborts_to_the_end_is_unavailable_and_named() {
    let mock = MockEndpoint::new(vec![answer(200, &choice("abort"))]).await;
    let model = model(&mock, |config| config.retry_budget_seconds = 0.0);
    let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!(error.class(), Some(FailureClass::ModelUnavailable), "{error}");
    assert!(error.to_string().contains("aborted") && error.to_string().contains(mock.url()), "{error}");
    let report = &model.reports()[0];
    assert!(report.reason.contains("aborts") && report.fix.contains("/resume"), "{report:?}");
}

#[tokio::test]
async fn an_engine_that_aborts_is_left_for_another_one() {
    let [first, second] = [choice("abort"), choice("stop")].map(|body| answer(200, &body));
    let (aborting, serving) = (MockEndpoint::new(vec![first]).await, MockEndpoint::new(vec![second]).await);
    let model = several(&[&aborting, &serving], |config| config.load_balancing_strategy = Some(Balance::RoundRobin));
    ask(&model, r#"{"input":"x"}"#).await.unwrap();
    assert_eq!((aborting.count(), serving.count()), (1, 1));
}

#[tokio::test]
async fn a_tool_call_that_may_hide_an_abort_is_requested_again_if_the_engine_aborted_requests() {
    let models = answer(200, r#"{"data":[{"id":"qwen","owned_by":"vllm"}]}"#);
    let count = |count: u32| {
        answer(200, &format!("vllm:request_success_total{{engine=\"0\",finished_reason=\"abort\"}} {count}.0\n"))
    };
    let with_ids = |reason: &str, ids: &str| {
        let ids = format!(r#""finish_reason":"{reason}","stop_reason":null,"token_ids":{ids}"#);
        answer(200, &choice(reason).replace(&format!(r#""finish_reason":"{reason}""#), &ids))
    };
    let whole = with_ids("stop", "[5,2]");
    // The ids of the tool call, and the number of requests: one that ends as whole responses end is accepted.
    for (ids, requests) in [("[7,2]", 2), ("[2,7]", 3), ("null", 3)] {
        let gets = [("/v1/models", models.clone()), ("/metrics", count(0)), ("/metrics", count(1))];
        let posts = vec![whole.clone(), with_ids("tool_calls", ids), whole.clone()];
        let mock = MockEndpoint::with_gets(posts, &gets).await;
        let model = model(&mock, |_| ());
        for _ in 0..2 {
            ask(&model, r#"{"input":"x"}"#).await.unwrap();
        }
        assert_eq!((mock.count(), model.reports()[0].aborted), (requests, requests as u64 - 2), "{ids}");
    }
}

#[tokio::test]
async fn a_vllm_is_asked_for_the_ids_of_tool_calls_and_the_client_gets_none() {
    let ids = choice("tool_calls").replace(r#""finish_reason""#, r#""token_ids":[7,2],"finish_reason""#);
    let whole = ids.replacen('{', r#"{"prompt_token_ids":[1,2,3],"#, 1);
    for (owner, tools, asked) in [("vllm", true, true), ("vllm", false, false), ("sglang", true, false)] {
        let models = format!(r#"{{"data":[{{"id":"qwen","owned_by":"{owner}"}}]}}"#);
        let posts = vec![answer(200, &whole), answer(200, &whole)];
        let mock = MockEndpoint::with_gets(posts, &[("/v1/models", answer(200, &models))]).await;
        let model = model(&mock, |_| ());
        let tools = if tools { r#","tools":[{"type":"function","function":{"name":"f"}}]"# } else { "" };
        let request = RawObject::parse(format!(r#"{{"messages":[{{"role":"user","content":"x"}}]{tools}}}"#)).unwrap();
        model.probe(&CallContext::default()).await;
        let got = model.chat_completions(&CallContext::default(), &SessionId::new("s"), &request).await.unwrap();
        assert_eq!(mock.body(0).get("return_token_ids").is_some(), asked, "{owner} {tools}");
        let text = String::from_utf8_lossy(got.text()).into_owned();
        assert_eq!(text.contains("token_ids"), !asked, "{text}");
    }
}

#[tokio::test]
async fn what_the_rollouts_would_run_into_is_said_by_the_probe() {
    let models = |owner: &str| answer(200, &format!(r#"{{"data":[{{"id":"qwen","owned_by":"{owner}"}}]}}"#));
    let tokens = |count: u32| {
        let mut chat: Value = serde_json::from_str(&choice_with_token("token_id:11")).unwrap();
        chat["usage"] = json!({"prompt_tokens": count, "completion_tokens": 1});
        answer(200, &chat.to_string())
    };
    let refused = || answer(400, r#"{"message":"\"auto\" tool choice requires --enable-auto-tool-choice"}"#);
    let without_ids = answer(200, &choice("stop"));
    for (owner, ids, posts, state, says) in [
        ("vllm", false, vec![tokens(9), tokens(80)], EndpointState::Ready, ""),
        ("llamacpp", false, vec![tokens(9), tokens(9)], EndpointState::Ready, "ignores `tools`"),
        ("vllm", false, vec![tokens(9), refused()], EndpointState::Ready, "--enable-auto-tool-choice"),
        ("vllm", true, vec![tokens(9), tokens(80)], EndpointState::Ready, ""),
        ("other", true, vec![without_ids.clone(), tokens(80)], EndpointState::Misconfigured, "gave none"),
        // A hosted model bills each call.
        ("openai", false, vec![tokens(9), tokens(9)], EndpointState::Ready, ""),
        // What every call runs into, the rollouts say.
        ("vllm", true, vec![answer(422, "{}"), tokens(9)], EndpointState::Ready, ""),
    ] {
        let mock = MockEndpoint::with_gets(posts, &[("/v1/models", models(owner))]).await;
        let model = model(&mock, |config| config.return_token_id_information = ids);
        let report = model.trial(&CallContext::default()).await.remove(0);
        assert_eq!(report.state, state, "{report:?}");
        assert!(report.reason.contains(says) && report.reason.is_empty() == says.is_empty(), "{says}: {report:?}");
        assert_eq!(report.fix.is_empty(), says.is_empty(), "{report:?}");
        if mock.count() == 2 {
            let tools = |index: usize| mock.body(index).get("tools").is_some();
            assert_eq!((tools(0), tools(1), mock.body(0)["max_tokens"].clone()), (false, true, 1.into()));
        }
    }
}

#[tokio::test]
async fn a_tool_call_that_used_up_the_tokens_is_cut_although_the_engine_names_the_call() {
    for (limit, cut) in [(9, true), (10, false)] {
        let mock = MockEndpoint::new(vec![answer(200, &choice("tool_calls"))]).await;
        let (got, _) =
            ask(&model(&mock, |_| ()), &format!(r#"{{"input":"x","max_output_tokens":{limit}}}"#)).await.unwrap();
        assert_eq!(got["status"] == "incomplete", cut, "{got}");
        if cut {
            assert_eq!(got["incomplete_details"]["reason"], "max_output_tokens", "{got}");
            assert_eq!(got["incomplete_details"]["message"], "the response has 9 tokens, and the request allows 9");
        }
    }
}

#[tokio::test]
async fn what_fills_the_context_that_the_engine_told_is_cut() {
    let models = r#"{"data":[{"id":"qwen","max_model_len":12}]}"#;
    let mock =
        MockEndpoint::with_gets(vec![answer(200, &choice("tool_calls"))], &[("/v1/models", answer(200, models))]).await;
    let model = model(&mock, |_| ());
    model.probe(&CallContext::default()).await;
    let (got, _) = ask(&model, r#"{"input":"x"}"#).await.unwrap();
    assert_eq!(
        got["incomplete_details"]["message"],
        "prompt and response have 12 tokens, and the model's context has 12"
    );
}

#[tokio::test]
async fn prompt_ids_of_another_prompt_are_an_error_with_both_numbers() {
    let mut chat: Value = serde_json::from_str(&choice_with_token("token_id:11")).unwrap();
    chat["usage"] = json!({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4});
    let chat = chat.to_string();
    for (ids, fits) in [("[7, 8, 9]", true), ("[7,8]", false), ("[]", false)] {
        let tokens = format!(r#"{{"tokens":{ids}}}"#);
        let mock = MockEndpoint::new(vec![answer(200, &chat), answer(200, &tokens)]).await;
        let model = model(&mock, |config| {
            config.return_token_id_information = true;
            config.continue_final_assistant_message = true;
            config.extra_body = serde_json::from_str(r#"{"add_special_tokens":false,"chat_template":"t"}"#).unwrap();
        });
        let request = r#"{"input":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]}"#;
        match ask(&model, request).await {
            Ok(_) => assert!(fits, "{ids}"),
            Err(error) => assert!(!fits && error.to_string().contains("counts 3 tokens"), "{ids}: {error}"),
        }
        // Whatever shapes the prompt is sent to `/tokenize` too.
        let asked = mock.body(1);
        for (key, value) in [
            ("add_generation_prompt", json!(false)),
            ("continue_final_message", json!(true)),
            ("add_special_tokens", json!(false)),
            ("chat_template", json!("t")),
        ] {
            assert_eq!(asked[key], value, "{key}");
        }
    }
}

#[tokio::test]
async fn strict_tools_are_sent_if_the_configuration_keeps_them() {
    for keeps in [false, true] {
        let mock = MockEndpoint::new(vec![answer(200, CHAT_ANSWER)]).await;
        ask(&model(&mock, |config| config.keep_strict_tools = keeps), REQUEST).await.unwrap();
        assert_eq!(mock.body(0)["tools"][0]["function"].get("strict"), keeps.then_some(&json!(true)));
    }
}

#[tokio::test]
async fn over_the_native_dialect_seeds_reach_the_engine_and_overflows_and_cut_answers_are_incomplete() {
    let native = |config: &mut VllmModelConfig| config.is_responses_native = true;
    let cut = r#"{"output":[],"status":"completed","usage":{"output_tokens":5,"total_tokens":9}}"#;
    let mock = MockEndpoint::new(vec![answer(200, cut)]).await;
    let request = r#"{"input":"x","max_output_tokens":5,"metadata":{"extra_body":"{\"seed\": 5}"}}"#;
    let (got, _) = ask(&model(&mock, native), request).await.unwrap();
    assert_eq!((&mock.body(0)["seed"], &got["incomplete_details"]["reason"]), (&json!(5), &json!("max_output_tokens")));
    let full = json!({"error": {"message": "The engine prompt length 8 exceeds the max_model_len 8", "code": 400}});
    let mock = MockEndpoint::new(vec![answer(400, &full.to_string())]).await;
    let (got, _) = ask(&model(&mock, native), r#"{"input":"x"}"#).await.unwrap();
    assert_eq!(got["incomplete_details"]["code"], "context_length_exceeded");
}
