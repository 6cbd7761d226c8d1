//! Queue of commands to the fabric's thread, and its wake-up.
//!
//! Messages are bounded. Commands that end something are not: at most two of them end each connection, and a full queue must still
//! accept them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Two queues with a bound each for messages; the urgent one is emptied first.
pub(crate) struct CommandQueue<T> {
    queues: Mutex<Queues<T>>,
    max: usize,
    /// The thread sleeps, or is about to: adding something wakes it up.
    sleeping: AtomicBool,
    wakeup: OwnedFd,
}

struct Queues<T> {
    urgent: VecDeque<T>,
    ordinary: VecDeque<T>,
    closed: bool,
}

impl<T> Queues<T> {
    fn of(&mut self, urgent: bool) -> &mut VecDeque<T> {
        if urgent { &mut self.urgent } else { &mut self.ordinary }
    }
}

/// Why an item was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PushError {
    Full,
    Closed,
}

impl<T> CommandQueue<T> {
    pub(crate) fn new(max: usize) -> std::io::Result<Self> {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let queues = Mutex::new(Queues { urgent: VecDeque::new(), ordinary: VecDeque::new(), closed: false });
        Ok(Self { queues, max, sleeping: AtomicBool::new(false), wakeup })
    }

    fn queues(&self) -> MutexGuard<'_, Queues<T>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an item, or returns it.
    pub(crate) fn push(&self, item: T, urgent: bool) -> Result<(), (T, PushError)> {
        let mut queues = self.queues();
        if queues.closed {
            return Err((item, PushError::Closed));
        }
        let queue = queues.of(urgent);
        if queue.len() >= self.max {
            return Err((item, PushError::Full));
        }
        queue.push_back(item);
        drop(queues);
        self.wake_sleeper();
        Ok(())
    }

    /// Appends an item even beyond the bound; returns it only when the queue is closed. For commands that callers bound.
    pub(crate) fn push_always(&self, item: T, urgent: bool) -> Result<(), T> {
        let mut queues = self.queues();
        if queues.closed {
            return Err(item);
        }
        queues.of(urgent).push_back(item);
        drop(queues);
        self.wake_sleeper();
        Ok(())
    }

    fn wake_sleeper(&self) {
        // Pairs with `sleep`: either it sees what was added, or this sees that it sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Ends a sleep.
    pub(crate) fn wake(&self) {
        // Full means that it is readable already.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    /// Moves up to `most` of what waits into `into`, urgent first. Returns whether there was anything.
    pub(crate) fn take(&self, into: &mut VecDeque<T>, most: usize) -> bool {
        let mut queues = self.queues();
        into.extend(queues.urgent.drain(..));
        let ordinary = queues.ordinary.len().min(most);
        into.extend(queues.ordinary.drain(..ordinary));
        !into.is_empty()
    }

    /// Says that the thread is about to sleep. `false`: something waits, so it must not.
    pub(crate) fn sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let queues = self.queues();
        let empty = queues.urgent.is_empty() && queues.ordinary.is_empty();
        drop(queues);
        if !empty {
            self.awake();
        }
        empty
    }

    /// Says that it does not sleep any more; returns whether it was woken up by [`CommandQueue::push`].
    pub(crate) fn awake(&self) -> bool {
        self.sleeping.store(false, Ordering::SeqCst);
        rustix::io::read(&self.wakeup, &mut [0; 8]).is_ok()
    }

    /// Readable when something was added while it slept.
    pub(crate) fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Takes nothing more, and gives out what waits.
    pub(crate) fn close(&self) -> VecDeque<T> {
        let mut queues = self.queues();
        queues.closed = true;
        let mut rest = std::mem::take(&mut queues.urgent);
        rest.append(&mut queues.ordinary);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_queue_has_its_bound_and_urgent_things_go_first() {
        let queue = CommandQueue::new(2).unwrap();
        for item in [1, 2] {
            queue.push(item, false).unwrap();
        }
        assert_eq!(queue.push(3, false), Err((3, PushError::Full)));
        queue.push(10, true).unwrap();
        let mut taken = VecDeque::new();
        assert!(queue.take(&mut taken, 1));
        assert_eq!(taken, [10, 1]);
        assert_eq!(queue.close(), [2]);
        assert_eq!(queue.push(4, true), Err((4, PushError::Closed)));
    }

    #[test]
    fn a_full_queue_takes_what_must_arrive_in_its_order() {
        let queue = CommandQueue::new(1).unwrap();
        for urgent in [false, true] {
            queue.push(1, urgent).unwrap();
            queue.push_always(2, urgent).unwrap();
            assert_eq!(queue.push(3, urgent), Err((3, PushError::Full)));
        }
        let mut taken = VecDeque::new();
        assert!(queue.take(&mut taken, 8));
        assert_eq!(taken, [1, 2, 1, 2]);
        queue.close();
        assert_eq!(queue.push_always(4, true), Err(4));
    }

    #[test]
    fn a_push_wakes_a_sleeper_once_and_a_full_queue_is_not_slept_on() {
        let queue = CommandQueue::new(8).unwrap();
        assert!(queue.sleep());
        queue.push(1, false).unwrap();
        queue.push(2, false).unwrap();
        assert!(queue.awake(), "woken");
        assert!(!queue.awake(), "only once");
        assert!(!queue.sleep(), "two things wait");
    }
}
