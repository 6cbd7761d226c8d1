//! A program that uses UCX starts itself again with the settings that UCX reads when it is loaded.
//!
//! No test harness: the cases run this executable as such a program.

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::process::Command;

    use gym_client::transport::rdma::UCX_VARIABLES as UCX_SETTINGS;
    use gym_client::{Transports, launch};
    use libtest_mimic::{Arguments, Trial};

    const PROGRAM: &str = "program";

    pub(super) fn main() {
        launch::enter();
        let arguments: Vec<String> = std::env::args().collect();
        if arguments.get(1).is_some_and(|role| role == PROGRAM) {
            return program(&arguments);
        }
        let cases: [(&str, fn()); 4] = [
            (
                "one_restart_brings_the_settings_under_the_same_process_id",
                one_restart_brings_the_settings_under_the_same_process_id,
            ),
            (
                "a_program_that_is_not_told_to_use_ucx_stays_as_it_is",
                a_program_that_is_not_told_to_use_ucx_stays_as_it_is,
            ),
            ("what_the_user_has_set_is_kept", what_the_user_has_set_is_kept),
            (
                "a_program_whose_settings_are_gone_again_does_not_start_itself_for_ever",
                a_program_whose_settings_are_gone_again_does_not_start_itself_for_ever,
            ),
        ];
        let trial = |(name, case): (&str, fn())| {
            Trial::test(name, move || {
                case();
                Ok(())
            })
        };
        libtest_mimic::run(&Arguments::from_args(), cases.into_iter().map(trial).collect()).exit()
    }

    /// Prints a line at each start, and what it has when it goes on.
    fn program(arguments: &[String]) {
        println!("started {}", std::process::id());
        let policy = arguments[2].parse().expect("a policy");
        launch::prepare(&Transports::standard().with_policy(policy)).expect("can be started again");
        for (name, _) in UCX_SETTINGS {
            println!("{name}={}", std::env::var(name).unwrap_or_default());
        }
        println!("arguments {}", arguments[2..].join(" "));
    }

    fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        for (name, _) in UCX_SETTINGS {
            command.env_remove(name);
        }
        command.env_remove("GYM_UCX_RESTARTED").arg(PROGRAM).args(arguments).envs(variables.iter().copied());
        let output = command.output().expect("runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
    }

    fn one_restart_brings_the_settings_under_the_same_process_id() {
        let lines = run(&["auto", "with a space"], &[]);
        assert_eq!(lines[0], lines[1], "two starts of one process: {lines:?}");
        assert_eq!(lines[2..5], ["UCX_HANDLE_ERRORS=none", "UCX_MEM_MMAP_HOOK_MODE=none", "UCX_LOG_FILE=stderr"]);
        assert_eq!(lines[5..], ["arguments auto with a space"]);
    }

    fn a_program_that_is_not_told_to_use_ucx_stays_as_it_is() {
        let lines = run(&["mem,http"], &[]);
        assert_eq!(lines[1..3], ["UCX_HANDLE_ERRORS=", "UCX_MEM_MMAP_HOOK_MODE="], "one start: {lines:?}");
    }

    fn what_the_user_has_set_is_kept() {
        let lines = run(&["shm"], &[("UCX_HANDLE_ERRORS", "bt")]);
        assert_eq!(lines[2..4], ["UCX_HANDLE_ERRORS=bt", "UCX_MEM_MMAP_HOOK_MODE=none"], "{lines:?}");
        let set = [("UCX_HANDLE_ERRORS", "bt"), ("UCX_MEM_MMAP_HOOK_MODE", "bistro"), ("UCX_LOG_FILE", "/dev/null")];
        let all = run(&["shm"], &set);
        assert_eq!(all[1..3], ["UCX_HANDLE_ERRORS=bt", "UCX_MEM_MMAP_HOOK_MODE=bistro"], "nothing to start for");
    }

    fn a_program_whose_settings_are_gone_again_does_not_start_itself_for_ever() {
        let lines = run(&["auto"], &[("GYM_UCX_RESTARTED", "1")]);
        assert_eq!(lines[1], "UCX_HANDLE_ERRORS=", "{lines:?}");
    }
}
