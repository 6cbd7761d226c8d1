//! Active messages over real UCX between two fabrics of one process: every size, over every transport, in order. Also
//! the wake-ups of an idle thread.

mod common;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use common::{Way, active_message, open, pair, payload};
use gym_transport_rdma::fabric::{
    ActiveMessage, CloseReason, Connection, ConnectionEvents, Delivery, Disposition, Driver, Fabric, FabricOptions,
    Lanes, Payload,
};
use parking_lot::Mutex;

const EDGE: usize = 16 << 10;

/// Opens two fabrics that send payloads of at least [`EDGE`] bytes by rendezvous. `None` without UCX.
fn fabrics(way: Way) -> Option<(Fabric, Fabric)> {
    let edge = |mut options: FabricOptions| {
        options.rendezvous_bytes = Some(EDGE);
        options
    };
    Some((open(edge(way.calling()))?, open(edge(way.answering()))?))
}

fn shut_down(way: Way, (caller, answerer): &(Fabric, Fabric)) {
    assert!(
        caller.shutdown(common::WAIT_TIMEOUT) && answerer.shutdown(common::WAIT_TIMEOUT),
        "{way:?}: something was leaked"
    );
}

#[test]
fn every_size_arrives_as_it_went_and_comes_back() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        let sizes = [0, 1, 7, 64, 4096, EDGE - 1, EDGE, EDGE + 1, 1 << 20, (1 << 20) + 1, 64 << 20];
        let mut eager_seen = 0;
        for (index, size) in sizes.iter().copied().enumerate() {
            let sent = payload(size, index);
            let header = vec![index as u8; index % 20];
            here.post(header.clone(), sent.clone());
            let (arrived_header, arrived, eager) = there.message();
            assert_eq!(arrived_header, header, "{way:?} {size}");
            assert!(arrived == sent, "{way:?} {size}");
            assert_eq!(eager, size < EDGE, "{way:?} {size}");
            eager_seen += u64::from(eager);
            there.post(header, arrived);
            let (_, back, _) = here.message();
            assert!(back == sent, "{way:?} {size} back");
        }
        let stats = there.connection.stats();
        assert_eq!(
            (stats.eager_received, stats.rendezvous_received),
            (eager_seen, sizes.len() as u64 - eager_seen),
            "{way:?}"
        );
        assert_eq!(here.connection.stats().bytes_sent, sizes.iter().sum::<usize>() as u64, "{way:?}");
        shut_down(way, &fabrics);
    }
}

#[test]
fn eager_and_announced_messages_are_delivered_in_the_order_of_posting() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (seen, order) = sync_channel(1 << 12);
        // Records the delivery, then continues as usual.
        let hook: common::Hook = Box::new(move |header, _| {
            seen.send(u32::from_le_bytes(header.try_into().unwrap())).unwrap();
            None
        });
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, Some(hook));
        let mut random = fastrand::Rng::with_seed(7);
        let sizes: Vec<_> = (0..500).map(|_| [0, 100, EDGE - 1, EDGE, 300_000][random.usize(..5)]).collect();
        for (index, size) in sizes.iter().enumerate() {
            here.post((index as u32).to_le_bytes().to_vec(), payload(*size, index));
        }
        for _ in &sizes {
            let (header, arrived, _) = there.message();
            let index = u32::from_le_bytes(header[..].try_into().unwrap()) as usize;
            assert!(arrived == payload(sizes[index], index), "{way:?} message {index}");
        }
        assert!(order.try_iter().eq(0..500), "{way:?}");
        shut_down(way, &fabrics);
    }
}

#[test]
fn done_is_called_once_for_every_message_and_the_payload_is_dropped() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        let (told, done) = sync_channel(64);
        for size in [0, 10, EDGE, 1 << 20] {
            let told = told.clone();
            let done = Box::new(move |result: gym_core::Result<()>| told.send(result.is_ok()).unwrap());
            here.connection
                .post(ActiveMessage { done: Some(done), ..active_message(vec![1], payload(size, 0)) })
                .unwrap();
            drop(there.message());
        }
        drop(told);
        let done: Vec<bool> = (0..4).map(|_| done.recv_timeout(common::WAIT_TIMEOUT).unwrap()).collect();
        assert_eq!(done, [true; 4], "{way:?}");
        shut_down(way, &fabrics);
    }
}

#[test]
fn what_is_posted_before_the_connection_is_open_is_sent_after_it() {
    for &way in Way::all() {
        let Some((caller, answerer)) = fabrics(way) else { return };
        let meeting = common::Meeting::new(way, &caller, &answerer);
        let (recorder, events) = common::recorder(None);
        let connection = answerer.expect(meeting.expect(), recorder).unwrap();
        let there = common::EndOf { connection, events };
        let (recorder, events) = common::recorder(None);
        let connection = caller.connect(meeting.connect(), recorder).unwrap();
        let here = common::EndOf { connection, events };
        here.connection.post(ActiveMessage { delivery: Delivery::Urgent, ..active_message(vec![1], vec![1]) }).unwrap();
        here.post(vec![2], vec![2; 100_000]);
        here.opened();
        there.opened();
        let mut headers = [there.message().0, there.message().0];
        headers.sort();
        assert_eq!(headers, [&[1][..], &[2]], "{way:?}");
        shut_down(way, &(caller, answerer));
    }
}

#[test]
fn payloads_of_the_pool_go_out_registered_and_others_are_counted() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        let mut buffer = fabrics.0.pool().take(1 << 20).unwrap();
        buffer.fill(3);
        let buffer = buffer.freeze();
        here.post(vec![], buffer.slice(1..));
        assert!(there.message().1 == vec![3; (1 << 20) - 1]);
        assert_eq!(fabrics.0.stats().bytes_unregistered, 0, "{way:?}");
        here.post(vec![], Bytes::from(vec![4; 1 << 20]));
        assert!(there.message().1 == vec![4; 1 << 20]);
        assert_eq!(fabrics.0.stats().bytes_unregistered, 1 << 20, "{way:?}");
        assert_eq!((fabrics.0.stats().registrations_failed, fabrics.1.stats().registrations_failed), (0, 0), "{way:?}");
        shut_down(way, &fabrics);
    }
}

#[test]
fn landing_buffers_are_used_again_and_nothing_grows() {
    for &way in Way::all() {
        let Some(fabrics) = fabrics(way) else { return };
        let (here, there) = pair(way, &fabrics.0, &fabrics.1, None);
        let sent = payload(1 << 20, 1);
        for _ in 0..300 {
            here.post(vec![], sent.clone());
            assert!(there.message().1 == sent);
        }
        let stats = fabrics.1.pool().stats();
        assert!(stats.fresh <= 2 && stats.reused >= 298 && stats.plain == 0, "{way:?} {stats:?}");
        shut_down(way, &fabrics);
    }
}

/// Blocks the first message until it is released, and drops all landed payloads.
struct Dropping {
    go: Mutex<Receiver<()>>,
    landed: SyncSender<usize>,
}

impl ConnectionEvents for Dropping {
    fn opened(&self, _: &Connection, _: &Lanes) {}

    fn message(&self, _: &[u8], payload: Payload<'_>) -> gym_core::Result<Disposition> {
        if let Payload::Announced(_) = payload {
            return Ok(Disposition::Land { key: 0 });
        }
        let _ = self.go.lock().recv_timeout(common::WAIT_TIMEOUT);
        Ok(Disposition::Done)
    }

    fn landed(&self, _: u64, bytes: Bytes) {
        self.landed.send(bytes.len()).expect("the test waits for it");
    }

    fn ended(&self, _: CloseReason) {}
}

#[test]
fn what_a_peer_on_this_host_has_announced_lands_in_one_buffer_if_it_is_given_back() {
    const ANNOUNCED: usize = 16;
    let Some((caller, answerer)) = fabrics(Way::SharedMemory) else { return };
    let meeting = common::Meeting::new(Way::SharedMemory, &caller, &answerer);
    let ((go, told_to_go), (told, landed)) = (sync_channel(2), sync_channel(ANNOUNCED));
    let dropping = Dropping { go: Mutex::new(told_to_go), landed: told };
    answerer.expect(meeting.expect(), Arc::new(dropping)).unwrap();
    let (recorder, events) = common::recorder(None);
    let here = common::EndOf { connection: caller.connect(meeting.connect(), recorder).unwrap(), events };
    here.opened();
    // UCX announces nothing before both ends have responded to each other.
    here.post(vec![], vec![1; 1 << 20]);
    assert_eq!(landed.recv_timeout(common::WAIT_TIMEOUT), Ok(1 << 20));
    here.post(vec![], vec![1]);
    for _ in 0..ANNOUNCED {
        here.post(vec![], vec![1; 1 << 20]);
    }
    let (told, sent) = sync_channel(1);
    let done = Box::new(move |_| told.send(()).unwrap());
    here.connection.post(ActiveMessage { done: Some(done), ..active_message(vec![], vec![1]) }).unwrap();
    sent.recv_timeout(common::WAIT_TIMEOUT).expect("all were announced");
    // The first message, and the one behind the announced messages.
    (0..2).for_each(|_| go.send(()).unwrap());
    for _ in 0..ANNOUNCED {
        assert_eq!(landed.recv_timeout(common::WAIT_TIMEOUT), Ok(1 << 20));
    }
    let stats = answerer.pool().stats();
    assert_eq!((stats.fresh, stats.reused), (1, ANNOUNCED as u64));
    shut_down(Way::SharedMemory, &(caller, answerer));
}

/// Arms the worker for every wait: progress until there is no work, arm, and progress again if UCX reports that it is
/// busy.
#[test]
fn messages_arrive_at_a_fabric_that_sleeps_whenever_it_can() {
    for &way in Way::all() {
        let driver = Driver::Hybrid {
            spin: Duration::ZERO,
            tick: Duration::from_millis(1),
            idle_tick: Duration::from_millis(100),
        };
        let quiet = |mut options: FabricOptions| {
            options.driver = driver;
            options
        };
        let (Some(caller), Some(answerer)) = (open(quiet(way.calling())), open(quiet(way.answering()))) else {
            return;
        };
        let (here, there) = pair(way, &caller, &answerer, None);
        for round in 0..200 {
            here.post(vec![round], vec![round; 10]);
            let (header, _, _) = there.message();
            there.post(header, vec![]);
            assert_eq!(here.message().0[..], [round]);
        }
        let stats = answerer.stats();
        assert!(stats.woken_by_event + stats.woken_by_tick + stats.woken_by_command > 0, "{way:?} {stats:?}");
        shut_down(way, &(caller, answerer));
    }
}
