//! `rgym ray`: a Ray cluster, and our jobs there.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use gym_client::config::GymConfig;
use gym_core::{CallContext, Code, Error, Result};
use gym_group::ray::{RayAddress, RayDashboard, RayJob, RayNode, RayVersion};
use serde::Serialize;

use crate::cli::args::options::{RayArgs, RayCommand, Sources};
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
use crate::cli::setup::configuration::{Need, load};
use crate::cli::setup::ray::{address, connect};
use crate::stack::Servers;

/// Limit of a command.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of the part of another command that shows the cluster.
const PART_TIMEOUT: Duration = Duration::from_secs(3);

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
    let cx = CallContext::within(CALL_TIMEOUT);
    match args.command {
        RayCommand::Status => status(&cx, &dashboard, &version, args.json).await,
        RayCommand::Resources => resources(&cx, &dashboard, args.json).await,
        RayCommand::Memory => memory(&cx, &dashboard, args.json).await,
        RayCommand::Tasks { limit } => tasks(&cx, &dashboard, limit, args.json).await,
        RayCommand::Logs { job } => logs(&cx, &dashboard, &job).await,
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

/// A Ray cluster as `rgym ray status`, `rgym status` and `rgym workers` show it.
#[derive(Debug, Serialize)]
pub(super) struct ClusterStatus {
    address: String,
    source: String,
    dashboard: String,
    /// `None` if the cluster does not respond.
    ray_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    nodes: Vec<RayNode>,
    usage: BTreeMap<String, (f64, f64)>,
    jobs: Vec<RayJob>,
    /// The identifiers of our jobs whose bundles wait for room.
    waiting: Vec<String>,
}

/// Returns the status of the cluster of a configuration; `None` if it has none. A cluster that does not respond is no error of a command that shows
/// other things too.
pub(super) async fn of_configuration(config: &GymConfig) -> Result<Option<ClusterStatus>, Failure> {
    let Some(given) = address(config)? else { return Ok(None) };
    let cx = CallContext::within(PART_TIMEOUT);
    let status = async {
        let (dashboard, version) = RayDashboard::connect(&cx, &given).await?;
        ClusterStatus::of(&cx, &dashboard, &version).await
    };
    Ok(Some(status.await.unwrap_or_else(|error| ClusterStatus::silent(&given, &error))))
}

impl ClusterStatus {
    async fn of(cx: &CallContext, dashboard: &RayDashboard, version: &RayVersion) -> Result<Self> {
        let mut jobs = dashboard.jobs(cx).await?;
        jobs.retain(|job| job.ours().is_some());
        Ok(Self {
            ray_version: Some(version.ray_version.clone()),
            nodes: dashboard.nodes(cx).await?,
            usage: dashboard.usage(cx).await?,
            waiting: dashboard.waiting(cx).await?,
            jobs,
            ..Self::at(dashboard.address())
        })
    }

    fn silent(address: &RayAddress, error: &Error) -> Self {
        Self { error: Some(error.to_string()), ..Self::at(address) }
    }

    fn at(address: &RayAddress) -> Self {
        Self {
            address: address.written().to_owned(),
            source: address.source().to_owned(),
            dashboard: address.dashboard().to_owned(),
            ray_version: None,
            error: None,
            nodes: Vec::new(),
            usage: BTreeMap::new(),
            jobs: Vec::new(),
            waiting: Vec::new(),
        }
    }

    /// Returns the tables for people.
    pub(super) fn text(&self) -> String {
        let at = format!("at {}, address {} ({})", self.dashboard, self.address, self.source);
        let Some(version) = &self.ray_version else {
            return format!("Ray {at}: {}", self.error.as_deref().unwrap_or("unknown"));
        };
        let rows = self.nodes.iter().map(|node| {
            let has = |name: &str| number(node.resources_total.get(name).copied().unwrap_or_default());
            let role = if node.is_head_node { "head" } else { "worker" };
            let why = node.state_message.clone().unwrap_or_default();
            [node.node_ip.clone(), role.to_owned(), node.state.to_lowercase(), has("CPU"), has("GPU"), why]
        });
        let nodes = console::table(["node", "role", "state", "CPUs", "GPUs", "reason"], rows);
        let jobs = if self.jobs.is_empty() { "no job of this SDK".to_owned() } else { self.jobs() };
        format!("Ray {version} {at}\n{nodes}\nin use: {}\n{jobs}", shown(&self.usage))
    }

    fn jobs(&self) -> String {
        let rows = self.jobs.iter().map(|job| {
            let id = job.id().unwrap_or_default().to_owned();
            let message = match self.waiting.contains(&id) {
                true => "its bundles wait for room",
                false => job.message.as_deref().and_then(|message| message.lines().next()).unwrap_or_default(),
            };
            [id, job.ours().unwrap_or_default().to_owned(), job.status.to_lowercase(), message.to_owned()]
        });
        console::table(["job", "name", "status", "message"], rows)
    }
}

async fn status(cx: &CallContext, dashboard: &RayDashboard, version: &RayVersion, as_json: bool) -> Outcome {
    let status = ClusterStatus::of(cx, dashboard, version).await?;
    if as_json {
        return print_json(&status);
    }
    console::print(&status.text());
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

async fn logs(cx: &CallContext, dashboard: &RayDashboard, id: &str) -> Outcome {
    match dashboard.logs(cx, id).await {
        Ok(log) => {
            console::print(log.trim_end());
            Ok(ExitCode::SUCCESS)
        }
        Err(error) if error.code() == Code::NotFound => {
            let is_child =
                dashboard.jobs(cx).await?.iter().any(|job| job.submission_id.is_none() && job.id() == Some(id));
            Err(if is_child {
                Failure::Failed(format!(
                    "{id}: Ray has no log of it, because its driver is a child of the program that uses it\n  fix: read the log of that program, at the level debug"
                ))
            } else {
                error.into()
            })
        }
        Err(error) => Err(error.into()),
    }
}

async fn stop(cx: &CallContext, dashboard: &RayDashboard, wanted: Option<&str>) -> Outcome {
    let jobs = dashboard.jobs(cx).await?;
    let running = jobs.iter().filter(|job| job.ours().is_some() && !job.has_ended());
    // The driver of some jobs is a child of their program, and ends with it; Ray cannot stop them.
    let (jobs, children): (Vec<&RayJob>, Vec<&RayJob>) = running.partition(|job| job.submission_id.is_some());
    let ids = |jobs: &[&RayJob]| jobs.iter().filter_map(|job| job.id()).map(str::to_owned).collect::<Vec<_>>();
    let (jobs, children) = (ids(&jobs), ids(&children));
    let is_wanted = |id: &&String| wanted.is_none_or(|wanted| *id == wanted);
    if let Some(wanted) = wanted.filter(|wanted| !jobs.iter().chain(&children).any(|id| id == wanted)) {
        let running: Vec<&str> = jobs.iter().chain(&children).map(String::as_str).collect();
        return Err(Failure::Failed(format!(
            "no job {wanted} of this SDK runs there\n  running: {}",
            if running.is_empty() { "none".to_owned() } else { running.join(", ") }
        )));
    }
    if jobs.is_empty() && children.is_empty() {
        console::print("no job of this SDK runs there");
    }
    for id in jobs.iter().filter(is_wanted) {
        dashboard.stop(cx, id).await?;
        console::print(&format!("{id} is stopping"));
    }
    let left: Vec<&str> = children.iter().filter(is_wanted).map(String::as_str).collect();
    if left.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::Failed(format!(
        "{}: Ray cannot stop it, because its driver is a child of the program that uses it\n  fix: stop that program",
        left.join(", ")
    )))
}
