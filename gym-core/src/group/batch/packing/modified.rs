//! Modified first fit decreasing: Johnson and Garey, *A 71/60 theorem for bin packing* (1985), with the last phase of NeMo RL.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A bin under construction.
struct Bin {
    sequences: Vec<usize>,
    room: usize,
}

impl Bin {
    fn put(&mut self, sequence: usize, length: usize) {
        self.sequences.push(sequence);
        self.room -= length;
    }
}

/// Packs sequences of positive lengths, all at most `capacity`.
pub(super) fn pack(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    // All four classes, longest first; of equal lengths, the earlier one first.
    let descending = super::longest_first(lengths, false);
    let longer_than = |part: usize| descending.partition_point(|sequence| lengths[*sequence] > capacity / part);
    let (large, medium, small) = (longer_than(2), longer_than(3), longer_than(6));

    let mut bins: Vec<Bin> = (descending[..large].iter())
        .map(|&sequence| Bin { sequences: vec![sequence], room: capacity - lengths[sequence] })
        .collect();
    let mut mediums = Sorted::new(&descending[large..medium]);
    for bin in &mut bins {
        let fits = mediums.all.partition_point(|sequence| lengths[*sequence] > bin.room);
        if let Some(sequence) = mediums.take_from(fits) {
            bin.put(sequence, lengths[sequence]);
        }
    }

    let mut ascending: Vec<usize> = descending[medium..small].to_vec();
    ascending.sort_unstable_by_key(|sequence| (lengths[*sequence], *sequence));
    let rest = add_two_small(&mut bins, &ascending, lengths);

    // Each class is sorted, and all sequences of the first two classes are longer than those of the next class.
    let rest: Vec<usize> = mediums.left().chain(rest).chain(descending[small..].iter().copied()).collect();
    let mut rest = Sorted::new(&rest);
    for bin in &mut bins {
        loop {
            let fits = rest.all.partition_point(|sequence| lengths[*sequence] > bin.room);
            let Some(sequence) = rest.take_from(fits) else { break };
            bin.put(sequence, lengths[sequence]);
        }
    }

    let mut packed: Vec<Vec<usize>> = bins.into_iter().map(|bin| bin.sequences).collect();
    packed.extend(spread(rest.left(), lengths, capacity));
    packed
}

/// Visits the bins from the last to the first, and adds two sequences to each bin without a medium one. These are the shortest
/// small sequence, and the longest that still fits next to it (of equal lengths, the latest). Returns the remaining sequences,
/// longest first; of equal lengths, the earlier one first.
///
/// The shortest sequences are taken from the front. Sequences that were taken further back are skipped through links to the left.
fn add_two_small(bins: &mut [Bin], ascending: &[usize], lengths: &[usize]) -> Vec<usize> {
    let mut free = Backward::new(ascending.len());
    let length = |at: usize| lengths[ascending[at]];
    let mut front = 0;
    for bin in bins.iter_mut().rev().filter(|bin| bin.sequences.len() == 1) {
        while front < ascending.len() && free.is_taken(front) {
            front += 1;
        }
        if front + 1 >= ascending.len() || length(front) >= bin.room {
            continue;
        }
        let fits = ascending.partition_point(|sequence| lengths[*sequence] <= bin.room - length(front));
        // If no second sequence fits, the last that fits is `front` itself.
        let Some(second) = free.last_before(fits).filter(|second| *second > front) else { continue };
        bin.put(ascending[front], length(front));
        bin.put(ascending[second], length(second));
        free.take(front);
        free.take(second);
    }
    let mut left: Vec<usize> = (0..ascending.len()).filter(|at| !free.is_taken(*at)).map(|at| ascending[at]).collect();
    left.sort_by_key(|sequence| Reverse(lengths[*sequence]));
    left
}

/// Adds the sequences, longest first, to the least loaded bin; of equal bins, to the one whose load has not changed for longest.
/// Opens a new bin if the sequence does not fit there. Returns the bins in ascending order of load.
fn spread(longest_first: impl Iterator<Item = usize>, lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut least_loaded: BinaryHeap<Reverse<(usize, usize, usize)>> = BinaryHeap::new();
    for (turn, sequence) in longest_first.enumerate() {
        let length = lengths[sequence];
        let fits = least_loaded.peek().is_some_and(|Reverse((load, _, _))| length <= capacity - load);
        // Changed in place, the bin moves down the heap once; removed and added again, it would move twice.
        if fits && let Some(mut least) = least_loaded.peek_mut() {
            let Reverse((load, since, bin)) = &mut *least;
            bins[*bin].push(sequence);
            (*load, *since) = (*load + length, turn);
        } else {
            least_loaded.push(Reverse((length, turn, bins.len())));
            bins.push(vec![sequence]);
        }
    }
    let order = least_loaded.into_sorted_vec();
    order.into_iter().rev().map(|Reverse((_, _, bin))| std::mem::take(&mut bins[bin])).collect()
}

/// Sequences in a fixed order, some of which have been taken.
struct Sorted<'a> {
    all: &'a [usize],
    /// For each position, a position from which to search for the next remaining sequence; the position itself if its sequence
    /// remains.
    next: Vec<usize>,
}

impl<'a> Sorted<'a> {
    fn new(all: &'a [usize]) -> Self {
        Self { all, next: (0..=all.len()).collect() }
    }

    /// Takes the first remaining sequence at `from` or after it.
    fn take_from(&mut self, from: usize) -> Option<usize> {
        let at = root(&mut self.next, from);
        let taken = *self.all.get(at)?;
        self.next[at] = at + 1;
        Some(taken)
    }

    fn left(&self) -> impl Iterator<Item = usize> {
        self.all.iter().enumerate().filter(|(at, _)| self.next[*at] == *at).map(|(_, sequence)| *sequence)
    }
}

/// The free positions of `0..n`, as links to the left. Link 0 stands for "none", so position `i` has link `i + 1`.
struct Backward(Vec<usize>);

impl Backward {
    fn new(n: usize) -> Self {
        Self((0..=n).collect())
    }

    fn is_taken(&self, at: usize) -> bool {
        self.0[at + 1] != at + 1
    }

    fn take(&mut self, at: usize) {
        self.0[at + 1] = at;
    }

    /// Returns the last free position before `end`.
    fn last_before(&mut self, end: usize) -> Option<usize> {
        root(&mut self.0, end).checked_sub(1)
    }
}

/// Follows the links to their end, and shortens the path for later searches by half.
fn root(links: &mut [usize], mut at: usize) -> usize {
    while links[at] != at {
        links[at] = links[links[at]];
        at = links[at];
    }
    at
}
