//! The thread: opens everything, goes round, and gives everything back.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;

use super::berth::{Berths, Settings};
use super::handle::Ready;
use super::inbox::{Inbound, Inbox};
use super::registered::Registered;
use super::report::devices;
use super::state::State;
use super::wire::{MESSAGE_ID, PREFIX_BYTES};
use super::{Driver, FabricError, FabricOptions, HEADER_BYTES_MAX, Shared, exit};
use crate::sys;
use crate::ucx::{Armed, Context, Listener, Others, Status, Worker};

/// Commands of one round, so that what arrives is not kept waiting by what goes out.
const COMMANDS_A_ROUND: usize = 256;
/// Calls of progress of one round, so that commands are not kept waiting by what arrives.
const PROGRESS_A_ROUND: usize = 64;
/// While berths have work, networks are looked at once in so many rounds: a look takes as long as a message of theirs.
const BERTHS_FIRST: u32 = 8;

/// Starts it, and returns when it is ready.
pub(super) fn start(options: FabricOptions, shared: &Arc<Shared>) -> Result<(), FabricError> {
    let (opened, result) = sync_channel(1);
    let thread = {
        let (shared, name) = (Arc::clone(shared), options.name.clone());
        std::thread::Builder::new().name(name).spawn(move || run(options, &shared, &opened))?
    };
    // The thread always says something, unless it panics: then the channel is closed.
    let result = result.recv().unwrap_or_else(|_| Err(std::io::Error::other("it panicked").into()));
    drop(thread);
    result
}

fn run(options: FabricOptions, shared: &Arc<Shared>, opened: &SyncSender<Result<(), FabricError>>) {
    let driver = options.driver;
    let (state, inbox) = match open(options, shared) {
        Ok(open) => open,
        Err(error) => {
            // Nobody has a handle yet, so nobody waits for more than this.
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    // Whatever happens, those who wait for the end are told.
    let mut ended = Ended { shared, clean: false };
    go_round(driver, shared, &state, &inbox);
    if shared.stopped.load(Ordering::Relaxed) {
        // UCX's exit handlers run next; nothing of it may be touched any more.
        std::mem::forget((state, inbox));
    } else {
        ended.clean = give_back(state);
    }
}

struct Ended<'a> {
    shared: &'a Shared,
    clean: bool,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        for command in self.shared.queue.close() {
            command.refuse();
        }
        self.shared.end(self.clean);
    }
}

type Open = (Rc<RefCell<State>>, Rc<Inbox>);

fn open(options: FabricOptions, shared: &Arc<Shared>) -> Result<Open, FabricError> {
    if let Some(cpu) = options.cpu {
        let mut cpus = rustix::thread::CpuSet::new();
        if cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(std::io::Error::other(format!("there is no CPU {cpu}")).into());
        }
        cpus.set(cpu);
        rustix::thread::sched_setaffinity(None, &cpus).map_err(std::io::Error::from)?;
    }
    let refused = |(what, status): (String, Status)| FabricError::Ucx { what, status: status.to_string() };
    let library = sys::load(&options.library)?;
    exit::watch(shared);
    let settings = options.ucx_settings(&library.info().version);
    let context = Context::open(library, &settings).map_err(refused)?;
    let worker = Worker::open(&context).map_err(refused)?;
    if worker.header_bytes_max() < PREFIX_BYTES + HEADER_BYTES_MAX {
        let status = format!("these transports take no more than {} bytes", worker.header_bytes_max());
        return Err(FabricError::Ucx {
            what: format!("send headers of {} bytes", PREFIX_BYTES + HEADER_BYTES_MAX),
            status,
        });
    }
    let inbox = Rc::new(Inbox::default());
    let listener = match options.listen {
        None => None,
        Some(address) => {
            let refused = |status| refused((format!("listen on {address}"), status));
            let inbox = Rc::clone(&inbox);
            Some(Listener::open(&worker, address, move |request| inbox.request(request)).map_err(refused)?)
        }
    };
    let listen_address = match &listener {
        None => None,
        Some(listener) => {
            Some(listener.address().map_err(|status| refused(("ask where it listens".to_owned(), status)))?)
        }
    };
    let ready = Ready { listen_address, library: library.info(), devices: devices(&context.describe()) };
    // Set once, here.
    let _ = shared.ready.set(ready);
    let registered = Registered::new(context, Arc::clone(shared));
    let berth_settings = Settings::new(library, &options);
    let state = Rc::new_cyclic(|state| {
        let berths = Berths::new(Arc::clone(shared), berth_settings, Rc::clone(&inbox), Weak::clone(state));
        let (shared, worker, inbox) = (Arc::clone(shared), Rc::clone(&worker), Rc::clone(&inbox));
        RefCell::new(State::new(options, shared, registered, worker, berths, listener, inbox))
    });
    let inbound = Inbound::new(Rc::clone(&inbox), Rc::downgrade(&state), Arc::clone(shared), None);
    let received = worker.receive(MESSAGE_ID, Box::new(inbound), Others::All);
    received.map_err(|status| refused(("receive messages".to_owned(), status)))?;
    Ok((state, inbox))
}

/// Goes round until a shutdown has ended.
fn go_round(driver: Driver, shared: &Shared, state: &RefCell<State>, inbox: &Inbox) {
    let (worker, berths) = (state.borrow().worker(), state.borrow().berths.workers());
    let mut commands = VecDeque::new();
    let (mut rest, mut round) = (Rest::new(driver), 0_u32);
    loop {
        round = round.wrapping_add(1);
        let mut worked = shared.queue.take(&mut commands, COMMANDS_A_ROUND);
        if worked {
            let mut state = state.borrow_mut();
            for command in commands.drain(..) {
                state.command(command);
            }
            state.shut_down();
        }
        // The state is not borrowed here, so that what arrives can be handed up from within UCX.
        let arrived = berths.borrow().iter().fold(false, |arrived, berth| arrived | progress(berth));
        worked |= arrived;
        if !arrived || round.is_multiple_of(BERTHS_FIRST) {
            worked |= progress(&worker);
        }
        let mut state = state.borrow_mut();
        // Who tells a peer the way has told us to expect it before: its hello must not be looked at first.
        while !inbox.is_empty() && shared.queue.take(&mut commands, COMMANDS_A_ROUND) {
            for command in commands.drain(..) {
                state.command(command);
            }
            state.shut_down();
        }
        worked |= state.work_off(inbox);
        let now = Instant::now();
        state.keep_time(now);
        if state.ended(now) || shared.stopped.load(Ordering::Relaxed) {
            return;
        }
        if worked {
            shared.counters.rounds_busy.add(1);
            rest.worked(now);
        } else if rest.is_over(now) {
            if sleep(shared, &state, &mut rest, now) == Woken::ByProcess {
                state.check_now();
            }
        } else {
            rest.pause(now);
        }
    }
}

fn progress(worker: &Worker) -> bool {
    let mut worked = false;
    for _ in 0..PROGRESS_A_ROUND {
        if !worker.progress() {
            break;
        }
        worked = true;
    }
    worked
}

/// How long nothing has happened, and how long to sleep then.
struct Rest {
    driver: Driver,
    last_work: Instant,
    /// The next sleep. It doubles while nothing happens: on a device whose events do not come, an answer waits no longer
    /// than about as long as it took already; and a quiet fabric costs ten wake-ups a second.
    sleep: Duration,
    /// The next nap while UCX refuses to be armed although there is nothing to do.
    nap: Duration,
    /// Until then it sleeps instead of looking for more work.
    crowded_until: Instant,
}

impl Rest {
    fn new(driver: Driver) -> Self {
        let now = Instant::now();
        let mut rest = Self { driver, last_work: now, sleep: Duration::ZERO, nap: Duration::ZERO, crowded_until: now };
        rest.worked(now);
        rest
    }

    fn worked(&mut self, now: Instant) {
        self.last_work = now;
        self.nap = Duration::ZERO;
        if let Driver::Hybrid { tick, .. } = self.driver {
            self.sleep = tick;
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        match self.driver {
            Driver::Busy => false,
            Driver::Hybrid { spin, .. } => now < self.crowded_until || now.duration_since(self.last_work) >= spin,
        }
    }

    /// Between two looks for work. Those who are to give it may need this core. But where there are more who want to run than
    /// cores, who yields waits for a turn of milliseconds, and who sleeps is woken at once: it sleeps then, for a while.
    fn pause(&mut self, now: Instant) {
        if self.driver == Driver::Busy {
            std::hint::spin_loop();
            return;
        }
        std::thread::yield_now();
        self.yielded(now, Instant::now());
    }

    fn yielded(&mut self, from: Instant, until: Instant) {
        let lost = until.duration_since(from);
        if lost > YIELD_MAX {
            self.crowded_until = until + (lost * CROWDED_TIMES).min(CROWDED_MAX);
        }
    }

    fn next_sleep(&mut self, timers: bool) -> Duration {
        let Driver::Hybrid { tick, idle_tick, .. } = self.driver else { return Duration::ZERO };
        let sleep = self.sleep;
        self.sleep = (sleep * 2).min(idle_tick).max(tick);
        if timers { sleep.min(TIMER_TICK.max(tick)) } else { sleep }
    }

    /// What is to be sent waits for its peer: a full queue in shared memory whose owner is slow, stopped or dead. Zero the
    /// first time, which may be an event that came just now; then it doubles up to the tick.
    fn next_nap(&mut self) -> Duration {
        let Driver::Hybrid { tick, .. } = self.driver else { return Duration::ZERO };
        let nap = self.nap;
        self.nap = (nap * 2).max(NAP_MIN).min(tick);
        nap
    }
}

/// A yield that takes longer went to somebody who has work for long.
const YIELD_MAX: Duration = Duration::from_micros(200);
/// How long it then sleeps instead of yielding, in times of what was lost: lost are a hundredth of the time at most, and a machine
/// that is crowded for a moment is not taken for one that is crowded.
const CROWDED_TIMES: u32 = 100;
const CROWDED_MAX: Duration = Duration::from_secs(1);
/// The first nap: as long as the spinning before it.
const NAP_MIN: Duration = Duration::from_micros(50);
/// How exactly deadlines are kept.
const TIMER_TICK: Duration = Duration::from_millis(5);

/// What ended a sleep, as far as it matters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// A peer's process has ended.
    ByProcess,
    Otherwise,
}

fn sleep(shared: &Shared, state: &State, rest: &mut Rest, now: Instant) -> Woken {
    let mut armed: Vec<&Worker> = Vec::new();
    // Only an armed worker makes its descriptor readable; one that is busy has something to do, or waits for a peer to send.
    // It announces nothing new, and its descriptor may be readable from what is over.
    let mut busy = state.berths.arm(&mut armed);
    match state.worker.arm() {
        Ok(Armed::Yes) => armed.push(&state.worker),
        Ok(Armed::Busy) => busy = true,
        // Without events there is still the tick.
        Err(status) => tracing::debug!(%status, "arm the worker"),
    }
    let nap = busy.then(|| rest.next_nap());
    if busy {
        shared.counters.arm_busy.add(1);
        if nap.is_some_and(|nap| nap.is_zero()) {
            return Woken::Otherwise;
        }
    }
    let command = std::iter::once(shared.queue.wakeup());
    let wakeups = command.chain(armed.iter().map(|worker| worker.wakeup())).chain(state.berths.processes());
    let mut watched: Vec<_> = wakeups.map(|wakeup| PollFd::from_borrowed_fd(wakeup, PollFlags::IN)).collect();
    if !shared.queue.sleep() {
        return Woken::Otherwise;
    }
    let most = nap.unwrap_or_else(|| rest.next_sleep(state.has_timers(now)));
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    // An interruption is as good as a tick.
    let ready = poll(&mut watched, Some(&timeout)).unwrap_or(0);
    let readable = |one: &PollFd<'_>| one.revents().contains(PollFlags::IN);
    let (workers, processes) = watched[1..].split_at(armed.len());
    let (event, process) = (workers.iter().any(readable), processes.iter().any(readable));
    for (worker, _) in armed.iter().zip(workers).filter(|(_, one)| readable(one)) {
        worker.disarm();
    }
    let command = shared.queue.awake();
    match (ready, event, command) {
        (0, ..) => shared.counters.woken_by_tick.add(1),
        (_, true, _) => shared.counters.woken_by_event.add(1),
        (_, false, true) => shared.counters.woken_by_command.add(1),
        (_, false, false) => {}
    }
    if process { Woken::ByProcess } else { Woken::Otherwise }
}

/// Endpoints are closed by now, or will not be. Worker, memory and context, in this order.
fn give_back(state: Rc<RefCell<State>>) -> bool {
    // The only other references are weak ones.
    let Ok(state) = Rc::try_unwrap(state) else { return false };
    state.into_inner().give_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn rest() -> Rest {
        Rest::new(Driver::Hybrid { spin: Duration::from_micros(50), tick: ms(1), idle_tick: ms(100) })
    }

    #[test]
    fn sleeps_double_up_to_the_idle_tick_and_begin_anew_with_work() {
        let mut rest = rest();
        let sleeps: Vec<_> = (0..9).map(|_| rest.next_sleep(false)).collect();
        assert_eq!(sleeps, [1, 2, 4, 8, 16, 32, 64, 100, 100].map(ms));
        rest.worked(Instant::now());
        assert_eq!(rest.next_sleep(false), ms(1));
    }

    #[test]
    fn a_worker_that_waits_for_its_peer_naps_instead_of_spinning_and_looks_at_once_the_first_time() {
        let mut rest = rest();
        let naps: Vec<_> = (0..7).map(|_| rest.next_nap()).collect();
        assert_eq!(naps, [0, 50, 100, 200, 400, 800, 1000].map(Duration::from_micros));
        rest.worked(Instant::now());
        assert_eq!(rest.next_nap(), Duration::ZERO);
    }

    /// On a device whose events never come, an answer is found by a tick: no later than after about as long again.
    #[test]
    fn an_answer_without_an_event_waits_no_longer_than_it_took() {
        for answer_after in [ms(1), ms(5), ms(40), ms(90)] {
            let (mut rest, mut waited) = (rest(), Duration::ZERO);
            while waited < answer_after {
                waited += rest.next_sleep(false);
            }
            assert!(waited <= answer_after * 2 + ms(1), "{answer_after:?} {waited:?}");
        }
    }

    #[test]
    fn a_minute_of_silence_costs_some_six_hundred_wake_ups_and_deadlines_are_kept_meanwhile() {
        let (mut rest, mut waited, mut wakeups) = (rest(), Duration::ZERO, 0);
        while waited < ms(60_000) {
            waited += rest.next_sleep(false);
            wakeups += 1;
        }
        assert!(wakeups < 610, "{wakeups}");
        assert_eq!(rest.next_sleep(true), TIMER_TICK);
    }

    #[test]
    fn one_that_lost_its_core_sleeps_instead_of_yielding_for_a_while() {
        let mut rest = rest();
        let now = Instant::now();
        rest.worked(now);
        rest.yielded(now, now + Duration::from_micros(20));
        assert!(!rest.is_over(now + Duration::from_micros(20)), "to those who have little to do");
        rest.yielded(now, now + ms(3));
        rest.worked(now + ms(4));
        assert!(rest.is_over(now + ms(4)), "to one who has much to do");
        rest.worked(now + ms(302));
        assert!(rest.is_over(now + ms(302)));
        rest.worked(now + ms(303));
        assert!(!rest.is_over(now + ms(303)), "it tries again");
        rest.yielded(now, now + ms(5_000));
        rest.worked(now + ms(6_000));
        assert!(rest.is_over(now + ms(5_999)) && !rest.is_over(now + ms(6_000)), "after a second at the most");
    }

    #[test]
    fn a_busy_driver_never_rests() {
        assert!(!Rest::new(Driver::Busy).is_over(Instant::now() + ms(1000)));
    }
}
