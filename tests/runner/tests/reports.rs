//! The runner on a test program of its own: what it prints of tests that pass, fail, hang, cannot run or leave something.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

/// A test program as cargo's harness takes its arguments.
const PROGRAM: &str = r#"#!/bin/bash
if [ "$1" = --list ]; then printf 'passes: test\nfails: test\nabsent: test\nmod::leaves: test\n'; exit; fi
case "$2" in
  passes) [ -d "$TMPDIR" ] && [ "$PWD" = "$CARGO_MANIFEST_DIR" ] ;;
  fails) echo 'the reason'; exit 101 ;;
  absent) echo 'test absent ... NOT RUN: no device' ;;
  mod::leaves) setsid sleep 600 > /dev/null & ;;
esac
"#;

fn run(folder: &Path, commands: &str, arguments: &[&str]) -> (Output, String) {
    let (program, messages) = (folder.join("program"), folder.join("messages.json"));
    // Written by another process: this one may fork while the file is open, and a program that is open for writing does not start.
    let copied = Command::new("cp").arg("/dev/stdin").arg(&program).stdin(file(folder, PROGRAM)).status().unwrap();
    assert!(copied.success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let message = serde_json::json!({
        "reason": "compiler-artifact", "package_id": "path+file:///gym-core#0.1.0", "manifest_path": folder.join("Cargo.toml"),
        "target": {"kind": ["test"], "name": "own"}, "profile": {"test": true}, "executable": program,
    });
    fs::write(&messages, format!("{message}\n")).unwrap();
    fs::write(folder.join("commands.tsv"), commands).unwrap();
    let mut runner = Command::new(env!("CARGO_BIN_EXE_test-runner"));
    // What other tests have in the machine's shared memory meanwhile is not this run's.
    fs::create_dir_all(folder.join("shm")).unwrap();
    runner.arg("--shared-memory").arg(folder.join("shm"));
    runner
        .arg(&messages)
        .arg("--commands")
        .arg(folder.join("commands.tsv"))
        .arg("--outputs")
        .arg(folder.join("outputs"));
    let output =
        runner.arg("--counts").arg(folder.join("counts")).args(["--ending", "1"]).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

fn file(folder: &Path, text: &str) -> fs::File {
    fs::write(folder.join("text"), text).unwrap();
    fs::File::open(folder.join("text")).unwrap()
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let at = rest.find(part).unwrap_or_else(|| panic!("no {part:?} here in {text}"));
        rest = &rest[at + part.len()..];
    }
}

#[test]
fn each_end_of_a_test_is_named_and_failures_come_last_with_their_command() {
    let folder = tempfile::tempdir().unwrap();
    let (output, text) = run(folder.path(), "example hangs\t1\t0\tsleep 600\n", &[]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(fs::read_to_string(folder.path().join("counts")).unwrap(), "1 3 1\n", "{text}");
    has(&text, &["not run here: no device", "gym-core::own absent", "── FAILED"]);
    has(&text, &["── FAILED example hangs: killed at its limit of 1 s", "sleep 600", "thread ", "sleep: state S"]);
    has(
        &text,
        &[
            "── FAILED gym-core::own fails: exit status 101",
            "the reason",
            "again: .ci/test --case 'gym-core::own fails'",
        ],
    );
    has(&text, &["── FAILED gym-core::own mod::leaves: its processes outlive it", "sleep 600"]);
    assert!(!text.contains("FAILED gym-core::own passes") && !text.contains("remains"), "{text}");
}

#[test]
fn what_remains_on_the_machine_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shm/left").display().to_string();
    // Unlike that of any other run.
    let sleep = format!("sleep {}", 100_000 + std::process::id());
    // Without its environment, only its parent tells to whom it belongs.
    let command = format!("example remains\t10\t0\ttouch {file}; env -i setsid {sleep} > /dev/null &\n");
    let (output, text) = run(folder.path(), &command, &["--case", "remains"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    has(&text, &["── FAILED: this remains on the machine", &sleep, &file]);
    assert_eq!(fs::read_to_string(folder.path().join("counts")).unwrap(), "1 1 0\n", "{text}");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut commands = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    let sleep = sleep.replace(' ', "\0") + "\0";
    assert!(!commands.any(|command| command == sleep.as_bytes()), "what remains is killed");
}

#[test]
fn every_round_must_run_the_same_tests() {
    let folder = tempfile::tempdir().unwrap();
    let (output, text) = run(folder.path(), "", &["--case", "passes", "--case", "absent", "--repeat", "2", "--busy"]);
    assert!(output.status.success(), "{text}");
    has(&text, &["round 1 of 2: 1 passed, 0 failed, 1 not run", "round 2 of 2: 1 passed, 0 failed, 1 not run"]);
    let (_, text) = run(folder.path(), "", &["--without", "fails", "--without", "leaves"]);
    assert!(text.contains("the slowest of 2 cases"), "{text}");
    let (output, text) = run(folder.path(), "", &["--case", "nothing has this name"]);
    assert!(!output.status.success(), "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("no case has a name with"), "{output:?}");
}
