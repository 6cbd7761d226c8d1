//! The implementations that run in this process, by kind and name.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gym_client::config::{InstanceConfig, Problem, nearest_name};
use gym_client::{ServerClient, Transports};
use gym_core::server::{GymnasiumServer, ServerKind, TaskCheck};
use gym_core::transport::Fenced;
use gym_core::{AgentServer, Error, Handler, ModelServer, ResourcesServer, Result, RolloutServer};
#[cfg(feature = "groups")]
use gym_group::Workers;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::agent::{GymnasiumAgent, SimpleAgent};
use crate::environment::{POOL_IMPLEMENTATION, PoolServer, Relay};
use crate::model::{OpenAiModel, ScriptedModel, ScriptedPolicy, VllmModel};
use crate::role::{RoleServer, ServerContext};
use crate::stack::schema::{self, Implementation, SettingsSchema};

/// The input of a factory: one instance of the configuration.
///
/// ```
/// use gym_server::prelude::*;
///
/// /// Asks a server whose name is in the block of the agent.
/// struct Asks(ServerClient, String);
///
/// #[derive(serde::Deserialize)]
/// struct Settings {
///     judge: String,
/// }
///
/// impl AgentServer for Asks {
///     async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
///         self.0.post(cx, &self.1, "/run", row.text().clone(), CallOptions::default()).await
///     }
/// }
///
/// let servers = Servers::stock().agent("asks", |build: &Build<'_>| {
///     let settings: Settings = build.settings()?;
///     Ok(Asks(build.client.clone(), settings.judge))
/// });
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Build<'a> {
    /// The instance's block.
    pub instance: &'a InstanceConfig,
    /// The name and the shared parts of the server.
    pub context: &'a ServerContext,
    /// Calls the other servers by name.
    pub client: &'a ServerClient,
    /// The ignored keys of the block; `None` until the factory has read the block.
    ignored: RefCell<Option<Vec<Problem>>>,
    /// The block could not be read: the error has file, line and key.
    is_misfit: Cell<bool>,
}

/// The settings of an implementation that reads none.
#[derive(Deserialize)]
struct NoSettings {}

impl<'a> Build<'a> {
    /// Creates the input of a factory.
    #[must_use]
    pub fn new(instance: &'a InstanceConfig, context: &'a ServerContext, client: &'a ServerClient) -> Self {
        Self { instance, context, client, ignored: RefCell::new(None), is_misfit: Cell::new(false) }
    }

    /// Deserializes the block. The fields of the type are the keys that the implementation reads; another key is an error. If a
    /// factory does not call this method, its implementation reads no keys of its own.
    ///
    /// # Errors
    /// `InvalidArgument` with file, line and key of a value that does not fit and of every unknown key, with the nearest name.
    pub fn settings<T: DeserializeOwned>(&self) -> Result<T> {
        let read = self.instance.settings_and_ignored();
        let (settings, ignored) = read.map_err(|error| {
            self.is_misfit.set(true);
            Error::invalid(error.to_string())
        })?;
        *self.ignored.borrow_mut() = Some(ignored);
        Ok(settings)
    }

    /// Adds file, line and key to the error of a factory that has none. The key is the first one of the block that the message quotes.
    fn locate(&self, error: Error) -> Error {
        if self.is_misfit.get() || !error.subject().is_empty() {
            return error;
        }
        let InstanceConfig { name, kind, implementation, .. } = self.instance;
        let key = error.message().split('`').skip(1).step_by(2).find(|quoted| self.instance.has_key(quoted));
        let place = match key {
            Some(key) => format!("{}: {name}.{kind}.{implementation}.{key}", self.instance.origin_of(key)),
            None => format!("{}: {name}.{kind}.{implementation}", self.instance.origin),
        };
        error.about(place)
    }

    /// Returns the keys of the block that NeMo Gym's own server reads and this implementation does not.
    fn into_ignored(self) -> Result<Vec<Problem>> {
        if self.ignored.borrow().is_none() {
            self.settings::<NoSettings>()?;
        }
        Ok(self.ignored.into_inner().unwrap_or_default())
    }
}

/// An instance that a factory has created.
pub(crate) struct Made {
    pub(crate) handler: Arc<dyn Handler>,
    /// The check of the rows that it receives, if it is an environment.
    pub(crate) task_check: Option<TaskCheck>,
    /// It joins a `/run` that arrives again to the first one.
    pub(crate) joins_runs: bool,
    /// The keys of its block that only NeMo Gym's own server reads.
    pub(crate) ignored: Vec<Problem>,
}

type Factory = Arc<dyn Fn(&Build<'_>) -> Result<BuiltServer> + Send + Sync>;

/// A server that a factory built, and what its role says of it.
pub(crate) struct BuiltServer {
    pub(crate) handler: Arc<dyn Handler>,
    /// The check of the rows that it receives.
    pub(crate) task_check: Option<TaskCheck>,
    pub(crate) joins_runs: bool,
}

impl From<RoleServer> for BuiltServer {
    fn from(server: RoleServer) -> Self {
        Self { task_check: server.task_check(), joins_runs: server.joins_runs(), handler: Arc::new(server) }
    }
}

/// The implementations that run in this process. An instance with any other implementation needs a Python `entrypoint`, which runs
/// as a child process.
///
/// ```
/// use gym_core::{CallContext, ModelResponse, ResourcesServer, Result, SessionId, Verdict};
/// use gym_server::Servers;
///
/// struct Parity;
///
/// #[derive(serde::Deserialize)]
/// struct Task {
///     expected: String,
/// }
///
/// impl ResourcesServer for Parity {
///     type Task = Task;
///     async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
///         Ok(Verdict::correct(response.last_text()?.trim() == task.expected))
///     }
/// }
///
/// let servers = Servers::stock().resources("parity", |_| Ok(Parity));
/// ```
#[derive(Clone, Default)]
pub struct Servers {
    factories: BTreeMap<(ServerKind, String), Factory>,
    /// The schemas of their settings, as far as they are known.
    schemas: BTreeMap<(ServerKind, String), SettingsSchema>,
    /// How environments and stock agents play, as far as it is known.
    plays: BTreeMap<(ServerKind, String), Play>,
    transports: Option<Transports>,
    #[cfg(feature = "groups")]
    workers: Workers,
}

/// The way in which an environment plays, and for which an agent is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Play {
    /// The model calls the environment's tools.
    Tools,
    /// The environment replies as a user.
    Replies,
}

impl Play {
    #[cfg(feature = "cli")]
    pub(super) fn of_environment(self) -> &'static str {
        match self {
            Self::Tools => "has tools and does not reply (`Servers::resources`)",
            Self::Replies => "replies as a user and has no tools (`Servers::gymnasium`)",
        }
    }

    #[cfg(feature = "cli")]
    pub(super) fn of_agent(self) -> &'static str {
        match self {
            Self::Tools => "calls tools",
            Self::Replies => "waits for replies",
        }
    }

    /// Returns the stock agent of the environment.
    pub(super) fn agent(self) -> &'static str {
        match self {
            Self::Tools => "simple_agent",
            Self::Replies => "gymnasium_agent",
        }
    }
}

impl Servers {
    /// Creates an empty set.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Creates the set that the SDK ships: the agents `simple_agent` and `gymnasium_agent`, the relay `legacy_agent`,
    /// the servers `pool`, whose rollouts and verifications run on workers, and the models
    /// `openai_model`, `vllm_model` and `scripted_model`.
    #[must_use]
    pub fn stock() -> Self {
        let mut stock = Self::none()
            .agent("simple_agent", |build| Ok(SimpleAgent::new(build.settings()?, build.client.clone())))
            .agent("gymnasium_agent", |build| {
                Ok(GymnasiumAgent::new(build.settings()?, build.client.clone(), &build.context.world))
            })
            .environment("legacy_agent", |build| {
                Ok(Relay::new(build.settings()?, build.client.clone()).until(build.context.draining.clone()))
            })
            .with(ServerKind::Environment, POOL_IMPLEMENTATION, |build| {
                let pool = PoolServer::new(build.settings()?, build.context)?;
                if let Some(members) = build.client.members() {
                    pool.follow(Arc::clone(members), &build.instance.host);
                }
                let joins_runs = pool.joins_runs();
                Ok(BuiltServer { handler: Arc::new(pool), task_check: None, joins_runs })
            })
            .with(ServerKind::Resources, POOL_IMPLEMENTATION, |build| {
                let pool = PoolServer::verifying(build.settings()?, build.context);
                if let Some(members) = build.client.members() {
                    pool.follow(Arc::clone(members), &build.instance.host);
                }
                let handler = Arc::new(pool);
                Ok(BuiltServer { handler, task_check: None, joins_runs: false })
            })
            .model("openai_model", |build| OpenAiModel::new(build.settings()?, &build.context.world))
            .model("vllm_model", |build| {
                let model = VllmModel::new(build.settings()?, &build.context.world)?;
                Ok(model.with_metrics(&build.context.name, &build.context.metrics))
            })
            .model("scripted_model", |build| {
                Ok(ScriptedModel::with_default_policy(build.settings()?, &build.context.world))
            });
        for play in [Play::Tools, Play::Replies] {
            stock.plays.insert((ServerKind::Agent, play.agent().to_owned()), play);
        }
        stock.schemas = stock.factories.keys().map(|key| (key.clone(), SettingsSchema::Stock)).collect();
        stock
    }

    /// Sets the transports that configurations can name, and that servers listen on and call with. By default those that the SDK
    /// was built with.
    ///
    /// ```
    /// use gym_client::Transports;
    /// use gym_server::Servers;
    ///
    /// // `.with(backend)` adds a transport of your own.
    /// let servers = Servers::stock().over(Transports::standard());
    /// ```
    #[must_use]
    pub fn over(mut self, transports: Transports) -> Self {
        self.transports = Some(transports);
        self
    }

    /// Returns the transports of the program.
    #[must_use]
    pub fn transports(&self) -> Transports {
        self.transports.clone().unwrap_or_else(Transports::standard)
    }

    /// Sets the worker types of the program, for `rgym run --worker`: with a join secret in `GYM_JOIN_SECRET`, the worker is a node, on which
    /// controllers that run the same program start ranks. [`cli::main`](crate::cli::main) also runs these ranks.
    #[cfg(feature = "groups")]
    #[must_use]
    pub fn with_workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// Returns the worker types of the program.
    #[cfg(feature = "groups")]
    #[must_use]
    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Replaces the policy of `scripted_model`.
    #[must_use]
    pub fn scripted_policy(self, policy: impl ScriptedPolicy + Clone) -> Self {
        let mut servers = self.model("scripted_model", move |build| {
            Ok(ScriptedModel::new(build.settings()?, &build.context.world, policy.clone()))
        });
        servers.schemas.insert((ServerKind::Model, "scripted_model".to_owned()), SettingsSchema::Stock);
        servers
    }

    /// Adds the JSON schema of the settings of an implementation, for [`Servers::config_schema`]. Call it after the implementation was
    /// added. `schemars::schema_for!` creates the schema of a type; its fields should be those of the type that is given to
    /// [`Build::settings`].
    ///
    /// ```
    /// # use gym_core::{CallContext, ModelResponse, ResourcesServer, Result, SessionId, Verdict};
    /// # struct Shop;
    /// # impl ResourcesServer for Shop {
    /// #     type Task = serde_json::Value;
    /// #     async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
    /// #         Ok(Verdict::correct(true))
    /// #     }
    /// # }
    /// use gym_core::server::ServerKind;
    /// use gym_server::Servers;
    /// use serde_json::json;
    ///
    /// let settings = json!({"type": "object", "properties": {"carts_max": {"type": "integer"}}});
    /// let servers = Servers::stock()
    ///     .resources("shop", |_| Ok(Shop))
    ///     .settings_schema(ServerKind::Resources, "shop", settings);
    /// ```
    #[must_use]
    pub fn settings_schema(mut self, kind: ServerKind, implementation: &str, schema: Value) -> Self {
        self.schemas.insert((kind, implementation.to_owned()), SettingsSchema::Given(Arc::new(schema)));
        self
    }

    /// Returns the JSON schema (draft 2020-12) of the configuration files of this program, as `rgym config schema` prints it. A block
    /// of an implementation without a schema accepts any key.
    #[must_use]
    pub fn config_schema(&self) -> Value {
        let implementations = self.factories.keys().map(|key| {
            let (kind, name) = key;
            Implementation { kind: *kind, name, settings: self.schemas.get(key) }
        });
        let transports = self.transports().known();
        let transports: Vec<&str> = transports.iter().map(|transport| transport.as_str()).collect();
        schema::of_configuration(&implementations.collect::<Vec<_>>(), &transports)
    }

    /// Adds a resources server under an implementation name.
    #[must_use]
    pub fn resources<S: ResourcesServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.role(ServerKind::Resources, implementation, move |build| {
            Ok(RoleServer::resources(make(build)?, build.context))
        })
        .playing(implementation, Play::Tools)
    }

    /// Adds a resources server that replies as a user, for an agent such as `gymnasium_agent`, under an implementation name.
    #[must_use]
    pub fn gymnasium<S: GymnasiumServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.role(ServerKind::Resources, implementation, move |build| {
            Ok(RoleServer::gymnasium(make(build)?, build.context))
        })
        .playing(implementation, Play::Replies)
    }

    /// Adds a model server under an implementation name.
    #[must_use]
    pub fn model<S: ModelServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.role(ServerKind::Model, implementation, move |build| Ok(RoleServer::model(make(build)?, build.context)))
    }

    /// Adds an agent server under an implementation name.
    #[must_use]
    pub fn agent<S: AgentServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.role(ServerKind::Agent, implementation, move |build| Ok(RoleServer::agent(make(build)?, build.context)))
    }

    /// Adds an environment server under an implementation name.
    #[must_use]
    pub fn environment<S: RolloutServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.role(ServerKind::Environment, implementation, move |build| {
            Ok(RoleServer::environment(make(build)?, build.context))
        })
    }

    /// Adds any handler that the four roles do not cover. Like a role in a stack, it receives only calls that name its own
    /// incarnation or no incarnation.
    #[must_use]
    pub fn handler(
        self,
        kind: ServerKind,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<Arc<dyn Handler>> + Send + Sync + 'static,
    ) -> Self {
        self.with(kind, implementation, move |build| {
            let handler = make(build)?;
            let handler = match build.context.incarnation {
                Some(incarnation) => Arc::new(Fenced::new(incarnation, handler)),
                None => handler,
            };
            Ok(BuiltServer { handler, task_check: None, joins_runs: false })
        })
    }

    fn role(
        self,
        kind: ServerKind,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<RoleServer> + Send + Sync + 'static,
    ) -> Self {
        self.with(kind, implementation, move |build| make(build).map(BuiltServer::from))
    }

    pub(super) fn with(
        mut self,
        kind: ServerKind,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<BuiltServer> + Send + Sync + 'static,
    ) -> Self {
        let key = (kind, implementation.to_owned());
        // The settings of a replaced implementation are not those of the new one.
        self.schemas.remove(&key);
        self.plays.remove(&key);
        self.factories.insert(key, Arc::new(make));
        self
    }

    fn playing(mut self, environment: &str, play: Play) -> Self {
        self.plays.insert((ServerKind::Resources, environment.to_owned()), play);
        self
    }

    /// Returns how an environment or a stock agent plays, if it is known.
    #[cfg(feature = "cli")]
    pub(super) fn plays(&self, kind: ServerKind, implementation: &str) -> Option<Play> {
        self.plays.get(&(kind, implementation.to_owned())).copied()
    }

    /// Returns `true` if the set has the implementation.
    #[must_use]
    pub fn has(&self, kind: ServerKind, implementation: &str) -> bool {
        self.factories.contains_key(&(kind, implementation.to_owned()))
    }

    /// Returns the implementations of a kind, in alphabetical order.
    pub fn names(&self, kind: ServerKind) -> impl Iterator<Item = &str> {
        self.factories.keys().filter(move |(known, _)| *known == kind).map(|(_, name)| name.as_str())
    }

    /// Returns the implementation of a kind whose name differs from `wanted` by at most a typing mistake.
    pub(crate) fn nearest(&self, kind: ServerKind, wanted: &str) -> Option<&str> {
        nearest_name(wanted, self.names(kind))
    }

    /// Creates an instance; `None` if there is no such implementation. The error names file and line.
    pub(crate) fn make(&self, build: Build<'_>) -> Option<Result<Made>> {
        let key = (build.instance.kind, build.instance.implementation.clone());
        let factory = self.factories.get(&key)?;
        let built = factory(&build).map_err(|error| build.locate(error));
        Some(built.and_then(|BuiltServer { handler, task_check, joins_runs }| {
            Ok(Made { handler, task_check, joins_runs, ignored: build.into_ignored()? })
        }))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.factories.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use gym_client::config::{ConfigLoader, Overrides};
    use gym_core::transport::{INCARNATION_METADATA, handler_fn};
    use gym_core::{CallContext, Code, Incarnation, Request, Response};

    use super::*;
    use crate::testing::{TestNetwork, world};

    #[test]
    fn an_implementation_that_reads_no_settings_has_no_keys_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let text = "echo: {resources_servers: {echo: {entrypoint: app.py, domain: other, sead: 1}}}\n";
        std::fs::write(folder.path().join("a.yaml"), text).unwrap();
        let config = ConfigLoader::new(folder.path()).load(&["a.yaml"], &Overrides::default()).unwrap();
        let context = ServerContext::new("echo", "echo", &world());
        let client = TestNetwork::new().client(&[]);
        let made = |make: fn(&Build<'_>) -> Result<()>| {
            let servers = Servers::none().handler(ServerKind::Resources, "echo", move |build| {
                make(build)?;
                Ok(Arc::new(handler_fn(|_: Request| async { Ok(Response::json("{}")) })))
            });
            servers.make(Build::new(&config.instances[0], &context, &client)).unwrap().map(drop)
        };
        let error = made(|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("a.yaml:1: echo.resources_servers.echo.sead: unknown key 'sead'"), "{error}");
        assert!(error.contains("fix: remove it; echo reads no keys of its own"), "{error}");
        #[derive(Deserialize)]
        struct Settings {
            #[serde(rename = "seed")]
            _seed: Option<u64>,
        }
        let error = made(|build| build.settings::<Settings>().map(drop)).unwrap_err().to_string();
        assert!(error.contains("fix: did you mean 'seed'?"), "{error}");
        assert!(made(|build| build.settings::<BTreeMap<String, serde_json::Value>>().map(drop)).is_ok());
    }

    #[tokio::test]
    async fn a_handler_that_is_no_role_gets_no_calls_for_another_incarnation() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(
            folder.path().join("a.yaml"),
            "echo: {resources_servers: {echo: {entrypoint: app.py, domain: other}}}\n",
        )
        .unwrap();
        let config = ConfigLoader::new(folder.path()).load(&["a.yaml"], &Overrides::default()).unwrap();
        let context =
            ServerContext { incarnation: Some(Incarnation(3)), ..ServerContext::new("echo", "echo", &world()) };
        let client = TestNetwork::new().client(&[]);
        let echo = || handler_fn(|_: Request| async { Ok(Response::json("{}")) });
        let servers = Servers::none().handler(ServerKind::Resources, "echo", move |_| Ok(Arc::new(echo())));
        let made = servers.make(Build::new(&config.instances[0], &context, &client));
        let handler = made.unwrap().unwrap().handler;
        let call = |incarnation| {
            let mut cx = CallContext::default();
            cx.incarnation = incarnation;
            handler.handle(Request::get(cx, "/"))
        };
        for incarnation in [None, Some(Incarnation(3))] {
            let response = call(incarnation).await.unwrap();
            assert_eq!(response.metadata.get(INCARNATION_METADATA), Some(Incarnation(3).to_string().as_str()));
        }
        assert_eq!(call(Some(Incarnation(2))).await.unwrap_err().code(), Code::Unavailable);
    }
}
