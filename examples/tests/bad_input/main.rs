//! Bad input of every kind, at a running stack and at the command line: what each gets is an error that names the place, and
//! after each the servers are healthy, idle and score a rollout as before.
//!
//! The table is printed at the end. `GYM_BAD_INPUT_TABLE=docs/bad-input.md cargo test -p gym-examples --test bad_input`
//! writes it (from the workspace's root); without that variable the file's names must be those of the cases.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

#[path = "../support/mod.rs"]
mod support;

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

use std::path::PathBuf;

use ground::Ground;
use gym_core::testing::bad_input::{self, Got, Ground as _};
use support::say;

type Case = bad_input::Case<Ground>;

/// One rollout of an agent of ours, all else being right.
fn rolled(
    kind: &'static str,
    name: &'static str,
    agent: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, outcome, says, move |ground| Box::pin(async move { ground.roll_out(agent).await }))
}

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
    ground.assert_well().await;
    let tried = bad_input::try_all(&ground, &cases(), say).await;
    ground.stop().await;
    tried.assert(40, 12);
    tried.document(&table_file(), "Bad input, and what it gets", ABOUT);
}

#[test]
fn the_documented_table_has_these_cases() {
    bad_input::assert_documented(&table_file(), &cases());
}

fn table_file() -> PathBuf {
    support::examples().join("../docs/bad-input.md")
}

const ABOUT: &str = "each tried at a running stack or at the command line. After each the servers answer `/health`, have \
    nothing in flight and score a rollout as before. Ports are written as PORT, folders as `…`; long texts are cut.\n\n\
    Written by `GYM_BAD_INPUT_TABLE=1 cargo test -p gym-examples --test bad_input`, see `examples/tests/bad_input`.";
