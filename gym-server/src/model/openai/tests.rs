use std::time::Duration;

use gym_core::Rope;
use gym_core::rollout::FailureClass;
use gym_core::server::EndpointState;
use tokio::time::Instant;

use super::*;
use crate::model::mock::{MockEndpoint, answer, answer_with};
use crate::testing::world;

fn model(mock: &MockEndpoint, change: impl FnOnce(&mut OpenAiModelConfig)) -> OpenAiModel {
    let mut config = OpenAiModelConfig::new(mock.url(), "gpt \"x\"");
    config.openai_api_key = Some(Secret::new("sk-hidden"));
    config.retry_backoff_ms = 1;
    change(&mut config);
    OpenAiModel::new(config, &world()).unwrap()
}

async fn ask(model: &OpenAiModel, body: &str) -> Result<Rope> {
    ask_within(model, body, Duration::from_secs(60)).await
}

async fn ask_within(model: &OpenAiModel, body: &str, limit: Duration) -> Result<Rope> {
    let body = RawObject::parse(body.to_owned()).unwrap();
    let cx = CallContext::within(limit);
    model.responses(&cx, &SessionId::new("s"), &body).await.map(|answer| answer.0.into_text().into())
}

const ANSWER: &str = r#"{"status":"completed","output":[], "n": 1E5, "id": 12345678901234567890123}"#;

#[tokio::test]
async fn request_and_answer_pass_as_text() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER)]).await;
    let model = model(&mock, |config| {
        config.extra_body = serde_json::from_str(r#"{"seed":3,"temperature":9}"#).unwrap();
        config.openai_default_headers.insert("x-team".into(), Secret::new("gym"));
    });
    let got = ask(&model, r#"{"model":"no","input": [ 1E5 ],"temperature":0.50}"#).await.unwrap();
    assert_eq!(got.to_bytes(), ANSWER);
    let request = mock.request(0);
    assert!(request.starts_with("POST /v1/responses HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("authorization: Bearer sk-hidden\r\n") && request.contains("x-team: gym\r\n"));
    assert!(
        request.ends_with(r#"{"model":"gpt \"x\"","input": [ 1E5 ],"temperature":0.50,"seed":3,"stream":false}"#),
        "{request}"
    );
    for header in ["accept-encoding: identity\r\n", "accept: application/json\r\n", "user-agent: gym/"] {
        assert!(request.contains(header), "{header}: {request}");
    }
    assert!(!format!("{model:?}").contains("sk-hidden"));
}

#[tokio::test]
async fn a_busy_endpoint_is_asked_again_after_the_time_it_names() {
    let mock =
        MockEndpoint::new(vec![answer_with(429, "retry-after: 1\r\n", "{}"), answer(503, ""), answer(200, ANSWER)])
            .await;
    let began = Instant::now();
    assert_eq!(ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap().to_bytes(), ANSWER);
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(mock.count(), 3);
}

#[tokio::test]
async fn a_retry_after_beyond_the_deadline_is_not_waited_for() {
    let mock = MockEndpoint::new(vec![answer_with(429, "retry-after: 600\r\n", r#"{"error":"slow down"}"#)]).await;
    let error = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!((error.code(), error.execution(), mock.count()), (Code::ResourceExhausted, Execution::Finished, 1));
    assert!(error.to_string().contains("slow down"));
}

#[tokio::test]
async fn attempts_are_bounded_and_the_last_answer_is_the_error() {
    let mock = MockEndpoint::new(vec![answer(500, "a"), answer(500, "b"), answer(500, "the engine broke")]).await;
    let error = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!((error.code(), mock.count()), (Code::Internal, 3));
    let expected = format!("POST {}/responses: answered 500: the engine broke (3 attempts)", mock.url());
    assert!(error.to_string().starts_with(&expected), "{error}");
    let refused = MockEndpoint::new(vec![answer(400, r#"{"message":"bad input"}"#)]).await;
    let error = ask(&model(&refused, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!((error.code(), refused.count()), (Code::InvalidArgument, 1));
}

#[tokio::test]
async fn a_spent_quota_or_a_wrong_key_is_not_tried_again_and_stops_nobody_else() {
    for (status, body) in [
        (429, r#"{"error":{"code":"insufficient_quota","message":"pay"}}"#),
        (401, r#"{"error":{"message":"Incorrect API key provided: sk-hid***"}}"#),
    ] {
        let mock =
            MockEndpoint::new(vec![answer(status, body), answer(200, r#"{"status":"completed","output":[]}"#)]).await;
        let model = model(&mock, |_| ());
        let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!(mock.count(), 1);
        let refused = std::error::Error::source(&error)
            .and_then(|cause| cause.downcast_ref::<crate::role::model::EndpointRejection>());
        assert_eq!(refused.map(|refused| (refused.status, refused.body.clone())), Some((status, body.into())));
        ask(&model, r#"{"input":"x"}"#).await.unwrap();
    }
}

/// Returns a URL at which nothing listens.
fn dead_url() -> String {
    format!("http://127.0.0.1:{}/v1", gym_core::testing::free_port())
}

#[tokio::test]
async fn one_budget_covers_a_call_to_a_dead_endpoint_and_no_caller_repeats_it() {
    let url = dead_url();
    let mut config = OpenAiModelConfig::new(url.clone(), "m");
    (config.retry_budget_seconds, config.retry_backoff_ms, config.retry_backoff_max_ms) = (0.05, 1, 5);
    let model = OpenAiModel::new(config, &world()).unwrap();
    let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!((error.code(), error.failure_class()), (Code::Unavailable, FailureClass::ModelUnavailable));
    assert!(!error.may_resend(true) && !error.failure_class().is_transient(), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("POST {url}/responses: no response after ")), "{text}");
    assert!(text.contains("attempts in 0.05 s (`retry_budget_seconds`)"), "{text}");
    let report = model.reports().remove(0);
    assert_eq!((report.url, report.state, report.waiting), (url, EndpointState::Unavailable, 0));
    assert_eq!(report.reason, "connection refused");
    assert_eq!(report.fix, "start the engine, or correct `openai_base_url`");
}

#[tokio::test]
async fn a_waiting_call_shows_what_it_waits_for_until_the_endpoint_responds() {
    let mock = MockEndpoint::new(vec![answer(503, r#"{"error":"loading the weights"}"#), answer(200, ANSWER)]).await;
    let model = model(&mock, |config| config.retry_backoff_ms = 200);
    let asked = ask(&model, r#"{"input":"x"}"#);
    let shown = async {
        loop {
            let report = model.reports().remove(0);
            if report.waiting == 1 {
                return report;
            }
            tokio::task::yield_now().await;
        }
    };
    let (answered, report) = tokio::join!(asked, shown);
    answered.unwrap();
    assert_eq!(
        (report.state, report.reason.as_str()),
        (EndpointState::Unavailable, "answered 503: loading the weights")
    );
    assert_eq!(report.gives_up_after_seconds, 300);
    let after = model.reports().remove(0);
    assert_eq!((after.state, after.waiting, after.reason.as_str()), (EndpointState::Ready, 0, ""));
}

#[tokio::test]
async fn a_probe_says_whether_the_endpoint_serves_the_model() {
    for (status, body, state, says) in [
        (200, r#"{"data":[{"id":"gpt \"x\""},{"id":"b"}]}"#, EndpointState::Ready, ""),
        (200, r#"{"data":[]}"#, EndpointState::Ready, ""),
        (
            200,
            r#"{"data":[{"id":"a"},{"id":"b"}]}"#,
            EndpointState::Misconfigured,
            "does not list the model `gpt \"x\"`; it lists `a`, `b`",
        ),
        (
            200,
            "<html><title>Grafana</title></html>",
            EndpointState::Misconfigured,
            "no model endpoint; it answered an HTML page with the title `Grafana`",
        ),
        (
            401,
            r#"{"error":{"message":"Incorrect API key"}}"#,
            EndpointState::Misconfigured,
            "answered 401: Incorrect API key",
        ),
        (404, "{}", EndpointState::Ready, "answered 404 to GET /models"),
        (200, r#"[{"id":"m"},{"id":"gpt \"x\""}]"#, EndpointState::Ready, ""),
        (200, r#"{"data":[{"object":"model"},{"id":"gpt \"x\""}]}"#, EndpointState::Ready, ""),
        (200, r#"{"models":[{"name":"gpt \"x\""}]}"#, EndpointState::Ready, ""),
        (200, r#"[{"id":"m"}]"#, EndpointState::Misconfigured, "it lists `m`"),
        (200, r#"{"data":{"data":[{"id":"m"}]}}"#, EndpointState::Ready, "in a form that is not known"),
        (200, r#""zebra""#, EndpointState::Ready, "in a form that is not known"),
        (200, "null", EndpointState::Ready, "in a form that is not known"),
        (200, "OK", EndpointState::Ready, "in a form that is not known"),
        (200, r#"{"data":[3,null,{}]}"#, EndpointState::Ready, ""),
        (429, "{}", EndpointState::Unavailable, "answered 429"),
        (503, r#"{"message":"loading"}"#, EndpointState::Unavailable, "answered 503: loading"),
    ] {
        let mock = MockEndpoint::with_gets(Vec::new(), &[("/v1/models", answer(status, body))]).await;
        let report = model(&mock, |_| ()).probe(&CallContext::default()).await.remove(0);
        assert_eq!(report.state, state, "{report:?}");
        assert!(report.reason.contains(says) && report.reason.is_empty() == report.fix.is_empty(), "{report:?}");
    }
    let dead = OpenAiModel::new(OpenAiModelConfig::new(dead_url(), "m"), &world()).unwrap();
    let report = dead.probe(&CallContext::default()).await.remove(0);
    assert_eq!((report.state, report.reason.as_str()), (EndpointState::Unavailable, "connection refused"));
}

#[tokio::test]
async fn limits_that_allow_no_request_name_their_key() {
    let with = |change: fn(&mut OpenAiModelConfig)| {
        let mut config = OpenAiModelConfig::new("http://h/v1", "m");
        change(&mut config);
        OpenAiModel::new(config, &world()).unwrap_err().to_string()
    };
    assert!(with(|config| config.retry_budget_seconds = -1.0).contains("`retry_budget_seconds` is -1"));
    assert!(with(|config| config.retry_budget_seconds = f64::NAN).contains("`retry_budget_seconds` is NaN"));
    assert!(with(|config| config.max_http_attempts = Some(0)).contains("`max_http_attempts` is 0"));
}

#[tokio::test]
async fn a_hanging_endpoint_ends_at_the_deadline() {
    let mock = MockEndpoint::new(vec![String::new()]).await;
    let error = ask_within(&model(&mock, |_| ()), r#"{"input":"x"}"#, Duration::from_millis(200)).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
    assert!(error.to_string().contains(mock.url()));
}

#[tokio::test]
async fn a_compressed_or_streamed_answer_is_named() {
    let body = r#"{"status":"completed","output":[]}"#;
    let events = "data: {\"choices\":[]}\n\ndata: [DONE]\n\n";
    for (answered, says) in [
        (answer_with(200, "content-encoding: gzip\r\n", "x"), "in the content coding `gzip`"),
        (answer_with(500, "content-encoding: br\r\n", "x"), "in the content coding `br`"),
        (answer(200, events), "with an event stream"),
    ] {
        let mock = MockEndpoint::new(vec![answered]).await;
        let model = model(&mock, |config| config.max_http_attempts = Some(1));
        let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(error.failure_class(), FailureClass::ModelError);
        assert_ne!(model.reports().remove(0).state, EndpointState::Misconfigured, "the URL is right");
    }
    let plain = MockEndpoint::new(vec![answer_with(200, "content-encoding: identity\r\n", body)]).await;
    ask(&model(&plain, |_| ()), r#"{"input":"x"}"#).await.unwrap();
}

#[tokio::test]
async fn a_key_from_a_file_loses_its_newline_and_another_odd_character_is_named() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER)]).await;
    ask(&model(&mock, |config| config.openai_api_key = Some(Secret::new(" sk-key\r\n"))), r#"{"input":"x"}"#)
        .await
        .unwrap();
    assert!(mock.request(0).contains("authorization: Bearer sk-key\r\n"), "{}", mock.request(0));
    let mut config = OpenAiModelConfig::new("http://h/v1", "m");
    config.openai_api_key = Some(Secret::new("sk-\nkey"));
    let error = OpenAiModel::new(config, &world()).unwrap_err().to_string();
    assert!(error.contains("\\u{a} at place 4") && !error.contains("key\n"), "{error}");
}

#[tokio::test]
async fn garbage_and_too_much_are_errors_that_say_so() {
    for (garbage, says) in [
        ("<html>no</html>", "no JSON object (expected value at byte 0): an HTML page"),
        ("[1]", "no JSON object"),
        ("{\"output\":", "no JSON object"),
        ("", "an empty body"),
        ("{}", "has no list `output`, so it is no response of a model: {}"),
        (r#"{"object":"error"}"#, "has no list `output`"),
        (r#"{"output":"text"}"#, "has no list `output`"),
    ] {
        let mock = MockEndpoint::new(vec![answer(200, garbage)]).await;
        let model = model(&mock, |_| ());
        let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!(error.code(), Code::DataLoss, "{garbage}");
        assert!(error.to_string().contains(says), "{error}");
        let report = model.reports().remove(0);
        assert_eq!(report.state, EndpointState::Misconfigured);
        assert!(report.fix.contains("`openai_base_url`"), "{report:?}");
    }
    let failed = r#"{"status":"failed","output":[],"error":{"code":"server_error","message":"the GPU is gone"}}"#;
    let mock = MockEndpoint::new(vec![answer(200, failed)]).await;
    let error = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
    assert!(error.to_string().contains("the GPU is gone"), "{error}");
    assert_eq!(error.failure_class(), FailureClass::ModelError);
    let mock = MockEndpoint::new(vec![answer(200, &format!(r#"{{"output":"{}"}}"#, "x".repeat(100_000)))]).await;
    let model = model(&mock, |_| ());
    let mut cx = CallContext::default();
    cx.reply_bytes_max = 50_000;
    let body = RawObject::parse(r#"{"input":"x"}"#).unwrap();
    let error = model.responses(&cx, &SessionId::new("s"), &body).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn a_lost_connection_is_tried_again() {
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{".to_owned();
    let mock = MockEndpoint::new(vec![half, "nonsense\r\n\r\n".into(), answer(200, ANSWER)]).await;
    assert_eq!(ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap().to_bytes(), ANSWER);
}

#[tokio::test]
async fn reasoning_is_left_out_of_the_input_when_asked() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER)]).await;
    let model = model(&mock, |config| config.drop_input_reasoning_items = true);
    ask(&model, r#"{"input":[{"role":"user","x":1E5},{"type":"reasoning","summary":[]},{"type":"message"}]}"#)
        .await
        .unwrap();
    assert!(mock.request(0).contains(r#""input":[{"role":"user","x":1E5},{"type":"message"}]"#));
}

#[tokio::test]
async fn a_wrong_configuration_names_its_key() {
    for (url, names) in [
        ("nonsense", "openai_base_url"),
        ("ftp://x/v1", "ftp"),
        #[cfg(not(feature = "tls"))]
        ("https://user:pw@api.example.com/v1", "feature `tls`"),
        ("http://user:pw@api.example.com/v1?key=1", "leave out `?`"),
        ("http://user:pw@api example.com/v1", "openai_base_url"),
        ("http://user:pw@h/v 1", "has a blank in its path; remove it"),
        ("http://user:pw@h:1/v1/responses/", "`openai_base_url`: http://h:1/v1 is called with `/responses`"),
        ("http://h:1/v1/chat/completions", "another route behind it; write http://h:1/v1"),
    ] {
        let error = OpenAiModel::new(OpenAiModelConfig::new(url, "m"), &world()).unwrap_err();
        assert!(error.to_string().contains(names) && !error.to_string().contains("pw"), "{error}");
    }
}

#[tokio::test]
async fn credentials_of_the_url_are_sent_where_there_is_no_key() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER), answer(200, ANSWER)]).await;
    for (key, authorization) in [("", "Basic dXNlcjpwdzo="), ("sk-hidden", "Bearer sk-hidden")] {
        let model = model(&mock, |config| {
            config.openai_base_url = mock.url().replace("http://", "HTTP://user:pw%3A@");
            config.openai_api_key = Some(Secret::new(key)).filter(|_| !key.is_empty());
        });
        ask(&model, r#"{"input":"x"}"#).await.unwrap();
        let request = mock.request(mock.count() - 1);
        assert!(request.contains(&format!("authorization: {authorization}\r\n")), "{request}");
    }
}

#[tokio::test]
async fn headers_of_the_connection_cannot_be_set_but_the_host_can() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER)]).await;
    let with = |name: &str, value: &str| {
        let mut config = OpenAiModelConfig::new(mock.url(), "m");
        config.openai_default_headers.insert(name.to_owned(), Secret::new(value));
        OpenAiModel::new(config, &world())
    };
    let error = with("Connection", "close").unwrap_err().to_string();
    assert!(error.contains("openai_base_url") && error.contains("`connection` is set by the connection"), "{error}");
    ask(&with("Host", "engine.internal").unwrap(), r#"{"input":"x"}"#).await.unwrap();
    assert!(mock.request(0).contains("host: engine.internal\r\n"), "{}", mock.request(0));
}

#[tokio::test]
async fn reasoning_goes_back_to_the_endpoint_without_the_status_that_it_refuses() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER)]).await;
    let input = r#"{"input":[{"type":"reasoning","status":null,"n":1E5},{"type":"message","status":"completed","x":"\"reasoning\""}]}"#;
    ask(&model(&mock, |_| ()), input).await.unwrap();
    let expected =
        r#""input":[{"type":"reasoning","n":1E5},{"type":"message","status":"completed","x":"\"reasoning\""}]"#;
    assert!(mock.request(0).contains(expected), "{}", mock.request(0));
}

#[tokio::test]
async fn a_redirect_that_loses_the_body_or_leaves_the_host_is_an_answer() {
    // If these redirects were followed, the request would become a GET without its body, or another host would receive the key.
    for (status, place) in [(302, "/v1/elsewhere"), (308, "http://stranger.invalid/v1")] {
        let location = format!("location: {place}\r\n");
        let mock = MockEndpoint::new(vec![answer_with(status, &location, "moved"), answer(200, ANSWER)]).await;
        let error = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!((error.code(), mock.count()), (Code::Internal, 1));
        let said = format!("answered {status} and refers to {place}: moved");
        assert!(error.to_string().contains(&said), "{error}");
    }
    let mock = MockEndpoint::new(vec![answer_with(307, "location: /v1/responses/\r\n", ""), answer(200, ANSWER)]).await;
    assert_eq!(ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap().to_bytes(), ANSWER);
    let second = mock.request(1);
    assert!(second.starts_with("POST /v1/responses/ ") && second.contains(r#""input":"x""#), "{second}");
}

#[tokio::test]
async fn an_answer_that_used_up_its_tokens_is_incomplete_although_the_endpoint_says_completed() {
    let body = r#"{"status":"completed","output":[],"usage":{"input_tokens":3,"output_tokens":5,"total_tokens":8}}"#;
    for (request, cut) in [
        (r#"{"input":"x","max_output_tokens":5}"#, true),
        (r#"{"input":"x","max_output_tokens":6}"#, false),
        (r#"{"input":"x"}"#, false),
    ] {
        let mock = MockEndpoint::new(vec![answer(200, body)]).await;
        let got = ask(&model(&mock, |_| ()), request).await.unwrap().to_bytes();
        let got: Value = serde_json::from_slice(&got).unwrap();
        assert_eq!(got["incomplete_details"]["reason"] == "max_output_tokens", cut, "{got}");
        assert_eq!(got["status"] == "incomplete", cut, "{got}");
    }
    // The limit of the configuration counts too.
    let mock = MockEndpoint::new(vec![answer(200, body)]).await;
    let model = model(&mock, |config| config.extra_body = serde_json::from_str(r#"{"max_output_tokens":5}"#).unwrap());
    let got = ask(&model, r#"{"input":"x"}"#).await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&got).contains("max_output_tokens"));
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_is_a_response_without_content_that_says_so() {
    for body in [
        r#"{"error":{"code":"context_length_exceeded","message":"too long"}}"#,
        r#"{"error":{"code":400,"message":"request (5000 tokens) exceeds the available context size","type":"exceed_context_size_error"}}"#,
        r#"{"error":{"message":"The engine prompt length 4096 exceeds the max_model_len 4096","type":"BadRequestError","code":400}}"#,
    ] {
        let mock = MockEndpoint::new(vec![answer(400, body)]).await;
        let got = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap().to_bytes();
        let got: Value = serde_json::from_slice(&got).unwrap();
        assert_eq!(
            (&got["status"], &got["incomplete_details"]["code"]),
            (&"incomplete".into(), &"context_length_exceeded".into())
        );
    }
    // Any other rejection is an error.
    let mock = MockEndpoint::new(vec![answer(400, r#"{"error":{"message":"no such option","code":400}}"#)]).await;
    ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
}

#[tokio::test]
async fn the_keys_of_a_rows_metadata_reach_the_endpoint() {
    let mock = MockEndpoint::new(vec![answer(200, ANSWER)]).await;
    let model = model(&mock, |config| config.extra_body = serde_json::from_str(r#"{"seed":3,"top_k":1}"#).unwrap());
    let request = r#"{"input":"x","temperature":0.5,"metadata":{"extra_body":"{\"seed\": 7, \"temperature\": 9, \"model\": \"no\"}"}}"#;
    ask(&model, request).await.unwrap();
    let sent = mock.body(0);
    assert_eq!((&sent["seed"], &sent["top_k"], &sent["temperature"]), (&7.into(), &1.into(), &0.5.into()));
    assert_eq!(sent["model"], "gpt \"x\"");
    for wrong in [r#""[]""#, r#""{""#, r#""7""#] {
        let error = ask(&model, &format!(r#"{{"input":"x","metadata":{{"extra_body":{wrong}}}}}"#)).await.unwrap_err();
        assert!(error.to_string().contains("metadata.extra_body"), "{error}");
    }
}

#[tokio::test]
async fn a_vllm_behind_the_responses_dialect_is_named_with_the_risk_and_the_cure() {
    for (owner, named) in [("vllm", true), ("llamacpp", false)] {
        let models = format!(r#"{{"data":[{{"id":"gpt \"x\"","owned_by":"{owner}"}}]}}"#);
        let mock = MockEndpoint::with_gets(Vec::new(), &[("/v1/models", answer(200, &models))]).await;
        let report = &model(&mock, |_| ()).probe(&CallContext::default()).await[0];
        assert_eq!(report.state, EndpointState::Ready);
        assert_eq!(report.fix.contains("vllm_model"), named, "{report:?}");
    }
}

const VLLM: &str = r#"{"data":[{"id":"gpt \"x\"","owned_by":"vllm"}]}"#;

fn aborted(count: &str) -> String {
    answer(
        200,
        &format!("vllm:request_success_total{{engine=\"0\",finished_reason=\"abort\",model_name=\"m\"}} {count}\n"),
    )
}

#[tokio::test]
async fn a_response_of_a_vllm_that_aborted_requests_meanwhile_is_requested_again() {
    let gets = [("/v1/models", answer(200, VLLM)), ("/metrics", aborted("0.0")), ("/metrics", aborted("3.0"))];
    let mock =
        MockEndpoint::with_gets(vec![answer(200, r#"{"output":[],"id":"half"}"#), answer(200, ANSWER)], &gets).await;
    let model = model(&mock, |_| ());
    assert_eq!(ask(&model, r#"{"input":"x"}"#).await.unwrap().to_bytes(), ANSWER);
    let report = &model.reports()[0];
    assert_eq!((mock.count(), report.aborted, report.state), (2, 1, EndpointState::Ready), "{report:?}");
}

#[tokio::test]
async fn a_vllm_that_aborts_to_the_end_is_unavailable() {
    let gets = [("/v1/models", answer(200, VLLM)), ("/metrics", aborted("0.0")), ("/metrics", aborted("3.0"))];
    let mock = MockEndpoint::with_gets(vec![answer(200, ANSWER)], &gets).await;
    let error = ask(&model(&mock, |config| config.retry_budget_seconds = 0.0), r#"{"input":"x"}"#).await.unwrap_err();
    assert_eq!(error.class(), Some(FailureClass::ModelUnavailable), "{error}");
}

#[tokio::test]
async fn a_response_of_a_vllm_that_does_not_count_its_aborted_requests_says_so() {
    for (models, metrics, unverified) in [
        (VLLM, answer(404, "{}"), true),
        (VLLM, answer(200, "vllm:num_requests_running 3.0\n"), true),
        (VLLM, aborted("0.0"), false),
        (r#"{"data":[{"id":"m","owned_by":"other"}]}"#, answer(404, "{}"), false),
        ("{}", answer(404, "{}"), false),
    ] {
        let gets = [("/v1/models", answer(200, models)), ("/metrics", metrics)];
        let mock = MockEndpoint::with_gets(vec![answer(200, ANSWER), answer(200, ANSWER)], &gets).await;
        let model = model(&mock, |_| ());
        for _ in 0..2 {
            let got = ask(&model, r#"{"input":"x"}"#).await.unwrap().to_bytes();
            let text = String::from_utf8_lossy(&got);
            assert_eq!(text.contains(r#""_gym_completion_unverified":true"#), unverified, "{models}: {text}");
        }
        assert_eq!(mock.count(), 2, "{models}");
    }
}

#[tokio::test]
async fn an_engine_that_lists_its_models_late_is_checked_from_then_on() {
    let whole = || answer(200, ANSWER);
    let lists = [answer(503, "{}"), answer(503, "{}"), answer(200, VLLM)].map(|list| ("/v1/models", list));
    let metrics = [aborted("0.0"), aborted("3.0")].map(|metrics| ("/metrics", metrics));
    let mock = MockEndpoint::with_gets(vec![whole(), whole(), whole()], &[&lists[..], &metrics[..]].concat()).await;
    let model = model(&mock, |_| ());
    // The first list tells nothing, nor does the one after the response: no known engine.
    let first = ask(&model, r#"{"input":"x"}"#).await.unwrap().to_bytes();
    assert!(!String::from_utf8_lossy(&first).contains("unverified"));
    model.probe(&CallContext::default()).await;
    // Requests were aborted during the second call.
    ask(&model, r#"{"input":"x"}"#).await.unwrap();
    assert_eq!((mock.count(), model.reports()[0].aborted), (3, 1));
}

#[tokio::test]
async fn a_response_before_which_the_engine_told_nothing_is_unverified_if_it_is_a_vllm() {
    let lists = [("/v1/models", answer(503, "{}")), ("/v1/models", answer(200, VLLM))];
    let mock =
        MockEndpoint::with_gets(vec![answer(200, ANSWER)], &[&lists[..], &[("/metrics", aborted("0.0"))]].concat())
            .await;
    let got = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&got).contains(r#""_gym_completion_unverified":true"#));
}

#[tokio::test]
async fn counts_of_two_processes_or_of_none_verify_nothing() {
    let counter = |count: &str, created: &str| {
        let created = format!("vllm:request_success_created{{finished_reason=\"abort\"}} {created}\n");
        answer(200, &format!("vllm:request_success_total{{finished_reason=\"abort\"}} {count}\n{created}"))
    };
    for (after, unverified) in [
        (counter("0.0", "1.7e9"), false),
        (counter("0.0", "1.8e9"), true),
        (counter("5.0", "1.8e9"), true),
        (answer(500, "{}"), true),
    ] {
        let gets = [("/v1/models", answer(200, VLLM)), ("/metrics", counter("0.0", "1.7e9")), ("/metrics", after)];
        let mock = MockEndpoint::with_gets(vec![answer(200, ANSWER)], &gets).await;
        let got = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap().to_bytes();
        assert_eq!(String::from_utf8_lossy(&got).contains("_gym_completion_unverified"), unverified);
        assert_eq!(mock.count(), 1);
    }
}

#[tokio::test]
async fn an_engine_whose_calls_take_long_is_asked_what_it_does() {
    let state = |key: &str, is: bool| answer(200, &format!(r#"{{"{key}":{is}}}"#));
    for (sleeping, paused, expected, fix) in [
        (state("is_sleeping", true), state("is_paused", true), "it sleeps", "/wake_up"),
        (state("is_sleeping", false), state("is_paused", true), "it is paused", "/resume"),
        (answer(404, "{}"), answer(404, "{}"), "it responds to GET /models", ""),
    ] {
        let gets = [
            ("/v1/models", answer(200, VLLM)),
            ("/metrics", aborted("0.0")),
            ("/is_sleeping", sleeping),
            ("/is_paused", paused),
        ];
        // The call has no response.
        let mock = MockEndpoint::with_gets(vec![String::new()], &gets).await;
        let model = model(&mock, |config| config.probe_after_seconds = 0.02);
        let asking = ask(&model, r#"{"input":"x"}"#);
        let reported = async {
            loop {
                let report = model.reports().remove(0);
                if !report.reason.is_empty() {
                    return report;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let report = tokio::select! {
            answer = asking => panic!("{answer:?}"),
            report = reported => report,
        };
        assert_eq!((report.in_flight, report.oldest_seconds > 0), (1, true), "{report:?}");
        assert!(report.reason.contains(expected) && report.fix.contains(fix), "{report:?}");
        let can_serve = expected.contains("responds");
        assert_eq!(report.state == EndpointState::Unavailable, !can_serve, "{report:?}");
        // The probe of a command says the same, and the calls are over.
        let probed = model.probe(&CallContext::default()).await.remove(0);
        assert_eq!(probed.state == EndpointState::Unavailable, !can_serve, "{probed:?}");
        assert_eq!((model.reports()[0].in_flight, model.reports()[0].oldest_seconds), (0, 0));
    }
}
