//! Bad input of worker groups: what each gets is an error that names the place; nothing hangs, no process is left, and the
//! group is usable afterwards or gone.
//!
//! The table is printed. `GYM_BAD_INPUT_TABLE=1 cargo test -p gym-client --test workers bad_input` writes it to
//! `docs/bad-input-groups.md`; without that variable the file's cases must be these.

mod calls;
mod clusters;
pub(crate) mod faulty;
mod files;
mod fixture;
mod outcome;
mod placement;
mod starts;

use std::path::{Path, PathBuf};

use fixture::Fixture;
use gym_core::testing::bad_input::{self, Got};

type Case = bad_input::Case<Fixture>;

fn cases() -> Vec<Case> {
    let groups =
        [clusters::cases(), files::cases(), placement::cases(), starts::cases(), faulty::cases(), calls::cases()];
    groups.into_iter().flatten().collect()
}

pub(crate) async fn bad_input_gets_an_error_that_names_the_place_and_harms_nobody_else() {
    let fixture = Fixture::new().await;
    let tried = bad_input::try_all(&fixture, &cases(), |line| println!("{line}")).await;
    fixture.end().await;
    tried.assert(30, 10);
    tried.document(&table_file(), "Bad input of worker groups, and what it gets", ABOUT);
}

pub(crate) async fn the_table_of_bad_input_has_these_cases() {
    bad_input::assert_documented(&table_file(), &cases());
}

fn table_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/bad-input-groups.md")
}

const ABOUT: &str = "each tried at groups of real processes. After each, a group that stood beside it answers as before, no process \
    of it is left, and the group that was done wrong to is usable again or gone. Folders are written as `…`; long texts are \
    cut.\n\n\
    Written by `GYM_BAD_INPUT_TABLE=1 cargo test -p gym-client --test workers bad_input`, see \
    `gym-client/tests/workers/bad_input`. Bad input of rollouts: [bad-input.md](bad-input.md).";
