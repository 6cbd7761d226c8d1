//! Classes of work, and the order in which they are served.
//!
//! The order is that of worst-case fair weighted fair queueing (Bennett and Zhang, "WF2Q+", 1997) with items of equal size: among
//! the classes that are not ahead of their share, the one that would be ahead last. While the same classes have waiting items, each
//! has received its share of the items handed out, plus or minus one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::rollout::work::WorkId;

/// The service that one item of weight 1 takes, in the units of virtual time. Large, so that the remainders of divisions by weights
/// do not add up to an item in 2^32 items.
const UNIT: u128 = 1 << 64;

/// Names a class of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClassId(pub(super) usize);

/// The waiting items of one class.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) name: Arc<str>,
    pub(super) weight: u32,
    /// An item may be handed out again after its worker was lost, without harm.
    pub(super) repeatable: bool,
    /// In the order of their numbers: an item that is handed out again is the longest waiting one.
    pub(super) waiting: BTreeSet<WorkId>,
    /// The moving average of the time from the assignment of an item until it is finished.
    pub(super) took: Option<Duration>,
    /// Virtual time from which the next item may be served.
    start: u128,
}

impl Class {
    fn finish(&self) -> u128 {
        self.start + UNIT / u128::from(self.weight)
    }

    pub(super) fn finished_after(&mut self, took: Duration) {
        // An eighth of each sample, as for round-trip times (RFC 6298).
        self.took = Some(self.took.map_or(took, |average| average - average / 8 + took / 8));
    }
}

/// All classes of a queue.
#[derive(Debug, Default)]
pub(super) struct Classes {
    all: Vec<Class>,
    virtual_time: u128,
    /// Sum of the weights of the classes with waiting items.
    active_weight: u128,
    /// Classes with waiting items. Few, while a collection may have hundreds of classes.
    active: BTreeSet<usize>,
    waiting: usize,
}

impl Classes {
    pub(super) fn find(&self, name: &str) -> Option<ClassId> {
        self.all.iter().position(|class| &*class.name == name).map(ClassId)
    }

    pub(super) fn add(&mut self, name: Arc<str>, weight: u32, repeatable: bool) -> ClassId {
        let waiting = BTreeSet::new();
        self.all.push(Class { name, weight: weight.max(1), repeatable, waiting, took: None, start: 0 });
        ClassId(self.all.len() - 1)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, id: ClassId) -> &Class {
        &self.all[id.0]
    }

    pub(super) fn get_mut(&mut self, id: ClassId) -> &mut Class {
        &mut self.all[id.0]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Class> {
        self.all.iter()
    }

    /// Returns the number of waiting items of all classes.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    pub(super) fn push(&mut self, id: ClassId, item: WorkId) {
        let class = &mut self.all[id.0];
        if class.waiting.is_empty() {
            // A class does not save up service while it has no items.
            class.start = class.start.max(self.virtual_time);
            self.active.insert(id.0);
            self.active_weight += u128::from(class.weight);
        }
        self.waiting += usize::from(class.waiting.insert(item));
    }

    /// Removes a waiting item without serving it.
    pub(super) fn remove(&mut self, id: ClassId, item: WorkId) {
        let class = &mut self.all[id.0];
        if class.waiting.remove(&item) {
            self.waiting -= 1;
            self.deactivate_if_empty(id);
        }
    }

    fn deactivate_if_empty(&mut self, id: ClassId) {
        let class = &self.all[id.0];
        if class.waiting.is_empty() && self.active.remove(&id.0) {
            self.active_weight -= u128::from(class.weight);
        }
    }

    /// Returns `true` if a class that `allowed` accepts has a waiting item.
    pub(super) fn any(&self, allowed: impl Fn(&Class) -> bool) -> bool {
        self.active.iter().any(|at| allowed(&self.all[*at]))
    }

    /// Returns the class to serve next among those that `allowed` accepts.
    pub(super) fn next(&mut self, allowed: impl Fn(&Class) -> bool) -> Option<ClassId> {
        let earliest = self.active.iter().map(|at| self.all[*at].start).min()?;
        self.virtual_time = self.virtual_time.max(earliest);
        let now = self.virtual_time;
        let candidates = self.active.iter().copied().filter(|at| allowed(&self.all[*at]));
        // A worker that serves few classes gets an item of theirs even if they are ahead of their share.
        candidates
            .min_by_key(|at| {
                let class = &self.all[*at];
                (class.start > now, if class.start > now { class.start } else { class.finish() }, *at)
            })
            .map(ClassId)
    }

    /// Serves the longest waiting item of a class.
    pub(super) fn serve(&mut self, id: ClassId) -> Option<WorkId> {
        let weight = self.active_weight;
        let class = &mut self.all[id.0];
        let item = class.waiting.pop_first()?;
        class.start = class.finish();
        self.virtual_time += UNIT / weight.max(1);
        self.waiting -= 1;
        self.deactivate_if_empty(id);
        Some(item)
    }
}
