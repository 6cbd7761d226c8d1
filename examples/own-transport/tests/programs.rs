//! The program with QUIC: its servers, its worker group and its reports.

use std::process::{Command, Output};

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
