//! The fabric's thread: opens UCX, runs the event loop, and closes UCX.

mod backoff;
mod exit;
mod operations;
mod peer;
mod peer_workers;
mod state;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;

use crate::fabric::devices::devices;
use crate::fabric::handle::command::{FabricInfo, FabricShared};
use crate::fabric::library::{bounded, load, refused};
use crate::fabric::options::driver::Driver;
use crate::fabric::options::{FabricError, FabricOptions};
use crate::fabric::protocol::prefix::{HEADER_BYTES_MAX, MESSAGE_ID, PREFIX_BYTES};
use crate::fabric::thread::backoff::Backoff;
use crate::fabric::thread::peer_workers::{PeerWorkers, SharedMemorySettings};
use crate::fabric::thread::state::FabricState;
use crate::fabric::thread::state::callbacks::{CallbackQueue, MessageReceiver};
use crate::fabric::thread::state::registrations::Registrations;
use crate::ucx::{Armed, Context, Listener, Receiver, UnhandledIds, Worker};

/// Commands per round, so that sending does not delay receiving.
const COMMANDS_A_ROUND: usize = 256;
/// Calls of `progress` per round, so that receiving does not delay commands.
const PROGRESS_A_ROUND: usize = 64;
/// While peer workers have work, networks are polled once in this many rounds: one poll takes as long as a message of a
/// peer worker.
const PEER_WORKERS_FIRST: u32 = 8;

/// Starts the thread, and returns when the fabric is ready.
///
/// # Errors
/// If UCX cannot be opened, or the thread cannot be started or pinned to its CPU.
pub(crate) fn start(options: FabricOptions, shared: &Arc<FabricShared>) -> Result<(), FabricError> {
    let (opened, result) = sync_channel(1);
    let thread = {
        let (shared, name) = (Arc::clone(shared), options.name.clone());
        std::thread::Builder::new().name(name).spawn(move || run(options, &shared, &opened))?
    };
    // The thread always sends a result, unless it panics: then the channel is closed.
    let result = result.recv().unwrap_or_else(|_| Err(std::io::Error::other("the thread panicked").into()));
    drop(thread);
    result
}

fn run(options: FabricOptions, shared: &Arc<FabricShared>, opened: &SyncSender<Result<(), FabricError>>) {
    let driver = options.driver;
    let (state, callbacks) = match open(options, shared) {
        Ok(open) => open,
        Err(error) => {
            // The caller has no handle yet, so it waits only for this result.
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    // Notifies the callers that wait for the end, even after a panic.
    let mut ended = Ended { shared, clean: false };
    event_loop(driver, shared, &state, &callbacks);
    if shared.stopped.load(Ordering::Relaxed) {
        // UCX's exit handlers run next, so nothing of UCX may be touched any more.
        std::mem::forget((state, callbacks));
    } else {
        ended.clean = destroy(state);
    }
}

struct Ended<'a> {
    shared: &'a FabricShared,
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

type Open = (Rc<RefCell<FabricState>>, Rc<CallbackQueue>);

fn open(options: FabricOptions, shared: &Arc<FabricShared>) -> Result<Open, FabricError> {
    if let Some(cpu) = options.cpu {
        let mut cpus = rustix::thread::CpuSet::new();
        if cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(std::io::Error::other(format!("CPU {cpu} does not exist")).into());
        }
        cpus.set(cpu);
        rustix::thread::sched_setaffinity(None, &cpus).map_err(std::io::Error::from)?;
    }
    let library = load(&options.library)?;
    exit::watch(shared);
    let mut settings = options.ucx_settings(&library.info().version);
    settings.extend(bounded(&settings));
    let context = Context::open(library, &settings).map_err(refused)?;
    let worker = Worker::open(&context).map_err(refused)?;
    if worker.header_bytes_max() < PREFIX_BYTES + HEADER_BYTES_MAX {
        let status = format!("the transports support at most {} bytes", worker.header_bytes_max());
        return Err(FabricError::Ucx {
            what: format!("send headers of {} bytes", PREFIX_BYTES + HEADER_BYTES_MAX),
            status,
        });
    }
    let callbacks = Rc::new(CallbackQueue::default());
    let listener = match options.listen {
        None => None,
        Some(address) => {
            let refused = |status| refused((format!("listen on {address}"), status));
            let callbacks = Rc::clone(&callbacks);
            Some(Listener::open(&worker, address, move |request| callbacks.request(request)).map_err(refused)?)
        }
    };
    let listen_address = match &listener {
        None => None,
        Some(listener) => {
            Some(listener.address().map_err(|status| refused(("query the listen address".to_owned(), status)))?)
        }
    };
    let ready = FabricInfo { listen_address, library: library.info(), devices: devices(&context.describe()) };
    // This is the only place that sets it.
    let _ = shared.ready.set(ready);
    let registrations = Registrations::new(context, Arc::clone(shared));
    let shared_memory_settings = SharedMemorySettings::new(library, &options);
    let state = Rc::new_cyclic(|state| {
        let receiver = {
            let (callbacks, state, shared) = (Rc::clone(&callbacks), Weak::clone(state), Arc::clone(shared));
            move |peer_worker| -> Box<dyn Receiver> {
                let (callbacks, state, shared) = (Rc::clone(&callbacks), Weak::clone(&state), Arc::clone(&shared));
                Box::new(MessageReceiver::new(callbacks, state, shared, Some(peer_worker)))
            }
        };
        let peer_workers = PeerWorkers::new(Arc::clone(shared), shared_memory_settings, Box::new(receiver));
        let (shared, worker, callbacks) = (Arc::clone(shared), Rc::clone(&worker), Rc::clone(&callbacks));
        RefCell::new(FabricState::new(options, shared, registrations, worker, peer_workers, listener, callbacks))
    });
    let receiver = MessageReceiver::new(Rc::clone(&callbacks), Rc::downgrade(&state), Arc::clone(shared), None);
    let received = worker.receive(MESSAGE_ID, Box::new(receiver), UnhandledIds::All);
    received.map_err(|status| refused(("receive messages".to_owned(), status)))?;
    Ok((state, callbacks))
}

/// Runs until a shutdown has completed.
fn event_loop(driver: Driver, shared: &FabricShared, state: &RefCell<FabricState>, callbacks: &CallbackQueue) {
    let (worker, peer_workers) = (state.borrow().worker(), state.borrow().peer_workers.workers());
    let mut commands = VecDeque::new();
    let (mut backoff, mut round) = (Backoff::new(driver), 0_u32);
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
        // The state is not borrowed here, so that messages can be delivered from within UCX.
        let arrived = peer_workers.borrow().iter().fold(false, |arrived, peer_worker| arrived | progress(peer_worker));
        worked |= arrived;
        if !arrived || round.is_multiple_of(PEER_WORKERS_FIRST) {
            worked |= progress(&worker);
        }
        let mut state = state.borrow_mut();
        // A listener posts `expect` before it gives a peer the address, so commands come before the peer's hello.
        while !callbacks.is_empty() && shared.queue.take(&mut commands, COMMANDS_A_ROUND) {
            for command in commands.drain(..) {
                state.command(command);
            }
            state.shut_down();
        }
        worked |= state.process_callbacks(callbacks);
        let now = Instant::now();
        state.check_timers(now);
        if state.ended(now) || shared.stopped.load(Ordering::Relaxed) {
            return;
        }
        if worked {
            shared.counters.rounds_busy.add(1);
            backoff.worked(now);
        } else if backoff.is_over(now) {
            if sleep(shared, &state, &mut backoff, now) == Woken::ByProcess {
                state.check_now();
            }
        } else {
            backoff.pause(now);
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

/// Reason why a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// The process of a peer has ended.
    ByProcess,
    Otherwise,
}

fn sleep(shared: &FabricShared, state: &FabricState, backoff: &mut Backoff, now: Instant) -> Woken {
    let mut armed: Vec<&Worker> = Vec::new();
    // Only an armed worker makes its descriptor readable. A busy worker has work, or waits for space at a peer. It
    // announces nothing new, and its descriptor may still be readable from an old event.
    let mut busy = state.peer_workers.arm(&mut armed);
    match state.worker.arm() {
        Ok(Armed::Yes) => armed.push(&state.worker),
        Ok(Armed::Busy) => busy = true,
        // Without events, the tick still applies.
        Err(status) => tracing::debug!(%status, "arm the worker"),
    }
    let nap = busy.then(|| backoff.next_nap());
    if busy {
        shared.counters.arm_busy.add(1);
        if nap.is_some_and(|nap| nap.is_zero()) {
            return Woken::Otherwise;
        }
    }
    let command = std::iter::once(shared.queue.wakeup());
    let wakeups = command.chain(armed.iter().map(|worker| worker.wakeup())).chain(state.peer_workers.processes());
    let mut watched: Vec<_> = wakeups.map(|wakeup| PollFd::from_borrowed_fd(wakeup, PollFlags::IN)).collect();
    if !shared.queue.sleep() {
        return Woken::Otherwise;
    }
    let most = nap.unwrap_or_else(|| backoff.next_sleep(state.has_timers(now)));
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    // An interruption has the effect of a timeout.
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

/// Closes worker, memory and context, in this order. By now, all endpoints are closed or have been given up.
fn destroy(state: Rc<RefCell<FabricState>>) -> bool {
    // All other references are weak.
    let Ok(state) = Rc::try_unwrap(state) else { return false };
    state.into_inner().destroy()
}
