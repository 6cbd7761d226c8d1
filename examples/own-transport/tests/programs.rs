//! The program with QUIC: its servers, its worker group and its reports.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const PROGRAM: &str = env!("CARGO_BIN_EXE_own_transport");

fn program(arguments: &[&str], secret: Option<&str>) -> Output {
    let mut command = Command::new(PROGRAM);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).args(arguments).env_remove("GYM_QUIC_SECRET");
    command.envs(secret.map(|secret| ("GYM_QUIC_SECRET", secret)));
    command.output().expect("the program runs")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_worker_group_of_four_processes_is_reached_over_quic() {
    let output = program(&["group"], Some("group"));
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert_eq!(
        said.lines().filter(|line| line.starts_with("quic://") && line.ends_with(" over quic")).count(),
        4,
        "{said}"
    );
    assert!(said.contains("squares: [144, 144, 144, 144]"), "{said}");
}

#[test]
fn a_group_that_requires_quic_does_not_start_without_the_secret_and_says_why() {
    let output = program(&["group"], None);
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("the environment variable GYM_QUIC_SECRET is not set"), "{said}");
}

#[test]
fn doctor_reports_quic_like_every_other_transport() {
    let with = program(&["doctor", "--require-transport", "quic"], Some("doctor"));
    assert!(text(&with).lines().any(|line| line.starts_with("quic") && line.contains("yes")), "{}", text(&with));
    let without = program(&["doctor", "--require-transport", "quic"], None);
    assert!(!without.status.success() && text(&without).contains("quic cannot be used here"), "{}", text(&without));
}

/// Kills the program when the test ends.
struct Running(Child);
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_quickstarts_rollouts_run_over_quic_and_status_names_it() {
    let folder = tempfile::tempdir().expect("a directory");
    let mut servers = Command::new(PROGRAM);
    servers.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).env("GYM_QUIC_SECRET", "status");
    servers.args(["run", "--config", "examples/configs/quickstart.yaml"]);
    servers.args(["++transport=[quic,http]", "+head_server.port=0"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut servers = Running(servers.spawn().expect("the program starts"));
    let lines = BufReader::new(servers.0.stdout.take().expect("a pipe")).lines();
    let (sender, ready) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if let Some((_, head)) = line.split_once("servers, head ") {
                let _ = sender.send(head.to_owned());
            }
        }
    });
    let head = ready.recv_timeout(Duration::from_secs(60)).expect("the servers start");
    let secret = Some("status");

    let output = folder.path().join("rollouts.jsonl").display().to_string();
    let collect = ["collect", "--no-serve", "--head-url", &head, "--agent", "math_simple_agent", "--limit", "8"];
    let files = ["--input", "examples/data/math.jsonl", "--output", &output];
    let collected = program(&[&collect[..], &files].concat(), secret);
    assert!(collected.status.success(), "{}", text(&collected));
    assert_eq!(std::fs::read_to_string(&output).expect("rollouts").lines().count(), 8);

    let status = text(&program(&["status", "--head-url", &head], secret));
    let line = status.lines().find(|line| line.contains("math_simple_agent")).unwrap_or_default();
    assert!(line.contains("quic"), "{status}");
}
