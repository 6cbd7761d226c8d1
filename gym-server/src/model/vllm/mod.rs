//! The `vllm_model` server: translates between the Responses dialect and engines with Chat Completions, and adds NeMo Gym's
//! training fields.
//!
//! Some features of NeMo Gym's server are unsupported: the completions API, prefix supply, endpoint files, and audio from files. A
//! configuration or request that uses one of them is rejected.
//!
//! Three more are absent, and no configuration of this server can request them: `/v1/messages`, which no model server of the SDK
//! serves; token capture with its external staging; the transport log of `NEMO_GYM_VLLM_TRANSPORT_LOG`.

mod audio;
mod config;
mod prepare;
mod request;
mod response;
mod think;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Once};
use std::time::Duration;

use bytes::Bytes;
use gym_core::{CallContext, Code, Error, ModelResponse, ModelServer, RawObject, Result, SessionId, World};
use serde_json::{Value, json};

pub use config::{OneOrMany, ReasoningField, VllmModelConfig};

use crate::model::secret::Secret;
use crate::model::upstream::{EndpointResponse, Upstream, UpstreamOptions};
use response::{Completion, TokenFields};

/// Request keys that determine how the engine tokenizes the request.
const TOKENIZE_KEYS: [&str; 5] = ["model", "messages", "tools", "chat_template_kwargs", "mm_processor_kwargs"];

const CHAT_ROUTE: &str = "/chat/completions";

/// Serves vLLM and other engines that support Chat Completions.
#[derive(Clone, Debug)]
pub struct VllmModel {
    config: Arc<VllmModelConfig>,
    engines: Vec<Upstream>,
    world: World,
    /// Limits the warning about dropped template arguments to one.
    template_dropped: Arc<Once>,
}

impl VllmModel {
    /// Creates a server in front of the configured engines.
    ///
    /// # Errors
    /// `InvalidArgument` with the key if a URL or a header is invalid, or if the configuration uses an unsupported feature. Also if
    /// a URL is https and this program has no TLS.
    pub fn new(mut config: VllmModelConfig, world: &World) -> Result<Self> {
        config.check()?;
        config.choose_reasoning_field(std::env::var(config::REASONING_FIELD).ok().as_deref())?;
        let key = Secret::or_from_environment(config.api_key.clone());
        let engines = config
            .base_urls()
            .into_iter()
            .map(|url| {
                let mut options = UpstreamOptions::new("base_url", key.clone(), config.default_headers.clone());
                options.backoff_min = Duration::from_millis(config.retry_backoff_ms);
                Upstream::new(url, &options, world)
            })
            .collect::<Result<_>>()?;
        Ok(Self { config: Arc::new(config), engines, world: world.clone(), template_dropped: Arc::new(Once::new()) })
    }

    /// Returns the engine of a session: always the same one, because the session's prefix is in its cache.
    fn engine(&self, session: &SessionId) -> &Upstream {
        let mut hasher = DefaultHasher::new();
        session.hash(&mut hasher);
        let index = hasher.finish() % self.engines.len() as u64;
        &self.engines[usize::try_from(index).expect("below the number of engines")]
    }

    async fn chat(&self, cx: &CallContext, session: &SessionId, request: &RawObject) -> Result<RawObject> {
        let config = &*self.config;
        if !config.forward_request_chat_template_kwargs && request.contains("chat_template_kwargs") {
            self.template_dropped.call_once(|| {
                tracing::warn!(
                    model = config.model,
                    "chat_template_kwargs of requests are dropped: forward_request_chat_template_kwargs is off"
                );
            });
        }
        let mut body = prepare::prepare(config, request)?;
        if config.forward_session_id_as_conversation_id {
            let conversation = json!({"conversation_id": session.as_str()});
            body = body.edit().set("conversation_params", conversation.to_string()).to_object()?;
        }
        if !config.sequential_reasoning_allowed && prepare::ends_in_empty_assistant(&body)? {
            return response::empty(&config.model, "content_filter", &self.world);
        }
        let engine = self.engine(session);
        let answer = engine.post(cx, CHAT_ROUTE, body.text().clone()).await?;
        if is_overflow(&answer) && !config.propagate_context_overflow_errors {
            return response::empty(&config.model, "length", &self.world);
        }
        let mut completion = Completion::parse(engine.object(CHAT_ROUTE, answer)?)?;
        let continued = body.get("continue_final_message").is_some_and(|value| value == "true");
        completion.fold_reasoning(config.uses_reasoning_parser, continued)?;
        if config.return_token_id_information {
            match completion.tokens()? {
                TokenFields::Inline => completion.put_tokens(None)?,
                TokenFields::Apart { prompt, generation, log_probs } => {
                    let prompt = match prompt {
                        Some(prompt) => prompt,
                        None => self.tokenize(cx, engine, &body).await?,
                    };
                    completion.put_tokens(Some((&prompt, &generation, &log_probs)))?;
                }
            }
        }
        completion.finish()
    }

    /// Requests the token ids of the prompt from `/tokenize`.
    async fn tokenize(&self, cx: &CallContext, engine: &Upstream, body: &RawObject) -> Result<Bytes> {
        let mut fields = request::ObjectText::default();
        for key in TOKENIZE_KEYS {
            if let Some(value) = body.get(key) {
                fields.add(key, &String::from_utf8_lossy(&value));
            }
        }
        let answer = engine.post_outside_v1(cx, "/tokenize", fields.finish().into()).await?;
        let answer = engine.object("/tokenize", answer)?;
        answer.get("tokens").filter(|tokens| tokens.first() == Some(&b'[')).ok_or_else(|| {
            Error::finished(
                Code::DataLoss,
                format!("the engine's answer to /tokenize has no list `tokens`: {answer:?}"),
            )
        })
    }
}

/// Returns `true` if the engine rejected the prompt as too long.
fn is_overflow(answer: &EndpointResponse) -> bool {
    let text = String::from_utf8_lossy(&answer.body);
    answer.status == 400 && (text.contains("context length") || text.contains("max_tokens"))
}

impl ModelServer for VllmModel {
    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let config = &*self.config;
        if config.is_responses_native {
            let mut edit = body.edit().set("model", Value::from(config.model.as_str()).to_string());
            if let Some(template) = config.chat_template_kwargs.as_ref().filter(|template| !template.is_empty()) {
                edit = edit.set("chat_template_kwargs", Value::from(template.clone()).to_string());
            }
            for (key, value) in config.extra_body.iter().flatten().filter(|(key, _)| !body.contains(key)) {
                edit = edit.set(key.clone(), value.to_string());
            }
            for (key, value) in config.sampling_overrides.iter().flatten() {
                edit = edit.set(key.clone(), value.to_string());
            }
            let engine = self.engine(session);
            let answer = engine.post(cx, "/responses", edit.to_rope().to_bytes()).await?;
            return engine.object("/responses", answer).map(ModelResponse);
        }
        let tokens = config.return_token_id_information;
        let chat = self.chat(cx, session, &request::to_chat(body, tokens)?).await?;
        let uses_parser = config.uses_reasoning_parser;
        response::to_response(body, chat, &config.model, uses_parser, tokens, &self.world).map(ModelResponse)
    }

    async fn chat_completions(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<RawObject> {
        self.chat(cx, session, body).await
    }
}

#[cfg(test)]
mod tests;
