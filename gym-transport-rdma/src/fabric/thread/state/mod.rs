//! State of the thread: connections and their endpoints, commands, timers and shutdown.

mod arrivals;
pub(crate) mod callbacks;
pub(crate) mod registrations;

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gym_core::{Code, Error};
use tokio::time::Instant;

use crate::fabric::handle::command::{Command, FabricShared, OpenRequest};
use crate::fabric::handle::connection::{ConnectionShared, connection_ended};
use crate::fabric::handle::events::{CloseReason, ConnectionEvents};
use crate::fabric::handle::message::{ActiveMessage, finish};
use crate::fabric::handle::peer_worker::PeerWorker;
use crate::fabric::handle::target::{Connect, Expect, Target, WorkerPair};
use crate::fabric::options::FabricOptions;
use crate::fabric::protocol::identity::ConnectionId;
use crate::fabric::protocol::prefix::{MessageKind, hello};
use crate::fabric::thread::operations::PendingOperations;
use crate::fabric::thread::peer::{ConnectionLimits, PeerClose, PeerConnection, Phase};
use crate::fabric::thread::peer_workers::PeerWorkers;
use crate::fabric::thread::peer_workers::slot::ClosedConnection;
use crate::fabric::thread::state::callbacks::{Callback, CallbackQueue};
use crate::fabric::thread::state::registrations::Registrations;
use crate::ucx::{Closing, Endpoint, Listener, Status, Worker};

/// Time for UCX to complete the operations of an aborted endpoint.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for an unwanted endpoint to connect before it is closed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for payloads that a peer announced before its `Close`; the peer keeps its own deadline.
pub(crate) const PEER_CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Everything that only the fabric's thread uses.
pub(crate) struct FabricState {
    pub(crate) options: FabricOptions,
    pub(crate) shared: Arc<FabricShared>,
    pub(crate) peers: HashMap<ConnectionId, PeerConnection>,
    /// Connections that have ended, but whose operations UCX must complete before `ended` is called.
    ending: Vec<EndingConnection>,
    lingering: Vec<LingeringEndpoint>,
    /// Endpoints that UCX is closing.
    pub(crate) closing: Vec<Closing>,
    /// Peers of the listener that have not shown a token.
    pub(crate) unidentified_peers: Vec<UnidentifiedPeer>,
    /// Serial number of the last endpoint.
    serial: u64,
    pub(crate) registrations: Registrations,
    /// Connections that failed while they could not be ended.
    pub(crate) broken: Vec<(ConnectionId, CloseReason)>,
    next_check: Instant,
    /// Grace of a requested shutdown.
    shutdown: Option<Duration>,
    ends_at: Option<Instant>,
    pub(crate) callbacks: Rc<CallbackQueue>,
    pub(crate) listener: Option<Rc<Listener>>,
    /// Worker for networks.
    pub(crate) worker: Rc<Worker>,
    pub(crate) peer_workers: PeerWorkers,
}

/// Mode in which an endpoint is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CloseMode {
    /// Abort: unsent messages may be dropped.
    Force,
    /// Both ends know that everything has arrived.
    Agreed,
    /// The last message must still reach the peer, which then closes.
    Linger,
}

/// An endpoint without a connection. Until the peer closes or its time is over, it sends its last message, or rejects
/// what the peer announced before the peer was notified.
pub(crate) struct LingeringEndpoint {
    pub(crate) serial: u64,
    endpoint: Endpoint,
    operations: Rc<PendingOperations>,
    /// The hello is not sent yet. The endpoint may be closed as soon as it is.
    connecting: bool,
    until: Instant,
}

impl LingeringEndpoint {
    /// Whether UCX has pending operations. Each of them, in either direction, holds a reference.
    fn has_operations(&self) -> bool {
        Rc::strong_count(&self.operations) > 1
    }

    fn has_connected(&self) -> bool {
        self.connecting && !self.has_operations()
    }
}

struct EndingConnection {
    peer: PeerConnection,
    why: CloseReason,
    until: Instant,
}

pub(crate) struct UnidentifiedPeer {
    pub(crate) endpoint: Endpoint,
    pub(crate) serial: u64,
    pub(crate) until: Instant,
}

impl FabricState {
    pub(crate) fn new(
        options: FabricOptions,
        shared: Arc<FabricShared>,
        registrations: Registrations,
        worker: Rc<Worker>,
        peer_workers: PeerWorkers,
        listener: Option<Rc<Listener>>,
        callbacks: Rc<CallbackQueue>,
    ) -> Self {
        Self {
            options,
            shared,
            peers: HashMap::new(),
            ending: Vec::new(),
            lingering: Vec::new(),
            closing: Vec::new(),
            unidentified_peers: Vec::new(),
            serial: 0,
            registrations,
            broken: Vec::new(),
            next_check: Instant::now(),
            shutdown: None,
            ends_at: None,
            callbacks,
            listener,
            worker,
            peer_workers,
        }
    }

    pub(crate) fn worker(&self) -> Rc<Worker> {
        Rc::clone(&self.worker)
    }

    pub(crate) fn command(&mut self, command: Command) {
        match command {
            Command::Open(open) => {
                let (request, connection, events) = *open;
                match request {
                    OpenRequest::Expect(expected, until) => self.expect(expected, until, connection, events),
                    OpenRequest::Connect(to, until) => self.connect(&to, until, connection, events),
                }
            }
            Command::OpenPeerWorker(within, reply) => {
                let opened =
                    if self.ends_at.is_none() { self.peer_workers.open(within) } else { Err(connection_ended()) };
                // If the caller was cancelled, dropping the worker releases it.
                let _ = reply.send(opened);
            }
            Command::ReleasePeerWorker(peer_worker) => self.peer_workers.release(peer_worker),
            Command::Post(id, message) => self.post(id, message),
            Command::Close(id, grace) => self.close(id, grace),
            // Takes effect after the other commands of this round, which it has overtaken in the urgent queue.
            Command::Shutdown(within) => self.shutdown = self.shutdown.or(Some(within)),
        }
    }

    fn expect(
        &mut self,
        expected: Expect,
        until: Instant,
        connection: Arc<ConnectionShared>,
        events: Arc<dyn ConnectionEvents>,
    ) {
        let limits = self.limits();
        let new = |address| {
            let phase = Phase::Expecting { token: expected.token, address };
            PeerConnection::new(connection, events, expected.peer, phase, until, limits)
        };
        let Some(shared_memory) = &expected.shared_memory else { return self.add(new(None)) };
        match self.peer_workers.take(&shared_memory.local, expected.id, &shared_memory.remote) {
            Ok(taken) => {
                let mut peer = new(Some(taken));
                peer.peer_worker = Some(shared_memory.local.id());
                self.add(peer);
            }
            Err(why) => self.refuse(new(None), &shared_memory.local, why),
        }
    }

    fn connect(
        &mut self,
        to: &Connect,
        until: Instant,
        connection: Arc<ConnectionShared>,
        events: Arc<dyn ConnectionEvents>,
    ) {
        let mut peer = PeerConnection::new(connection, events, to.peer, Phase::Calling, until, self.limits());
        let (serial, failed) = self.next_serial();
        let (endpoint, target) = match &to.target {
            Target::Network(address) => (Endpoint::to_socket(&self.worker, *address, failed), address.to_string()),
            // The peer's address may refer to other memory by now.
            Target::SharedMemory(WorkerPair { local: peer_worker, .. }) if Instant::now() >= until => {
                return self.refuse(peer, peer_worker, "it took too long to start connecting");
            }
            Target::SharedMemory(WorkerPair { local: peer_worker, remote: address }) => {
                match self.peer_workers.take(peer_worker, to.id, address) {
                    Ok((worker, address)) => {
                        peer.peer_worker = Some(peer_worker.id());
                        (Endpoint::to_worker(&worker, &address, failed), "a worker".to_owned())
                    }
                    Err(why) => return self.refuse(peer, peer_worker, why),
                }
            }
        };
        match endpoint {
            Ok(endpoint) => {
                peer.endpoint = Some(endpoint);
                peer.serial = serial;
                let header = hello(&to.token, to.id);
                peer.send(MessageKind::Hello, &header, Bytes::new(), None, None);
                self.add(peer);
            }
            Err(status) => {
                peer.shut();
                self.close_peer_worker(&mut peer);
                let error = Error::not_started(Code::Unavailable, format!("connect to {target}: {status}"));
                notify_end(&peer, CloseReason::Lost(error));
            }
        }
    }

    /// Ends a connection that cannot use its peer worker, and releases the worker.
    fn refuse(&mut self, mut peer: PeerConnection, peer_worker: &PeerWorker, why: &str) {
        peer.shut();
        self.peer_workers.release(peer_worker.id());
        let error = Error::not_started(Code::Unavailable, format!("connect from {peer_worker:?}: {why}"));
        notify_end(&peer, CloseReason::Lost(error));
    }

    fn limits(&self) -> ConnectionLimits {
        let FabricOptions { reorder_max, reorder_bytes_max, rendezvous_bytes, .. } = self.options;
        ConnectionLimits { reorder_max, reorder_bytes_max, rendezvous_bytes }
    }

    fn add(&mut self, mut peer: PeerConnection) {
        let id = peer.connection.id();
        if self.ends_at.is_some() || self.peers.contains_key(&id) {
            peer.shut();
            self.close_peer_worker(&mut peer);
            let why = if self.ends_at.is_some() {
                CloseReason::Closed
            } else {
                CloseReason::Lost(Error::invalid("this connection id is in use"))
            };
            self.ending.push(EndingConnection { peer, why, until: Instant::now() });
        } else {
            self.peers.insert(id, peer);
        }
    }

    /// Returns the serial number of a new endpoint, and the callback for its failure.
    pub(crate) fn next_serial(&mut self) -> (u64, impl Fn(Status) + 'static) {
        self.serial += 1;
        let (serial, callbacks) = (self.serial, Rc::clone(&self.callbacks));
        (serial, move |status| callbacks.push(Callback::Failed { serial, status }))
    }

    pub(crate) fn post(&mut self, id: ConnectionId, message: ActiveMessage) {
        let Some(peer) = self.peers.get_mut(&id) else { return finish(message.done, Err(connection_ended())) };
        let unsent_max = self.options.unsent_max;
        if peer.unsent() >= unsent_max {
            let reason = format!("the peer has not received {unsent_max} messages, which is the maximum");
            finish(message.done, Err(Error::not_started(Code::ResourceExhausted, reason.clone())));
            return self.fail(id, Error::unknown(Code::ResourceExhausted, reason));
        }
        let (registrations, shared_memory) = (&mut self.registrations, peer.peer_worker.is_some());
        peer.post(message, |payload| {
            if shared_memory {
                registrations.count(payload);
                return None;
            }
            registrations.of_payload(payload)
        });
    }

    fn close(&mut self, id: ConnectionId, grace: Duration) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match peer.phase {
            Phase::Open if !grace.is_zero() => {
                peer.send_control(MessageKind::Close);
                peer.phase = Phase::Closing { peer_close: PeerClose::NotReceived };
                peer.deadline = Some(Instant::now() + grace);
            }
            // The connection is closing already; the first grace applies.
            Phase::Closing { .. } | Phase::PeerClosing { .. } if !grace.is_zero() => {}
            _ => self.end(id, CloseReason::Closed, CloseMode::Force),
        }
    }

    /// Starts a requested shutdown.
    pub(crate) fn shut_down(&mut self) {
        let (Some(within), None) = (self.shutdown, self.ends_at) else { return };
        // Commands posted before the shutdown are still processed.
        for command in self.shared.queue.close() {
            self.command(command);
        }
        self.ends_at = Some(Instant::now() + within + ABORT_TIMEOUT);
        let ids: Vec<_> = self.peers.keys().copied().collect();
        for id in ids {
            self.close(id, within);
        }
        for unidentified in self.unidentified_peers.drain(..) {
            self.closing.push(unidentified.endpoint.close());
        }
        self.peer_workers.release_all();
        self.listener = None;
    }

    /// Whether a shutdown has completed or timed out.
    pub(crate) fn ended(&self, now: Instant) -> bool {
        self.ends_at.is_some_and(|at| now >= at || (self.peers.is_empty() && !self.is_closing(now)))
    }

    fn is_closing(&self, now: Instant) -> bool {
        !(self.ending.is_empty() && self.closing.is_empty() && self.lingering.is_empty())
            || self.peer_workers.is_awaited(now)
    }

    /// Whether a timer is pending.
    pub(crate) fn has_timers(&self, now: Instant) -> bool {
        self.ends_at.is_some()
            || self.is_closing(now)
            || !self.unidentified_peers.is_empty()
            || self.peers.values().any(|peer| peer.deadline.is_some())
    }

    /// Continues a close once the payloads that it waited for have arrived.
    pub(crate) fn settle(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if !peer.landing.is_over() {
            return;
        }
        let (Phase::Closing { peer_close } | Phase::PeerClosing { peer_close }) = &mut peer.phase else { return };
        if *peer_close == PeerClose::Received {
            *peer_close = PeerClose::Acknowledged;
            peer.send_control(MessageKind::Closed);
        }
        if matches!(peer.phase, Phase::PeerClosing { peer_close: PeerClose::Acknowledged })
            && peer.operations.is_empty()
        {
            self.end(id, CloseReason::ClosedByPeer, CloseMode::Linger);
        }
    }

    /// Fails the connection. It ends as soon as UCX has returned.
    pub(crate) fn fail(&mut self, id: ConnectionId, error: Error) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if !matches!(peer.phase, Phase::Broken) {
            peer.phase = Phase::Broken;
            self.broken.push((id, CloseReason::Lost(error)));
        }
    }

    /// Removes the connection. `ended` is called when UCX has completed its operations, or will not.
    pub(crate) fn end(&mut self, id: ConnectionId, why: CloseReason, how: CloseMode) {
        let Some(mut peer) = self.peers.remove(&id) else { return };
        peer.shut();
        let now = Instant::now();
        if peer.peer_worker.is_some() {
            // The peer of a connection that was never open may not be ours at all.
            if how == CloseMode::Force && !matches!(peer.phase, Phase::Calling) && peer.endpoint.is_some() {
                // UCX does not notify the peer.
                peer.send_control(MessageKind::Aborted);
            }
            self.close_peer_worker(&mut peer);
            // Operations to a stopped peer do not complete, so they are not waited for.
            return self.ending.push(EndingConnection { peer, why, until: now });
        }
        // UCX 1.13 aborts the process if an endpoint is closed at certain moments of its connection setup.
        let connecting = matches!(peer.phase, Phase::Calling) && !peer.operations.is_empty();
        if let Some(endpoint) = peer.endpoint.take() {
            match how {
                CloseMode::Force if connecting => self.linger(endpoint, &peer, now + CONNECT_TIMEOUT),
                CloseMode::Force | CloseMode::Agreed => self.closing.push(endpoint.close()),
                CloseMode::Linger => self.linger(endpoint, &peer, now + ABORT_TIMEOUT),
            }
        }
        let until = if connecting { now } else { now + ABORT_TIMEOUT };
        self.ending.push(EndingConnection { peer, why, until });
    }

    /// Hands the remaining state of a connection over shared memory to its peer worker.
    fn close_peer_worker(&mut self, peer: &mut PeerConnection) {
        let Some(peer_worker) = peer.peer_worker else { return };
        let was_open = !matches!(peer.phase, Phase::Calling | Phase::Expecting { .. });
        let closed = ClosedConnection {
            endpoint: peer.endpoint.take(),
            peer: peer.id,
            operations: Rc::clone(&peer.operations),
            was_open,
        };
        self.peer_workers.begin_close(peer_worker, closed);
    }

    fn linger(&mut self, endpoint: Endpoint, peer: &PeerConnection, until: Instant) {
        let connecting = matches!(peer.phase, Phase::Calling);
        let (serial, operations) = (peer.serial, Rc::clone(&peer.operations));
        self.lingering.push(LingeringEndpoint { serial, endpoint, operations, connecting, until });
    }

    /// Closes the lingering endpoints for which `enough` holds. Returns whether there was one.
    pub(crate) fn stop_lingering(&mut self, enough: impl Fn(&LingeringEndpoint) -> bool) -> bool {
        let mut found = false;
        for lingering in self.lingering.extract_if(.., |lingering| enough(lingering)) {
            found = true;
            self.closing.push(lingering.endpoint.close());
        }
        found
    }

    pub(crate) fn finish_ended(&mut self) {
        if self.ending.is_empty() {
            return;
        }
        let now = Instant::now();
        for EndingConnection { peer, why, .. } in
            self.ending.extract_if(.., |ending| ending.peer.operations.is_empty() || now >= ending.until)
        {
            peer.operations.fail_all(|| Error::unknown(Code::Unavailable, "the connection ended before this was sent"));
            notify_end(&peer, why);
        }
    }

    /// Makes [`FabricState::check_timers`] run in this round.
    pub(crate) fn check_now(&mut self) {
        self.next_check = Instant::now();
    }

    /// Enforces deadlines, and drops registrations that the pool has retired. Runs every 5 ms.
    pub(crate) fn check_timers(&mut self, now: Instant) {
        if now < self.next_check {
            return;
        }
        self.next_check = now + Duration::from_millis(5);
        let over =
            |(id, peer): (&ConnectionId, &PeerConnection)| peer.deadline.is_some_and(|at| now >= at).then_some(*id);
        let over: Vec<_> = self.peers.iter().filter_map(over).collect();
        for id in over {
            self.deadline_passed(id);
        }
        // These closes waited only for their own sends.
        let leaving = |(id, peer): (&ConnectionId, &PeerConnection)| {
            matches!(peer.phase, Phase::PeerClosing { peer_close: PeerClose::Acknowledged }).then_some(*id)
        };
        let leaving: Vec<_> = self.peers.iter().filter_map(leaving).collect();
        for id in leaving {
            self.settle(id);
        }
        for unidentified in self.unidentified_peers.extract_if(.., |unidentified| now >= unidentified.until) {
            self.shared.counters.unidentified_refused.add(1);
            self.closing.push(unidentified.endpoint.close());
        }
        for id in self.peer_workers.check_timers(now) {
            self.peer_lost(id, "the peer's process has ended");
        }
        self.stop_lingering(|lingering| now >= lingering.until || lingering.has_connected());
        self.registrations.tidy();
    }

    fn deadline_passed(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get(&id) else { return };
        let unavailable = |what: &str| CloseReason::Lost(Error::not_started(Code::Unavailable, what.to_owned()));
        let why = match peer.phase {
            Phase::Expecting { .. } => unavailable("the peer did not connect in time"),
            Phase::Calling => unavailable("the peer did not respond in time, or does not expect this connection"),
            Phase::Open | Phase::Broken => return,
            Phase::Closing { .. } => CloseReason::Closed,
            Phase::PeerClosing { .. } if peer.landing.is_over() => CloseReason::ClosedByPeer,
            Phase::PeerClosing { .. } => CloseReason::Lost(Error::unknown(
                Code::Unavailable,
                "the peer disconnected before its last payloads arrived",
            )),
        };
        self.end(id, why, CloseMode::Force);
    }

    /// Closes worker, memory and context, in this order. Returns whether everything was released; the rest is leaked.
    pub(crate) fn destroy(mut self) -> bool {
        let ids: Vec<_> = self.peers.keys().copied().collect();
        for id in ids {
            self.end(id, CloseReason::Closed, CloseMode::Force);
        }
        for _ in 0..8 {
            self.worker.progress();
            for worker in self.peer_workers.workers().borrow().iter() {
                worker.progress();
            }
        }
        self.closing.retain_mut(|closing| !closing.ended());
        self.ending.iter_mut().for_each(|ending| ending.until = Instant::now());
        self.finish_ended();
        while self.callbacks.pop().is_some() {}
        let Self { closing, unidentified_peers, lingering, listener, registrations, worker, peer_workers, .. } = self;
        drop((unidentified_peers, lingering, listener));
        let workers_clean = peer_workers.destroy();
        let mut clean = closing.is_empty();
        std::mem::forget(closing);
        // A pending operation keeps the worker alive.
        clean &= Rc::strong_count(&worker) == 1;
        drop(worker);
        if clean {
            registrations.close();
        } else {
            registrations.leak();
        }
        clean && workers_clean
    }
}

fn notify_end(peer: &PeerConnection, why: CloseReason) {
    if peer.notify(|events| events.ended(why)).is_err() {
        tracing::error!("connection close callback panicked");
    }
}
