//! The worker types of a program by name, and the inputs from which their ranks start.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use gym_client::transport::Transports;
use gym_core::group::batch::json;
use gym_core::group::{HostOptions, Worker, WorkerEnv, WorkerHost};
use gym_core::transport::{InProcess, TransportPolicy};
use gym_core::{Code, Error, Result};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::provision::deployment::LaunchSpec;
use crate::provision::place::{RankPlace, Rendezvous};
use crate::provision::variables::{RankEnvironment, VariableLayers, Variables, process_variables};

type Start = dyn Fn(WorkerEnv, Box<RawValue>, HostOptions) -> BoxFuture<'static, Result<WorkerHost>> + Send + Sync;
type Configure = dyn Fn(&RankPlace) -> RankOverrides + Send + Sync;

/// The worker types of one program. Cheap to clone.
///
/// ```no_run
/// # use gym_group::{Handles, Method, Methods, Payload, Worker, WorkerEnv}; use gym_core::{CallContext, Result};
/// # struct Counter;
/// # #[derive(Clone, Copy, Debug)] struct Add;
/// # impl Method for Add { const NAME: &'static str = "add"; type Args = u64; type Reply = u64; }
/// # impl Worker for Counter {
/// #     type Init = u64;
/// #     fn start(_: WorkerEnv, _: u64) -> Result<Self> { Ok(Self) }
/// #     fn methods(methods: &mut Methods<Self>) { methods.exclusive(Add); }
/// # }
/// # impl Handles<Add> for Counter {
/// #     async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> { Ok(call.value.into()) }
/// # }
/// use gym_group::{WorkerKind, Workers};
///
/// fn workers() -> Workers {
///     Workers::new().with("counter", WorkerKind::of::<Counter>())
/// }
///
/// fn main() {
///     workers().enter(); // the first line: in a worker process it does not return
///     // … the controller
/// }
/// ```
#[derive(Clone, Default)]
pub struct Workers {
    kinds: Arc<BTreeMap<String, WorkerKind>>,
    transports: Option<Transports>,
}

/// One worker type: creates its workers, and adds variables to the environment of their ranks.
#[derive(Clone)]
pub struct WorkerKind {
    start: Arc<Start>,
    host: HostOptions,
    defaults: Variables,
    configure: Option<Arc<Configure>>,
}

/// Variables and `init` keys that a worker type derives from a rank's place.
///
/// ```
/// use gym_group::prelude::*;
/// use gym_group::{RankOverrides, RankPlace, WorkerKind};
/// # #[derive(serde::Deserialize)]
/// # struct Settings {
/// #     seed: u64,
/// # }
/// # struct Sampler(u64);
/// # worker! {
/// #     impl Worker for Sampler as sampler {
/// #         fn start(_: WorkerEnv, settings: Settings) -> Result<Self> { Ok(Self(settings.seed)) }
/// #         shared async fn seed(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> { Ok(self.0.into()) }
/// #     }
/// # }
///
/// fn configure(place: &RankPlace) -> RankOverrides {
///     RankOverrides::default().with_init("seed", 1_000 + place.rank)
/// }
///
/// let kind = WorkerKind::of::<Sampler>().with_configure(configure);
/// assert_eq!(configure(&RankPlace::on_one_node(3, 8)).init["seed"], 1_003);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RankOverrides {
    /// Environment variables; they take precedence over all others.
    pub variables: Variables,
    /// Keys that replace those of the group's `init`, which must then be an object.
    pub init: Map<String, Value>,
}

impl WorkerKind {
    /// Returns the kind that creates workers of type `W`.
    #[must_use]
    pub fn of<W: Worker>() -> Self {
        let start =
            |env: WorkerEnv, init: Box<RawValue>, host: HostOptions| -> BoxFuture<'static, Result<WorkerHost>> {
                Box::pin(async move {
                    let init = json::read::<W::Init>(init.get().as_bytes()).map_err(|error| {
                        let wanted = std::any::type_name::<W::Init>();
                        Error::invalid(format!("the worker's init is not a {wanted}: {error}"))
                            .about(format!("start rank {} of {}", env.rank, env.group))
                    })?;
                    WorkerHost::start::<W>(env, init, &host).await
                })
            };
        Self { start: Arc::new(start), host: HostOptions::default(), defaults: Variables::new(), configure: None }
    }

    /// Sets the options of each rank's host. Default: [`HostOptions::default`].
    #[must_use]
    pub fn with_host(mut self, options: HostOptions) -> Self {
        self.host = options;
        self
    }

    /// Sets environment variables over which all other layers take precedence.
    #[must_use]
    pub fn with_defaults(mut self, defaults: Variables) -> Self {
        self.defaults = defaults;
        self
    }

    /// Sets a function that the controller calls for each rank before it starts, like NeMo RL's `configure_worker`.
    #[must_use]
    pub fn with_configure(mut self, configure: impl Fn(&RankPlace) -> RankOverrides + Send + Sync + 'static) -> Self {
        self.configure = Some(Arc::new(configure));
        self
    }

    pub(crate) fn defaults(&self) -> &Variables {
        &self.defaults
    }

    pub(crate) fn configured(&self, place: &RankPlace) -> RankOverrides {
        self.configure.as_ref().map(|configure| configure(place)).unwrap_or_default()
    }

    /// Creates the worker and starts its host.
    pub(crate) async fn start(&self, env: WorkerEnv, init: Box<RawValue>) -> Result<WorkerHost> {
        (self.start)(env, init, self.host.clone()).await
    }
}

impl RankOverrides {
    /// Returns overrides with these variables and no `init` keys.
    #[must_use]
    pub fn variables(variables: Variables) -> Self {
        Self { variables, ..Self::default() }
    }

    /// Adds a key that replaces the one in the group's `init`.
    #[must_use]
    pub fn with_init(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.init.insert(key.to_owned(), value.into());
        self
    }

    /// Returns `init` with these keys in place of its own.
    pub(crate) fn over(self, init: &RawValue) -> Result<Box<RawValue>> {
        if self.init.is_empty() {
            return Ok(init.to_owned());
        }
        let mut merged: Map<String, Value> = serde_json::from_str(init.get()).map_err(|error| {
            Error::invalid(format!("the worker type adds keys to init, which is no object: {error}"))
        })?;
        merged.extend(self.init);
        serde_json::value::to_raw_value(&merged)
            .map_err(|error| Error::internal("init cannot be written as JSON").caused_by(error))
    }
}

impl Workers {
    /// Creates a list without worker types.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a worker type; it replaces an earlier type of the same name.
    #[must_use]
    pub fn with(self, name: impl Into<String>, kind: WorkerKind) -> Self {
        let mut kinds = (*self.kinds).clone();
        kinds.insert(name.into(), kind);
        Self { kinds: Arc::new(kinds), ..self }
    }

    /// Sets the transports over which worker processes listen. Default: [`Transports::from_features`].
    #[must_use]
    pub fn over(self, transports: Transports) -> Self {
        Self { transports: Some(transports), ..self }
    }

    /// Returns the names of the worker types, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }

    pub(crate) fn transports(&self) -> Transports {
        self.transports.clone().unwrap_or_else(|| Transports::from_features(InProcess::new()))
    }

    /// Returns the type of that name.
    ///
    /// # Errors
    /// `NotFound`, with the registered names.
    pub(crate) fn kind(&self, name: &str) -> Result<&WorkerKind> {
        self.kinds.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.names().collect();
            let message = format!(
                "no worker type `{name}`; this program has {}: register it with Workers::with",
                if known.is_empty() { "none".to_owned() } else { known.join(", ") }
            );
            Error::not_started(Code::NotFound, message)
        })
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.kinds.keys()).finish()
    }
}

impl fmt::Debug for WorkerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerKind").field("defaults", &self.defaults).finish_non_exhaustive()
    }
}

/// Returns the default variables. Some transports read variables when they are loaded, so a worker must start with them. The worker
/// type's own variables take precedence over them.
fn defaults(kind: &WorkerKind, transports: &Transports, policy: Option<&TransportPolicy>) -> Variables {
    let policy = policy.cloned().unwrap_or_else(TransportPolicy::unconfigured);
    let variables = transports.clone().with_policy(policy).variables();
    let mut defaults: Variables =
        variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    defaults.extend(kind.defaults().clone());
    defaults
}

/// Returns the inputs of one rank's start: its environment, and the `init` of its worker.
pub(crate) fn start_inputs(
    kind: &WorkerKind,
    transports: &Transports,
    spec: &LaunchSpec,
    place: &RankPlace,
    rendezvous: &Rendezvous,
) -> Result<(RankEnvironment, Box<RawValue>)> {
    let configured = kind.configured(place);
    let layers = VariableLayers {
        defaults: defaults(kind, transports, spec.transport_policy.as_ref()),
        process: process_variables(),
        controller: spec.controller.as_ref(),
        group: Some(&spec.variables),
        configured: configured.variables.clone(),
    };
    Ok((layers.for_rank(place, rendezvous), configured.over(&spec.init)?))
}

#[cfg(test)]
pub(super) mod tests {
    use gym_core::CallContext;
    use gym_core::group::Payload;
    use gym_core::worker;

    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).expect("JSON")
    }

    #[test]
    fn c140_what_the_configure_hook_adds_goes_over_the_groups_init() {
        let configured = RankOverrides::default().with_init("seed", 1024).with_init("name", "b");
        let merged = configured.over(&raw(r#"{"name":"a","size":3}"#)).expect("merges");
        assert_eq!(merged.get(), r#"{"name":"b","size":3,"seed":1024}"#);
    }

    #[test]
    fn an_init_that_nothing_is_added_to_stays_bit_for_bit() {
        let init = raw("[1E5, 12345678901234567890123]");
        assert_eq!(RankOverrides::default().over(&init).expect("stays").get(), init.get());
        assert_eq!(
            RankOverrides::default().with_init("a", 1).over(&init).expect_err("no object").code(),
            Code::InvalidArgument
        );
    }

    #[test]
    fn c193_an_unknown_worker_type_is_named_with_those_there_are() {
        let error = Workers::new().kind("polcy").expect_err("unknown");
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.to_string().contains("`polcy`") && error.to_string().contains("Workers::with"), "{error}");
    }

    /// A worker with a method that does nothing.
    pub(in crate::provision) struct Idle;
    worker! {
        impl Worker for Idle as idle {
            fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self) }
            exclusive async fn nothing(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> { Ok(().into()) }
        }
    }

    #[cfg(feature = "rdma")]
    #[test]
    fn a_rank_that_may_be_reached_by_ucx_starts_with_what_ucx_reads_at_its_load() {
        let own = Variables::from([("UCX_HANDLE_ERRORS".to_owned(), "bt".to_owned())]);
        let kind = WorkerKind::of::<Idle>().with_defaults(own);
        assert_eq!(
            defaults(&kind, &Transports::standard(), Some(&TransportPolicy::auto()))["UCX_MEM_MMAP_HOOK_MODE"],
            "none"
        );
        assert_eq!(
            defaults(&kind, &Transports::standard(), Some(&TransportPolicy::auto()))["UCX_HANDLE_ERRORS"],
            "bt",
            "the worker type's own win"
        );
        for without in [None, Some(TransportPolicy::unconfigured())] {
            assert_eq!(defaults(&kind, &Transports::standard(), without.as_ref()).len(), 1, "{without:?}");
        }
    }
}
