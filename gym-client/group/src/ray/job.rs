//! The jobs that we submit: what they are given, and how they are submitted.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gym_core::base::process::OWN_PROGRAM;
use gym_core::{CallContext, Error, Result};
use serde::Serialize;
use serde_json::json;

use crate::provision::{AGENT_ROLE, AgentLines};
use crate::ray::dashboard::{JobRequest, RayDashboard};
use crate::ray::package::{PROGRAM_FILE, Package, SHIM_FILE};
use crate::ray::share::SharePlan;
use crate::ray::{RayDriver, RayOptions};

/// Time that an agent waits for the next controller after the last one: it may only have been slow.
const NEXT_CONTROLLER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between SIGTERM and SIGKILL for the ranks of a job that is stopped from outside.
const RANK_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for the agents, with their ranks.
const AGENT_TIMEOUT: Duration = RANK_TIMEOUT.saturating_add(Duration::from_secs(1));
/// The same for a driver, with its agents.
pub(super) const DRIVER_TIMEOUT: Duration = AGENT_TIMEOUT.saturating_add(Duration::from_secs(2));

/// The command that starts the driver, but for its file. It runs in a shell that is a child of a process of Ray's raylet, whose arguments name the
/// interpreter of the node: a head that was started by its full path need not have it in `PATH`. Ray's own environment may have either name there.
const INTERPRETER: &str = "raylet=$(awk '/^PPid:/ { print $2 }' /proc/$PPID/status); \
    python=$(tr '\\0' '\\n' < /proc/$raylet/cmdline | sed -n 's/^--python_worker_command=\\([^ ]*\\) .*/\\1/p'); \
    [ -x \"$python\" ] || python=$(command -v python || command -v python3); exec \"$python\"";

/// The input of the driver.
#[derive(Serialize)]
struct ShimSpec<'a> {
    run: &'a str,
    strategy: &'a str,
    bundles: &'a [BTreeMap<String, f64>],
    /// The CPUs of each bundle, as its agent counts them.
    cpus: &'a [u32],
    /// The labels that the node of each bundle must have; empty without labels.
    selectors: &'a [BTreeMap<String, String>],
    command: [&'a str; 2],
    /// `true` if the program is in the package of the job. Otherwise the actors need nothing of the job's environment.
    packaged: bool,
    /// For a driver that is no job of the dashboard.
    child: Option<ChildFields<'a>>,
    variables: &'a BTreeMap<String, String>,
    agent: AgentLines,
    placement_attempts: u32,
    placement_timeout_s: f64,
    start_timeout_s: f64,
    silence_s: f64,
    grace_s: f64,
    max_restarts: u32,
}

/// The additional input of a driver that is a child of this program.
#[derive(Serialize)]
struct ChildFields<'a> {
    address: &'a str,
    metadata: BTreeMap<&'a str, &'a str>,
    /// The package, if the program is in it.
    working_dir: Option<&'a str>,
}

/// The common part of all attempts of a job.
#[derive(Debug)]
pub(super) struct JobTemplate {
    pub(super) dashboard: Arc<RayDashboard>,
    pub(super) plan: SharePlan,
    pub(super) options: RayOptions,
    pub(super) secret: String,
}

impl JobTemplate {
    /// Uploads the files of a job that runs an agent on each share, and returns the job.
    pub(super) async fn prepare(&self, cx: &CallContext, id: &str) -> Result<JobRequest> {
        let working_dir = self.upload(cx).await?;
        Ok(JobRequest {
            entrypoint: format!("{INTERPRETER} {SHIM_FILE}"),
            submission_id: id.to_owned(),
            metadata: BTreeMap::from([
                ("name".to_owned(), self.options.name.clone()),
                ("gym".to_owned(), id.to_owned()),
            ]),
            runtime_env: json!({
                "working_dir": working_dir,
                "env_vars": {
                    "GYM_RAY_SPEC": self.spec(id, None)?,
                    "RAY_JOB_STOP_WAIT_TIME_S": DRIVER_TIMEOUT.as_secs().to_string(),
                    "PYTHONUNBUFFERED": "1",
                },
            }),
            entrypoint_resources: self.driver_resources(cx).await?,
        })
    }

    /// Returns the specification for a driver that is a child of this program, after it has uploaded the program if that is to be sent.
    pub(super) async fn prepare_child(&self, cx: &CallContext, id: &str) -> Result<String> {
        let working_dir = if self.options.program.is_none() { Some(self.upload(cx).await?) } else { None };
        let child = ChildFields {
            address: self.dashboard.address().cluster(),
            metadata: BTreeMap::from([("name", self.options.name.as_str()), ("gym", id)]),
            working_dir: working_dir.as_deref(),
        };
        self.spec(id, Some(child))
    }

    /// Uploads the driver, and the program if it is to be sent. Returns the address of the package.
    async fn upload(&self, cx: &CallContext) -> Result<String> {
        // The program that runs, which `current_exe` does not find if its file was replaced.
        let sent = self.options.program.is_none().then_some(Path::new(OWN_PROGRAM));
        let package = tokio::task::spawn_blocking(move || Package::pack(sent)).await;
        let package = package.map_err(|error| Error::internal("pack the program for Ray").caused_by(error))??;
        self.dashboard.upload(cx, &package.name, package.zip).await
    }

    /// Returns what the driver is given, as JSON.
    fn spec(&self, id: &str, child: Option<ChildFields<'_>>) -> Result<String> {
        let Self { plan, options, secret, .. } = self;
        let program = match &options.program {
            None => format!("./{PROGRAM_FILE}"),
            Some(path) => path.display().to_string(),
        };
        let lease = options.nodes.lease;
        let spec = ShimSpec {
            run: id,
            strategy: plan.strategy,
            bundles: &plan.bundles,
            cpus: &plan.cpus,
            selectors: if plan.selectors.iter().all(BTreeMap::is_empty) { &[] } else { &plan.selectors },
            command: [&program, AGENT_ROLE],
            packaged: options.program.is_none(),
            child,
            variables: &options.variables,
            agent: AgentLines {
                secret: secret.clone(),
                first_s: (options.start_timeout + lease).as_secs_f64(),
                later_s: NEXT_CONTROLLER_TIMEOUT.as_secs_f64(),
                grace_s: RANK_TIMEOUT.as_secs_f64(),
            },
            placement_attempts: options.attempts()?,
            placement_timeout_s: options.placement_timeout.as_secs_f64(),
            start_timeout_s: options.start_timeout.as_secs_f64(),
            silence_s: lease.as_secs_f64(),
            grace_s: AGENT_TIMEOUT.as_secs_f64(),
            max_restarts: options.max_restarts,
        };
        let spec = serde_json::to_string(&spec);
        let spec = spec.map_err(|error| Error::internal("the specification of the job").caused_by(error))?;
        // Ray replaces `$NAME` and `${NAME}` in the variables of a job. In JSON, the character is always in a text.
        Ok(spec.replace('$', "\\u0024"))
    }

    /// Puts the driver on a node other than the head, if that is requested. It takes no CPU, because a bundle may need all of a node's.
    async fn driver_resources(&self, cx: &CallContext) -> Result<BTreeMap<String, f64>> {
        if self.options.driver != RayDriver::Worker {
            return Ok(BTreeMap::new());
        }
        let nodes = self.dashboard.nodes(cx).await?;
        let workers: Vec<_> = nodes.iter().filter(|node| node.is_alive() && !node.is_head_node).collect();
        let chosen = fastrand::choice(&workers).map(|node| (format!("node:{}", node.node_ip), 0.001));
        Ok(chosen.into_iter().collect())
    }
}
