//! The servers of a configuration or head server: their kinds, addresses and agents.

mod content;
mod params;
pub(super) mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::registry::{Instance, Registry};
use gym_core::server::{ServerKind, TaskCheck};
use gym_core::transport::{TransportPolicy, host_port};
use gym_core::{CallContext, Code, Endpoint, Error, Incarnation, RawObject, Request, Result, World};
use serde_json::Value;

use crate::client::ServerClient;
use crate::collect::input::AgentNames;
use crate::collect::names::settings::RewardSettings;
use crate::config::{GymConfig, nearest_name, parse_resolved};
use crate::registry::{RemoteRegistry, StaticRegistry};
use crate::transport::Transports;

/// Limit for a request to the head server, which responds from memory.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);

/// The servers of a configuration, by name.
#[derive(Clone, Debug, Default)]
pub struct ServerNames {
    servers: Arc<BTreeMap<String, ServerEntry>>,
    /// The block of each server, also of those that were left out of `servers`.
    blocks: Arc<BTreeMap<String, Value>>,
    /// The blocks that look like servers and are none, because they have no `entrypoint`.
    idle: Arc<BTreeSet<String>>,
    /// The checks of rows, by resources server of this process.
    task_checks: Arc<BTreeMap<String, TaskCheck>>,
}

/// Agents and environment servers that send a row to the resources server unchanged. Others may add what the environment reads, so
/// their rows are checked by the environment only.
const SEND_ROWS_UNCHANGED: [&str; 4] = ["simple_agent", "gymnasium_agent", "legacy_agent", "pool"];

/// The agent that calls the model with the messages of the row alone. Others may add the first observation.
const ADDS_NO_MESSAGE: &str = "simple_agent";

#[derive(Clone, Debug)]
struct ServerEntry {
    kind: ServerKind,
    implementation: String,
    address: Option<(String, u16)>,
    /// The agent behind an environment server.
    agent: Option<String>,
    /// The resources server behind an agent.
    resources: Option<String>,
    /// The agents that its datasets name.
    pins: BTreeSet<String>,
}

impl ServerNames {
    /// Returns the servers of a loaded configuration.
    #[must_use]
    pub fn of_config(config: &GymConfig) -> Self {
        let mut names = Self::of_merged(&config.merged);
        let idle = |name: &String| config.instance(name).is_none();
        names.idle = Arc::new(names.servers.keys().filter(|name| idle(name)).cloned().collect());
        Arc::make_mut(&mut names.servers).retain(|name, _| !idle(name));
        names
    }

    /// Returns the servers of a merged configuration, which `/global_config_dict_yaml` serves.
    #[must_use]
    pub fn of_merged(merged: &Value) -> Self {
        let (mut servers, mut blocks) = (BTreeMap::new(), BTreeMap::new());
        for (name, block) in merged.as_object().into_iter().flatten() {
            let found = ServerKind::ALL.into_iter().find_map(|kind| {
                let (implementation, settings) = block.get(kind.as_str())?.as_object()?.iter().next()?;
                Some((kind, implementation, settings))
            });
            let Some((kind, implementation, settings)) = found else { continue };
            let host = settings.get("host").and_then(Value::as_str);
            let port = settings.get("port").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
            let agent = settings["agent_server"]["name"].as_str().map(str::to_owned);
            let resources = settings["resources_server"]["name"].as_str().map(str::to_owned);
            let datasets = settings.get("datasets").and_then(Value::as_array).into_iter().flatten();
            let pins: BTreeSet<String> =
                datasets.filter_map(|dataset| dataset["agent"].as_str().map(str::to_owned)).collect();
            let address = host.map(str::to_owned).zip(port);
            let implementation = implementation.clone();
            servers.insert(name.clone(), ServerEntry { kind, implementation, address, agent, resources, pins });
            blocks.insert(name.clone(), block.clone());
        }
        Self { servers: Arc::new(servers), blocks: Arc::new(blocks), idle: Arc::default(), task_checks: Arc::default() }
    }

    /// Returns the settings of the servers that run the rows of these agents and environment servers.
    pub(super) fn reward_settings<'a>(&self, targets: impl IntoIterator<Item = &'a str>) -> RewardSettings {
        let server =
            |target: &str| self.server_of_agent(target).map_or_else(|_| target.to_owned(), |(server, _)| server);
        RewardSettings::of(&self.blocks, targets.into_iter().map(server))
    }

    /// Returns the servers of the text of `/global_config_dict_yaml`; `source` is its name in messages.
    ///
    /// # Errors
    /// `DataLoss` if the text is no configuration.
    pub fn of_global_yaml(yaml: &str, source: &str) -> Result<Self> {
        let merged = parse_resolved(yaml, source).map_err(|error| {
            Error::finished(Code::DataLoss, format!("its configuration is invalid: {error}"))
                .about(format!("head server {source}"))
        })?;
        Ok(Self::of_merged(&merged))
    }

    /// Returns the names of all servers with their kinds.
    pub fn servers(&self) -> impl Iterator<Item = (&str, ServerKind)> {
        self.servers.iter().map(|(name, known)| (name.as_str(), known.kind))
    }

    /// Adds the check of the rows of a resources server that runs in this process.
    pub fn add_task_check(&mut self, resources: &str, check: TaskCheck) {
        Arc::make_mut(&mut self.task_checks).insert(resources.to_owned(), check);
    }

    /// Returns the agent that gets the rows of an agent or environment server unchanged and sends them on so.
    fn unchanged_agent(&self, target: &str) -> Option<&ServerEntry> {
        let unchanged = |name: &str| {
            self.servers.get(name).filter(|known| SEND_ROWS_UNCHANGED.contains(&known.implementation.as_str()))
        };
        let before = self.server_of_agent(target).map_or_else(|_| target.to_owned(), |(server, _)| server);
        let server = unchanged(&before)?;
        server.agent.as_deref().map_or(Some(server), unchanged)
    }

    /// Returns the names without the environment servers of the implementation `pool`: a collector whose workers pull needs no other
    /// pool in front of an agent.
    #[must_use]
    pub fn without_pools(self) -> Self {
        self.without_pools_before(|_| true)
    }

    /// Returns the names without the environment servers of the implementation `pool` in front of these agents.
    #[must_use]
    pub fn without_pools_before(mut self, agents: impl Fn(&str) -> bool) -> Self {
        let is_pool = |known: &ServerEntry| known.kind == ServerKind::Environment && known.implementation == "pool";
        let is_before = |known: &ServerEntry| known.agent.as_deref().is_none_or(&agents);
        Arc::make_mut(&mut self.servers).retain(|_, known| !(is_pool(known) && is_before(known)));
        self
    }

    /// Returns the server that runs the rows of this agent, and its implementation. It is the environment server in
    /// front of the agent, or the agent itself if there is none.
    ///
    /// # Errors
    /// `NotFound`, with the closest name as a suggestion.
    pub fn server_of_agent(&self, agent: &str) -> Result<(String, String)> {
        let before = self
            .servers
            .iter()
            .find(|(_, known)| known.kind == ServerKind::Environment && known.agent.as_deref() == Some(agent));
        let itself = || self.servers.get_key_value(agent).filter(|(_, known)| known.kind == ServerKind::Agent);
        match before.or_else(itself) {
            Some((name, known)) => Ok((name.clone(), known.implementation.clone())),
            None => {
                let agents = self.servers.iter().filter(|(_, known)| known.kind == ServerKind::Agent);
                Err(self.unknown("agent", agent, agents.map(|(name, _)| name.as_str())))
            }
        }
    }

    /// Returns the implementation of an environment server that a row names.
    ///
    /// # Errors
    /// `NotFound`, with the closest name as a suggestion.
    pub fn environment(&self, server: &str) -> Result<String> {
        match self.servers.get(server) {
            Some(known) if known.kind == ServerKind::Environment => Ok(known.implementation.clone()),
            _ => {
                let all = self.servers.iter().filter(|(_, known)| known.kind == ServerKind::Environment);
                Err(self.unknown("environment server", server, all.map(|(name, _)| name.as_str())))
            }
        }
    }

    /// Returns the names of the model servers.
    #[must_use]
    pub fn models(&self) -> Vec<String> {
        let models = self.servers.iter().filter(|(_, known)| known.kind == ServerKind::Model);
        models.map(|(name, _)| name.clone()).collect()
    }

    /// Checks that rows can be sent to this agent or environment server.
    ///
    /// # Errors
    /// `NotFound`, with the closest name as a suggestion.
    pub fn check_target(&self, target: &str) -> Result<()> {
        if self.environment(target).is_ok() { Ok(()) } else { self.server_of_agent(target).map(drop) }
    }

    fn unknown<'a>(&self, what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> Error {
        let known: Vec<&str> = known.collect();
        let hint = match nearest_name(name, known.iter().copied()) {
            _ if self.idle.contains(name) => {
                "its block has no entrypoint, so it is no server: add 'entrypoint: app.py' to it".to_owned()
            }
            Some(near) => format!("did you mean `{near}`?"),
            None if known.is_empty() => format!("the configuration has no {what}"),
            None => format!("the configuration has {}", known.join(", ")),
        };
        Error::not_started(Code::NotFound, format!("there is no {what} `{name}`; {hint}"))
    }

    /// Returns a registry with fixed addresses, for head servers without leases.
    fn registry(&self) -> StaticRegistry {
        let instances = self.servers.iter().filter_map(|(name, known)| {
            let (host, port) = known.address.as_ref()?;
            Some(Instance {
                name: name.clone(),
                replica: 0,
                kind: known.kind,
                implementation: known.implementation.clone(),
                endpoints: vec![Endpoint::parse(&format!("http://{}", host_port(host, *port))).ok()?],
                incarnation: Incarnation(0),
                labels: BTreeMap::new(),
                member: None,
                paused: false,
            })
        });
        StaticRegistry::new(instances.collect())
    }
}

impl AgentNames for ServerNames {
    /// Returns the agent of the server that declares the row's dataset. The dataset may name the
    /// agent. Otherwise it is the server itself if that is an agent, or else the only agent that uses the resources server.
    fn agent_of_task_source(&self, task_source: &str) -> Result<String, String> {
        let Some(known) = self.servers.get(task_source) else {
            let names = self.servers.keys().map(String::as_str);
            let near = nearest_name(task_source, names).map(|near| format!("; did you mean `{near}`?"));
            return Err(format!("the configuration has no server of this name{}", near.unwrap_or_default()));
        };
        let mut pins = known.pins.iter();
        match (known.kind, pins.next(), pins.next()) {
            (_, Some(_), Some(_)) => Err("its datasets name several agents; choose one with agent_map".to_owned()),
            (_, Some(pin), None) => Ok(pin.clone()),
            (ServerKind::Agent, ..) => Ok(task_source.to_owned()),
            (ServerKind::Resources, ..) => {
                let mut agents =
                    self.servers.iter().filter(|(_, agent)| agent.resources.as_deref() == Some(task_source));
                match (agents.next(), agents.next()) {
                    (Some((agent, _)), None) => Ok(agent.clone()),
                    (None, _) => Err("no agent uses this resources server; set the agent with agent_map".to_owned()),
                    _ => Err("several agents use this resources server; choose one with agent_map".to_owned()),
                }
            }
            _ => Err("it is neither an agent nor a resources server; set the agent with agent_map".to_owned()),
        }
    }

    fn agent_of_environment_server(&self, server: &str) -> Option<String> {
        self.servers.get(server)?.agent.clone()
    }

    fn check_row(&self, target: &str, row: &str) -> Result<(), String> {
        let Some(agent) = self.unchanged_agent(target) else { return Ok(()) };
        let row = RawObject::parse(row.to_owned()).map_err(|error| error.to_string())?;
        if agent.kind == ServerKind::Agent {
            params::check(&row, agent.implementation == ADDS_NO_MESSAGE)?;
        }
        let check = agent.resources.as_deref().and_then(|resources| self.task_checks.get_key_value(resources));
        let Some((resources, check)) = check else { return Ok(()) };
        check.check(&row).map_err(|error| format!("resources server `{resources}`: {}", error.message()))
    }
}

/// Requests the list of servers from a head server, either ours or NeMo Gym's. Our head server keeps leases, so a
/// server that moves is found again. The addresses of NeMo Gym's head server are read once.
///
/// # Errors
/// `Unavailable` if the head server cannot be reached; `DataLoss` if its response cannot be parsed.
#[must_use = "a future does nothing until it is awaited"]
pub fn connect_head<'a>(
    head: &'a Endpoint,
    transports: Transports,
    world: &'a World,
) -> BoxFuture<'a, Result<(ServerClient, ServerNames)>> {
    Box::pin(async move {
        // Requests to the head server use HTTP, whatever the transport policy allows.
        let control = transports.clone().with_policy(TransportPolicy::unconfigured());
        let remote = RemoteRegistry::new(head.clone(), control, world.clone());
        let cx = CallContext::within(HEAD_TIMEOUT);
        let response = remote.send(&Request::get(cx.child(), "/global_config_dict_yaml"), true).await?;
        let unreadable = |why: String| {
            Error::finished(Code::DataLoss, format!("its configuration is invalid: {why}"))
                .about(format!("head server {head}"))
        };
        let yaml: String = serde_json::from_slice(&response.message.head.to_bytes())
            .map_err(|error| unreadable(format!("it is not a JSON string: {error}")))?;
        let names = ServerNames::of_global_yaml(&yaml, head.as_str())?;
        let client = match remote.list(&cx).await {
            Ok(_) => {
                let client = ServerClient::new(Arc::new(remote.clone()), transports, world);
                client.follow(Arc::new(remote));
                client
            }
            Err(error) if matches!(error.code(), Code::NotFound | Code::Unimplemented) => {
                ServerClient::new(Arc::new(names.registry()), transports, world)
            }
            Err(error) => return Err(error),
        };
        Ok((client, names))
    })
}
