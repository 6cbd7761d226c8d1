//! Bad input of worker groups: what each gets is an error that names the place; nothing hangs, no process is left, and the
//! group is usable afterwards or gone.
//!
//! The table is printed. `GYM_BAD_INPUT_TABLE=1 cargo test -p gym-client --test workers bad_input` writes it to
//! `docs/bad-input-groups.md`; without that variable the file's cases must be these.

mod calls;
mod case;
mod clusters;
mod files;
mod ground;
mod places;
pub(crate) mod rogues;
mod starts;

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use case::{Case, Got};
use futures_util::FutureExt;
use ground::Ground;
use tokio::time::timeout;

use super::LONG;

fn cases() -> Vec<Case> {
    let groups = [clusters::cases(), files::cases(), places::cases(), starts::cases(), rogues::cases(), calls::cases()];
    groups.into_iter().flatten().collect()
}

pub(crate) async fn bad_input_gets_an_error_that_names_the_place_and_harms_nobody_else() {
    let ground = Ground::new().await;
    let cases = cases();
    let (mut wrong, mut lines) = (Vec::new(), Vec::new());
    for case in &cases {
        // A case that panics must not hide the others.
        let got = match timeout(LONG, AssertUnwindSafe((case.run)(&ground)).catch_unwind()).await {
            Ok(Ok(got)) => got,
            Ok(Err(_)) => Got::new("panic", "the case itself failed; see above"),
            Err(_) => Got::new("hang", format!("not over within {LONG:?}")),
        };
        let missing: Vec<_> = case.says.iter().filter(|part| !got.text.contains(*part)).collect();
        if got.outcome != case.outcome || !missing.is_empty() {
            wrong.push(format!(
                "{} / {}\n  expected {} with {:?}\n  got      {}: {}\n  without  {missing:?}",
                case.kind, case.name, case.outcome, case.says, got.outcome, got.text
            ));
        }
        if AssertUnwindSafe(ground.assert_well()).catch_unwind().await.is_err() {
            wrong.push(format!("{} / {}: it harmed others, or left something", case.kind, case.name));
        }
        let line = format!("| {} | {} | {} | {} |", case.kind, case.name, got.outcome, ground.shown(&got.text));
        println!("{line}");
        lines.push(line);
    }
    ground.end().await;
    let kinds: BTreeSet<_> = cases.iter().map(|case| case.kind).collect();
    println!("{} bad inputs of {} kinds, {} not as expected", cases.len(), kinds.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases.len() >= 30 && kinds.len() >= 10, "{} cases of {} kinds", cases.len(), kinds.len());
    if std::env::var_os("GYM_BAD_INPUT_TABLE").is_some() {
        std::fs::write(table_file(), document(&lines, kinds.len())).expect("writes the table");
    }
}

pub(crate) async fn the_table_of_bad_input_has_these_cases() {
    let text = std::fs::read_to_string(table_file()).unwrap_or_default();
    let documented: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| kind"))
        .map(|line| line.splitn(4, " | ").take(3).collect::<Vec<_>>().join(" | "))
        .collect();
    let here: Vec<String> =
        cases().iter().map(|case| format!("| {} | {} | {}", case.kind, case.name, case.outcome)).collect();
    if std::env::var_os("GYM_BAD_INPUT_TABLE").is_none() {
        assert_eq!(documented, here, "write the table anew, as the head of this test says");
    }
    let names: BTreeSet<_> = here.iter().collect();
    assert_eq!(names.len(), here.len(), "two cases have the same name");
}

fn table_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/bad-input-groups.md")
}

fn document(lines: &[String], kinds: usize) -> String {
    format!(
        "# Bad input of worker groups, and what it gets\n\n\
         {} bad inputs of {kinds} kinds, each tried at groups of real processes. After each, a group that stood beside it answers as \
         before, no process of it is left, and the group that was done wrong to is usable again or gone. Folders are written as \
         `…`; long texts are cut.\n\n\
         Written by `GYM_BAD_INPUT_TABLE=1 cargo test -p gym-client --test workers bad_input`, see \
         `gym-client/tests/workers/bad_input`. Bad input of rollouts: [bad-input.md](bad-input.md).\n\n\
         | kind | bad input | gets | which says |\n|---|---|---|---|\n{}\n",
        lines.len(),
        lines.join("\n")
    )
}
