//! The index of the ledger: a cache that avoids parsing all rows when a collection is resumed.
//!
//! The file holds a header and one record of 40 bytes per line, in the order in which lines were written to either
//! file. It is not synced, so after a crash it may be incomplete, torn, or ahead of the rows. Recovery ignores a record
//! that does not match its line.

use gym_core::rollout::{Attempt, TaskKey};

use crate::collect::ledger::states::OutcomeClass;

/// Size of a record and of the header.
pub(super) const RECORD_BYTES: usize = 40;

/// Identifies the version of the format.
const MAGIC: &[u8; 16] = b"gym-ledger-idx-1";

/// The two files that hold lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LedgerFile {
    Rollouts,
    Failures,
}

impl LedgerFile {
    pub(super) const ALL: [Self; 2] = [Self::Rollouts, Self::Failures];
}

/// The record of one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IndexRecord {
    pub(super) attempt: Attempt,
    pub(super) class: OutcomeClass,
    pub(super) file: LedgerFile,
    /// Offset of the line in its file.
    pub(super) offset: u64,
    /// Length of the line without the newline.
    pub(super) length: u64,
    /// CRC-32C of those bytes.
    pub(super) crc: u32,
}

/// Returns the header: the first 40 bytes of an index.
pub(super) fn header() -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[..16].copy_from_slice(MAGIC);
    seal(&mut bytes);
    bytes
}

impl IndexRecord {
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0..4].copy_from_slice(&self.attempt.key.task_index.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.attempt.key.rollout_index.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.attempt.number.to_le_bytes());
        bytes[12] = self.class as u8;
        bytes[13] = self.file as u8;
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.crc.to_le_bytes());
        seal(&mut bytes);
        bytes
    }

    /// Decodes a record; `None` if the bytes are incomplete or corrupt.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        if u32_at(36)? != crc32c::crc32c(&bytes[..36]) {
            return None;
        }
        let class = match bytes[12] {
            1 => OutcomeClass::Completed,
            2 => OutcomeClass::Failed,
            3 => OutcomeClass::Terminal,
            4 => OutcomeClass::Ignored,
            5 => OutcomeClass::Lost,
            _ => return None,
        };
        let file = *LedgerFile::ALL.get(usize::from(bytes[13]))?;
        let attempt = Attempt { key: TaskKey::new(u32_at(0)?, u32_at(4)?), number: u32_at(8)? };
        Some(Self { attempt, class, file, offset: u64_at(16)?, length: u64_at(24)?, crc: u32_at(32)? })
    }
}

fn seal(bytes: &mut [u8; RECORD_BYTES]) {
    let crc = crc32c::crc32c(&bytes[..36]);
    bytes[36..].copy_from_slice(&crc.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_and_one_with_any_bit_flipped_does_not() {
        let attempt = Attempt { key: TaskKey::new(u32::MAX, 7), number: 3 };
        let record = IndexRecord {
            attempt,
            class: OutcomeClass::Terminal,
            file: LedgerFile::Failures,
            offset: 1 << 40,
            length: 9,
            crc: 0xdead_beef,
        };
        let bytes = record.encode();
        assert_eq!(IndexRecord::decode(&bytes), Some(record));
        for bit in 0..RECORD_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(IndexRecord::decode(&flipped), None, "bit {bit}");
        }
        assert_eq!(IndexRecord::decode(&bytes[..39]), None);
        assert_eq!(IndexRecord::decode(&header()), None);
    }
}
