//! Workers that do not start as they should.

use std::time::Duration;

use gym_core::Code;
use gym_group::StartError;
use gym_group::{ExitCause, RankExit, WorkerGroupExt};

use super::types::Describe;
use super::{LONG, options, spec, start, stop};

async fn refused(worker: &str, change: impl FnOnce(&mut gym_group::LaunchSpec)) -> (StartError, RankExit) {
    let mut spec = spec(worker, 2);
    change(&mut spec);
    let error = start(spec, options()).await.expect_err("does not start");
    let exit = error.failed().find_map(|(_, _, exit)| exit.cloned());
    let exit = exit.unwrap_or_else(|| panic!("no exit: {error}"));
    (error, exit)
}

pub(crate) async fn a_worker_that_prints_rubbish_still_starts() {
    let group = start(spec("rubbish", 2), options()).await.expect("starts");
    group.call(Describe, ()).deadline(LONG).await.expect("answers");
    stop(&group).await;
}

pub(crate) async fn a_worker_that_exits_at_start_is_told_with_its_last_words() {
    let (error, exit) = refused("exits", |_| {}).await;
    assert_eq!((exit.cause, exit.code), (ExitCause::Died, Some(3)));
    assert_eq!(exit.stderr_tail, ["no GPU for tiny"]);
    assert!(error.to_string().contains("no GPU for tiny") && error.to_string().contains("exit code 3"), "{error}");
}

pub(crate) async fn a_worker_that_fails_to_start_says_why() {
    let (error, exit) = refused("fails", |_| {}).await;
    assert_eq!(exit.cause, ExitCause::StartFailed);
    assert!(error.to_string().contains("no model called tiny"), "{error}");
}

pub(crate) async fn a_worker_that_panics_at_start_says_why() {
    let (error, exit) = refused("panics", |_| {}).await;
    assert_eq!(exit.cause, ExitCause::StartFailed);
    assert!(error.to_string().contains("the driver is too old"), "{error}");
}

pub(crate) async fn a_worker_that_never_answers_is_given_up() {
    let (error, exit) = refused("never", |spec| spec.start_timeout = Duration::from_millis(300)).await;
    assert_eq!((exit.cause, exit.signal), (ExitCause::StartFailed, Some(9)));
    assert!(error.to_string().contains("300ms") && error.to_string().contains("raise the start timeout"), "{error}");
}

pub(crate) async fn an_unknown_worker_type_starts_nothing() {
    let error = start(spec("obedeint", 2), options()).await.expect_err("unknown");
    assert_eq!(error.cause().code(), Code::NotFound);
    assert!(error.to_string().contains("`obedeint`") && error.to_string().contains("obedient"), "{error}");
}

pub(crate) async fn a_start_within_its_budget_tries_again() {
    let error = start(spec("exits", 1), options().restarting(2)).await.expect_err("never starts");
    let (_, state, exit) = error.failed().next().expect("rank 0");
    assert_eq!((state, exit.map(|exit| exit.incarnation)), (gym_group::RankState::Retired, Some(3)), "{error}");
}
