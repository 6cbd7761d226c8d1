//! The end of the process: exit handlers of UCX must not meet a thread that is still inside of it.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::fabric::handle::command::FabricShared;

/// How long the exit waits for all of them together; a thread that is inside of a handler of ours may take longer.
const WITHIN: Duration = Duration::from_secs(1);

static RUNNING: Mutex<Vec<Weak<FabricShared>>> = Mutex::new(Vec::new());
/// The process whose threads these are.
static WATCHED_BY: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// To be called on a fabric's thread, after UCX was loaded: handlers run in the opposite order of their registration, and
/// this one must come before UCX's own.
pub(crate) fn watch(shared: &Arc<FabricShared>) {
    static REGISTERED: Once = Once::new();
    OURS.set(true);
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    if WATCHED_BY.swap(std::process::id(), Ordering::Relaxed) != std::process::id() {
        // Those of the process that forked this one.
        running.clear();
    }
    running.retain(|shared| shared.strong_count() > 0);
    running.push(Arc::downgrade(shared));
    drop(running);
    REGISTERED.call_once(|| {
        // SAFETY: a function that takes nothing, gives nothing and does not unwind. It refuses only for want of memory;
        // then the exit is as it is without it.
        unsafe { libc::atexit(stop_all) };
    });
}

extern "C" fn stop_all() {
    // A forked child has the handler and the list, but none of the threads.
    if WATCHED_BY.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    // A fabric's own thread that ends the process would wait for itself.
    if OURS.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    let running = std::mem::take(&mut *RUNNING.lock().unwrap_or_else(PoisonError::into_inner));
    let running: Vec<_> = running.iter().filter_map(Weak::upgrade).collect();
    for shared in &running {
        shared.stop();
    }
    let until = Instant::now() + WITHIN;
    for shared in &running {
        shared.wait_for_end(until.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_leaves_the_fabrics_of_its_parent_alone() {
        let shared = Arc::new(FabricShared::new(&super::super::FabricOptions::default()).unwrap());
        // As a fabric's own thread does: the one that forks is another.
        std::thread::scope(|scope| scope.spawn(|| watch(&shared)).join().unwrap());
        // SAFETY: the child only calls what follows, which takes no lock that another thread of the parent may have held.
        let child = unsafe { libc::fork() };
        if child == 0 {
            stop_all();
            let stopped = shared.stopped.load(Ordering::Relaxed);
            // SAFETY: ends the child without its handlers.
            unsafe { libc::_exit(i32::from(stopped)) };
        }
        let mut status = 0;
        // SAFETY: a child of ours, waited for once, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it ended well, and was not told to stop");
    }
}
