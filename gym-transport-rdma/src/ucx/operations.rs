//! What UCX has begun for a worker and not ended, so that a worker can be abandoned without leaking what they keep.

/// What an operation keeps until UCX calls back.
pub(super) trait Operation {
    /// UCX will not call back any more.
    fn cancel(self: Box<Self>);
}

/// The operations of one worker, by number. A number is given out again when its operation has ended.
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

    /// Any of them, which is taken out.
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
