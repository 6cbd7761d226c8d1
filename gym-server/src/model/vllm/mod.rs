//! The `vllm_model` server: translates between the Responses dialect and engines with Chat Completions, and adds NeMo Gym's
//! training fields.
//!
//! Some features of NeMo Gym's server are unsupported: the completions API, prefix supply, endpoint files, and audio from files. A
//! configuration or request that uses one of them is rejected.
//!
//! Beyond NeMo Gym's fields, a response reports the engine's finish reason and weight version, and the settings that shaped the prompt:
//! [`TURNS_KEY`] and [`PROMPT_KEY`].
//!
//! Three more are absent, and no configuration of this server can request them: `/v1/messages`, which no model server of the SDK
//! serves; token capture with its external staging; the transport log of `NEMO_GYM_VLLM_TRANSPORT_LOG`.

mod audio;
mod config;
mod engines;
mod prepare;
mod report;
mod request;
mod response;
mod think;
pub(super) mod trial;

use std::sync::{Arc, Once};

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use gym_core::registry::Balance;
use gym_core::rollout::{FailureClass, PROMPT_KEY, TURNS_KEY};
use gym_core::server::{EndpointReport, EndpointState, ModelEndpoints};
use gym_core::{CallContext, Error, ModelResponse, ModelServer, RawObject, Result, SessionId, World};
use serde_json::{Value, json};

pub use config::{OneOrMany, ReasoningField, VllmModelConfig};

use crate::metrics::Metrics;
use crate::model::extra;
use crate::model::limits::TokenLimits;
use crate::model::overflow;
use crate::model::secret::Secret;
use crate::model::upstream::retry::{self, EndpointRetries, RetryKeys};
use crate::model::upstream::{EndpointKeys, EndpointResponse, Upstream, UpstreamOptions};
use engines::Engines;
pub(super) use response::empty;
use response::{Answer, Completion, ResponseForm, TokenFields};

/// Request keys that determine how the engine tokenizes the request.
const TOKENIZE_KEYS: [&str; 9] = [
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
];

const CHAT_ROUTE: &str = "/chat/completions";
const NATIVE_ROUTE: &str = "/responses";

/// Serves vLLM and other engines that support Chat Completions.
#[derive(Clone, Debug)]
pub struct VllmModel {
    config: Arc<VllmModelConfig>,
    engines: Arc<Engines>,
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
        let options = UpstreamOptions {
            keys: EndpointKeys {
                url: "base_url",
                api_key: "api_key",
                model: "model",
                uses_responses: config.is_responses_native,
            },
            key: Secret::or_from_environment(config.api_key.clone()),
            headers: config.default_headers.clone(),
            model: config.model.clone(),
            retries: EndpointRetries::of(RetryKeys {
                max_http_attempts: config.max_http_attempts,
                retry_budget_seconds: config.retry_budget_seconds,
                retry_backoff_ms: config.retry_backoff_ms,
                retry_backoff_max_ms: config.retry_backoff_max_ms,
            })?,
            probe_after: retry::probe_after(config.probe_after_seconds)?,
        };
        let upstreams = config.base_urls().into_iter().map(|url| Upstream::new(url, &options, world));
        let balance = config.load_balancing_strategy.clone().unwrap_or(Balance::Affinity);
        let engines = Arc::new(Engines::new(upstreams.collect::<Result<_>>()?, balance)?);
        Ok(Self { config: Arc::new(config), engines, world: world.clone(), template_dropped: Arc::new(Once::new()) })
    }

    /// Adds the choice among several engines to the metrics, under the name of this server.
    #[must_use]
    pub fn with_metrics(self, server: &str, metrics: &Metrics) -> Self {
        let (server, engines) = (server.to_owned(), Arc::downgrade(&self.engines));
        metrics.watch_affinity("endpoints", move || {
            let counts = engines.upgrade().and_then(|engines| engines.affinity());
            counts.map(|counts| (server.clone(), counts)).into_iter().collect()
        });
        self
    }

    /// Asks an engine for a chat completion.
    async fn chat(&self, cx: &CallContext, session: &SessionId, request: &RawObject) -> Result<Answer> {
        let config = &*self.config;
        if !config.forward_request_chat_template_kwargs && request.contains("chat_template_kwargs") {
            self.template_dropped.call_once(|| {
                tracing::warn!(
                    model = config.model,
                    "chat_template_kwargs of requests are dropped: forward_request_chat_template_kwargs is off"
                );
            });
        }
        let mut body = self.prepared(request)?;
        if config.forward_session_id_as_conversation_id {
            let conversation = json!({"conversation_id": session.as_str()});
            body = body.edit().set("conversation_params", conversation.to_string()).to_object()?;
        }
        let prompt = report::prompt(request, &body);
        // A tool call of a vLLM may hide that the response was aborted. With ids, its last token shows that it was not: without them, the engine's
        // metrics must be requested, which cost it more.
        let shows_end = !config.return_token_id_information
            && body.contains("tools")
            && !body.contains("return_token_ids")
            && self.engines.upstreams().all(Upstream::is_vllm);
        if shows_end {
            body = body.edit().set("return_token_ids", "true").to_object()?;
        }
        if !config.sequential_reasoning_allowed && prepare::ends_in_empty_assistant(&body)? {
            let chat = response::empty(&config.model, "content_filter", &self.world)?;
            return Ok(Answer { chat, overflow: None, cut: None, prompt });
        }
        let (engine, answer) = self.engines.post(cx, session, &body, CHAT_ROUTE, body.text().clone()).await?;
        let limits = TokenLimits::of(&body, engine.context_tokens());
        if let Some(message) = overflow::of(&answer, limits.output()) {
            if config.propagate_context_overflow_errors {
                let error = engine.object(CHAT_ROUTE, answer, "choices").err();
                let error = error.unwrap_or_else(|| Error::internal("an overflow is an error"));
                return Err(error.with_class(FailureClass::Truncated));
            }
            let chat = response::empty(&config.model, "length", &self.world)?;
            return Ok(Answer { chat, overflow: Some(message), cut: None, prompt });
        }
        let mut completion = Completion::parse(engine.object(CHAT_ROUTE, answer, "choices")?)?;
        if shows_end {
            completion.remove_ids()?;
        }
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
                    completion.check_prompt(&prompt)?;
                    completion.put_tokens(Some((&prompt, &generation, &log_probs)))?;
                }
            }
        }
        let cut = completion.reached(limits);
        Ok(Answer { chat: completion.finish()?, overflow: None, cut, prompt })
    }

    /// Returns a chat completion request for an engine.
    fn prepared(&self, request: &RawObject) -> Result<RawObject> {
        let body = prepare::prepare(&self.config, request)?;
        // Some gateways stream unless told.
        let streams = body.contains("stream");
        if streams { Ok(body) } else { Ok(body.edit().set("stream", "false").to_object()?) }
    }

    /// Returns a request for an engine in the Responses dialect.
    fn native(&self, body: &RawObject) -> Result<RawObject> {
        let config = &*self.config;
        let mut edit = body.edit().set("model", Value::from(config.model.as_str()).to_string());
        if let Some(template) = config.chat_template_kwargs.as_ref().filter(|template| !template.is_empty()) {
            edit = edit.set("chat_template_kwargs", Value::from(template.clone()).to_string());
        }
        for (key, value) in extra::added(config.extra_body.as_ref(), body)? {
            edit = edit.set(key, value.to_string());
        }
        for (key, value) in config.sampling_overrides.iter().flatten() {
            edit = edit.set(key.clone(), value.to_string());
        }
        if !body.contains("stream") {
            edit = edit.set("stream", "false");
        }
        Ok(edit.to_object()?)
    }

    /// Calls an engine now: its list of models, and then a trial.
    async fn try_engine(&self, cx: &CallContext, engine: &Upstream) -> EndpointReport {
        let mut report = engine.probe(cx).await;
        let config = &*self.config;
        let ids = config.return_token_id_information;
        if !trial::is_due(engine, &report, ids) {
            return report;
        }
        let body = |with_tool| {
            let params = trial::request(with_tool);
            let request = if config.is_responses_native {
                self.native(&params)
            } else {
                request::to_chat(&params, ids).and_then(|request| self.prepared(&request))
            };
            request.map(|request| request.text().clone())
        };
        let check = |answer: &EndpointResponse| if ids { check_ids(answer) } else { Ok(()) };
        let route = if config.is_responses_native { NATIVE_ROUTE } else { CHAT_ROUTE };
        if let (Ok(plain), Ok(tool)) = (body(false), body(true)) {
            trial::run(cx, engine, route, [plain, tool], check, &mut report).await;
        }
        report
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
        let answer = engine.object("/tokenize", answer, "tokens")?;
        Ok(answer.get("tokens").unwrap_or_default())
    }
}

/// Checks that an engine gives token ids and log probabilities.
fn check_ids(answer: &EndpointResponse) -> Result<(), trial::Finding> {
    let whole = RawObject::parse(answer.body.clone()).map_err(Error::from);
    match whole.and_then(Completion::parse).and_then(|completion| completion.tokens().map(|_| ())) {
        Ok(()) => Ok(()),
        Err(error) => Err(trial::Finding {
            state: EndpointState::Misconfigured,
            reason: error.message().to_owned(),
            fix: "use an engine with token ids, such as vLLM, or set `return_token_id_information: false`".to_owned(),
        }),
    }
}

/// Returns the response to a request that does not fit into the model's context: without content, and incomplete with the engine's message.
pub(super) fn overflowed(params: &RawObject, model: &str, message: String, world: &World) -> Result<ModelResponse> {
    let chat = response::empty(model, "length", world)?;
    let answer = Answer { chat, overflow: Some(message), cut: None, prompt: None };
    let form = ResponseForm { model, uses_parser: false, tokens: false };
    response::to_response(params, answer, form, world).map(ModelResponse)
}

impl ModelEndpoints for VllmModel {
    fn reports(&self) -> Vec<EndpointReport> {
        self.engines.upstreams().map(Upstream::report).collect()
    }

    fn probe<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Vec<EndpointReport>> {
        Box::pin(join_all(self.engines.upstreams().map(|engine| engine.probe(cx))))
    }

    fn trial<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Vec<EndpointReport>> {
        Box::pin(join_all(self.engines.upstreams().map(|engine| self.try_engine(cx, engine))))
    }
}

impl ModelServer for VllmModel {
    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let config = &*self.config;
        if config.is_responses_native {
            let native = self.native(body)?;
            let prompt = report::prompt(body, &native);
            let (engine, answer) = self.engines.post(cx, session, body, NATIVE_ROUTE, native.text().clone()).await?;
            let limits = TokenLimits::of(&native, engine.context_tokens());
            if let Some(message) =
                overflow::of(&answer, limits.output()).filter(|_| !config.propagate_context_overflow_errors)
            {
                return overflowed(body, &config.model, message, &self.world);
            }
            let response = engine.object(NATIVE_ROUTE, answer, "output")?;
            let response = limits.cut(&response)?.unwrap_or(response);
            let turn = report::turn(&response, None);
            let reports = [(TURNS_KEY, turn), (PROMPT_KEY, prompt)];
            if reports.iter().all(|(_, report)| report.is_none()) {
                return Ok(ModelResponse(response));
            }
            let reports = reports.into_iter().filter_map(|(key, report)| Some((key, report?)));
            let edit = reports.fold(response.edit(), |edit, (key, report)| edit.set(key, report));
            return Ok(ModelResponse(edit.to_object()?));
        }
        let tokens = config.return_token_id_information;
        let answer = self.chat(cx, session, &request::to_chat(body, tokens)?).await?;
        let form = ResponseForm { model: &config.model, uses_parser: config.uses_reasoning_parser, tokens };
        response::to_response(body, answer, form, &self.world).map(ModelResponse)
    }

    async fn chat_completions(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<RawObject> {
        self.chat(cx, session, body).await.map(|answer| answer.chat)
    }

    fn endpoints(&self) -> Option<&dyn ModelEndpoints> {
        Some(self)
    }
}

#[cfg(test)]
mod tests;
