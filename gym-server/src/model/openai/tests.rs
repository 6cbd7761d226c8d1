use std::time::Duration;

use gym_core::Rope;
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
    ask_within(model, body, Duration::from_secs(20)).await
}

async fn ask_within(model: &OpenAiModel, body: &str, limit: Duration) -> Result<Rope> {
    let body = RawObject::parse(body.to_owned()).unwrap();
    let cx = CallContext::within(limit);
    model.responses(&cx, &SessionId::new("s"), &body).await.map(|answer| answer.0.into_text().into())
}

const ANSWER: &str = r#"{"output":[], "n": 1E5, "id": 12345678901234567890123}"#;

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
    assert!(request.ends_with(r#"{"model":"gpt \"x\"","input": [ 1E5 ],"temperature":0.50,"seed":3}"#), "{request}");
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
    assert!(error.to_string().starts_with(&format!("POST {}/responses: answered 500: the engine broke", mock.url())));
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
            MockEndpoint::new(vec![answer(status, body), answer(200, r#"{"object":"response","output":[]}"#)]).await;
        let model = model(&mock, |_| ());
        let error = ask(&model, r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!(mock.count(), 1);
        let refused = std::error::Error::source(&error)
            .and_then(|cause| cause.downcast_ref::<crate::role::model::EndpointRejection>());
        assert_eq!(refused.map(|refused| (refused.status, refused.body.clone())), Some((status, body.into())));
        ask(&model, r#"{"input":"x"}"#).await.unwrap();
    }
}

#[tokio::test]
async fn a_hanging_endpoint_ends_at_the_deadline() {
    let mock = MockEndpoint::new(vec![String::new()]).await;
    let error = ask_within(&model(&mock, |_| ()), r#"{"input":"x"}"#, Duration::from_millis(200)).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
    assert!(error.to_string().contains(mock.url()));
}

#[tokio::test]
async fn garbage_and_too_much_are_errors_that_say_so() {
    for garbage in ["<html>no</html>", "[1]", "{\"output\":", r#"{"object":"error"}"#] {
        let mock = MockEndpoint::new(vec![answer(200, garbage)]).await;
        let error = ask(&model(&mock, |_| ()), r#"{"input":"x"}"#).await.unwrap_err();
        assert_eq!(error.code(), Code::DataLoss, "{garbage}");
        assert!(error.to_string().contains(&garbage[..3]), "{error}");
    }
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
