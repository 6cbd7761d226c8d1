//! Tests the smallest program that collects rollouts in process: its size, and its output without any file to read.

use std::process::Command;

const SOURCE: &str = include_str!("../src/bin/embedded.rs");

#[test]
fn the_embedded_program_has_at_most_22_lines() {
    let lines = SOURCE.lines().filter(|line| !line.starts_with("//!")).count();
    assert!(lines <= 22, "{lines} lines");
}

#[test]
fn the_embedded_program_runs_every_task_in_an_empty_directory() {
    let folder = tempfile::tempdir().unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_embedded")).current_dir(&folder).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let printed = String::from_utf8(run.stdout).unwrap();
    let mut tasks: Vec<&str> = printed.lines().filter_map(|line| line.split_once(": ")).map(|(key, _)| key).collect();
    tasks.sort_unstable();
    tasks.dedup();
    assert_eq!(tasks.len(), gym_examples::tasks::TASKS, "{printed}");
    // The scripted model has right and wrong answers, and a run contains both.
    assert!(printed.contains("reward Some(1.0) after 1 attempts"), "{printed}");
    assert!(printed.contains("reward Some(0.0) after 1 attempts"), "{printed}");
    assert!(!printed.contains("failed after"), "{printed}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}
