//! The smallest worker groups run as the README describes, and their sources stay small.

use std::process::Command;

const LINES_MAX: usize = 25;

#[test]
fn each_rank_returns_the_loss_of_its_shard() {
    prints(env!("CARGO_BIN_EXE_custom_worker"), "losses: [0.0, 1.0, 0.25, 0.0]\n");
}

#[test]
fn ranks_that_train_together_have_one_weight() {
    prints(env!("CARGO_BIN_EXE_data_parallel"), "the weight of each rank: [0.625, 0.625, 0.625, 0.625]\n");
}

fn prints(program: &str, expected: &str) {
    let output = Command::new(program).output().expect("the example is built with its test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

#[test]
fn the_programs_have_at_most_25_lines() {
    for text in [include_str!("../src/bin/custom_worker.rs"), include_str!("../src/bin/data_parallel.rs")] {
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{lines} lines");
    }
}
