//! Cases about the address `local`, with a program `ray` that only plays a head: it serves what is looked at, and has a child that leaves its session.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use gym_core::testing::free_port;

use crate::fixture::{Started, TestFolder, ended_with, get, row, said_until};
use crate::plan::PLAN;

const FAKE: &str = r#"#!/usr/bin/env python3
import http.server, os, pathlib, signal, socket, subprocess, sys
here = pathlib.Path(__file__).parent
assert sys.argv[1:4] == ["start", "--head", "--block"], sys.argv
options = dict(option[2:].partition("=")[::2] for option in sys.argv[2:])
if (here / "fails").exists():
    print("ERROR: no space left on device", file=sys.stderr)
    sys.exit(1)
assert pathlib.Path(options["temp-dir"]).stat().st_mode & 0o777 == 0o700
assert options["dashboard-host"] == "127.0.0.1" and os.environ["RAY_ADDRESS"] == "127.0.0.1:" + options["port"]
(pathlib.Path(options["temp-dir"]) / "session_latest").mkdir()
gcs = socket.create_server(("127.0.0.1", int(options["port"])))
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(0)))
with open(here / "pids", "a") as file:
    file.write(f"{os.getpid()}\n{child.pid}\n")
(here / "temp-dir").write_text(options["temp-dir"])
class Dashboard(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"version":"4","ray_version":"2.60.0"}'
        if "nodes" in self.path:
            body = b'{"data":{"result":{"result":[{"node_id":"a","node_ip":"127.0.0.1","is_head_node":true,"state":"ALIVE"}]}}}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["dashboard-port"])), Dashboard).serve_forever()
"#;

/// A folder with the program `ray`, and a port for its dashboard.
struct FakeRay {
    folder: tempfile::TempDir,
    dashboard: u16,
}

impl FakeRay {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("ray");
        std::fs::write(&program, FAKE).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder, dashboard: free_port() }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the processes of the heads so far.
    fn pids(&self) -> Vec<u32> {
        let text = std::fs::read_to_string(self.file("pids")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// Waits until a head has its child, which it ends from now on when it is told to end.
    #[expect(clippy::disallowed_methods, reason = "another process has no event to wait for")]
    fn until_it_runs(&self) {
        let began = Instant::now();
        while self.pids().len() < 2 {
            assert!(began.elapsed() < Duration::from_secs(60), "the head does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the command `rgym run` with this program in `PATH`.
    fn command(&self, folder: &TestFolder, arguments: &[&str]) -> Command {
        self.prepared(folder.command(&[&["run", "--config", "gym.yaml", &folder.port()][..], arguments].concat()))
    }

    /// Lets a command find this program, and its dashboard.
    fn prepared(&self, mut command: Command) -> Command {
        command.arg(format!("+ray_dashboard_address=http://127.0.0.1:{}", self.dashboard));
        let path = format!("{}:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        command
            .env("PATH", path)
            .env("TMPDIR", self.folder.path())
            .env_remove("RAY_ADDRESS")
            .env_remove("RAY_AUTH_TOKEN")
            .env("RAY_AUTH_MODE", "disabled");
        command
    }

    /// Starts `rgym run`; returns what it said before it was ready, and its further error output.
    fn start(&self, folder: &TestFolder) -> (Started, String, BufReader<ChildStderr>) {
        Self::started(self.command(folder, &["+ray_head_node_address=local"]))
    }

    /// As [`FakeRay::start`], for this command.
    fn started(mut command: Command) -> (Started, String, BufReader<ChildStderr>) {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut started = Started { child, said: Vec::new() };
        let mut error = BufReader::new(started.child.stderr.take().unwrap());
        let said = said_until(&mut error.by_ref().lines(), "Ray c");
        let said = if said.contains("Starting") {
            said + &said_until(&mut error.by_ref().lines(), "Started Ray")
        } else {
            said
        };
        said_until(&mut BufReader::new(started.child.stdout.take().unwrap()).lines(), "ready: ");
        (started, said, error)
    }
}

fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

#[expect(clippy::disallowed_methods, reason = "another process has no event to wait for")]
fn until_gone(pids: &[u32]) {
    let began = Instant::now();
    while pids.iter().any(|pid| lives(*pid)) {
        assert!(began.elapsed() < Duration::from_secs(60), "{pids:?} live");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn local_starts_one_ray_head_and_stops_only_that() {
    let ray = FakeRay::new();
    // A head of somebody else, which must survive.
    let others = FakeRay::new();
    let temporary = tempfile::tempdir().unwrap();
    std::fs::set_permissions(temporary.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let port = free_port();
    let mut other = Started {
        child: Command::new(others.file("ray"))
            .args(["start", "--head", "--block", "--dashboard-host=127.0.0.1", &format!("--port={port}")])
            .args([
                format!("--temp-dir={}", temporary.path().display()),
                format!("--dashboard-port={}", others.dashboard),
            ])
            .env("RAY_ADDRESS", format!("127.0.0.1:{port}"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
        said: Vec::new(),
    };
    others.until_it_runs();

    let first = TestFolder::new();
    let (mut owner, said, mut error) = ray.start(&first);
    assert!(said.starts_with("Starting Ray cluster...\n"), "{said}");
    assert!(said.lines().last().unwrap().starts_with("Started Ray cluster at ray://127.0.0.1:"), "{said}");
    assert!(get(ray.dashboard, "/api/version").contains("2.60.0"));
    let pids = ray.pids();
    assert!(pids.len() == 2 && pids.iter().all(|pid| lives(*pid)), "{pids:?}");

    // A second command uses the head, and does not stop it.
    let second = TestFolder::new();
    let (user, said, mut more) = ray.start(&second);
    assert!(said.contains("Connecting to Ray cluster at specified address: "), "{said}");
    assert!(said.contains("(local from command line)"), "{said}");
    let said = said_until(&mut more.by_ref().lines(), "Ray already initialized");
    assert!(said.contains("Ray already initialized: Ray 2.60.0 with 1 node"), "{said}");
    assert_eq!(user.interrupt(), Some(0));

    // So does one that has the address from its environment, and the dashboard from its configuration.
    let third = TestFolder::new();
    let mut command = ray.command(&third, &[]);
    command.env("RAY_ADDRESS", "local");
    let (user, said, _more) = FakeRay::started(command);
    assert!(said.contains("(local from RAY_ADDRESS)"), "{said}");
    assert_eq!(user.interrupt(), Some(0));
    assert_eq!(ray.pids(), pids, "no second head was started");
    assert!(pids.iter().all(|pid| lives(*pid)), "the head of the first command lives");

    owner.signal(Signal::INT);
    assert_eq!(owner.child.wait().unwrap().code(), Some(0));
    said_until(&mut error.by_ref().lines(), "stopped the Ray cluster");
    assert!(pids.iter().all(|pid| !lives(*pid)), "nothing of the head is left");
    let folder = std::fs::read_to_string(ray.file("temp-dir")).unwrap();
    assert!(!PathBuf::from(&folder).exists(), "{folder} is removed");
    assert!(other.child.try_wait().unwrap().is_none(), "the other head lives");
    // It ends its child, unless it is killed before.
    other.signal(Signal::TERM);
    other.child.wait().unwrap();
}

pub(crate) fn a_collection_with_its_own_servers_has_a_ray_head_until_it_ends() {
    let (ray, folder) = (FakeRay::new(), TestFolder::new());
    folder.tasks([row("0123", 1)]);
    let address = "+ray_head_node_address=local";
    let mut collect = ray.prepared(folder.collect(&["--config", "gym.yaml", &folder.port(), address]));
    let (_, said) = ended_with(&collect.output().unwrap(), 0);
    let place = |text: &str| said.find(text).unwrap_or_else(|| panic!("{text}: {said}"));
    let (started, stopped) = (place("Started Ray cluster at ray://127.0.0.1:"), place("stopped the Ray cluster"));
    assert!(place("Starting Ray cluster...") < started && started < place("started 4 servers") && started < stopped);
    assert_eq!(folder.rollouts().len(), 1);
    let pids = ray.pids();
    assert!(pids.len() == 2 && pids.iter().all(|pid| !lives(*pid)), "nothing of the head is left: {pids:?}");

    // Running servers have their own cluster, or none.
    let running = folder.start(&[]);
    let head = folder.head();
    let mut collect = ray.prepared(folder.collect(&["--head-url", &head, "--overwrite", address]));
    let (_, said) = ended_with(&collect.output().unwrap(), 0);
    assert!(!said.contains("Ray"), "{said}");
    assert_eq!(ray.pids(), pids, "no second head was started");
    assert_eq!(running.interrupt(), Some(0));

    // The measurement of a configuration starts its servers too.
    let mut plan = ray.prepared(folder.command(&PLAN));
    let (_, said) = ended_with(&plan.args([&folder.port(), address]).output().unwrap(), 0);
    assert!(said.contains("Started Ray cluster") && said.contains("stopped the Ray cluster"), "{said}");
}

pub(crate) fn a_killed_command_leaves_no_ray_head() {
    let (ray, folder) = (FakeRay::new(), TestFolder::new());
    let (started, _, _error) = ray.start(&folder);
    let pids = ray.pids();
    assert_eq!(pids.len(), 2);
    started.signal(Signal::KILL);
    until_gone(&pids);
}

pub(crate) fn a_ray_head_that_cannot_start_is_explained() {
    let (ray, folder) = (FakeRay::new(), TestFolder::new());
    let refused = |command: &mut Command| {
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains("Starting Ray cluster...") && error.contains("start a Ray head on this machine for local"),
            "{error}"
        );
        error
    };
    std::fs::write(ray.file("fails"), "").unwrap();
    // From the lowest layer.
    let error = refused(ray.command(&folder, &[]).env("RAY_ADDRESS", "local"));
    for text in ["local (RAY_ADDRESS)", "exit status: 1", "ERROR: no space left on device", "fix: read the lines above"]
    {
        assert!(error.contains(text), "{text}: {error}");
    }
    std::fs::write(folder.file("env.yaml"), "ray_head_node_address: local\n").unwrap();
    let error = refused(ray.command(&folder, &[]).env("PATH", folder.directory.path()));
    for text in ["env.yaml:1", "the program ray of Ray is not installed", "pip install \"ray[default]==2.60.0\""] {
        assert!(error.contains(text), "{text}: {error}");
    }
}

pub(crate) fn a_taken_port_of_the_dashboard_is_named_and_another_one_used() {
    let (ray, folder) = (FakeRay::new(), TestFolder::new());
    // Not a dashboard of Ray: it accepts connections, and does not respond.
    let _taken = std::net::TcpListener::bind(("127.0.0.1", ray.dashboard)).unwrap();
    let (started, said, _error) = ray.start(&folder);
    assert!(
        said.contains(&format!("{} ", ray.dashboard)) && said.contains("taken, so this head has the port"),
        "{said}"
    );
    assert!(said.contains("fix: free it") && said.contains("Started Ray cluster at ray://"), "{said}");
    let pids = ray.pids();
    assert_eq!(started.interrupt(), Some(0));
    assert!(pids.iter().all(|pid| !lives(*pid)));
}
