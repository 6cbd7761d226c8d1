//! What is known of ranks without asking them.

use std::process::Stdio;
use std::time::Duration;

use gym_core::CallContext;
use gym_core::transport::TransportPolicy;
use gym_group::{Dispatch, ExitCause, FailureKind, RankOutcome, RankState, RunningCall, WorkerGroup, WorkerGroupExt};
use gym_group::{Group, GroupOptions, ProcessUsage, StuckRank, StuckReason};
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::timeout;

use super::types::{Compute, Deafen, Describe, Hold, Job, Python, Work};
use super::{LONG, alive, freeze, group, local, options, pid, signal, spec, start, status, stop, until};

const MIB: u64 = 1 << 20;

/// Looks often, so that the cases end soon.
fn attentive() -> GroupOptions {
    let mut options = options();
    options.heartbeat = Duration::from_millis(20);
    // A rank that a busy machine does not run for a while is not silent.
    options.silence_max = LONG;
    options.stall = Duration::from_millis(300);
    options
}

pub(crate) async fn a_rank_over_its_memory_limit_is_killed_and_told_so() {
    let mut spec = spec("obedient", 2);
    spec.memory_limit_bytes = Some(200 * MIB);
    let group = start(spec, attentive()).await.expect("starts");
    let hold = |bytes| group.call(Hold, bytes).dispatch(Dispatch::rank(1)).deadline(LONG);
    hold(20 * MIB).await.expect("within the limit");
    // The answer may come before the next sample; the end comes all the same.
    let _ = hold(400 * MIB).await;
    until("it is killed", || status(&group, 1).state == RankState::Dead).await;
    let exit = group.view().borrow().member(1).and_then(|member| member.exit.clone()).expect("how it ended");
    assert_eq!((exit.cause, exit.signal), (ExitCause::MemoryLimitExceeded, Some(9)));
    assert!(exit.to_string().contains(&format!("of {} bytes; raise its memory limit", 200 * MIB)), "{exit}");
    let error = group.call(Describe, ()).deadline(LONG).await.expect_err("it is dead");
    let kind = error.outcome(1).and_then(gym_group::RankOutcome::kind);
    assert_eq!(kind, Some(gym_group::FailureKind::MemoryLimitExceeded), "{error:?}");
    assert_eq!(status(&group, 0).state, RankState::Healthy, "its neighbour keeps to the limit");
    assert_eq!(group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts"), [1]);
    stop(&group).await;
}

pub(crate) async fn pages_that_the_processes_of_a_rank_share_count_once() {
    let mut spec = spec("obedient", 1);
    spec.memory_limit_bytes = Some(300 * MIB);
    let group = start(spec, attentive()).await.expect("starts");
    // What a DataLoader with four workers does.
    let loaders = "import os, time\ndata = b'1' * (100 << 20)\nany(os.fork() == 0 for _ in range(4))\ntime.sleep(1000)";
    group.call(Python, loaders.to_owned()).deadline(LONG).await.expect("starts it");
    let mut seen = 0;
    until("it is measured precisely, more than once", || {
        let usage = group.resource_usage().swap_remove(0).host;
        let is_shared = |host: &ProcessUsage| host.resident_bytes > 500 * MIB && host.counted_bytes < Some(300 * MIB);
        seen += usize::from(usage.is_some_and(|host| host.processes == 6 && is_shared(&host)));
        seen > 100
    })
    .await;
    group.call(Describe, ()).deadline(LONG).await.expect("it keeps to the limit");
    stop(&group).await;
}

pub(crate) async fn a_daemon_of_a_rank_counts_against_its_limit() {
    let mut spec = spec("obedient", 1);
    spec.memory_limit_bytes = Some(200 * MIB);
    let group = start(spec, attentive()).await.expect("starts");
    // It leaves the session, and its parents end.
    let daemon = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ndata = b'1' * (300 << 20)\ntime.sleep(1000)";
    group.call(Python, daemon.to_owned()).deadline(LONG).await.expect("starts it");
    until("the rank is killed", || status(&group, 0).state == RankState::Dead).await;
    let exit = group.view().borrow().member(0).and_then(|member| member.exit.clone()).expect("how it ended");
    assert_eq!((exit.cause, exit.signal), (ExitCause::MemoryLimitExceeded, Some(9)), "{exit}");
    stop(&group).await;
}

pub(crate) async fn usage_is_measured_with_what_a_rank_started() {
    let mut spec = spec("obedient", 1);
    spec.memory_limit_bytes = Some(4096 * MIB);
    let group = start(spec, attentive()).await.expect("starts");
    group.call(Hold, 100 * MIB).deadline(LONG).await.expect("holds");
    until("it is seen", || {
        let usage = group.resource_usage().swap_remove(0);
        usage.host.is_some_and(|host| host.resident_bytes > 100 * MIB && host.cpu_percent.is_some())
    })
    .await;
    group.call(Hold, 0).deadline(LONG).await.expect("lets go");
    until("the peak stays", || {
        let host = group.resource_usage().swap_remove(0).host;
        host.is_some_and(|host| host.resident_bytes < 100 * MIB && host.peak_resident_bytes > 100 * MIB)
    })
    .await;
    assert_eq!(group.resource_usage()[0].memory_limit_bytes, Some(4096 * MIB));
    stop(&group).await;
}

pub(crate) async fn a_stopped_process_is_stuck_and_recovers() {
    let mut options = attentive();
    options.silence_max = Duration::from_secs(3);
    let group = group(2, options).await;
    freeze(pid(&group, 1)).await;
    let silent = |stuck: StuckRank| (stuck.rank, stuck.reason) == (1, StuckReason::NoHeartbeat);
    until("it is silent", || group.detect_stuck_workers().into_iter().any(silent)).await;
    until("it is not called", || status(&group, 1).state == RankState::Suspect).await;
    let error = group.call(Describe, ()).deadline(LONG).await.expect_err("suspect");
    assert!(error.to_string().contains("suspect"), "{error}");
    signal(pid(&group, 1), Signal::CONT);
    until("it is back", || group.worker_status().iter().all(|rank| rank.state == RankState::Healthy)).await;
    group.call(Describe, ()).deadline(LONG).await.expect("answers");
    stop(&group).await;
}

pub(crate) async fn a_call_without_progress_is_stuck_and_one_with_it_is_not() {
    let group = group(2, attentive()).await;
    let jobs = [true, false].map(|tells| Job { ms: 3_600_000, tells });
    let running = group.call_each(Work, jobs.to_vec()).deadline(LONG).start().await.expect("started");
    // Both have run for several times the limit, and one of them has not moved. A busy machine may hold up the other, or its heartbeat, for a while.
    let mut stuck = Vec::new();
    until("one does not move", || {
        stuck = group.detect_stuck_workers();
        matches!(&stuck[..], [one] if one.rank == 1 && one.still > 5 * attentive().stall)
    })
    .await;
    assert_eq!((stuck[0].reason, stuck[0].method.as_deref()), (StuckReason::NoProgress, Some("work")));
    assert_eq!(status(&group, 0).running[0].method, "work");
    drop(running);
    until("an idle rank is not stuck", || group.detect_stuck_workers().is_empty()).await;
    stop(&group).await;
}

pub(crate) async fn the_same_is_in_the_metrics() {
    let group = group(2, attentive()).await;
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(group.metrics()));
    let text = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
        text
    };
    until("memory is sampled", || text().contains("gym_worker_resident_memory_bytes{group=\"policy\",rank=\"1\"}"))
        .await;
    assert!(text().contains("gym_worker_up{group=\"policy\",rank=\"0\"} 1"), "{}", text());
    assert!(!text().contains("gym_worker_gpu_memory_bytes{"), "what is not known is left out");
    signal(pid(&group, 0), Signal::KILL);
    until("its end shows", || text().contains("gym_worker_up{group=\"policy\",rank=\"0\"} 0")).await;
    stop(&group).await;
    drop(group);
    until("a group that is gone has none", || !text().contains("gym_worker")).await;
}

pub(crate) async fn a_rank_that_hangs_is_named_by_the_failed_call_and_comes_back_by_one_call() {
    let group = group(2, attentive()).await;
    // Long enough for heartbeats that tell what the rank runs.
    let hangs = group.call(Deafen, ()).dispatch(Dispatch::rank(1)).deadline(Duration::from_secs(3));
    let error = hangs.await.expect_err("it never comes back");
    assert_eq!(error.unanswered().collect::<Vec<_>>(), [1]);
    let text = error.to_string();
    let late = "call deafen of policy: the deadline has passed; rank 1 (incarnation 1): no answer to deafen for ";
    assert!(text.starts_with(late), "{text}");
    assert!(text.contains(" s; it has run deafen for ") && text.contains(" s, without progress; fix: "), "{text}");
    assert!(text.contains("`group.restart_workers("), "{text}");
    let cx = CallContext::within(LONG);
    assert_eq!(group.restart_workers(&cx, error.unanswered()).await.expect("restarts"), [1]);
    // A stopped process answers nothing either.
    freeze(pid(&group, 1)).await;
    let stopped = group.call(Describe, ()).deadline(Duration::from_secs(3)).await.expect_err("one is stopped");
    assert_eq!(stopped.unanswered().collect::<Vec<_>>(), [1], "{stopped}");
    assert_eq!(group.restart_workers(&cx, stopped.unanswered()).await.expect("restarts"), [1]);
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("all answer").into_values();
    assert_eq!(ranks.iter().map(|rank| rank.incarnation).collect::<Vec<_>>(), [1, 3]);
    let error = group.restart_workers(&cx, [7]).await.expect_err("no such rank");
    assert_eq!(error.to_string(), "restart ranks of policy: the group has no rank 7; it has ranks 0 to 1");
    stop(&group).await;
}

/// A rank with one thread, which a method blocks: it sends heartbeats, tells its status, and answers in the end.
pub(crate) async fn heartbeats_go_on_while_a_method_computes(policy: Option<TransportPolicy>) {
    let (mut spec, mut options) = (spec("obedient", 1), attentive());
    spec.variables.insert("TOKIO_WORKER_THREADS".to_owned(), "1".to_owned());
    if let Some(policy) = &policy {
        options.transports = options.transports.with_policy(policy.clone());
    }
    spec.transport_policy = policy;
    let group = start(spec, options).await.expect("starts");
    let folder = tempfile::tempdir().expect("a folder");
    let end = folder.path().join("end");
    let call = group.call(Compute, end.to_string_lossy().into_owned()).deadline(LONG).start().await.expect("started");
    let blocked = |calls: &[RunningCall]| calls.iter().any(|call| call.method == "compute" && call.blocked_ms > 200);
    until("a heartbeat says that it blocks its thread", || blocked(&status(&group, 0).running)).await;
    let asked = group.ask_hosts(&CallContext::within(LONG)).await.swap_remove(0).expect("a status");
    assert!(blocked(&asked.running), "{asked:?}");
    assert_eq!(status(&group, 0).state, RankState::Healthy);
    let late =
        group.call(Describe, ()).deadline(Duration::from_millis(200)).await.expect_err("it computes").to_string();
    let hint = "it has blocked its thread for ";
    assert!(late.contains(hint) && late.contains("declare the method `blocking`"), "{late}");
    std::fs::write(end, "").expect("writes");
    call.await.expect("it answers");
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    assert_eq!(ranks[0].incarnation, 1);
    stop(&group).await;
}

pub(crate) async fn a_rank_that_computes_on_its_only_thread_is_not_silent() {
    heartbeats_go_on_while_a_method_computes(None).await;
}

pub(crate) async fn a_silent_rank_loses_its_call_and_the_usual_recovery_restarts_it() {
    let mut options = attentive();
    (options.silence_max, options.silence_restart) = (Duration::from_secs(3), Duration::from_secs(5));
    let group = group(2, options).await;
    let hours = Job { ms: 3_600_000, tells: false };
    let running = group.call(Work, hours).deadline(LONG).start().await.expect("started");
    freeze(pid(&group, 1)).await;
    let error = running.await.expect_err("a rank is silent");
    assert_eq!(error.first().and_then(RankOutcome::kind), Some(FailureKind::Silent), "{error:?}");
    assert_eq!(error.unanswered().collect::<Vec<_>>(), [1], "{error:?}");
    let again = group.call(Describe, ()).deadline(LONG).await.expect_err("it is suspect");
    assert_eq!(again.unanswered().collect::<Vec<_>>(), [1], "{again:?}");
    for error in [error, again] {
        let text = error.to_string();
        assert!(text.contains("rank 1 failed: ") && text.contains("no heartbeat for "), "{text}");
        let stopped = format!("process {} is stopped (SIGSTOP); kill -CONT continues it", pid(&group, 1));
        // A process of another machine is not seen.
        assert!(text.contains(&stopped) || std::env::var_os("GYM_WORKERS_ON").is_some(), "{text}");
        assert!(
            text.ends_with("; fix: kill and restart what is silent: `group.restart_workers(cx, error.unanswered())`"),
            "{text}"
        );
    }
    // Nobody names the rank.
    let cx = CallContext::within(LONG);
    assert_eq!(group.restart_failed_workers(&cx).await.expect("restarts"), [1]);
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("all answer").into_values();
    assert_eq!(ranks.iter().map(|rank| rank.incarnation).collect::<Vec<_>>(), [1, 2]);
    stop(&group).await;
}

/// The process that is paused: calls ranks that answer after its pause.
pub(crate) async fn paused_controller() {
    let mut options = attentive();
    options.silence_max = Duration::from_secs(3);
    // Of this machine: on nodes, a pause can be longer than the lease, which ends the ranks.
    let group = Group::start(&CallContext::within(LONG), &local(), spec("obedient", 2), options).await.expect("starts");
    println!("pid {}", pid(&group, 0));
    let running = group.call(Work, Job { ms: 8_000, tells: false }).deadline(LONG);
    let ended = running.await.map(|_| ()).map_err(|error| error.to_string());
    let states: Vec<RankState> = group.worker_status().iter().map(|rank| rank.state).collect();
    println!("pid {}", i32::from(ended.is_ok() && states == [RankState::Healthy; 2]));
    stop(&group).await;
}

pub(crate) async fn a_pause_of_the_controller_says_nothing_about_its_ranks() {
    let mut controller = tokio::process::Command::new(std::env::current_exe().expect("own path"))
        .arg("be-paused")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("starts");
    let mut lines = BufReader::new(controller.stdout.take().expect("piped")).lines();
    let mut number = async || -> i32 {
        let line = timeout(LONG, lines.next_line()).await.expect("in time").expect("reads").expect("a line");
        line.strip_prefix("pid ").and_then(|number| number.parse().ok()).expect("a number")
    };
    assert!(alive(number().await));
    let id = i32::try_from(controller.id().expect("runs")).expect("fits");
    freeze(id).await;
    // Longer than a silent rank is trusted.
    tokio::time::sleep(Duration::from_secs(5)).await;
    signal(id, Signal::CONT);
    assert_eq!(number().await, 1, "the call ended well, and both ranks are healthy");
    assert!(timeout(LONG, controller.wait()).await.expect("in time").expect("ends").success());
}
