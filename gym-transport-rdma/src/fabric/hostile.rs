//! Hostile peers that speak UCX but not our protocol: hand-written messages from a bare worker to a fabric.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gym_core::Result;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::fabric::protocol::prefix::{MESSAGE_ID, MessageKind, MessagePrefix, hello};
use crate::fabric::*;
use crate::sys::LoadOptions;
use crate::ucx::{
    Arrival, Context, Endpoint, EndpointKey, HEADER_ROOM, Outgoing, Protocol, Receiver, UnhandledIds, Worker,
};

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn fabric() -> Option<Fabric> {
    open(FabricOptions {
        transports: Some("posix,cma,self".to_owned()),
        unsent_max: 64,
        reorder_max: 8,
        reorder_bytes_max: 10_000,
        ..FabricOptions::default()
    })
}

fn open(options: FabricOptions) -> Option<Fabric> {
    match Fabric::open(options) {
        Ok(fabric) => Some(fabric),
        Err(FabricError::Load(error)) if std::env::var_os("GYM_UCX_REQUIRED").is_none() => {
            let _ = writeln!(std::io::stderr(), "NOT RUN: UCX unavailable: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Counts messages, rejects them, and stores the close reason.
#[derive(Default)]
struct Seen {
    messages: AtomicUsize,
    end: Mutex<Option<CloseReason>>,
}

impl ConnectionEvents for Seen {
    fn opened(&self, _: &Connection, _: &Lanes) {}

    fn message(&self, _: &[u8], _: Payload<'_>) -> Result<Disposition> {
        self.messages.fetch_add(1, Ordering::Relaxed);
        Ok(Disposition::Done)
    }

    fn landed(&self, _: u64, _: Bytes) {}

    fn ended(&self, why: CloseReason) {
        *self.end.lock() = Some(why);
    }
}

impl Seen {
    /// Returns whether the connection was lost, and checks that its error contains `reason`.
    fn lost(&self, reason: &str) -> bool {
        match &*self.end.lock() {
            Some(CloseReason::Lost(error)) => {
                assert!(error.to_string().contains(reason), "{error}");
                true
            }
            Some(other) => panic!("{other:?}"),
            None => false,
        }
    }
}

struct Ignoring;

impl Receiver for Ignoring {
    fn receive(&self, _: &[u8], _: Arrival<'_>, _: Option<EndpointKey>) {}
}

/// A bare worker with an endpoint to a peer worker of the fabric.
struct Intruder {
    worker: std::rc::Rc<Worker>,
    endpoint: Endpoint,
    peer_worker: Option<PeerWorker>,
}

fn bare_worker(transports: &str) -> std::rc::Rc<Worker> {
    let settings = [("TLS", transports), ("NET_DEVICES", "lo")];
    // As in a peer worker: a worker computes the slots of another's queue with its own number.
    let queue = transports.contains("posix").then_some(("MM_FIFO_SIZE", "64"));
    let settings = settings.into_iter().chain(queue).map(|(name, value)| (name.to_owned(), value.to_owned()));
    let settings: Vec<_> = settings.collect();
    let context = Context::open(crate::sys::load(&LoadOptions::default()).unwrap(), &settings).unwrap();
    let worker = Worker::open(&context).unwrap();
    worker.receive(MESSAGE_ID, Box::new(Ignoring), UnhandledIds::All).unwrap();
    worker
}

/// Prefix of UCX's part of an address.
const PREFIX: [u8; 5] = [1, 0, 0, 0, 0];

fn peer_worker(fabric: &Fabric) -> PeerWorker {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(fabric.peer_worker(WAIT_TIMEOUT)).unwrap()
}

impl Intruder {
    fn new(fabric: &Fabric) -> Self {
        let (worker, peer_worker) = (bare_worker("posix,cma,self"), peer_worker(fabric));
        let endpoint = Endpoint::to_worker(&worker, &peer_worker.address()[PREFIX.len()..], |_| {}).unwrap();
        Self { worker, endpoint, peer_worker: Some(peer_worker) }
    }

    fn over_tcp(fabric: &Fabric) -> Self {
        let worker = bare_worker("tcp");
        let endpoint = Endpoint::to_socket(&worker, fabric.listen_address().unwrap(), |_| {}).unwrap();
        Self { worker, endpoint, peer_worker: None }
    }

    /// Sends a message, and waits until UCX has completed it.
    fn send(&self, message: ([u8; HEADER_ROOM], usize), payload: Bytes, protocol: Protocol) {
        self.send_as(MESSAGE_ID, message, payload, protocol);
    }

    fn send_as(&self, id: u16, (header, header_bytes): ([u8; HEADER_ROOM], usize), payload: Bytes, protocol: Protocol) {
        let done = std::rc::Rc::new(std::cell::Cell::new(false));
        let completed = std::rc::Rc::clone(&done);
        let message = Outgoing { id, header, header_bytes, payload, protocol, reply: false };
        self.endpoint.send(message, None, move |_| completed.set(true));
        self.until("a message is let go", || done.get());
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !holds() {
            self.worker.progress();
            assert!(Instant::now() < deadline, "{what}: it did not happen");
        }
    }

    /// Makes the fabric open a connection to this worker, once.
    fn introduced(&self, fabric: &Fabric) -> (ConnectionId, Connection, Arc<Seen>) {
        let (id, own, token, seen) =
            (ConnectionId::random(), ConnectionId::random(), Token::random(), Arc::<Seen>::default());
        // Process id 0 is not watched for its end.
        let peer = [&PREFIX, self.worker.address()].concat().into();
        let shared_memory = Some(WorkerPair { local: self.peer_worker.clone().unwrap(), remote: peer });
        let expected = Expect { id, token: token.clone(), peer: own, shared_memory, within: WAIT_TIMEOUT };
        let connection = fabric.expect(expected, Arc::<Seen>::clone(&seen)).unwrap();
        let prefix = MessagePrefix { receiver: id, sequence: 0, kind: MessageKind::Hello };
        self.send(prefix.encode(&hello(&token, own)), Bytes::new(), Protocol::Eager);
        self.until("it opens", || connection.lanes().is_some());
        (id, connection, seen)
    }
}

fn message(receiver: ConnectionId, sequence: u64, kind: MessageKind) -> ([u8; HEADER_ROOM], usize) {
    MessagePrefix { receiver, sequence, kind }.encode(b"header")
}

#[test]
fn rubbish_and_unknown_ids_are_dropped_and_announcements_of_them_refused() {
    let Some(fabric) = fabric() else { return };
    let intruder = Intruder::new(&fabric);
    let (_, connection, seen) = intruder.introduced(&fabric);
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..200 {
        let mut header = [0; HEADER_ROOM];
        random.fill(&mut header);
        let length = random.usize(..=HEADER_ROOM);
        intruder.send((header, length), Bytes::from(vec![1; random.usize(..5000)]), Protocol::Any);
    }
    let big = Bytes::from(vec![1; 8 << 20]);
    for id in [0, 1, 2, 7, 100, 102] {
        intruder.send_as(id, ([0; HEADER_ROOM], 8), Bytes::from_static(b"for nobody"), Protocol::Eager);
    }
    // These sends complete only if the announcements are rejected.
    intruder.send(([0xff; HEADER_ROOM], 100), big.clone(), Protocol::Rendezvous);
    intruder.send(message(ConnectionId::random(), 0, MessageKind::Ordered), big, Protocol::Rendezvous);
    for kind in [
        MessageKind::Hello,
        MessageKind::Welcome,
        MessageKind::Ordered,
        MessageKind::Urgent,
        MessageKind::Close,
        MessageKind::Closed,
        MessageKind::Aborted,
        MessageKind::Finished,
        MessageKind::WorkerDestroyed,
    ] {
        intruder.send(message(ConnectionId::random(), 0, kind), Bytes::new(), Protocol::Eager);
    }
    intruder.until("they are counted", || {
        let stats = fabric.stats();
        stats.dropped_malformed >= 201 && stats.dropped_unknown >= 9 && stats.refused_tokens >= 1
    });
    assert_eq!(seen.messages.load(Ordering::Relaxed), 0);
    assert!(seen.end.lock().is_none(), "other connections are not affected");
    assert_eq!(fabric.pool().stats().fresh, 0, "nothing was allocated");
    connection.close(Duration::ZERO);
}

#[test]
fn messages_of_any_id_from_an_unidentified_peer_are_dropped() {
    let (transports, devices) = (Some("tcp".to_owned()), Some("lo".to_owned()));
    let listen = Some(([127, 0, 0, 1], 0).into());
    let Some(fabric) = open(FabricOptions { transports, devices, listen, ..FabricOptions::default() }) else { return };
    let intruder = Intruder::over_tcp(&fabric);
    for id in [0, 1, 2, 7, 100, 4096, 60_000, 65_535] {
        intruder.send_as(id, ([0; HEADER_ROOM], 8), Bytes::from_static(b"for nobody"), Protocol::Eager);
    }
    intruder.send(message(ConnectionId::random(), 0, MessageKind::Hello), Bytes::new(), Protocol::Eager);
    intruder.until("what came behind them is looked at", || fabric.stats().refused_tokens == 1);
}

#[test]
fn an_advertised_length_costs_nothing_before_it_is_wanted() {
    let Some(fabric) = fabric() else { return };
    let intruder = Intruder::new(&fabric);
    let (id, connection, seen) = intruder.introduced(&fabric);
    // Never written, so it is only an address range at this end. A receiver that trusted the length would allocate 8
    // GiB.
    let huge = untouched_zeros(8 << 30);
    intruder.send(message(id, 0, MessageKind::Ordered), huge, Protocol::Rendezvous);
    intruder.until("it is handed up", || seen.messages.load(Ordering::Relaxed) == 1);
    assert_eq!((fabric.pool().stats().fresh, fabric.pool().stats().plain), (0, 0));
    connection.close(Duration::ZERO);
}

/// Returns zeros that take no memory.
fn untouched_zeros(len: usize) -> Bytes {
    crate::memory::Pool::new(crate::memory::PoolOptions::default()).take(len).unwrap().freeze()
}

#[test]
fn what_has_no_place_in_the_order_ends_the_connection() {
    let Some(fabric) = fabric() else { return };
    let cases: [(&str, &[(u64, MessageKind)]); 7] = [
        ("the same sequence number twice", &[(0, MessageKind::Ordered), (0, MessageKind::Ordered)]),
        (
            "too many ahead of a gap",
            &[
                (2, MessageKind::Ordered),
                (3, MessageKind::Ordered),
                (4, MessageKind::Ordered),
                (5, MessageKind::Ordered),
                (6, MessageKind::Ordered),
                (7, MessageKind::Ordered),
                (8, MessageKind::Ordered),
                (9, MessageKind::Ordered),
                (10, MessageKind::Ordered),
            ],
        ),
        ("a welcome to the answering end", &[(0, MessageKind::Welcome)]),
        ("a response to a close that was not sent", &[(0, MessageKind::Closed)]),
        ("the peer aborts", &[(0, MessageKind::Aborted)]),
        ("the peer has finished", &[(0, MessageKind::Finished)]),
        ("the peer has destroyed its worker", &[(0, MessageKind::WorkerDestroyed)]),
    ];
    for (what, messages) in cases {
        let intruder = Intruder::new(&fabric);
        let (id, _, seen) = intruder.introduced(&fabric);
        for (sequence, kind) in messages {
            intruder.send(message(id, *sequence, *kind), Bytes::new(), Protocol::Eager);
        }
        intruder.until(what, || matches!(&*seen.end.lock(), Some(CloseReason::Lost(_))));
    }
}

/// The peer never reads messages that were announced to a destroyed worker, and only the owner of the worker can report
/// that.
#[test]
fn a_peer_worker_whose_peer_destroyed_its_own_is_not_kept_for_what_was_announced_to_it() {
    let Some(fabric) = fabric() else { return };
    let intruder = Intruder::new(&fabric);
    let (id, connection, seen) = intruder.introduced(&fabric);
    let completed = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&completed);
    let done: SentCallback = Box::new(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let payload = Bytes::from(vec![1; 8 << 20]);
    let unread =
        ActiveMessage { header: Bytes::from_static(b"unread"), payload, delivery: Delivery::Ordered, done: Some(done) };
    connection.post(unread).unwrap();
    // Sent twice: for another connection it is ignored. Neither requires the intruder to make progress.
    intruder.send(message(ConnectionId::random(), 0, MessageKind::WorkerDestroyed), Bytes::new(), Protocol::Eager);
    intruder.send(message(id, 0, MessageKind::WorkerDestroyed), Bytes::new(), Protocol::Eager);
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while fabric.stats().peer_workers_closed == 0 {
        assert!(Instant::now() < deadline, "{:?}", fabric.stats());
        std::thread::yield_now();
    }
    assert!(seen.lost("the peer has aborted the connection"));
    assert_eq!(completed.load(Ordering::Relaxed), 1);
    assert!(fabric.shutdown(WAIT_TIMEOUT));
}

#[test]
fn a_second_hello_does_not_disturb_the_first() {
    let Some(fabric) = fabric() else { return };
    let intruder = Intruder::new(&fabric);
    let (id, connection, seen) = intruder.introduced(&fabric);
    intruder.send(message(id, 0, MessageKind::Hello), Bytes::new(), Protocol::Eager);
    let replayed = MessagePrefix { receiver: id, sequence: 0, kind: MessageKind::Hello };
    intruder.send(replayed.encode(&hello(&Token::random(), ConnectionId::random())), Bytes::new(), Protocol::Eager);
    intruder.until("both are refused", || fabric.stats().refused_tokens == 2);
    intruder.send(message(id, 0, MessageKind::Ordered), Bytes::new(), Protocol::Eager);
    intruder.until("the message comes", || seen.messages.load(Ordering::Relaxed) == 1);
    connection.close(Duration::ZERO);
}

#[test]
fn what_waits_for_its_turn_is_bounded_in_bytes_too() {
    let Some(fabric) = fabric() else { return };
    let intruder = Intruder::new(&fabric);
    let (id, _, seen) = intruder.introduced(&fabric);
    for sequence in [1, 2] {
        intruder.send(message(id, sequence, MessageKind::Ordered), Bytes::from(vec![1; 4_999]), Protocol::Eager);
    }
    intruder.send(message(id, 3, MessageKind::Ordered), Bytes::from(vec![1; 3]), Protocol::Eager);
    intruder.until("it ends", || seen.lost("no more than 10000 bytes"));
}

#[test]
fn a_long_urgent_message_ends_the_connection() {
    let Some(fabric) = fabric() else { return };
    for (length, protocol) in [(URGENT_BYTES_MAX + 1, Protocol::Eager), (8, Protocol::Rendezvous)] {
        let intruder = Intruder::new(&fabric);
        let (id, _, seen) = intruder.introduced(&fabric);
        intruder.send(message(id, 0, MessageKind::Urgent), Bytes::from(vec![1; length]), protocol);
        intruder.until("it ends", || seen.lost("urgent"));
        assert_eq!(seen.messages.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn messages_that_a_peer_does_not_take_end_the_connection() {
    let Some(fabric) = fabric() else { return };
    let intruder = Intruder::new(&fabric);
    let (_, connection, seen) = intruder.introduced(&fabric);
    let completed = Arc::new(AtomicUsize::new(0));
    let mut posted = 0;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    // The intruder makes no progress meanwhile.
    while !seen.lost("has not received 64 messages") {
        assert!(Instant::now() < deadline, "{posted} messages were taken");
        let completed = Arc::clone(&completed);
        let done: SentCallback = Box::new(move |_| {
            completed.fetch_add(1, Ordering::Relaxed);
        });
        let payload = Bytes::from_static(&[1; 1000]);
        let message = ActiveMessage {
            header: Bytes::from_static(b"answer"),
            payload,
            delivery: Delivery::Urgent,
            done: Some(done),
        };
        posted += usize::from(connection.post(message).is_ok());
    }
    intruder.until("every message completes", || completed.load(Ordering::Relaxed) == posted);
}
