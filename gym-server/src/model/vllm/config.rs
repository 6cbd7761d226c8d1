//! The configuration block of `vllm_model`.

use std::collections::BTreeMap;

use gym_core::registry::Balance;
use gym_core::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::secret::Secret;
use crate::model::upstream::retry;

/// The keys that carry reasoning on assistant messages sent to the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReasoningField {
    /// `reasoning_content` for older engines and `reasoning` for newer ones.
    #[default]
    Both,
    /// `reasoning`.
    Reasoning,
    /// `reasoning_content`.
    ReasoningContent,
}

/// The keys of a `vllm_model` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct VllmModelConfig {
    /// The URLs of the engines, with their version; one or several. Required.
    pub base_url: OneOrMany,
    /// The choice among several engines: `affinity` by default. The requests of a session, and the attempts at one prompt, use the same
    /// engine, whose cache has the prompt, unless it is overloaded or rejects them. The others are `least_pending` (or
    /// `least_outstanding`), `round_robin`, `power_of_two_choices` and `{weighted: [3, 1]}`, in the order of `base_url`.
    #[serde(default)]
    pub load_balancing_strategy: Option<Balance>,
    /// The API key. By default the environment variable `OPENAI_API_KEY`, then `policy_api_key`.
    #[serde(default)]
    pub api_key: Option<Secret>,
    /// The model of every request, regardless of the request's own. Required.
    pub model: String,
    /// Requests token ids and log-probabilities, and adds them to the last item. Off by default.
    #[serde(default)]
    pub return_token_id_information: bool,
    /// Requests the token ids of prompt and generation in the engine's response, as vLLM has them since 0.10.2. From an engine that does not
    /// return those of the prompt, they are requested with `/tokenize`. On by default; read only with `return_token_id_information`.
    #[serde(default = "yes")]
    pub request_prompt_and_generation_token_ids: bool,
    /// Sends `strict` of tools, which vLLM enforces since 0.32 and some chat templates print into the prompt. Off by default, as in NeMo Gym.
    #[serde(default)]
    pub keep_strict_tools: bool,
    /// Returns a context overflow as an error, instead of a truncated response. Off by default.
    #[serde(default)]
    pub propagate_context_overflow_errors: bool,
    /// Set if the engine separates reasoning from the text. On by default.
    #[serde(default = "yes")]
    pub uses_reasoning_parser: bool,
    /// Sends earlier reasoning to the engine again. On by default.
    #[serde(default = "yes")]
    pub uses_interleaved_reasoning: bool,
    /// The keys that carry earlier reasoning in requests. By default the environment variable `NEMO_GYM_REASONING_FIELD`, then both keys.
    #[serde(default)]
    pub reasoning_field: Option<ReasoningField>,
    /// Keeps think tags in the text of earlier responses. Off by default.
    #[serde(default)]
    pub preserve_reasoning_in_assistant_content: bool,
    /// Sends developer messages as system messages. Off by default.
    #[serde(default)]
    pub replace_developer_role_with_system: bool,
    /// Allows more reasoning after a response with reasoning alone. On by default.
    #[serde(default = "yes")]
    pub sequential_reasoning_allowed: bool,
    /// Sends requests in the Responses dialect, which the engine must support. Off by default.
    #[serde(default)]
    pub is_responses_native: bool,
    /// Arguments of the chat template; those of the request's metadata take precedence. None by default.
    #[serde(default)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Merges the request's own `chat_template_kwargs`, which are dropped otherwise. Off by default.
    #[serde(default)]
    pub forward_request_chat_template_kwargs: bool,
    /// Lets the engine continue the last message if it is one of the assistant. Off by default.
    #[serde(default)]
    pub continue_final_assistant_message: bool,
    /// Sampling parameters that replace those of every request. None by default.
    #[serde(default)]
    pub sampling_overrides: Option<Map<String, Value>>,
    /// Keys that are added to each request that lacks them. None by default.
    #[serde(default)]
    pub extra_body: Option<Map<String, Value>>,
    /// Headers of each request. Empty by default.
    #[serde(default)]
    #[cfg_attr(feature = "schemars", schemars(extend("default" = {})))]
    pub default_headers: BTreeMap<String, Secret>,
    /// Sends the session's id to the engine as the conversation's id. Off by default.
    #[serde(default)]
    pub forward_session_id_as_conversation_id: bool,
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

/// One string or a list of strings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum OneOrMany {
    /// One string.
    One(String),
    /// A list of strings.
    Many(Vec<String>),
}

fn yes() -> bool {
    true
}

/// The environment variable in which launchers choose the reasoning field, unless the configuration does.
pub(super) const REASONING_FIELD: &str = "NEMO_GYM_REASONING_FIELD";

impl VllmModelConfig {
    /// Creates the default configuration for a model at one engine.
    #[must_use]
    pub fn new(base_url: impl Into<String>, model: impl Into<String>) -> Self {
        Self {
            base_url: OneOrMany::One(base_url.into()),
            load_balancing_strategy: None,
            api_key: None,
            model: model.into(),
            return_token_id_information: false,
            request_prompt_and_generation_token_ids: true,
            keep_strict_tools: false,
            propagate_context_overflow_errors: false,
            uses_reasoning_parser: true,
            uses_interleaved_reasoning: true,
            reasoning_field: None,
            preserve_reasoning_in_assistant_content: false,
            replace_developer_role_with_system: false,
            sequential_reasoning_allowed: true,
            is_responses_native: false,
            chat_template_kwargs: None,
            forward_request_chat_template_kwargs: false,
            continue_final_assistant_message: false,
            sampling_overrides: None,
            extra_body: None,
            default_headers: BTreeMap::new(),
            forward_session_id_as_conversation_id: false,
            max_http_attempts: None,
            retry_budget_seconds: retry::budget_seconds(),
            retry_backoff_ms: retry::backoff_ms(),
            retry_backoff_max_ms: retry::backoff_max_ms(),
            probe_after_seconds: retry::probe_after_seconds(),
        }
    }

    pub(super) fn base_urls(&self) -> Vec<&str> {
        match &self.base_url {
            OneOrMany::One(url) => vec![url],
            OneOrMany::Many(urls) => urls.iter().map(String::as_str).collect(),
        }
    }

    /// Sets the reasoning field from the environment variable, unless the configuration sets it or the variable is unset or empty.
    pub(super) fn choose_reasoning_field(&mut self, variable: Option<&str>) -> Result<()> {
        let Some(name) = variable.map(str::trim).filter(|name| !name.is_empty() && self.reasoning_field.is_none())
        else {
            return Ok(());
        };
        let field = serde_json::from_value(name.into()).map_err(|_| {
            Error::invalid(format!("{REASONING_FIELD} is {name:?}: write both, reasoning or reasoning_content"))
        })?;
        self.reasoning_field = Some(field);
        Ok(())
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.base_urls().is_empty() {
            return Err(Error::invalid("`base_url` is an empty list: name at least one engine"));
        }
        let native = [
            ("return_token_id_information", self.return_token_id_information),
            ("replace_developer_role_with_system", self.replace_developer_role_with_system),
            ("sequential_reasoning_allowed: false", !self.sequential_reasoning_allowed),
        ];
        match native.iter().find(|(_, set)| *set) {
            Some((key, _)) if self.is_responses_native => {
                Err(Error::invalid(format!("`{key}` does not go with `is_responses_native`: leave out one of them")))
            }
            _ => Ok(()),
        }
    }
}
