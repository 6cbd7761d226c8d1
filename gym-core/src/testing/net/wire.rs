//! Messages in flight between hosts, and the one task that delivers them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::base::cancel::CancelToken;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

use super::conn::{Conn, SimIncoming, SimRequest};
use super::faults::{Faults, kind};
use super::trace::Trace;
use crate::base::error::{Code, Error, Result};
use crate::message::Response;

/// The state that all hosts of one network share.
pub(super) struct SimState {
    net: Mutex<Net>,
    wake: Arc<Notify>,
}

pub(super) struct Net {
    rng: fastrand::Rng,
    pub(super) faults: Faults,
    began: Instant,
    next_event: u64,
    next_conn: u64,
    queue: BTreeMap<(Instant, u64), Event>,
    hosts: BTreeMap<Arc<str>, HostState>,
    pub(super) listeners: BTreeMap<String, (u64, mpsc::Sender<SimIncoming>)>,
    conns: BTreeMap<u64, Weak<Conn>>,
    cuts: BTreeSet<(Arc<str>, Arc<str>)>,
    /// Hosts without a connection to any other.
    isolated: BTreeSet<Arc<str>>,
    /// Hosts whose messages are lost.
    mute: BTreeSet<Arc<str>>,
    /// Slow hosts, each with the delay of its messages.
    slow: BTreeMap<Arc<str>, Duration>,
    /// Stopped hosts, each with the messages that wait for it or left it.
    frozen: BTreeMap<Arc<str>, Vec<Event>>,
    /// Increases when the faults change, so that scheduled partitions of the previous faults do not happen.
    regime: u64,
    trace: Trace,
}

#[derive(Debug)]
struct HostState {
    life: u64,
    up: bool,
    silent: bool,
    crashed: CancelToken,
    /// Earlier incarnations that go on, each with its listeners.
    older: Vec<OlderLife>,
}

#[derive(Debug)]
struct OlderLife {
    crashed: CancelToken,
    /// They get no connections. Without them, the servers of this life would end.
    _listeners: Vec<mpsc::Sender<SimIncoming>>,
}

enum Event {
    Deliver { conn: Arc<Conn>, to_server: bool, packet: Packet },
    Partition { regime: u64 },
    Heal { regime: u64, pairs: Vec<(Arc<str>, Arc<str>)> },
}

/// A message on a connection.
pub(super) enum Packet {
    Request(Box<SimRequest>),
    Reply {
        call: u64,
        result: Result<Response>,
    },
    /// The caller cancelled the call.
    Cancel {
        call: u64,
    },
    /// The other end closed the connection or crashed.
    Gone,
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(request) => write!(f, "{request}"),
            Self::Reply { call, result: Ok(response) } => write!(f, "reply {} of #{call}", response.status),
            Self::Reply { call, result: Err(error) } => write!(f, "refusal of #{call}: {error}"),
            Self::Cancel { call } => write!(f, "cancel of #{call}"),
            Self::Gone => f.write_str("close"),
        }
    }
}

/// The outcome of a connection attempt.
pub(super) enum ConnectOutcome {
    Silence(Duration),
    Refused,
    Through,
}

impl SimState {
    pub(super) fn new(seed: u64) -> Self {
        let net = Net {
            rng: fastrand::Rng::with_seed(seed),
            faults: Faults::NONE,
            began: Instant::now(),
            next_event: 0,
            next_conn: 0,
            queue: BTreeMap::new(),
            hosts: BTreeMap::new(),
            listeners: BTreeMap::new(),
            conns: BTreeMap::new(),
            cuts: BTreeSet::new(),
            isolated: BTreeSet::new(),
            mute: BTreeSet::new(),
            slow: BTreeMap::new(),
            frozen: BTreeMap::new(),
            regime: 0,
            trace: Trace::default(),
        };
        Self { net: Mutex::new(net), wake: Arc::default() }
    }

    pub(super) fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    pub(super) fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock()
    }

    pub(super) fn note(&self, actor: &str, event: fmt::Arguments<'_>) {
        self.net().note(actor, event);
    }

    pub(super) fn injected(&self, actor: &str, kind: &'static str) {
        self.net().fault(actor, kind, format_args!("injected"));
    }

    pub(super) fn trace(&self) -> Trace {
        self.net().trace.clone()
    }

    pub(super) fn trace_hash(&self) -> u64 {
        self.net().trace.hash()
    }

    pub(super) fn set_faults(&self, faults: Faults) {
        let mut net = self.net();
        net.note("network", format_args!("{faults}"));
        net.faults = faults;
        net.cuts.clear();
        net.isolated.clear();
        net.mute.clear();
        net.slow.clear();
        net.regime += 1;
        net.schedule_partition();
        drop(net);
        self.wake.notify_one();
    }

    pub(super) fn cut(&self, from: &str, to: &str) {
        let mut net = self.net();
        net.cuts.insert((from.into(), to.into()));
        net.fault("network", kind::PARTITION, format_args!("{from} to {to}"));
    }

    pub(super) fn isolate(&self, host: &str) {
        let mut net = self.net();
        net.isolated.insert(host.into());
        net.fault(host, kind::PARTITION, format_args!("its cable is cut"));
    }

    pub(super) fn reconnect(&self, host: &str) {
        let mut net = self.net();
        net.isolated.remove(host);
        net.note(host, format_args!("has its cable again"));
    }

    pub(super) fn slow(&self, host: &str, delay: Duration) {
        let mut net = self.net();
        net.slow.remove(host);
        if !delay.is_zero() {
            net.slow.insert(host.into(), delay);
        }
        net.note(host, format_args!("needs {delay:?} more for each message"));
    }

    pub(super) fn mute(&self, host: &str) {
        let mut net = self.net();
        net.mute.insert(host.into());
        net.fault(host, kind::MUTE, format_args!("what it sends is lost"));
    }

    pub(super) fn unmute(&self, host: &str) {
        let mut net = self.net();
        net.mute.remove(host);
        net.note(host, format_args!("is heard again"));
    }

    pub(super) fn reseed(&self, seed: u64) {
        let mut net = self.net();
        net.rng = fastrand::Rng::with_seed(seed);
        net.note("network", format_args!("goes on with seed {seed}"));
    }

    pub(super) fn freeze(&self, host: &str) {
        let mut net = self.net();
        net.frozen.entry(host.into()).or_default();
        net.fault(host, kind::FROZEN, format_args!("stands still"));
    }

    pub(super) fn thaw(&self, host: &str) {
        let mut net = self.net();
        let Some(held) = net.frozen.remove(host) else { return };
        net.note(host, format_args!("goes on, {} messages were held", held.len()));
        for event in held {
            net.schedule(Instant::now(), event);
        }
        drop(net);
        self.wake.notify_one();
    }

    /// Starts the next incarnation of a host.
    pub(super) fn start(&self, name: &Arc<str>) -> (u64, CancelToken) {
        if self.net().hosts.get(name).is_some_and(|host| host.up) {
            self.crash(name);
        }
        self.net().start(name, Vec::new())
    }

    /// Starts the next incarnation of a host, and lets the previous one go on.
    pub(super) fn start_beside(&self, name: &Arc<str>) -> (u64, CancelToken) {
        let mut net = self.net();
        let Some(host) = net.hosts.get_mut(name).filter(|host| host.up) else {
            return net.start(name, Vec::new());
        };
        let (crashed, mut older) = (host.crashed.clone(), std::mem::take(&mut host.older));
        let here = |address: &str| address.split('/').next() == Some(name);
        let addresses: Vec<_> = net.listeners.keys().filter(|address| here(address)).cloned().collect();
        let listeners = addresses.iter().filter_map(|address| net.listeners.remove(address));
        older.push(OlderLife { crashed, _listeners: listeners.map(|(_, listener)| listener).collect() });
        net.fault(name, kind::TWICE, format_args!("the earlier one goes on"));
        net.start(name, older)
    }

    pub(super) fn end_older(&self, name: &str) {
        let mut net = self.net();
        let Some(host) = net.hosts.get_mut(name) else { return };
        let (life, older) = (host.life, std::mem::take(&mut host.older));
        if older.is_empty() {
            return;
        }
        net.note(name, format_args!("has one incarnation again, life {life}"));
        let ended = |conn: &Conn| *conn.server == *name && conn.server_life < life;
        let conns: Vec<_> = net.conns.values().filter_map(Weak::upgrade).filter(|conn| ended(conn)).collect();
        for conn in conns {
            if !conn.server_closed.is_cancelled() {
                conn.server_closed.cancel();
                net.transmit(&conn, false, Packet::Gone);
            }
        }
        drop(net);
        older.iter().for_each(|older| older.crashed.cancel());
        self.wake.notify_one();
    }

    pub(super) fn crash(&self, name: &str) {
        let mut net = self.net();
        let silent = net.rng.f64() < net.faults.silent_crash;
        let Some(host) = net.hosts.get_mut(name).filter(|host| host.up) else { return };
        host.up = false;
        host.silent = silent;
        let crashed = host.crashed.clone();
        let older = std::mem::take(&mut host.older);
        // What a stopped process had not sent is lost with it.
        net.frozen.remove(name);
        let kind = if silent { kind::SILENT_CRASH } else { kind::CRASH };
        net.fault(name, kind, format_args!("goes down"));
        net.listeners.retain(|address, _| address.split('/').next() != Some(name));
        net.conns.retain(|_, conn| conn.strong_count() > 0);
        let conns: Vec<_> = net.conns.values().filter_map(Weak::upgrade).collect();
        for conn in conns {
            let (at_server, at_client) = (*conn.server == *name, *conn.client == *name);
            if at_server && !conn.server_closed.is_cancelled() {
                conn.server_closed.cancel();
                if !silent {
                    net.transmit(&conn, false, Packet::Gone);
                }
            }
            if at_client && !conn.client_closed.is_cancelled() {
                conn.client_closed.cancel();
                if !silent {
                    net.transmit(&conn, true, Packet::Gone);
                }
            }
        }
        drop(net);
        crashed.cancel();
        older.iter().for_each(|older| older.crashed.cancel());
        self.wake.notify_one();
    }

    pub(super) fn transmit(&self, conn: &Arc<Conn>, to_server: bool, packet: Packet) {
        self.net().transmit(conn, to_server, packet);
        self.wake.notify_one();
    }
}

impl Drop for SimState {
    fn drop(&mut self) {
        // Wakes the wire's task, which ends with the network.
        self.wake.notify_one();
    }
}

impl Net {
    pub(super) fn note(&mut self, actor: &str, event: fmt::Arguments<'_>) {
        let at = self.began.elapsed().as_millis();
        self.trace.note(at, actor, event);
    }

    fn start(&mut self, name: &Arc<str>, older: Vec<OlderLife>) -> (u64, CancelToken) {
        let life = self.hosts.get(name).map_or(0, |host| host.life + 1);
        let crashed = CancelToken::new();
        let host = HostState { life, up: true, silent: false, crashed: crashed.clone(), older };
        self.hosts.insert(Arc::clone(name), host);
        self.note(name, format_args!("is up, life {life}"));
        (life, crashed)
    }

    fn fault(&mut self, actor: &str, kind: &'static str, what: fmt::Arguments<'_>) {
        self.trace.fault(kind);
        self.note(actor, format_args!("FAULT {kind}: {what}"));
    }

    pub(super) fn is_alive(&self, host: &str, life: u64) -> bool {
        self.hosts.get(host).is_some_and(|host| host.up && host.life == life)
    }

    pub(super) fn is_silent(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| !host.up && host.silent)
    }

    fn is_cut(&self, from: &Arc<str>, to: &Arc<str>) -> bool {
        self.isolated.contains(from)
            || self.isolated.contains(to)
            || self.mute.contains(from)
            || self.cuts.contains(&(Arc::clone(from), Arc::clone(to)))
    }

    pub(super) fn delay(&mut self) -> Duration {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let (min, max) = (millis(self.faults.delay_min), millis(self.faults.delay_max));
        Duration::from_millis(self.rng.u64(min..=max.max(min)))
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.f64() < probability
    }

    pub(super) fn open(&mut self, conn: impl FnOnce(u64) -> Arc<Conn>) -> Arc<Conn> {
        let conn = conn(self.next_conn);
        self.conns.insert(self.next_conn, Arc::downgrade(&conn));
        self.next_conn += 1;
        conn
    }

    /// Decides the outcome of a connection attempt from one host to another.
    pub(super) fn connect_outcome(&mut self, from: &Arc<str>, to: &Arc<str>) -> ConnectOutcome {
        if self.is_cut(from, to) || self.is_cut(to, from) {
            self.fault(from, kind::CUT_OFF, format_args!("connect to {to}"));
            return ConnectOutcome::Silence(self.faults.connect_timeout);
        }
        // The system of a stopped process still accepts connections, and the process itself opens none.
        if self.is_silent(to) || self.frozen.contains_key(from) {
            return ConnectOutcome::Silence(self.faults.connect_timeout);
        }
        if self.happens(self.faults.refuse_connect) {
            self.fault(from, kind::REFUSED, format_args!("connect to {to}"));
            return ConnectOutcome::Refused;
        }
        ConnectOutcome::Through
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.queue.insert((at, self.next_event), event);
        self.next_event += 1;
    }

    /// Sends a message, which may be lost.
    pub(super) fn transmit(&mut self, conn: &Arc<Conn>, to_server: bool, packet: Packet) {
        let (from, to) = conn.direction(to_server);
        let (from, to) = (Arc::clone(from), Arc::clone(to));
        if self.is_cut(&from, &to) {
            return self.fault(&from, kind::CUT_OFF, format_args!("{packet} to {to}"));
        }
        let (loss, lost) = match packet {
            Packet::Gone => (0.0, kind::REPLY_LOST),
            _ if to_server => (self.faults.loss_request, kind::REQUEST_LOST),
            _ => (self.faults.loss_reply, kind::REPLY_LOST),
        };
        if self.happens(loss) {
            return self.fault(&from, lost, format_args!("{packet} to {to}"));
        }
        let mut delay = self.delay();
        if self.happens(self.faults.long_way) {
            let max = u64::try_from(self.faults.long_way_max.as_millis()).unwrap_or(u64::MAX);
            delay += Duration::from_millis(self.rng.u64(0..=max));
            self.fault(&from, kind::DELAYED, format_args!("{packet} to {to}, {delay:?}"));
        }
        let slowed = [&from, &to].into_iter().filter_map(|host| self.slow.get(host)).sum::<Duration>();
        if !slowed.is_zero() {
            delay += slowed;
            self.fault(&from, kind::SLOWED, format_args!("{packet} to {to}, {slowed:?}"));
        }
        let mut at = Instant::now() + delay;
        let overtakes = self.happens(self.faults.reorder);
        let last = conn.last_arrival(to_server, at);
        if at < last {
            if overtakes {
                self.fault(&from, kind::REORDERED, format_args!("{packet} to {to}"));
            } else {
                at = last;
            }
        }
        if !matches!(packet, Packet::Gone) && self.happens(self.faults.reset) {
            self.fault(&from, kind::RESET, format_args!("under {packet} to {to}"));
            self.schedule(at, Event::Deliver { conn: Arc::clone(conn), to_server: true, packet: Packet::Gone });
            self.schedule(at, Event::Deliver { conn: Arc::clone(conn), to_server: false, packet: Packet::Gone });
            return;
        }
        if !matches!(packet, Packet::Gone) && self.happens(self.faults.corrupt) {
            self.fault(&from, kind::CORRUPTED, format_args!("{packet} to {to}"));
            let heard = at + self.delay();
            self.schedule(at, Event::Deliver { conn: Arc::clone(conn), to_server, packet: Packet::Gone });
            self.schedule(
                heard,
                Event::Deliver { conn: Arc::clone(conn), to_server: !to_server, packet: Packet::Gone },
            );
            return;
        }
        if let Packet::Request(request) = &packet
            && self.faults.duplicate_routes.iter().any(|route| request.route().starts_with(route))
            && self.happens(self.faults.duplicate)
        {
            let again = Packet::Request(request.clone());
            let at = at + self.delay();
            self.fault(&from, kind::DUPLICATED, format_args!("{packet} to {to}"));
            self.schedule(at, Event::Deliver { conn: Arc::clone(conn), to_server, packet: again });
        }
        self.schedule(at, Event::Deliver { conn: Arc::clone(conn), to_server, packet });
    }

    fn schedule_partition(&mut self) {
        if self.faults.partition_every.is_zero() {
            return;
        }
        let wait = self.up_to_twice(self.faults.partition_every);
        self.schedule(Instant::now() + wait, Event::Partition { regime: self.regime });
    }

    fn up_to_twice(&mut self, mean: Duration) -> Duration {
        let mean = u64::try_from(mean.as_millis()).unwrap_or(u64::MAX / 2);
        Duration::from_millis(self.rng.u64(1..=mean.saturating_mul(2).max(1)))
    }

    fn partition(&mut self) {
        let names: Vec<_> = self.hosts.keys().cloned().collect();
        if names.len() > 1 {
            let one = self.rng.usize(..names.len());
            let other = (one + self.rng.usize(1..names.len())) % names.len();
            let mut pairs = vec![(Arc::clone(&names[one]), Arc::clone(&names[other]))];
            if self.rng.u8(..3) > 0 {
                pairs.push((Arc::clone(&names[other]), Arc::clone(&names[one])));
            }
            let lasts = self.up_to_twice(self.faults.partition_for);
            let ways = if pairs.len() == 2 { "both ways" } else { "one way" };
            let (from, to) = pairs[0].clone();
            self.fault("network", kind::PARTITION, format_args!("{from} to {to}, {ways}, {lasts:?}"));
            self.cuts.extend(pairs.iter().cloned());
            self.schedule(Instant::now() + lasts, Event::Heal { regime: self.regime, pairs });
        }
        self.schedule_partition();
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Partition { regime } if regime == self.regime => self.partition(),
            Event::Heal { regime, pairs } if regime == self.regime => {
                for pair in pairs {
                    self.note("network", format_args!("{} to {} is healed", pair.0, pair.1));
                    self.cuts.remove(&pair);
                }
            }
            Event::Partition { .. } | Event::Heal { .. } => {}
            Event::Deliver { conn, to_server, packet } => {
                let (from, to) = conn.direction(to_server);
                let (from, to) = (Arc::clone(from), Arc::clone(to));
                match [&to, &from].into_iter().find(|host| self.frozen.contains_key(*host)) {
                    Some(frozen) => {
                        let held = self.frozen.get_mut(frozen).expect("the host was found");
                        held.push(Event::Deliver { conn, to_server, packet });
                    }
                    None => self.deliver(&conn, to_server, packet),
                }
            }
        }
    }

    fn deliver(&mut self, conn: &Arc<Conn>, to_server: bool, packet: Packet) {
        let (from, to) = conn.direction(to_server);
        if self.is_cut(from, to) {
            return self.fault(from, kind::CUT_OFF, format_args!("{packet} to {to}, on its way"));
        }
        if self.is_silent(to) {
            return;
        }
        self.note(to, format_args!("{from} sent {packet} on {}", conn.id));
        match (to_server, packet) {
            (true, Packet::Request(request)) => {
                let call = request.call;
                if conn.server_closed.is_cancelled() {
                    if conn.was_drained() {
                        // The drained server has processed nothing after it stopped, so the call was not processed.
                        self.transmit(conn, false, Packet::Reply { call, result: Err(drained()) });
                    }
                    // As an operating system does for an unknown connection.
                    return self.transmit(conn, false, Packet::Gone);
                }
                if let Err(error) = conn.arrive(*request) {
                    self.transmit(conn, false, Packet::Reply { call, result: Err(error) });
                }
            }
            (true, Packet::Cancel { call }) => conn.cancel(call),
            (true, _) => conn.server_closed.cancel(),
            (false, Packet::Reply { call, result }) => conn.answer(call, result),
            (false, _) => conn.client_closed.cancel(),
        }
    }
}

pub(super) fn drained() -> Error {
    Error::not_started(Code::Unavailable, "the peer takes no new calls")
}

/// Delivers due messages until the network is dropped.
pub(super) async fn run(shared: Weak<SimState>, wake: Arc<Notify>) {
    loop {
        let next = {
            let Some(shared) = shared.upgrade() else { return };
            let mut net = shared.net();
            loop {
                match net.queue.first_entry() {
                    Some(entry) if entry.key().0 <= Instant::now() => {
                        let event = entry.remove();
                        net.happen(event);
                    }
                    Some(entry) => break Some(entry.key().0),
                    None => break None,
                }
            }
        };
        match next {
            None => wake.notified().await,
            Some(at) => tokio::select! {
                biased;
                () = wake.notified() => {}
                () = sleep_until(at) => {}
            },
        }
    }
}
