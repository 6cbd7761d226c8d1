//! Reorder buffer for one direction of a connection: UCX may deliver a short message before an announced one that was
//! sent earlier.

use std::collections::BTreeMap;

/// Holds messages that arrive out of order, up to a number and a total of bytes.
#[derive(Debug)]
pub(crate) struct ReorderBuffer<T> {
    next: u64,
    /// Messages by sequence number, each with its bytes.
    held: BTreeMap<u64, (usize, T)>,
    held_bytes: usize,
    reorder_max: usize,
    reorder_bytes_max: usize,
}

/// Protocol violation by the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ReorderError {
    #[error("message {0} arrived twice")]
    Twice(u64),
    #[error("message {found} arrived before message {missing}; no more than {reorder_max} may arrive early")]
    TooMany { found: u64, missing: u64, reorder_max: usize },
    #[error(
        "message {found} arrived before message {missing}; no more than {reorder_bytes_max} bytes may arrive early"
    )]
    TooLong { found: u64, missing: u64, reorder_bytes_max: usize },
}

impl<T> ReorderBuffer<T> {
    pub(crate) fn new(reorder_max: usize, reorder_bytes_max: usize) -> Self {
        Self { next: 0, held: BTreeMap::new(), held_bytes: 0, reorder_max, reorder_bytes_max }
    }

    /// Whether this message is the next one and none is held. Then [`ReorderBuffer::pass`] suffices.
    pub(crate) fn is_next(&self, sequence: u64) -> bool {
        sequence == self.next && self.held.is_empty()
    }

    /// Records that the next message was delivered at once.
    pub(crate) fn pass(&mut self) {
        self.next += 1;
    }

    /// Stores a message of this many bytes. [`ReorderBuffer::pop`] returns it in order.
    ///
    /// # Errors
    /// If the number was used before, or too many messages or bytes are held.
    pub(crate) fn hold(&mut self, sequence: u64, bytes: usize, message: T) -> Result<(), ReorderError> {
        if sequence < self.next || self.held.contains_key(&sequence) {
            return Err(ReorderError::Twice(sequence));
        }
        let (found, missing) = (sequence, self.next);
        // The next message always fits, because it is delivered at once.
        if found != missing && self.held.len() >= self.reorder_max {
            return Err(ReorderError::TooMany { found, missing, reorder_max: self.reorder_max });
        }
        if found != missing && self.held_bytes + bytes > self.reorder_bytes_max {
            return Err(ReorderError::TooLong { found, missing, reorder_bytes_max: self.reorder_bytes_max });
        }
        self.held_bytes += bytes;
        self.held.insert(sequence, (bytes, message));
        Ok(())
    }

    /// Returns the next message, if it has arrived.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let (bytes, message) = self.held.remove(&self.next)?;
        self.held_bytes -= bytes;
        self.next += 1;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_arrival_order_is_handed_up_as_it_was_sent(arrival in Just((0..40_u64).collect::<Vec<_>>()).prop_shuffle()) {
            let mut order = ReorderBuffer::new(40, 40);
            let mut seen = Vec::new();
            for sequence in arrival {
                if order.is_next(sequence) {
                    seen.push(sequence);
                    order.pass();
                } else {
                    order.hold(sequence, 1, sequence).unwrap();
                }
                seen.extend(std::iter::from_fn(|| order.pop()));
            }
            prop_assert_eq!(seen, (0..40).collect::<Vec<_>>());
            prop_assert_eq!(order.held_bytes, 0);
        }
    }

    #[test]
    fn what_came_twice_or_too_far_ahead_is_an_error() {
        let mut order = ReorderBuffer::new(2, 100);
        order.pass();
        assert_eq!(order.hold(0, 1, ()), Err(ReorderError::Twice(0)));
        order.hold(2, 1, ()).unwrap();
        assert_eq!(order.hold(2, 1, ()), Err(ReorderError::Twice(2)));
        order.hold(u64::MAX, 1, ()).unwrap();
        assert_eq!(order.hold(3, 1, ()), Err(ReorderError::TooMany { found: 3, missing: 1, reorder_max: 2 }));
        order.hold(1, 1, ()).unwrap();
        assert_eq!(std::iter::from_fn(|| order.pop()).count(), 2);
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_and_what_is_next_is_not() {
        let mut order = ReorderBuffer::new(9, 100);
        order.hold(2, 60, 2).unwrap();
        assert_eq!(order.hold(3, 41, 3), Err(ReorderError::TooLong { found: 3, missing: 0, reorder_bytes_max: 100 }));
        order.hold(3, 40, 3).unwrap();
        order.hold(0, 1_000, 0).unwrap();
        assert_eq!(order.pop(), Some(0));
        order.hold(1, 1_000, 1).unwrap();
        assert_eq!(std::iter::from_fn(|| order.pop()).collect::<Vec<_>>(), [1, 2, 3]);
        order.hold(5, 100, 5).unwrap();
    }
}
