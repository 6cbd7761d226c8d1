//! The typed form of a loaded configuration.

mod keys;
pub(super) mod transport;

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::check;
use crate::config::problem::{ConfigError, Mistake, Origin, Problem, nearest, suggest};
use crate::config::schema::keys::UnreadKeys;
use crate::config::strict;
use crate::config::yaml::deserialize::{self, TypeMismatch};
use crate::config::yaml::node::{Key, Node, Tree};
use crate::config::yaml::writer;
use gym_core::server::ServerKind;
use gym_core::transport::TransportPolicy;

/// Top-level keys that describe one machine or its head server.
const OWN_KEYS: [&str; 4] = ["config_paths", "head_server", "default_host", "disallowed_ports"];

/// A complete configuration, merged and checked.
///
/// ```
/// use gym_client::config::GymConfig;
///
/// fn names(config: &GymConfig) -> Vec<&str> {
///     config.instances.iter().map(|instance| &*instance.name).collect()
/// }
/// ```
#[derive(Clone, Debug)]
pub struct GymConfig {
    /// The servers, in the order of the merged file.
    pub instances: Vec<InstanceConfig>,
    /// The address of the head server.
    pub head: HeadConfig,
    /// The transports between servers (`transport`, `require_transport`); `None` if neither key is set.
    pub transport_policy: Option<TransportPolicy>,
    /// The host of servers that set none.
    pub default_host: String,
    /// The range from which ports are chosen.
    pub ports: PortRange,
    /// The ports that the head server and the servers use.
    pub disallowed_ports: Vec<u16>,
    /// Top-level keys that are neither reserved nor servers, such as `policy_model_name`.
    pub variables: serde_json::Map<String, Value>,
    /// The whole mapping with interpolations resolved. It contains secrets; print [`GymConfig::masked`] instead.
    pub merged: Value,
    /// Environment servers that were generated for agents without one.
    pub relays: Vec<GeneratedRelay>,
    /// The files that were read, lowest layer first.
    pub files: Vec<PathBuf>,
    /// Settings that are allowed but probably unintended.
    pub warnings: Vec<Problem>,
    /// Mistakes that NeMo Gym's loader accepts, and that a check of the configuration reports: a misspelled key of the top level, and a
    /// reference without a type or to another kind of server than its key names. A reference to another kind has the class
    /// [`Mistake::Reference`]: the server fails when it calls the other one.
    pub mistakes: Vec<Problem>,
    /// References to servers that no file defines. Empty unless [`ConfigLoader::with_servers_elsewhere`] allows them.
    ///
    /// [`ConfigLoader::with_servers_elsewhere`]: crate::config::ConfigLoader::with_servers_elsewhere
    pub elsewhere: Vec<MissingServer>,
    /// The Ray cluster (`ray_head_node_address`), if one is set.
    pub ray: Option<RayCluster>,
    /// The merged configuration before ports, hosts and paths of this machine were added.
    pub(crate) given: Node,
    pub(crate) raw: Node,
}

/// The Ray cluster of a configuration. `group::ray::RayAddress` knows the forms of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RayCluster {
    /// The address, as it was written.
    pub address: String,
    /// Where it was written.
    pub origin: Origin,
    /// The URL of the dashboard (`ray_dashboard_address`), if it is not the usual one.
    pub dashboard: Option<String>,
}

/// A reference to a server that no file defines.
#[derive(Clone, Debug)]
pub struct MissingServer {
    /// Kind of the server.
    pub kind: ServerKind,
    /// Name of the server.
    pub name: String,
    pub(crate) known: Vec<String>,
    pub(crate) problem: Problem,
}

impl MissingServer {
    /// Returns the mistake. Its fix suggests a name of the files or one of `more`.
    #[must_use]
    pub fn problem(&self, more: &[&str]) -> Problem {
        self.problem.clone().fix(suggest(&self.name, &self.names(more), self.kind.as_str()))
    }

    /// Returns the name of the files, or of `more`, for which this one is probably a typing error.
    #[must_use]
    pub fn nearest<'a>(&'a self, more: &[&'a str]) -> Option<&'a str> {
        nearest(&self.name, self.names(more))
    }

    fn names<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        self.known.iter().map(String::as_str).chain(more.iter().copied()).collect()
    }
}

/// The address at which the head server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeadConfig {
    /// Host name or address.
    pub host: String,
    /// TCP port. Default: 11000.
    pub port: u16,
}

impl HeadConfig {
    /// Creates the configuration of a head server at `host` and `port`.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port }
    }
}

/// The ports from `low` to `high`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// First port.
    pub low: u16,
    /// Last port.
    pub high: u16,
}

/// A generated `legacy_agent` relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedRelay {
    /// The agent behind the relay.
    pub agent: String,
    /// Instance name of the relay.
    pub name: String,
}

/// The HTTP address of a registered server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveServer {
    /// Name of the instance.
    pub name: String,
    /// Kind of the server.
    pub kind: ServerKind,
    /// Implementation of the server.
    pub implementation: String,
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// References to other servers, if no file may define the server.
    pub references: Vec<ServerReference>,
}

/// A request to choose a port for an instance.
#[derive(Clone, Copy, Debug)]
pub struct PortRequest<'a> {
    /// Name of the instance.
    pub instance: &'a str,
    /// Kind of the server; `None` for the head server.
    pub kind: Option<ServerKind>,
    /// The range to choose from.
    pub range: PortRange,
    /// Ports that are in use, including those of instances with a fixed port.
    pub disallowed: &'a [u16],
}

/// Chooses a random port of the range on which no process listens.
///
/// Another process may bind the port before the server does. Servers that can should bind port 0 instead.
pub fn free_port(request: &PortRequest<'_>, random: &mut fastrand::Rng) -> Option<u16> {
    // 50 attempts, as in NeMo Gym: the range is wide, so a failure indicates a problem of the machine.
    (0..50)
        .map(|_| random.u16(request.range.low..=request.range.high))
        .filter(|port| !request.disallowed.contains(port))
        .find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok())
}

/// One server.
#[derive(Clone, Debug)]
pub struct InstanceConfig {
    /// Top-level name, unique in the configuration.
    pub name: String,
    /// Kind of the server.
    pub kind: ServerKind,
    /// Implementation of the server: the key below the kind.
    pub implementation: String,
    /// Host on which it listens.
    pub host: String,
    /// Port on which it listens; `None` if none is configured and none was chosen.
    pub port: Option<u16>,
    /// `true` if no file sets the port: another one does as well.
    pub port_chosen: bool,
    /// Number of worker processes, if configured.
    pub num_workers: Option<u64>,
    /// The Python file of the server, relative to the directory of the implementation.
    pub entrypoint: Option<String>,
    /// The domain of a resources server.
    pub domain: Option<String>,
    /// References to other servers in its block, at any depth.
    pub references: Vec<ServerReference>,
    /// Its data sets.
    pub datasets: Vec<DatasetConfig>,
    /// The whole block with interpolations resolved. Programs read it with [`InstanceConfig::settings_as`], which knows the keys
    /// that they read.
    pub(crate) settings: serde_json::Map<String, Value>,
    /// Location of the block.
    pub origin: Origin,
    /// Interpolations deep in the block that could not be resolved; the settings contain their text.
    pub unresolved: Vec<Problem>,
    pub(crate) node: Node,
}

/// A `{type, name}` mapping in the block of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReference {
    /// The dotted key inside the block, such as `model_server` or `judges[0].server`.
    pub field: String,
    /// Kind of the referenced server.
    pub kind: ServerKind,
    /// Name of the referenced instance.
    pub name: String,
}

/// A data set of an instance.
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct DatasetConfig {
    /// Name of the data set.
    pub name: String,
    /// `train`, `validation`, `example` or `benchmark`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The file of the rows, one JSON object per line.
    pub jsonl_fpath: String,
    /// Number of rollouts per row. Default: 1.
    #[serde(default = "one", deserialize_with = "lenient_integer")]
    pub num_repeats: u64,
    /// The agent that runs the rows, if set.
    #[serde(default)]
    pub agent: Option<String>,
    /// The task set that selects the environment server of the rows.
    #[serde(default)]
    pub taskset: Option<String>,
    /// The file of a prompt template.
    #[serde(default)]
    pub prompt_config: Option<String>,
    /// The preparation script of a benchmark.
    #[serde(default)]
    pub prepare_script: Option<String>,
    /// All other keys.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, Value>,
}

fn one() -> u64 {
    1
}

/// Accepts strings and whole floats as integers, as pydantic does.
fn lenient_integer<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let int = match &value {
        Value::String(text) => text.trim().parse().ok(),
        value => {
            value.as_u64().or_else(|| value.as_f64().filter(|float| float.fract() == 0.0).map(|float| float as u64))
        }
    };
    int.ok_or_else(|| serde::de::Error::custom(format!("{value} is not an integer")))
}

impl GymConfig {
    /// Creates a configuration without files and without servers.
    #[must_use]
    pub fn without_files() -> Self {
        let origin = Origin::of("program");
        let host = Ipv4Addr::LOCALHOST.to_string();
        Self {
            instances: Vec::new(),
            head: HeadConfig { host: host.clone(), port: 0 },
            transport_policy: None,
            default_host: host,
            ports: PortRange { low: 10_001, high: 20_000 },
            disallowed_ports: Vec::new(),
            variables: serde_json::Map::new(),
            merged: Value::Object(serde_json::Map::new()),
            relays: Vec::new(),
            files: Vec::new(),
            warnings: Vec::new(),
            mistakes: Vec::new(),
            elsewhere: Vec::new(),
            ray: None,
            given: Node::map(Vec::new(), &origin),
            raw: Node::map(Vec::new(), &origin),
        }
    }

    /// Adds a server that a program implements under the name of the instance, without settings.
    ///
    /// # Errors
    /// If the configuration has a server of this name.
    pub fn add_server(&mut self, kind: ServerKind, name: &str) -> Result<(), ConfigError> {
        let origin = Origin::of("program");
        if let Some(known) = self.instance(name) {
            let what = format!("there are two servers '{name}'; the other one is in {}", known.origin);
            return Err(Problem::new(Mistake::Composition, &origin, name, what).fix("rename one of them").into());
        }
        let block = serde_json::json!({ kind.as_str(): { name: {} } });
        self.instances.push(InstanceConfig {
            name: name.to_owned(),
            kind,
            implementation: name.to_owned(),
            host: self.default_host.clone(),
            port: None,
            port_chosen: true,
            num_workers: None,
            entrypoint: None,
            domain: None,
            references: Vec::new(),
            datasets: Vec::new(),
            settings: serde_json::Map::new(),
            node: Node::map(Vec::new(), &origin),
            origin: origin.clone(),
            unresolved: Vec::new(),
        });
        if let Some(raw) = self.raw.as_map_mut() {
            raw.set(Key::Text(name.to_owned()), Node::from_json(&block, &origin));
        }
        if let Some(merged) = self.merged.as_object_mut() {
            merged.insert(name.to_owned(), block);
        }
        Ok(())
    }

    /// Returns the instance with this name.
    #[must_use]
    pub fn instance(&self, name: &str) -> Option<&InstanceConfig> {
        self.instances.iter().find(|instance| instance.name == name)
    }

    /// Returns the instance with this name.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] if there is no such instance; the error suggests a name.
    pub fn require(&self, name: &str) -> Result<&InstanceConfig, ConfigError> {
        self.instance(name).ok_or_else(|| {
            let names: Vec<&str> = self.instances.iter().map(|instance| instance.name.as_str()).collect();
            Problem::new(Mistake::Reference, &Origin::default(), "", format!("there is no server '{name}'"))
                .fix(suggest(name, &names, "servers"))
                .into()
        })
    }

    /// Returns the merged configuration as YAML that NeMo Gym's own loader reads into an equal mapping. The host and
    /// port of every server are set, and interpolations are left to that loader. Contains secrets.
    #[must_use]
    pub fn to_global_yaml(&self) -> String {
        writer::yaml(&self.raw)
    }

    /// Sets the host of the head server that [`GymConfig::to_global_yaml`] tells others, if it is not the one that it binds.
    pub fn advertise_head(&mut self, host: &str) {
        if let Some(head) =
            self.raw.as_map_mut().and_then(|root| root.get_mut("head_server")).and_then(Node::as_map_mut)
        {
            head.set(Key::from("host"), Node::text(host, &Origin::default()));
        }
    }

    /// Returns [`GymConfig::to_global_yaml`] with the current addresses of the servers, and with servers that
    /// registered without being in a file.
    #[must_use]
    pub fn to_global_yaml_with(&self, live: &[LiveServer]) -> String {
        writer::yaml(&self.with_live(live))
    }

    fn with_live(&self, live: &[LiveServer]) -> Node {
        let mut root = self.raw.clone();
        let origin = Origin::of("registry");
        for server in live {
            let path = [server.name.as_str(), server.kind.as_str(), server.implementation.as_str()];
            let is_new = root.step(&server.name).is_none();
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
                for reference in server.references.iter().filter(|_| is_new) {
                    let ServerReference { field, kind, name } = reference;
                    let node = serde_json::json!({"type": kind.as_str(), "name": name});
                    block.set(Key::Text(field.clone()), Node::from_json(&node, &origin));
                }
            }
        }
        root
    }

    /// Returns the configuration as it was given, for workers without files of their own: without the addresses of this machine, its
    /// servers and its head server. Interpolations are kept, so each worker reads its own environment variables. `None` if the
    /// configuration has no server. Contains secrets.
    #[must_use]
    pub fn to_shared_yaml(&self) -> Option<String> {
        let mut root = self.given.clone();
        let map = root.as_map_mut().filter(|_| !self.instances.is_empty())?;
        for key in OWN_KEYS {
            map.remove(key);
        }
        for instance in &self.instances {
            let path = [&instance.name, instance.kind.as_str(), &instance.implementation];
            let block = path.into_iter().try_fold(&mut root, |at, step| at.as_map_mut()?.get_mut(step));
            if let Some(block) = block.and_then(Node::as_map_mut) {
                block.remove("host");
                block.remove("port");
            }
        }
        Some(writer::yaml(&root))
    }

    /// Adds servers of other machines, so that Python servers of this configuration find them.
    pub fn add_live(&mut self, live: &[LiveServer]) {
        self.raw = self.with_live(live);
    }

    /// Sets the address that Python servers of this machine pass to `ray.init`, for an address such as `local` that only this program understands.
    /// Workers on other machines get the configuration as it was given.
    pub fn set_ray_address_of_python(&mut self, address: &str) {
        if let Some(map) = self.raw.as_map_mut() {
            map.set(
                Key::Text("ray_head_node_address".to_owned()),
                Node::text(address, &Origin::of("Ray head of this machine")),
            );
        }
    }

    /// Returns the merged configuration with `****` instead of keys, tokens, passwords and other secrets.
    #[must_use]
    pub fn masked(&self) -> Value {
        let mut value = self.merged.clone();
        writer::mask(&mut value);
        value
    }

    /// Returns [`GymConfig::masked`] as YAML.
    #[must_use]
    pub fn masked_yaml(&self) -> String {
        writer::yaml(&Node::from_json(&self.masked(), &Origin::default()))
    }

    /// Returns the configuration as it was given, before defaults, ports and paths of this machine were added: with interpolations as they are written, and
    /// masked, as YAML.
    #[must_use]
    pub fn masked_given_yaml(&self) -> String {
        let mut value = self.given.to_json();
        writer::mask(&mut value);
        writer::yaml(&Node::from_json(&value, &Origin::default()))
    }
}

impl InstanceConfig {
    /// Deserializes the block. Where a number or boolean is expected, a string that spells one is accepted, as in NeMo Gym's
    /// servers, because `${oc.env:NAME,false}` is always a string.
    ///
    /// A key that neither the type nor NeMo Gym has is an error. A type with `#[serde(flatten)]`, and `serde_json::Map`, take any key.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with file, line, instance and key of every unknown key and of the value that does not fit, and with
    /// every unresolved interpolation.
    pub fn settings_as<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.settings_and_ignored().map(|(settings, _)| settings)
    }

    /// Deserializes the block as [`InstanceConfig::settings_as`] does. Also returns the keys that NeMo Gym's own servers read and
    /// this type does not.
    ///
    /// # Errors
    /// The errors of [`InstanceConfig::settings_as`].
    pub fn settings_and_ignored<T: DeserializeOwned>(&self) -> Result<(T, Vec<Problem>), ConfigError> {
        if !self.unresolved.is_empty() {
            return Err(ConfigError::Invalid(self.unresolved.clone()));
        }
        let (read, unknown) = deserialize::read_leniently(&self.node, Value::Object(self.settings.clone()));
        let UnreadKeys { mut errors, ignored, meant } = UnreadKeys::of(self, unknown);
        match read {
            Ok(settings) if errors.is_empty() => Ok((settings, ignored)),
            Ok(_) => Err(ConfigError::Invalid(errors)),
            Err(mismatch) => {
                // The error about the misspelled key contains the name of the missing one.
                if !mismatch.missing_field().is_some_and(|field| meant.contains(&field)) {
                    errors.push(self.mismatch(mismatch, &[]));
                }
                Err(ConfigError::Invalid(errors))
            }
        }
    }

    /// Returns the location of a key of the block, or that of the block if it has no such key.
    #[must_use]
    pub fn origin_of(&self, key: &str) -> &Origin {
        self.node.step(key).map_or(&self.origin, |node| &node.origin)
    }

    /// Returns `true` if the block has this key.
    #[must_use]
    pub fn has_key(&self, key: &str) -> bool {
        self.node.step(key).is_some()
    }

    /// Returns `kind/implementation`, the directory of a Python server of this block.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        PathBuf::from(self.kind.as_str()).join(&self.implementation)
    }

    pub(crate) fn read<T: DeserializeOwned>(&self, key: &str) -> Result<T, ConfigError> {
        let node = self.node.step(key).unwrap_or(&self.node);
        let value = self.settings.get(key).cloned().unwrap_or_default();
        let (read, _) = deserialize::read_leniently(node, value);
        read.map_err(|mismatch| self.mismatch(mismatch, &[key]).into())
    }

    fn mismatch(&self, mismatch: TypeMismatch, at: &[&str]) -> Problem {
        let mut before = vec![self.name.as_str(), self.kind.as_str(), self.implementation.as_str()];
        before.extend(at);
        let fix = |key: &str| format!("correct the value in the file, or override it with ++{key}=VALUE");
        let problem = mismatch.at(&self.origin, &before, fix).instance(&self.name);
        // A reference that is only a name has a better fix than its type knows.
        let reference = check::composed_kinds(self.kind).find_map(|(key, kind)| {
            let path = [self.name.as_str(), self.kind.as_str(), &self.implementation, key].join(".");
            let text = self.node.step(key).and_then(Node::as_text)?;
            (problem.key.as_deref() == Some(&path)).then(|| strict::bare_reference(kind, text, path, &problem.origin))
        });
        reference.map_or(problem, |reference| reference.instance(&self.name))
    }
}
