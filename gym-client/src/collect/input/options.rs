//! What a collection is asked to do with its input rows.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::collect::input::error::InputError;
use crate::collect::input::prompt::PromptTemplate;

/// The key of `agent_map` and of per-agent repeats that stands for every other name.
pub const DEFAULT_KEY: &str = "_default";

/// How often each row is rolled out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// Every row alike.
    Each(u32),
    /// By agent name, or by the name that the row itself routes by; `_default` stands for the others.
    PerAgent(BTreeMap<String, u32>),
}

/// Which environment server a flat row goes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The one in front of the row's agent.
    #[default]
    Agent,
    /// This one, for every flat row.
    Legacy(String),
    /// None: only rows with `task_id.taskset` and `task_input` are taken.
    Taskset,
}

/// What to make of the input rows.
#[derive(Clone, Debug)]
pub struct MaterializeOptions {
    /// The input's name, for errors.
    pub input_name: String,
    /// At most so many rows are read; 0 is no limit, as in NeMo Gym.
    pub limit: Option<u64>,
    /// Where rows go instead, by their agent or task source; `_default` takes all others.
    pub agent_map: BTreeMap<String, String>,
    /// Rows of this agent or task source run once on each of these agents.
    pub fan_out: BTreeMap<String, Vec<String>>,
    /// How often each row is rolled out.
    pub repeats: Repeats,
    /// Whether each rollout gets its index as the seed, in `metadata.extra_body`.
    pub add_seed: bool,
    /// Whether repeats are dispatched round by round (abcabc) instead of back to back (aabbcc).
    pub interleave: bool,
    /// Members that replace those of each row's `responses_create_params`.
    pub overrides: Map<String, Value>,
    /// Template that builds `responses_create_params.input`.
    pub prompt: Option<PromptTemplate>,
    /// Put on each row as `skills_ref`.
    pub skills_ref: Option<Value>,
    /// Where flat rows go.
    pub routing: Routing,
    /// Environment servers of materialized tasks, by taskset.
    pub environment_server_routes: BTreeMap<String, String>,
}

impl MaterializeOptions {
    /// One rollout for each row of the input called `input_name`, rows as they are.
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

    /// Sends every row to `agent`: the `_default` of the agent map.
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
            Repeats::Each(0) => return Err(InputError::option("num_repeats", "must be at least 1, got 0")),
            Repeats::PerAgent(map) => {
                if let Some((agent, _)) = map.iter().find(|(_, repeats)| **repeats == 0) {
                    return Err(InputError::option(
                        format!("num_repeats.{agent}"),
                        "must be at least 1, got 0; to leave an agent's rows out, remove them from the input",
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
                    "lists no agent, which would drop its rows; list at least one, or remove the key",
                ));
            }
            if let Some((_, agent)) = repeated {
                return Err(InputError::option(
                    format!("fan_out.{key}"),
                    format!("lists {agent:?} more than once; use num_repeats for repetition"),
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
