//! The raw answers of real engines, which `tests/engines/record_answers.py` recorded: each of them must be understood.

use gym_core::rollout::FailureClass;
use gym_core::{CallContext, Error, ModelServer, RawObject, SessionId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::model::mock::{MockEndpoint, answer};
use crate::model::openai::{OpenAiModel, OpenAiModelConfig};
use crate::model::vllm::{VllmModel, VllmModelConfig};
use crate::testing::world;

const VLLM: &str = include_str!("../../../../tests/data/engines/vllm.json");
const LLAMACPP: &str = include_str!("../../../../tests/data/engines/llamacpp.json");

#[derive(Deserialize)]
struct Recorded {
    engine: String,
    answers: Vec<Answer>,
}

#[derive(Deserialize)]
struct Answer {
    name: String,
    path: String,
    request: Value,
    status: u16,
    body: String,
}

impl Recorded {
    fn body(&self, name: &str) -> Option<&str> {
        self.answers.iter().find(|answer| answer.name == name).map(|answer| answer.body.as_str())
    }

    /// Returns what a rollout gets for a recorded answer, in the dialect in which it was recorded.
    async fn received(&self, recorded: &Answer) -> Result<Value, Error> {
        let metrics = self.body("metrics").unwrap_or_default();
        // Before the recorded abort, the engine had counted one request less.
        let count = metrics.lines().find(|line| line.contains("\"abort\"")).and_then(|line| line.rsplit(' ').next());
        let before = count.map(|count| metrics.replace(count, "0.0")).unwrap_or_default();
        let after = if recorded.name.contains("aborted") { metrics.to_owned() } else { before.clone() };
        let gets = [
            ("/v1/models", answer(200, self.body("models").unwrap())),
            ("/metrics", answer(200, &before)),
            ("/metrics", answer(200, &after)),
        ];
        let answers = vec![answer(recorded.status, &recorded.body); 3];
        let mock = MockEndpoint::with_gets(answers, &gets).await;
        let tokens = ["max_output_tokens", "max_tokens"].iter().find_map(|key| recorded.request[*key].as_u64());
        let request = match tokens {
            Some(tokens) => json!({"input": "x", "max_output_tokens": tokens}),
            None => json!({"input": "x"}),
        };
        let request = RawObject::parse(request.to_string()).unwrap();
        let (cx, session) = (CallContext::default(), SessionId::new("s"));
        let response = if recorded.path.ends_with("/responses") {
            let mut config = OpenAiModelConfig::new(mock.url(), "tiny");
            (config.retry_budget_seconds, config.max_http_attempts) = (0.0, Some(1));
            OpenAiModel::new(config, &world()).unwrap().responses(&cx, &session, &request).await?
        } else {
            let mut config = VllmModelConfig::new(mock.url(), "tiny");
            (config.retry_budget_seconds, config.max_http_attempts) = (0.0, Some(1));
            config.return_token_id_information = recorded.name.ends_with("token ids");
            VllmModel::new(config, &world()).unwrap().responses(&cx, &session, &request).await?
        };
        Ok(response.0.outline().unwrap())
    }
}

#[tokio::test]
async fn each_recorded_answer_of_an_engine_is_understood() {
    let mut understood = 0;
    for text in [VLLM, LLAMACPP] {
        let recorded: Recorded = serde_json::from_str(text).unwrap();
        for answer in
            recorded.answers.iter().filter(|answer| answer.path.starts_with("/v1/") && answer.name != "models")
        {
            let at = format!("{}, {}", recorded.engine, answer.name);
            let received = recorded.received(answer).await;
            let (dialect, what) = answer.name.split_once(": ").unwrap();
            assert_eq!(answer.path.ends_with("/responses"), dialect == "responses", "{at}");
            match (what, received) {
                ("whole", Ok(response)) => assert_eq!(response["status"], "completed", "{at}"),
                ("cut by the limit" | "with a tool" | "repetition", Ok(response)) => {
                    assert_eq!(response["status"], "incomplete", "{at}: {response}");
                }
                ("prompt of 4096 tokens" | "prompt of 4097 tokens", Ok(response)) => {
                    assert_eq!(response["incomplete_details"]["code"], "context_length_exceeded", "{at}: {response}");
                }
                ("token ids", Ok(response)) if recorded.engine == "vllm" => {
                    let item = &response["output"][0];
                    let count = |key: &str| item[key].as_array().map(Vec::len);
                    assert_eq!(count("generation_token_ids"), Some(4), "{at}: {response}");
                    assert_eq!(
                        count("prompt_token_ids").map(|ids| json!(ids)),
                        Some(response["usage"]["input_tokens"].clone())
                    );
                }
                ("token ids", Err(error)) if recorded.engine == "llamacpp" => {
                    assert!(error.to_string().contains("return_token_id_information"), "{at}: {error}");
                }
                ("aborted", Err(error)) => {
                    assert_eq!(error.class(), Some(FailureClass::ModelUnavailable), "{at}: {error}");
                }
                ("a call that was cut off, sent back", Err(error)) => {
                    assert_eq!(error.class(), Some(FailureClass::ModelError), "{at}: {error}");
                }
                (_, received) => panic!("{at}: {received:?}"),
            }
            understood += 1;
        }
    }
    assert_eq!(understood, 26);
}
