//! Measures active messages between the progress threads of two processes: the performance of UCX through the fabric, without
//! tasks.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use gym_core::testing::figures::RoundTrips;
use gym_transport_rdma::fabric::{
    ActiveMessage, CloseReason, Connect, Connection, ConnectionEvents, ConnectionId, Delivery, Disposition, Driver,
    Expect, Fabric, Lanes, Payload, PeerWorker, Target, Token, WorkerPair,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::Way;

/// The argument that makes this program the answering process.
pub(crate) const SERVE: &str = "serve-active-messages";
/// The limit after which a measurement has failed.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Messages up to this size are echoed.
const ECHO_BYTES_MAX: usize = 64;

/// The data that the two processes exchange before they connect, each as a line of JSON.
#[derive(Serialize, Deserialize)]
struct Greeting {
    caller: u64,
    answerer: u64,
    token: [u8; 32],
    worker: Vec<u8>,
    listens: Option<std::net::SocketAddr>,
}

fn open(way: Way, driver: Driver, listen: bool) -> Result<Fabric> {
    let listen = (listen && way == Way::Tcp).then(|| ([127, 0, 0, 1], 0).into());
    let mut options = way.fabric();
    options.driver = driver;
    options.listen = listen;
    Ok(Fabric::open(options)?)
}

/// Echoes short messages, and receives long ones.
#[derive(Default)]
struct Answering(OnceLock<Connection>);

impl ConnectionEvents for Answering {
    fn opened(&self, connection: &Connection, _: &Lanes) {
        let _ = self.0.set(connection.clone());
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> gym_core::Result<Disposition> {
        match payload {
            Payload::Eager(bytes) => {
                if let Some(connection) = self.0.get().filter(|_| bytes.as_slice().len() <= ECHO_BYTES_MAX) {
                    connection.post(active_message(Bytes::copy_from_slice(header), bytes.into_bytes()))?;
                }
                Ok(Disposition::Done)
            }
            Payload::Announced(_) => Ok(Disposition::Land { key: 0 }),
        }
    }

    fn landed(&self, _: u64, _: Bytes) {}

    fn ended(&self, _: CloseReason) {}
}

/// Creates a dedicated worker for the other process over shared memory.
fn peer_worker(way: Way, fabric: &Fabric) -> Result<Option<PeerWorker>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    Ok(if way == Way::SharedMemory { Some(runtime.block_on(fabric.peer_worker(WAIT_TIMEOUT))?) } else { None })
}

fn active_message(header: Bytes, payload: Bytes) -> ActiveMessage {
    ActiveMessage { header, payload, delivery: Delivery::Ordered, done: None }
}

/// Runs the answering process.
pub(crate) fn serve(way: Way, busy: bool) -> Result<()> {
    let fabric = open(way, driver(busy), true)?;
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let said: Greeting = serde_json::from_str(&line)?;
    let peer_worker = peer_worker(way, &fabric)?;
    let expected = Expect {
        id: ConnectionId(said.answerer),
        token: Token(said.token),
        peer: ConnectionId(said.caller),
        shared_memory: peer_worker
            .clone()
            .map(|peer_worker| WorkerPair { local: peer_worker, remote: said.worker.clone().into() }),
        within: WAIT_TIMEOUT,
    };
    fabric.expect(expected, Arc::new(Answering::default()))?;
    let worker = peer_worker.map(|peer_worker| peer_worker.address().to_vec()).unwrap_or_default();
    let said = Greeting { worker, listens: fabric.listen_address(), ..said };
    println!("{}", serde_json::to_string(&said)?);
    input.read_to_end(&mut Vec::new())?;
    ensure!(fabric.shutdown(WAIT_TIMEOUT), "the fabric did not end in time");
    Ok(())
}

fn driver(busy: bool) -> Driver {
    if busy { Driver::Busy } else { Driver::default() }
}

/// The current measurement of the calling process.
enum Work {
    Nothing,
    Trips { times: Vec<Duration>, sent: Instant, left: usize },
    Bulk { segment: Bytes, left: usize, under_way: usize, window: usize },
}

struct Calling {
    me: std::sync::Weak<Self>,
    work: Mutex<Work>,
    told: SyncSender<Vec<Duration>>,
    opened: SyncSender<Connection>,
    connection: OnceLock<Connection>,
}

impl Calling {
    /// Keeps the window full. Runs on the fabric's thread after each completion.
    fn more_bulk(&self, done: bool) {
        let mut post = Vec::new();
        let mut work = self.work.lock();
        if let Work::Bulk { segment, left, under_way, window } = &mut *work {
            *under_way -= usize::from(done);
            while *left > 0 && *under_way < *window {
                *left -= 1;
                *under_way += 1;
                let me = std::sync::Weak::clone(&self.me);
                let done = move |_| {
                    if let Some(me) = me.upgrade() {
                        me.more_bulk(true);
                    }
                };
                post.push(ActiveMessage {
                    done: Some(Box::new(done)),
                    ..active_message(Bytes::new(), segment.clone())
                });
            }
            if *left == 0 && *under_way == 0 {
                let _ = self.told.try_send(Vec::new());
            }
        }
        drop(work);
        for message in post {
            if let Some(connection) = self.connection.get()
                && let Err(error) = connection.post(message)
            {
                eprintln!("a message was refused: {error}");
            }
        }
    }
}

impl ConnectionEvents for Calling {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        println!("# active messages over {lanes}");
        let _ = self.connection.set(connection.clone());
        let _ = self.opened.try_send(connection.clone());
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> gym_core::Result<Disposition> {
        let Payload::Eager(bytes) = payload else { return Ok(Disposition::Done) };
        let mut work = self.work.lock();
        if let Work::Trips { times, sent, left } = &mut *work {
            let now = Instant::now();
            times.push(now - *sent);
            *sent = now;
            *left -= 1;
            if *left == 0 {
                let _ = self.told.try_send(std::mem::take(times));
            } else if let Some(connection) = self.connection.get() {
                connection.post(active_message(Bytes::copy_from_slice(header), bytes.into_bytes()))?;
            }
        }
        Ok(Disposition::Done)
    }

    fn landed(&self, _: u64, _: Bytes) {}

    fn ended(&self, _: CloseReason) {}
}

/// The calling process and its peer, connected.
pub(crate) struct Pair {
    child: Child,
    input: Option<ChildStdin>,
    fabric: Fabric,
    calling: Arc<Calling>,
    connection: Connection,
    done: Receiver<Vec<Duration>>,
}

impl Pair {
    pub(crate) fn start(way: Way, busy: bool) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([SERVE, way.name(), if busy { "busy" } else { "hybrid" }])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().context("no input")?;
        let fabric = open(way, driver(busy), false)?;
        let (caller, answerer, token) = (ConnectionId::random(), ConnectionId::random(), Token::random());
        let peer_worker = peer_worker(way, &fabric)?;
        let worker = peer_worker.as_ref().map(|peer_worker| peer_worker.address().to_vec()).unwrap_or_default();
        let said = Greeting { caller: caller.0, answerer: answerer.0, token: token.0, worker, listens: None };
        writeln!(input, "{}", serde_json::to_string(&said)?)?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        let said: Greeting = serde_json::from_str(&line).context("the answering process ended")?;
        let target = match (said.listens, peer_worker) {
            (_, Some(peer_worker)) => {
                Target::SharedMemory(WorkerPair { local: peer_worker, remote: said.worker.into() })
            }
            (Some(address), None) => Target::Network(address),
            (None, None) => bail!("the answering process listens nowhere"),
        };
        let (told, done) = sync_channel(1);
        let (opened, is_open) = sync_channel(1);
        let calling = Arc::new_cyclic(|me| Calling {
            me: std::sync::Weak::clone(me),
            work: Mutex::new(Work::Nothing),
            told,
            opened,
            connection: OnceLock::new(),
        });
        let target = Connect { id: caller, token, peer: answerer, target, within: WAIT_TIMEOUT };
        fabric.connect(target, Arc::clone(&calling) as Arc<dyn ConnectionEvents>)?;
        let connection = is_open.recv_timeout(WAIT_TIMEOUT).context("the fabrics did not meet")?;
        Ok(Self { child, input: Some(input), fabric, calling, connection, done })
    }

    /// Allocates memory of the fabric, because `ucx_perftest` sends from registered memory.
    pub(crate) fn segment(&self, bytes: usize) -> Result<Bytes> {
        let mut buffer = self.fabric.pool().take(bytes)?;
        buffer.fill(7);
        Ok(buffer.freeze())
    }

    /// Measures this number of round trips with eight bytes each.
    pub(crate) fn round_trips(&self, trips: usize) -> Result<RoundTrips> {
        let warm_up = trips / 10;
        let sent = Instant::now();
        *self.calling.work.lock() =
            Work::Trips { times: Vec::with_capacity(trips + warm_up), sent, left: trips + warm_up };
        self.connection.post(active_message(Bytes::from_static(b"12345678"), Bytes::from_static(b"abcdefgh")))?;
        let times = self.done.recv_timeout(WAIT_TIMEOUT).context("a message did not come back")?;
        *self.calling.work.lock() = Work::Nothing;
        Ok(RoundTrips::of(times[warm_up..].to_vec()))
    }

    /// Returns the bytes per second in one direction, always from the same memory, with `window` messages in flight.
    pub(crate) fn bandwidth(&self, segment: &Bytes, messages: usize, window: usize) -> Result<f64> {
        let mut began = Instant::now();
        for count in [3, messages] {
            began = Instant::now();
            *self.calling.work.lock() = Work::Bulk { segment: segment.clone(), left: count, under_way: 0, window };
            self.calling.more_bulk(false);
            self.done.recv_timeout(WAIT_TIMEOUT).context("messages were not done")?;
        }
        *self.calling.work.lock() = Work::Nothing;
        Ok((messages * segment.len()) as f64 / began.elapsed().as_secs_f64())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.connection.close(Duration::from_secs(1));
        drop(self.input.take());
        if let Err(error) = self.child.wait() {
            eprintln!("the answering process: {error}");
        }
        if !self.fabric.shutdown(WAIT_TIMEOUT) {
            eprintln!("the fabric did not end in time");
        }
    }
}
