//! What other threads want of the fabric's thread, and how it is woken up.
//!
//! Parcels have a bound. What ends something has none of its own: each connection is ended by two commands at most, and a thread
//! that is full of parcels is to hear of its end all the more.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Two lines with a bound each for parcels; the urgent one is emptied first.
pub(super) struct Queue<T> {
    lines: Mutex<Lines<T>>,
    max: usize,
    /// The thread sleeps, or is about to: whoever adds something wakes it up.
    sleeping: AtomicBool,
    wakeup: OwnedFd,
}

struct Lines<T> {
    urgent: VecDeque<T>,
    ordinary: VecDeque<T>,
    closed: bool,
}

impl<T> Lines<T> {
    fn of(&mut self, urgent: bool) -> &mut VecDeque<T> {
        if urgent { &mut self.urgent } else { &mut self.ordinary }
    }
}

/// Why something was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    Full,
    Closed,
}

impl<T> Queue<T> {
    pub(super) fn new(max: usize) -> std::io::Result<Self> {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let lines = Mutex::new(Lines { urgent: VecDeque::new(), ordinary: VecDeque::new(), closed: false });
        Ok(Self { lines, max, sleeping: AtomicBool::new(false), wakeup })
    }

    fn lines(&self) -> MutexGuard<'_, Lines<T>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts something in line, or gives it back.
    pub(super) fn push(&self, item: T, urgent: bool) -> Result<(), (T, Refused)> {
        let mut lines = self.lines();
        if lines.closed {
            return Err((item, Refused::Closed));
        }
        let line = lines.of(urgent);
        if line.len() >= self.max {
            return Err((item, Refused::Full));
        }
        line.push_back(item);
        drop(lines);
        self.wake_sleeper();
        Ok(())
    }

    /// Puts something in line however long the line is; gives it back only when the queue is closed. For what its callers bound.
    pub(super) fn push_always(&self, item: T, urgent: bool) -> Result<(), T> {
        let mut lines = self.lines();
        if lines.closed {
            return Err(item);
        }
        lines.of(urgent).push_back(item);
        drop(lines);
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
    pub(super) fn wake(&self) {
        // Full means that it is readable already.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    /// Moves up to `most` of what waits into `into`, urgent first. Returns whether there was anything.
    pub(super) fn take(&self, into: &mut VecDeque<T>, most: usize) -> bool {
        let mut lines = self.lines();
        into.extend(lines.urgent.drain(..));
        let ordinary = lines.ordinary.len().min(most);
        into.extend(lines.ordinary.drain(..ordinary));
        !into.is_empty()
    }

    /// Says that the thread is about to sleep. `false`: something waits, so it must not.
    pub(super) fn sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let lines = self.lines();
        let empty = lines.urgent.is_empty() && lines.ordinary.is_empty();
        drop(lines);
        if !empty {
            self.awake();
        }
        empty
    }

    /// Says that it does not sleep any more; returns whether it was woken up by [`Queue::push`].
    pub(super) fn awake(&self) -> bool {
        self.sleeping.store(false, Ordering::SeqCst);
        rustix::io::read(&self.wakeup, &mut [0; 8]).is_ok()
    }

    /// Readable when something was added while it slept.
    pub(super) fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Takes nothing more, and gives out what waits.
    pub(super) fn close(&self) -> VecDeque<T> {
        let mut lines = self.lines();
        lines.closed = true;
        let mut rest = std::mem::take(&mut lines.urgent);
        rest.append(&mut lines.ordinary);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_bound_and_urgent_things_go_first() {
        let queue = Queue::new(2).unwrap();
        for item in [1, 2] {
            queue.push(item, false).unwrap();
        }
        assert_eq!(queue.push(3, false), Err((3, Refused::Full)));
        queue.push(10, true).unwrap();
        let mut taken = VecDeque::new();
        assert!(queue.take(&mut taken, 1));
        assert_eq!(taken, [10, 1]);
        assert_eq!(queue.close(), [2]);
        assert_eq!(queue.push(4, true), Err((4, Refused::Closed)));
    }

    #[test]
    fn a_full_line_takes_what_must_arrive_in_its_order() {
        let queue = Queue::new(1).unwrap();
        for urgent in [false, true] {
            queue.push(1, urgent).unwrap();
            queue.push_always(2, urgent).unwrap();
            assert_eq!(queue.push(3, urgent), Err((3, Refused::Full)));
        }
        let mut taken = VecDeque::new();
        assert!(queue.take(&mut taken, 8));
        assert_eq!(taken, [1, 2, 1, 2]);
        queue.close();
        assert_eq!(queue.push_always(4, true), Err(4));
    }

    #[test]
    fn a_push_wakes_a_sleeper_once_and_a_full_queue_is_not_slept_on() {
        let queue = Queue::new(8).unwrap();
        assert!(queue.sleep());
        queue.push(1, false).unwrap();
        queue.push(2, false).unwrap();
        assert!(queue.awake(), "woken");
        assert!(!queue.awake(), "only once");
        assert!(!queue.sleep(), "two things wait");
    }
}
