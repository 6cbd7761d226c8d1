//! The environment of a rank as people read it: each variable with its source.

use std::collections::BTreeMap;
use std::fmt;

use gym_client::config::{MASK, is_secret_key, mask_secrets};
use serde::{Deserialize, Serialize};

use crate::provision::variables::Variables;

/// The layer that a variable of a rank is from. Later layers take precedence over earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum VariableSource {
    /// The SDK and the worker type.
    Defaults,
    /// The process that starts the rank: the controller, or on another machine the agent of the node.
    Process,
    /// The controller, for ranks that an agent starts.
    Controller,
    /// The group.
    Group,
    /// The place of the rank.
    Rank,
    /// The worker type's function of the rank's place.
    Configured,
}

impl VariableSource {
    /// All layers, lowest first.
    pub const ALL: [Self; 6] =
        [Self::Defaults, Self::Process, Self::Controller, Self::Group, Self::Rank, Self::Configured];

    /// Returns the name, as it is printed.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Defaults => "defaults",
            Self::Process => "process",
            Self::Controller => "controller",
            Self::Group => "group",
            Self::Rank => "rank",
            Self::Configured => "configured",
        }
    }

    /// Returns what the layer contains.
    #[must_use]
    pub fn content(self) -> &'static str {
        match self {
            Self::Defaults => {
                "`OMP_NUM_THREADS`: the CPUs of the bundle; what the allowed transports read when they are loaded; `WorkerKind::with_defaults`"
            }
            Self::Process => {
                "the process that starts the rank, the controller or on another machine the agent of the node, without the kinds of `NOT_INHERITED`"
            }
            Self::Controller => {
                "on another machine: the controller, without the kinds of `NOT_INHERITED` and `NOT_SENT`; of `NODE_FIRST`, a variable of the agent has precedence. On Ray also `RayOptions::variables`"
            }
            Self::Group => "the variables given to the group",
            Self::Rank => {
                "`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `AVAILABLE_ADDR_LIST`, `AVAILABLE_PORT_LIST`, `CUDA_VISIBLE_DEVICES`; for a tied group's leader also `VLLM_PORT`"
            }
            Self::Configured => "the worker type's function of the rank's place, `WorkerKind::with_configure`",
        }
    }
}

impl fmt::Display for VariableSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A variable of a rank.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankVariable {
    /// The value. It may be a secret.
    pub value: String,
    /// The layer that it is from.
    pub source: VariableSource,
}

/// The environment of a rank, with the source of each variable.
///
/// Its text is a table of all variables: source, name, value. In it and in `Debug`, values that look like secrets are `****`: those of names with a word
/// like `TOKEN`, `KEY`, `SECRET` or `PASSWORD`, and the passwords in URLs.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RankEnvironment(BTreeMap<String, RankVariable>);

impl RankEnvironment {
    /// Returns the variable of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&RankVariable> {
        self.0.get(name)
    }

    /// Returns the variables, in alphabetical order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &RankVariable)> {
        self.0.iter().map(|(name, variable)| (name.as_str(), variable))
    }

    /// Adds a layer, over those before.
    pub(super) fn layer(
        &mut self,
        source: VariableSource,
        variables: impl IntoIterator<Item = (impl Into<String>, String)>,
    ) {
        self.0.extend(variables.into_iter().map(|(name, value)| (name.into(), RankVariable { value, source })));
    }

    /// Returns the variables without their sources.
    pub(crate) fn into_variables(self) -> Variables {
        self.0.into_iter().map(|(name, variable)| (name, variable.value)).collect()
    }

    /// Returns the variables with the values that may be shown.
    fn shown(&self) -> impl Iterator<Item = (&str, VariableSource, String)> {
        self.iter().map(|(name, RankVariable { value, source })| (name, *source, shown(name, value)))
    }
}

/// Returns the value, masked if it looks like a secret.
fn shown(name: &str, value: &str) -> String {
    let secret = name.split('_').any(|word| is_secret_key(word) || word.eq_ignore_ascii_case("pass"));
    if secret && !value.is_empty() {
        return MASK.to_owned();
    }
    // The password of a URL.
    let mut value = serde_json::Value::from(value);
    mask_secrets(&mut value);
    value.as_str().unwrap_or_default().to_owned()
}

impl fmt::Display for RankEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.0.keys().map(|name| name.chars().count()).max().unwrap_or(0);
        for (name, source, value) in self.shown() {
            // A value with a line break stays in its line.
            writeln!(f, "{source:<10}  {name:<width$}  {}", value.escape_debug())?;
        }
        Ok(())
    }
}

impl fmt::Debug for RankEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.shown().map(|(name, source, value)| (name, (source, value)))).finish()
    }
}

impl fmt::Debug for RankVariable {
    /// Leaves the value out: it may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankVariable").field("source", &self.source).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_environment_names_sources_and_masks_secrets() {
        let mut environment = RankEnvironment::default();
        let cases = [
            ("HF_TOKEN", "hunter2", "****"),
            ("OPENAI_API_KEY", "hunter2", "****"),
            ("aws_secret_access_key", "hunter2", "****"),
            ("PGPASSWORD", "hunter2", "****"),
            ("api_key_of_others", "hunter2", "****"),
            ("DATABASE_URL", "postgres://me:hunter2@db/x", "postgres://me:****@db/x"),
            ("tokenizers_parallelism", "false", "false"),
            ("two_lines", "a\nb", "a\\nb"),
        ];
        environment.layer(VariableSource::Process, cases.map(|(name, value, _)| (name.to_owned(), value.to_owned())));
        environment.layer(VariableSource::Rank, [("RANK".to_owned(), "1".to_owned())]);
        let text = environment.to_string();
        for (name, value, shown) in cases {
            let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some(name)).expect(name);
            assert!(line.starts_with("process") && line.ends_with(shown), "{line}");
            assert_eq!(environment.get(name).expect(name).value, value, "the value itself stays");
        }
        assert!(text.contains("rank        RANK"), "{text}");
        for text in [text, format!("{environment:?}"), format!("{:?}", environment.get("HF_TOKEN"))] {
            assert!(!text.contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn the_table_of_the_module_has_each_layer_as_the_code_does() {
        for source in VariableSource::ALL {
            let row = format!("//! | {source} | {} |\n", source.content());
            assert!(include_str!("mod.rs").contains(&row), "mod.rs lacks:\n{row}");
        }
        assert!(VariableSource::ALL.is_sorted());
    }
}
