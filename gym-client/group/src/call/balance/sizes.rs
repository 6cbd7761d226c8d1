//! The number of items of each batch, from the measured time of earlier batches. Has no clock, so properties can be tested.

use std::time::Duration;

/// The least number of batches for each rank. With fewer, a rank whose items are slow would end long after the others.
const BATCHES_PER_RANK: usize = 4;
/// One batch counts as much as its items. The sums of earlier batches are halved with each batch. When items become slower, quick ones of
/// the past then count at most as much as the slow ones.
const FADE: u128 = 2;
/// The sums have this many fractional units for each item, so that their halves are not rounded to zero.
const UNITS: u128 = 1_024;

/// Chooses the sizes of the batches of one list.
#[derive(Debug)]
pub(super) struct BatchSizes {
    target: Duration,
    items_max: usize,
    size: usize,
    /// The items of the measured batches, and their nanoseconds, both in units and with the older ones faded.
    items: u128,
    nanos: u128,
}

impl BatchSizes {
    /// Starts with batches of one item: nothing is known of the items.
    pub(super) fn new(target: Duration, items_max: usize) -> Self {
        Self { target, items_max: items_max.max(1), size: 1, items: 0, nanos: 0 }
    }

    /// Returns the size of the next batch, if `left` items have not been handed out and `ranks` ranks take batches. Near the end of the list,
    /// batches become smaller, so that all ranks end at about the same time.
    pub(super) fn next(&self, left: usize, ranks: usize) -> usize {
        let share = left / (ranks.max(1) * BATCHES_PER_RANK);
        self.size.min(self.items_max).min(share).max(1)
    }

    /// Records the time that a rank was busy with a batch.
    ///
    /// The size becomes the number of items that take the target time, but at most twice the measured batch. A few quick items therefore do not
    /// lead to a batch that takes minutes.
    pub(super) fn measured(&mut self, items: usize, busy: Duration) {
        self.items = self.items / FADE + items as u128 * UNITS;
        self.nanos = self.nanos / FADE + busy.as_nanos() * UNITS;
        let fitting = (self.items * self.target.as_nanos()).checked_div(self.nanos).unwrap_or(u128::MAX);
        let fitting = usize::try_from(fitting).unwrap_or(usize::MAX);
        self.size = fitting.clamp(1, self.size.max(items.saturating_mul(2)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TARGET: Duration = Duration::from_millis(20);
    const MANY: usize = 1_000_000;

    /// Hands out a list to ranks that take turns, and returns the sizes.
    fn batches(mut left: usize, ranks: usize, items_max: usize, mut busy: impl FnMut(usize) -> Duration) -> Vec<usize> {
        let mut sizes = BatchSizes::new(TARGET, items_max);
        let mut all = Vec::new();
        while left > 0 {
            let size = sizes.next(left, ranks);
            sizes.measured(size, busy(size));
            left -= size;
            all.push(size);
        }
        all
    }

    proptest! {
        #[test]
        fn no_batch_is_empty_and_each_keeps_its_limits(
            total in 1_usize..5_000,
            ranks in 1_usize..20,
            items_max in 1_usize..200,
            micros in proptest::collection::vec(0_u64..100_000, 1..50),
        ) {
            let mut times = micros.iter().cycle();
            let mut left = total;
            let mut largest = 1;
            let all = batches(total, ranks, items_max, |_| Duration::from_micros(*times.next().unwrap()));
            for size in &all {
                let share = left / (ranks * BATCHES_PER_RANK);
                prop_assert!(*size >= 1 && *size <= items_max && *size <= share.max(1), "{size} of {left}");
                prop_assert!(*size <= 2 * largest, "{size} after {largest}");
                largest = largest.max(*size);
                left -= size;
            }
            prop_assert_eq!(left, 0);
            prop_assert!(all.len() >= (ranks * BATCHES_PER_RANK).min(total), "{} batches", all.len());
        }

        #[test]
        fn items_of_equal_time_come_in_batches_of_the_target(nanos in 1_u64..60_000_000) {
            let each = Duration::from_nanos(nanos);
            let mut sizes = BatchSizes::new(TARGET, MANY);
            for _ in 0..30 {
                let size = sizes.next(usize::MAX, 1);
                sizes.measured(size, each * u32::try_from(size).unwrap());
            }
            let size = sizes.next(usize::MAX, 1);
            let takes = each * u32::try_from(size).unwrap();
            prop_assert!(size == 1 || takes <= TARGET, "{takes:?}");
            prop_assert!(size == MANY || takes + each > TARGET || size == 1, "{takes:?}");
        }

        #[test]
        fn items_that_become_slow_shrink_the_batches_within_a_few(quick in 10_u32..1_000, factor in 2_u32..500) {
            let mut sizes = BatchSizes::new(TARGET, MANY);
            let each = Duration::from_micros(u64::from(quick));
            for _ in 0..30 {
                let size = sizes.next(usize::MAX, 1);
                sizes.measured(size, each * u32::try_from(size).unwrap());
            }
            let slow = each * factor;
            let mut late = 0;
            for _ in 0..20 {
                let size = sizes.next(usize::MAX, 1);
                let takes = slow * u32::try_from(size).unwrap();
                late += u32::from(size > 1 && takes > 2 * TARGET);
                sizes.measured(size, takes);
            }
            // The first one could not know.
            prop_assert!(late <= 2, "{late} batches took longer than twice the target");
        }
    }

    #[test]
    fn several_measures_of_small_batches_do_not_add_up_to_a_large_one() {
        let mut sizes = BatchSizes::new(TARGET, MANY);
        (0..8).for_each(|_| sizes.measured(1, Duration::ZERO));
        assert_eq!(sizes.next(MANY, 1), 2);
        // One slow item among quick ones: the mean counts.
        sizes.measured(2, TARGET);
        assert!(sizes.next(MANY, 1) >= 2);
    }
}
