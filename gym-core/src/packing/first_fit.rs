//! First fit: each sequence into the first bin that has room for it.

/// Packs the sequences in `order`, each into the first bin with room. None is longer than `capacity`.
pub(super) fn pack(lengths: &[usize], order: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut rooms = Rooms::new(order.len(), capacity);
    for &index in order {
        let bin = rooms.take_first(lengths[index]);
        if bin == bins.len() {
            bins.push(Vec::new());
        }
        bins[bin].push(index);
    }
    bins
}

/// A tournament tree over the room left in each bin: node `i` has the most of its children `2i` and `2i + 1`, bins are the leaves.
/// Bins that are not open yet have all their room, so the first bin that fits is an open one or the next to open.
struct Rooms {
    tree: Vec<usize>,
    leaves: usize,
}

impl Rooms {
    fn new(bins_max: usize, capacity: usize) -> Self {
        let leaves = bins_max.next_power_of_two();
        Self { tree: vec![capacity; 2 * leaves], leaves }
    }

    /// Takes `length` from the first bin that has it, and returns that bin.
    fn take_first(&mut self, length: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            node += usize::from(self.tree[node] < length);
        }
        let bin = node - self.leaves;
        self.tree[node] -= length;
        while node > 1 {
            node /= 2;
            let most = self.tree[2 * node].max(self.tree[2 * node + 1]);
            if self.tree[node] == most {
                break;
            }
            self.tree[node] = most;
        }
        bin
    }
}
