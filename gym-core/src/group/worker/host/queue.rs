//! A bounded FIFO queue for one consumer. A task takes all available items at once, so that consumer and callers seldom contend
//! for the lock.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker, ready};

use parking_lot::{Condvar, Mutex};
use tokio::task::coop;

/// Creates a queue of at most `items_max` items. A full queue removes items for which `is_cancelled` returns `true`, which visits
/// every item: choose twice the number of items that stay.
pub(crate) fn queue<T>(items_max: usize, is_cancelled: fn(&T) -> bool) -> (QueueSender<T>, QueueReceiver<T>) {
    let state = State { items: VecDeque::new(), consumer: None, closed: false };
    let queue = Arc::new(Queue { items_max, is_cancelled, state: Mutex::new(state), arrived: Condvar::new() });
    (QueueSender(Arc::clone(&queue)), QueueReceiver { queue, taken: VecDeque::new() })
}

struct Queue<T> {
    items_max: usize,
    is_cancelled: fn(&T) -> bool,
    state: Mutex<State<T>>,
    arrived: Condvar,
}

struct State<T> {
    items: VecDeque<T>,
    /// The consumer, if it waits for an item.
    consumer: Option<Consumer>,
    /// `true` if the queue rejects further items.
    closed: bool,
}

/// The handle that wakes a waiting consumer.
enum Consumer {
    Task(Waker),
    Thread,
}

impl<T> Queue<T> {
    fn wake(&self, consumer: Option<Consumer>) {
        match consumer {
            Some(Consumer::Task(waker)) => waker.wake(),
            Some(Consumer::Thread) => _ = self.arrived.notify_one(),
            None => {}
        }
    }
}

/// The sending end of a queue.
pub(crate) struct QueueSender<T>(Arc<Queue<T>>);

impl<T> QueueSender<T> {
    /// Appends an item. Returns the item if the queue is full or closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        // Declared before the lock is acquired, so that it is dropped after the lock: dropping an item runs foreign code.
        let mut removed = VecDeque::new();
        let mut state = self.0.state.lock();
        if state.items.len() >= self.0.items_max {
            (removed, state.items) = std::mem::take(&mut state.items).into_iter().partition(self.0.is_cancelled);
        }
        if state.closed || state.items.len() >= self.0.items_max {
            return Err(item);
        }
        state.items.push_back(item);
        let consumer = state.consumer.take();
        drop(state);
        self.0.wake(consumer);
        drop(removed);
        Ok(())
    }

    /// Closes the queue and drops the items in it.
    pub(crate) fn close(&self) {
        let (dropped, consumer) = {
            let mut state = self.0.state.lock();
            state.closed = true;
            (std::mem::take(&mut state.items), state.consumer.take())
        };
        self.0.wake(consumer);
        drop(dropped);
    }
}

/// The receiving end of a queue, for one task or thread.
pub(crate) struct QueueReceiver<T> {
    queue: Arc<Queue<T>>,
    /// Items that were taken together and have not been returned yet.
    taken: VecDeque<T>,
}

impl<T> QueueReceiver<T> {
    /// Waits for the next item. Yields to other tasks now and then, within tokio's cooperative budget.
    pub(crate) async fn next(&mut self) -> T {
        poll_fn(|cx| {
            let proceeding = ready!(coop::poll_proceed(cx));
            if self.taken.is_empty() {
                let mut state = self.queue.state.lock();
                std::mem::swap(&mut state.items, &mut self.taken);
                if self.taken.is_empty() {
                    let before = state.consumer.replace(Consumer::Task(cx.waker().clone()));
                    drop(state);
                    drop(before);
                    return Poll::Pending;
                }
            }
            proceeding.made_progress();
            Poll::Ready(self.taken.pop_front().expect("an empty list has returned above"))
        })
        .await
    }

    /// Waits for the next item on a thread that may block; returns `None` once the queue is closed. Takes one item at a time:
    /// items that a blocked thread has not requested are still in the queue when it is closed.
    pub(crate) fn blocking_next(&mut self) -> Option<T> {
        let mut state = self.queue.state.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                return Some(item);
            }
            if state.closed {
                return None;
            }
            state.consumer = Some(Consumer::Thread);
            self.queue.arrived.wait(&mut state);
        }
    }
}

impl<T> Drop for QueueReceiver<T> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.items);
        drop(state);
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn items_come_out_in_the_order_in_which_they_went_in() {
        let (sender, mut receiver) = queue(1_000, |_| false);
        let taking = tokio::spawn(async move {
            let mut taken = Vec::new();
            while taken.len() < 1_000 {
                taken.push(receiver.next().await);
            }
            taken
        });
        for number in 0..1_000 {
            sender.push(number).unwrap();
            if number % 7 == 0 {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(taking.await.unwrap(), (0..1_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_thread_that_waits_is_woken_by_each_item() {
        let (sender, mut receiver) = queue(2, |_| false);
        let (taken, received) = std::sync::mpsc::sync_channel(100);
        let taking = std::thread::spawn(move || {
            while let Some(number) = receiver.blocking_next() {
                taken.send(number).unwrap();
            }
        });
        for number in 0..100 {
            sender.push(number).unwrap();
            assert_eq!(received.recv_timeout(std::time::Duration::from_secs(60)), Ok(number));
        }
        sender.close();
        taking.join().unwrap();
        assert_eq!(sender.push(100), Err(100));
    }

    #[tokio::test]
    async fn cancelled_items_of_a_full_queue_make_room() {
        let (sender, mut receiver) = queue(4, |number| number % 2 == 1);
        assert!((0..1_000).all(|_| sender.push(1) == Ok(())));
        assert_eq!([2, 4, 6, 8, 10].map(|number| sender.push(number)), [Ok(()), Ok(()), Ok(()), Ok(()), Err(10)]);
        assert_eq!(receiver.next().await, 2);
    }

    #[tokio::test]
    async fn a_full_queue_and_one_without_a_receiver_return_the_item() {
        let (sender, mut receiver) = queue(2, |_| false);
        assert_eq!([sender.push(1), sender.push(2), sender.push(3)], [Ok(()), Ok(()), Err(3)]);
        assert_eq!(receiver.next().await, 1);
        drop(receiver);
        assert_eq!(sender.push(4), Err(4));
    }

    #[tokio::test]
    async fn the_receiver_yields_to_other_tasks() {
        let (sender, mut receiver) = queue(10_000, |_| false);
        (0..10_000).for_each(|number| sender.push(number).unwrap());
        let taking = tokio::spawn(async move {
            for _ in 0..10_000 {
                receiver.next().await;
            }
        });
        tokio::task::yield_now().await;
        assert!(!taking.is_finished());
        taking.await.unwrap();
    }
}
