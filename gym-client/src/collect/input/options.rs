//! Options that turn the input rows of a collection into rollouts.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::collect::input::error::InputError;
use crate::collect::input::prompt::PromptTemplate;

/// Key for all other names in `agent_map` and in per-agent repeats.
pub const DEFAULT_KEY: &str = "_default";

/// Number of rollouts per input row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// The same number for every row.
    Each(u32),
    /// Numbers by agent, or by the row's own agent or task source; `_default` applies to all other names.
    PerAgent(BTreeMap<String, u32>),
}

/// Selects the environment server of a flat row, which has no `task_id.taskset` and `task_input`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The server in front of the row's agent.
    #[default]
    Agent,
    /// The given server, for every flat row.
    Legacy(String),
    /// None: a row without `task_id.taskset` and `task_input` is an error.
    Taskset,
}

/// Options that turn input rows into rollouts; [`MaterializeOptions::new`] sets the defaults.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MaterializeOptions {
    /// Name of the input in error messages.
    pub input_name: String,
    /// Maximum number of input rows to read; `None` and 0 mean no limit, as in NeMo Gym. Default: `None`.
    pub limit: Option<u64>,
    /// Replacement agents, by the row's agent or task source; `_default` applies to all other rows. Default: empty.
    pub agent_map: BTreeMap<String, String>,
    /// Agents that each run the rows of the given agent or task source once. Default: empty.
    pub fan_out: BTreeMap<String, Vec<String>>,
    /// Number of rollouts per input row. Default: `Repeats::Each(1)`.
    pub repeats: Repeats,
    /// Set the seed of each rollout to its rollout index, in `metadata.extra_body`. Default: `false`.
    pub add_seed: bool,
    /// Dispatch repeats in rounds (abcabc) instead of consecutively (aabbcc). Default: `false`.
    pub interleave: bool,
    /// Fields that replace those of each row's `responses_create_params`. Default: empty.
    pub overrides: Map<String, Value>,
    /// Template that builds `responses_create_params.input`. Default: none.
    pub prompt: Option<PromptTemplate>,
    /// Value that is written to each row as `skills_ref`. Default: none.
    pub skills_ref: Option<Value>,
    /// Selects the environment server of flat rows. Default: [`Routing::Agent`].
    pub routing: Routing,
    /// Environment servers of materialized tasks, by taskset. Default: empty.
    pub environment_server_routes: BTreeMap<String, String>,
}

impl MaterializeOptions {
    /// Returns the options for one rollout of each row of the input named `input_name`; rows are not changed.
    #[must_use]
    pub fn new(input_name: impl Into<String>) -> Self {
        Self {
            input_name: input_name.into(),
            limit: None,
            agent_map: BTreeMap::new(),
            fan_out: BTreeMap::new(),
            repeats: Repeats::Each(1),
            add_seed: false,
            interleave: false,
            overrides: Map::new(),
            prompt: None,
            skills_ref: None,
            routing: Routing::Agent,
            environment_server_routes: BTreeMap::new(),
        }
    }

    /// Sends every row to `agent` by setting `_default` of the agent map.
    ///
    /// # Errors
    /// [`InputError::Option`] if the agent map already has another `_default`.
    pub fn with_agent(mut self, agent: &str) -> Result<Self, InputError> {
        match self.agent_map.get(DEFAULT_KEY) {
            Some(other) if other != agent => Err(InputError::option(
                "agent_name",
                format!("{agent:?} conflicts with agent_map._default {other:?}; set only one of them"),
            )),
            _ => {
                self.agent_map.insert(DEFAULT_KEY.to_owned(), agent.to_owned());
                Ok(self)
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), InputError> {
        match &self.repeats {
            Repeats::Each(0) => {
                return Err(InputError::option("num_repeats", "must be at least 1, got 0; use 1 or more"));
            }
            Repeats::PerAgent(map) => {
                if let Some((agent, _)) = map.iter().find(|(_, repeats)| **repeats == 0) {
                    return Err(InputError::option(
                        format!("num_repeats.{agent}"),
                        "must be at least 1, got 0; to skip an agent's rows, remove them from the input",
                    ));
                }
            }
            Repeats::Each(_) => {}
        }
        for (key, agents) in &self.fan_out {
            let repeated = agents.iter().enumerate().find(|(place, agent)| agents[..*place].contains(agent));
            if agents.is_empty() {
                return Err(InputError::option(
                    format!("fan_out.{key}"),
                    "the list of agents is empty, so its rows would be dropped; list at least one agent, or remove the key",
                ));
            }
            if let Some((_, agent)) = repeated {
                return Err(InputError::option(
                    format!("fan_out.{key}"),
                    format!("{agent:?} is listed more than once; use num_repeats to repeat rows"),
                ));
            }
        }
        if self.routing == Routing::Taskset && self.environment_server_routes.is_empty() {
            return Err(InputError::option(
                "environment_server_routes",
                "must name a server for each taskset when environment_routing_mode is taskset",
            ));
        }
        Ok(())
    }
}
