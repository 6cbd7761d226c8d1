//! The Ray cluster of a command.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gym_client::config::GymConfig;
use gym_core::{CallContext, Result};
use gym_group::ray::{LocalHead, RayAddress, RayDashboard, RayVersion};

use crate::cli::console::Console;
use crate::cli::exit::Failure;
use crate::cli::setup::configuration::LoadedConfig;

/// Limit of a connection to the dashboard.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(8);
/// Limit of the start of a head, which takes 5 s where Ray's files are in memory.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the address of the configuration, or else of `RAY_ADDRESS`, with its source.
pub(in crate::cli) fn address(config: &GymConfig) -> Result<Option<RayAddress>> {
    let Some(ray) = &config.ray else {
        let Some(address) = RayAddress::of_environment()? else { return Ok(None) };
        // The key alone: the dashboard of a cluster that the environment names.
        return match config.merged.get("ray_dashboard_address").and_then(serde_json::Value::as_str) {
            Some(dashboard) => address.with_dashboard(dashboard).map(Some),
            None => Ok(Some(address)),
        };
    };
    let address = RayAddress::parse(&ray.address, ray.origin.to_string())?;
    match &ray.dashboard {
        Some(dashboard) => address.with_dashboard(dashboard).map(Some),
        None => Ok(Some(address)),
    }
}

/// Connects to a cluster.
pub(in crate::cli) async fn connect(address: &RayAddress) -> Result<(RayDashboard, RayVersion)> {
    RayDashboard::connect(&CallContext::within(CONNECT_TIMEOUT), address).await
}

/// As [`connect_servers`], and says so if servers in Python, which can use Ray, find none.
pub(in crate::cli) async fn announce(
    loaded: LoadedConfig,
    python: Option<&Path>,
    console: &Console,
) -> Result<(LoadedConfig, Option<LocalHead>), Failure> {
    if address(&loaded.config)?.is_none() && loaded.python.is_some() {
        console.line("Ray is not used: ray_head_node_address is not set");
    }
    connect_servers(loaded, python, console).await
}

/// Checks that the cluster of a configuration, if it has one, responds, and says so, as NeMo Gym does. Servers in Python connect to it themselves. Also
/// returns the head that the address `local` has started, which ends when it is dropped.
pub(in crate::cli) async fn connect_servers(
    mut loaded: LoadedConfig,
    python: Option<&Path>,
    console: &Console,
) -> Result<(LoadedConfig, Option<LocalHead>), Failure> {
    let Some(address) = address(&loaded.config)? else { return Ok((loaded, None)) };
    if address.is_local() {
        let head = local(&mut loaded, &address, python, console).await?;
        return Ok((loaded, head));
    }
    console.line(&format!("Connecting to Ray cluster at specified address: {address}"));
    let (dashboard, version) = connect(&address).await?;
    already_initialized(&dashboard, &version, console).await?;
    Ok((loaded, None))
}

/// Uses the head of this machine, and starts one if there is none.
async fn local(
    loaded: &mut LoadedConfig,
    address: &RayAddress,
    python: Option<&Path>,
    console: &Console,
) -> Result<Option<LocalHead>, Failure> {
    let cx = CallContext::within(START_TIMEOUT);
    let head = match LocalHead::find(&cx, address).await? {
        Some(head) => head,
        None => {
            console.line("Starting Ray cluster...");
            let python = loaded.python.as_ref().map(|python| python.path.as_path()).or(python);
            LocalHead::start_new(&cx, address, &program(python)).await?
        }
    };
    loaded.config.set_ray_address_of_python(head.cluster());
    if head.is_own() {
        if let Some(note) = head.note() {
            console.warn(note);
        }
        console.line(&format!("Started Ray cluster at ray://{}", head.cluster()));
        return Ok(Some(head));
    }
    console.line(&format!("Connecting to Ray cluster at specified address: {}", head.address()));
    let (dashboard, version) = connect(head.address()).await?;
    already_initialized(&dashboard, &version, console).await?;
    Ok(None)
}

/// Returns the program `ray` of the environment of the Python servers, or else the one in `PATH`.
fn program(python: Option<&Path>) -> PathBuf {
    let beside = python.and_then(|python| std::path::absolute(python).ok()).map(|python| python.with_file_name("ray"));
    beside.filter(|ray| ray.is_file()).unwrap_or_else(|| PathBuf::from("ray"))
}

async fn already_initialized(dashboard: &RayDashboard, version: &RayVersion, console: &Console) -> Result<(), Failure> {
    let nodes = dashboard.nodes(&CallContext::within(CONNECT_TIMEOUT)).await?;
    let alive = nodes.iter().filter(|node| node.is_alive()).count();
    let nodes = if alive == 1 { "node" } else { "nodes" };
    console.line(&format!("Ray already initialized: Ray {} with {alive} {nodes}", version.ray_version));
    Ok(())
}

/// Stops a head that this command has started.
pub(in crate::cli) async fn stop(head: Option<LocalHead>, console: &Console) {
    let Some(head) = head else { return };
    match head.stop().await {
        Ok(()) => console.line("stopped the Ray cluster"),
        Err(error) => console.warn(error),
    }
}
