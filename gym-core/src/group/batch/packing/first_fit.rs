//! First fit: each sequence into the first bin with enough capacity.

/// Packs the sequences in `order`, each into the first bin with enough capacity. No sequence is longer than `capacity`.
pub(super) fn pack(lengths: &[usize], order: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut capacities = BinCapacities::new(order.len(), capacity);
    for &index in order {
        let bin = capacities.take_first(lengths[index]);
        if bin == bins.len() {
            bins.push(Vec::new());
        }
        bins[bin].push(index);
    }
    bins
}

/// A tournament tree over the free capacity of the bins: node `i` has the maximum of its children `2i` and `2i + 1`; bins are the leaves.
/// Bins that are not open yet have their full capacity, so the first bin that fits is an open one or the next to open.
struct BinCapacities {
    tree: Vec<usize>,
    leaves: usize,
}

impl BinCapacities {
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
