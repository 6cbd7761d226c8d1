//! Tests the commands with running servers, in a program with its own server. This file is also that program: with
//! `GYM_TEST_PROGRAM` in its environment it runs the command line, otherwise the test cases.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

#[path = "cli/collect.rs"]
mod collect;
#[path = "cli/doctor.rs"]
mod doctor;
#[path = "cli/fixture.rs"]
mod fixture;
#[path = "cli/models.rs"]
mod models;
#[path = "cli/plan.rs"]
mod plan;
#[cfg(feature = "ray")]
#[path = "cli/ray.rs"]
mod ray;
#[cfg(feature = "rdma")]
#[path = "cli/recordings.rs"]
mod recordings;
#[path = "cli/resume.rs"]
mod resume;
#[path = "cli/serve.rs"]
mod serve;
#[path = "cli/summary.rs"]
mod summary;
#[path = "cli/transports.rs"]
mod transports;
#[cfg(feature = "rdma")]
#[path = "cli/workers.rs"]
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;

use gym_core::{CallContext, Error, ModelResponse, ResourcesServer, Result, SessionId, Verdict};
use gym_server::Servers;
use libtest_mimic::{Arguments, Trial};
use tokio::net::unix::pipe;

const PROGRAM: &str = "GYM_TEST_PROGRAM";

/// Scores 1 if the scripted model's digit equals the task's digit. A task can wait at a gate, a named pipe, which
/// keeps its rollout in flight until the test writes to it.
struct Digit;

#[derive(serde::Deserialize)]
struct Task {
    digits: String,
    #[serde(default)]
    wait_for: Option<PathBuf>,
    /// The reward is a placeholder.
    #[serde(default)]
    mask: bool,
}

impl ResourcesServer for Digit {
    type Task = Task;

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        if let Some(gate) = &task.wait_for {
            let failed = |error| Error::internal("the gate cannot be opened").caused_by(error);
            let gate = pipe::OpenOptions::new().open_receiver(gate).map_err(failed)?;
            gate.readable().await.map_err(failed)?;
        }
        if task.digits.is_empty() {
            return Err(Error::internal("the task has no digits to choose from"));
        }
        let verdict = Verdict::correct(task.digits.contains(response.last_text()?.trim()));
        Ok(if task.mask { verdict.with("mask_sample", true) } else { verdict })
    }
}

macro_rules! cases {
    ($($module:ident::$name:ident),* $(,)?) => {
        vec![$(Trial::test(stringify!($name), || {
            $module::$name();
            Ok(())
        })),*]
    };
}

fn main() -> ExitCode {
    if std::env::var_os(PROGRAM).is_some() {
        return gym_server::cli::main(Servers::stock().resources("digit", |_| Ok(Digit)));
    }
    let mut cases: Vec<Trial> = cases![
        serve::run_announces_serves_and_stops_in_order,
        serve::status_and_workers_show_the_ray_cluster_of_the_configuration,
        serve::a_check_asks_the_head_for_servers_that_no_file_defines,
        serve::an_agent_that_cannot_play_the_environment_is_told_before_anything_starts,
        serve::a_second_signal_stops_at_once,
        serve::services_run_in_processes_of_their_own,
        serve::servers_are_reached_at_an_ipv6_address,
        transports::ucx_is_chosen_by_configuration_alone,
        transports::settings_of_ucx_neither_end_a_process_nor_change_its_output,
        transports::doctor_names_the_setting_that_keeps_ucx_from_starting,
        transports::servers_of_one_process_call_each_other_over_ucx,
        transports::a_required_transport_fails_without_fallback,
        transports::doctor_reports_why_a_required_transport_is_unavailable,
        collect::collect_uses_the_servers_that_run,
        collect::collect_brings_its_own_servers,
        collect::mistakes_in_rows_and_options_are_found_before_the_first_rollout,
        collect::collect_takes_a_free_port_for_its_own_head,
        collect::a_failed_rollout_ends_with_3,
        collect::a_collection_in_which_all_fails_alike_stops_and_says_how_to_go_on,
        collect::a_stopped_collection_goes_on_where_it_was,
        collect::results_and_inputs_are_replaced_only_if_asked,
        collect::a_resumed_collection_may_grow_but_not_change,
        models::a_dead_model_endpoint_is_named_at_the_start_and_while_rollouts_wait,
        models::a_command_waits_for_the_model_as_long_as_asked,
        models::doctor_calls_the_model_endpoints_of_a_configuration,
        models::doctor_tells_a_head_server_from_another_program,
        doctor::doctor_measures_each_usable_transport_between_two_processes,
        models::a_truncated_rollout_is_scored_or_fails,
        plan::a_plan_is_computed_from_a_measurement_that_checks_itself,
        plan::a_plan_of_rollouts_that_fail_says_why,
        resume::outputs_that_cannot_continue_are_refused_before_servers_start,
        resume::a_resume_with_other_settings_is_refused_or_marked,
        resume::a_remote_head_server_tells_the_settings_of_its_servers,
        resume::results_without_settings_resume_with_one_warning,
        resume::a_resume_of_nothing_says_so_and_a_misspelled_output_is_refused,
        resume::results_of_an_earlier_commit_are_read_and_resumed,
        summary::the_summary_has_the_figures_of_the_rows_on_the_disk,
        summary::status_shows_the_oldest_rollout_in_flight,
    ];
    #[cfg(feature = "rdma")]
    cases.extend(cases![
        doctor::doctor_asks_nccl_in_a_process_of_its_own_where_ranks_would_meet,
        recordings::this_machine_is_recorded_and_replayed,
        recordings::a_replay_judges_folders_and_recordings_with_their_names,
        recordings::what_cannot_be_replayed_or_recorded_is_refused_with_the_fix,
        workers::the_head_names_what_differs_between_its_workers,
        workers::a_wrong_setting_ends_a_worker_before_it_waits,
        workers::the_configuration_tells_who_has_won,
    ]);
    #[cfg(feature = "ray")]
    cases.extend(cases![
        ray::local_starts_one_ray_head_and_stops_only_that,
        ray::a_collection_with_its_own_servers_has_a_ray_head_until_it_ends,
        ray::a_killed_command_leaves_no_ray_head,
        ray::a_ray_head_that_cannot_start_is_explained,
        ray::a_taken_port_of_the_dashboard_is_named_and_another_one_used,
    ]);
    // Each case starts a handful of processes.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, cases).exit_code()
}
