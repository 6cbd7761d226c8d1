//! Bad input of every kind, at a running stack and at the command line: what each gets is an error that names the place, and
//! after each the servers are healthy, idle and score a rollout as before.
//!
//! The table is printed at the end. `GYM_BAD_INPUT_TABLE=docs/bad-input.md cargo test -p gym-examples --test bad_input`
//! writes it (from the workspace's root); without that variable the file's names must be those of the cases.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

#[path = "../support/mod.rs"]
mod support;

mod case;
mod configuration;
mod environments;
mod ground;
mod models;
mod output;
mod registry;
mod rows;
mod servers;
mod upstream;
mod wire;

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::time::Duration;

use case::{Case, Got};
use futures_util::FutureExt;
use ground::Ground;
use support::say;
use tokio::time::timeout;

/// One case with all its waits; none takes longer than a few seconds.
const CASE_PATIENCE: Duration = Duration::from_secs(60);

fn cases() -> Vec<Case> {
    let groups = [
        rows::cases(),
        wire::cases(),
        models::cases(),
        environments::cases(),
        registry::cases(),
        output::cases(),
        configuration::cases(),
    ];
    groups.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_gets_an_error_that_names_the_place_and_harms_nobody_else() {
    let ground = Ground::new().await;
    ground.assert_healthy().await;
    let cases = cases();
    let (mut wrong, mut lines) = (Vec::new(), Vec::new());
    for case in &cases {
        // A case that panics must not hide the others.
        let ran = timeout(CASE_PATIENCE, AssertUnwindSafe((case.run)(&ground)).catch_unwind()).await;
        let got = match ran {
            Ok(Ok(got)) => got,
            Ok(Err(_)) => Got::new("panic", "the case itself failed; see above"),
            Err(_) => Got::new("hang", format!("not over within {CASE_PATIENCE:?}")),
        };
        let missing: Vec<_> = case.says.iter().filter(|part| !got.text.contains(*part)).collect();
        if got.outcome != case.outcome || !missing.is_empty() {
            wrong.push(format!(
                "{} / {}\n  expected {} with {:?}\n  got      {}: {}\n  without  {missing:?}",
                case.kind, case.name, case.outcome, case.says, got.outcome, got.text
            ));
        }
        let healthy = timeout(CASE_PATIENCE, AssertUnwindSafe(ground.assert_healthy()).catch_unwind()).await;
        if !matches!(healthy, Ok(Ok(()))) {
            wrong.push(format!("{} / {}: the servers are not well after it", case.kind, case.name));
        }
        let line =
            format!("| {} | {} | {} | {} |", case.kind, case.name, got.outcome, ground.shown(&got.text, case.says));
        say(&line);
        lines.push(line);
    }
    let kinds: BTreeSet<_> = cases.iter().map(|case| case.kind).collect();
    say(&format!("{} bad inputs of {} kinds, {} not as expected", cases.len(), kinds.len(), wrong.len()));
    ground.stop().await;
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases.len() >= 40 && kinds.len() >= 12, "{} cases of {} kinds", cases.len(), kinds.len());
    if std::env::var_os("GYM_BAD_INPUT_TABLE").is_some() {
        std::fs::write(table_file(), document(&lines, kinds.len())).unwrap();
    }
}

#[test]
fn the_documented_table_has_these_cases() {
    let text = std::fs::read_to_string(table_file()).unwrap_or_default();
    let documented: Vec<(String, String)> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| kind"))
        .map(|line| {
            let mut cells = line.split(" | ").map(|cell| cell.trim_start_matches("| ").to_owned());
            (cells.next().unwrap(), cells.next().unwrap())
        })
        .collect();
    let here: Vec<(String, String)> = cases().iter().map(|case| (case.kind.to_owned(), case.name.to_owned())).collect();
    if std::env::var_os("GYM_BAD_INPUT_TABLE").is_none() {
        assert_eq!(documented, here, "write docs/bad-input.md anew, as the head of this test says");
    }
    let names: BTreeSet<_> = here.iter().collect();
    assert_eq!(names.len(), here.len(), "two cases have the same name");
}

fn table_file() -> PathBuf {
    support::examples().join("../docs/bad-input.md")
}

fn document(lines: &[String], kinds: usize) -> String {
    format!(
        "# Bad input, and what it gets\n\n\
         {} bad inputs of {kinds} kinds, each tried at a running stack or at the command line. After each the servers answer \
         `/health`, have nothing in flight and score a rollout as before. Ports are written as PORT, folders as `…`; long \
         texts are cut.\n\n\
         Written by `GYM_BAD_INPUT_TABLE=1 cargo test -p gym-examples --test bad_input`, see `examples/tests/bad_input`.\n\n\
         | kind | bad input | gets | which says |\n|---|---|---|---|\n{}\n",
        lines.len(),
        lines.join("\n")
    )
}
