//! Cases and the controller that they kill.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::future::Future;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use gym_client::launch::{ChildHandle, ChildSpec, ChildState, LaunchError, Launcher, LineSink, RestartPolicy, Stream};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::{Instant, interval, timeout};

#[path = "../harness/mod.rs"]
mod harness;

use harness::{Case, Running, run_cases};

/// Generous: the machine may be busy with other builds. Every wait ends far earlier when things work.
const LONG: Duration = Duration::from_secs(60);

macro_rules! cases {
    ($($name:ident),* $(,)?) => { vec![$((stringify!($name), (|| Box::pin($name()) as Running) as fn() -> _)),*] };
}

pub(crate) fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|role| role == "controller") {
        return run(controller(&arguments[1]));
    }
    let cases: Vec<Case> = cases![
        killing_the_controller_takes_children_and_grandchildren,
        a_deleted_executable_still_launches,
        the_child_dies_with_the_controller_even_without_a_watchdog,
        dropping_the_launcher_ends_everything,
        a_killed_watchdog_is_replaced_and_knows_the_old_children,
        exit_at_start_gives_up_with_the_last_words,
        restarts_count_and_the_child_comes_back,
        environment_arguments_and_folder_arrive,
        a_cleared_environment_is_clear,
        lines_come_with_name_and_stream,
        children_stop_in_reverse_order,
        children_of_a_process_that_ignores_interrupts_get_them,
        a_child_that_ignores_signals_is_killed,
        a_second_stop_shortens_the_grace,
        interrupt_comes_once_and_first,
        what_a_child_leaves_behind_ends_before_it_is_given_up,
        stop_during_backoff_is_immediate,
        the_starting_thread_may_end,
        a_shim_that_does_not_enter_is_named,
        names_are_unique_and_come_free_again,
        wrong_specifications_start_nothing,
        two_processes_measure_a_transport,
    ];
    run_cases(cases, run)
}

fn run(case: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(Duration::from_millis(10))
        .enable_all()
        .build()
        .expect("runtime");
    // It says so before the test runner kills it.
    runtime.block_on(async { timeout(Duration::from_secs(100), case).await.expect("the case hangs") });
}

// ── what the cases share ──

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<(String, Stream, String)>>>);

impl Lines {
    fn sink(&self) -> LineSink {
        let lines = self.0.clone();
        Arc::new(move |name, stream, line| lines.lock().push((name.to_owned(), stream, line.to_owned())))
    }

    fn all(&self) -> Vec<(String, Stream, String)> {
        self.0.lock().clone()
    }

    fn texts(&self) -> Vec<String> {
        self.all().into_iter().map(|(_, _, line)| line).collect()
    }

    /// The rest of the first line that starts with `prefix`.
    async fn after(&self, prefix: &str) -> String {
        let found = || self.texts().into_iter().find_map(|line| line.strip_prefix(prefix).map(str::to_owned));
        until(prefix, || found().is_some()).await;
        found().expect("just seen")
    }

    async fn pid(&self, prefix: &str) -> i32 {
        self.after(prefix).await.trim().parse().expect("a process id")
    }
}

/// Looks until `condition` holds.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let mut look = interval(Duration::from_millis(5));
    timeout(LONG, async {
        while !condition() {
            look.tick().await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("never came: {what}"));
}

/// State letter and parent of a process; `None` when there is none.
fn process(pid: i32) -> Option<(char, i32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Orphans are reaped by whoever is process 1, perhaps never: a zombie is dead.
fn alive(pid: i32) -> bool {
    process(pid).is_some_and(|(state, _)| state != 'Z' && state != 'X')
}

fn own_children() -> BTreeSet<i32> {
    let own = i32::try_from(std::process::id()).expect("fits");
    let pids = std::fs::read_dir("/proc")
        .expect("proc")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| process(*pid).is_some_and(|(_, parent)| parent == own)).collect()
}

fn watchdog_pid() -> Option<i32> {
    own_children().into_iter().find(|pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.split(|byte| *byte == 0).any(|argument| argument == b"--gym-launch-watchdog"))
    })
}

fn sh(name: &str, script: &str) -> ChildSpec {
    ChildSpec::new(name, "sh").arg("-c").arg(script).restart(RestartPolicy::NEVER)
}

fn launcher(lines: &Lines) -> Launcher {
    Launcher::builder()
        .lines(lines.sink())
        .seed(1)
        .orphan_grace(Duration::from_millis(300))
        .build()
        .expect("this binary entered")
}

async fn last(child: &ChildHandle) -> ChildState {
    let mut events = child.events();
    let last = timeout(LONG, events.wait_for(ChildState::is_final)).await.expect("final in time").expect("supervised");
    last.clone()
}

async fn end(launcher: &Launcher) {
    launcher.shutdown(LONG).await.expect("stops");
    until("no child and no zombie is left", || own_children().is_empty()).await;
}

/// Says its own process id and those of: a plain grandchild, one that ignores the polite signals, one in its own
/// session whose parent is gone.
const FAMILY: &str = r#"
sleep 1000 & echo plain $!
sh -c 'trap "" TERM INT HUP; echo stubborn $$; while :; do sleep 1000; done' &
(setsid sh -c 'echo escaped $$; exec sleep 1000' &)
echo leader $$
wait
"#;

const RELATIVES: [&str; 4] = ["leader ", "plain ", "stubborn ", "escaped "];

async fn relatives(lines: &Lines) -> Vec<i32> {
    let mut pids = Vec::new();
    for relative in RELATIVES {
        pids.push(lines.pid(relative).await);
    }
    pids
}

/// The process that gets killed: launches the family, passes its lines on, and waits.
async fn controller(mode: &str) {
    if mode == "deleted" {
        std::fs::remove_file(std::env::current_exe().expect("own path")).expect("removes itself");
    }
    let launcher = Launcher::builder()
        .orphan_grace(Duration::from_millis(300))
        .lines(Arc::new(|_, _, line| println!("{line}")))
        .build()
        .expect("entered");
    let unguarded = mode == "unguarded";
    // Nobody would end grandchildren then.
    let script = if unguarded { "read go; kill -9 $WATCHDOG; echo leader $$; exec sleep 1000" } else { FAMILY };
    if unguarded {
        // The first child brings the watchdog; the second one kills it and is what the test looks at.
        launcher.spawn(sh("first", "exec sleep 1000")).await.expect("starts");
    }
    let watchdog = watchdog_pid().unwrap_or_default().to_string();
    let child = launcher.spawn(sh("family", script).env("WATCHDOG", watchdog)).await.expect("starts");
    let state = last(&child).await;
    panic!("the family ended by itself: {state:?}");
}

async fn kill_a_controller(executable: &Path, mode: &str, relatives: usize) {
    let mut controller = tokio::process::Command::new(executable)
        .args(["controller", mode])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("starts");
    let mut lines = BufReader::new(controller.stdout.take().expect("piped")).lines();
    let mut pids = Vec::new();
    while pids.len() < relatives {
        let line = timeout(LONG, lines.next_line()).await.expect("in time").expect("reads").expect("a line");
        pids.push(line.split_once(' ').expect("two words").1.parse::<i32>().expect("a process id"));
    }
    assert!(pids.iter().all(|pid| alive(*pid)), "all run: {pids:?}");
    controller.start_kill().expect("kill -9");
    let status = timeout(LONG, controller.wait()).await.expect("in time").expect("waits");
    assert_eq!(status.signal(), Some(9));
    until("all relatives are dead", || !pids.iter().any(|pid| alive(*pid))).await;
}

// ── the controller dies ──

async fn killing_the_controller_takes_children_and_grandchildren() {
    kill_a_controller(&std::env::current_exe().expect("own path"), "plain", RELATIVES.len()).await;
}

async fn a_deleted_executable_still_launches() {
    let folder = tempfile::tempdir().expect("folder");
    let copy = folder.path().join("controller");
    std::fs::copy("/proc/self/exe", &copy).expect("copies");
    kill_a_controller(&copy, "deleted", RELATIVES.len()).await;
    assert!(!copy.exists(), "it was deleted before it launched");
}

async fn the_child_dies_with_the_controller_even_without_a_watchdog() {
    kill_a_controller(&std::env::current_exe().expect("own path"), "unguarded", 1).await;
}

async fn dropping_the_launcher_ends_everything() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    launcher.spawn(sh("family", FAMILY)).await.expect("starts");
    let pids = relatives(&lines).await;
    drop(launcher);
    until("all relatives are dead", || !pids.iter().any(|pid| alive(*pid))).await;
    until("no child and no zombie is left", || own_children().is_empty()).await;
}

async fn a_killed_watchdog_is_replaced_and_knows_the_old_children() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    launcher.spawn(sh("family", FAMILY)).await.expect("starts");
    let pids = relatives(&lines).await;
    let first = watchdog_pid().expect("a watchdog");
    let raw = rustix::process::Pid::from_raw(first).expect("not zero");
    rustix::process::kill_process(raw, rustix::process::Signal::TERM).expect("signals");
    rustix::process::kill_process(raw, rustix::process::Signal::KILL).expect("kills");
    until("the watchdog is dead", || !alive(first)).await;
    launcher.spawn(sh("second", "sleep 1000")).await.expect("starts");
    let second = watchdog_pid().expect("a new watchdog");
    assert_ne!(first, second);
    assert!(pids.iter().all(|pid| alive(*pid)), "nobody was harmed: {pids:?}");
    drop(launcher);
    until("all relatives are dead", || !pids.iter().any(|pid| alive(*pid))).await;
    until("no child and no zombie is left", || own_children().is_empty()).await;
}

// ── exits and restarts ──

async fn exit_at_start_gives_up_with_the_last_words() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let mut policy = RestartPolicy::default();
    policy.max_restarts = 2;
    policy.backoff_min = Duration::from_millis(1);
    policy.backoff_max = Duration::from_millis(5);
    policy.window = LONG;
    let script = "echo one >&2; echo unrelated; printf 'boom\\377' >&2; exit 3";
    let child = launcher.spawn(sh("broken", script).restart(policy)).await.expect("starts");
    let ChildState::GaveUp(report) = last(&child).await else { panic!("gives up") };
    assert_eq!(report.incarnation, 3, "one start and two restarts");
    assert_eq!(report.status.and_then(|status| status.code()), Some(3));
    assert_eq!(*report.stderr_tail, ["one".to_owned(), "boom\u{fffd}".to_owned()]);
    let words = report.to_string();
    assert!(words.contains("exit status: 3") && words.contains("boom"), "{words}");
    assert_eq!(lines.texts().iter().filter(|line| *line == "one").count(), 3, "{:?}", lines.texts());
    assert!(matches!(child.stop(LONG).await.expect("is over"), ChildState::GaveUp(_)), "stop changes nothing");
    end(&launcher).await;
}

async fn restarts_count_and_the_child_comes_back() {
    let folder = tempfile::tempdir().expect("folder");
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let mut policy = RestartPolicy::default();
    policy.max_restarts = 5;
    policy.backoff_min = Duration::from_millis(1);
    policy.backoff_max = Duration::from_millis(5);
    policy.window = LONG;
    // Dies once by a signal, then stays.
    let script = "if [ -e seen ]; then echo again $$; exec sleep 1000; fi; touch seen; echo first $$; kill -9 $$";
    let child = launcher.spawn(sh("math", script).cwd(folder.path()).restart(policy)).await.expect("starts");
    let mut events = child.events();
    let second = |state: &ChildState| matches!(state, ChildState::Running { incarnation: 2, .. });
    let state = timeout(LONG, events.wait_for(second)).await.expect("in time").expect("supervised").clone();
    let ChildState::Running { pid, .. } = state else { panic!("runs") };
    assert_eq!(lines.pid("again ").await, i32::try_from(pid).expect("fits"), "the shim became the program");
    assert_ne!(lines.pid("first ").await, lines.pid("again ").await);
    end(&launcher).await;
}

async fn what_a_child_leaves_behind_ends_before_it_is_given_up() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let script = "(setsid sh -c 'echo escaped $$; exec sleep 1000' &) ; sleep 1000 & echo plain $!; exit 0";
    let child = launcher.spawn(sh("leaves", script)).await.expect("starts");
    let ChildState::GaveUp(report) = last(&child).await else { panic!("gives up") };
    assert_eq!(report.status.and_then(|status| status.code()), Some(0), "an unasked exit is an exit");
    // The escaped one may have been ended before it could say its number.
    for line in lines.texts() {
        let pid = line.split_once(' ').expect("two words").1.parse().expect("a process id");
        assert!(!alive(pid), "{line}");
    }
    assert!(lines.texts().iter().any(|line| line.starts_with("plain ")));
    end(&launcher).await;
}

// ── what arrives ──

async fn environment_arguments_and_folder_arrive() {
    let folder = tempfile::tempdir().expect("folder");
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let odd = OsString::from_vec(b"not\xffutf8".to_vec());
    let script = r#"echo "folder $(pwd -P)"; echo "two $GYM_TEST_TWO"; echo "home ${HOME:+kept}"
        printf 'odd '; printf %s "$1" | od -An -tx1; echo "count $#"; echo "blank $2"
        if read x; then echo input; else echo no input; fi"#;
    let spec = sh("math", script)
        .arg("zero")
        .arg(&odd)
        .arg("a b  c")
        .arg("")
        .cwd(folder.path())
        .env("GYM_TEST_TWO", "2 = 2\n");
    let child = launcher.spawn(spec).await.expect("starts");
    last(&child).await;
    let texts = lines.texts();
    let has = |wanted: &str| assert!(texts.iter().any(|line| line == wanted), "{wanted:?} in {texts:?}");
    has(&format!("folder {}", folder.path().canonicalize().expect("path").display()));
    has("two 2 = 2");
    has(&format!("home {}", if std::env::var_os("HOME").is_some() { "kept" } else { "" }));
    has("odd  6e 6f 74 ff 75 74 66 38");
    has("count 3");
    has("blank a b  c");
    has("no input");
    end(&launcher).await;
}

async fn a_cleared_environment_is_clear() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let mut spec = ChildSpec::new("bare", "env").restart(RestartPolicy::NEVER).env("ONLY", "this");
    spec.env_clear = true;
    let child = launcher.spawn(spec).await.expect("starts");
    last(&child).await;
    let mut names: Vec<String> =
        lines.texts().iter().map(|line| line.split_once('=').expect("NAME=value").0.to_owned()).collect();
    names.sort();
    assert_eq!(names, ["GYM_LAUNCH_MARK", "ONLY"]);
    end(&launcher).await;
}

async fn lines_come_with_name_and_stream() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let child =
        launcher.spawn(sh("talker", "echo out; echo err >&2; printf 'bar 1\\rbar 2\\r'")).await.expect("starts");
    last(&child).await;
    let of = |stream| {
        let mine = lines.all().into_iter().filter(move |(name, from, _)| name == "talker" && *from == stream);
        mine.map(|(_, _, line)| line).collect::<Vec<_>>()
    };
    assert_eq!(of(Stream::Stdout), ["out", "bar 1", "bar 2"]);
    assert_eq!(of(Stream::Stderr), ["err"]);
    end(&launcher).await;
}

// ── stopping ──

async fn children_stop_in_reverse_order() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    for name in ["head", "model", "agent"] {
        let script = format!("trap 'echo stopped {name}; exit 0' INT; echo ready {name}; while :; do sleep 0.02; done");
        launcher.spawn(sh(name, &script)).await.expect("starts");
        lines.after(&format!("ready {name}")).await;
    }
    let order: Vec<String> = launcher.children().iter().map(|child| child.name().to_owned()).collect();
    assert_eq!(order, ["head", "model", "agent"]);
    end(&launcher).await;
    let stopped: Vec<String> = lines.texts().into_iter().filter(|line| line.starts_with("stopped")).collect();
    assert_eq!(stopped, ["stopped agent", "stopped model", "stopped head"]);
}

/// A shell's `&` starts its program with interrupts ignored, and a program passes that on to its children.
async fn children_of_a_process_that_ignores_interrupts_get_them() {
    for case in ["children_stop_in_reverse_order", "interrupt_comes_once_and_first"] {
        let mut command = tokio::process::Command::new("sh");
        let program = std::env::current_exe().expect("this program");
        command.args(["-c", "trap '' INT; exec \"$0\" \"$1\""]).arg(program).arg(case).kill_on_drop(true);
        let output = timeout(LONG, command.output()).await.expect("in time").expect("starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}: {text}");
        assert!(String::from_utf8_lossy(&output.stdout).contains(case), "the case ran");
    }
}

async fn a_child_that_ignores_signals_is_killed() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let child = launcher.spawn(sh("family", &format!("trap '' INT TERM\n{FAMILY}"))).await.expect("starts");
    let pids = relatives(&lines).await;
    let begin = Instant::now();
    let grace = Duration::from_millis(200);
    let ChildState::Stopped(Some(report)) = child.stop(grace).await.expect("stops") else { panic!("was stopped") };
    assert!(begin.elapsed() >= grace, "it got its grace");
    assert_eq!(report.status.and_then(|status| status.signal()), Some(9));
    assert!(!pids.iter().any(|pid| alive(*pid)), "with all that it started");
    end(&launcher).await;
}

async fn a_second_stop_shortens_the_grace() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let script = "trap '' INT TERM; echo ready; while :; do sleep 0.02; done";
    let child = launcher.spawn(sh("deaf", script)).await.expect("starts");
    lines.after("ready").await;
    let patient = {
        let child = child.clone();
        tokio::spawn(async move { child.stop(2 * LONG).await })
    };
    tokio::task::yield_now().await;
    let impatient = timeout(LONG, child.stop(Duration::ZERO)).await.expect("at once").expect("stops");
    assert!(matches!(impatient, ChildState::Stopped(_)));
    timeout(LONG, patient).await.expect("both end").expect("no panic").expect("stops");
    end(&launcher).await;
}

async fn interrupt_comes_once_and_first() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    // To a server a second interrupt means "at once", so the polite one must not come twice.
    let script =
        "trap 'echo interrupt' INT; trap 'echo terminate; exit 7' TERM; echo ready; while :; do sleep 0.02; done";
    let child = launcher.spawn(sh("polite", script)).await.expect("starts");
    lines.after("ready").await;
    let ChildState::Stopped(Some(report)) = child.stop(Duration::from_secs(8)).await.expect("stops") else {
        panic!("was stopped")
    };
    // On standard error the shell reports its own child's end.
    let said = lines.all().into_iter().filter(|(_, stream, _)| *stream == Stream::Stdout).map(|(_, _, line)| line);
    assert_eq!(said.collect::<Vec<_>>(), ["ready", "interrupt", "terminate"]);
    assert_eq!(report.status.and_then(|status| status.code()), Some(7));
    end(&launcher).await;
}

async fn stop_during_backoff_is_immediate() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let mut policy = RestartPolicy::default();
    policy.max_restarts = 1;
    policy.backoff_min = 9 * LONG;
    policy.backoff_max = 9 * LONG;
    policy.window = LONG;
    let child = launcher.spawn(sh("gone", "exit 4").restart(policy)).await.expect("starts");
    let mut events = child.events();
    let waiting = |state: &ChildState| matches!(state, ChildState::Backoff { .. });
    timeout(LONG, events.wait_for(waiting)).await.expect("in time").expect("supervised");
    let state = timeout(LONG, child.stop(LONG)).await.expect("at once").expect("stops");
    let ChildState::Stopped(Some(report)) = state else { panic!("stopped: {state:?}") };
    assert_eq!(report.status.and_then(|status| status.code()), Some(4));
    end(&launcher).await;
}

/// The kernel sends the parent-death signal when the forking thread ends.
async fn the_starting_thread_may_end() {
    let lines = Lines::default();
    let launcher = Arc::new(launcher(&lines));
    let (child, thread) = {
        let (launcher, runtime) = (launcher.clone(), tokio::runtime::Handle::current());
        let spawn = move || {
            let child = runtime.block_on(launcher.spawn(sh("math", "echo ready; exec sleep 1000"))).expect("starts");
            (child, std::fs::read_link("/proc/thread-self").expect("PID/task/TID"))
        };
        std::thread::spawn(spawn).join().expect("no panic")
    };
    let thread = Path::new("/proc").join(thread);
    until("the thread is gone", || !thread.exists()).await;
    lines.after("ready").await;
    // The first line may arrive before the start is reported.
    let mut events = child.events();
    let started = |state: &ChildState| !matches!(state, ChildState::Starting { .. });
    let state = timeout(LONG, events.wait_for(started)).await.expect("in time").expect("supervised").clone();
    let ChildState::Running { pid, incarnation: 1 } = state else { panic!("still runs: {state:?}") };
    assert!(alive(i32::try_from(pid).expect("fits")));
    end(&launcher).await;
}

// ── mistakes ──

async fn a_shim_that_does_not_enter_is_named() {
    let launcher = Launcher::builder().shim("/bin/cat").build().expect("an explicit shim is not checked here");
    let error = launcher.spawn(sh("math", "sleep 1000")).await.expect_err("cat is no watchdog");
    let text = error.to_string();
    assert!(matches!(error, LaunchError::Watchdog { .. }), "{error:?}");
    assert!(text.contains("/bin/cat") && text.contains("launch::enter()"), "{text}");
    end(&launcher).await;
}

async fn names_are_unique_and_come_free_again() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let first = launcher.spawn(sh("math", "sleep 1000")).await.expect("starts");
    let error = launcher.spawn(sh("math", "sleep 1000")).await.expect_err("taken");
    assert!(matches!(error, LaunchError::DuplicateName { .. }), "{error}");
    first.stop(LONG).await.expect("stops");
    launcher.spawn(sh("math", "sleep 1000")).await.expect("the name is free again");
    end(&launcher).await;
    let error = launcher.spawn(sh("late", "true")).await.expect_err("closed");
    assert!(matches!(error, LaunchError::ShutDown { .. }), "{error}");
}

async fn wrong_specifications_start_nothing() {
    let lines = Lines::default();
    let launcher = launcher(&lines);
    let error = launcher.spawn(ChildSpec::new("math", "no-such-python")).await.expect_err("not there");
    assert!(matches!(error, LaunchError::ProgramNotFound { .. }), "{error}");
    let error = launcher.spawn(sh("math", "true").cwd("/no/such/folder")).await.expect_err("not there");
    assert!(matches!(error, LaunchError::WorkingDirectory { .. }), "{error}");
    assert!(launcher.children().is_empty(), "a failed start frees its name");
    assert_eq!(own_children(), BTreeSet::new());
    assert!(lines.all().is_empty());
    end(&launcher).await;
}

#[cfg(feature = "http")]
async fn two_processes_measure_a_transport() {
    use gym_client::launch::self_test;
    use gym_core::transport::Transport;

    let measured = self_test(gym_client::transport::HTTP, LONG).await.expect("measures");
    assert!(measured.round_trip_us > 0.0 && measured.gb_per_s > 0.0, "{measured:?}");
    let unknown = self_test(Transport::new("pigeon", 1), LONG).await.expect_err("is unknown");
    assert!(unknown.contains("pigeon") && unknown.contains("http"), "{unknown}");
    let late = self_test(gym_client::transport::HTTP, Duration::ZERO).await.expect_err("has no time");
    assert_eq!(late, "the two processes took longer than 0ns");
}

#[cfg(not(feature = "http"))]
async fn two_processes_measure_a_transport() {}
