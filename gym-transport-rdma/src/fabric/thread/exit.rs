//! Process exit: stops the fabrics' threads before UCX's exit handlers run.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::fabric::handle::command::FabricShared;

/// Time that the exit waits for all threads together. A thread inside a callback may take longer.
const END_TIMEOUT: Duration = Duration::from_secs(1);

static RUNNING: Mutex<Vec<Weak<FabricShared>>> = Mutex::new(Vec::new());
/// Id of the process that runs these threads.
static WATCHED_BY: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Registers a fabric, and on first use the exit handler.
///
/// Must be called on the fabric's thread after UCX was loaded. Exit handlers run in reverse order of registration, and
/// this one must run before UCX's.
pub(crate) fn watch(shared: &Arc<FabricShared>) {
    static REGISTERED: Once = Once::new();
    OURS.set(true);
    let mut running = RUNNING.lock();
    if WATCHED_BY.swap(std::process::id(), Ordering::Relaxed) != std::process::id() {
        // These fabrics belong to the process that forked this one.
        running.clear();
    }
    running.retain(|shared| shared.strong_count() > 0);
    running.push(Arc::downgrade(shared));
    drop(running);
    REGISTERED.call_once(|| {
        // SAFETY: `stop_all` has the required signature and does not unwind. Registration fails only for lack of
        // memory; the exit then runs without the handler.
        unsafe { libc::atexit(stop_all) };
    });
}

extern "C" fn stop_all() {
    // A forked child inherits the handler and the list, but none of the threads.
    if WATCHED_BY.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    // A fabric's thread that exits the process would wait for itself.
    if OURS.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    let running = std::mem::take(&mut *RUNNING.lock());
    let running: Vec<_> = running.iter().filter_map(Weak::upgrade).collect();
    for shared in &running {
        shared.stop();
    }
    let until = Instant::now() + END_TIMEOUT;
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
        // Watch on another thread, as a fabric does; the thread that forks is not a fabric's.
        std::thread::scope(|scope| scope.spawn(|| watch(&shared)).join().unwrap());
        // SAFETY: the child calls only the functions below, which take no lock that another thread of the parent may
        // hold.
        let child = unsafe { libc::fork() };
        if child == 0 {
            stop_all();
            let stopped = shared.stopped.load(Ordering::Relaxed);
            // SAFETY: ends the child without running exit handlers.
            unsafe { libc::_exit(i32::from(stopped)) };
        }
        let mut status = 0;
        // SAFETY: a child of this process, waited for once; `status` is a valid place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child exited normally, and its fabric was not stopped");
    }
}
