//! A substitute for a model, for runs without a GPU and without an API key: a program decides the responses.
//!
//! The responses depend on a [`ScriptedPolicy`] of the user's program and on a seed. Each request has its own random number
//! generator, which combines the seed and the text of the request. A run therefore returns the same responses at any concurrency.
//! Equal requests get equal responses. Repeats of a task differ if the collector adds a seed to each.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use gym_core::message::push_json_string;
use gym_core::{CallContext, Execution, ModelResponse, ModelServer, RawObject, Result, SessionId, World};
use serde::Deserialize;
use serde_json::Value;

/// Decides the responses of a [`ScriptedModel`]. Functions of this signature implement it.
///
/// The request is the body of `/v1/responses` or `/v1/chat/completions`. All randomness must come from `rng`; otherwise runs
/// are not reproducible.
pub trait ScriptedPolicy: Send + Sync + 'static {
    /// Returns the items of the response, in order.
    fn answer(&self, request: &RawObject, rng: &mut fastrand::Rng) -> Vec<ScriptedItem>;
}

impl<F> ScriptedPolicy for F
where
    F: Fn(&RawObject, &mut fastrand::Rng) -> Vec<ScriptedItem> + Send + Sync + 'static,
{
    fn answer(&self, request: &RawObject, rng: &mut fastrand::Rng) -> Vec<ScriptedItem> {
        self(request, rng)
    }
}

/// One item of a scripted response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptedItem {
    /// Reasoning before the response.
    Reasoning(String),
    /// A message of the assistant.
    Message(String),
    /// A call of a tool.
    ToolCall {
        /// The name of the tool.
        name: String,
        /// The arguments: usually JSON, or any other string to test an agent.
        arguments: String,
    },
}

impl ScriptedItem {
    /// Creates a message.
    #[must_use]
    pub fn message(text: impl Into<String>) -> Self {
        Self::Message(text.into())
    }

    /// Creates a tool call with arguments in JSON.
    #[must_use]
    pub fn tool_call(name: impl Into<String>, arguments: impl Into<String>) -> Self {
        Self::ToolCall { name: name.into(), arguments: arguments.into() }
    }

    fn length(&self) -> usize {
        match self {
            Self::Reasoning(text) | Self::Message(text) => text.len(),
            Self::ToolCall { name, arguments } => name.len() + arguments.len(),
        }
    }
}

/// The keys of a `scripted_model` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(default)]
#[non_exhaustive]
pub struct ScriptedModelConfig {
    /// The `model` of the responses, which shows readers of the rollouts that no model wrote them. `scripted_model` by default.
    pub model: String,
    /// The seed of the responses. 0 by default.
    pub seed: u64,
    /// The latency of a response in milliseconds: a number, or `[minimum, maximum]`. None by default.
    pub latency_ms: Option<Latency>,
    /// Adds random `prompt_token_ids`, `generation_token_ids` and `generation_log_probs` to the last item. Off by default.
    pub token_fields: bool,
    /// The number of random generation tokens. By default about a quarter of the bytes of the text.
    pub generation_tokens: Option<usize>,
}

impl Default for ScriptedModelConfig {
    fn default() -> Self {
        let model = "scripted_model".to_owned();
        Self { model, seed: 0, latency_ms: None, token_fields: false, generation_tokens: None }
    }
}

/// The latency of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Latency {
    /// A fixed number of milliseconds.
    Fixed(u64),
    /// Minimum and maximum milliseconds.
    Range(u64, u64),
}

impl Latency {
    fn pick(self, rng: &mut fastrand::Rng) -> Duration {
        match self {
            Self::Fixed(ms) => Duration::from_millis(ms),
            Self::Range(least, most) => {
                let (least, most) = (least.saturating_mul(1_000), most.saturating_mul(1_000));
                Duration::from_micros(rng.u64(least..=most.max(least)))
            }
        }
    }
}

/// A model server whose responses come from a program instead of a model. The `model` of its responses identifies it.
///
/// ```
/// use gym_core::{RawObject, World};
/// use gym_server::model::{ScriptedItem, ScriptedModel, ScriptedModelConfig};
///
/// let policy = |_: &RawObject, rng: &mut fastrand::Rng| vec![ScriptedItem::message(rng.u32(0..10).to_string())];
/// let model = ScriptedModel::new(ScriptedModelConfig::default(), &World::real(), policy);
/// ```
#[derive(Clone)]
pub struct ScriptedModel {
    config: ScriptedModelConfig,
    /// The model's name as a JSON string.
    model: String,
    policy: Arc<dyn ScriptedPolicy>,
    world: World,
}

impl std::fmt::Debug for ScriptedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptedModel").field("config", &self.config).finish_non_exhaustive()
    }
}

impl ScriptedModel {
    /// Creates a model that answers with `policy`.
    #[must_use]
    pub fn new(config: ScriptedModelConfig, world: &World, policy: impl ScriptedPolicy) -> Self {
        let model = Value::from(config.model.as_str()).to_string();
        Self { config, model, policy: Arc::new(policy), world: world.clone() }
    }

    /// Creates a model that answers with `policy`, in the default configuration.
    #[must_use]
    pub fn from_policy(policy: impl ScriptedPolicy) -> Self {
        Self::new(ScriptedModelConfig::default(), &World::real(), policy)
    }

    /// Creates a model that answers each request with a random digit.
    #[must_use]
    pub fn with_default_policy(config: ScriptedModelConfig, world: &World) -> Self {
        Self::new(config, world, |_: &RawObject, rng: &mut fastrand::Rng| {
            vec![ScriptedItem::message(rng.u32(0..10).to_string())]
        })
    }

    async fn decide(&self, cx: &CallContext, request: &RawObject) -> Result<ScriptedAnswer> {
        let mut rng = fastrand::Rng::with_seed(digest(request.text(), self.config.seed));
        let wait = self.config.latency_ms.map_or(Duration::ZERO, |latency| latency.pick(&mut rng));
        // The runtime's shortest sleep is one millisecond.
        if !wait.is_zero() {
            cx.bound(Execution::Finished, async {
                tokio::time::sleep(wait).await;
                Ok(())
            })
            .await?;
        }
        // Computed after the wait, which would otherwise hold the items.
        let items = self.policy.answer(request, &mut rng);
        // About four bytes per token, as in English text.
        let input_tokens = request.text().len() / 4 + 1;
        let written = items.iter().map(ScriptedItem::length).sum::<usize>();
        let output_tokens = self.config.generation_tokens.unwrap_or(written / 4 + 1);
        let id = format!("{:032x}", rng.u128(..));
        Ok(ScriptedAnswer { id, items, input_tokens, output_tokens, created: self.world.now().as_secs(), rng })
    }

    fn token_fields(&self, answer: &mut ScriptedAnswer, text: &mut String) {
        if !self.config.token_fields {
            return;
        }
        let rng = &mut answer.rng;
        numbers(text, "prompt_token_ids", answer.input_tokens, |text| write!(text, "{}", rng.u32(0..150_000)));
        numbers(text, "generation_token_ids", answer.output_tokens, |text| write!(text, "{}", rng.u32(0..150_000)));
        numbers(text, "generation_log_probs", answer.output_tokens, |text| write!(text, "-{:.6}", rng.f64() * 4.0));
    }
}

struct ScriptedAnswer {
    /// An id of 32 hexadecimal digits.
    id: String,
    items: Vec<ScriptedItem>,
    input_tokens: usize,
    output_tokens: usize,
    created: u64,
    rng: fastrand::Rng,
}

impl ModelServer for ScriptedModel {
    async fn responses(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let mut answer = self.decide(cx, body).await?;
        let (id, created, model) = (std::mem::take(&mut answer.id), answer.created, &self.model);
        let mut text = String::with_capacity(1_024);
        put(
            &mut text,
            format_args!(r#"{{"id":"resp_{id}","created_at":{created},"model":{model},"object":"response","output":["#),
        );
        for (index, item) in answer.items.iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            match item {
                ScriptedItem::Reasoning(thought) => {
                    put(&mut text, format_args!(r#"{{"id":"rs_{id}_{index}","summary":[{{"text":"#));
                    push_json_string(&mut text, thought);
                    text.push_str(r#","type":"summary_text"}],"type":"reasoning","status":"completed""#);
                }
                ScriptedItem::Message(said) => {
                    put(&mut text, format_args!(r#"{{"id":"msg_{id}_{index}","content":[{{"annotations":[],"text":"#));
                    push_json_string(&mut text, said);
                    text.push_str(
                        r#","type":"output_text"}],"role":"assistant","status":"completed","type":"message""#,
                    );
                }
                ScriptedItem::ToolCall { name, arguments } => {
                    text.push_str(r#"{"arguments":"#);
                    push_json_string(&mut text, arguments);
                    put(&mut text, format_args!(r#","call_id":"call_{id}_{index}","name":"#));
                    push_json_string(&mut text, name);
                    put(
                        &mut text,
                        format_args!(r#","type":"function_call","id":"fc_{id}_{index}","status":"completed""#),
                    );
                }
            }
            text.push('}');
        }
        if !answer.items.is_empty() {
            text.pop();
            self.token_fields(&mut answer, &mut text);
            text.push('}');
        }
        let (input, output) = (answer.input_tokens, answer.output_tokens);
        put(
            &mut text,
            format_args!(
                r#"],"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"status":"completed","usage":{{"input_tokens":{input},"input_tokens_details":{{"cached_tokens":0}},"output_tokens":{output},"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":{}}}}}"#,
                input + output
            ),
        );
        Ok(ModelResponse(RawObject::parse(text)?))
    }

    async fn chat_completions(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<RawObject> {
        let mut answer = self.decide(cx, body).await?;
        let (id, created, model) = (std::mem::take(&mut answer.id), answer.created, &self.model);
        let (mut content, mut thought, mut calls) = (None::<String>, None::<String>, String::new());
        for (index, item) in answer.items.iter().enumerate() {
            match item {
                ScriptedItem::Reasoning(text) => thought.get_or_insert_default().push_str(text),
                ScriptedItem::Message(text) => content.get_or_insert_default().push_str(text),
                ScriptedItem::ToolCall { name, arguments } => {
                    calls.push_str(if calls.is_empty() { "" } else { "," });
                    put(
                        &mut calls,
                        format_args!(r#"{{"id":"call_{id}_{index}","type":"function","function":{{"name":"#),
                    );
                    push_json_string(&mut calls, name);
                    calls.push_str(r#","arguments":"#);
                    push_json_string(&mut calls, arguments);
                    calls.push_str("}}");
                }
            }
        }
        let mut text = String::with_capacity(1_024);
        put(
            &mut text,
            format_args!(
                r#"{{"id":"chatcmpl-{id}","object":"chat.completion","created":{created},"model":{model},"choices":[{{"index":0,"message":{{"role":"assistant","content":"#
            ),
        );
        match &content {
            Some(content) => push_json_string(&mut text, content),
            None => text.push_str("null"),
        }
        if let Some(thought) = &thought {
            text.push_str(r#","reasoning_content":"#);
            push_json_string(&mut text, thought);
        }
        let finish_reason = if calls.is_empty() { "stop" } else { "tool_calls" };
        if !calls.is_empty() {
            put(&mut text, format_args!(r#","tool_calls":[{calls}]"#));
        }
        self.token_fields(&mut answer, &mut text);
        let (input, output) = (answer.input_tokens, answer.output_tokens);
        put(
            &mut text,
            format_args!(
                r#"}},"finish_reason":"{finish_reason}"}}],"usage":{{"prompt_tokens":{input},"completion_tokens":{output},"total_tokens":{}}}}}"#,
                input + output
            ),
        );
        Ok(RawObject::parse(text)?)
    }
}

fn put(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a string cannot fail");
}

fn numbers(text: &mut String, key: &str, count: usize, mut one: impl FnMut(&mut String) -> std::fmt::Result) {
    put(text, format_args!(r#","{key}":["#));
    for index in 0..count {
        if index > 0 {
            text.push(',');
        }
        one(text).expect("writing to a string cannot fail");
    }
    text.push(']');
}

/// Returns a hash of a text and a seed. It does not resist attacks, but is the same on every machine and in every release.
fn digest(text: &[u8], seed: u64) -> u64 {
    let mix = |state: u64, word: u64| (state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let (words, rest) = text.as_chunks::<8>();
    let state = words.iter().fold(mix(seed, text.len() as u64), |state, word| mix(state, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let state = mix(state, u64::from_le_bytes(last));
    state ^ (state >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::world;

    fn model(config: ScriptedModelConfig) -> ScriptedModel {
        ScriptedModel::new(config, &world(), |request: &RawObject, rng: &mut fastrand::Rng| {
            assert!(request.contains("input") || request.contains("messages"));
            vec![
                ScriptedItem::Reasoning("let me \"see\"".into()),
                ScriptedItem::message(format!("n = {}", rng.u32(..))),
                ScriptedItem::tool_call("add", r#"{"a": 1}"#),
            ]
        })
    }

    async fn ask(model: &ScriptedModel, input: &str) -> String {
        let body = RawObject::parse(format!(r#"{{"input":"{input}"}}"#)).unwrap();
        let answer = model.responses(&CallContext::default(), &SessionId::new("s"), &body).await.unwrap();
        String::from_utf8(answer.0.into_text().to_vec()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn equal_requests_get_equal_answers_and_others_get_others() {
        let one = model(ScriptedModelConfig::default());
        let first = ask(&one, "a").await;
        ask(&one, "b").await;
        assert_eq!(first, ask(&one, "a").await);
        assert_eq!(first, ask(&model(ScriptedModelConfig::default()), "a").await);
        assert_ne!(first, ask(&one, "b").await);
        assert_ne!(first, ask(&model(ScriptedModelConfig { seed: 1, ..Default::default() }), "a").await);
        assert!(first.contains(r#""model":"scripted_model""#));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_takes_as_long_as_configured() {
        let config: ScriptedModelConfig = serde_json::from_str(r#"{"latency_ms":[100,200],"host":"x"}"#).unwrap();
        let began = tokio::time::Instant::now();
        ask(&model(config), "a").await;
        let took = began.elapsed().as_millis();
        assert!((100..=202).contains(&took), "{took}");
    }

    #[tokio::test(start_paused = true)]
    async fn both_dialects_are_whole_and_carry_token_fields_when_asked() {
        let config =
            ScriptedModelConfig { token_fields: true, generation_tokens: Some(3), ..ScriptedModelConfig::default() };
        let model = model(config);
        let answer: Value = serde_json::from_str(&ask(&model, "a").await).unwrap();
        assert_eq!(answer["output"].as_array().unwrap().len(), 3);
        assert_eq!(answer["output"][0]["summary"][0]["text"], "let me \"see\"");
        assert_eq!(answer["output"][2]["generation_log_probs"].as_array().unwrap().len(), 3);
        assert_eq!(answer["usage"]["output_tokens"], 3);
        let body = RawObject::parse(r#"{"messages":[]}"#).unwrap();
        let chat = model.chat_completions(&CallContext::default(), &SessionId::new("s"), &body).await.unwrap();
        let chat: Value = serde_json::from_slice(chat.text()).unwrap();
        let message = &chat["choices"][0]["message"];
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], r#"{"a": 1}"#);
        assert_eq!(message["generation_token_ids"].as_array().unwrap().len(), 3);
        assert_eq!(chat["choices"][0]["finish_reason"], "tool_calls");
    }
}
