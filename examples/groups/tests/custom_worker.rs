//! The smallest worker group runs as the README describes, and its source stays small.

use std::process::Command;

const LINES_MAX: usize = 25;

#[test]
fn each_rank_returns_the_loss_of_its_shard() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_custom_worker")).output().expect("the example is built with its test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "losses: [0.0, 1.0, 0.25, 0.0]\n");
}

#[test]
fn the_program_has_at_most_25_lines() {
    let lines = include_str!("../src/bin/custom_worker.rs").lines().count();
    assert!(lines <= LINES_MAX, "{lines} lines");
}
