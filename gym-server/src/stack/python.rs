//! Runs the Python servers of a configuration as child processes: starts them as NeMo Gym does, monitors them, and registers them
//! while they respond.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_client::Transports;
use gym_client::config::InstanceConfig;
use gym_client::launch::{ChildHandle, ChildSpec, ChildState, Launcher};
use gym_client::registry::LeaseKeeper;
use gym_core::registry::Registry;
use gym_core::transport::{ConnectOptions, InProcess, host_port};
use gym_core::{CallContext, CancelToken, Code, Endpoint, Error, Incarnation, Request, Result, World};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::stack::instance::{RunningServer, registration};
use crate::stack::options::StackOptions;

/// The interval at which a starting server is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The Python servers of a stack.
#[derive(Debug)]
pub(super) struct PythonServers {
    launcher: Launcher,
    servers: Vec<(InstanceConfig, Endpoint, ChildHandle)>,
    watchers: JoinSet<()>,
    stop: CancelToken,
}

impl PythonServers {
    /// Starts all servers, and waits until each has responded once and is registered.
    pub(super) async fn start(
        yaml: &str,
        instances: Vec<(InstanceConfig, String)>,
        options: &StackOptions,
        registry: &Arc<dyn Registry>,
        incarnation: Incarnation,
        world: &World,
    ) -> Result<Self> {
        let python = options.python.clone().ok_or_else(|| {
            Error::invalid(format!(
                "{} needs a Python interpreter with nemo-gym\n  fix: pass --python PATH (Python 3.13.14 or later), or activate its virtual environment",
                instances[0].0.name
            ))
        })?;
        let mut builder = Launcher::builder();
        if let Some(lines) = &options.lines {
            builder = builder.lines(Arc::clone(lines));
        }
        let launcher = builder.build().map_err(|error| Error::internal(error.to_string()))?;
        let mut servers = Self { launcher, servers: Vec::new(), watchers: JoinSet::new(), stop: CancelToken::new() };
        let started = servers.start_all(yaml, instances, &python, options, registry, incarnation, world).await;
        match started {
            Ok(()) => Ok(servers),
            Err(error) => {
                servers.stop(options.stop_grace).await;
                Err(error)
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // The parts of one start, used once.
    async fn start_all(
        &mut self,
        yaml: &str,
        instances: Vec<(InstanceConfig, String)>,
        python: &Path,
        options: &StackOptions,
        registry: &Arc<dyn Registry>,
        incarnation: Incarnation,
        world: &World,
    ) -> Result<()> {
        let mut ready = Vec::new();
        for (instance, host) in instances {
            let (folder, entrypoint) = find(&instance, &options.python_roots)?;
            let port = instance.port.ok_or_else(|| Error::invalid(format!("{} has no port", instance.name)))?;
            let endpoint = Endpoint::parse(&format!("http://{}", host_port(&host, port)))?;
            let mut spec = spec(&instance, yaml, python, &folder, &entrypoint).stop_grace(options.stop_grace);
            for (name, value) in &options.python_env {
                spec = spec.env(name, value);
            }
            let child = self.launcher.spawn(spec).await.map_err(|error| Error::invalid(error.to_string()))?;
            let labels = BTreeMap::from([
                ("dir_path".to_owned(), folder.display().to_string()),
                ("entrypoint".to_owned(), entrypoint.display().to_string()),
            ]);
            let (on_registered, registered) = watch::channel(false);
            let watching = keep_registered(WatchedServer {
                instance: instance.clone(),
                endpoint: endpoint.clone(),
                child: child.clone(),
                labels,
                registry: Arc::clone(registry),
                incarnation,
                world: world.clone(),
                stop: self.stop.clone(),
                ready: on_registered,
            });
            self.watchers.spawn(watching.boxed());
            ready.push((child.clone(), registered));
            self.servers.push((instance, endpoint, child));
        }
        let deadline = tokio::time::Instant::now() + options.start_timeout;
        for (child, mut registered) in ready {
            let mut events = child.events();
            let up = async {
                loop {
                    if *registered.borrow_and_update() {
                        return Ok(());
                    }
                    if let ChildState::GaveUp(report)
                    | ChildState::Exited(report)
                    | ChildState::Backoff { last: report, .. } = &*events.borrow_and_update()
                    {
                        return Err(Error::not_started(
                            Code::Unavailable,
                            format!("it exited while starting: {report}"),
                        ));
                    }
                    tokio::select! {
                        biased;
                        changed = registered.changed() => if changed.is_err() {
                            return Err(Error::not_started(Code::Unavailable, "it ended while starting"));
                        },
                        _ = events.changed() => {}
                    }
                }
            };
            tokio::time::timeout_at(deadline, up)
                .await
                .unwrap_or_else(|_| {
                    let waited = options.start_timeout;
                    Err(Error::not_started(Code::DeadlineExceeded, format!("it did not answer within {waited:?}")))
                })
                .map_err(|error| error.about(format!("start {}", child.name())))?;
        }
        Ok(())
    }

    pub(super) fn running(&self) -> impl Iterator<Item = RunningServer> {
        self.servers.iter().map(|(instance, endpoint, child)| {
            let pid = match &*child.events().borrow() {
                ChildState::Running { pid, .. } => format!("python (pid {pid})"),
                _ => "python".to_owned(),
            };
            RunningServer {
                name: instance.name.clone(),
                kind: instance.kind.to_string(),
                implementation: instance.implementation.clone(),
                url: endpoint.to_string(),
                runs_as: pid,
            }
        })
    }

    pub(super) async fn stop(mut self, grace: Duration) {
        self.stop.cancel();
        while self.watchers.join_next().await.is_some() {}
        if let Err(error) = self.launcher.shutdown(grace).await {
            tracing::warn!(%error, "a Python server was not stopped in order");
        }
    }
}

/// Returns the directory of a Python server and its entrypoint in that directory.
pub(super) fn find(instance: &InstanceConfig, roots: &[PathBuf]) -> Result<(PathBuf, PathBuf)> {
    let entrypoint = PathBuf::from(instance.entrypoint.as_deref().unwrap_or("app.py"));
    let folder = instance.folder();
    let looked: Vec<PathBuf> = roots.iter().map(|root| root.join(&folder)).collect();
    match looked.iter().find(|folder| folder.join(&entrypoint).is_file()) {
        Some(folder) => Ok((folder.clone(), entrypoint)),
        None => {
            let looked: Vec<String> = looked.iter().map(|folder| format!("    {}", folder.display())).collect();
            Err(Error::invalid(format!(
                "{}: {}: there is no {} in any of\n{}\n  fix: install the environment's package, or add its folder with \
                 --search-dir or NEMO_GYM_EXTRA_ROOTS",
                instance.origin,
                instance.name,
                entrypoint.display(),
                looked.join("\n")
            )))
        }
    }
}

fn spec(instance: &InstanceConfig, yaml: &str, python: &Path, folder: &Path, entrypoint: &Path) -> ChildSpec {
    let mut path = folder.as_os_str().to_owned();
    if let Some(inherited) = std::env::var_os("PYTHONPATH").filter(|inherited| !inherited.is_empty()) {
        path.push(":");
        path.push(inherited);
    }
    ChildSpec::new(&instance.name, python)
        .arg(entrypoint)
        .cwd(folder)
        .env("NEMO_GYM_CONFIG_DICT", yaml)
        .env("NEMO_GYM_CONFIG_PATH", &instance.name)
        .env("PYTHONPATH", path)
        // Unbuffered, so that output lines arrive immediately.
        .env("PYTHONUNBUFFERED", "1")
}

struct WatchedServer {
    instance: InstanceConfig,
    endpoint: Endpoint,
    child: ChildHandle,
    labels: BTreeMap<String, String>,
    registry: Arc<dyn Registry>,
    incarnation: Incarnation,
    world: World,
    stop: CancelToken,
    ready: watch::Sender<bool>,
}

/// Registers the server while it responds. While the server is down, rollouts fail with `Unavailable`; they resolve it again after
/// it restarts.
async fn keep_registered(watched: WatchedServer) {
    let mut events = watched.child.events();
    let mut lease: Option<LeaseKeeper> = None;
    loop {
        let state = events.borrow_and_update().clone();
        match &state {
            ChildState::Running { pid, incarnation } => {
                let life = Incarnation(watched.incarnation.0 + u64::from(*incarnation));
                let up = tokio::select! {
                    biased;
                    () = watched.stop.cancelled() => break,
                    _ = events.changed() => continue,
                    up = register(&watched, *pid, life) => up,
                };
                lease = Some(up);
                watched.ready.send_replace(true);
                tracing::info!(server = watched.instance.name, pid, "serves");
            }
            // `Exited` is followed by `Backoff` immediately, and a watch channel shows only the latest value.
            ChildState::Exited(report) | ChildState::Backoff { last: report, .. } => {
                tracing::warn!(server = watched.instance.name, "{report}");
                if let Some(lease) = lease.take() {
                    lease.end(Duration::from_secs(2)).await;
                }
            }
            ChildState::GaveUp(report) => {
                tracing::error!(server = watched.instance.name, "restarted too often; given up: {report}");
                if let Some(lease) = lease.take() {
                    lease.end(Duration::from_secs(2)).await;
                }
            }
            _ => {}
        }
        if state.is_final() {
            break;
        }
        tokio::select! {
            biased;
            () = watched.stop.cancelled() => break,
            changed = events.changed() => if changed.is_err() { break },
        }
    }
    if let Some(lease) = lease {
        lease.end(Duration::from_secs(2)).await;
    }
}

/// Waits until the server sends any response, then registers it.
async fn register(watched: &WatchedServer, pid: u32, incarnation: Incarnation) -> LeaseKeeper {
    let transports = Transports::from_features(InProcess::new());
    loop {
        let cx = CallContext::within(Duration::from_secs(5));
        let answered = async {
            let options = ConnectOptions::default();
            let channel = transports.connect(&cx, std::slice::from_ref(&watched.endpoint), &options).await?;
            channel.call(Request::get(cx.child(), "/")).await
        };
        match answered.await {
            Ok(_) => {
                let mut labels = watched.labels.clone();
                labels.insert("pid".to_owned(), pid.to_string());
                let endpoints = vec![watched.endpoint.clone()];
                let wanted = registration(&watched.instance, endpoints, incarnation, labels, &watched.world);
                match LeaseKeeper::start(Arc::clone(&watched.registry), &cx, wanted).await {
                    Ok(lease) => return lease,
                    Err(error) => {
                        tracing::warn!(server = watched.instance.name, %error, "not registered; trying again")
                    }
                }
            }
            Err(error) => tracing::trace!(server = watched.instance.name, %error, "does not answer yet"),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
