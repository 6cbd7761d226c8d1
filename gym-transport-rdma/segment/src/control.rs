//! The words of a segment: a barrier for all ranks, the abort, how far each rank is, and what it calls.

use std::time::{Duration, Instant};

use gym_core::Error;
use gym_core::group::DType;
use gym_core::group::collective::{Call, Collective, ReduceOp};
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use crate::failure::Failure;
use crate::layout::{Half, Layout};
use crate::mapping::Mapping;
use crate::time::{timespec, until};

/// Bit of the generation that ends it. It is in the word on which ranks sleep, so that no rank can fall asleep after it
/// was set.
const ABORTED: u32 = 1 << 31;
/// The longest sleep. A rank that dies between opening a barrier and waking the others delays them by this.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// The words of a mapped segment.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) mapping: Mapping,
    pub(crate) layout: Layout,
}

/// The call of a rank; `None` if it cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announced {
    pub(crate) call: Option<Call>,
    /// Further facts about the operation. The barrier and the abort do not look at it.
    pub(crate) detail: u64,
}

impl Control {
    // ---- abort ----

    pub(crate) fn abort(&self) {
        let generation = self.mapping.word(self.layout.generation());
        // Wakes also if the bit was set: who set it may have died before waking.
        generation.fetch_or(ABORTED, SeqCst);
        self.wake_all();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.mapping.word(self.layout.generation()).load(Acquire) & ABORTED != 0
    }

    fn wake_all(&self) {
        let generation = self.mapping.word(self.layout.generation());
        // It fails only for a wrong address. Not `Flags::PRIVATE`: the ranks are processes.
        let _ = futex::wake(generation, Flags::empty(), i32::MAX as u32);
    }

    // ---- the barrier ----

    /// Comes to barrier `number`, and waits for the other ranks. Either every rank that waits gets `Ok`, or none does:
    /// the generation decides, by one exchange that opens the barrier or ends it.
    pub(crate) fn arrive(&self, position: usize, number: u64, deadline: Instant) -> Result<(), Failure> {
        let generation = self.mapping.word(self.layout.generation());
        let current = generation_of(number);
        self.mapping.long_word(self.layout.progress(position)).store(number + 1, Release);
        let arrived = self.mapping.word(self.layout.arrived());
        if arrived.fetch_add(1, AcqRel) + 1 == self.layout.world_size as u32 {
            // Before the barrier opens: nobody comes to the next one until then.
            arrived.store(0, Relaxed);
            return match generation.compare_exchange(current, generation_of(number + 1), SeqCst, SeqCst) {
                Ok(_) => {
                    // A rank that has not counted itself as a waiter yet sees the new generation. Both sides are
                    // sequentially consistent for that.
                    if self.mapping.word(self.layout.waiters()).load(SeqCst) > 0 {
                        self.wake_all();
                    }
                    Ok(())
                }
                Err(_) => Err(Failure::Aborted),
            };
        }
        let waiters = self.mapping.word(self.layout.waiters());
        waiters.fetch_add(1, SeqCst);
        let waited = self.wait(number, deadline);
        // A rank that is killed stays counted: a wake too many for each barrier, of an epoch that is about to end.
        waiters.fetch_sub(1, Relaxed);
        waited
    }

    fn wait(&self, number: u64, deadline: Instant) -> Result<(), Failure> {
        let generation = self.mapping.word(self.layout.generation());
        let current = generation_of(number);
        loop {
            let seen = generation.load(SeqCst);
            // Opened first, if it was aborted later: then it has opened for all.
            if seen & !ABORTED == generation_of(number + 1) {
                return Ok(());
            }
            // Aborted, now or at an earlier barrier.
            if seen != current {
                return Err(Failure::Aborted);
            }
            let Some(left) = until(deadline) else {
                if generation.compare_exchange(current, current | ABORTED, SeqCst, SeqCst).is_ok() {
                    self.wake_all();
                    return Err(Failure::Late { missing: self.missing(number) });
                }
                continue;
            };
            match futex::wait(generation, Flags::empty(), current, Some(&timespec(left.min(SLEEP_MAX)))) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(defect) => {
                    self.abort();
                    let error = Error::internal("").about("wait for the other ranks of a segment").caused_by(defect);
                    return Err(Failure::System(error));
                }
            }
        }
    }

    /// The number of barriers that each rank has come to.
    pub(crate) fn progress(&self) -> Vec<u64> {
        (0..self.layout.world_size)
            .map(|position| self.mapping.long_word(self.layout.progress(position)).load(Acquire))
            .collect()
    }

    fn missing(&self, number: u64) -> Vec<usize> {
        self.progress().iter().enumerate().filter(|(_, come)| **come <= number).map(|(position, _)| position).collect()
    }

    // ---- seats ----

    /// Takes a position. Returns `false` if it was taken before.
    pub(crate) fn claim(&self, position: usize) -> bool {
        self.mapping.word(self.layout.claimed(position)).compare_exchange(0, 1, AcqRel, Acquire).is_ok()
    }

    // ---- calls ----

    /// Writes what a rank calls, for those that pass the next barrier.
    pub(crate) fn announce(&self, position: usize, half: Half, call: Call, detail: u64) {
        let at = self.layout.call(position, half);
        let words = [encode(call), call.elements as u64, detail];
        for (index, word) in words.into_iter().enumerate() {
            // The barrier orders them.
            self.mapping.long_word(at + 8 * index).store(word, Relaxed);
        }
    }

    /// Reads what a rank calls.
    pub(crate) fn announced(&self, position: usize, half: Half) -> Announced {
        let at = self.layout.call(position, half);
        let [call, elements, detail] = [0, 8, 16].map(|index| self.mapping.long_word(at + index).load(Relaxed));
        Announced { call: decode(call, elements as usize), detail }
    }
}

/// The generation before a barrier. It wraps around; no two ranks are more than one barrier apart.
fn generation_of(barrier: u64) -> u32 {
    barrier as u32 & !ABORTED
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];

/// Operation, arithmetic, type and place in a byte each, then the root.
fn encode(call: Call) -> u64 {
    let op = |op| OPS.iter().position(|known| *known == op).unwrap_or(0) as u64;
    let (operation, detail, root) = match call.operation {
        Collective::Barrier => (1, 0, 0),
        Collective::AllReduce(reduce) => (2, op(reduce), 0),
        Collective::ReduceScatter(reduce) => (3, op(reduce), 0),
        Collective::AllGather => (4, 0, 0),
        Collective::Broadcast { root } => (5, 0, root),
        other => unreachable!("{other} is no operation of a segment"),
    };
    let dtype = DType::ALL.iter().position(|known| *known == call.dtype).unwrap_or(0) as u64;
    operation | detail << 8 | dtype << 16 | u64::from(call.on_device) << 24 | u64::from(root) << 32
}

fn decode(word: u64, elements: usize) -> Option<Call> {
    let byte = |index: u32| (word >> (8 * index) & 0xff) as usize;
    let op = || OPS.get(byte(1)).copied();
    let operation = match byte(0) {
        1 => Collective::Barrier,
        2 => Collective::AllReduce(op()?),
        3 => Collective::ReduceScatter(op()?),
        4 => Collective::AllGather,
        5 => Collective::Broadcast { root: (word >> 32) as u32 },
        _ => return None,
    };
    let call = Call::new(operation, *DType::ALL.get(byte(2))?, elements);
    Some(Call { on_device: byte(3) != 0, ..call })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_come_back_as_they_were() {
        let reductions = OPS.into_iter().flat_map(|op| [Collective::AllReduce(op), Collective::ReduceScatter(op)]);
        let others = [Collective::Barrier, Collective::AllGather, Collective::Broadcast { root: u32::MAX }];
        for operation in reductions.chain(others) {
            for dtype in DType::ALL {
                for on_device in [false, true] {
                    let call = Call { on_device, ..Call::new(operation, dtype, usize::MAX) };
                    assert_eq!(decode(encode(call), call.elements), Some(call));
                }
            }
        }
        assert_eq!(decode(0, 0), None);
    }
}
