//! Builds a stack: from files and overrides, or from servers that the program creates.

use std::fmt;
use std::path::PathBuf;

use gym_client::config::{ConfigError, ConfigLoader, GymConfig, Overrides, free_port};
use gym_client::{ServerClient, Transports};
use gym_core::server::ServerKind;
use gym_core::{AgentServer, Error, ModelServer, ResourcesServer, Result, RolloutServer, World};
use parking_lot::Mutex;

use crate::role::RoleServer;
use crate::stack::options::StackOptions;
use crate::stack::running::Stack;
use crate::stack::servers::{Build, BuiltServer, Servers};

/// Builds and starts a [`Stack`]; created by [`Stack::builder`] and [`Stack::embedded`].
#[must_use = "a builder does nothing until it is started"]
pub struct StackBuilder {
    config: Option<GymConfig>,
    files: Vec<PathBuf>,
    overrides: Vec<String>,
    servers: Servers,
    /// Servers created by the program, in the order in which they start.
    own: Vec<OwnServer>,
    world: World,
    options: StackOptions,
    embedded: bool,
}

struct OwnServer {
    kind: ServerKind,
    name: String,
    serve: Box<dyn FnOnce(&Build<'_>) -> RoleServer + Send>,
}

impl StackBuilder {
    /// Adds a configuration file. Values of later files take precedence.
    pub fn config_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.files.push(path.into());
        self
    }

    /// Uses a loaded configuration instead of files.
    pub fn config(mut self, config: GymConfig) -> Self {
        self.config = Some(config);
        self
    }

    /// Adds an override, as on the command line: `+head_server.port=0`.
    pub fn set(mut self, assignment: impl Into<String>) -> Self {
        self.overrides.push(assignment.into());
        self
    }

    /// Sets the implementations. [`Servers::stock`] by default.
    pub fn servers(mut self, servers: Servers) -> Self {
        self.servers = servers;
        self
    }

    /// Adds a resources server under a name, in addition to those of the configuration.
    pub fn resources(self, name: &str, server: impl ResourcesServer) -> Self {
        self.own(ServerKind::Resources, name, |build| RoleServer::resources(server, build.context))
    }

    /// Adds a model server under a name, in addition to those of the configuration.
    pub fn model(self, name: &str, server: impl ModelServer) -> Self {
        self.own(ServerKind::Model, name, |build| RoleServer::model(server, build.context))
    }

    /// Adds an agent server under a name, in addition to those of the configuration. `make` receives the client that calls the
    /// other servers by name.
    pub fn agent<A: AgentServer>(self, name: &str, make: impl FnOnce(ServerClient) -> A + Send + 'static) -> Self {
        self.own(ServerKind::Agent, name, |build| RoleServer::agent(make(build.client.clone()), build.context))
    }

    /// Adds an environment server under a name, in addition to those of the configuration. `make` receives the client that calls the
    /// other servers by name.
    pub fn environment<E: RolloutServer>(
        self,
        name: &str,
        make: impl FnOnce(ServerClient) -> E + Send + 'static,
    ) -> Self {
        self.own(ServerKind::Environment, name, |build| {
            RoleServer::environment(make(build.client.clone()), build.context)
        })
    }

    fn own(
        mut self,
        kind: ServerKind,
        name: &str,
        serve: impl FnOnce(&Build<'_>) -> RoleServer + Send + 'static,
    ) -> Self {
        self.own.push(OwnServer { kind, name: name.to_owned(), serve: Box::new(serve) });
        self
    }

    /// Sets the transports that the servers listen on and call with. By default those that the program was built with.
    pub fn transports(mut self, transports: Transports) -> Self {
        self.options.transports = Some(transports);
        self
    }

    /// Sets all other options, and the transports.
    pub fn options(mut self, options: StackOptions) -> Self {
        self.options = options;
        self
    }

    /// Starts the servers and waits until all of them serve.
    ///
    /// # Errors
    /// `InvalidArgument` with file, line and key for an error in the files, with the name that two servers share, or if an embedded stack has no server; also the
    /// errors of [`Stack::start`].
    pub async fn start(mut self) -> Result<Stack> {
        let mut config = self.configuration().map_err(|error| Error::invalid(error.to_string()))?;
        self.options.in_process |= self.embedded;
        let mut servers = self.servers;
        for OwnServer { kind, name, serve } in self.own {
            config.add_server(kind, &name).map_err(|error| Error::invalid(error.to_string()))?;
            let serve = Mutex::new(Some(serve));
            servers = servers.with(kind, &name, move |build| {
                let serve = serve.lock().take();
                let serve = serve.ok_or_else(|| Error::internal("a server of a builder is served once"))?;
                Ok(BuiltServer::from(serve(build)))
            });
        }
        if self.embedded && config.instances.is_empty() {
            return Err(Error::invalid(
                "the embedded stack has no servers; add some with `.resources`, `.model` and `.agent`, or with `.config_file`",
            ));
        }
        Stack::start(config, &servers, &self.world, self.options).await
    }

    fn configuration(&mut self) -> Result<GymConfig, ConfigError> {
        if let Some(config) = self.config.take() {
            return Ok(config);
        }
        if self.embedded && self.files.is_empty() && self.overrides.is_empty() {
            return Ok(GymConfig::without_files());
        }
        let mut random = self.world.rng();
        let overrides = Overrides::parse(std::mem::take(&mut self.overrides))?;
        let files: Vec<_> = self.files.iter().map(|path| path.display().to_string()).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        ConfigLoader::new(".")
            .transports(self.options.transports.clone().unwrap_or_else(|| self.servers.transports()).known())
            .pick_port(move |wish| free_port(wish, &mut random))
            .load(&files, &overrides)
    }
}

impl fmt::Debug for StackBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own: Vec<&str> = self.own.iter().map(|server| server.name.as_str()).collect();
        f.debug_struct("StackBuilder").field("files", &self.files).field("own", &own).finish_non_exhaustive()
    }
}

impl Stack {
    /// Creates a builder with the stock servers and no configuration.
    pub fn builder() -> StackBuilder {
        StackBuilder {
            config: None,
            files: Vec::new(),
            overrides: Vec::new(),
            servers: Servers::stock(),
            own: Vec::new(),
            world: World::real(),
            options: StackOptions::default(),
            embedded: false,
        }
    }

    /// Creates a builder for a stack without files and ports. The stack has the servers that the program adds, and serves only
    /// callers of this process ([`StackOptions::in_process`]).
    ///
    /// ```
    /// use gym_server::agent::SimpleAgent;
    /// use gym_server::model::{ScriptedItem, ScriptedModel};
    /// use gym_server::prelude::*;
    ///
    /// struct Exact;
    ///
    /// impl ResourcesServer for Exact {
    ///     type Task = serde_json::Value;
    ///     async fn verify(&self, _: &CallContext, _: &SessionId, task: Self::Task, response: &ModelResponse) -> Result<Verdict> {
    ///         Ok(Verdict::correct(task["expected"] == *response.last_text()?))
    ///     }
    /// }
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<()> {
    /// let policy = |_: &RawObject, _: &mut fastrand::Rng| vec![ScriptedItem::message("4")];
    /// let stack = Stack::embedded()
    ///     .resources("exact", Exact)
    ///     .model("policy", ScriptedModel::from_policy(policy))
    ///     .agent("agent", |client| SimpleAgent::between("policy", "exact", client))
    ///     .start()
    ///     .await?;
    /// let row = RawObject::parse(r#"{"responses_create_params": {"input": "2 + 2"}, "expected": "4"}"#)?;
    /// let mut rollouts = stack.rollouts("agent", [row])?;
    /// while let Some(rollout) = rollouts.next().await {
    ///     assert_eq!(rollout?.reward(), Some(1.0));
    /// }
    /// stack.stop().await;
    /// # Ok(()) }
    /// ```
    pub fn embedded() -> StackBuilder {
        StackBuilder { embedded: true, ..Self::builder() }
    }
}
