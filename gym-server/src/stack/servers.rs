//! The implementations that a program has natively, by kind and name.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gym_client::ServerClient;
use gym_client::config::InstanceConfig;
use gym_core::{AgentServer, EnvironmentServer, Error, Handler, ModelServer, ResourcesServer, Result, ServerKind};
use serde::de::DeserializeOwned;

use crate::agent::SimpleAgent;
use crate::model::{OpenAiModel, Policy, ScriptedModel, VllmModel};
use crate::relay::Relay;
use crate::role::{Agent, Environment, Model, Resources, Site};

/// What an implementation is made of: one instance of the configuration.
#[derive(Debug)]
pub struct Build<'a> {
    /// Its block.
    pub instance: &'a InstanceConfig,
    /// Where it is served.
    pub site: &'a Site,
    /// Calls the other servers by name.
    pub client: &'a ServerClient,
}

impl Build<'_> {
    /// The block as a type of yours.
    ///
    /// # Errors
    /// `InvalidArgument` naming file, line and key of what does not fit.
    pub fn settings<T: DeserializeOwned>(&self) -> Result<T> {
        self.instance.settings_as().map_err(|error| Error::invalid(error.to_string()))
    }
}

type Factory = Arc<dyn Fn(&Build<'_>) -> Result<Arc<dyn Handler>> + Send + Sync>;

/// The implementations that a program has natively. A configuration's instance whose implementation is here runs in this
/// process; one with a Python `entrypoint` runs as a child.
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
}

impl Servers {
    /// None at all.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// The SDK's own: `simple_agent`, the `legacy_agent` relay, `openai_model`, `vllm_model` and `scripted_model`.
    #[must_use]
    pub fn stock() -> Self {
        Self::none()
            .agent("simple_agent", |build| Ok(SimpleAgent::new(build.settings()?, build.client.clone())))
            .environment("legacy_agent", |build| Ok(Relay::new(build.settings()?, build.client.clone())))
            .model("openai_model", |build| OpenAiModel::new(build.settings()?, &build.site.world))
            .model("vllm_model", |build| VllmModel::new(build.settings()?, &build.site.world))
            .model("scripted_model", |build| {
                Ok(ScriptedModel::with_default_policy(build.settings()?, &build.site.world))
            })
    }

    /// Has `scripted_model` answer by a policy of yours.
    #[must_use]
    pub fn scripted_policy(self, policy: impl Policy + Clone) -> Self {
        self.model("scripted_model", move |build| {
            Ok(ScriptedModel::new(build.settings()?, &build.site.world, policy.clone()))
        })
    }

    /// Adds an environment's resources server under an implementation name.
    #[must_use]
    pub fn resources<S: ResourcesServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.handler(ServerKind::Resources, implementation, move |build| {
            Ok(Arc::new(Resources::new(make(build)?, build.site)))
        })
    }

    /// Adds a model server under an implementation name.
    #[must_use]
    pub fn model<S: ModelServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.handler(ServerKind::Model, implementation, move |build| Ok(Arc::new(Model::new(make(build)?, build.site))))
    }

    /// Adds an agent server under an implementation name.
    #[must_use]
    pub fn agent<S: AgentServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.handler(ServerKind::Agent, implementation, move |build| Ok(Arc::new(Agent::new(make(build)?, build.site))))
    }

    /// Adds an environment server under an implementation name.
    #[must_use]
    pub fn environment<S: EnvironmentServer>(
        self,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<S> + Send + Sync + 'static,
    ) -> Self {
        self.handler(ServerKind::Environment, implementation, move |build| {
            Ok(Arc::new(Environment::new(make(build)?, build.site)))
        })
    }

    /// Adds any handler, for what the four roles do not cover.
    #[must_use]
    pub fn handler(
        mut self,
        kind: ServerKind,
        implementation: &str,
        make: impl Fn(&Build<'_>) -> Result<Arc<dyn Handler>> + Send + Sync + 'static,
    ) -> Self {
        self.factories.insert((kind, implementation.to_owned()), Arc::new(make));
        self
    }

    /// Whether the implementation is here.
    #[must_use]
    pub fn has(&self, kind: ServerKind, implementation: &str) -> bool {
        self.factories.contains_key(&(kind, implementation.to_owned()))
    }

    /// The implementations of a kind, in alphabetical order.
    pub fn names(&self, kind: ServerKind) -> impl Iterator<Item = &str> {
        self.factories.keys().filter(move |(known, _)| *known == kind).map(|(_, name)| name.as_str())
    }

    pub(crate) fn make(&self, build: &Build<'_>) -> Option<Result<Arc<dyn Handler>>> {
        let key = (build.instance.kind, build.instance.implementation.clone());
        self.factories.get(&key).map(|factory| factory(build))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.factories.keys()).finish()
    }
}
