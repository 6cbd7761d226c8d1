//! What UCX does to the process, and what happens when the peer's process dies or stands still. Each case runs in a process
//! of its own: this program, started again for one of its tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use common::{EndOf, Meeting, SOON, Way, open, payload, recorder};
use gym_core::Code;
use gym_transport_rdma::fabric::{ConnectionId, End, Expect, Fabric, Target, Token};

/// Set for the process that runs only one case.
const ROLE: &str = "GYM_UCX_TEST_ROLE";

fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// This program again, for the test of this name, as `role`.
fn again(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// Runs a role to its end; its process must succeed.
fn run(test: &str, role: &str, environment: &[(&str, &str)]) -> String {
    let output = again(test, role).envs(environment.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{text}\n{errors}", output.status);
    text
}

fn handler(signal: i32) -> usize {
    // The disposition of a signal is in no file under /proc, but who catches one is: SigCgt.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
    usize::from(u64::from_str_radix(&caught, 16).unwrap() >> (signal - 1) & 1 == 1)
}

#[test]
fn loading_keeps_the_signal_handlers_and_the_environment() {
    let test = "loading_keeps_the_signal_handlers_and_the_environment";
    if role().is_none() {
        run(test, "load", &[]);
        return;
    }
    // SIGILL, SIGBUS, SIGFPE, SIGSEGV, SIGHUP: what UCX takes, or may.
    let signals = [4, 7, 8, 11, 1];
    let before = signals.map(handler);
    let environment: Vec<_> = std::env::vars_os().collect();
    let Some(fabric) = open(common::shared_memory()) else { return };
    assert_eq!(signals.map(handler), before, "{:?}", fabric.library());
    assert!(environment == std::env::vars_os().collect::<Vec<_>>());
    assert!(fabric.shutdown(SOON));
    assert_eq!(signals.map(handler), before);
}

/// A stack overflow is told by Rust's handler, which only works when UCX has not taken SIGSEGV.
#[test]
fn a_stack_overflow_is_still_told_by_rust() {
    let test = "a_stack_overflow_is_still_told_by_rust";
    if role().is_none() {
        let output = again(test, "overflow").output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        if !told.contains("NOT RUN") {
            assert!(told.contains("has overflowed its stack"), "{told}");
        }
        return;
    }
    let Some(_fabric) = open(common::shared_memory()) else { return };
    fn deeper(depth: u64) -> u64 {
        let frame = std::hint::black_box([depth; 64]);
        if depth == u64::MAX { 0 } else { deeper(depth + 1) + frame[3] }
    }
    println!("{}", deeper(0));
}

#[test]
fn hooks_are_reported_and_off_when_the_environment_says_so() {
    let test = "hooks_are_reported_and_off_when_the_environment_says_so";
    match role().as_deref() {
        None => {
            let patched = run(test, "hooks", &[]);
            if patched.contains("patched:") {
                let untouched = run(test, "hooks", &[("UCX_MEM_MMAP_HOOK_MODE", "none")]);
                assert!(untouched.contains("patched: []"), "{untouched}");
            }
        }
        Some(_) => {
            let Some(fabric) = open(common::shared_memory()) else { return };
            println!("patched: {:?}", fabric.library().patched);
            assert!(fabric.shutdown(SOON));
        }
    }
}

/// The order of giving back, then exit: a crash of an exit handler would be seen in the status.
#[test]
fn a_process_ends_well_with_and_without_a_shutdown() {
    let test = "a_process_ends_well_with_and_without_a_shutdown";
    match role().as_deref() {
        None => {
            for how in ["shut down", "dropped", "left alone"] {
                run(test, how, &[]);
            }
        }
        Some(how) => {
            for &way in Way::all() {
                let (Some(caller), Some(answerer)) = (open(way.calling()), open(way.answering())) else { return };
                let (here, there) = common::pair(way, &caller, &answerer, None);
                here.post(vec![1], payload(1 << 20, 0));
                there.message();
                match how {
                    "shut down" => assert!(caller.shutdown(SOON) && answerer.shutdown(SOON)),
                    "dropped" => drop((caller, answerer)),
                    _ => std::mem::forget((caller, answerer, here, there)),
                }
            }
        }
    }
}

/// A peer in a process of its own: it expects one connection, and answers every parcel with the same.
struct Peer {
    process: Child,

    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts it, and connects to it.
    fn start(test: &str, way: Way, caller: &Fabric) -> (Self, EndOf) {
        let mut process = again(
            test,
            match way {
                Way::Network => "network",
                Way::SharedMemory => "shared memory",
            },
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
        let (mut input, output) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let meeting = Meeting::new();
        let token = hex(&meeting.token.0);
        let address = hex(caller.worker_address());
        writeln!(input, "{} {} {token} {address}", meeting.caller.0, meeting.answerer.0).unwrap();
        let mut peer = Self { process, output };
        let target = match way {
            Way::Network => Target::Socket(peer.told("listening ").parse().unwrap()),
            Way::SharedMemory => Target::Worker(unhex(&peer.told("listening "))),
        };
        let (recorder, events) = recorder(caller, None);
        let here = EndOf { connection: caller.connect(meeting.connect(target), recorder).unwrap(), events };
        way.check(&here.opened());
        (peer, here)
    }

    /// The rest of the next line that begins so; the test harness writes lines of its own.
    fn told(&mut self, beginning: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the peer's process ended early");
            // The harness writes the test's name without an end of line.
            if let Some(at) = line.find(beginning) {
                return line[at + beginning.len()..].trim().to_owned();
            }
        }
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.process.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the peer's process does.
fn be_peer(way: Way) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    let Some(fabric) = open(way.answering()) else { panic!("the other process has UCX") };
    let (recorder, events) = recorder(&fabric, None);
    let expected = Expect {
        id: ConnectionId(words[1].parse().unwrap()),
        token: Token(unhex(words[2])[..].try_into().unwrap()),
        peer: ConnectionId(words[0].parse().unwrap()),
        worker_address: (way == Way::SharedMemory).then(|| unhex(words[3])),
        within: SOON,
    };
    let there = EndOf { connection: fabric.expect(expected, recorder).unwrap(), events };
    let address = match way {
        Way::Network => fabric.listen_address().unwrap().to_string(),
        Way::SharedMemory => hex(fabric.worker_address()),
    };
    println!("\nlistening {address}");
    way.check(&there.opened());
    loop {
        match there.events.recv_timeout(SOON) {
            Ok(common::Event::Message { header, payload, .. }) => there.post(header, payload),
            Ok(common::Event::Ended(End::ClosedByPeer)) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(fabric.shutdown(SOON));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Bytes {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect::<Vec<_>>().into()
}

/// The way of this process, if it is the peer's.
fn peer_role() -> bool {
    match role().as_deref() {
        Some("network") => be_peer(Way::Network),
        Some("shared memory") => be_peer(Way::SharedMemory),
        _ => return false,
    }
    true
}

#[test]
fn parcels_of_every_size_go_between_two_processes() {
    if peer_role() {
        return;
    }
    for &way in Way::all() {
        let Some(caller) = open(way.calling()) else { return };
        let (mut peer, here) = Peer::start("parcels_of_every_size_go_between_two_processes", way, &caller);
        for size in [0, 1, 1000, 8191, 8192, 8193, 65_535, 65_536, 65_537, 1 << 20, 64 << 20] {
            let sent = payload(size, size);
            here.post(vec![7], sent.clone());
            assert!(here.message().1 == sent, "{way:?} {size}");
        }
        assert!(caller.shutdown(SOON), "{way:?}");
        assert!(peer.process.wait().unwrap().success(), "{way:?}");
    }
}

/// UCX tells over a network. Over shared memory it does not: there the connection must at least be closed in time, with
/// every parcel told.
#[test]
fn a_killed_peer_is_told_or_can_be_broken_off() {
    if peer_role() {
        return;
    }
    for &way in Way::all() {
        for in_flight in [false, true] {
            let Some(caller) = open(way.calling()) else { return };
            let (mut peer, here) = Peer::start("a_killed_peer_is_told_or_can_be_broken_off", way, &caller);
            here.post(vec![1], vec![]);
            here.message();
            if in_flight {
                for _ in 0..20 {
                    here.post(vec![2], payload(8 << 20, 2));
                }
            }
            peer.signal("-KILL");
            peer.process.wait().unwrap();
            if way == Way::SharedMemory {
                here.connection.close(Duration::ZERO);
            }
            match here.ended() {
                // Some versions of UCX notice it over shared memory too.
                End::Closed if way == Way::SharedMemory => {}
                End::Lost(error) => assert_eq!(error.code(), Code::Unavailable),
                other => panic!("{way:?} {in_flight} {other:?}"),
            }
            // What was under way to a dead peer over shared memory is leaked rather than freed.
            let clean = caller.shutdown(SOON);
            assert!(clean || (way == Way::SharedMemory && in_flight), "{way:?} {in_flight}");
        }
    }
}

/// UCX sees nothing of a peer that stands still, on any way: heartbeats must. What the fabric owes is a close that keeps
/// its deadline.
#[test]
fn a_peer_that_stands_still_does_not_hold_up_a_close_beyond_its_grace() {
    if peer_role() {
        return;
    }
    for &way in Way::all() {
        let Some(caller) = open(way.calling()) else { return };
        let (peer, here) =
            Peer::start("a_peer_that_stands_still_does_not_hold_up_a_close_beyond_its_grace", way, &caller);
        peer.signal("-STOP");
        for _ in 0..20 {
            here.post(vec![2], payload(8 << 20, 2));
        }
        here.connection.close(Duration::from_millis(100));
        assert!(matches!(here.ended(), End::Closed), "{way:?}");
        let _ = caller.shutdown(Duration::from_millis(100));
        drop(peer);
    }
}

#[test]
fn many_peers_killed_at_random_moments_leave_the_fabric_well() {
    if peer_role() {
        return;
    }
    let rounds = std::env::var("GYM_UCX_KILLS").map_or(6, |text| text.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(std::env::var("GYM_UCX_SEED").map_or(1, |text| text.parse().unwrap()));
    for &way in Way::all() {
        let Some(caller) = open(way.calling()) else { return };
        for round in 0..rounds {
            let (mut peer, here) =
                Peer::start("many_peers_killed_at_random_moments_leave_the_fabric_well", way, &caller);
            let (before, size) = (random.usize(0..30), [10, 100_000, 4 << 20][random.usize(..3)]);
            for _ in 0..30 {
                here.post(vec![3], payload(size, 3));
            }
            for _ in 0..before {
                here.message();
            }
            peer.signal("-KILL");
            peer.process.wait().unwrap();
            if way == Way::SharedMemory {
                here.connection.close(Duration::ZERO);
            }
            let end = here.ended();
            assert!(!matches!(end, End::ClosedByPeer), "{way:?} round {round}: {end:?}");
        }
        let _ = caller.shutdown(Duration::from_millis(200));
    }
}
