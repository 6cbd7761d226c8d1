//! Everything that the thread knows, and what it does with commands and with the time. What it does with arrivals is in
//! `arrivals`.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gym_core::{Code, Error};
use tokio::time::Instant;

use super::berth::{Berth, Berths, Left};
use super::inbox::{Inbox, Incoming};
use super::peer::{Goodbye, Limits, Peer, Phase, Sending, ended_before, finish};
use super::registered::Registered;
use super::wire::{Kind, hello};
use super::{
    Alongside, Command, Connect, ConnectionId, End, Expect, FabricOptions, Link, Opening, Parcel, PeerEvents, Shared,
    Target,
};
use crate::ucx::{Closing, Endpoint, Listener, Status, Worker};

/// How long UCX may take to end the operations of an endpoint that is broken off.
const BREAK_OFF_WITHIN: Duration = Duration::from_secs(1);
/// How long an endpoint that nobody wants any more may take to connect before it is closed.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// How long what a peer announced before its goodbye may still take; it keeps a deadline of its own for that.
pub(super) const LEAVE_WITHIN: Duration = Duration::from_secs(60);

/// See the module.
pub(super) struct State {
    pub(super) options: FabricOptions,
    pub(super) shared: Arc<Shared>,
    pub(super) peers: HashMap<ConnectionId, Peer>,
    /// Connections that are over, whose operations UCX has still to end before `ended` is told.
    ending: Vec<Ending>,
    lingering: Vec<Lingering>,
    /// Endpoints that are being closed.
    pub(super) closing: Vec<Closing>,
    /// Came through the listener and have not said who they are.
    pub(super) strangers: Vec<Stranger>,
    /// The next endpoint's.
    serial: u64,
    pub(super) registered: Registered,
    /// Connections in which something went wrong while they could not be ended.
    pub(super) broken: Vec<(ConnectionId, End)>,
    next_check: Instant,
    /// A shutdown was asked for, within this.
    shutdown: Option<Duration>,
    ends_at: Option<Instant>,
    pub(super) inbox: Rc<Inbox>,
    pub(super) listener: Option<Rc<Listener>>,
    /// Of the networks.
    pub(super) worker: Rc<Worker>,
    pub(super) berths: Berths,
}

/// How an endpoint ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// It is broken off: what it has not sent may be thrown away.
    Force,
    /// Both ends know that everything has come.
    Done,
    /// The last message is still to reach the peer, which then closes.
    Linger,
}

/// An endpoint without a connection, which still sends its last message, or refuses what the peer announced before it heard
/// of the end: until the peer closes, or its time is over.
pub(super) struct Lingering {
    pub(super) serial: u64,
    endpoint: Endpoint,
    sending: Rc<Sending>,
    /// Its hello has not gone out: it may be closed as soon as it has.
    connecting: bool,
    until: Instant,
}

impl Lingering {
    /// Each operation that UCX has not ended, in either direction, holds a reference.
    fn has_operations(&self) -> bool {
        Rc::strong_count(&self.sending) > 1
    }

    fn has_connected(&self) -> bool {
        self.connecting && !self.has_operations()
    }
}

struct Ending {
    peer: Peer,
    why: End,
    until: Instant,
}

pub(super) struct Stranger {
    pub(super) endpoint: Endpoint,
    pub(super) serial: u64,
    pub(super) until: Instant,
}

impl State {
    pub(super) fn new(
        options: FabricOptions,
        shared: Arc<Shared>,
        registered: Registered,
        worker: Rc<Worker>,
        berths: Berths,
        listener: Option<Rc<Listener>>,
        inbox: Rc<Inbox>,
    ) -> Self {
        Self {
            options,
            shared,
            peers: HashMap::new(),
            ending: Vec::new(),
            lingering: Vec::new(),
            closing: Vec::new(),
            strangers: Vec::new(),
            serial: 0,
            registered,
            broken: Vec::new(),
            next_check: Instant::now(),
            shutdown: None,
            ends_at: None,
            inbox,
            listener,
            worker,
            berths,
        }
    }

    pub(super) fn worker(&self) -> Rc<Worker> {
        Rc::clone(&self.worker)
    }

    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Open(opening) => {
                let (opening, link, events) = *opening;
                match opening {
                    Opening::Expect(expected, until) => self.expect(expected, until, link, events),
                    Opening::Connect(to, until) => self.connect(&to, until, link, events),
                }
            }
            Command::Berth(within, told) => {
                let opened = if self.ends_at.is_none() { self.berths.open(within) } else { Err(ended_before()) };
                // Whoever asked may be gone: then it is given up as it is dropped.
                let _ = told.send(opened);
            }
            Command::GiveUp(berth) => self.berths.give_up(berth),
            Command::Post(id, parcel) => self.post(id, parcel),
            Command::Close(id, grace) => self.close(id, grace),
            // Acted on behind the commands that came in the same round: this one has overtaken them.
            Command::Shutdown(within) => self.shutdown = self.shutdown.or(Some(within)),
        }
    }

    fn expect(&mut self, expected: Expect, until: Instant, link: Arc<Link>, events: Arc<dyn PeerEvents>) {
        let limits = self.limits();
        let new = |address| {
            let phase = Phase::Expecting { token: expected.token, address };
            Peer::new(link, events, expected.peer, phase, until, limits)
        };
        let Some(alongside) = &expected.alongside else { return self.add(new(None)) };
        match self.berths.take(&alongside.berth, expected.id, &alongside.peer) {
            Ok(taken) => {
                let mut peer = new(Some(taken));
                peer.berth = Some(alongside.berth.id());
                self.add(peer);
            }
            Err(why) => self.refuse(new(None), &alongside.berth, why),
        }
    }

    fn connect(&mut self, to: &Connect, until: Instant, link: Arc<Link>, events: Arc<dyn PeerEvents>) {
        let mut peer = Peer::new(link, events, to.peer, Phase::Calling, until, self.limits());
        let (serial, failed) = self.next_serial();
        let (endpoint, whom) = match &to.target {
            Target::Socket(address) => (Endpoint::to_socket(&self.worker, *address, failed), address.to_string()),
            // The peer's address may name something else by now.
            Target::Alongside(Alongside { berth, .. }) if Instant::now() >= until => {
                return self.refuse(peer, berth, "it took too long until here");
            }
            Target::Alongside(Alongside { berth, peer: address }) => match self.berths.take(berth, to.id, address) {
                Ok((worker, address)) => {
                    peer.berth = Some(berth.id());
                    (Endpoint::to_worker(&worker, &address, failed), "a worker".to_owned())
                }
                Err(why) => return self.refuse(peer, berth, why),
            },
        };
        match endpoint {
            Ok(endpoint) => {
                peer.endpoint = Some(endpoint);
                peer.serial = serial;
                let header = hello(&to.token, to.id);
                peer.send(Kind::Hello, &header, Bytes::new(), None, None);
                self.add(peer);
            }
            Err(status) => {
                peer.shut();
                self.leave_berth(&mut peer);
                let error = Error::not_started(Code::Unavailable, format!("connect to {whom}: {status}"));
                tell_end(&peer, End::Lost(error));
            }
        }
    }

    /// A connection cannot have this berth, which nobody else will want either.
    fn refuse(&mut self, mut peer: Peer, berth: &Berth, why: &str) {
        peer.shut();
        self.berths.give_up(berth.id());
        let error = Error::not_started(Code::Unavailable, format!("connect from {berth:?}: {why}"));
        tell_end(&peer, End::Lost(error));
    }

    fn limits(&self) -> Limits {
        let FabricOptions { held_max, held_bytes_max, rendezvous_bytes, .. } = self.options;
        Limits { held_max, held_bytes_max, rendezvous_bytes }
    }

    fn add(&mut self, mut peer: Peer) {
        let id = peer.link.id();
        if self.ends_at.is_some() || self.peers.contains_key(&id) {
            peer.shut();
            self.leave_berth(&mut peer);
            let why = if self.ends_at.is_some() {
                End::Closed
            } else {
                End::Lost(Error::invalid("this connection id is in use"))
            };
            self.ending.push(Ending { peer, why, until: Instant::now() });
        } else {
            self.peers.insert(id, peer);
        }
    }

    /// The name of a new endpoint, and what it calls when it fails.
    pub(super) fn next_serial(&mut self) -> (u64, impl Fn(Status) + 'static) {
        self.serial += 1;
        let (serial, inbox) = (self.serial, Rc::clone(&self.inbox));
        (serial, move |status| inbox.push(Incoming::Failed { serial, status }))
    }

    pub(super) fn post(&mut self, id: ConnectionId, parcel: Parcel) {
        let Some(peer) = self.peers.get_mut(&id) else { return finish(parcel.done, Err(ended_before())) };
        let unsent_max = self.options.unsent_max;
        if peer.unsent() >= unsent_max {
            let said = format!("{unsent_max} parcels wait for a peer that does not take them");
            finish(parcel.done, Err(Error::not_started(Code::ResourceExhausted, said.clone())));
            return self.break_off(id, Error::unknown(Code::ResourceExhausted, said));
        }
        let (registered, alongside) = (&mut self.registered, peer.berth.is_some());
        peer.post(parcel, |payload| {
            if alongside {
                registered.count(payload);
                return None;
            }
            registered.of_payload(payload)
        });
    }

    fn close(&mut self, id: ConnectionId, grace: Duration) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match peer.phase {
            Phase::Open if !grace.is_zero() => {
                peer.say(Kind::Bye);
                peer.phase = Phase::Closing { peer: Goodbye::NotYet };
                peer.deadline = Some(Instant::now() + grace);
            }
            // It is ending already, and may take as long as it was given.
            Phase::Closing { .. } | Phase::Left { .. } if !grace.is_zero() => {}
            _ => self.end(id, End::Closed, How::Force),
        }
    }

    /// Begins to shut down, when that was asked for.
    pub(super) fn shut_down(&mut self) {
        let (Some(within), None) = (self.shutdown, self.ends_at) else { return };
        // What was posted before is still to be sent.
        for command in self.shared.queue.close() {
            self.command(command);
        }
        self.ends_at = Some(Instant::now() + within + BREAK_OFF_WITHIN);
        let ids: Vec<_> = self.peers.keys().copied().collect();
        for id in ids {
            self.close(id, within);
        }
        for stranger in self.strangers.drain(..) {
            self.closing.push(stranger.endpoint.close());
        }
        self.berths.give_up_all();
        self.listener = None;
    }

    /// Whether a shutdown has come to its end, or its time has.
    pub(super) fn ended(&self, now: Instant) -> bool {
        self.ends_at.is_some_and(|at| now >= at || (self.peers.is_empty() && !self.is_closing(now)))
    }

    fn is_closing(&self, now: Instant) -> bool {
        !(self.ending.is_empty() && self.closing.is_empty() && self.lingering.is_empty()) || self.berths.is_awaited(now)
    }

    /// Whether something is to happen at a certain time.
    pub(super) fn has_timers(&self, now: Instant) -> bool {
        self.ends_at.is_some()
            || self.is_closing(now)
            || !self.strangers.is_empty()
            || self.peers.values().any(|peer| peer.deadline.is_some())
    }

    /// Goes on with a goodbye when what it waited for has come.
    pub(super) fn settle(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if !peer.landing.is_over() {
            return;
        }
        let (Phase::Closing { peer: goodbye } | Phase::Left { peer: goodbye }) = &mut peer.phase else { return };
        if *goodbye == Goodbye::Said {
            *goodbye = Goodbye::Answered;
            peer.say(Kind::Gone);
        }
        if matches!(peer.phase, Phase::Left { peer: Goodbye::Answered }) && peer.sending.is_empty() {
            self.end(id, End::ClosedByPeer, How::Linger);
        }
    }

    /// Ends it with an error, when UCX has returned.
    pub(super) fn break_off(&mut self, id: ConnectionId, error: Error) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if !matches!(peer.phase, Phase::Broken) {
            peer.phase = Phase::Broken;
            self.broken.push((id, End::Lost(error)));
        }
    }

    /// Takes it out. `ended` is told when UCX has ended its operations, or will not.
    pub(super) fn end(&mut self, id: ConnectionId, why: End, how: How) {
        let Some(mut peer) = self.peers.remove(&id) else { return };
        peer.shut();
        let now = Instant::now();
        if peer.berth.is_some() {
            // One that was never open may be no peer of ours at all.
            if how == How::Force && !matches!(peer.phase, Phase::Calling) && peer.endpoint.is_some() {
                // UCX does not tell the peer, so we do.
                peer.say(Kind::Broken);
            }
            self.leave_berth(&mut peer);
            // Operations to a peer that stands still do not end: not waited for.
            return self.ending.push(Ending { peer, why, until: now });
        }
        // UCX 1.13 gives the process up when an endpoint is closed in certain moments of its connecting.
        let connecting = matches!(peer.phase, Phase::Calling) && !peer.sending.is_empty();
        if let Some(endpoint) = peer.endpoint.take() {
            match how {
                How::Force if connecting => self.linger(endpoint, &peer, now + CONNECT_WITHIN),
                How::Force | How::Done => self.closing.push(endpoint.close()),
                How::Linger => self.linger(endpoint, &peer, now + BREAK_OFF_WITHIN),
            }
        }
        let until = if connecting { now } else { now + BREAK_OFF_WITHIN };
        self.ending.push(Ending { peer, why, until });
    }

    /// What a connection over shared memory leaves behind goes with its berth.
    fn leave_berth(&mut self, peer: &mut Peer) {
        let Some(berth) = peer.berth else { return };
        let was_open = !matches!(peer.phase, Phase::Calling | Phase::Expecting { .. });
        let left = Left { endpoint: peer.endpoint.take(), peer: peer.id, sending: Rc::clone(&peer.sending), was_open };
        self.berths.leave(berth, left);
    }

    fn linger(&mut self, endpoint: Endpoint, peer: &Peer, until: Instant) {
        let connecting = matches!(peer.phase, Phase::Calling);
        let (serial, sending) = (peer.serial, Rc::clone(&peer.sending));
        self.lingering.push(Lingering { serial, endpoint, sending, connecting, until });
    }

    /// Closes endpoints that lingered long enough. Returns whether there was one.
    pub(super) fn stop_lingering(&mut self, enough: impl Fn(&Lingering) -> bool) -> bool {
        let mut found = false;
        for lingering in self.lingering.extract_if(.., |lingering| enough(lingering)) {
            found = true;
            self.closing.push(lingering.endpoint.close());
        }
        found
    }

    pub(super) fn finish_ended(&mut self) {
        if self.ending.is_empty() {
            return;
        }
        let now = Instant::now();
        for Ending { peer, why, .. } in
            self.ending.extract_if(.., |ending| ending.peer.sending.is_empty() || now >= ending.until)
        {
            peer.sending.give_up(|| Error::unknown(Code::Unavailable, "the connection ended before this was sent"));
            tell_end(&peer, why);
        }
    }

    /// Has the time kept in this round, whatever was kept before.
    pub(super) fn check_now(&mut self) {
        self.next_check = Instant::now();
    }

    /// Keeps deadlines, and gives up registrations that the pool has no use for.
    pub(super) fn keep_time(&mut self, now: Instant) {
        if now < self.next_check {
            return;
        }
        self.next_check = now + Duration::from_millis(5);
        let over = |(id, peer): (&ConnectionId, &Peer)| peer.deadline.is_some_and(|at| now >= at).then_some(*id);
        let over: Vec<_> = self.peers.iter().filter_map(over).collect();
        for id in over {
            self.too_late(id);
        }
        // A goodbye that waited for its own sends only.
        let leaving = |(id, peer): (&ConnectionId, &Peer)| {
            matches!(peer.phase, Phase::Left { peer: Goodbye::Answered }).then_some(*id)
        };
        let leaving: Vec<_> = self.peers.iter().filter_map(leaving).collect();
        for id in leaving {
            self.settle(id);
        }
        for stranger in self.strangers.extract_if(.., |stranger| now >= stranger.until) {
            self.shared.counters.refused_strangers.add(1);
            self.closing.push(stranger.endpoint.close());
        }
        for id in self.berths.keep_time(now) {
            self.lose(id, "the peer's process has ended");
        }
        self.stop_lingering(|lingering| now >= lingering.until || lingering.has_connected());
        self.registered.tidy();
    }

    fn too_late(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get(&id) else { return };
        let unavailable = |what: &str| End::Lost(Error::not_started(Code::Unavailable, what.to_owned()));
        let why = match peer.phase {
            Phase::Expecting { .. } => unavailable("the peer did not come in time"),
            Phase::Calling => unavailable("the peer did not answer in time, or does not expect us"),
            Phase::Open | Phase::Broken => return,
            Phase::Closing { .. } => End::Closed,
            Phase::Left { .. } if peer.landing.is_over() => End::ClosedByPeer,
            Phase::Left { .. } => {
                End::Lost(Error::unknown(Code::Unavailable, "the peer left before its last payloads had come"))
            }
        };
        self.end(id, why, How::Force);
    }

    /// The last: worker, memory and context, in this order. Returns whether everything could be given back; what could
    /// not is leaked.
    pub(super) fn give_back(mut self) -> bool {
        let ids: Vec<_> = self.peers.keys().copied().collect();
        for id in ids {
            self.end(id, End::Closed, How::Force);
        }
        for _ in 0..8 {
            self.worker.progress();
            for worker in self.berths.workers().borrow().iter() {
                worker.progress();
            }
        }
        self.closing.retain_mut(|closing| !closing.ended());
        self.ending.iter_mut().for_each(|ending| ending.until = Instant::now());
        self.finish_ended();
        while self.inbox.pop().is_some() {}
        let Self { closing, strangers, lingering, listener, registered, worker, berths, .. } = self;
        drop((strangers, lingering, listener));
        let berths_clean = berths.give_back();
        let mut clean = closing.is_empty();
        std::mem::forget(closing);
        // An operation that has not ended keeps the worker.
        clean &= Rc::strong_count(&worker) == 1;
        drop(worker);
        if clean {
            registered.give_back();
        } else {
            registered.leak();
        }
        clean && berths_clean
    }
}

fn tell_end(peer: &Peer, why: End) {
    if peer.tell(|events| events.ended(why)).is_err() {
        tracing::error!("what was to be told of a connection's end panicked");
    }
}
