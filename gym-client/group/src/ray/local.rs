//! A Ray head of this machine, for the address `local`: started for this program, and ended with it.
//!
//! The head is a child of the [`Launcher`], so it ends with this program, however that ends. `ray stop` is not used: it ends every Ray process of the
//! machine.

use std::fmt;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use gym_client::launch::{
    ChildHandle, ChildSpec, ChildState, LaunchError, Launcher, LineSink, OutputTail, RestartPolicy,
};
use gym_core::base::temporary_folder;
use gym_core::{CallContext, Code, Error, Execution, Result};
use parking_lot::Mutex;
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;

use crate::ray::address::RayAddress;
use crate::ray::dashboard::{RayDashboard, RayVersion};

/// The port of a head, by which nodes and drivers find it.
const PORT: u16 = 6379;
/// The label of a head with that port, because the dashboard does not return it.
const PORT_LABEL: &str = "gym-head-port";
/// The port of Ray Client.
const CLIENT_PORT: u16 = 10001;
/// The port of the agent that starts jobs.
const AGENT_PORT: u16 = 52365;
/// Ports that are tried after one that is taken.
const PORTS_TRIED: u16 = 200;
/// Starts of a head, each with other ports, while other programs take them.
const ATTEMPTS: u32 = 3;
/// Limit of a request that looks whether a dashboard listens.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between these requests while a head starts, which takes 4 s and more.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Time between the request to stop and the kill. Ray's processes end within 2 s.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);
/// Prefix of the names of the directories of heads.
const FOLDER_PREFIX: &str = "gymray-";
/// Time for which the directory of a head stays whose program was killed, or which did not start: its error names the logs there.
const FOLDER_KEPT: Duration = Duration::from_secs(3_600);
/// Ray puts Unix sockets below its directory, whose paths have at most 107 bytes:
/// `/session_2026-11-24_03-27-23_413844_1154300/sockets/plasma_store.1` has 67 of them.
const FOLDER_BYTES_MAX: usize = 40;

/// A Ray head of this machine. Dropping it kills a head that it started.
pub struct LocalHead {
    address: RayAddress,
    version: RayVersion,
    cluster: String,
    note: Option<String>,
    own: Option<OwnHead>,
}

/// A head that this process started.
struct OwnHead {
    launcher: Launcher,
    folder: HeadFolder,
    watch: JoinHandle<()>,
}

/// The ports of a head.
struct HeadPorts {
    head: u16,
    dashboard: u16,
    client: u16,
    agent: u16,
}

impl fmt::Debug for LocalHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalHead").field("address", &self.address).field("own", &self.is_own()).finish_non_exhaustive()
    }
}

impl Drop for OwnHead {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl LocalHead {
    /// Returns the head of this machine that responds at the dashboard of `address`, and starts one if there is none.
    ///
    /// # Errors
    /// Those of [`LocalHead::find`] and [`LocalHead::start_new`].
    ///
    /// # Cancel safety
    /// Dropping the future kills the head.
    pub async fn start(cx: &CallContext, address: &RayAddress, program: &Path) -> Result<Self> {
        match Self::find(cx, address).await? {
            Some(found) => Ok(found),
            None => Self::start_new(cx, address, program).await,
        }
    }

    /// Starts a head with `program start --head`, and waits until it lists itself as alive. `program` is `ray`, or its path. The caller must have called
    /// [`launch::enter`](gym_client::launch::enter) first, as [`Workers::enter`](crate::Workers::enter) does.
    ///
    /// The head has the ports 6379 and 8265, or the next ones that are
    /// free; [`LocalHead::note`] says so. Its dashboard accepts connections of this machine only.
    ///
    /// # Errors
    /// `FailedPrecondition` if Ray is not installed or the head ends at once, with its last lines; `DeadlineExceeded` if it takes longer than `cx` allows.
    ///
    /// # Cancel safety
    /// Dropping the future kills the head.
    pub async fn start_new(cx: &CallContext, address: &RayAddress, program: &Path) -> Result<Self> {
        // Dropping the launcher kills what it has started.
        let started = cx.bound(Execution::Finished, Self::start_own(cx, address, program));
        // Boxed because the future is large.
        Box::pin(started).await.map_err(|error| error.about(format!("start a Ray head on this machine for {address}")))
    }

    /// Returns the head of this machine that responds at the dashboard of `address`; `None` if there is none. It is never stopped.
    ///
    /// # Errors
    /// `FailedPrecondition` if it requires another token.
    pub async fn find(cx: &CallContext, address: &RayAddress) -> Result<Option<Self>> {
        let port = address.dashboard_port();
        if is_free(port) {
            return Ok(None);
        }
        let found = RayDashboard::probe(&cx.child().at_most(PROBE_TIMEOUT), address).await?;
        let Some((dashboard, version)) = found else { return Ok(None) };
        let nodes = dashboard.nodes(&cx.child().at_most(PROBE_TIMEOUT)).await?;
        let labelled =
            nodes.iter().find_map(|node| node.labels.get(PORT_LABEL).filter(|_| node.is_head_node && node.is_alive()));
        let cluster = match labelled {
            Some(port) => format!("127.0.0.1:{port}"),
            // A head of somebody else: Ray's own tools find it if it has not the usual port.
            None if is_free(PORT) => "auto".to_owned(),
            None => format!("127.0.0.1:{PORT}"),
        };
        let address = RayAddress::of_local_head(&cluster, address.source(), port);
        Ok(Some(Self { address, version, cluster, note: None, own: None }))
    }

    async fn start_own(cx: &CallContext, address: &RayAddress, program: &Path) -> Result<Self> {
        let mut attempt = 1;
        loop {
            let (ports, note) = HeadPorts::choose(address.dashboard_port())?;
            match Self::start_at(cx, address, program, &ports).await {
                // Another program, perhaps another head, has taken a port since, and may have ended already.
                Err(error)
                    if error.code() == Code::FailedPrecondition
                        && attempt < ATTEMPTS
                        && (!ports.are_free() || error.to_string().contains(IN_USE)) =>
                {
                    tracing::debug!(%error, attempt, "a port of the Ray head was taken; starting it with others");
                    attempt += 1;
                }
                started => return started.map(|head| Self { note, ..head }),
            }
        }
    }

    async fn start_at(cx: &CallContext, address: &RayAddress, program: &Path, ports: &HeadPorts) -> Result<Self> {
        let folder = tokio::task::spawn_blocking(HeadFolder::create).await;
        let folder = folder.map_err(|error| Error::internal("create a directory").caused_by(error))??;
        let output = OutputTail::default();
        let launcher =
            Launcher::builder().lines(keeps(&output)).orphan_grace(STOP_TIMEOUT).build().map_err(of_launch)?;
        let child = launcher.spawn(ports.spec(program, &folder.path)).await.map_err(|error| {
            let _ = std::fs::remove_dir(&folder.path);
            of_launch(error)
        })?;
        let cluster = format!("127.0.0.1:{}", ports.head);
        let started = RayAddress::of_local_head(&cluster, address.source(), ports.dashboard);
        let version = ready(cx, &child, &started, &output, &folder.path).await?;
        let watch = tokio::spawn(watch(child, output));
        Ok(Self { address: started, version, cluster, note: None, own: Some(OwnHead { launcher, folder, watch }) })
    }

    /// Returns the address at which this program finds the cluster.
    #[must_use]
    pub fn address(&self) -> &RayAddress {
        &self.address
    }

    /// Returns the version of Ray.
    #[must_use]
    pub fn version(&self) -> &RayVersion {
        &self.version
    }

    /// Returns the address for `ray.init`, such as `127.0.0.1:6379`; `auto` for a head of somebody else with another port.
    #[must_use]
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Returns `true` if this program started the head, and will stop it.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// Returns what a user should know: the ports, if the usual ones were taken.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Stops the head and removes its files, if this program started it. No other Ray process of the machine is touched.
    ///
    /// # Errors
    /// `Internal` if a process does not end after SIGKILL.
    ///
    /// # Cancel safety
    /// Dropping the future kills the head.
    pub async fn stop(self) -> Result<()> {
        let Some(own) = self.own else { return Ok(()) };
        own.watch.abort();
        own.launcher.shutdown(STOP_TIMEOUT).await.map_err(of_launch)?;
        let _ = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(&own.folder.path)).await;
        Ok(())
    }
}

/// The head that the reservations of this process share. Locked during a start and a stop, so that no reservation finds a head that is about to end.
static SHARED: tokio::sync::Mutex<Weak<LocalHead>> = tokio::sync::Mutex::const_new(Weak::new());

/// A share in the head of this process, which ends with the last share.
#[derive(Debug)]
pub(super) struct HeadShare(Mutex<Option<Arc<LocalHead>>>);

impl HeadShare {
    /// Returns the head of this process, and starts it for the first share.
    pub(super) async fn take(cx: &CallContext, address: &RayAddress) -> Result<(Self, RayAddress)> {
        let shared = async { Ok(SHARED.lock().await) };
        let mut shared = cx.bound(Execution::NotStarted, shared).await?;
        let head = match shared.upgrade() {
            Some(head) => head,
            None => {
                let head = Arc::new(LocalHead::start(cx, address, Path::new("ray")).await?);
                tracing::info!(address = %head.address, own = head.is_own(), note = head.note(), "the Ray head of this machine runs");
                *shared = Arc::downgrade(&head);
                head
            }
        };
        let address = head.address().clone();
        Ok((Self(Mutex::new(Some(head))), address))
    }

    /// Gives the share back. Later calls have no effect.
    pub(super) async fn give_back(&self) -> Result<()> {
        let head = self.0.lock().take();
        let Some(head) = head else { return Ok(()) };
        let _shared = SHARED.lock().await;
        match Arc::into_inner(head) {
            Some(head) => head.stop().await,
            None => Ok(()),
        }
    }
}

impl HeadPorts {
    /// Chooses ports that are free, and says which of the usual ones are taken.
    fn choose(dashboard: u16) -> Result<(Self, Option<String>)> {
        let ports = Self {
            head: first_free(PORT)?,
            dashboard: first_free(dashboard)?,
            // Above 10001, Ray's workers have theirs, up to 19999.
            client: if is_free(CLIENT_PORT) { CLIENT_PORT } else { first_free(20001)? },
            agent: first_free(AGENT_PORT)?,
        };
        let moved = [(PORT, ports.head), (dashboard, ports.dashboard)];
        let taken: Vec<String> =
            moved.iter().filter(|(usual, used)| usual != used).map(|(usual, _)| usual.to_string()).collect();
        let note = (!taken.is_empty()).then(|| {
            let taken = if taken.len() == 1 {
                format!("port {} is", taken[0])
            } else {
                format!("ports {} are", taken.join(" and "))
            };
            let used = format!(
                "{taken} taken, so this head has the port {} and the dashboard http://127.0.0.1:{}",
                ports.head, ports.dashboard
            );
            let mut fix = "free it (`ss -ltnp` shows the program)".to_owned();
            if ports.dashboard != dashboard {
                fix = format!(
                    "{fix}, or set ray_dashboard_address to http://127.0.0.1:{} for other programs that use this head",
                    ports.dashboard
                );
            }
            format!("{used}\n  fix: {fix}")
        });
        Ok((ports, note))
    }

    fn are_free(&self) -> bool {
        [self.head, self.dashboard, self.client, self.agent].into_iter().all(is_free)
    }

    fn spec(&self, program: &Path, folder: &Path) -> ChildSpec {
        ChildSpec::new("ray", program)
            .arg("start")
            .arg("--head")
            .arg("--block")
            .arg(format!("--port={}", self.head))
            .arg("--dashboard-host=127.0.0.1")
            .arg(format!("--dashboard-port={}", self.dashboard))
            .arg(format!("--ray-client-server-port={}", self.client))
            .arg(format!("--dashboard-agent-listen-port={}", self.agent))
            .arg(format!("--labels={PORT_LABEL}={}", self.head))
            .arg(format!("--temp-dir={}", folder.display()))
            .arg("--disable-usage-stats")
            .arg("--log-color=false")
            // `local` may come from this variable, which means something else to Ray's processes.
            .env("RAY_ADDRESS", format!("127.0.0.1:{}", self.head))
            .env("PYTHONUNBUFFERED", "1")
            .restart(RestartPolicy::NEVER)
            .stop_grace(STOP_TIMEOUT)
    }
}

/// The message of each program whose port another one has (`EADDRINUSE`).
const IN_USE: &str = "ddress already in use";

/// Returns `true` if no program listens on this port of this machine. Does not listen itself, not even for a moment: a head that starts now could not.
fn is_free(port: u16) -> bool {
    let bind = |socket: TcpSocket| {
        socket.set_reuseaddr(true)?;
        socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
    };
    TcpSocket::new_v4().and_then(bind).is_ok()
}

fn first_free(from: u16) -> Result<u16> {
    let found = (from..from.saturating_add(PORTS_TRIED)).find(|port| is_free(*port));
    found.ok_or_else(|| {
        let message = format!(
            "no port from {from} to {} is free\n  fix: free one; `ss -ltnp` shows who listens",
            from.saturating_add(PORTS_TRIED)
        );
        Error::not_started(Code::ResourceExhausted, message)
    })
}

/// The directory of a head, which only this user may enter.
struct HeadFolder {
    path: PathBuf,
    /// Locked until this program ends, however that ends.
    _held: File,
}

impl HeadFolder {
    /// Creates a directory, after it has removed those of heads that ended long ago without removing theirs.
    fn create() -> Result<Self> {
        let name = format!("{FOLDER_PREFIX}{:08x}", fastrand::u32(..));
        let base = temporary_folder(FOLDER_BYTES_MAX - 1 - name.len());
        sweep(&base, SystemTime::UNIX_EPOCH + gym_core::World::real().now());
        let path = base.join(name);
        let created = std::fs::DirBuilder::new().mode(0o700).create(&path).and_then(|()| {
            let held = File::open(&path)?;
            held.try_lock()?;
            Ok(held)
        });
        let held = created.map_err(|error| {
            let message = format!(
                "create {}: {error}\n  fix: free space there, or set TMPDIR to another short path",
                path.display()
            );
            Error::not_started(Code::FailedPrecondition, message)
        })?;
        Ok(Self { path, _held: held })
    }
}

/// Removes the directories of heads whose program was killed some time ago. A directory that cannot be opened belongs to another user.
fn sweep(parent: &Path, now: SystemTime) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.filter_map(std::result::Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(FOLDER_PREFIX)
            && let Ok(held) = File::open(entry.path())
            && held.try_lock().is_ok()
            && let Ok(modified) = held.metadata().and_then(|metadata| metadata.modified())
            && now.duration_since(modified).is_ok_and(|age| age > FOLDER_KEPT)
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns a sink that keeps the last lines, and logs all.
fn keeps(output: &OutputTail) -> LineSink {
    let output = output.clone();
    Arc::new(move |_, _, line| {
        if !line.trim().is_empty() {
            tracing::debug!(line, "the Ray head printed a line");
            output.push(line);
        }
    })
}

/// Returns the last lines, indented.
fn tail(output: &OutputTail) -> String {
    output.lines().iter().map(|line| format!("\n  {line}")).collect()
}

/// Waits until the head lists itself as alive.
async fn ready(
    cx: &CallContext,
    child: &ChildHandle,
    address: &RayAddress,
    output: &OutputTail,
    folder: &Path,
) -> Result<RayVersion> {
    let mut events = child.events();
    let responds = async {
        loop {
            if let Some((dashboard, version)) = RayDashboard::probe(&cx.child().at_most(PROBE_TIMEOUT), address).await?
                && let Ok(nodes) = dashboard.nodes(&cx.child().at_most(PROBE_TIMEOUT)).await
                && nodes.iter().any(|node| node.is_head_node && node.is_alive())
            {
                return Ok(version);
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    };
    let logs = folder.display();
    let found = tokio::select! { biased;
        ended = events.wait_for(ChildState::is_final) => {
            let reason = match ended.as_deref() {
                Ok(ChildState::GaveUp(report)) => report.reason.clone(),
                _ => "it was stopped".to_owned(),
            };
            let message = format!(
                "Ray ended: {reason}{}\n  fix: read the lines above and the logs in {logs}; Ray needs space there, and the right to listen on its ports",
                tail(output)
            );
            return Err(Error::not_started(Code::FailedPrecondition, message));
        }
        found = cx.bound(Execution::Finished, responds) => found,
    };
    found.map_err(|error| match error.code() {
        Code::DeadlineExceeded => Error::not_started(
            Code::DeadlineExceeded,
            format!("the head is not ready in time{}\n  fix: read the logs in {logs}; a machine with little memory or a slow disk needs longer", tail(output)),
        ),
        _ => error,
    })
}

/// Reports the end of a head that nobody stopped.
async fn watch(child: ChildHandle, output: OutputTail) {
    let mut events = child.events();
    let ended = events.wait_for(ChildState::is_final).await.map(|state| state.clone());
    if let Ok(ChildState::GaveUp(report)) = ended {
        tracing::error!(
            reason = report.reason,
            lines = tail(&output),
            "the Ray head of this machine ended; start this program again"
        );
    }
}

fn of_launch(error: LaunchError) -> Error {
    let message = match &error {
        LaunchError::ProgramNotFound { program, .. } | LaunchError::NotExecutable { program, .. } => format!(
            "the program {} of Ray is not installed: {error}\n  fix: pip install \"ray[default]==2.60.0\", into an environment whose programs are in PATH, or \
             write the address of a cluster instead of local",
            program.display()
        ),
        _ => error.to_string(),
    };
    Error::not_started(Code::FailedPrecondition, message).caused_by(error)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn looking_for_a_free_port_keeps_nobody_from_listening_there() {
        let port = gym_core::testing::free_port();
        let listened = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !listened.load(Ordering::Relaxed) {
                    is_free(port);
                }
            });
            let all = (0..5_000).all(|_| TcpListener::bind(("127.0.0.1", port)).is_ok());
            listened.store(true, Ordering::Relaxed);
            assert!(all, "a program could not listen");
        });
    }

    #[test]
    fn a_taken_port_is_replaced_by_the_next_free_one_and_named() {
        let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(!is_free(port), "a listener of one address counts");
        let (ports, note) = HeadPorts::choose(port).unwrap();
        assert!(ports.dashboard > port, "{} is not {port}", ports.dashboard);
        let note = note.unwrap();
        assert!(note.contains(&port.to_string()) && note.contains("fix: free it"), "{note}");
        assert!(note.contains(&format!("ray_dashboard_address to http://127.0.0.1:{}", ports.dashboard)), "{note}");
    }

    #[test]
    fn the_directory_of_a_head_leaves_room_for_the_sockets_below_it() {
        let folder = HeadFolder::create().unwrap();
        assert!(folder.path.as_os_str().len() <= FOLDER_BYTES_MAX, "{}", folder.path.display());
        std::fs::remove_dir(&folder.path).unwrap();
    }

    #[test]
    fn directories_of_heads_whose_program_was_killed_long_ago_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let create = |name: &str| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("a.log"), "").unwrap();
            path
        };
        let [killed, runs, other] = ["gymray-00000001", "gymray-00000002", "gymray4711"].map(create);
        let held = File::open(&runs).unwrap();
        held.try_lock().unwrap();
        let now = SystemTime::UNIX_EPOCH + gym_core::World::real().now();
        sweep(parent.path(), now);
        assert!(killed.exists(), "its logs may still be read");
        sweep(parent.path(), now + FOLDER_KEPT * 2);
        assert!(!killed.exists() && runs.exists() && other.exists());
    }
}
