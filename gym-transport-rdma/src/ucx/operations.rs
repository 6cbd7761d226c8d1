//! Pending operations of a worker, so that a worker can be abandoned without leaking their memory.

/// Memory and callback that an operation holds until UCX calls back.
pub(super) trait Operation {
    /// Frees the memory and calls back with an error, because UCX will not call back any more.
    fn cancel(self: Box<Self>);
}

/// Pending operations of one worker, by number. The number of a completed operation is reused.
#[derive(Default)]
pub(super) struct Operations {
    slots: Vec<Option<*mut dyn Operation>>,
    free: Vec<usize>,
}

impl Operations {
    pub(super) fn add(&mut self, operation: *mut dyn Operation) -> usize {
        let Some(slot) = self.free.pop() else {
            self.slots.push(Some(operation));
            return self.slots.len() - 1;
        };
        self.slots[slot] = Some(operation);
        slot
    }

    pub(super) fn remove(&mut self, slot: usize) {
        if self.slots[slot].take().is_some() {
            self.free.push(slot);
        }
    }

    /// Removes and returns any operation.
    pub(super) fn pop(&mut self) -> Option<*mut dyn Operation> {
        while let Some(operation) = self.slots.pop() {
            if operation.is_some() {
                self.free.clear();
                return operation;
            }
        }
        self.free.clear();
        None
    }
}
