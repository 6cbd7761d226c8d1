//! Queue of commands to the fabric's thread, with its wake-up.
//!
//! The number of messages is bounded. Commands that end something are always accepted, even by a full queue: at most
//! two of them exist per connection.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

/// Two queues for urgent and ordinary commands, each with its own bound. The urgent queue is emptied first.
pub(crate) struct CommandQueue<T> {
    queues: Mutex<Queues<T>>,
    max: usize,
    /// The thread sleeps or is about to, so a push must wake it.
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

/// Reason why an item was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PushError {
    Full,
    Closed,
}

impl<T> CommandQueue<T> {
    /// Creates a queue with this bound for each class of commands.
    ///
    /// # Errors
    /// If the system has no descriptor for the wake-up.
    pub(crate) fn new(max: usize) -> std::io::Result<Self> {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let queues = Mutex::new(Queues { urgent: VecDeque::new(), ordinary: VecDeque::new(), closed: false });
        Ok(Self { queues, max, sleeping: AtomicBool::new(false), wakeup })
    }

    /// Appends an item. Returns it if the queue is full or closed.
    ///
    /// # Errors
    /// The item, and [`PushError`].
    pub(crate) fn push(&self, item: T, urgent: bool) -> Result<(), (T, PushError)> {
        let mut queues = self.queues.lock();
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

    /// Appends an item even beyond the bound, for commands whose number is bounded otherwise. Returns it if the queue
    /// is closed.
    ///
    /// # Errors
    /// The item.
    pub(crate) fn push_always(&self, item: T, urgent: bool) -> Result<(), T> {
        let mut queues = self.queues.lock();
        if queues.closed {
            return Err(item);
        }
        queues.of(urgent).push_back(item);
        drop(queues);
        self.wake_sleeper();
        Ok(())
    }

    fn wake_sleeper(&self) {
        // Pairs with the fence in `sleep`: either `sleep` sees the new item, or this sees that the thread sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        // A full eventfd is readable already.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    /// Moves all urgent items and up to `most` ordinary ones into `into`. Returns whether `into` has any.
    pub(crate) fn take(&self, into: &mut VecDeque<T>, most: usize) -> bool {
        let mut queues = self.queues.lock();
        into.extend(queues.urgent.drain(..));
        let ordinary = queues.ordinary.len().min(most);
        into.extend(queues.ordinary.drain(..ordinary));
        !into.is_empty()
    }

    /// Announces that the thread is about to sleep. Returns `false` if the queue is not empty, so the thread must not
    /// sleep.
    pub(crate) fn sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let queues = self.queues.lock();
        let empty = queues.urgent.is_empty() && queues.ordinary.is_empty();
        drop(queues);
        if !empty {
            self.awake();
        }
        empty
    }

    /// Ends the announcement of [`CommandQueue::sleep`]. Returns whether a push woke the thread.
    pub(crate) fn awake(&self) -> bool {
        self.sleeping.store(false, Ordering::SeqCst);
        rustix::io::read(&self.wakeup, &mut [0; 8]).is_ok()
    }

    /// Descriptor that becomes readable when an item is pushed during a sleep.
    pub(crate) fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Rejects all later items, and returns the remaining ones.
    pub(crate) fn close(&self) -> VecDeque<T> {
        let mut queues = self.queues.lock();
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
