//! What a loaded configuration is for the rest of the program.

pub(super) mod transport;

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::problem::{ConfigError, Mistake, Origin, Problem, suggest};
use crate::config::yaml::deserialize::{self, TypeMismatch};
use crate::config::yaml::node::{Key, Node, Tree};
use crate::config::yaml::writer;
use gym_core::server::ServerKind;
use gym_core::transport::TransportPolicy;

/// A whole configuration, merged and checked.
#[derive(Clone, Debug)]
pub struct GymConfig {
    /// The servers, in the order of the merged file.
    pub instances: Vec<InstanceConfig>,
    /// The head server's address.
    pub head: HeadConfig,
    /// How servers reach each other (`transport`, `require_transport`); `None` when nothing is said.
    pub transport_policy: Option<TransportPolicy>,
    /// The host of servers that name none.
    pub default_host: String,
    /// Where ports are chosen from.
    pub ports: PortRange,
    /// Ports in use by the head and the servers.
    pub disallowed_ports: Vec<u16>,
    /// Top-level keys that are neither reserved nor servers, as in `policy_model_name`.
    pub variables: serde_json::Map<String, Value>,
    /// Everything, interpolations resolved. Secrets included: print [`GymConfig::masked`] instead.
    pub merged: Value,
    /// Environment servers that were generated for agents without one.
    pub relays: Vec<GeneratedRelay>,
    /// The files that were read, lowest layer first.
    pub files: Vec<PathBuf>,
    /// What is probably not meant, but allowed.
    pub warnings: Vec<Problem>,
    pub(crate) raw: Node,
}

/// Where the head server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadConfig {
    /// Host name or address.
    pub host: String,
    /// TCP port, 11000 by default.
    pub port: u16,
}

/// Ports from `low` to `high`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The first.
    pub low: u16,
    /// The last.
    pub high: u16,
}

/// A generated `legacy_agent` relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedRelay {
    /// The agent it stands before.
    pub agent: String,
    /// The relay's instance name.
    pub name: String,
}

/// Where a server of the registry can be reached over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveServer {
    /// The instance's name.
    pub name: String,
    /// What it is.
    pub kind: ServerKind,
    /// Which implementation serves it.
    pub implementation: String,
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// A port that an instance needs.
#[derive(Clone, Copy, Debug)]
pub struct PortRequest<'a> {
    /// Who needs it.
    pub instance: &'a str,
    /// Where from.
    pub range: PortRange,
    /// Ports that are taken already, those of instances with a fixed port included.
    pub disallowed: &'a [u16],
}

/// Picks a random port of the range on which nothing listens.
///
/// Another process may take it before the server binds: a server that can should bind port 0 itself.
pub fn free_port(request: &PortRequest<'_>, random: &mut fastrand::Rng) -> Option<u16> {
    // 50 tries, as NeMo Gym has them: the range is wide, so a failure means that something is wrong with the machine.
    (0..50)
        .map(|_| random.u16(request.range.low..=request.range.high))
        .filter(|port| !request.disallowed.contains(port))
        .find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok())
}

/// One server.
#[derive(Clone, Debug)]
pub struct InstanceConfig {
    /// Its top-level name, unique in the configuration.
    pub name: String,
    /// What it is.
    pub kind: ServerKind,
    /// Which implementation serves it: the key below the kind.
    pub implementation: String,
    /// Where it listens.
    pub host: String,
    /// Its port; `None` when none is configured and none was chosen.
    pub port: Option<u16>,
    /// Worker processes, where the configuration says so.
    pub num_workers: Option<u64>,
    /// The Python file that serves it, relative to the implementation's folder.
    pub entrypoint: Option<String>,
    /// What a resources server measures.
    pub domain: Option<String>,
    /// Other servers that its block names, at any depth.
    pub references: Vec<ServerReference>,
    /// Its data sets.
    pub datasets: Vec<DatasetConfig>,
    /// The whole block, interpolations resolved.
    pub settings: serde_json::Map<String, Value>,
    /// Where the block starts.
    pub origin: Origin,
    /// Interpolations deep in the block that have no value; [`InstanceConfig::settings`] holds their text.
    pub unresolved: Vec<Problem>,
    pub(crate) node: Node,
}

/// `{type, name}` somewhere in an instance's block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReference {
    /// The dotted key inside the block, as in `model_server` or `judges[0].server`.
    pub field: String,
    /// The kind of the server it names.
    pub kind: ServerKind,
    /// The instance it names.
    pub name: String,
}

/// A data set of an instance.
#[derive(Clone, Debug, Deserialize)]
pub struct DatasetConfig {
    /// Its name.
    pub name: String,
    /// `train`, `validation`, `example` or `benchmark`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The rows, one JSON object a line.
    pub jsonl_fpath: String,
    /// How often each row is run.
    #[serde(default = "one", deserialize_with = "lenient_integer")]
    pub num_repeats: u64,
    /// The agent that runs it, where it names one.
    #[serde(default)]
    pub agent: Option<String>,
    /// The task set that routes its rows.
    #[serde(default)]
    pub taskset: Option<String>,
    /// A prompt template's file.
    #[serde(default)]
    pub prompt_config: Option<String>,
    /// A benchmark's preparation script.
    #[serde(default)]
    pub prepare_script: Option<String>,
    /// Every other key.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, Value>,
}

fn one() -> u64 {
    1
}

/// Text and whole floats count as integers, as they do for pydantic.
fn lenient_integer<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let int = match &value {
        Value::String(text) => text.trim().parse().ok(),
        value => {
            value.as_u64().or_else(|| value.as_f64().filter(|float| float.fract() == 0.0).map(|float| float as u64))
        }
    };
    int.ok_or_else(|| serde::de::Error::custom(format!("{value} is no whole number")))
}

impl GymConfig {
    /// The instance of this name.
    #[must_use]
    pub fn instance(&self, name: &str) -> Option<&InstanceConfig> {
        self.instances.iter().find(|instance| instance.name == name)
    }

    /// The instance of this name, or an error that suggests one.
    ///
    /// # Errors
    /// When there is no such instance.
    pub fn require(&self, name: &str) -> Result<&InstanceConfig, ConfigError> {
        self.instance(name).ok_or_else(|| {
            let names: Vec<&str> = self.instances.iter().map(|instance| instance.name.as_str()).collect();
            Problem::new(Mistake::Reference, &Origin::default(), "", format!("there is no server '{name}'"))
                .fix(suggest(name, &names, "servers"))
                .into()
        })
    }

    /// The merged configuration as YAML that NeMo Gym's own loader reads into an equal mapping: host and port of every
    /// server filled in, interpolations left for it to resolve. Secrets included.
    #[must_use]
    pub fn to_global_yaml(&self) -> String {
        writer::yaml(&self.raw)
    }

    /// [`GymConfig::to_global_yaml`] with the addresses at which servers live now, and with the servers that joined without
    /// being in any file.
    #[must_use]
    pub fn to_global_yaml_with(&self, live: &[LiveServer]) -> String {
        let mut root = self.raw.clone();
        let origin = Origin::of("registry");
        for server in live {
            let path = [server.name.as_str(), server.kind.as_str(), server.implementation.as_str()];
            let Some(at) = path.into_iter().try_fold(&mut root, |at, step| {
                let map = at.as_map_mut()?;
                if !map.contains(step) {
                    map.set(Key::Text(step.to_owned()), Node::map(Vec::new(), &origin));
                }
                map.get_mut(step)
            }) else {
                continue;
            };
            if let Some(block) = at.as_map_mut() {
                block.set(Key::Text("host".to_owned()), Node::text(server.host.clone(), &origin));
                block.set(Key::Text("port".to_owned()), Node::new(Tree::Int(i128::from(server.port)), origin.clone()));
            }
        }
        writer::yaml(&root)
    }

    /// The merged configuration with `****` in the place of keys, tokens, passwords and other secrets.
    #[must_use]
    pub fn masked(&self) -> Value {
        let mut value = self.merged.clone();
        writer::mask(&mut value);
        value
    }

    /// [`GymConfig::masked`] as YAML.
    #[must_use]
    pub fn masked_yaml(&self) -> String {
        writer::yaml(&Node::from_json(&self.masked(), &Origin::default()))
    }
}

impl InstanceConfig {
    /// The block as a type of yours; unknown fields are up to its `serde` attributes. A text that spells a number or a
    /// boolean is one where one is asked for, as in NeMo Gym's servers: `${oc.env:NAME,false}` is always a text.
    ///
    /// # Errors
    /// Names file, line, instance and key of the value that does not fit, and every interpolation without a value.
    pub fn settings_as<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        if !self.unresolved.is_empty() {
            return Err(ConfigError::Invalid(self.unresolved.clone()));
        }
        self.read(&[])
    }

    /// `kind/implementation`, the folder that a Python server of this block lives in.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        PathBuf::from(self.kind.as_str()).join(&self.implementation)
    }

    pub(crate) fn read<T: DeserializeOwned>(&self, at: &[&str]) -> Result<T, ConfigError> {
        let (node, value) = self.part(at);
        deserialize::read_leniently(node, value).map_err(|mismatch| self.mismatch(mismatch, at))
    }

    /// The value at this path of the block, and where it is.
    fn part(&self, at: &[&str]) -> (&Node, Value) {
        let node = at.iter().try_fold(&self.node, |node, step| node.step(step)).unwrap_or(&self.node);
        let Some((first, rest)) = at.split_first() else {
            return (node, Value::Object(self.settings.clone()));
        };
        let mut value = self.settings.get(*first);
        for step in rest {
            value = value.and_then(|value| value.get(*step));
        }
        (node, value.cloned().unwrap_or_default())
    }

    fn mismatch(&self, mismatch: TypeMismatch, at: &[&str]) -> ConfigError {
        let mut before = vec![self.name.as_str(), self.kind.as_str(), self.implementation.as_str()];
        before.extend(at);
        let fix = "correct the value in the file, or override it with ++key=value";
        mismatch.at(&self.origin, &before, fix).instance(&self.name).into()
    }
}
