//! A dashboard of Ray: its REST interface as Ray 2.60 plays it, with the texts of its errors. Records every request.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use gym_group::ray::RayAddress;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The largest step of a paused clock. Without it, the clock would jump to the deadline of a request whose bytes are on the way.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Real time between two steps, in which bytes arrive that are on the way. The runtime finds nothing to do meanwhile, so without it a busy machine, which
/// runs the kernel or the thread of a file late, would see seconds of the clock pass in a moment.
const PAUSE_INTERVAL: Duration = Duration::from_micros(200);
/// The limit of every wait of a test.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) const VERSION: &str = "GET /api/version";
pub(crate) const NODES: &str = "GET /api/v0/nodes?detail=1&limit=10000";
pub(crate) const GROUPS: &str = "GET /api/v0/placement_groups?detail=1&limit=10000";
pub(crate) const SUBMIT: &str = "POST /api/jobs/";

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// The method and the path, such as `GET /api/version`.
    pub(crate) line: String,
    pub(crate) authorization: Option<String>,
    pub(crate) body: Bytes,
}

/// What happens to a request.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Reply {
        status: u16,
        media_type: &'static str,
        body: Vec<u8>,
    },
    /// These bytes, and the end of the connection.
    Raw(&'static [u8]),
    /// The connection is closed.
    Closed,
    /// Nothing, and the connection stays open.
    Never,
}

impl Answer {
    /// An error of Ray is plain text.
    pub(crate) fn text(status: u16, text: impl Into<String>) -> Self {
        Self::Reply { status, media_type: "text/plain; charset=utf-8", body: text.into().into_bytes() }
    }

    pub(crate) fn html(status: u16, page: &str) -> Self {
        Self::Reply { status, media_type: "text/html", body: page.as_bytes().to_vec() }
    }

    pub(crate) fn json(value: &Value) -> Self {
        Self::Reply { status: 200, media_type: "application/json", body: value.to_string().into_bytes() }
    }
}

/// A job that was submitted.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// The body of its submission.
    pub(crate) request: Value,
    pub(crate) status: &'static str,
    pub(crate) message: Option<String>,
    pub(crate) exit_code: Option<i32>,
    pub(crate) log: String,
    /// A job that was asked to stop has ended at the second look.
    looks_until_stopped: Option<u32>,
}

impl Job {
    pub(crate) fn id(&self) -> String {
        self.request["submission_id"].as_str().expect("a text").to_owned()
    }

    /// Returns a variable as the driver gets it: Ray has replaced the names of other variables, whose values may have quotes.
    pub(crate) fn variable(&self, name: &str) -> String {
        let text = self.request["runtime_env"]["env_vars"][name].as_str().expect("a text");
        ["${HOME}", "$HOME"].iter().fold(text.to_owned(), |text, name| text.replace(name, r#"/home/"ray""#))
    }

    /// Returns the specification that the driver of the job reads.
    pub(crate) fn spec(&self) -> Value {
        serde_json::from_str(&self.variable("GYM_RAY_SPEC")).expect("the specification is JSON")
    }

    /// Ends the job as Ray does when the command fails: the message has the end of the log.
    pub(crate) fn fail(&mut self, exit_code: i32) {
        let log = &self.log;
        self.message = Some(format!(
            "Job entrypoint command failed with exit code {exit_code}, last available logs (truncated to 20,000 chars):\n{log}"
        ));
        (self.status, self.exit_code) = ("FAILED", Some(exit_code));
    }

    fn has_ended(&self) -> bool {
        matches!(self.status, "STOPPED" | "SUCCEEDED" | "FAILED")
    }

    fn details(&self, id: &str) -> Value {
        json!({
            "type": "SUBMISSION",
            "job_id": "02000000",
            "submission_id": id,
            "driver_info": {"id": "02000000", "node_ip_address": "10.0.0.1", "pid": "4711"},
            "status": self.status,
            "entrypoint": self.request["entrypoint"],
            "message": self.message,
            "error_type": null,
            "start_time": 1_764_000_000_000_u64,
            "end_time": null,
            "metadata": self.request["metadata"],
            "runtime_env": self.request["runtime_env"],
            "driver_agent_http_address": "http://10.0.0.1:52365",
            "driver_node_id": "head",
            "driver_exit_code": self.exit_code,
        })
    }
}

/// Decides on a request instead of the dashboard.
type Rule = Box<dyn FnMut(&Seen) -> Option<Answer> + Send>;

/// The state of the dashboard, which a test may change.
pub(crate) struct Cluster {
    pub(crate) requests: Vec<Seen>,
    /// The version of the interface.
    pub(crate) version: &'static str,
    pub(crate) token: Option<&'static str>,
    pub(crate) nodes: Vec<Value>,
    pub(crate) groups: Vec<Value>,
    pub(crate) packages: BTreeMap<String, Bytes>,
    pub(crate) jobs: BTreeMap<String, Job>,
    /// What a job does when it is submitted. Default: it waits for room.
    pub(crate) play: Box<dyn FnMut(&mut Job) + Send>,
    /// Applied to requests that the dashboard then does not get.
    pub(crate) before: Option<Rule>,
    /// Applied to requests that have had their effect.
    pub(crate) after: Option<Rule>,
}

/// A running dashboard. Dropping it closes its connections.
pub(crate) struct Fake {
    cluster: Arc<Mutex<Cluster>>,
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

/// Returns a node as the state API lists it.
pub(crate) fn node(ip: &str, is_head: bool, state: &str, resources: &Value) -> Value {
    json!({
        "node_id": if is_head { "head".to_owned() } else { format!("node-{ip}") },
        "node_ip": ip,
        "is_head_node": is_head,
        "state": state,
        "state_message": if state == "DEAD" { json!("health check failed due to missing too many heartbeats") } else { Value::Null },
        "node_name": ip,
        "resources_total": resources,
        "labels": {"ray.io/node-id": format!("node-{ip}")},
        "start_time_ms": 1_764_000_000_000_u64,
        "end_time_ms": 0,
    })
}

/// Returns a line of a driver.
pub(crate) fn event(seq: u64, kind: &str, fields: Value) -> String {
    let mut event = json!({"seq": seq, "t": 1_764_000_000.5, "kind": kind});
    if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
        event.extend(fields);
    }
    format!("@gym {event}\n")
}

/// Plays a job whose bundles find no room.
pub(crate) fn no_room(job: &mut Job) {
    job.log = format!("{}{}", waiting(), event(3, "ended", json!({"code": 3, "why": "there is no room"})));
}

/// Returns the log of a driver that waits for room.
pub(crate) fn waiting() -> String {
    let shim = event(1, "shim", json!({"pid": 4711, "ray": "2.60.0", "node_id": "node-10.0.0.1"}));
    format!(
        "2026-01-01 00:00:00,000\tINFO worker.py:1694 -- Connecting to existing Ray cluster\n{shim}{}",
        event(2, "waiting", json!({"attempt": 1}))
    )
}

/// Returns the log of a driver whose bundles have their nodes.
pub(crate) fn placed() -> String {
    format!("{}{}", waiting(), event(3, "placed", json!({"nodes": ["node-10.0.0.11", "node-10.0.0.12"]})))
}

impl Fake {
    /// Starts a dashboard of a head without CPUs, two nodes of 4 CPUs and 4 GPUs, and a third that died.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let some = |ip: &str| json!({"CPU": 4.0, "GPU": 4.0, "memory": 8e9, "object_store_memory": 2e9, format!("node:{ip}"): 1.0});
        let cluster = Cluster {
            requests: Vec::new(),
            version: "4",
            token: None,
            nodes: vec![
                node("10.0.0.1", true, "ALIVE", &json!({"node:__internal_head__": 1.0, "memory": 8e9})),
                node("10.0.0.11", false, "ALIVE", &some("10.0.0.11")),
                node("10.0.0.12", false, "ALIVE", &some("10.0.0.12")),
                node("10.0.0.13", false, "DEAD", &some("10.0.0.13")),
            ],
            groups: Vec::new(),
            packages: BTreeMap::new(),
            jobs: BTreeMap::new(),
            play: Box::new(|job| job.log = waiting()),
            before: None,
            after: None,
        };
        let cluster = Arc::new(Mutex::new(cluster));
        let mut tasks = JoinSet::new();
        tasks.spawn(async {
            loop {
                sleep(POLL_INTERVAL).await;
                // A paused clock stands still while a blocking task runs.
                let _ = tokio::task::spawn_blocking(|| std::thread::park_timeout(PAUSE_INTERVAL)).await;
            }
        });
        tasks.spawn(accept(listener, Arc::clone(&cluster)));
        Self { cluster, address, _tasks: tasks }
    }

    /// Returns the URL of the dashboard.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn address(&self) -> RayAddress {
        RayAddress::parse(&self.url(), "--ray-address").expect("an address")
    }

    /// Reads or changes the state.
    pub(crate) fn with<T>(&self, of: impl FnOnce(&mut Cluster) -> T) -> T {
        of(&mut self.cluster.lock())
    }

    /// Decides on requests instead of the dashboard.
    pub(crate) fn before(&self, rule: impl FnMut(&Seen) -> Option<Answer> + Send + 'static) {
        self.with(|cluster| cluster.before = Some(Box::new(rule)));
    }

    /// Replaces the responses to requests.
    pub(crate) fn after(&self, rule: impl FnMut(&Seen) -> Option<Answer> + Send + 'static) {
        self.with(|cluster| cluster.after = Some(Box::new(rule)));
    }

    /// Decides what each job does when it is submitted.
    pub(crate) fn play(&self, play: impl FnMut(&mut Job) + Send + 'static) {
        self.with(|cluster| cluster.play = Box::new(play));
    }

    /// Returns all requests, by method and path.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.with(|cluster| cluster.requests.iter().map(|seen| seen.line.clone()).collect())
    }

    /// Returns the requests whose method and path begin so.
    pub(crate) fn seen(&self, begin: &str) -> Vec<Seen> {
        self.with(|cluster| cluster.requests.iter().filter(|seen| seen.line.starts_with(begin)).cloned().collect())
    }

    /// Returns the identifiers of the jobs that were asked to stop, as often as they were.
    pub(crate) fn stops(&self) -> Vec<String> {
        let id = |line: &String| line.strip_prefix(SUBMIT)?.strip_suffix("/stop").map(str::to_owned);
        self.lines().iter().filter_map(id).collect()
    }

    /// Returns the jobs, the first one first.
    pub(crate) fn jobs(&self) -> Vec<Job> {
        self.with(|cluster| cluster.jobs.values().cloned().collect())
    }

    /// Returns the only job.
    pub(crate) fn job(&self) -> Job {
        let mut jobs = self.jobs();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        jobs.remove(0)
    }

    /// Waits until the cluster is so.
    pub(crate) async fn until(&self, what: &str, reached: impl Fn(&Cluster) -> bool) {
        let waiting = async {
            while !self.with(|cluster| reached(cluster)) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(LONG, waiting).await.is_err() {
            panic!("{what}: never; {:#?}", self.lines());
        }
    }
}

async fn accept(listener: TcpListener, cluster: Arc<Mutex<Cluster>>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(serve(stream, Arc::clone(&cluster)));
    }
}

/// Answers the requests of one connection.
async fn serve(mut stream: TcpStream, cluster: Arc<Mutex<Cluster>>) -> io::Result<()> {
    let mut input = BytesMut::new();
    while let Some(seen) = read(&mut stream, &mut input).await? {
        let answer = cluster.lock().decide(&seen);
        match answer {
            Answer::Reply { status, media_type, body } => {
                let length = body.len();
                let head = format!(
                    "HTTP/1.1 {status} Ray\r\ncontent-type: {media_type}\r\ncontent-length: {length}\r\nserver: Python/3.11 aiohttp/3.13\r\n\r\n"
                );
                stream.write_all(&[head.as_bytes(), &body].concat()).await?;
            }
            Answer::Raw(bytes) => {
                stream.write_all(bytes).await?;
                return Ok(());
            }
            Answer::Closed => return Ok(()),
            Answer::Never => std::future::pending().await,
        }
    }
    Ok(())
}

/// Reads a request; `None` at the end of the connection.
async fn read(stream: &mut TcpStream, input: &mut BytesMut) -> io::Result<Option<Seen>> {
    let end = loop {
        if let Some(end) = input.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(input).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&input[..end]).into_owned();
    input.advance(end + 4);
    let header = |name: &str| {
        let line = |line: &str| {
            let (known, value) = line.split_once(':')?;
            known.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        };
        head.lines().skip(1).find_map(line)
    };
    let length: usize = header("content-length").map_or(0, |length| length.parse().expect("a length"));
    while input.len() < length {
        if stream.read_buf(input).await? == 0 {
            return Ok(None);
        }
    }
    let line = head.lines().next().and_then(|line| line.strip_suffix(" HTTP/1.1")).expect("a request").to_owned();
    Ok(Some(Seen { line, authorization: header("authorization"), body: input.split_to(length).freeze() }))
}

impl Cluster {
    fn decide(&mut self, seen: &Seen) -> Answer {
        self.requests.push(seen.clone());
        if let Some(instead) = self.before.as_mut().and_then(|rule| rule(seen)) {
            return instead;
        }
        let answer = self.answer(seen);
        self.after.as_mut().and_then(|rule| rule(seen)).unwrap_or(answer)
    }

    fn answer(&mut self, seen: &Seen) -> Answer {
        if let Some(token) = self.token {
            match &seen.authorization {
                None => return Answer::text(401, "Unauthorized: Missing authentication token"),
                Some(given) if *given != format!("Bearer {token}") => {
                    return Answer::text(403, "Forbidden: Invalid authentication token");
                }
                Some(_) => {}
            }
        }
        let (verb, path) = seen.line.split_once(' ').expect("a method and a path");
        let path = path.split('?').next().unwrap_or_default();
        if let Some(name) = path.strip_prefix("/api/packages/gcs/") {
            return self.package(verb, name, seen);
        }
        match (verb, path) {
            ("GET", "/api/version") => Answer::json(&json!({
                "version": self.version,
                "ray_version": "2.60.0",
                "ray_commit": "0123456789abcdef0123456789abcdef01234567",
                "session_name": "session_2026-01-01_00-00-00_000000_1",
            })),
            ("GET", "/api/v0/nodes") => listed(&self.nodes),
            ("GET", "/api/v0/placement_groups") => listed(&self.groups),
            ("GET", "/api/cluster_status") => Answer::json(&json!({
                "result": true,
                "msg": "Got cluster status.",
                "data": {"autoscalingStatus": null, "autoscalingError": null, "clusterStatus": {"loadMetricsReport": {
                    "usage": {"CPU": [3.0, 8.0], "GPU": [0.0, 8.0], "memory": [0.0, 1.6e10]},
                }}},
            })),
            ("GET", "/api/jobs/") => {
                let driver = json!({
                    "type": "DRIVER", "job_id": "01000000", "submission_id": null, "status": "RUNNING", "entrypoint": "python a.py",
                    "message": null, "metadata": {}, "driver_node_id": null, "driver_exit_code": null,
                });
                let jobs = self.jobs.iter().map(|(id, job)| job.details(id));
                Answer::json(&std::iter::once(driver).chain(jobs).collect())
            }
            ("POST", "/api/jobs/") => self.submit(&seen.body),
            (verb, path) => {
                match path.strip_prefix("/api/jobs/").map(|rest| rest.split_once('/').unwrap_or((rest, ""))) {
                    Some((id, rest)) => self.job(verb, id, rest),
                    None => Answer::text(404, "404: Not Found"),
                }
            }
        }
    }

    /// Submits a job for somebody else.
    pub(crate) fn submit_directly(&mut self, request: &Value) {
        self.submit(request.to_string().as_bytes());
    }

    fn package(&mut self, verb: &str, name: &str, seen: &Seen) -> Answer {
        match verb {
            "PUT" if seen.body.len() > 100 << 20 => Answer::text(413, "Maximum request body size 104857600 exceeded."),
            "PUT" => {
                self.packages.insert(name.to_owned(), seen.body.clone());
                Answer::text(200, "")
            }
            _ if self.packages.contains_key(name) => Answer::text(200, ""),
            _ => Answer::text(404, format!("Package gcs://{name} does not exist")),
        }
    }

    fn submit(&mut self, body: &[u8]) -> Answer {
        let Ok(request) = serde_json::from_slice::<Value>(body) else {
            return Answer::text(500, "500 Internal Server Error\n\nServer got itself in trouble");
        };
        if !request["entrypoint"].is_string() {
            let text = "Traceback (most recent call last):\n  File \"/usr/lib/python3.11/site-packages/ray/dashboard/modules/job/utils.py\", line 101, in \
                        parse_and_validate_request\n    return validate_request_type(json_data, request_type)\nTypeError: JobSubmitRequest.__init__() missing 1 \
                        required positional argument: 'entrypoint'\n";
            return Answer::text(400, text);
        }
        let id = request["submission_id"].as_str().expect("a text").to_owned();
        if self.jobs.contains_key(&id) {
            return Answer::text(500, already_exists(&id));
        }
        let mut job = Job {
            request,
            status: "RUNNING",
            message: Some("Job is currently running.".to_owned()),
            exit_code: None,
            log: String::new(),
            looks_until_stopped: None,
        };
        (self.play)(&mut job);
        self.jobs.insert(id.clone(), job);
        Answer::json(&json!({"job_id": id, "submission_id": id}))
    }

    fn job(&mut self, verb: &str, id: &str, rest: &str) -> Answer {
        let Some(job) = self.jobs.get_mut(id) else {
            return Answer::text(404, format!("Job {id} does not exist"));
        };
        match (verb, rest) {
            ("GET", "") => {
                if let Some(looks) = &mut job.looks_until_stopped {
                    match looks {
                        0 => job.status = "STOPPED",
                        more => *more -= 1,
                    }
                }
                Answer::json(&job.details(id))
            }
            ("GET", "logs") => Answer::json(&json!({"logs": job.log})),
            ("POST", "stop") => {
                let stops = !job.has_ended();
                if stops {
                    job.looks_until_stopped.get_or_insert(1);
                }
                Answer::json(&json!({"stopped": stops}))
            }
            _ => Answer::text(404, "404: Not Found"),
        }
    }
}

/// Returns the list of a state API.
fn listed(rows: &[Value]) -> Answer {
    Answer::json(&json!({
        "result": true,
        "msg": "",
        "data": {"result": {
            "total": rows.len(), "num_after_truncation": rows.len(), "num_filtered": rows.len(), "result": rows,
            "partial_failure_warning": "", "warnings": null,
        }},
    }))
}

/// Returns the traceback of a head whose job agent rejects a second submission: the traceback of the agent, a period, and the end of its own.
pub(crate) fn already_exists(id: &str) -> String {
    format!(
        "Traceback (most recent call last):\n  File \"/usr/lib/python3.11/site-packages/ray/dashboard/modules/job/job_head.py\", line 421, in submit_job\n    \
         resp = await job_agent_client.submit_job_internal(submit_request)\n  File \
         \"/usr/lib/python3.11/site-packages/ray/dashboard/modules/job/job_head.py\", line 134, in _raise_error\n    raise RuntimeError(f\"Request failed with \
         status code {{status}}: {{error_text}}.\")\nRuntimeError: Request failed with status code 400: Traceback (most recent call last):\n  File \
         \"/usr/lib/python3.11/site-packages/ray/dashboard/modules/job/job_manager.py\", line 553, in submit_job\n    raise ValueError(\nValueError: Job with \
         submission_id {id} already exists. Please use a different submission_id.\n.\n"
    )
}
