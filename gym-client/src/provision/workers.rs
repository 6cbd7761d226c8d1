//! The worker types of a program, by name, and how a process becomes one of them.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::{Code, Error, Handler, HostOptions, Incarnation, Listener, Result, Worker, WorkerEnv, WorkerHost};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::environment::{RankPlace, Variables, of_this_process};
use super::handshake::{ASSIGNMENT_VARIABLE, Answer, Assignment, WORKER_ROLE};
use crate::launch;

/// Time for the calls that run when a worker process is told to end. The launcher's own grace comes first if it is shorter.
const DRAIN_GRACE: Duration = Duration::from_secs(30);
/// Exit status of a process that could not become a worker.
const START_FAILED: i32 = 1;

static ENTERED: AtomicBool = AtomicBool::new(false);

type Start = dyn Fn(WorkerEnv, Box<RawValue>, HostOptions) -> BoxFuture<'static, Result<WorkerHost>> + Send + Sync;
type Configure = dyn Fn(&RankPlace) -> Configured + Send + Sync;

/// The worker types of one program. Cheap to clone.
///
/// ```no_run
/// # use gym_core::{CallContext, Handles, Method, Methods, Payload, Result, Worker, WorkerEnv};
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
/// use gym_client::provision::{WorkerKind, Workers};
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
}

/// One worker type: how it is made, and what it adds to the environment of its ranks.
#[derive(Clone)]
pub struct WorkerKind {
    start: Arc<Start>,
    host: HostOptions,
    defaults: Variables,
    configure: Option<Arc<Configure>>,
}

/// What a worker type makes of a rank's place.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Configured {
    /// Environment variables; they win over all others.
    pub variables: Variables,
    /// Keys that are put over those of the group's `init`, which must be an object then.
    pub init: Map<String, Value>,
}

impl WorkerKind {
    /// Makes workers of type `W`.
    #[must_use]
    pub fn of<W: Worker>() -> Self {
        let start =
            |env: WorkerEnv, init: Box<RawValue>, host: HostOptions| -> BoxFuture<'static, Result<WorkerHost>> {
                Box::pin(async move {
                    let init = serde_json::from_str::<W::Init>(init.get()).map_err(|error| {
                        let wanted = std::any::type_name::<W::Init>();
                        Error::invalid(format!("the worker's init is not a {wanted}: {error}"))
                            .about(format!("start rank {} of {}", env.rank, env.group))
                    })?;
                    WorkerHost::start::<W>(env, init, &host).await
                })
            };
        Self { start: Arc::new(start), host: HostOptions::default(), defaults: Variables::new(), configure: None }
    }

    /// Bounds of each rank's host.
    #[must_use]
    pub fn with_host(mut self, options: HostOptions) -> Self {
        self.host = options;
        self
    }

    /// Environment variables that everything else wins over.
    #[must_use]
    pub fn with_defaults(mut self, defaults: Variables) -> Self {
        self.defaults = defaults;
        self
    }

    /// Asked for each rank before it is started, in the controller: NeMo RL's `configure_worker`.
    #[must_use]
    pub fn with_configure(mut self, configure: impl Fn(&RankPlace) -> Configured + Send + Sync + 'static) -> Self {
        self.configure = Some(Arc::new(configure));
        self
    }

    pub(crate) fn defaults(&self) -> &Variables {
        &self.defaults
    }

    pub(crate) fn configured(&self, place: &RankPlace) -> Configured {
        self.configure.as_ref().map(|configure| configure(place)).unwrap_or_default()
    }

    /// Makes the worker.
    pub(crate) async fn start(&self, env: WorkerEnv, init: Box<RawValue>) -> Result<WorkerHost> {
        (self.start)(env, init, self.host.clone()).await
    }
}

impl Configured {
    /// Variables only.
    #[must_use]
    pub fn variables(variables: Variables) -> Self {
        Self { variables, ..Self::default() }
    }

    /// The same with one key over those of the group's `init`.
    #[must_use]
    pub fn with_init(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.init.insert(key.to_owned(), value.into());
        self
    }

    /// `init` with the keys of this put over its own.
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
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with one more type; a later one of the same name replaces the earlier.
    #[must_use]
    pub fn with(self, name: impl Into<String>, kind: WorkerKind) -> Self {
        let mut kinds = (*self.kinds).clone();
        kinds.insert(name.into(), kind);
        Self { kinds: Arc::new(kinds) }
    }

    /// Must be the first line of `main` in every program that has worker processes; it calls [`launch::enter`] too.
    ///
    /// Worker processes are this program, run again with a hidden first argument. In such a process this function does not
    /// return: the process makes its worker, says where it serves, and serves until it is told to end. In all others it
    /// returns at once.
    pub fn enter(&self) {
        launch::enter();
        if std::env::args_os().nth(1).is_some_and(|role| role == WORKER_ROLE) {
            std::process::exit(self.be_worker());
        }
        ENTERED.store(true, Ordering::Release);
    }

    /// The type of that name.
    ///
    /// # Errors
    /// `NotFound` naming those there are.
    pub(crate) fn kind(&self, name: &str) -> Result<&WorkerKind> {
        self.kinds.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.kinds.keys().map(String::as_str).collect();
            let message = format!(
                "no worker type `{name}`; this program has {}: register it with Workers::with",
                if known.is_empty() { "none".to_owned() } else { known.join(", ") }
            );
            Error::not_started(Code::NotFound, message)
        })
    }

    fn be_worker(&self) -> i32 {
        // Before there are other threads.
        super::affinity::bind_to_gpu();
        let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("gym worker: start a runtime: {error}");
                return START_FAILED;
            }
        };
        runtime.block_on(async {
            let assignment = match std::env::var(ASSIGNMENT_VARIABLE) {
                Ok(text) => serde_json::from_str::<Assignment>(&text).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let assignment = match assignment {
                Ok(assignment) => assignment,
                Err(error) => {
                    eprintln!("gym worker: {ASSIGNMENT_VARIABLE}: {error}; {WORKER_ROLE} is for worker processes only");
                    return START_FAILED;
                }
            };
            let token = assignment.token.clone();
            match self.make(assignment).await {
                Ok((host, listener, handler)) => {
                    let answer = Answer::Serves(listener.endpoints().to_vec());
                    // Without a reader the controller is gone, and this process with it in a moment.
                    let _ = say(&answer.line(&token));
                    serve_until_told(host, listener, handler).await
                }
                Err(error) => {
                    let _ = say(&Answer::Failed(error.to_string()).line(&token));
                    eprintln!("gym worker: {error}");
                    START_FAILED
                }
            }
        })
    }

    async fn make(&self, assignment: Assignment) -> Result<(WorkerHost, Box<dyn Listener>, Arc<dyn Handler>)> {
        let Assignment { worker, group, rank, world_size, local_rank, node_rank, incarnation, door, init, .. } =
            assignment;
        let mut env = WorkerEnv::new(group, rank, world_size);
        env.local_rank = local_rank;
        env.node_rank = node_rank;
        env.incarnation = Incarnation(incarnation);
        env.variables = of_this_process();
        let host = self.kind(&worker)?.start(env, init).await?;
        let (listener, handler) = door.open(Arc::new(host.clone())).await?;
        Ok((host, listener, handler))
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

/// Whether [`Workers::enter`] ran in this process, so that running the program again will not run its `main` twice.
pub(crate) fn entered() -> bool {
    ENTERED.load(Ordering::Acquire)
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()
}

async fn serve_until_told(host: WorkerHost, listener: Box<dyn Listener>, handler: Arc<dyn Handler>) -> i32 {
    let drain = CancellationToken::new();
    let told = drain.clone();
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let [Ok(mut interrupt), Ok(mut terminate)] = signals else {
        eprintln!("gym worker: cannot listen for signals");
        return START_FAILED;
    };
    let watch = tokio::spawn(async move {
        tokio::select! { biased;
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        told.cancel();
    });
    let served = crate::serve(listener, handler, drain, DRAIN_GRACE).await;
    watch.abort();
    // Its calls have ended or been broken by now; a thread that blocks is left to the end of the process.
    let stopped = host.stop(Duration::from_secs(1)).await;
    match served.and(stopped) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("gym worker: {error}");
            START_FAILED
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).expect("JSON")
    }

    #[test]
    fn c140_what_the_configure_hook_adds_goes_over_the_groups_init() {
        let configured = Configured::default().with_init("seed", 1024).with_init("name", "b");
        let merged = configured.over(&raw(r#"{"name":"a","size":3}"#)).expect("merges");
        assert_eq!(merged.get(), r#"{"name":"b","size":3,"seed":1024}"#);
    }

    #[test]
    fn an_init_that_nothing_is_added_to_stays_bit_for_bit() {
        let init = raw("[1E5, 12345678901234567890123]");
        assert_eq!(Configured::default().over(&init).expect("stays").get(), init.get());
        assert_eq!(
            Configured::default().with_init("a", 1).over(&init).expect_err("no object").code(),
            Code::InvalidArgument
        );
    }

    #[test]
    fn c193_an_unknown_worker_type_is_named_with_those_there_are() {
        let error = Workers::new().kind("polcy").expect_err("unknown");
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.to_string().contains("`polcy`") && error.to_string().contains("Workers::with"), "{error}");
    }
}
