//! The REST interface of a Ray cluster: jobs, packages, nodes and placement groups.
//!
//! Source: <https://docs.ray.io/en/releases-2.60.0/cluster/running-applications/job-submission/api.html> and the behavior of Ray 2.60. An error is text,
//! often a Python traceback, so the status decides, and the last line is the message.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use gym_core::transport::{RetryPolicy, retry};
use gym_core::{CallContext, Code, Error, Execution, Metadata, Request, Result, Route, Verb};
use gym_transport_http::origin::{OriginClient, OriginOptions};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::sleep;

use crate::ray::address::{DASHBOARD_PORT, RayAddress, RayToken, TOKEN_SOURCES};

/// Limit of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The TLS handshake comes on top of the connection.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections over TLS that are kept.
const TLS_CONNECTIONS_MAX: usize = 4;
/// The version of the REST interface that this client was written for.
const API_VERSION: &str = "4";
/// Limit of a request, except uploads and submissions.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The path to which jobs are submitted.
const JOBS: &str = "/api/jobs/";
/// Limit of a submission. The dashboard hands it on to the job agent of the head, for which it waits up to 10 s before it answers.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(15);
/// Ray's message if the head has no job agent.
const NO_AGENT: &str = "No available agent";
/// The fix for it, unless the cluster has just started.
const AGENT_FIX: &str = "look into logs/dashboard_agent.log in the directory of the head's session (/tmp/ray/session_latest); if another program has its port, for \
                         example another Ray cluster of the machine (52365 by default), start the head with `ray start --head \
                         --dashboard-agent-listen-port=PORT`";
/// Pause before a job is submitted again to a cluster that starts.
const START_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Limit of a response: a log, or the list of nodes.
const RESPONSE_BYTES_MAX: usize = 64 << 20;
/// The fix for a program that is too large.
const SMALLER: &str =
    "build it with --release and strip it, or copy it to every node and name its path there with RayOptions::program";
/// Ray accepts no larger request.
const UPLOAD_BYTES_MAX: usize = 100 << 20;

/// A client of a cluster's dashboard.
#[derive(Debug)]
pub struct RayDashboard {
    address: RayAddress,
    token: Option<RayToken>,
    origin: OriginClient,
}

/// The version of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RayVersion {
    /// The version of the REST interface.
    pub version: String,
    /// The version of Ray.
    pub ray_version: String,
}

/// A node of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RayNode {
    /// The identifier, in hexadecimal digits.
    pub node_id: String,
    /// The IP address.
    pub node_ip: String,
    /// `true` for the head.
    pub is_head_node: bool,
    /// `ALIVE` or `DEAD`. Dead nodes stay in the list.
    pub state: String,
    /// Why a node is dead.
    pub state_message: Option<String>,
    /// The resources of the node, by name: `CPU`, `GPU`, `memory` in bytes, and custom resources.
    pub resources_total: BTreeMap<String, f64>,
    /// The labels of the node.
    pub labels: BTreeMap<String, String>,
}

impl RayNode {
    /// Returns `true` if the node is alive.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.state == "ALIVE"
    }
}

/// A job of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RayJob {
    /// The identifier that its submitter chose.
    pub submission_id: Option<String>,
    /// `PENDING`, `RUNNING`, `STOPPED`, `SUCCEEDED` or `FAILED`.
    pub status: String,
    /// The command.
    pub entrypoint: Option<String>,
    /// The message of Ray, with the end of the log for a failed job.
    pub message: Option<String>,
    /// The node of the command.
    pub driver_node_id: Option<String>,
    /// The exit status of the command; `None` while it runs and for a stopped job.
    pub driver_exit_code: Option<i32>,
    /// The notes of its submitter.
    pub metadata: Option<BTreeMap<String, String>>,
}

impl RayJob {
    /// Returns the name of a job of this SDK; `None` for a job of somebody else.
    #[must_use]
    pub fn ours(&self) -> Option<&str> {
        let metadata = self.metadata.as_ref()?;
        metadata.get("gym")?;
        metadata.get("name").map(String::as_str)
    }

    /// Returns the identifier of a job that this SDK submitted, or whose driver is a child of its program: that one has no `submission_id`.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        self.submission_id.as_deref().or_else(|| self.metadata.as_ref()?.get("gym").map(String::as_str))
    }

    /// Returns `true` if the job has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.status.as_str(), "STOPPED" | "SUCCEEDED" | "FAILED")
    }
}

/// A task or actor call that Ray runs or ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RayTask {
    /// The identifier.
    pub task_id: String,
    /// The name of the function.
    pub name: String,
    /// The state, such as `RUNNING`, `FINISHED` or `PENDING_NODE_ASSIGNMENT`.
    pub state: String,
    /// The node; `None` before it is chosen.
    pub node_id: Option<String>,
}

/// The memory of a node, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RayMemory {
    /// The IP address of the node.
    pub node_ip: String,
    /// Memory in use by all processes.
    pub used: u64,
    /// Memory of the node.
    pub total: u64,
    /// Memory in use by Ray's object store, which this SDK does not use.
    pub object_store_used: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RayPlacementGroup {
    pub(super) name: String,
    pub(super) state: String,
    pub(super) stats: Option<RayPlacementStats>,
}

impl RayPlacementGroup {
    /// Returns `true` if bundles wait for room.
    pub(super) fn waits(&self) -> bool {
        matches!(self.state.as_str(), "PENDING" | "RESCHEDULING")
    }
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RayPlacementStats {
    pub(super) scheduling_state: String,
}

/// A job to submit.
#[derive(Clone, Debug, Serialize)]
pub(super) struct JobRequest {
    pub(super) entrypoint: String,
    pub(super) submission_id: String,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) runtime_env: Value,
    /// The resources that the driver needs; without them, Ray runs the driver on the head.
    pub(super) entrypoint_resources: BTreeMap<String, f64>,
}

/// The list of a state API.
#[derive(Deserialize)]
struct StateReply<T> {
    #[serde(default)]
    msg: String,
    data: Option<StateData<T>>,
}

#[derive(Deserialize)]
struct StateData<T> {
    result: StateResult<T>,
}

#[derive(Deserialize)]
struct StateResult<T> {
    result: Vec<T>,
}

/// A complete response.
struct RayResponse {
    status: u16,
    body: Bytes,
}

impl RayResponse {
    /// Returns the message of an error: its last line.
    fn message(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        text.lines()
            .rev()
            .map(str::trim)
            // The traceback of a job agent is quoted in that of the head, with a period after it.
            .find(|line| line.contains(char::is_alphanumeric))
            .unwrap_or("no message")
            .chars()
            .take(500)
            .collect()
    }
}

impl RayDashboard {
    /// Connects to a cluster, with the token of this process if it has one: the environment is that of Ray's own tools.
    ///
    /// # Errors
    /// `Unavailable` if the dashboard does not respond; `FailedPrecondition` if the cluster requires another token; `InvalidArgument` for an address
    /// that cannot be used. The message names the fix.
    pub async fn connect(cx: &CallContext, address: &RayAddress) -> Result<(Self, RayVersion)> {
        let token = RayToken::find(&|name| std::env::var(name).ok())?;
        Self::connect_with(cx, address, token).await
    }

    pub(super) async fn connect_with(
        cx: &CallContext,
        address: &RayAddress,
        token: Option<RayToken>,
    ) -> Result<(Self, RayVersion)> {
        let subject = || format!("connect to the Ray cluster at {address}");
        let dashboard = Self::to(address, token).map_err(|error| error.about(subject()))?;
        let version: RayVersion = dashboard.read(cx, "/api/version").await.map_err(|error| {
            let error = match error.code() {
                Code::NotFound | Code::DataLoss => Error::not_started(
                    Code::FailedPrecondition,
                    format!(
                        "{} is not Ray's dashboard: {}\n  fix: give the port of the dashboard, {DASHBOARD_PORT} by default, in ray_dashboard_address",
                        address.dashboard(),
                        error.message()
                    ),
                ),
                _ => error,
            };
            error.about(subject())
        })?;
        if version.version != API_VERSION {
            tracing::warn!(
                version = version.version,
                ray = version.ray_version,
                "this Ray has another version of the REST interface than {API_VERSION}, for which this program was written"
            );
        }
        Ok((dashboard, version))
    }

    /// Creates a client. Connects to nothing.
    fn to(address: &RayAddress, token: Option<RayToken>) -> Result<Self> {
        let mut options = OriginOptions::default();
        options.connect_timeout = CONNECT_TIMEOUT;
        if address.dashboard().starts_with("https:") {
            options.connect_timeout += HANDSHAKE_TIMEOUT;
            options.connections_max = TLS_CONNECTIONS_MAX;
        }
        let origin = OriginClient::to(address.dashboard(), options).map_err(|error| match error.code() {
            Code::Unimplemented => Error::not_started(
                Code::Unimplemented,
                format!(
                    "{} is https, and this program was built without TLS\n  fix: build it with the feature `tls` of gym-client (for rgym: of \
                     gym-server), or use the http address inside the cluster's network",
                    address.dashboard()
                ),
            ),
            _ => error,
        })?;
        Ok(Self { origin, address: address.clone(), token })
    }

    /// Connects to the dashboard at an address of this machine; `None` if nothing there responds like Ray.
    ///
    /// # Errors
    /// `FailedPrecondition` if a Ray cluster there requires another token.
    pub(super) async fn probe(cx: &CallContext, address: &RayAddress) -> Result<Option<(Self, RayVersion)>> {
        let path = "/api/version";
        let dashboard = Self::to(address, RayToken::find(&|name| std::env::var(name).ok())?)?;
        let Ok(response) = dashboard.send(cx, Verb::Get, path, None).await else { return Ok(None) };
        match response.status {
            200 => Ok(Self::parse(path, &response).ok().map(|version| (dashboard, version))),
            401 | 403 if response.message().contains("authentication token") => Err(dashboard.refused(path, &response)),
            _ => Ok(None),
        }
    }

    /// Returns the address.
    #[must_use]
    pub fn address(&self) -> &RayAddress {
        &self.address
    }

    /// Returns the nodes, dead ones too.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn nodes(&self, cx: &CallContext) -> Result<Vec<RayNode>> {
        self.state(cx, "/api/v0/nodes?detail=1&limit=10000").await
    }

    /// Returns the jobs that were submitted over the REST interface, and other drivers.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn jobs(&self, cx: &CallContext) -> Result<Vec<RayJob>> {
        self.read(cx, "/api/jobs/").await
    }

    /// Returns the resources of the cluster by name: used and total.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn usage(&self, cx: &CallContext) -> Result<BTreeMap<String, (f64, f64)>> {
        let status: Value = self.read(cx, "/api/cluster_status").await?;
        let usage = status.pointer("/data/clusterStatus/loadMetricsReport/usage").cloned().unwrap_or_default();
        Ok(serde_json::from_value(usage).unwrap_or_default())
    }

    /// Returns at most `limit` tasks.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn tasks(&self, cx: &CallContext, limit: u32) -> Result<Vec<RayTask>> {
        self.state(cx, &format!("/api/v0/tasks?limit={limit}")).await
    }

    /// Returns the memory of each node that is alive.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn memory(&self, cx: &CallContext) -> Result<Vec<RayMemory>> {
        let reply: Value = self.read(cx, "/nodes?view=summary").await?;
        let nodes = reply.pointer("/data/summary").and_then(Value::as_array).cloned().unwrap_or_default();
        let alive = nodes.iter().filter(|node| node.pointer("/raylet/state").and_then(Value::as_str) == Some("ALIVE"));
        // Memory is written as total, available, percentage and used.
        let memory = |node: &Value| RayMemory {
            node_ip: node["ip"].as_str().unwrap_or_default().to_owned(),
            used: node.pointer("/mem/3").and_then(Value::as_u64).unwrap_or_default(),
            total: node.pointer("/mem/0").and_then(Value::as_u64).unwrap_or_default(),
            object_store_used: node.pointer("/raylet/objectStoreUsedMemory").and_then(Value::as_f64).unwrap_or_default()
                as u64,
        };
        Ok(alive.map(memory).collect())
    }

    /// Returns the identifiers of our jobs whose bundles wait for room, before they start or after the loss of a node.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn waiting(&self, cx: &CallContext) -> Result<Vec<String>> {
        let groups: Vec<RayPlacementGroup> = self.state(cx, "/api/v0/placement_groups?detail=1&limit=10000").await?;
        let waiting = groups.into_iter().filter(RayPlacementGroup::waits).map(|group| group.name);
        Ok(waiting.filter(|name| name.starts_with("gym-")).collect())
    }

    /// Returns `RAY_AUTH_MODE` of the cluster, `token` or `disabled`; `None` for a Ray that does not say. A process of Ray that has another one cannot
    /// take part, and Ray does not say why.
    pub(super) async fn auth_mode(&self, cx: &CallContext) -> Result<Option<String>> {
        #[derive(Deserialize)]
        struct Reply {
            authentication_mode: String,
        }
        let path = "/api/authentication_mode";
        let response = self.repeat(cx, Verb::Get, path, None).await?;
        match response.status {
            200 => {
                let mode = Self::parse::<Reply>(path, &response)?.authentication_mode;
                Ok(matches!(mode.as_str(), "token" | "disabled").then_some(mode))
            }
            404 => Ok(None),
            _ => Err(self.refused(path, &response)),
        }
    }

    pub(super) async fn placement_group(&self, cx: &CallContext, name: &str) -> Result<Option<RayPlacementGroup>> {
        let groups: Vec<RayPlacementGroup> = self.state(cx, "/api/v0/placement_groups?detail=1&limit=10000").await?;
        Ok(groups.into_iter().find(|group| group.name == name && group.state != "REMOVED"))
    }

    /// Returns a job; `None` if there is none of that identifier.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn job(&self, cx: &CallContext, id: &str) -> Result<Option<RayJob>> {
        let path = format!("/api/jobs/{id}");
        let response = self.repeat(cx, Verb::Get, &path, None).await?;
        match response.status {
            404 => Ok(None),
            200 => Self::parse(&path, &response).map(Some),
            _ => Err(self.refused(&path, &response)),
        }
    }

    /// Returns the whole output of a job's command so far.
    ///
    /// # Errors
    /// Those of the connection; `NotFound` if there is no such job.
    pub async fn logs(&self, cx: &CallContext, id: &str) -> Result<String> {
        #[derive(Deserialize)]
        struct Logs {
            #[serde(default)]
            logs: String,
        }
        let logs: Logs = self.read(cx, &format!("/api/jobs/{id}/logs")).await?;
        Ok(logs.logs)
    }

    /// Asks a job to stop; returns `false` if it had ended, or there is none of that identifier. Its command gets SIGTERM, and SIGKILL after the time that
    /// it was submitted with.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn stop(&self, cx: &CallContext, id: &str) -> Result<bool> {
        let path = format!("/api/jobs/{id}/stop");
        let response = self.repeat(cx, Verb::Post, &path, Some(Bytes::from_static(b"{}"))).await?;
        match response.status {
            404 => Ok(false),
            200 => {
                let stopped: Value = Self::parse(&path, &response)?;
                Ok(stopped["stopped"] == Value::Bool(true))
            }
            _ => Err(self.refused(&path, &response)),
        }
    }

    /// Submits a job. A repeated submission of the same job has no effect. While the cluster takes no jobs, `check_wanted` ends the wait with its error.
    pub(super) async fn submit(
        &self,
        cx: &CallContext,
        request: &JobRequest,
        check_wanted: &(dyn Fn() -> Result<()> + Sync),
    ) -> Result<()> {
        let body: Bytes =
            serde_json::to_vec(request).map_err(|error| Error::internal("the job").caused_by(error))?.into();
        let mut starting: Option<Error> = None;
        let response = loop {
            let response = match (self.repeat(cx, Verb::Post, JOBS, Some(body.clone())).await, starting.take()) {
                (Ok(response), _) => response,
                (Err(_), Some(starting)) if cx.check().is_err() => return Err(starting),
                (Err(error), _) => return Err(error),
            };
            if response.status == 200 {
                return Ok(());
            }
            // A cluster that has just started takes no jobs for some seconds, although its dashboard responds.
            let starts = matches!(response.status, 502..=504)
                || (response.status == 500 && response.message().contains(NO_AGENT));
            if !starts {
                break response;
            }
            let error = self.refused(JOBS, &response);
            let pause = async {
                sleep(START_RETRY_INTERVAL).await;
                Ok(())
            };
            if cx.bound(Execution::NotStarted, pause).await.is_err() {
                return Err(error);
            }
            check_wanted()?;
            starting = Some(error);
        };
        // The response to an earlier attempt may have been lost.
        if let Some(known) = self.job(cx, &request.submission_id).await?
            && known.metadata.as_ref() == Some(&request.metadata)
        {
            return Ok(());
        }
        Err(self.refused(JOBS, &response))
    }

    /// Uploads a package unless the cluster has it. Returns its URI.
    pub(super) async fn upload(&self, cx: &CallContext, name: &str, package: Bytes) -> Result<String> {
        if package.len() > UPLOAD_BYTES_MAX {
            let message = format!(
                "the program has {} MiB as a zip; Ray accepts {} MiB\n  fix: {SMALLER}",
                package.len() >> 20,
                UPLOAD_BYTES_MAX >> 20
            );
            return Err(Error::not_started(Code::ResourceExhausted, message).about("upload the program to Ray"));
        }
        let path = format!("/api/packages/gcs/{name}");
        if self.repeat(cx, Verb::Get, &path, None).await?.status != 200 {
            let response = self.repeat(cx, Verb::Put, &path, Some(package)).await?;
            if response.status != 200 {
                return Err(self.refused(&path, &response));
            }
        }
        Ok(format!("gcs://{name}"))
    }

    async fn state<T: DeserializeOwned>(&self, cx: &CallContext, path: &str) -> Result<Vec<T>> {
        let reply: StateReply<T> = self.read(cx, path).await?;
        let failed = || Error::unknown(Code::Unavailable, format!("{path}: {}", reply.msg));
        Ok(reply.data.ok_or_else(failed)?.result.result)
    }

    async fn read<T: DeserializeOwned>(&self, cx: &CallContext, path: &str) -> Result<T> {
        let response = self.repeat(cx, Verb::Get, path, None).await?;
        if response.status != 200 {
            return Err(self.refused(path, &response));
        }
        Self::parse(path, &response)
    }

    fn parse<T: DeserializeOwned>(path: &str, response: &RayResponse) -> Result<T> {
        serde_json::from_slice(&response.body).map_err(|error| {
            let said: String = String::from_utf8_lossy(&response.body).chars().take(200).collect();
            let message = format!("the response to {path} is not that of Ray's dashboard: {error}; it was {said}");
            Error::not_started(Code::FailedPrecondition, message)
        })
    }

    /// Repeats a request until there is a response, as long as `cx` allows: each of them may be repeated.
    async fn repeat(&self, cx: &CallContext, verb: Verb, path: &str, body: Option<Bytes>) -> Result<RayResponse> {
        let mut rng = fastrand::Rng::new();
        retry(cx, &RetryPolicy::default(), &mut rng, true, |_| self.send(cx, verb, path, body.clone())).await
    }

    async fn send(&self, cx: &CallContext, verb: Verb, path: &str, body: Option<Bytes>) -> Result<RayResponse> {
        let mut own = match verb {
            Verb::Put => cx.child(),
            Verb::Post if path == JOBS => cx.child().at_most(SUBMIT_TIMEOUT),
            _ => cx.child().at_most(CALL_TIMEOUT),
        };
        own.metadata = Metadata::new();
        own.reply_bytes_max = RESPONSE_BYTES_MAX;
        // Ray 2.51 answers a request without this header with status 500.
        own.metadata.push("user-agent", concat!("gym-client/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.token {
            own.metadata.push("authorization", format!("Bearer {}", token.token));
        }
        let route = Route::from(path.to_owned());
        let mut request = match body {
            Some(body) => Request::post(own, route, body),
            None => Request::get(own, route),
        };
        request.verb = verb;
        let answer = self.origin.send(request).await.map_err(|error| self.unreachable(error))?;
        Ok(RayResponse { status: answer.status.0, body: answer.message.head.to_bytes() })
    }

    /// Explains that there was no response.
    fn unreachable(&self, error: Error) -> Error {
        if !matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded) {
            return error;
        }
        if self.address.is_local() {
            let message = format!(
                "no Ray head of this machine responds at {}\n  fix: start one with `rgym run`, or with `ray start --head`",
                self.address.dashboard()
            );
            return Error::new(error.code(), error.execution(), message);
        }
        let message = format!(
            "Ray's dashboard at {} does not respond: {}\n  fix: check that the cluster runs, and start its head with `ray start --head \
             --dashboard-host=0.0.0.0` (by default, the dashboard accepts connections of its own machine only); if it has another port, set \
             ray_dashboard_address",
            self.address.dashboard(),
            error.chain().last().map_or_else(|| error.to_string(), |link| link.message.clone())
        );
        Error::new(error.code(), error.execution(), message)
    }

    /// Explains a response that reports an error.
    fn refused(&self, path: &str, response: &RayResponse) -> Error {
        let message = response.message();
        let dashboard = self.address.dashboard();
        let (code, text) = match (response.status, &self.token) {
            (401, Some(token)) => (
                Code::FailedPrecondition,
                format!(
                    "the Ray cluster at {dashboard} has not received the token from {}: {message}\n  fix: let what is between this process and the cluster \
                     pass the header `authorization`",
                    token.source
                ),
            ),
            (401, None) => (
                Code::FailedPrecondition,
                format!(
                    "the Ray cluster at {dashboard} requires a token, and this process has none\n  fix: put it into {TOKEN_SOURCES}"
                ),
            ),
            (403, Some(token)) => (
                Code::FailedPrecondition,
                format!(
                    "the Ray cluster at {dashboard} rejects the token from {}\n  fix: use the token of this cluster",
                    token.source
                ),
            ),
            (404, _) => (Code::NotFound, format!("{path}: {message}")),
            (413, _) => (Code::ResourceExhausted, format!("{path}: {message}\n  fix: {SMALLER}")),
            (500, _) if message.contains(NO_AGENT) => (
                Code::Unavailable,
                format!(
                    "the dashboard at {dashboard} responds, and the job agent of its head does not: {message}\n  fix: {AGENT_FIX}"
                ),
            ),
            (status, _) => (Code::Unavailable, format!("Ray answered {path} with {status}: {message}")),
        };
        Error::new(code, Execution::Finished, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_is_too_large_is_not_sent() {
        // Nothing is contacted, so no dashboard listens there.
        let address = RayAddress::parse("http://127.0.0.1:1", "a test").unwrap();
        let dashboard = RayDashboard::to(&address, None).unwrap();
        let package = Bytes::from(vec![0; UPLOAD_BYTES_MAX + 1]);
        let error = dashboard.upload(&CallContext::within(CALL_TIMEOUT), "_ray_pkg_a.zip", package).await.unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        let text = error.to_string();
        for part in
            ["the program has 100 MiB as a zip; Ray accepts 100 MiB", "fix: ", "--release", "RayOptions::program"]
        {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}
