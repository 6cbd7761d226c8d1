//! The line before a worker: in order of arrival, with a bound. A task takes all that has arrived at once, so that it and those who
//! call seldom hold the lock at the same time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker, ready};

use tokio::task::coop;

/// A queue of at most `items_max`, and its two ends. Where it is full, items that have `left` are cleared away, which costs a look at
/// all: give it twice the room that those who stay need.
pub(crate) fn queue<T>(items_max: usize, left: fn(&T) -> bool) -> (Entrance<T>, Arrivals<T>) {
    let line = Line { items: VecDeque::new(), lane: None, closed: false };
    let queue = Arc::new(Queue { items_max, left, line: Mutex::new(line), arrived: Condvar::new() });
    (Entrance(Arc::clone(&queue)), Arrivals { queue, taken: VecDeque::new() })
}

struct Queue<T> {
    items_max: usize,
    left: fn(&T) -> bool,
    line: Mutex<Line<T>>,
    arrived: Condvar,
}

struct Line<T> {
    items: VecDeque<T>,
    lane: Option<Lane>,
    /// Nobody takes items any more.
    closed: bool,
}

/// Who waits for an item.
enum Lane {
    Task(Waker),
    Thread,
}

impl<T> Queue<T> {
    fn line(&self) -> MutexGuard<'_, Line<T>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, lane: Option<Lane>) {
        match lane {
            Some(Lane::Task(waker)) => waker.wake(),
            Some(Lane::Thread) => self.arrived.notify_one(),
            None => {}
        }
    }
}

/// Where items are put in.
pub(crate) struct Entrance<T>(Arc<Queue<T>>);

impl<T> Entrance<T> {
    /// Puts an item at the end of the line; gives it back when the line is full or nobody takes items any more.
    pub(crate) fn put(&self, item: T) -> Result<(), T> {
        // Made before the lock is taken, so that it is dropped after that is free: an item's drop runs what others wrote.
        let mut cleared = VecDeque::new();
        let mut line = self.0.line();
        if line.items.len() >= self.0.items_max {
            (cleared, line.items) = std::mem::take(&mut line.items).into_iter().partition(self.0.left);
        }
        if line.closed || line.items.len() >= self.0.items_max {
            return Err(item);
        }
        line.items.push_back(item);
        let lane = line.lane.take();
        drop(line);
        self.0.wake(lane);
        drop(cleared);
        Ok(())
    }

    /// Nothing more is put in, and nothing that is in the line is taken out: it is dropped here.
    pub(crate) fn close(&self) {
        let (left, lane) = {
            let mut line = self.0.line();
            line.closed = true;
            (std::mem::take(&mut line.items), line.lane.take())
        };
        self.0.wake(lane);
        drop(left);
    }
}

/// Where items are taken out, by one task or thread.
pub(crate) struct Arrivals<T> {
    queue: Arc<Queue<T>>,
    /// Those that arrived together and have not been asked for yet.
    taken: VecDeque<T>,
}

impl<T> Arrivals<T> {
    /// The next item. Gives way to other tasks now and then, as everything of tokio's does.
    pub(crate) async fn next(&mut self) -> T {
        poll_fn(|cx| {
            let proceeding = ready!(coop::poll_proceed(cx));
            if self.taken.is_empty() {
                let mut line = self.queue.line();
                std::mem::swap(&mut line.items, &mut self.taken);
                if self.taken.is_empty() {
                    let before = line.lane.replace(Lane::Task(cx.waker().clone()));
                    drop(line);
                    drop(before);
                    return Poll::Pending;
                }
            }
            proceeding.made_progress();
            Poll::Ready(self.taken.pop_front().expect("some were taken, or it has returned"))
        })
        .await
    }

    /// The next item, for a thread that may block; `None` once the line is closed. One at a time: what a thread that blocks has not
    /// asked for is still in the line when that is closed.
    pub(crate) fn blocking_next(&mut self) -> Option<T> {
        let mut line = self.queue.line();
        loop {
            if let Some(item) = line.items.pop_front() {
                return Some(item);
            }
            if line.closed {
                return None;
            }
            line.lane = Some(Lane::Thread);
            line = self.queue.arrived.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Arrivals<T> {
    fn drop(&mut self) {
        let mut line = self.queue.line();
        line.closed = true;
        let left = std::mem::take(&mut line.items);
        drop(line);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn items_come_out_in_the_order_in_which_they_went_in() {
        let (entrance, mut arrivals) = queue(1_000, |_| false);
        let taking = tokio::spawn(async move {
            let mut taken = Vec::new();
            while taken.len() < 1_000 {
                taken.push(arrivals.next().await);
            }
            taken
        });
        for number in 0..1_000 {
            entrance.put(number).unwrap();
            if number % 7 == 0 {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(taking.await.unwrap(), (0..1_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_thread_that_waits_is_woken_by_each_item() {
        let (entrance, mut arrivals) = queue(2, |_| false);
        let (told, heard) = std::sync::mpsc::sync_channel(100);
        let taking = std::thread::spawn(move || {
            while let Some(number) = arrivals.blocking_next() {
                told.send(number).unwrap();
            }
        });
        for number in 0..100 {
            entrance.put(number).unwrap();
            assert_eq!(heard.recv_timeout(std::time::Duration::from_secs(10)), Ok(number));
        }
        entrance.close();
        taking.join().unwrap();
        assert_eq!(entrance.put(100), Err(100));
    }

    #[tokio::test]
    async fn those_who_have_left_a_full_line_make_room() {
        let (entrance, mut arrivals) = queue(4, |number| number % 2 == 1);
        assert!((0..1_000).all(|_| entrance.put(1) == Ok(())));
        assert_eq!([2, 4, 6, 8, 10].map(|number| entrance.put(number)), [Ok(()), Ok(()), Ok(()), Ok(()), Err(10)]);
        assert_eq!(arrivals.next().await, 2);
    }

    #[tokio::test]
    async fn a_full_line_and_one_that_nobody_serves_give_the_item_back() {
        let (entrance, mut arrivals) = queue(2, |_| false);
        assert_eq!([entrance.put(1), entrance.put(2), entrance.put(3)], [Ok(()), Ok(()), Err(3)]);
        assert_eq!(arrivals.next().await, 1);
        drop(arrivals);
        assert_eq!(entrance.put(4), Err(4));
    }

    #[tokio::test]
    async fn who_takes_items_gives_way_to_others() {
        let (entrance, mut arrivals) = queue(10_000, |_| false);
        (0..10_000).for_each(|number| entrance.put(number).unwrap());
        let taking = tokio::spawn(async move {
            for _ in 0..10_000 {
                arrivals.next().await;
            }
        });
        tokio::task::yield_now().await;
        assert!(!taking.is_finished());
        taking.await.unwrap();
    }
}
