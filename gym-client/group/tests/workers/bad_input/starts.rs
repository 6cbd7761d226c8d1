//! Groups that cannot start: programs, worker types, ports.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use gym_group::HeldPort;
use gym_group::{LaunchSpec, Local, LocalOptions};

use super::super::types::workers;
use super::super::{LONG, options};
use super::fixture::Fixture;
use super::{Case, outcome};

const START: &str = "worker that does not start";
const PROGRAM: &str = "program that is not a worker";
const REQUEST: &str = "invalid launch";
const PORTS: &str = "ports in use";

fn worker(name: &'static str, worker: &'static str, outcome: &'static str, says: &'static [&'static str]) -> Case {
    Case::new(START, name, outcome, says, move |fixture| {
        Box::pin(async move {
            let change = |spec: &mut LaunchSpec| {
                if worker == "never" {
                    spec.start_timeout = Duration::from_millis(300);
                }
            };
            fixture.starts(worker, change).await
        })
    })
}

/// A program that is made in the case's folder, or is there already.
fn program(
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    make: impl Fn(&Fixture) -> PathBuf + 'static,
) -> Case {
    let make = std::rc::Rc::new(make);
    Case::new(PROGRAM, name, outcome, says, move |fixture| {
        let make = std::rc::Rc::clone(&make);
        Box::pin(async move {
            let mut options = LocalOptions::default();
            options.lines = std::sync::Arc::new(|_, _, _| {});
            options.program = Some(make(fixture));
            let local = Local::new(workers()).with(options);
            outcome::started(fixture.start(&local, fixture.spec("obedient"), super::super::options()).await)
        })
    })
}

fn script(fixture: &Fixture, text: &str, mode: u32) -> PathBuf {
    let path = fixture.file("program", text);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("may");
    path
}

fn request(
    kind: &'static str,
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    change: impl Fn(&mut LaunchSpec) -> Vec<HeldPort> + 'static,
) -> Case {
    let change = std::rc::Rc::new(change);
    Case::new(kind, name, outcome, says, move |fixture| {
        let change = std::rc::Rc::clone(&change);
        Box::pin(async move {
            let mut spec = fixture.spec("obedient");
            let _held = change(&mut spec);
            outcome::started(fixture.start(&super::super::local(), spec, options()).await)
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    const DIED: &str = "does not start: died";
    const FAILED: &str = "does not start: start_failed";
    vec![
        worker("exits", "exits", DIED, &["start group policy", "rank 0", "exit code 3", "no GPU for tiny"]),
        worker("fails", "fails", FAILED, &["rank 0", "no model called tiny"]),
        worker("panics", "panics", FAILED, &["rank 0", "the driver is too old"]),
        worker("never reports that it serves", "never", FAILED, &["rank 0", "300ms", "raise the start timeout"]),
        worker("prints other text first", "rubbish", "starts", &[]),
        worker("an unregistered name", "obedeint", "does not start: not_found", &["`obedeint`", "obedient"]),
        program("is missing", FAILED, &["rank 0", "/no/such/program"], |_| "/no/such/program".into()),
        program("is a directory", FAILED, &["rank 0"], |fixture| fixture.folder().to_owned()),
        program("is not executable", FAILED, &["rank 0", "program"], |fixture| script(fixture, "#!/bin/sh\n", 0o600)),
        program("does nothing", DIED, &["rank 0", "exit code 0"], |fixture| {
            script(fixture, "#!/bin/sh\nexit 0\n", 0o700)
        }),
        program("does not support workers", DIED, &["rank 0", "exit code 2", "--gym-worker: what?"], |fixture| {
            script(fixture, "#!/bin/sh\necho \"$1: what?\" >&2\nexit 2\n", 0o700)
        }),
        program("has other worker types", FAILED, &["rank 0", "no worker type `obedient`"], |fixture| {
            // Any other program that enters workers does; this one forgets its own.
            let own = std::env::current_exe().expect("own path");
            let text = format!("#!/bin/sh\nGYM_WITHOUT_WORKERS=1 exec {} \"$@\"\n", own.display());
            script(fixture, &text, 0o700)
        }),
        request(
            REQUEST,
            "places out of order",
            "does not start: invalid_argument",
            &["place 0 is of rank 1"],
            |spec| {
                spec.ranks.reverse();
                Vec::new()
            },
        ),
        request(REQUEST, "an init of another type", FAILED, &["rank 0", "init is not a", "expected"], |spec| {
            spec.init = serde_json::value::to_raw_value(&5).expect("JSON");
            Vec::new()
        }),
        request(REQUEST, "an invalid variable", FAILED, &["rank 0"], |spec| {
            spec.variables.insert("A=B".to_owned(), "a\0b".to_owned());
            Vec::new()
        }),
        request(
            REQUEST,
            "an incomplete profiler setting",
            "does not start: invalid_argument",
            &["start group policy", "NRL_NSYS_WORKER_PATTERNS and NRL_NSYS_PROFILE_STEP_RANGE go together"],
            |spec| {
                spec.variables.insert("NRL_NSYS_WORKER_PATTERNS".to_owned(), "*".to_owned());
                Vec::new()
            },
        ),
        request(REQUEST, "a missing profiler", FAILED, &["rank 0", "nsys", "/nowhere", "install it"], |spec| {
            for (name, value) in [("WORKER_PATTERNS", "*"), ("PROFILE_STEP_RANGE", "1:2")] {
                spec.variables.insert(format!("NRL_NSYS_{name}"), value.to_owned());
            }
            spec.variables.insert("PATH".to_owned(), "/nowhere".to_owned());
            Vec::new()
        }),
        request(
            PORTS,
            "every port of the range",
            "does not start: resource_exhausted",
            &["start group policy", "could not find a free port in range", "widen the range"],
            |spec| {
                let held = some_ports();
                spec.ports = held.iter().map(HeldPort::port).min().expect("some")..held[0].port() + 2;
                held
            },
        ),
        request(
            PORTS,
            "fewer ports than ranks",
            "does not start: resource_exhausted",
            &["could not find a free port in range"],
            |spec| {
                let held = some_ports();
                spec.ports = held[0].port()..held[0].port() + 2;
                // One of two comes free: not enough for two ranks and their meeting point.
                held.into_iter().take(1).collect()
            },
        ),
        Case::new(
            PORTS,
            "no range",
            "does not start: invalid_argument",
            &["the port range 7..7 is empty"],
            |fixture| Box::pin(fixture.starts("obedient", |spec| spec.ports = 7..7)),
        ),
        Case::new(
            START,
            "a deadline that has passed before the start",
            "does not start: deadline_exceeded",
            &["start group policy", "the deadline has passed"],
            |fixture| {
                Box::pin(async move {
                    let cx = gym_core::CallContext::within(Duration::from_millis(300));
                    let mut spec = fixture.spec("never");
                    spec.start_timeout = LONG;
                    let started = gym_group::Group::start(&cx, &super::super::local(), spec, options()).await;
                    outcome::started(started)
                })
            },
        ),
    ]
}

/// Two ports in a row.
fn some_ports() -> Vec<HeldPort> {
    let tried: BTreeSet<u16> = (20_000..30_000).step_by(2).collect();
    let both = |low: &u16| Some(vec![HeldPort::bind(*low).ok()?, HeldPort::bind(low + 1).ok()?]);
    tried.iter().find_map(both).expect("two free ports in a row")
}
