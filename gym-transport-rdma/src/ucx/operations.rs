//! Pending operations of a worker, so that a worker can be abandoned without leaking their memory.

/// Memory and callback that an operation holds until UCX calls back.
pub(super) trait Operation {
    /// Frees the memory and calls back with an error, because UCX will not call back any more.
    fn cancel(self: Box<Self>);
}

/// Pending operations of one worker, by number. The number of a completed operation is reused.
#[derive(Default)]
pub(super) struct Operations {
    places: Vec<Option<*mut dyn Operation>>,
    free: Vec<usize>,
}

impl Operations {
    pub(super) fn add(&mut self, operation: *mut dyn Operation) -> usize {
        let Some(place) = self.free.pop() else {
            self.places.push(Some(operation));
            return self.places.len() - 1;
        };
        self.places[place] = Some(operation);
        place
    }

    pub(super) fn remove(&mut self, place: usize) {
        if self.places[place].take().is_some() {
            self.free.push(place);
        }
    }

    /// Removes and returns any operation.
    pub(super) fn pop(&mut self) -> Option<*mut dyn Operation> {
        while let Some(operation) = self.places.pop() {
            if operation.is_some() {
                self.free.clear();
                return operation;
            }
        }
        self.free.clear();
        None
    }
}
