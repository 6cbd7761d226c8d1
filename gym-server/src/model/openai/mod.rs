//! The `openai_model` server: forwards requests to an OpenAI-compatible endpoint of the same dialect.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use gym_core::server::{EndpointReport, ModelEndpoints};
use gym_core::{CallContext, Code, Error, Execution, ModelResponse, ModelServer, RawObject, Result, SessionId, World};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::model::extra;
use crate::model::limits::TokenLimits;
use crate::model::openai::pace::{Pace, PacedCall};
use crate::model::overflow;
use crate::model::secret::Secret;
use crate::model::upstream::retry::{self, EndpointRetries, RetryKeys};
use crate::model::upstream::{EndpointKeys, EndpointResponse, Upstream, UpstreamOptions};
use crate::model::vllm::{empty, overflowed, trial};

mod pace;

const RESPONSES_ROUTE: &str = "/responses";

/// The keys of an `openai_model` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct OpenAiModelConfig {
    /// The URL of the endpoint, with its version: `http://127.0.0.1:8000/v1`. Required.
    pub openai_base_url: String,
    /// The API key. By default the environment variable `OPENAI_API_KEY`, then `policy_api_key`.
    #[serde(default)]
    pub openai_api_key: Option<Secret>,
    /// The model of every request, regardless of the request's own. Required.
    pub openai_model: String,
    /// Keys that are added to each request that lacks them. Empty by default.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
    /// Headers of each request. Empty by default.
    #[serde(default)]
    #[cfg_attr(feature = "schemars", schemars(extend("default" = {})))]
    pub openai_default_headers: BTreeMap<String, Secret>,
    /// Maximum concurrent requests at the endpoint; further requests wait. Unlimited by default: a hint then says when many requests wait at the
    /// endpoint.
    #[serde(default)]
    pub max_concurrent_requests: Option<usize>,
    /// Removes `reasoning` items from the input, for endpoints that reject their own. Off by default.
    #[serde(default)]
    pub drop_input_reasoning_items: bool,
    /// Maximum attempts of a request that the endpoint answers with 404, 408, 409, 425, 429, 500 or another 5xx (but 501, 505, 506, 510 and
    /// 511). By default 3, and for 429, 502, 503, 521 to 523 and 525 to 530 as many as `retry_budget_seconds` allows: the endpoint may serve soon.
    #[serde(default)]
    pub max_http_attempts: Option<u32>,
    /// Maximum seconds from the first failure of a call to its last attempt; 0 for no repetition. 300 by default.
    #[serde(default = "retry::budget_seconds")]
    pub retry_budget_seconds: f64,
    /// Milliseconds before the second attempt. The wait doubles for each further attempt, and is randomized. 500 by default.
    #[serde(default = "retry::backoff_ms")]
    pub retry_backoff_ms: u64,
    /// Maximum milliseconds between two attempts, unless the endpoint's `Retry-After` asks for more. 8,000 by default.
    #[serde(default = "retry::backoff_max_ms")]
    pub retry_backoff_max_ms: u64,
    /// Seconds after which a call in flight makes this server ask the engine what it does; the progress of a collection then names the endpoint. 60
    /// by default.
    #[serde(default = "retry::probe_after_seconds")]
    pub probe_after_seconds: f64,
}

impl OpenAiModelConfig {
    /// Creates the default configuration for a model at an endpoint.
    #[must_use]
    pub fn new(base_url: impl Into<String>, model: impl Into<String>) -> Self {
        Self {
            openai_base_url: base_url.into(),
            openai_api_key: None,
            openai_model: model.into(),
            extra_body: Map::new(),
            openai_default_headers: BTreeMap::new(),
            max_concurrent_requests: None,
            drop_input_reasoning_items: false,
            max_http_attempts: None,
            retry_budget_seconds: retry::budget_seconds(),
            retry_backoff_ms: retry::backoff_ms(),
            retry_backoff_max_ms: retry::backoff_max_ms(),
            probe_after_seconds: retry::probe_after_seconds(),
        }
    }
}

/// Forwards requests to an OpenAI-compatible endpoint. Requests and responses pass as text: only the model's name and the keys that
/// the configuration adds are changed.
#[derive(Clone, Debug)]
pub struct OpenAiModel {
    upstream: Upstream,
    world: World,
    name: Arc<str>,
    /// The model's name as a JSON string.
    model: String,
    extra_body: Arc<Map<String, Value>>,
    drop_reasoning: bool,
    permits: Option<Arc<Semaphore>>,
    pace: Arc<Pace>,
}

impl OpenAiModel {
    /// Creates a server in front of the configured endpoint.
    ///
    /// # Errors
    /// `InvalidArgument` with the key if the URL or a header is invalid, or if the URL is https and this program has no TLS.
    pub fn new(config: OpenAiModelConfig, world: &World) -> Result<Self> {
        let options = UpstreamOptions {
            keys: EndpointKeys {
                url: "openai_base_url",
                api_key: "openai_api_key",
                model: "openai_model",
                uses_responses: true,
            },
            key: Secret::or_from_environment(config.openai_api_key),
            headers: config.openai_default_headers,
            model: config.openai_model.clone(),
            retries: EndpointRetries::of(RetryKeys {
                max_http_attempts: config.max_http_attempts,
                retry_budget_seconds: config.retry_budget_seconds,
                retry_backoff_ms: config.retry_backoff_ms,
                retry_backoff_max_ms: config.retry_backoff_max_ms,
            })?,
            probe_after: retry::probe_after(config.probe_after_seconds)?,
        };
        let permits = match config.max_concurrent_requests {
            Some(0) => {
                return Err(Error::invalid(
                    "`max_concurrent_requests` is 0: no request could be made\n  fix: write 1 or more, or remove the key; without it, there is no limit",
                ));
            }
            permits => permits.map(|permits| Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)))),
        };
        Ok(Self {
            upstream: Upstream::new(&config.openai_base_url, &options, world)?,
            world: world.clone(),
            name: config.openai_model.as_str().into(),
            model: Value::from(config.openai_model).to_string(),
            extra_body: Arc::new(config.extra_body),
            drop_reasoning: config.drop_input_reasoning_items,
            permits,
            pace: Arc::default(),
        })
    }

    /// Sends a request. Returns the limits of its response, the response, and the call to measure if nothing limits their number.
    async fn ask(
        &self,
        cx: &CallContext,
        path: &str,
        request: &RawObject,
    ) -> Result<(TokenLimits, EndpointResponse, Option<PacedCall<'_>>)> {
        let (limits, body) = self.request(request)?;
        let _permit = match &self.permits {
            None => None,
            Some(permits) => Some(
                cx.bound(Execution::NotStarted, async {
                    permits.acquire().await.map_err(|_| Error::not_started(Code::Unavailable, "the server is closed"))
                })
                .await?,
            ),
        };
        let call = self.permits.is_none().then(|| self.pace.begin());
        let answer = self.upstream.post(cx, path, body).await?;
        Ok((limits, answer, call))
    }

    fn measured(&self, call: Option<PacedCall<'_>>, response: &RawObject) {
        if let Some(call) = call {
            call.answered(|| self.upstream.report().url, response);
        }
    }

    /// Returns the request for the endpoint, and the limits of its response.
    fn request(&self, request: &RawObject) -> Result<(TokenLimits, Bytes)> {
        let mut added = extra::added(Some(&self.extra_body), request)?;
        added.remove("model");
        let limits = TokenLimits::with_added(request, &added, self.upstream.context_tokens());
        Ok((limits, self.body(request, added)?))
    }

    fn body(&self, request: &RawObject, mut added: Map<String, Value>) -> Result<Bytes> {
        // Some gateways stream unless told.
        if !request.contains("stream") {
            added.entry("stream").or_insert(Value::Bool(false));
        }
        let mut edit = request.edit().set("model", self.model.clone());
        for (key, value) in added {
            edit = edit.set(key, value.to_string());
        }
        if let Some(input) = replayable(request, self.drop_reasoning)? {
            edit = edit.set("input", input);
        }
        Ok(edit.to_rope().to_bytes())
    }
}

impl ModelServer for OpenAiModel {
    async fn responses(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let (limits, answer, call) = self.ask(cx, RESPONSES_ROUTE, body).await?;
        if let Some(message) = overflow::of(&answer, limits.output()) {
            return overflowed(body, &self.name, message, &self.world);
        }
        let response = self.upstream.object(RESPONSES_ROUTE, answer, "output")?;
        self.measured(call, &response);
        Ok(ModelResponse(limits.cut(&response)?.unwrap_or(response)))
    }

    async fn chat_completions(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<RawObject> {
        const ROUTE: &str = "/chat/completions";
        let (limits, answer, call) = self.ask(cx, ROUTE, body).await?;
        match overflow::of(&answer, limits.output()) {
            Some(_) => empty(&self.name, "length", &self.world),
            None => {
                let chat = self.upstream.object(ROUTE, answer, "choices")?;
                self.measured(call, &chat);
                Ok(chat)
            }
        }
    }

    fn endpoints(&self) -> Option<&dyn ModelEndpoints> {
        Some(self)
    }
}

impl ModelEndpoints for OpenAiModel {
    fn reports(&self) -> Vec<EndpointReport> {
        vec![self.upstream.report()]
    }

    fn probe<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Vec<EndpointReport>> {
        Box::pin(async { vec![self.upstream.probe(cx).await] })
    }

    fn trial<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Vec<EndpointReport>> {
        Box::pin(async {
            let mut report = self.upstream.probe(cx).await;
            let body = |with_tool| self.request(&trial::request(with_tool)).map(|(_, body)| body);
            if trial::is_due(&self.upstream, &report, false)
                && let (Ok(plain), Ok(tool)) = (body(false), body(true))
            {
                trial::run(cx, &self.upstream, RESPONSES_ROUTE, [plain, tool], |_| Ok(()), &mut report).await;
            }
            vec![report]
        })
    }
}

/// Returns the input list in a form that OpenAI's endpoint accepts, or `None` if it needs no change. The endpoint rejects the
/// `status` of its own `reasoning` items in a request, and some endpoints reject the whole item.
fn replayable(request: &RawObject, drop_reasoning: bool) -> Result<Option<String>> {
    let Some(input) = request.get("input").filter(|input| input.first() == Some(&b'[')) else { return Ok(None) };
    if memchr::memmem::find(&input, b"\"reasoning\"").is_none() {
        return Ok(None);
    }
    let wrong = |error: serde_json::Error| Error::invalid("`input` cannot be read").caused_by(error);
    let items: Vec<&RawValue> = serde_json::from_slice(&input).map_err(wrong)?;
    let mut kept: Vec<Cow<'_, str>> = Vec::with_capacity(items.len());
    let mut changed = false;
    for item in items {
        let text = item.get();
        let reasoning = if memchr::memmem::find(text.as_bytes(), b"\"reasoning\"").is_some() {
            RawObject::parse(text.to_owned())
                .ok()
                .filter(|item| item.get("type").is_some_and(|kind| kind == "\"reasoning\""))
        } else {
            None
        };
        match reasoning {
            Some(_) if drop_reasoning => changed = true,
            Some(item) if item.contains("status") => {
                changed = true;
                let edited = item.edit().remove("status").to_rope().to_bytes();
                kept.push(String::from_utf8_lossy(&edited).into_owned().into());
            }
            _ => kept.push(text.into()),
        }
    }
    Ok(changed.then(|| format!("[{}]", kept.join(","))))
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
