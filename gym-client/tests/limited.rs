//! Programs within limits: what each limit ends, what is left afterwards, and what callers are told.
#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use gym_client::launch::{Limit, LimitedProgram, LimitedRun, Limits};
use gym_core::{CallContext, Code};
use tokio::time::{Instant, sleep, timeout};

/// Generous: the machine may be busy with other builds.
const LONG: Duration = Duration::from_secs(60);

fn shell(script: &str) -> LimitedProgram {
    LimitedProgram::new("sh").args(["-c", script])
}

fn python(code: &str) -> LimitedProgram {
    LimitedProgram::new("python3").args(["-I", "-S", "-c", code])
}

fn limits(set: impl FnOnce(&mut Limits)) -> Limits {
    let mut limits = Limits::default();
    set(&mut limits);
    limits
}

async fn run(program: LimitedProgram) -> LimitedRun {
    program.run(&CallContext::within(LONG)).await.expect("it runs")
}

/// Returns whether a process with this argument lives. Zombies of others have no command line.
fn runs(argument: &str) -> bool {
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    let command = |path: PathBuf| std::fs::read(path.join("cmdline")).unwrap_or_default();
    processes
        .map(|entry| command(entry.path()))
        .any(|line| line.split(|byte| *byte == 0).any(|one| one == argument.as_bytes()))
}

/// Returns an argument of `sleep` that no other test has: about an hour.
fn an_hour() -> String {
    format!("36{:02}.{:09}", fastrand::u8(..100), fastrand::u32(..1_000_000_000))
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let looked = timeout(LONG, async {
        while !condition() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    looked.await.unwrap_or_else(|_| panic!("never came: {what}"));
}

#[tokio::test]
async fn a_program_gets_its_input_and_files_and_an_environment_of_its_own() {
    let script = r#"cat; cat notes.txt; pwd >&2; printf '%s%s\n' "$ONLY" "$1"; env"#;
    let program = shell(script).args(["sh", " 'a b'"]).env("ONLY", "sums").file("notes.txt", "notes ").stdin("input ");
    let run = run(program).await;
    assert!(run.succeeded() && !run.sandboxed, "{run:?}");
    let text = run.stdout_text();
    let (said, variables) = text.split_once('\n').expect("lines");
    assert_eq!(said, "input notes sums 'a b'");
    let names: BTreeSet<&str> = variables.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    // Shells add the last four.
    let known = ["GYM_LAUNCH_MARK", "HOME", "LANG", "PATH", "TMPDIR", "ONLY", "PWD", "OLDPWD", "SHLVL", "_"];
    assert!(
        names.iter().all(|name| known.contains(name)) && known[..6].iter().all(|name| names.contains(name)),
        "{names:?}"
    );
    let directory = PathBuf::from(run.stderr_text().trim());
    assert!(directory.starts_with(std::env::temp_dir()) && !directory.exists(), "{directory:?} is removed");
}

#[tokio::test]
async fn an_exit_status_and_a_signal_are_results() {
    let failed = run(shell("echo no >&2; exit 3")).await;
    assert_eq!((failed.status.code(), failed.signal(), failed.limit, failed.succeeded()), (Some(3), None, None, false));
    assert_eq!(failed.to_string(), "exit status: 3: no");
    let killed = run(shell("kill -SEGV $$")).await;
    assert_eq!((killed.status.code(), killed.signal(), killed.limit), (None, Some(11), None));
}

#[tokio::test]
async fn code_that_kills_stops_or_traces_its_parent_ends_its_own_run_alone() {
    let parent = |what: &str| {
        let code = format!("import os, signal, time, ctypes\n{what}\nprint(5)\nos.close(1)\ntime.sleep(3600)");
        python(&code).limits(limits(|limits| limits.wall = Duration::from_secs(2)))
    };
    let traces = "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0";
    let neighbor = tokio::spawn(run(shell("sleep 1; echo 5")));
    for (what, code, signal, limit) in [
        ("kills", "os.kill(os.getppid(), signal.SIGKILL)", Some(9), None),
        ("terminates", "os.kill(os.getppid(), signal.SIGTERM)", Some(15), None),
        ("kills its group", "os.kill(0, signal.SIGKILL)", Some(9), None),
        ("stops", "os.kill(os.getppid(), signal.SIGSTOP)", Some(9), Some(Limit::Wall)),
        ("traces", traces, Some(9), Some(Limit::Wall)),
    ] {
        let ended = run(parent(code)).await;
        if what == "traces" && ended.stderr_text().contains("AssertionError") {
            // The kernel allows no process to trace its parent (`kernel.yama.ptrace_scope`).
            continue;
        }
        assert_eq!((ended.signal(), ended.limit, ended.succeeded()), (signal, limit, false), "{what}: {ended:?}");
    }
    // Where the parent is stopped and the code ends, too.
    let mut stops = python("import os, signal; os.kill(os.getppid(), signal.SIGSTOP); print(5)");
    stops.limits.wall = Duration::from_secs(2);
    let ended = run(stops).await;
    assert_eq!((ended.limit, ended.succeeded()), (Some(Limit::Wall), false), "{ended:?}");
    assert_eq!(neighbor.await.expect("it lives").stdout_text(), "5\n");
    assert!(run(shell("echo 5")).await.succeeded());
}

#[tokio::test]
async fn the_guard_says_nothing_and_counts_as_no_process() {
    let program = python("import os; os.kill(os.getpid(), 11)");
    let crashed = run(program).await;
    assert_eq!((crashed.signal(), &*crashed.stderr_text()), (Some(11), ""), "{crashed:?}");
    let mut alone = python("import time; time.sleep(0.5); print(5)");
    alone.limits.processes = 1;
    let run = run(alone).await;
    assert!(run.succeeded(), "{run:?}");
}

#[tokio::test]
async fn a_large_input_and_a_large_output_do_not_wait_for_each_other() {
    let input = vec![b'x'; 700_000];
    let run = run(LimitedProgram::new("cat").stdin(input.clone())).await;
    assert!(run.succeeded() && run.stdout == input, "{:?} {}", run.limit, run.stdout.len());
    let unread = self::run(shell("exit 0").stdin(input)).await;
    assert!(unread.succeeded(), "{unread:?}");
}

#[tokio::test]
async fn a_loop_for_ever_ends_by_its_cpu_time() {
    let run = run(python("while True: pass").limits(limits(|limits| limits.cpu = Duration::from_millis(300)))).await;
    assert_eq!(run.limit, Some(Limit::Cpu), "{run:?}");
    assert!(run.cpu >= Duration::from_millis(250) && run.to_string().contains("limit of CPU time"), "{run:?}");
}

#[tokio::test]
async fn the_cpu_time_of_all_processes_counts() {
    let loops = "import os\nfor _ in range(3):\n  if os.fork() == 0:\n    while True: pass\nos.wait()";
    let run = run(python(loops).limits(limits(|limits| limits.cpu = Duration::from_millis(600)))).await;
    assert_eq!(run.limit, Some(Limit::Cpu), "{run:?}");
}

#[tokio::test]
async fn a_program_that_only_waits_ends_by_its_wall_time() {
    let hour = an_hour();
    let run =
        run(shell(&format!("sleep {hour}")).limits(limits(|limits| limits.wall = Duration::from_millis(200)))).await;
    assert_eq!(run.limit, Some(Limit::Wall), "{run:?}");
    assert!(run.cpu < Duration::from_secs(1), "{run:?}");
    assert!(!runs(&hour), "its processes have ended");
}

#[tokio::test]
async fn memory_beyond_the_limit_is_refused() {
    let bomb = python("x = bytearray(400 << 20); print(len(x))");
    let run = run(bomb.clone().limits(limits(|limits| limits.memory_bytes = 200 << 20))).await;
    assert!(run.status.code() == Some(1) && run.to_string().contains("MemoryError"), "{run:?}");
    let enough = self::run(bomb).await;
    assert!(enough.succeeded(), "{enough:?}");
}

#[tokio::test]
async fn the_memory_of_all_processes_counts() {
    let eaters = "import os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    x = bytearray(os.urandom(1)) * (60 << 20); time.sleep(3600)\ntime.sleep(3600)";
    let run = run(python(eaters).limits(limits(|limits| limits.memory_bytes = 150 << 20))).await;
    assert_eq!(run.limit, Some(Limit::Memory), "{run:?}");
}

#[tokio::test]
async fn a_flood_of_output_ends_the_program_and_its_begin_is_kept() {
    for (script, on_stdout) in [("yes", true), ("yes >&2", false)] {
        let run = run(shell(script).limits(limits(|limits| limits.output_bytes = 1_000))).await;
        assert_eq!(run.limit, Some(Limit::Output), "{run:?}");
        let (flooded, other) = if on_stdout { (run.stdout, run.stderr) } else { (run.stderr, run.stdout) };
        assert_eq!((flooded.len(), other.len()), (1_000, 0));
        assert!(flooded.starts_with(b"y\ny\n"));
    }
    let exact = run(shell("printf 0123456789").limits(limits(|limits| limits.output_bytes = 10))).await;
    assert!(exact.succeeded(), "{exact:?}");
    let above = run(shell("printf 0123456789").limits(limits(|limits| limits.output_bytes = 9))).await;
    assert_eq!((above.limit, above.stdout_text().as_str()), (Some(Limit::Output), "012345678"));
}

#[tokio::test]
async fn a_huge_file_ends_the_program() {
    let limits = limits(|limits| limits.file_bytes = 1 << 20);
    let run = run(shell("exec dd if=/dev/zero of=huge bs=65536 count=100").limits(limits.clone())).await;
    assert_eq!(run.limit, Some(Limit::FileSize), "{run:?}");
    // Python ignores the signal.
    let refused = self::run(python("open('huge', 'wb').write(bytes(2 << 20))").limits(limits)).await;
    assert!(refused.status.code() == Some(1) && refused.to_string().contains("File too large"), "{refused:?}");
}

#[tokio::test]
async fn too_many_processes_end_the_program() {
    let hour = an_hour();
    let script = format!("for i in 1 2 3 4 5 6 7 8 9; do sleep {hour} & done; wait");
    let run = run(shell(&script).limits(limits(|limits| limits.processes = 5))).await;
    assert_eq!(run.limit, Some(Limit::Processes), "{run:?}");
    assert!(!runs(&hour));
}

#[tokio::test]
async fn what_a_program_leaves_in_the_background_is_killed() {
    // In its group; in a session of its own; and with no parent and its own session, but with its output open.
    for script in ["sleep H &", "setsid sleep H > /dev/null 2>&1 &", "(setsid sleep H &) &"] {
        let hour = an_hour();
        let run = run(shell(&format!("{}\nsleep 0.1; echo done", script.replace('H', &hour)))).await;
        assert!(run.succeeded() && run.stdout_text() == "done\n", "{script}: {run:?}");
        assert!(!runs(&hour), "{script}");
    }
}

#[tokio::test]
async fn a_program_that_is_not_there_is_a_failure_of_this_machine() {
    let missing =
        LimitedProgram::new("no-such-interpreter").run(&CallContext::within(LONG)).await.expect_err("missing");
    let text = missing.to_string();
    assert!(text.contains("run no-such-interpreter within limits") && text.contains("not found"), "{text}");
    assert!(text.contains("\n  fix: install the program on this machine"), "{text}");
    assert_eq!(missing.code(), Code::Unavailable, "of the machine, not of the program");
    for wrong in
        [shell("").file("a/b", ""), shell("").file("", ""), shell("").limits(limits(|limits| limits.processes = 0))]
    {
        let error = wrong.run(&CallContext::within(LONG)).await.expect_err("invalid");
        assert!(error.code() == Code::InvalidArgument && error.to_string().contains("\n  fix: "), "{error}");
    }
}

#[tokio::test]
async fn a_caller_that_gives_up_leaves_no_process_and_no_directory() {
    // No other test has a file of this name.
    let mine = format!("mine-{}", an_hour());
    let directories = || -> BTreeSet<PathBuf> {
        let all = std::fs::read_dir(std::env::temp_dir()).expect("a directory").flatten().map(|entry| entry.path());
        let own = |path: &PathBuf| path.join(&mine).exists();
        all.filter(|path| path.to_string_lossy().contains("gym-limited-")).filter(own).collect()
    };
    for drops in [true, false] {
        let hour = an_hour();
        let program = shell(&format!("(setsid sleep {hour} &) & sleep {hour}")).file(&mine, "");
        let cx = CallContext::within(LONG);
        let mut running = Box::pin(program.run(&cx));
        tokio::select! {
            biased;
            run = &mut running => panic!("it ended: {run:?}"),
            () = until("it runs", || runs(&hour)) => {}
        }
        assert_eq!(directories().len(), 1);
        if drops {
            drop(running);
        } else {
            cx.cancel.cancel();
            assert_eq!(running.await.expect_err("cancelled").code(), Code::Cancelled);
        }
        until("its processes have ended", || !runs(&hour)).await;
        until("its directory is gone", || directories().is_empty()).await;
    }
    let late = shell("sleep 3600").run(&CallContext::within(Duration::from_millis(200))).await.expect_err("late");
    assert_eq!(late.code(), Code::DeadlineExceeded, "the deadline of the caller is no limit of the program: {late}");
}

#[tokio::test]
async fn many_programs_run_at_the_same_time() {
    let begin = Instant::now();
    let runs = (0..40).map(|at| run(python("print(int(input()) ** 2)").stdin(format!("{at}\n"))));
    for (at, run) in futures_util::future::join_all(runs).await.into_iter().enumerate() {
        assert_eq!(run.stdout_text().trim(), (at * at).to_string(), "{run:?}");
    }
    println!("40 programs in {:.2} s", begin.elapsed().as_secs_f64());
}
