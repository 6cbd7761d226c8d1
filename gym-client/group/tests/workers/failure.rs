//! Ranks that end, and what becomes of the calls, the group, and the processes.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;

use gym_core::{CallContext, Code, Incarnation, Request, Route};
use gym_group::{Dispatch, ExitCause, FailureKind, RankState, WorkerGroup, WorkerGroupExt};
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::time::timeout;

use super::types::{Breed, Describe, Job, Leave, Warm, Work};
use super::{LONG, alive, group, options, pid, signal, status, stop, until};

const HOURS: Job = Job { ms: 3_600_000, tells: false };

pub(crate) async fn a_killed_rank_ends_the_call_and_comes_back_by_hand() {
    let group = group(3, options()).await;
    let bystander = pid(&group, 0);
    let running = group.call(Work, HOURS).deadline(LONG).start().await.expect("started");
    signal(pid(&group, 1), Signal::KILL);
    let error = running.await.expect_err("a rank is gone");
    let first = error.first().expect("one was first");
    assert_eq!((first.rank, first.incarnation), (1, Incarnation(1)), "{error:?}");
    assert_eq!(first.execution(), gym_core::Execution::Unknown, "it was handed over: {error:?}");
    let cx = CallContext::within(LONG);
    assert_eq!(group.restart_failed_workers(&cx).await.expect("restarts"), [1]);
    assert_eq!(group.restart_failed_workers(&cx).await.expect("nothing to do"), [0_u32; 0]);
    let again = group.call(Describe, ()).deadline(LONG).await.expect("all answer").into_values();
    assert_eq!(again.iter().map(|rank| rank.incarnation).collect::<Vec<_>>(), [1, 2, 1]);
    assert_eq!(pid(&group, 0), bystander, "the others were left alone");
    let exit = group.view().borrow().member(1).and_then(|member| member.exit.clone()).expect("how it ended");
    assert_eq!((exit.cause, exit.signal, exit.incarnation), (ExitCause::Died, Some(9), 1));
    assert_eq!((status(&group, 1).restarts_used, status(&group, 1).restarts_left), (1, 2));
    stop(&group).await;
}

pub(crate) async fn a_killed_rank_comes_back_by_itself_within_its_budget() {
    let group = group(2, options().restarting(2)).await;
    for life in [2, 3] {
        signal(pid(&group, 0), Signal::KILL);
        until("another life", || {
            let now = status(&group, 0);
            now.incarnation == Incarnation(life) && now.state == RankState::Healthy
        })
        .await;
    }
    signal(pid(&group, 0), Signal::KILL);
    until("the budget is spent", || status(&group, 0).state == RankState::Retired).await;
    let error = group.call(Describe, ()).deadline(LONG).await.expect_err("a rank is missing");
    assert!(error.to_string().contains("retired"), "{error}");
    let error = group.restart_failed_workers(&CallContext::within(LONG)).await.expect_err("no budget");
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("max_restarts"), "{error}");
    stop(&group).await;
}

pub(crate) async fn a_restarted_rank_is_stale_until_it_is_warm() {
    let group = group(2, options().restarting(1).on_restart(Warm, true)).await;
    let first = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    assert!(first.iter().all(|rank| rank.warmed == 0), "a first life needs no restart method");
    let mut view = group.view();
    signal(pid(&group, 1), Signal::KILL);
    let mut seen = Vec::new();
    while seen.last() != Some(&(2, RankState::Healthy)) {
        timeout(LONG, view.changed()).await.expect("in time").expect("supervised");
        let now = view.borrow_and_update().member(1).map(|member| (member.incarnation.0, member.state));
        let now = now.expect("rank 1");
        if seen.last() != Some(&now) {
            seen.push(now);
        }
    }
    let healthy_again = seen.iter().position(|now| *now == (2, RankState::Healthy)).expect("just seen");
    assert!(!seen[..healthy_again].contains(&(2, RankState::Healthy)), "{seen:?}");
    let again = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    assert_eq!(again[1].warmed, 1, "the method ran before it served");
    stop(&group).await;
}

pub(crate) async fn a_rank_that_cannot_be_warmed_stays_stale() {
    let group = group(1, options().restarting(3).on_restart(Warm, false)).await;
    signal(pid(&group, 0), Signal::KILL);
    until("the method failed", || {
        let now = status(&group, 0);
        now.state == RankState::Stale && now.last_error.is_some_and(|error| error.contains("no weights to load"))
    })
    .await;
    let error = group.call(Describe, ()).deadline(LONG).await.expect_err("old weights must not serve");
    assert!(error.to_string().contains("stale"), "{error}");
    let error = group.ready(&CallContext::within(std::time::Duration::ZERO)).await.expect_err("stale");
    assert!(error.failed().all(|(rank, _, exit)| rank == 0 && exit.is_none()), "this incarnation runs: {error}");
    assert!(!error.to_string().contains("incarnation 1"), "{error}");
    stop(&group).await;
}

pub(crate) async fn a_rank_that_cannot_be_warmed_ends_with_its_budget() {
    let group = group(1, options().restarting(1).on_restart(Warm, false)).await;
    signal(pid(&group, 0), Signal::KILL);
    until("the method failed", || status(&group, 0).last_error.is_some_and(|error| error.contains("no weights"))).await;
    let unfit = pid(&group, 0);
    let error = group.restart_failed_workers(&CallContext::within(LONG)).await.expect_err("no budget");
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    until("its process is gone", || !alive(unfit)).await;
    let exit = || group.view().borrow().member(0).and_then(|member| member.exit.clone());
    until("its end is told", || exit().is_some_and(|exit| (exit.incarnation, exit.signal) == (2, Some(9)))).await;
    assert_eq!(status(&group, 0).state, RankState::Retired);
    stop(&group).await;
}

pub(crate) async fn a_rank_that_exits_is_told_with_its_status() {
    let group = group(2, options()).await;
    let error = group.call(Leave, 7).dispatch(Dispatch::rank(1)).deadline(LONG).await.expect_err("it left");
    assert_eq!(error.first().map(|first| first.rank), Some(1), "{error:?}");
    until("its end is known", || status(&group, 1).state == RankState::Dead).await;
    let exit = group.view().borrow().member(1).and_then(|member| member.exit.clone()).expect("how it ended");
    assert_eq!((exit.cause, exit.code), (ExitCause::Died, Some(7)));
    assert_eq!(exit.stderr_tail, ["leaving with 7"]);
    let error = group.call(Describe, ()).deadline(LONG).await.expect_err("it is dead");
    let dead = error.outcome(1).expect("rank 1");
    assert_eq!(dead.kind(), Some(FailureKind::Died), "{error:?}");
    assert!(error.to_string().contains("leaving with 7"), "{error}");
    // The next incarnation has its own last line.
    group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
    let _ = group.call(Leave, 8).dispatch(Dispatch::rank(1)).deadline(LONG).await.expect_err("it leaves");
    until("its end is known", || status(&group, 1).state == RankState::Dead).await;
    let told = status(&group, 1).last_error;
    assert_eq!(told.as_deref(), Some("incarnation 2 died with exit code 8; its last line: leaving with 8"));
    stop(&group).await;
}

pub(crate) async fn an_old_life_is_never_answered_for_a_new_one() {
    let group = group(1, options()).await;
    let old = group.view().borrow().member(0).and_then(|member| member.channel.clone()).expect("a channel");
    signal(pid(&group, 0), Signal::KILL);
    group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
    let ask = |cx: CallContext| Request::post(cx, Route::from_static("/worker/describe"), r#"{"value":null}"#);
    old.call(ask(CallContext::within(LONG))).await.expect_err("the old life is gone");
    // Even where the new life can be reached, a call that is meant for the old one is refused before it runs.
    let mut meant = CallContext::within(LONG);
    meant.incarnation = Some(Incarnation(1));
    let new = group.view().borrow().member(0).and_then(|member| member.channel.clone()).expect("a channel");
    let plain = new.fenced(None);
    let answer = plain.call(ask(meant)).await.and_then(gym_core::Response::into_result).expect_err("refused");
    assert_eq!((answer.code(), answer.execution()), (Code::Unavailable, gym_core::Execution::NotStarted), "{answer}");
    stop(&group).await;
}

/// The process that gets killed: starts a group whose ranks start processes, names them all, and waits.
pub(crate) async fn controller() {
    let group = group(2, options()).await;
    let bred = group.call(Breed, ()).deadline(LONG).await.expect("answers").into_values();
    for rank in 0..2 {
        println!("pid {}", pid(&group, rank));
    }
    bred.iter().for_each(|pid| println!("pid {pid}"));
    let _ = group.call(Work, HOURS).await;
}

/// A controller that runs, and the processes that it named.
async fn running_controller(folder: &Path) -> (Child, Vec<i32>) {
    let mut controller = tokio::process::Command::new(std::env::current_exe().expect("own path"))
        .arg("controller")
        .env("TMPDIR", folder)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("starts");
    let pids = named_pids(&mut controller, 4).await;
    (controller, pids)
}

/// Reads the processes that a controller names: `pid NUMBER` in each of `count` lines.
pub(super) async fn named_pids(controller: &mut Child, count: usize) -> Vec<i32> {
    let mut lines = BufReader::new(controller.stdout.take().expect("piped")).lines();
    let mut pids = Vec::new();
    while pids.len() < count {
        let line = timeout(LONG, lines.next_line()).await.expect("in time").expect("reads").expect("a line");
        pids.push(line.strip_prefix("pid ").expect("a process").parse::<i32>().expect("a process id"));
    }
    pids
}

async fn kill(mut controller: Child) {
    controller.start_kill().expect("kill -9");
    let status = timeout(LONG, controller.wait()).await.expect("in time").expect("waits");
    assert_eq!(status.signal(), Some(9));
}

pub(crate) async fn a_killed_controller_leaves_no_process_and_its_folder_to_the_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let folders = || {
        let entries = std::fs::read_dir(folder.path()).expect("reads");
        entries.map(|entry| entry.expect("reads").file_name()).collect::<Vec<_>>()
    };
    let (controller, pids) = running_controller(folder.path()).await;
    assert!(pids.iter().all(|pid| alive(*pid)), "all run: {pids:?}");
    kill(controller).await;
    until("workers and what they started are dead", || !pids.iter().any(|pid| alive(*pid))).await;
    let left = folders();
    if std::env::var_os("GYM_WORKERS_ON").is_some() {
        assert!(left.is_empty(), "ranks on nodes have no sockets in a folder: {left:?}");
        return;
    }
    assert_eq!(left.len(), 1, "what nobody could remove: {left:?}");
    let (controller, pids) = running_controller(folder.path()).await;
    let now = folders();
    assert!(now.len() == 1 && now != left, "the next controller's own alone: {now:?}");
    kill(controller).await;
    until("they are dead too", || !pids.iter().any(|pid| alive(*pid))).await;
}
