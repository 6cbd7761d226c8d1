//! A simulated network that loses, delays and reorders messages, resets and refuses connections, and partitions hosts.
//!
//! It is a [`Connector`](crate::transport::Connector) and [`Listener`](crate::transport::Listener) at the level of
//! messages, with the contract of the traits and no further guarantees: a lost request or reply lets its caller wait
//! until its deadline (`Unknown`), a reset ends every call of its connection (`Unavailable, Unknown`), a refused
//! connect is `Unavailable, NotStarted`, a crashed host's handlers are dropped where they are. With no faults it passes
//! the suite that every transport passes.
//!
//! One task, the wire, delivers all messages in the order of (time, send order). With a paused clock and on one thread,
//! a seed therefore replays exactly; [`Trace::hash`] verifies it. Delays are whole milliseconds, the resolution of
//! tokio's timers.

mod conn;
mod faults;
mod host;
mod trace;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use faults::{Faults, kind};
pub use host::{SimHost, SimListener};
pub use trace::Trace;
use wire::SimState;

/// The scheme of simulated endpoints: `sim://host/service`.
pub const SCHEME: &str = "sim";

/// A network of named hosts. Cheap to clone; clones share it.
#[derive(Clone)]
pub struct SimNet(Arc<SimState>);

impl SimNet {
    /// Creates a network without hosts. Must be called within a tokio runtime, in which its wire is a task. The task
    /// ends with the network.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        let shared = Arc::new(SimState::new(seed));
        tokio::spawn(wire::run(Arc::downgrade(&shared), shared.wake()));
        shared.set_faults(faults);
        Self(shared)
    }

    /// Starts the next incarnation of a host, without listeners. Crashes the previous one if it still runs.
    #[must_use]
    pub fn host(&self, name: &str) -> SimHost {
        SimHost::start(Arc::clone(&self.0), name)
    }

    /// Starts the next incarnation of a host while the previous one goes on with the connections that it has, as two head servers do
    /// behind one address. New connections reach the new one. A crash ends both.
    #[must_use]
    pub fn host_beside(&self, name: &str) -> SimHost {
        SimHost::start_beside(Arc::clone(&self.0), name)
    }

    /// Ends the incarnations that go on beside the newest one; their peers are notified.
    pub fn end_older(&self, host: &str) {
        self.0.end_older(host);
    }

    /// Crashes a host: drops its running handlers and its [tasks](SimHost::spawn), ends its calls and its listeners.
    /// Its peers are notified, unless the crash is silent.
    pub fn crash(&self, host: &str) {
        self.0.crash(host);
    }

    /// Drops all messages from one host to another, including those in flight.
    pub fn cut(&self, from: &str, to: &str) {
        self.0.cut(from, to);
    }

    /// Cuts the cable of a host: drops all messages from and to it, including those in flight.
    pub fn isolate(&self, host: &str) {
        self.0.isolate(host);
    }

    /// Ends an isolation.
    pub fn reconnect(&self, host: &str) {
        self.0.reconnect(host);
    }

    /// Stops the processes of a host, as SIGSTOP does: messages from and to it wait, and its connections stay open. Its tasks go on, and
    /// nobody learns of it.
    pub fn freeze(&self, host: &str) {
        self.0.freeze(host);
    }

    /// Lets a stopped host go on: the messages that waited arrive at once, in order.
    pub fn thaw(&self, host: &str) {
        self.0.thaw(host);
    }

    /// Delays each message from or to a host by this much more, as a machine without free CPUs does. Zero ends it.
    pub fn slow(&self, host: &str, delay: Duration) {
        self.0.slow(host, delay);
    }

    /// Drops all messages that a host sends, including those in flight, while those to it arrive: its links are half open.
    pub fn mute(&self, host: &str) {
        self.0.mute(host);
    }

    /// Ends a half-open link.
    pub fn unmute(&self, host: &str) {
        self.0.unmute(host);
    }

    /// Draws what happens from now on from another seed. Two runs with the same seed that are the same so far then differ.
    pub fn reseed(&self, seed: u64) {
        self.0.reseed(seed);
    }

    /// Replaces the faults. Ends slow hosts and half-open links, and heals the partitions of the previous faults; lost messages stay lost.
    pub fn set_faults(&self, faults: Faults) {
        self.0.set_faults(faults);
    }

    /// Adds an event of the scenario to the trace.
    pub fn note(&self, actor: &str, event: fmt::Arguments<'_>) {
        self.0.note(actor, event);
    }

    /// Counts a fault that the scenario injected, such as a slow disk, and adds it to the trace.
    pub fn injected(&self, actor: &str, kind: &'static str) {
        self.0.injected(actor, kind);
    }

    /// Returns the trace so far.
    #[must_use]
    pub fn trace(&self) -> Trace {
        self.0.trace()
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").field("trace_hash", &self.0.trace_hash()).finish_non_exhaustive()
    }
}
