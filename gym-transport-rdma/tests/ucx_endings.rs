//! Opening and closing connections over real UCX: tokens, unidentified peers, close handshakes, rejections, malformed
//! messages.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use common::{
    EndOf, Hook, Meeting, Names, WAIT_TIMEOUT, Way, active_message, block_on, open, pair, payload, peer_worker,
    recorder,
};
use gym_core::{Code, Error};
use gym_transport_rdma::fabric::{
    ActiveMessage, CloseReason, Connect, ConnectionId, Delivery, Disposition, Expect, Fabric, Target, Token, WorkerPair,
};
use parking_lot::Mutex;

const BIG: usize = 1 << 20;
/// A wrong token gets no response over shared memory, so each such case takes this long.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(2);

fn fabrics(way: Way) -> Option<(Fabric, Fabric)> {
    Some((open(way.calling())?, open(way.answering())?))
}

fn shut_down(way: Way, (caller, answerer): &(Fabric, Fabric)) {
    assert!(caller.shutdown(WAIT_TIMEOUT) && answerer.shutdown(WAIT_TIMEOUT), "{way:?}: something was leaked");
}

fn connect(fabric: &Fabric, to: Connect) -> EndOf {
    let (recorder, events) = recorder(None);
    EndOf { connection: fabric.connect(to, recorder).unwrap(), events }
}

fn expect(fabric: &Fabric, expected: Expect) -> EndOf {
    let (recorder, events) = recorder(None);
    EndOf { connection: fabric.expect(expected, recorder).unwrap(), events }
}

/// Waits until this many hellos were rejected.
fn refused(answerer: &Fabric, hellos: u64) {
    let deadline = tokio::time::Instant::now() + WAIT_TIMEOUT;
    while answerer.stats().refused_tokens < hellos {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", answerer.stats());
        std::thread::yield_now();
    }
    assert_eq!(answerer.stats().refused_tokens, hellos);
}

fn lost(end: CloseReason) -> Error {
    match end {
        CloseReason::Lost(error) => error,
        other => panic!("{other:?} instead of lost"),
    }
}

#[test]
fn a_goodbye_comes_after_everything_that_was_posted_before() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        for index in 0..20_u8 {
            here.post(vec![index], payload(if index % 2 == 0 { BIG } else { 10 }, index.into()));
        }
        here.connection.close(WAIT_TIMEOUT);
        let mut arrived: Vec<u8> = (0..20).map(|_| there.message().0[0]).collect();
        arrived.sort_unstable();
        assert!(arrived.into_iter().eq(0..20), "{way:?}");
        assert!(matches!(there.ended(), CloseReason::ClosedByPeer), "{way:?}");
        assert!(matches!(here.ended(), CloseReason::Closed), "{way:?}");
        let refused = here.connection.post(active_message(vec![], vec![])).unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        shut_down(way, &fabrics);
    }
}

#[test]
fn both_ends_may_say_goodbye_at_once() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        for _ in 0..20 {
            let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
            here.connection.close(WAIT_TIMEOUT);
            there.connection.close(WAIT_TIMEOUT);
            assert!(matches!(here.ended(), CloseReason::Closed | CloseReason::ClosedByPeer), "{way:?}");
            assert!(matches!(there.ended(), CloseReason::Closed | CloseReason::ClosedByPeer), "{way:?}");
        }
        shut_down(way, &fabrics);
    }
}

#[test]
fn a_shutdown_says_goodbye_for_every_connection() {
    for &way in Way::all() {
        let Some((caller, answerer)) = fabrics(way) else { return };
        let (here, there) = pair(way, &caller, &answerer, None);
        here.post(vec![1], payload(BIG, 1));
        assert!(caller.shutdown(WAIT_TIMEOUT), "{way:?}");
        assert!(matches!(here.ended(), CloseReason::Closed), "{way:?}");
        there.message();
        assert!(matches!(there.ended(), CloseReason::ClosedByPeer), "{way:?}");
        let to = Names::new().connect(Target::Network(([127, 0, 0, 1], 1).into()));
        assert!(caller.connect(to, recorder(None).0).is_err());
        assert!(peer_worker(&caller).is_err());
        assert!(answerer.shutdown(WAIT_TIMEOUT), "{way:?}");
    }
}

#[test]
fn breaking_off_is_seen_by_the_peer() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        here.connection.close(Duration::ZERO);
        assert!(matches!(here.ended(), CloseReason::Closed), "{way:?}");
        assert_eq!(lost(there.ended()).code(), Code::Unavailable, "{way:?}");
        shut_down(way, &fabrics);
    }
}

/// A callback blocks the thread meanwhile, so the queue does not drain.
#[test]
fn a_queue_that_is_full_of_messages_still_takes_an_end() {
    for &way in Way::all() {
        for how in ["close", "goodbye", "drop"] {
            let mut options = way.answering();
            options.commands_max = 2;
            let (Some(caller), Some(answerer)) = (open(way.calling()), open(options)) else {
                return;
            };
            let (entered, enters) = mpsc::sync_channel(8);
            let (release, released) = mpsc::sync_channel::<()>(1);
            let held = Mutex::new((entered, released));
            let hook: Hook = Box::new(move |_, _| {
                let (entered, released) = &*held.lock();
                entered.send(()).unwrap();
                // Returns when the sender is dropped.
                let _ = released.recv_timeout(WAIT_TIMEOUT);
                None
            });
            let (here, there) = pair(way, &caller, &answerer, Some(hook));
            here.post(vec![1], vec![]);
            enters.recv_timeout(WAIT_TIMEOUT).unwrap();
            for delivery in [Delivery::Ordered, Delivery::Urgent] {
                let post = || there.connection.post(ActiveMessage { delivery, ..active_message(vec![2], vec![]) });
                let refused = std::iter::repeat_with(post).find_map(Result::err).unwrap();
                assert_eq!(refused.code(), Code::ResourceExhausted);
            }
            let mut answerer = Some(answerer);
            match how {
                "close" => there.connection.close(Duration::ZERO),
                "goodbye" => there.connection.close(WAIT_TIMEOUT),
                _ => drop(answerer.take()),
            }
            drop(release);
            assert!(matches!(there.ended(), CloseReason::Closed), "{way:?} {how}");
            drop(answerer);
            assert!(caller.shutdown(WAIT_TIMEOUT), "{way:?} {how}");
        }
    }
}

#[test]
fn a_wrong_token_is_refused_and_the_right_one_still_works_once() {
    for &way in Way::all() {
        let Some((caller, answerer)) = fabrics(way) else { return };
        let meeting = Meeting::new(way, &caller, &answerer);
        let there = expect(&answerer, meeting.expect());
        let wrong = Connect {
            token: Token::random(),
            id: ConnectionId::random(),
            within: REFUSED_TIMEOUT,
            ..meeting.connect_from(&caller)
        };
        let intruder = connect(&caller, wrong);
        refused(&answerer, 1);
        assert_eq!(lost(intruder.ended()).code(), Code::Unavailable, "{way:?}");
        let here = connect(&caller, meeting.connect());
        here.opened();
        there.opened();
        // The same hello again; its token was used already.
        let Some(other) = open(way.calling()) else { return };
        let replay = Connect { within: REFUSED_TIMEOUT, ..meeting.connect_from(&other) };
        let replay = connect(&other, replay);
        refused(&answerer, 2);
        assert_eq!(lost(replay.ended()).code(), Code::Unavailable, "{way:?}");
        here.post(vec![5], vec![]);
        assert_eq!(there.message().0[..], [5], "{way:?}: the first one is undisturbed");
        assert!(other.shutdown(WAIT_TIMEOUT));
        shut_down(way, &(caller, answerer));
    }
}

#[test]
fn a_peer_that_does_not_come_in_time_is_told_as_lost_and_its_token_is_void() {
    for &way in Way::all() {
        let Some((caller, answerer)) = fabrics(way) else { return };
        let meeting = Meeting::new(way, &caller, &answerer);
        let late = Connect { within: REFUSED_TIMEOUT, ..meeting.connect() };
        let there = expect(&answerer, Expect { within: Duration::from_millis(20), ..meeting.expect() });
        assert!(lost(there.ended()).to_string().contains("did not connect in time"), "{way:?}");
        let late = connect(&caller, late);
        refused(&answerer, 1);
        assert_eq!(lost(late.ended()).code(), Code::Unavailable, "{way:?}");
        shut_down(way, &(caller, answerer));
    }
}

#[test]
fn nobody_listening_is_told_as_lost() {
    let Some(caller) = open(Way::Network.calling()) else { return };
    let port = (std::net::Ipv4Addr::LOCALHOST, gym_core::testing::free_port()).into();
    let here = connect(&caller, Names::new().connect(Target::Network(port)));
    let error = lost(here.ended());
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, gym_core::Execution::NotStarted), "{error}");
    assert!(caller.shutdown(WAIT_TIMEOUT));
}

#[test]
fn rubbish_in_place_of_a_worker_address_is_an_error() {
    let Some(caller) = open(Way::SharedMemory.calling()) else { return };
    for rubbish in [vec![], vec![0; 100], [vec![1], vec![0; 100]].concat()] {
        let target = Target::SharedMemory(WorkerPair { local: peer_worker(&caller).unwrap(), remote: rubbish.into() });
        let to = Connect { within: Duration::from_millis(200), ..Names::new().connect(target) };
        assert_eq!(lost(connect(&caller, to).ended()).code(), Code::Unavailable);
    }
    assert!(caller.shutdown(WAIT_TIMEOUT));
}

#[test]
fn peers_on_this_host_beyond_the_bound_are_refused_until_one_leaves() {
    let mut options = common::shared_memory();
    options.shared_memory_peers_max = 1;
    let Some(fabric) = open(options) else { return };
    let first = peer_worker(&fabric).unwrap();
    let error = peer_worker(&fabric).unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::ResourceExhausted, gym_core::Execution::NotStarted));
    drop(first);
    let second = peer_worker(&fabric).unwrap();
    assert_eq!(fabric.stats().peer_workers_refused, 1);
    let rubbish = Target::SharedMemory(WorkerPair { local: second.clone(), remote: Bytes::new() });
    lost(connect(&fabric, Names::new().connect(rubbish)).ended());
    drop(second);
    peer_worker(&fabric).unwrap();
    assert!(fabric.shutdown(WAIT_TIMEOUT));
}

/// After the worker is destroyed, its address would refer to other memory, which a late peer would overwrite.
#[test]
fn an_advertised_address_keeps_its_worker_until_no_peer_may_connect_to_it() {
    let mut options = common::shared_memory();
    options.shared_memory_peers_max = 1;
    let Some(fabric) = open(options) else { return };
    let told = peer_worker(&fabric).unwrap();
    let _ = told.address();
    told.withdraw();
    drop(told);
    let short = block_on(fabric.peer_worker(Duration::from_millis(1))).unwrap();
    let _ = short.address();
    drop(short);
    let deadline = tokio::time::Instant::now() + WAIT_TIMEOUT;
    while fabric.stats().peer_workers_closed < 2 {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", fabric.stats());
        std::thread::yield_now();
    }
    let told = peer_worker(&fabric).unwrap();
    let _ = told.address();
    drop(told);
    assert_eq!(peer_worker(&fabric).unwrap_err().code(), Code::ResourceExhausted);
    assert!(fabric.shutdown(WAIT_TIMEOUT));
    let stats = fabric.stats();
    assert_eq!(stats.peer_workers_opened, stats.peer_workers_closed, "{stats:?}");
}

#[test]
fn no_peer_connects_to_a_worker_after_its_time() {
    let Some((caller, answerer)) = fabrics(Way::SharedMemory) else { return };
    let meeting = Meeting::new(Way::SharedMemory, &caller, &answerer);
    let there = expect(&answerer, meeting.expect());
    let late = connect(&caller, Connect { within: Duration::ZERO, ..meeting.connect() });
    let said = lost(late.ended()).to_string();
    assert!(said.contains("it took too long"), "{said}");
    assert_eq!(answerer.stats().refused_tokens, 0);
    there.connection.close(Duration::ZERO);
    shut_down(Way::SharedMemory, &(caller, answerer));
}

#[test]
fn without_shared_memory_there_is_no_peer_worker() {
    let Some(fabric) = open(common::calling_network()) else { return };
    let error = peer_worker(&fabric).unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, gym_core::Execution::NotStarted), "{error}");
    assert!(fabric.shutdown(WAIT_TIMEOUT));
}

#[test]
fn unidentified_peers_beyond_the_bound_are_refused() {
    let mut answering = Way::Network.answering();
    answering.unidentified_peers_max = 0;
    let (Some(answerer), Some(caller)) = (open(answering), open(Way::Network.calling())) else { return };
    let here = connect(&caller, Meeting::new(Way::Network, &caller, &answerer).connect());
    assert_eq!(lost(here.ended()).code(), Code::Unavailable);
    assert!(answerer.stats().unidentified_refused >= 1);
    shut_down(Way::Network, &(caller, answerer));
}

#[test]
fn connections_that_never_speak_do_not_keep_others_away() {
    let (Some(answerer), Some(caller)) = (open(Way::Network.answering()), open(Way::Network.calling())) else {
        return;
    };
    // Only peers that send nothing: UCX's TCP listener aborts the process when it receives other bytes.
    let silent: Vec<_> =
        (0..20).filter_map(|_| std::net::TcpStream::connect(answerer.listen_address().unwrap()).ok()).collect();
    let (here, there) = pair(Way::Network, &caller, &answerer, None);
    here.post(vec![1], vec![]);
    there.message();
    drop(silent);
    shut_down(Way::Network, &(caller, answerer));
}

#[test]
fn a_refused_payload_ends_the_senders_part_and_nothing_is_allocated() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let hook: common::Hook = Box::new(|header, _| (header == [9]).then_some(Ok(Disposition::Done)));
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, Some(hook));
        let (told, done) = std::sync::mpsc::sync_channel(1);
        let done_call = Box::new(move |result: gym_core::Result<()>| told.send(result.is_ok()).unwrap());
        here.connection
            .post(ActiveMessage { done: Some(done_call), ..active_message(vec![9], payload(64 << 20, 0)) })
            .unwrap();
        done.recv_timeout(WAIT_TIMEOUT).expect("a refusal ends the send");
        here.post(vec![1], payload(BIG, 1));
        assert_eq!(there.message().0[..], [1], "{way:?}");
        assert_eq!(fabrics.1.pool().stats().fresh, 1, "{way:?}: only the second one landed");
        shut_down(way, &fabrics);
    }
}

#[test]
fn an_error_or_a_panic_of_the_handler_ends_this_connection_alone() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (bystander, its_peer) = pair(way, &fabrics.0, &fabrics.1, None);
        for (header, code) in [(1, Code::DataLoss), (2, Code::Internal)] {
            let hook: common::Hook = Box::new(|header, _| match header {
                [1] => Some(Err(Error::unknown(Code::DataLoss, "nonsense"))),
                _ => panic!("a defect, on purpose"),
            });
            let (here, there) = pair(way, &fabrics.0, &fabrics.1, Some(hook));
            here.post(vec![header], vec![]);
            // The other end may be notified already.
            let _ = here.connection.post(active_message(vec![header], payload(BIG, 0)));
            assert_eq!(lost(there.ended()).code(), code, "{way:?}");
            // UCX notifies the other end over a network; the fabric does over shared memory.
            assert_eq!(lost(here.ended()).code(), Code::Unavailable, "{way:?}");
        }
        bystander.post(vec![3], vec![]);
        assert_eq!(its_peer.message().0[..], [3], "{way:?}");
        shut_down(way, &fabrics);
    }
}

#[test]
fn a_header_and_an_urgent_payload_that_are_too_long_are_refused_here() {
    let Some(fabrics) = fabrics(Way::Network) else { return };
    let (here, _there) = pair(Way::Network, &fabrics.0, &fabrics.1, None);
    let error = here.connection.post(active_message(vec![0; 105], vec![])).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let urgent = ActiveMessage {
        delivery: gym_transport_rdma::fabric::Delivery::Urgent,
        ..active_message(vec![], vec![0; 4097])
    };
    assert_eq!(here.connection.post(urgent).unwrap_err().code(), Code::InvalidArgument);
    shut_down(Way::Network, &fabrics);
}

#[test]
fn messages_of_a_connection_that_broke_are_reported_as_failed_before_its_end() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        let (told, done) = std::sync::mpsc::sync_channel(1000);
        for _ in 0..500 {
            let told = told.clone();
            let done_call = Box::new(move |result: gym_core::Result<()>| told.send(result.is_ok()).unwrap());
            here.connection
                .post(ActiveMessage { done: Some(done_call), ..active_message(vec![], payload(BIG, 0)) })
                .unwrap();
        }
        drop(told);
        there.connection.close(Duration::ZERO);
        here.connection.close(Duration::ZERO);
        here.ended();
        assert_eq!(done.try_iter().count(), 500, "{way:?}");
        shut_down(way, &fabrics);
    }
}
