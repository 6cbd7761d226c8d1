//! Many concurrent active messages, posted and aborted at random, with canaries around every buffer. `GYM_UCX_STORM`
//! sets their number (default 2,000). Under valgrind and with a large number, this tests the ownership of memory.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::{WAIT_TIMEOUT, Way, open, pair};
use gym_core::Result;
use gym_transport_rdma::fabric::{
    ActiveMessage, CloseReason, Connection, ConnectionEvents, Delivery, Disposition, Fabric, FabricOptions, Lanes,
    Payload,
};
use gym_transport_rdma::memory::Pool;

/// Bytes before and after each payload; the receiver must never see them.
const CANARY: u8 = 0xC5;
const MARGIN: usize = 64;

/// Returns a payload inside a larger buffer, sometimes of the pool. Each byte identifies its message and differs from
/// the canary.
fn guarded(pool: &Pool, random: &mut fastrand::Rng, len: usize, seed: u8) -> (Bytes, Bytes) {
    let mark = seed & 0x3f;
    let whole = if random.bool() {
        let mut buffer = pool.take(len + 2 * MARGIN).unwrap();
        buffer.fill(CANARY);
        buffer[MARGIN..MARGIN + len].fill(mark);
        buffer.freeze()
    } else {
        let mut buffer = vec![CANARY; len + 2 * MARGIN];
        buffer[MARGIN..MARGIN + len].fill(mark);
        buffer.into()
    };
    let payload = whole.slice(MARGIN..MARGIN + len);
    (whole, payload)
}

/// Checks every payload against its header, lands some and rejects others.
struct Judge {
    pool: Pool,
    seen: AtomicUsize,
    wrong: AtomicUsize,
}

impl Judge {
    fn judge(&self, mark: u8, payload: &[u8]) {
        self.seen.fetch_add(1, Ordering::Relaxed);
        if payload.iter().any(|byte| *byte != mark) {
            self.wrong.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl ConnectionEvents for Judge {
    fn opened(&self, _: &Connection, _: &Lanes) {}

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        let mark = header[0] & 0x3f;
        match payload {
            Payload::Eager(bytes) => self.judge(mark, bytes.as_slice()),
            Payload::Announced(length) if header[1].is_multiple_of(3) => {
                // Payloads that land in this buffer later must overwrite all of this.
                self.pool.take(usize::try_from(length).unwrap())?.fill(CANARY);
                return Ok(Disposition::Land { key: mark.into() });
            }
            Payload::Announced(_) => {}
        }
        Ok(Disposition::Done)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.judge(u8::try_from(key).unwrap(), &bytes);
    }

    fn ended(&self, _: CloseReason) {}
}

fn fabrics(way: Way) -> Option<(Fabric, Fabric)> {
    let edge = |mut options: FabricOptions| {
        options.rendezvous_bytes = Some(8192);
        options
    };
    Some((open(edge(way.calling()))?, open(edge(way.answering()))?))
}

#[test]
fn messages_abandoned_at_random_moments_touch_no_other_memory() {
    let messages: usize = std::env::var("GYM_UCX_STORM").map_or(2000, |text| text.parse().unwrap());
    let seed = std::env::var("GYM_UCX_SEED").map_or(11, |text| text.parse().unwrap());
    println!("GYM_UCX_STORM={messages} GYM_UCX_SEED={seed}");
    for &way in Way::all() {
        let mut random = fastrand::Rng::with_seed(seed);
        let Some((caller, answerer)) = fabrics(way) else { return };
        let judge = Arc::new(Judge { pool: answerer.pool().clone(), seen: 0.into(), wrong: 0.into() });
        let told = Arc::new(AtomicUsize::new(0));
        let mut posted = 0;
        while posted < messages {
            // A connection with about a hundred messages, which is aborted or closed while they are in flight.
            let meeting = common::Meeting::new(way, &caller, &answerer);
            answerer.expect(meeting.expect(), Arc::<Judge>::clone(&judge)).unwrap();
            let (recorder, events) = common::recorder(None);
            let here = common::EndOf { connection: caller.connect(meeting.connect(), recorder).unwrap(), events };
            if random.bool() {
                here.opened();
            }
            let mut kept = Vec::new();
            for _ in 0..random.usize(1..200) {
                let len = [0, 1, 100, 8191, 8192, 60_000, 1 << 20][random.usize(..7)];
                let mark = random.u8(..);
                let (whole, payload) = guarded(caller.pool(), &mut random, len, mark);
                let delivery = if len <= 100 && random.u8(..10) == 0 { Delivery::Urgent } else { Delivery::Ordered };
                let counter = Arc::clone(&told);
                let done: gym_transport_rdma::fabric::SentCallback = Box::new(move |_| {
                    counter.fetch_add(1, Ordering::Relaxed);
                });
                // This iteration drops the header's memory, and usually the payload's last handle.
                let header = vec![mark, random.u8(..), 0, 0];
                let message = ActiveMessage { header: header.into(), payload, delivery, done: Some(done) };
                if here.connection.post(message).is_err() {
                    told.fetch_add(1, Ordering::Relaxed);
                }
                posted += 1;
                if random.bool() {
                    kept.push((whole, len, mark & 0x3f));
                }
            }
            let grace = [Duration::ZERO, Duration::from_millis(random.u64(0..20)), WAIT_TIMEOUT][random.usize(..3)];
            here.connection.close(grace);
            here.ended();
            for (whole, len, mark) in kept {
                let (before, rest) = whole.split_at(MARGIN);
                let (payload, behind) = rest.split_at(len);
                assert!(before.iter().chain(behind).all(|byte| *byte == CANARY), "{way:?}: a margin was written");
                assert!(payload.iter().all(|byte| *byte == mark), "{way:?}: a payload was written");
            }
        }
        assert_eq!(told.load(Ordering::Relaxed), posted, "{way:?}: every message is told exactly once");
        assert_eq!(
            judge.wrong.load(Ordering::Relaxed),
            0,
            "{way:?}: of {} that came",
            judge.seen.load(Ordering::Relaxed)
        );
        assert!(judge.seen.load(Ordering::Relaxed) > 0, "{way:?}");
        // Over shared memory, the answering end is not notified of a caller that disconnects before it gets a response, so it takes all of its time.
        assert!(caller.shutdown(WAIT_TIMEOUT) & answerer.shutdown(Duration::from_secs(10)), "{way:?}");
        assert_eq!(caller.pool().stats().bytes_kept, 0, "{way:?}: a buffer of the pool is still held");
        for stats in [caller.stats(), answerer.stats()] {
            assert_eq!(stats.peer_workers_opened, stats.peer_workers_closed, "{way:?} {stats:?}");
        }
    }
}

/// Regression test. While a connection was being established, the header of a reply posted from within an event was
/// read after its stack frame had ended.
#[test]
fn headers_posted_from_within_events_while_connecting_arrive_whole() {
    struct Replies {
        connection: std::sync::OnceLock<Connection>,
    }
    impl Replies {
        fn reply(&self, header: &[u8], payload: Bytes) {
            let scratch = header.to_vec();
            let connection = self.connection.get().expect("it is open");
            connection.post(common::active_message(Bytes::copy_from_slice(&scratch), payload)).unwrap();
        }
    }
    impl ConnectionEvents for Replies {
        fn opened(&self, connection: &Connection, _: &Lanes) {
            let _ = self.connection.set(connection.clone());
            for index in 0..50_u8 {
                self.reply(&[index; 100], Bytes::from(vec![index; usize::from(index) * 300]));
            }
        }

        fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
            if let Payload::Eager(bytes) = payload {
                self.reply(header, bytes.into_bytes());
            }
            Ok(Disposition::Done)
        }

        fn landed(&self, _: u64, _: Bytes) {}

        fn ended(&self, _: CloseReason) {}
    }
    for &way in Way::all() {
        let Some((caller, answerer)) = fabrics(way) else { return };
        for round in 0..10 {
            let meeting = common::Meeting::new(way, &caller, &answerer);
            let replies = Arc::new(Replies { connection: std::sync::OnceLock::new() });
            answerer.expect(meeting.expect(), replies).unwrap();
            let (recorder, events) = common::recorder(None);
            let connection = caller.connect(meeting.connect(), recorder).unwrap();
            let here = common::EndOf { connection, events };
            here.post(vec![99; 104], vec![99; 10]);
            here.opened();
            let mut seen: Vec<u8> = Vec::new();
            for _ in 0..51 {
                let (header, payload, _) = here.message();
                assert!(header.iter().chain(&payload).all(|byte| *byte == header[0]), "{way:?} {round}");
                seen.push(header[0]);
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq((0..50).chain([99])), "{way:?} {round}");
            here.connection.close(WAIT_TIMEOUT);
            here.ended();
        }
        assert!(caller.shutdown(WAIT_TIMEOUT) && answerer.shutdown(WAIT_TIMEOUT), "{way:?}");
    }
}

/// UCX's listener never negotiates shared memory, whatever the settings allow. The reported lanes must show that.
#[test]
fn a_listener_gives_network_lanes_even_where_shared_memory_is_allowed() {
    let all = |mut options: FabricOptions| {
        options.transports = Some("posix,cma,self,tcp".to_owned());
        options
    };
    if Way::all().len() < 2 {
        return;
    }
    let (Some(caller), Some(answerer)) = (open(all(Way::Network.calling())), open(all(Way::Network.answering())))
    else {
        return;
    };
    let (here, _there) = pair(Way::Network, &caller, &answerer, None);
    assert_eq!(here.connection.lanes().unwrap().names(), ["tcp/lo"]);
    let (here, _there) = pair(Way::SharedMemory, &caller, &answerer, None);
    assert!(here.connection.lanes().unwrap().names().iter().any(|name| name == "posix/memory"));
    assert!(caller.shutdown(WAIT_TIMEOUT) && answerer.shutdown(WAIT_TIMEOUT));
}
