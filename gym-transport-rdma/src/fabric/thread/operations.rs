//! Operations of a connection that UCX has started and not completed.

use std::cell::RefCell;
use std::collections::HashMap;

use gym_core::{Error, Result};

use crate::fabric::handle::message::{SentCallback, finish};

/// Send operations of a connection with their callbacks. A receive operation only holds a reference.
#[derive(Default)]
pub(crate) struct PendingOperations(RefCell<(u64, HashMap<u64, Option<SentCallback>>)>);

impl PendingOperations {
    /// Adds an operation. Returns its number.
    pub(crate) fn begin(&self, done: Option<SentCallback>) -> u64 {
        let (last, operations) = &mut *self.0.borrow_mut();
        *last += 1;
        operations.insert(*last, done);
        *last
    }

    /// Removes a completed operation, and calls its callback with the result.
    pub(crate) fn end(&self, operation: u64, result: Result<()>) {
        let done = self.0.borrow_mut().1.remove(&operation).flatten();
        finish(done, result);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.borrow().1.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fails all pending callbacks. UCX may continue to use the memory, which stays with the operations.
    pub(crate) fn fail_all(&self, error: impl Fn() -> Error) {
        let operations = std::mem::take(&mut self.0.borrow_mut().1);
        for done in operations.into_values() {
            finish(done, Err(error()));
        }
    }
}
