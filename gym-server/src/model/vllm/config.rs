//! What `vllm_model` reads of its block in the configuration.

use std::collections::BTreeMap;

use gym_core::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::secret::Secret;

/// Which keys carry reasoning on assistant messages that are sent to the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
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

/// The keys of a `vllm_model` block; other keys of the block are not this server's.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct VllmModelConfig {
    /// Where the engines are, with their version; one URL or several. A session stays with one of them.
    pub base_url: OneOrMany,
    /// The key; without one, `OPENAI_API_KEY` or `policy_api_key` of the environment.
    #[serde(default)]
    pub api_key: Option<Secret>,
    /// The model that is asked for, whatever the request says.
    pub model: String,
    /// Asks for token ids and log-probabilities and puts them on the last item.
    #[serde(default)]
    pub return_token_id_information: bool,
    /// Asks the engine to return the token ids of prompt and generation in its answer.
    #[serde(default)]
    pub request_prompt_and_generation_token_ids: bool,
    /// Passes a context overflow on as an error, instead of an answer that was cut.
    #[serde(default)]
    pub propagate_context_overflow_errors: bool,
    /// Whether the engine takes reasoning out of the text.
    #[serde(default = "yes")]
    pub uses_reasoning_parser: bool,
    /// Whether earlier reasoning is shown to the engine again.
    #[serde(default = "yes")]
    pub uses_interleaved_reasoning: bool,
    /// Under which keys it is; without them, `NEMO_GYM_REASONING_FIELD` of the environment, then both.
    #[serde(default)]
    pub reasoning_field: Option<ReasoningField>,
    /// Leaves think tags in the text of earlier answers.
    #[serde(default)]
    pub preserve_reasoning_in_assistant_content: bool,
    /// Sends messages of the developer as messages of the system.
    #[serde(default)]
    pub replace_developer_role_with_system: bool,
    /// Whether an answer of reasoning alone may be followed by more reasoning.
    #[serde(default = "yes")]
    pub sequential_reasoning_allowed: bool,
    /// The engine speaks the Responses dialect itself.
    #[serde(default)]
    pub is_responses_native: bool,
    /// Arguments of the chat template, below those of the request's metadata.
    #[serde(default)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Merges the request's own `chat_template_kwargs`, which are dropped otherwise.
    #[serde(default)]
    pub forward_request_chat_template_kwargs: bool,
    /// Has the engine go on with a last message of the assistant.
    #[serde(default)]
    pub continue_final_assistant_message: bool,
    /// Sampling parameters that replace those of every request.
    #[serde(default)]
    pub sampling_overrides: Option<Map<String, Value>>,
    /// Keys that are added to each request that does not have them.
    #[serde(default)]
    pub extra_body: Option<Map<String, Value>>,
    /// Headers of each request.
    #[serde(default)]
    pub default_headers: BTreeMap<String, Secret>,
    /// Tells the engine the session's id as the conversation's.
    #[serde(default)]
    pub forward_session_id_as_conversation_id: bool,
    /// The wait before the second try, in milliseconds; doubled for each further one, and spread.
    #[serde(default = "half_a_second")]
    pub retry_backoff_ms: u64,
    /// Keys of NeMo Gym's server that this one does not have.
    #[serde(flatten)]
    pub others: BTreeMap<String, Value>,
}

/// One text or a list of them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

fn yes() -> bool {
    true
}

fn half_a_second() -> u64 {
    500
}

/// With which launchers choose the reasoning field where no configuration does.
pub(super) const REASONING_FIELD: &str = "NEMO_GYM_REASONING_FIELD";

/// What NeMo Gym's server can do and this one cannot.
const UNSUPPORTED: [&str; 4] = ["use_completions_api", "supply_prefix_token_ids", "endpoint_file", "audio_root"];

impl VllmModelConfig {
    /// The defaults, in front of a model at one engine.
    #[must_use]
    pub fn new(base_url: impl Into<String>, model: impl Into<String>) -> Self {
        Self {
            base_url: OneOrMany::One(base_url.into()),
            api_key: None,
            model: model.into(),
            return_token_id_information: false,
            request_prompt_and_generation_token_ids: false,
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
            retry_backoff_ms: half_a_second(),
            others: BTreeMap::new(),
        }
    }

    pub(super) fn base_urls(&self) -> Vec<&str> {
        match &self.base_url {
            OneOrMany::One(url) => vec![url],
            OneOrMany::Many(urls) => urls.iter().map(String::as_str).collect(),
        }
    }

    /// The reasoning field of the configuration; without one, that of the environment, if it is set.
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
        let set = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        if let Some(key) = UNSUPPORTED.iter().find(|key| self.others.get(**key).is_some_and(set)) {
            let text =
                format!("`{key}` is not supported by this vllm_model: leave it out, or run NeMo Gym's own server");
            return Err(Error::invalid(text));
        }
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
