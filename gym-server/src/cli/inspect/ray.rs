//! `rgym ray`: a Ray cluster, and our jobs there.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use gym_client::group::ray::{RayAddress, RayDashboard, RayJob, RayVersion};
use gym_core::CallContext;
use serde::Serialize;
use serde_json::json;

use crate::cli::args::options::{RayArgs, RayCommand, Sources};
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
use crate::cli::setup::configuration::{Need, load};
use crate::cli::setup::ray::{address, connect};
use crate::stack::Servers;

/// Limit of a command.
const TIME: Duration = Duration::from_secs(10);

/// Runs a command of `rgym ray`.
pub(in crate::cli) async fn ray(args: RayArgs, overrides: &[String], servers: &Servers) -> Outcome {
    let given = match &args.ray_address {
        Some(given) => Some(RayAddress::parse(given, "--ray-address")?),
        None => address(&load(&Sources::default(), overrides, servers, Need::Values).await?.config)?,
    };
    let given = given.ok_or_else(|| {
        Failure::Usage(
            "no Ray cluster is named\n  fix: pass --ray-address, or set ray_head_node_address in env.yaml or RAY_ADDRESS".to_owned(),
        )
    })?;
    let (dashboard, version) = connect(&given).await?;
    let cx = CallContext::within(TIME);
    match args.command {
        RayCommand::Status => status(&cx, &dashboard, &version, args.json).await,
        RayCommand::Resources => resources(&cx, &dashboard, args.json).await,
        RayCommand::Memory => memory(&cx, &dashboard, args.json).await,
        RayCommand::Tasks { limit } => tasks(&cx, &dashboard, limit, args.json).await,
        RayCommand::Logs { job } => {
            console::print(dashboard.logs(&cx, &job).await?.trim_end());
            Ok(ExitCode::SUCCESS)
        }
        RayCommand::Stop { job, .. } => stop(&cx, &dashboard, job.as_deref()).await,
    }
}

fn print_json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::Failed(error.to_string()))?;
    console::print(&text);
    Ok(ExitCode::SUCCESS)
}

fn number(many: f64) -> String {
    if many.fract() == 0.0 { format!("{many:.0}") } else { format!("{many:.2}") }
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

async fn ours(cx: &CallContext, dashboard: &RayDashboard) -> Result<Vec<RayJob>, Failure> {
    let mut jobs = dashboard.jobs(cx).await?;
    jobs.retain(|job| job.ours().is_some());
    Ok(jobs)
}

async fn status(cx: &CallContext, dashboard: &RayDashboard, version: &RayVersion, as_json: bool) -> Outcome {
    let (nodes, jobs) = (dashboard.nodes(cx).await?, ours(cx, dashboard).await?);
    let usage = dashboard.usage(cx).await?;
    if as_json {
        return print_json(&json!({
            "address": dashboard.address().written(), "source": dashboard.address().source(), "dashboard": dashboard.address().dashboard(),
            "ray_version": version.ray_version, "nodes": nodes, "usage": usage, "jobs": jobs,
        }));
    }
    console::print(&format!(
        "Ray {} at {}, address {}",
        version.ray_version,
        dashboard.address().dashboard(),
        dashboard.address()
    ));
    let rows = nodes.iter().map(|node| {
        let has = |name: &str| number(node.resources_total.get(name).copied().unwrap_or_default());
        let role = if node.is_head_node { "head" } else { "worker" };
        let why = node.state_message.clone().unwrap_or_default();
        [node.node_ip.clone(), role.to_owned(), node.state.to_lowercase(), has("CPU"), has("GPU"), why]
    });
    console::print(&console::table(["node", "role", "state", "CPUs", "GPUs", "reason"], rows));
    console::print(&format!("in use: {}", shown(&usage)));
    if jobs.is_empty() {
        console::print("no job of this SDK");
    } else {
        let rows = jobs.iter().map(|job| {
            let first = job.message.as_deref().and_then(|message| message.lines().next()).unwrap_or_default();
            let name = job.ours().unwrap_or_default().to_owned();
            [job.submission_id.clone().unwrap_or_default(), name, job.status.to_lowercase(), first.to_owned()]
        });
        console::print(&console::table(["job", "name", "status", "message"], rows));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns CPUs and GPUs in use.
fn shown(usage: &BTreeMap<String, (f64, f64)>) -> String {
    let counted = usage.iter().filter(|(name, _)| matches!(name.as_str(), "CPU" | "GPU"));
    let counted: Vec<String> =
        counted.map(|(name, (used, total))| format!("{} of {} {name}s", number(*used), number(*total))).collect();
    if counted.is_empty() { "not reported yet".to_owned() } else { counted.join(", ") }
}

async fn resources(cx: &CallContext, dashboard: &RayDashboard, as_json: bool) -> Outcome {
    let usage = dashboard.usage(cx).await?;
    if as_json {
        return print_json(&usage);
    }
    if usage.is_empty() {
        console::print("the cluster has not reported its resources yet; it does within a few seconds of its start");
        return Ok(ExitCode::SUCCESS);
    }
    // Ray adds names of its own for the bundles of each placement group.
    let of_bundle = |name: &str| name.split("Group").nth(1).is_some_and(|group| group.len() >= 32);
    let own = usage.iter().filter(|(name, _)| !name.starts_with("node:") && !of_bundle(name));
    let rows = own.map(|(name, (used, total))| [name.clone(), number(*used), number(*total)]);
    console::print(&console::table(["resource", "used", "total"], rows));
    Ok(ExitCode::SUCCESS)
}

async fn memory(cx: &CallContext, dashboard: &RayDashboard, as_json: bool) -> Outcome {
    let memory = dashboard.memory(cx).await?;
    if as_json {
        return print_json(&memory);
    }
    let rows = memory.iter().map(|node| {
        [node.node_ip.clone(), mebibytes(node.used), mebibytes(node.total), mebibytes(node.object_store_used)]
    });
    console::print(&console::table(["node", "used", "total", "object store"], rows));
    Ok(ExitCode::SUCCESS)
}

async fn tasks(cx: &CallContext, dashboard: &RayDashboard, limit: u32, as_json: bool) -> Outcome {
    let tasks = dashboard.tasks(cx, limit).await?;
    if as_json {
        return print_json(&tasks);
    }
    let rows = tasks.iter().map(|task| {
        [task.task_id.clone(), task.name.clone(), task.state.to_lowercase(), task.node_id.clone().unwrap_or_default()]
    });
    console::print(&console::table(["task", "name", "state", "node"], rows));
    Ok(ExitCode::SUCCESS)
}

async fn stop(cx: &CallContext, dashboard: &RayDashboard, wanted: Option<&str>) -> Outcome {
    let running: Vec<String> = ours(cx, dashboard)
        .await?
        .into_iter()
        .filter(|job| !job.has_ended())
        .filter_map(|job| job.submission_id)
        .collect();
    let stopped: Vec<&String> = running.iter().filter(|id| wanted.is_none_or(|wanted| *id == wanted)).collect();
    if let Some(wanted) = wanted.filter(|_| stopped.is_empty()) {
        return Err(Failure::Failed(format!(
            "no job {wanted} of this SDK runs there\n  running: {}",
            if running.is_empty() { "none".to_owned() } else { running.join(", ") }
        )));
    }
    if stopped.is_empty() {
        console::print("no job of this SDK runs there");
    }
    for id in stopped {
        dashboard.stop(cx, id).await?;
        console::print(&format!("{id} is stopping"));
    }
    Ok(ExitCode::SUCCESS)
}
