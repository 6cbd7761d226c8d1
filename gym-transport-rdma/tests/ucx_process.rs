//! Effects of UCX on the process, and the death or stop of a peer process. Each case runs in a process of its own: this
//! test binary, started again for one test.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use common::{EndOf, Names, WAIT_TIMEOUT, Way, open, payload, recorder};
use gym_core::Code;
use gym_transport_rdma::fabric::{CloseReason, ConnectionId, Expect, Fabric, Target, Token, WorkerPair};

/// Set for a process that runs one case.
const ROLE: &str = "GYM_UCX_TEST_ROLE";

fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Returns the command that runs the test of this name in the given role.
fn again(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// Runs a role until it ends. Its process must succeed.
fn run(test: &str, role: &str, environment: &[(&str, &str)]) -> String {
    let output = again(test, role).envs(environment.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{text}\n{errors}", output.status);
    text
}

fn handler(signal: i32) -> usize {
    // No file under /proc shows a signal's action, but SigCgt shows whether the signal is caught.
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
    // SIGILL, SIGBUS, SIGFPE, SIGSEGV, SIGHUP: the signals that UCX may handle.
    let signals = [4, 7, 8, 11, 1];
    let before = signals.map(handler);
    let environment: Vec<_> = std::env::vars_os().collect();
    let Some(fabric) = open(common::shared_memory()) else { return };
    assert_eq!(signals.map(handler), before, "{:?}", fabric.library());
    assert!(environment == std::env::vars_os().collect::<Vec<_>>());
    assert!(fabric.shutdown(WAIT_TIMEOUT));
    assert_eq!(signals.map(handler), before);
}

/// Rust's handler reports a stack overflow, which works only if UCX has not replaced the handler of SIGSEGV.
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
            assert!(fabric.shutdown(WAIT_TIMEOUT));
        }
    }
}

/// Closes everything in order, then exits. A crash of an exit handler would change the exit status.
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
                    "shut down" => assert!(caller.shutdown(WAIT_TIMEOUT) && answerer.shutdown(WAIT_TIMEOUT)),
                    "dropped" => drop((caller, answerer)),
                    _ => std::mem::forget((caller, answerer, here, there)),
                }
            }
        }
    }
}

/// A peer process that expects one connection and echoes every message.
struct Peer {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the process and connects to it.
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
        let names = Names::new();
        let token = hex(&names.token.0);
        let peer_worker = (way == Way::SharedMemory).then(|| common::peer_worker(caller).unwrap());
        let address = peer_worker.as_ref().map_or_else(|| "-".to_owned(), |peer_worker| hex(peer_worker.address()));
        writeln!(input, "{} {} {token} {address}", names.caller.0, names.answerer.0).unwrap();
        let mut peer = Self { process, output };
        let address = peer.told("listening ");
        let target = match peer_worker {
            None => Target::Network(address.parse().unwrap()),
            Some(peer_worker) => Target::SharedMemory(WorkerPair { local: peer_worker, remote: unhex(&address) }),
        };
        let (recorder, events) = recorder(None);
        let here = EndOf { connection: caller.connect(names.connect(target), recorder).unwrap(), events };
        way.check(&here.opened());
        (peer, here)
    }

    /// Returns the rest of the next line with this prefix. The test harness writes other lines.
    fn told(&mut self, beginning: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the peer's process ended early");
            // The test harness writes the test's name without an end of line.
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

/// Makes the peer end while it sends its response.
const DIE_IN_A_COPY: &[u8] = b"die";

/// Returns memory whose reader is killed by SIGBUS: pages of a file that was truncated.
fn deadly(len: usize) -> Bytes {
    struct Gone(*mut std::ffi::c_void, usize);
    // SAFETY: the address is the same for every thread.
    unsafe impl Send for Gone {}
    impl AsRef<[u8]> for Gone {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: mapped permanently. Reading it ends the process, as intended.
            unsafe { std::slice::from_raw_parts(self.0.cast(), self.1) }
        }
    }
    let file = tempfile::tempfile().unwrap();
    file.set_len(len as u64).unwrap();
    // SAFETY: maps new pages at an address that the kernel chooses.
    let start = unsafe {
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &file, 0).unwrap()
    };
    file.set_len(0).unwrap();
    Bytes::from_owner(Gone(start, len))
}

/// Body of the peer process.
fn be_peer(way: Way) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    let Some(fabric) = open(way.answering()) else { panic!("the other process has UCX") };
    let (recorder, events) = recorder(None);
    let peer_worker = (way == Way::SharedMemory).then(|| common::peer_worker(&fabric).unwrap());
    let expected = Expect {
        id: ConnectionId(words[1].parse().unwrap()),
        token: Token(unhex(words[2])[..].try_into().unwrap()),
        peer: ConnectionId(words[0].parse().unwrap()),
        shared_memory: peer_worker
            .clone()
            .map(|peer_worker| WorkerPair { local: peer_worker, remote: unhex(words[3]) }),
        within: WAIT_TIMEOUT,
    };
    let there = EndOf { connection: fabric.expect(expected, recorder).unwrap(), events };
    let address = match peer_worker {
        None => fabric.listen_address().unwrap().to_string(),
        Some(peer_worker) => hex(peer_worker.address()),
    };
    println!("\nlistening {address}");
    way.check(&there.opened());
    loop {
        match there.events.recv_timeout(WAIT_TIMEOUT) {
            Ok(common::Event::Message { header, .. }) if header == DIE_IN_A_COPY => there.post(header, deadly(4000)),
            // Fails only if the connection has ended, which the fabric reports next.
            Ok(common::Event::Message { header, payload, .. }) => {
                let _ = there.connection.post(common::active_message(header, payload));
            }
            Ok(common::Event::Ended(CloseReason::ClosedByPeer)) => break,
            Ok(common::Event::Ended(CloseReason::Lost(error))) => {
                println!("\nlost {error}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(fabric.shutdown(WAIT_TIMEOUT));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Bytes {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect::<Vec<_>>().into()
}

/// Returns the transport of this process, if it is the peer's.
fn peer_role() -> bool {
    match role().as_deref() {
        Some("network") => be_peer(Way::Network),
        Some("shared memory") => be_peer(Way::SharedMemory),
        _ => return false,
    }
    true
}

#[test]
fn messages_of_every_size_go_between_two_processes() {
    if peer_role() {
        return;
    }
    for &way in Way::all() {
        let Some(caller) = open(way.calling()) else { return };
        let (mut peer, here) = Peer::start("messages_of_every_size_go_between_two_processes", way, &caller);
        for size in [0, 1, 1000, 8191, 8192, 8193, 65_535, 65_536, 65_537, 1 << 20, 64 << 20] {
            let sent = payload(size, size);
            here.post(vec![7], sent.clone());
            assert!(here.message().1 == sent, "{way:?} {size}");
        }
        assert!(caller.shutdown(WAIT_TIMEOUT), "{way:?}");
        assert!(peer.process.wait().unwrap().success(), "{way:?}");
    }
}

/// UCX reports the loss over a network; over shared memory, the fabric detects the end of the peer's process.
#[test]
fn a_killed_peer_is_told_and_nothing_of_it_is_kept() {
    if peer_role() {
        return;
    }
    for &way in Way::all() {
        for in_flight in [false, true] {
            let Some(caller) = open(way.calling()) else { return };
            let (mut peer, here) = Peer::start("a_killed_peer_is_told_and_nothing_of_it_is_kept", way, &caller);
            here.post(vec![1], vec![]);
            here.message();
            if in_flight {
                for _ in 0..20 {
                    here.post(vec![2], payload(8 << 20, 2));
                }
            }
            peer.signal("-KILL");
            peer.process.wait().unwrap();
            match here.ended() {
                CloseReason::Lost(error) => assert_eq!(error.code(), Code::Unavailable),
                other => panic!("{way:?} {in_flight} {other:?}"),
            }
            assert!(caller.shutdown(WAIT_TIMEOUT), "{way:?} {in_flight}");
            assert_all_peer_workers_are_closed(&caller);
        }
    }
}

/// UCX never detects a stopped peer; only heartbeats do. The fabric must close the connection by the deadline.
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
        assert!(matches!(here.ended(), CloseReason::Closed), "{way:?}");
        let _ = caller.shutdown(Duration::from_millis(100));
        drop(peer);
    }
}

/// Over shared memory, a sender first reserves a slot in the receiver's queue, then copies. If it dies in between, it
/// blocks all other senders of this queue.
#[test]
fn a_peer_that_dies_while_it_writes_to_us_disturbs_nobody_else() {
    const TEST: &str = "a_peer_that_dies_while_it_writes_to_us_disturbs_nobody_else";
    if peer_role() {
        return;
    }
    // A socket returns an error to the dying process instead.
    for &way in Way::all().iter().filter(|way| **way == Way::SharedMemory) {
        let Some(caller) = open(way.calling()) else { return };
        let echo = |here: &EndOf, byte: u8| {
            here.post(vec![byte], payload(5000, 1));
            assert_eq!(here.message().0[..], [byte], "{way:?}");
        };
        let (_bystander, beside) = Peer::start(TEST, way, &caller);
        for byte in 0..3 {
            let (mut peer, here) = Peer::start(TEST, way, &caller);
            here.post(DIE_IN_A_COPY, vec![]);
            assert!(!peer.process.wait().unwrap().success(), "{way:?}: it has died");
            echo(&beside, byte);
            match here.ended() {
                CloseReason::Lost(error) => assert_eq!(error.code(), Code::Unavailable, "{way:?}"),
                other => panic!("{way:?} {other:?}"),
            }
        }
        let (_peer, here) = Peer::start(TEST, way, &caller);
        echo(&here, 9);
        assert!(caller.shutdown(WAIT_TIMEOUT), "{way:?}");
    }
}

fn assert_all_peer_workers_are_closed(fabric: &Fabric) {
    let stats = fabric.stats();
    assert_eq!(stats.peer_workers_opened, stats.peer_workers_closed, "{stats:?}");
}

/// While the peer is stopped, its connection is aborted. When the peer continues, the announced payloads must still be
/// readable.
#[test]
fn a_peer_that_stood_still_and_goes_on_hears_that_it_was_given_up() {
    const TEST: &str = "a_peer_that_stood_still_and_goes_on_hears_that_it_was_given_up";
    if peer_role() {
        return;
    }
    for &way in Way::all() {
        let Some(caller) = open(way.calling()) else { return };
        let (mut peer, here) = Peer::start(TEST, way, &caller);
        peer.signal("-STOP");
        for _ in 0..20 {
            here.post(vec![2], payload(8 << 20, 2));
            here.post(vec![3], payload(5000, 2));
        }
        here.connection.close(Duration::ZERO);
        assert!(matches!(here.ended(), CloseReason::Closed), "{way:?}");
        peer.signal("-CONT");
        peer.told("lost ");
        assert!(peer.process.wait().unwrap().success(), "{way:?}");
        assert!(caller.shutdown(WAIT_TIMEOUT), "{way:?}");
        assert_all_peer_workers_are_closed(&caller);
    }
}

/// Resources that this process holds.
struct Footprint {
    resident_kib: usize,
    descriptors: usize,
}

impl Footprint {
    fn now() -> Self {
        // Freed memory that the allocator keeps must not count. SAFETY: returns only unused memory to the system.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0);
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident_kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
        Self { resident_kib, descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count() }
    }

    /// Each leaked worker would hold some five descriptors, and each leaked round of payloads 120 MB.
    fn assert_not_grown_since(&self, before: &Self) {
        let (found, allowed) = (self.descriptors, before.descriptors + 8);
        assert!(found <= allowed, "{found} descriptors; {} before", before.descriptors);
        let (found, allowed) = (self.resident_kib, before.resident_kib + (64 << 10));
        assert!(found <= allowed, "{found} KiB; {} before", before.resident_kib);
    }
}

#[test]
fn many_peers_killed_at_random_moments_leave_the_fabric_well_and_the_process_no_larger() {
    const TEST: &str = "many_peers_killed_at_random_moments_leave_the_fabric_well_and_the_process_no_larger";
    // In a process of its own, so that no other test changes the figures.
    if role().is_none() {
        run(TEST, "killer", &[]);
    }
    if peer_role() || role().is_none() {
        return;
    }
    let rounds = std::env::var("GYM_UCX_KILLS").map_or(6, |text| text.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(std::env::var("GYM_UCX_SEED").map_or(1, |text| text.parse().unwrap()));
    for &way in Way::all() {
        let Some(caller) = open(way.calling()) else { return };
        let mut before = None;
        for round in 0..rounds {
            let (mut peer, here) = Peer::start(TEST, way, &caller);
            let (echoed, size) = (random.usize(0..30), [10, 100_000, 4 << 20][random.usize(..3)]);
            for _ in 0..30 {
                here.post(vec![3], payload(size, 3));
            }
            for _ in 0..echoed {
                here.message();
            }
            peer.signal("-KILL");
            peer.process.wait().unwrap();
            let end = here.ended();
            assert!(matches!(end, CloseReason::Lost(_)), "{way:?} round {round}: {end:?}");
            drop((peer, here));
            let deadline = tokio::time::Instant::now() + WAIT_TIMEOUT;
            while caller.stats().peer_workers_opened > caller.stats().peer_workers_closed {
                assert!(tokio::time::Instant::now() < deadline, "{:?}", caller.stats());
                std::thread::yield_now();
            }
            // The first rounds fill caches that later rounds reuse.
            if round == 2 {
                before = Some(Footprint::now());
            }
        }
        let clean = caller.shutdown(WAIT_TIMEOUT);
        if way == Way::SharedMemory {
            assert!(clean, "{:?}", caller.stats());
            before.inspect(|before| Footprint::now().assert_not_grown_since(before));
        }
    }
}
