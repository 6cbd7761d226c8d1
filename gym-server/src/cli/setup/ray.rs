//! The Ray cluster of a command.

use std::time::Duration;

use gym_client::config::GymConfig;
use gym_client::group::ray::{RayAddress, RayDashboard, RayVersion};
use gym_core::{CallContext, Result};

use crate::cli::console::Console;
use crate::cli::exit::Failure;

/// Limit of a connection to the dashboard.
const CONNECT_TIME: Duration = Duration::from_secs(8);

/// Returns the address of the configuration, or else of `RAY_ADDRESS`, with its source.
pub(in crate::cli) fn address(config: &GymConfig) -> Result<Option<RayAddress>> {
    let Some(ray) = &config.ray else { return RayAddress::of_environment() };
    let address = RayAddress::parse(&ray.address, ray.origin.to_string())?;
    match &ray.dashboard {
        Some(dashboard) => address.with_dashboard(dashboard).map(Some),
        None => Ok(Some(address)),
    }
}

/// Connects to a cluster.
pub(in crate::cli) async fn connect(address: &RayAddress) -> Result<(RayDashboard, RayVersion)> {
    RayDashboard::connect(&CallContext::within(CONNECT_TIME), address).await
}

/// Checks that the cluster of a configuration responds, and says so, as NeMo Gym does. Servers in Python connect to it themselves.
pub(in crate::cli) async fn announce(config: &GymConfig, console: &Console) -> Result<(), Failure> {
    let Some(address) = address(config)? else {
        console.line("Ray is not used: ray_head_node_address is not set");
        return Ok(());
    };
    console.line(&format!("Connecting to Ray cluster at specified address: {address}"));
    let (dashboard, version) = connect(&address).await?;
    let nodes = dashboard.nodes(&CallContext::within(CONNECT_TIME)).await?;
    let alive = nodes.iter().filter(|node| node.is_alive()).count();
    console.line(&format!("Ray already initialized: Ray {} with {alive} nodes", version.ray_version));
    Ok(())
}
