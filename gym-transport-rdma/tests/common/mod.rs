//! A pair of fabrics with recorded events, for the tests that need UCX.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "as in the tests themselves")]

pub(crate) mod transport;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use gym_core::Result;
use gym_transport_rdma::fabric::{
    ActiveMessage, CloseReason, Connect, Connection, ConnectionEvents, ConnectionId, Delivery, Disposition, Expect,
    Fabric, FabricError, FabricOptions, Lanes, Payload, PeerWorker, Target, Token, WorkerPair,
};
use parking_lot::Mutex;

/// Timeout of all operations on a busy machine.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Opens a fabric. Returns `None`, with a message on stderr, if there is no UCX and none is required.
pub(crate) fn open(options: FabricOptions) -> Option<Fabric> {
    match Fabric::open(options) {
        Ok(fabric) => Some(fabric),
        Err(FabricError::Load(error)) if std::env::var_os("GYM_UCX_REQUIRED").is_none() => {
            // Not `eprintln!`, whose output the test harness captures.
            let _ = writeln!(std::io::stderr(), "NOT RUN: UCX unavailable: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Opens a network fabric that listens: TCP over the loopback interface, or as the environment specifies
/// (`GYM_UCX_TRANSPORTS`, `GYM_UCX_LISTEN_DEVICES`, `GYM_UCX_ADDRESS`).
pub(crate) fn network() -> FabricOptions {
    let ip = variable("GYM_UCX_ADDRESS").map_or(Ipv4Addr::LOCALHOST.into(), |text| text.parse::<IpAddr>().unwrap());
    let devices = variable("GYM_UCX_LISTEN_DEVICES");
    let mut options = calling_network();
    options.devices = devices.or(options.devices);
    options.listen = Some(SocketAddr::new(ip, 0));
    options
}

/// Opens a network fabric that only connects (`GYM_UCX_TRANSPORTS`, `GYM_UCX_DEVICES`), over the other device of a
/// pair.
pub(crate) fn calling_network() -> FabricOptions {
    let transports = variable("GYM_UCX_TRANSPORTS");
    let devices = variable("GYM_UCX_DEVICES").or_else(|| transports.is_none().then(|| "lo".to_owned()));
    let mut options = FabricOptions::default();
    options.transports = Some(transports.unwrap_or_else(|| "tcp".to_owned()));
    options.devices = devices;
    options
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Opens a fabric for shared memory on one host.
pub(crate) fn shared_memory() -> FabricOptions {
    let mut options = FabricOptions::default();
    options.transports = Some("posix,cma,self".to_owned());
    options
}

/// Transport to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Network,
    SharedMemory,
}

impl Way {
    /// Returns the transports to test. In a virtual machine for one device, only that of the device.
    pub(crate) fn all() -> &'static [Self] {
        if variable("GYM_UCX_TRANSPORTS").is_some() { &[Self::Network] } else { &[Self::Network, Self::SharedMemory] }
    }

    /// Opens the fabric of the answering end.
    pub(crate) fn answering(self) -> FabricOptions {
        match self {
            Self::Network => network(),
            Self::SharedMemory => shared_memory(),
        }
    }

    /// Opens the fabric of the calling end.
    pub(crate) fn calling(self) -> FabricOptions {
        match self {
            Self::Network => calling_network(),
            Self::SharedMemory => shared_memory(),
        }
    }

    /// Checks that the negotiated transport is the requested one.
    pub(crate) fn check(self, lanes: &Lanes) {
        assert!(!lanes.names().is_empty(), "no lanes at all");
        assert_eq!(lanes.shared_memory(), self == Self::SharedMemory, "{lanes}");
        if self == Self::Network {
            let wanted = std::env::var("GYM_UCX_TRANSPORTS").unwrap_or_else(|_| "tcp".to_owned());
            assert_eq!(lanes.rdma(), wanted != "tcp", "{lanes}");
        }
    }
}

/// An event of a connection.
#[derive(Debug)]
pub(crate) enum Event {
    Opened(Lanes),
    /// Header, payload, and whether the payload came with the header.
    Message {
        header: Bytes,
        payload: Bytes,
        eager: bool,
    },
    Ended(CloseReason),
}

/// Receives the header and the announced length. If it returns a disposition, the default does not apply.
pub(crate) type Hook = Box<dyn Fn(&[u8], u64) -> Option<Result<Disposition>> + Send + Sync>;

/// Records every payload and sends events to a channel.
pub(crate) struct Recorder {
    told: SyncSender<Event>,
    /// Headers of payloads that are landing. The key is the index.
    landing: Mutex<Vec<Bytes>>,
    hook: Option<Hook>,
}

impl ConnectionEvents for Recorder {
    fn opened(&self, _: &Connection, lanes: &Lanes) {
        self.told.send(Event::Opened(lanes.clone())).unwrap();
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        let length = match &payload {
            Payload::Eager(bytes) => bytes.as_slice().len() as u64,
            Payload::Announced(length) => *length,
        };
        if let Some(answer) = self.hook.as_ref().and_then(|hook| hook(header, length)) {
            return answer;
        }
        let header = Bytes::copy_from_slice(header);
        match payload {
            Payload::Eager(bytes) => {
                self.told.send(Event::Message { header, payload: bytes.into_bytes(), eager: true }).unwrap();
                Ok(Disposition::Done)
            }
            Payload::Announced(_) => {
                let mut landing = self.landing.lock();
                landing.push(header);
                Ok(Disposition::Land { key: landing.len() as u64 - 1 })
            }
        }
    }

    fn landed(&self, key: u64, payload: Bytes) {
        let header = self.landing.lock()[usize::try_from(key).unwrap()].clone();
        self.told.send(Event::Message { header, payload, eager: false }).unwrap();
    }

    fn ended(&self, why: CloseReason) {
        // Fails only if the test has ended.
        let _ = self.told.send(Event::Ended(why));
    }
}

/// One end of a connection, with its recorded events.
pub(crate) struct EndOf {
    pub(crate) connection: Connection,
    pub(crate) events: Receiver<Event>,
}

pub(crate) fn recorder(hook: Option<Hook>) -> (Arc<Recorder>, Receiver<Event>) {
    let (told, events) = sync_channel(1 << 12);
    (Arc::new(Recorder { told, landing: Mutex::default(), hook }), events)
}

impl EndOf {
    pub(crate) fn next(&self) -> Event {
        self.events.recv_timeout(WAIT_TIMEOUT).expect("something happens soon")
    }

    pub(crate) fn opened(&self) -> Lanes {
        match self.next() {
            Event::Opened(lanes) => lanes,
            other => panic!("{other:?} instead of opened"),
        }
    }

    pub(crate) fn message(&self) -> (Bytes, Bytes, bool) {
        match self.next() {
            Event::Message { header, payload, eager } => (header, payload, eager),
            other => panic!("{other:?} instead of a message"),
        }
    }

    /// Discards messages until the connection ends.
    pub(crate) fn ended(&self) -> CloseReason {
        loop {
            if let Event::Ended(why) = self.next() {
                return why;
            }
        }
    }

    pub(crate) fn post(&self, header: impl Into<Bytes>, payload: impl Into<Bytes>) {
        self.connection.post(active_message(header, payload)).unwrap();
    }
}

pub(crate) fn active_message(header: impl Into<Bytes>, payload: impl Into<Bytes>) -> ActiveMessage {
    ActiveMessage { header: header.into(), payload: payload.into(), delivery: Delivery::Ordered, done: None }
}

/// Opens a peer worker of a fabric.
pub(crate) fn peer_worker(fabric: &Fabric) -> Result<PeerWorker> {
    block_on(fabric.peer_worker(WAIT_TIMEOUT))
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Identities of both ends, without their addresses.
pub(crate) struct Names {
    pub(crate) caller: ConnectionId,
    pub(crate) answerer: ConnectionId,
    pub(crate) token: Token,
}

impl Names {
    pub(crate) fn new() -> Self {
        Self { caller: ConnectionId::random(), answerer: ConnectionId::random(), token: Token::random() }
    }

    pub(crate) fn expect(&self, shared_memory: Option<WorkerPair>) -> Expect {
        Expect { id: self.answerer, token: self.token.clone(), peer: self.caller, shared_memory, within: WAIT_TIMEOUT }
    }

    pub(crate) fn connect(&self, target: Target) -> Connect {
        Connect { id: self.caller, token: self.token.clone(), peer: self.answerer, target, within: WAIT_TIMEOUT }
    }
}

/// Exchanges the bootstrap data of two ends in one process.
pub(crate) struct Meeting {
    pub(crate) names: Names,
    listener: Option<SocketAddr>,
    peer_workers: Option<(PeerWorker, PeerWorker)>,
}

impl Meeting {
    pub(crate) fn new(way: Way, caller: &Fabric, answerer: &Fabric) -> Self {
        let peer_workers =
            (way == Way::SharedMemory).then(|| (peer_worker(caller).unwrap(), peer_worker(answerer).unwrap()));
        Self { names: Names::new(), listener: answerer.listen_address(), peer_workers }
    }

    pub(crate) fn expect(&self) -> Expect {
        let peer_workers = self.peer_workers.as_ref();
        self.names.expect(
            peer_workers.map(|(here, there)| WorkerPair { local: there.clone(), remote: here.address().clone() }),
        )
    }

    pub(crate) fn connect(&self) -> Connect {
        self.names.connect(self.target(self.peer_workers.as_ref().map(|(here, _)| here.clone())))
    }

    /// Connects from another worker than the expected one.
    pub(crate) fn connect_from(&self, other: &Fabric) -> Connect {
        self.names.connect(self.target(self.peer_workers.as_ref().map(|_| peer_worker(other).unwrap())))
    }

    fn target(&self, here: Option<PeerWorker>) -> Target {
        match (here, &self.peer_workers) {
            (Some(peer_worker), Some((_, there))) => {
                Target::SharedMemory(WorkerPair { local: peer_worker, remote: there.address().clone() })
            }
            _ => Target::Network(self.listener.expect("it listens")),
        }
    }
}

/// Connects two fabrics, waits until both ends are open, and checks the lanes. Returns the calling end and the
/// answering end.
pub(crate) fn pair(way: Way, caller: &Fabric, answerer: &Fabric, hook: Option<Hook>) -> (EndOf, EndOf) {
    let meeting = Meeting::new(way, caller, answerer);
    let (recorder_there, events) = recorder(hook);
    let there = answerer.expect(meeting.expect(), recorder_there).unwrap();
    let there = EndOf { connection: there, events };
    let (recorder_here, events) = recorder(None);
    let here = caller.connect(meeting.connect(), recorder_here).unwrap();
    let here = EndOf { connection: here, events };
    way.check(&there.opened());
    way.check(&here.opened());
    (here, there)
}

/// Generates a unique payload. Its period is a prime number, so that misplaced parts are detected.
pub(crate) fn payload(len: usize, seed: usize) -> Bytes {
    let period: Vec<u8> = (0..251).map(|at: usize| (at.wrapping_mul(31) ^ seed) as u8).collect();
    let mut whole = period.repeat(len.div_ceil(251));
    whole.truncate(len);
    whole.into()
}
