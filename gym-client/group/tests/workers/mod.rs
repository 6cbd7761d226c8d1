//! The cases and the controller that they kill.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_client::Transports;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Result as GymResult};
use gym_group::Rank;
use gym_group::{Group, GroupOptions, RankStatus, StartError};
use gym_group::{InProcessRanks, LaunchSpec, Local, LocalOptions, Provisioner, RankPlace, Reservation, ReserveRequest};
use tokio::time::{interval, timeout};

#[path = "../../../tests/harness/mod.rs"]
mod harness;

mod bad_input;
mod cluster;
mod collectives;
mod conformance;
mod failure;
mod gpus;
mod health;
mod kills;
#[cfg(feature = "nccl")]
mod nccl;
mod nodes;
mod provisioner;
mod ranks;
#[cfg(feature = "ray")]
mod ray;
#[cfg(feature = "ray")]
mod ray_cluster;
#[cfg(feature = "ray")]
mod ray_faults;
mod start;
mod tied;
mod types;
#[cfg(feature = "rdma")]
mod ucx;
mod verify;

use harness::{Case, Running, run_cases};
use types::{Init, workers};

/// Generous: the machine may be busy with other builds. Every wait ends far earlier when things work.
const LONG: Duration = Duration::from_secs(60);

macro_rules! cases {
    ($($module:ident::$name:ident),* $(,)?) => {
        vec![$((stringify!($name), (|| Box::pin($module::$name()) as Running) as fn() -> _)),*]
    };
}

pub(crate) fn main() {
    bad_input::faulty::enter();
    workers().enter();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|role| role == "controller") {
        return run(failure::controller());
    }
    if arguments.first().is_some_and(|role| role == "be-paused") {
        return run(health::paused_controller());
    }
    if arguments.first().is_some_and(|role| role == "be-node") {
        return run(nodes::agent(arguments[1..].to_vec()));
    }
    if arguments.first().is_some_and(|role| role == "be-gpu-program") {
        return run(gpus::obeys());
    }
    if let [role, agent] = &arguments[..]
        && role == "be-controller"
    {
        return run(nodes::doomed_controller(agent));
    }
    #[cfg(feature = "ray")]
    if arguments.first().is_some_and(|role| role == "be-ray-controller") {
        return run(ray::doomed_controller());
    }
    #[cfg_attr(
        not(any(feature = "rdma", feature = "ray")),
        expect(unused_mut, reason = "more cases come with the features")
    )]
    let mut cases: Vec<Case> = cases![
        ranks::c137_two_ranks_are_two_processes,
        ranks::c138_ranks_find_their_place_and_meet_at_a_held_port,
        ranks::c141_c142_later_layers_of_the_environment_win,
        ranks::c140_the_configure_hook_adds_to_what_a_worker_is_made_from,
        ranks::c159_a_group_that_was_shut_down_shuts_down_again,
        ranks::the_same_group_runs_in_one_process,
        ranks::ranks_of_this_process_end_with_a_group_that_is_dropped,
        ranks::a_stand_in_for_torch_listens_on_the_master_port,
        ranks::c161_a_profiled_worker_type_runs_under_the_profiler,
        ranks::c194_a_rank_runs_on_the_cpus_near_its_gpu,
        start::a_worker_that_prints_rubbish_still_starts,
        start::a_worker_that_exits_at_start_is_told_with_its_last_words,
        start::a_worker_that_fails_to_start_says_why,
        start::a_worker_that_panics_at_start_says_why,
        start::a_worker_that_never_answers_is_given_up,
        start::an_unknown_worker_type_starts_nothing,
        start::a_start_within_its_budget_tries_again,
        failure::a_killed_rank_ends_the_call_and_comes_back_by_hand,
        failure::a_killed_rank_comes_back_by_itself_within_its_budget,
        failure::a_restarted_rank_is_stale_until_it_is_warm,
        failure::a_rank_that_cannot_be_warmed_stays_stale,
        failure::a_rank_that_cannot_be_warmed_ends_with_its_budget,
        failure::a_rank_that_exits_is_told_with_its_status,
        failure::an_old_life_is_never_answered_for_a_new_one,
        failure::a_killed_controller_leaves_no_process_and_its_folder_to_the_next,
        tied::tied_ranks_end_and_come_back_together,
        tied::a_call_to_a_tied_rank_fails_with_the_rank_that_it_is_tied_to,
        tied::tied_ranks_are_warmed_together_and_retired_together,
        tied::ranks_are_tied_as_the_request_to_the_cluster_says,
        tied::a_tied_group_of_which_one_does_not_start_is_ended,
        tied::tied_ranks_are_made_fit_by_one_call_in_which_they_may_meet,
        tied::a_restart_that_panics_is_one_that_failed,
        health::a_rank_over_its_memory_limit_is_killed_and_told_so,
        health::pages_that_the_processes_of_a_rank_share_count_once,
        health::a_daemon_of_a_rank_counts_against_its_limit,
        health::usage_is_measured_with_what_a_rank_started,
        health::a_stopped_process_is_stuck_and_recovers,
        health::a_rank_that_hangs_is_named_by_the_failed_call_and_comes_back_by_one_call,
        health::a_rank_that_computes_on_its_only_thread_is_not_silent,
        health::a_silent_rank_loses_its_call_and_the_usual_recovery_restarts_it,
        health::a_pause_of_the_controller_says_nothing_about_its_ranks,
        health::a_call_without_progress_is_stuck_and_one_with_it_is_not,
        health::the_same_is_in_the_metrics,
        cluster::a_heterogeneous_cluster_is_placed_on_simulated_nodes_when_asked,
        cluster::what_is_missing_is_told_before_anything_starts,
        cluster::colocation_is_off_open_or_in_turns,
        cluster::groups_in_turns_may_meet_inside_their_calls,
        cluster::a_monitored_cluster_tells_the_memory_of_its_node,
        cluster::a_cluster_that_is_shut_down_ends_its_groups,
        cluster::the_key_async_communication_starts_calls_that_nobody_awaits,
        gpus::clusters_of_a_machine_divide_its_gpus,
        collectives::ranks_in_processes_sum_over_each_axis,
        collectives::the_options_of_a_group_name_how_its_ranks_meet,
        collectives::the_survivors_of_a_killed_rank_name_it,
        collectives::an_operation_that_waits_tells_for_whom,
        collectives::a_stopped_rank_is_named_at_the_deadline,
        conformance::processes_pass_the_suite_of_all_groups,
        conformance::ranks_in_one_process_pass_the_suite_of_all_groups,
        conformance::ranks_on_two_nodes_pass_the_suite_of_all_groups,
        provisioner::all_provisioners_pass_one_suite,
        nodes::a_group_spans_nodes_that_joined_a_cluster,
        nodes::a_node_starts_nothing_for_strangers,
        nodes::what_one_controller_holds_no_other_gets,
        nodes::each_node_fetches_a_large_input_once_for_its_ranks,
        nodes::ranks_of_a_killed_node_restart_elsewhere_after_its_lease,
        nodes::ranks_of_a_stopped_node_are_dead_before_others_start,
        nodes::a_node_without_its_controller_ends_its_ranks,
        nodes::killed_nodes_leave_no_orphan_and_no_second_incarnation,
        nodes::ranks_on_two_nodes_meet_and_name_one_that_is_cut_off,
        verify::items_are_verified_in_batches_by_time_and_share_an_input_by_reference,
        verify::an_item_at_which_the_verifier_panics_fails_alone,
        verify::an_item_that_ends_its_rank_fails_alone_and_is_no_verdict,
        bad_input::bad_input_gets_an_error_that_names_the_place_and_harms_nobody_else,
        bad_input::the_table_of_bad_input_has_these_cases,
        kills::workers_killed_during_calls_leave_no_doubt,
    ];
    #[cfg(feature = "nccl")]
    cases.extend(cases![
        collectives::the_survivors_of_a_rank_that_is_killed_under_nccl_name_it,
        collectives::a_rank_that_is_stopped_under_nccl_is_named_at_the_deadline,
        nccl::auto_takes_nccl_in_the_meetings_whose_ranks_all_use_gpus,
        nccl::a_failure_of_nccl_at_one_rank_ends_the_sum_of_all_and_names_it,
        nccl::ranks_with_other_versions_or_without_a_gpu_do_not_meet,
        nccl::a_process_whose_abort_hangs_ends_and_is_started_again,
    ]);
    #[cfg(feature = "rdma")]
    cases.extend(cases![
        ucx::ucx_is_chosen_by_the_groups_configuration_alone,
        ucx::ucx_that_cannot_be_had_as_required_starts_no_group,
        ucx::ucx_shared_memory_passes_the_suite_of_all_groups,
        ucx::ucx_tcp_passes_the_suite_of_all_groups,
        ucx::ucx_shared_memory_passes_the_suite_of_collectives,
        ucx::ucx_tcp_passes_the_suite_of_collectives,
        ucx::ucx_ranks_in_processes_meet_and_name_a_killed_one,
        ucx::ucx_heartbeats_go_on_while_a_method_computes,
    ]);
    #[cfg(feature = "ray")]
    cases.extend(cases![
        ray::ray_r11_bundles_spread_over_nodes_and_each_rank_has_its_gpu,
        ray::ray_r12_bundles_are_packed_on_one_node,
        ray::ray_r13_what_cannot_be_placed_is_explained,
        ray::ray_r16_a_program_that_cannot_run_is_reported,
        ray::ray_r41_a_driver_that_cannot_run_here_is_reported,
        ray::ray_r24_a_killed_rank_restarts_without_ray,
        ray::ray_r25_a_killed_actor_takes_its_agent_along,
        ray::ray_r27_ranks_of_a_lost_machine_restart_elsewhere,
        ray::ray_r28_ranks_wait_for_a_machine_that_is_added,
        ray::ray_r29_ranks_of_a_machine_that_was_cut_off_end_before_others_start,
        ray::ray_r31_a_killed_controller_leaves_nothing,
        ray::ray_r32_a_killed_driver_leaves_no_process_and_the_job_is_submitted_again,
        ray::ray_ranks_of_a_drained_machine_get_no_balanced_calls,
        ray::ray_r33_ranks_serve_without_a_head_and_return_with_the_next_cluster,
        ray::ray_ft_r34_nothing_restarts_with_a_head_that_keeps_its_state,
        ray::ray_r36_each_node_verifies_its_share_in_batches_and_a_panic_fails_one_item,
        ray::ray_r38_a_machine_lost_in_mid_run_costs_no_item,
        ray::ray_ranks_without_a_cluster_run_on_all_nodes,
        ray::ray_ranks_on_two_nodes_meet_and_name_one_that_is_cut_off,
        ray_faults::ray_faults_leave_no_orphan_and_no_second_incarnation,
    ]);
    run_cases(cases, run)
}

fn run(case: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    runtime.block_on(async { timeout(case_limit(), case).await.expect("the case hangs") });
}

/// A case of the gate says so before the test runner kills it. Longer runs and those on Ray have other limits.
fn case_limit() -> Duration {
    let longer = ["GYM_WORKER_KILLS", "GYM_NODE_KILLS", "GYM_RAY_TEST_ADDRESS"];
    let longer = longer.iter().any(|name| std::env::var_os(name).is_some());
    Duration::from_secs(if longer { 3_600 } else { 100 })
}

// ── what the cases share ──

fn spec(worker: &str, ranks: u32) -> LaunchSpec {
    let init = Init { name: "tiny".to_owned(), number: 7 };
    let init = serde_json::value::to_raw_value(&init).expect("JSON");
    let places = (0..ranks).map(|rank| RankPlace::on_one_node(rank, ranks)).collect();
    let mut spec = LaunchSpec::new("policy", worker, init, places);
    spec.start_timeout = LONG;
    spec
}

fn local() -> Local {
    // The workers' words are not the test's.
    let mut options = LocalOptions::default();
    options.lines = Arc::new(|_, _, _| {});
    Local::new(workers()).with(options)
}

/// The provisioner of most cases: processes of this machine, or with `GYM_WORKERS_ON=nodes` those of two node agents.
fn here() -> Anywhere {
    match std::env::var("GYM_WORKERS_ON").as_deref() {
        // The agents must live as long as the ranks: until the runtime of the case ends.
        Ok("nodes") => {
            let nodes = Anywhere(Arc::new(nodes::TwoNodes::default()));
            std::mem::forget(nodes.clone());
            nodes
        }
        #[cfg(feature = "ray")]
        Ok("ray") => Anywhere(Arc::new(ray::OnRay)),
        Ok(other) => panic!("GYM_WORKERS_ON={other}: there are only `nodes` and `ray`"),
        Err(_) => Anywhere(Arc::new(local())),
    }
}

/// Any provisioner.
#[derive(Clone, Debug)]
struct Anywhere(Arc<dyn Provisioner>);

#[async_trait]
impl Provisioner for Anywhere {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> GymResult<Arc<dyn Reservation>> {
        self.0.reserve(cx, request).await
    }
}

fn transports() -> Transports {
    Transports::from_features(InProcess::new())
}

fn options() -> GroupOptions {
    let mut options = GroupOptions::new(transports());
    options.backoff_min = Duration::from_millis(5);
    options.backoff_max = Duration::from_millis(20);
    options
}

async fn start(spec: LaunchSpec, options: GroupOptions) -> Result<Group, StartError> {
    Group::start(&CallContext::within(LONG), &here(), spec, options).await
}

async fn group(ranks: u32, options: GroupOptions) -> Group {
    start(spec("obedient", ranks), options).await.expect("starts")
}

async fn stop(group: &Group) {
    group.shutdown(LONG).await.expect("stops");
}

fn status(group: &Group, rank: Rank) -> RankStatus {
    group.worker_status().swap_remove(rank as usize)
}

fn pid(group: &Group, rank: Rank) -> i32 {
    i32::try_from(status(group, rank).pid.expect("a process")).expect("fits")
}

fn signal(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("not zero");
    rustix::process::kill_process(pid, signal).expect("signals");
}

/// Stops a process, and waits until each of its threads has stopped: a thread on another core runs on for a moment.
async fn freeze(pid: i32) {
    signal(pid, rustix::process::Signal::STOP);
    until("all threads stop", || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
        let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        tasks.flatten().all(|task| state_of(&stat(task)).is_none_or(|state| state == 'T'))
    })
    .await;
}

/// Returns the state in the text of a `stat` file.
fn state_of(stat: &str) -> Option<char> {
    stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next())
}

/// Orphans are reaped by whoever is process 1, perhaps never: a zombie is dead.
fn alive(pid: i32) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    state_of(&text).is_some_and(|state| state != 'Z' && state != 'X')
}

/// Looks until `condition` holds.
async fn until(what: &str, condition: impl FnMut() -> bool) {
    until_within(LONG, what, condition).await;
}

async fn until_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let mut look = interval(Duration::from_millis(5));
    timeout(limit, async {
        while !condition() {
            look.tick().await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("never came: {what}"));
}

/// All provisioners, with the transports to reach their ranks.
fn provisioners() -> Vec<(&'static str, Box<dyn Provisioner>, Transports)> {
    let switchboard = InProcess::new();
    let inside = InProcessRanks::new(workers(), switchboard.clone());
    #[cfg_attr(not(feature = "ray"), expect(unused_mut, reason = "one more comes with the feature"))]
    let mut all: Vec<(&'static str, Box<dyn Provisioner>, Transports)> = vec![
        ("processes", Box::new(local()), transports()),
        ("in one process", Box::new(inside), Transports::from_features(switchboard)),
        ("on two nodes", Box::new(nodes::TwoNodes::default()), transports()),
    ];
    #[cfg(feature = "ray")]
    if std::env::var_os("GYM_RAY_TEST_ADDRESS").is_some() {
        all.push(("on Ray", Box::new(ray::OnRay), transports()));
    }
    all
}
