//! The contents of one file: the pages in the page cache, and the pages on the disk.
//!
//! The rules are those of Linux with ext4 or XFS.
//!
//! - **Pages.** The kernel writes whole pages of 4 KiB, each when it likes. A crash therefore loses each page that was not
//!   synced independently of the others; a page on the disk has the contents of one moment.
//! - **A failed sync** marks the pages clean that it could not write and keeps their contents in the cache. The next sync
//!   writes nothing and succeeds, and another process reads the bytes as if they were safe. The bytes are lost after a
//!   crash, and as soon as the kernel needs the memory. Only writing them again makes the pages dirty again. Sources:
//!   `fsync(2)`; Rebello et al., "Can Applications Recover from fsync Failures?" (USENIX ATC 2020, section 3: ext4 and XFS);
//!   "PostgreSQL's fsync() surprise" (LWN, 2018).
//! - **The error is reported once**, to the file descriptions that were open then (`fsync(2)`, since Linux 4.13), so the
//!   sync of a process that opens the file later succeeds.
//! - **The length** is metadata. XFS changes it on the disk after the data was written, and ext4 in its default mode
//!   (`data=ordered`) writes the data before it commits the length. A longer length thus ends at a page that is on the
//!   disk; a page below it that is not consists of zeros. After a failed sync, the length can also cover lost pages.
//! - **A truncation** is metadata too: until it is synced, a crash may undo it.

use std::collections::{BTreeMap, BTreeSet};

const PAGE_BYTES: usize = 4096;

/// The contents of one file.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// The content that processes read.
    cache: Vec<u8>,
    /// The content of the disk, also beyond the durable length.
    disk: Vec<u8>,
    /// The length that survives a crash.
    length: usize,
    /// Pages that the next sync writes.
    dirty: BTreeSet<usize>,
    /// Pages that are marked clean, although the disk has other contents.
    lost: BTreeSet<usize>,
    /// Pages beyond the durable length that the file system has allocated, with the length that they bring.
    allocated: BTreeMap<usize, usize>,
    /// The disk before a truncation that is not durable.
    uncut: Option<Uncut>,
}

#[derive(Debug)]
struct Uncut {
    disk: Vec<u8>,
    length: usize,
    /// The length after the truncation.
    cut: usize,
}

impl Pages {
    pub(super) fn synced(bytes: Vec<u8>) -> Self {
        Self { disk: bytes.clone(), length: bytes.len(), cache: bytes, ..Self::default() }
    }

    pub(super) fn cached(&self) -> &[u8] {
        &self.cache
    }

    pub(super) fn len(&self) -> usize {
        self.cache.len()
    }

    /// Writes at `from`, which is at most the length. Pages become dirty even if their contents stay the same.
    pub(super) fn write(&mut self, from: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = from + bytes.len();
        if end > self.cache.len() {
            self.cache.resize(end, 0);
        }
        self.cache[from..end].copy_from_slice(bytes);
        self.touch(from / PAGE_BYTES..=(end - 1) / PAGE_BYTES);
    }

    pub(super) fn truncate(&mut self, length: usize) {
        if length == self.cache.len() {
            return;
        }
        self.cache.truncate(length);
        let pages = length.div_ceil(PAGE_BYTES);
        self.dirty.retain(|page| *page < pages);
        self.lost.retain(|page| *page < pages);
        let uncut =
            self.uncut.get_or_insert_with(|| Uncut { disk: self.disk.clone(), length: self.length, cut: length });
        uncut.cut = uncut.cut.min(length);
        self.disk.truncate(length);
        self.length = self.length.min(length);
        self.allocated.retain(|_, end| *end <= length);
        if !length.is_multiple_of(PAGE_BYTES) {
            // The kernel fills the rest of the last page with zeros.
            self.touch(pages - 1..=pages - 1);
        }
    }

    /// Writes all dirty pages and the length.
    pub(super) fn sync(&mut self) {
        self.uncut = None;
        while let Some(page) = self.dirty.pop_first() {
            self.write_back(page);
        }
        self.allocated.clear();
        self.length = self.cache.len();
        self.disk.resize(self.length, 0);
    }

    /// Marks all dirty pages clean and writes only some of them.
    pub(super) fn fail_sync(&mut self, rng: &mut fastrand::Rng) {
        let unlucky = rng.usize(..self.dirty.len().max(1));
        for (nth, page) in std::mem::take(&mut self.dirty).into_iter().enumerate() {
            if nth != unlucky && rng.bool() {
                self.write_back(page);
            } else {
                self.lost.insert(page);
                self.allocate(page);
            }
        }
    }

    /// Writes some dirty pages, as the kernel does in the background.
    pub(super) fn write_back_some(&mut self, rng: &mut fastrand::Rng) {
        for page in self.dirty.clone() {
            if rng.u8(..4) == 0 {
                self.dirty.remove(&page);
                self.write_back(page);
            }
        }
    }

    /// Drops some clean pages from the cache.
    pub(super) fn evict(&mut self, rng: &mut fastrand::Rng) {
        for page in self.lost.clone() {
            if rng.u8(..4) == 0 {
                self.lost.remove(&page);
                self.read_in(page);
            }
        }
    }

    pub(super) fn crash(&mut self, rng: &mut fastrand::Rng) {
        for page in std::mem::take(&mut self.dirty) {
            if rng.bool() {
                self.write_back(page);
            }
        }
        let longer = self.allocated.values().copied().nth(rng.usize(0..=self.allocated.len()));
        self.length = self.length.max(longer.unwrap_or(0));
        self.disk.resize(self.length, 0);
        if let Some(uncut) = self.uncut.take().filter(|_| rng.bool()) {
            self.undo_cut(uncut, rng);
        }
        *self = Self::synced(std::mem::take(&mut self.disk));
    }

    /// Brings back what a truncation removed. What was written behind the cut since then belongs to a later transaction
    /// of the file system; the page of the cut itself may have been written.
    fn undo_cut(&mut self, uncut: Uncut, rng: &mut fastrand::Rng) {
        let start = uncut.cut / PAGE_BYTES * PAGE_BYTES;
        let mut disk = uncut.disk;
        disk.resize(uncut.length, 0);
        if rng.bool() && start < self.disk.len() {
            let end = (start + PAGE_BYTES).min(disk.len());
            let known = self.disk.len().clamp(start, end);
            disk[start..known].copy_from_slice(&self.disk[start..known]);
            disk[known..end].fill(0);
        }
        self.disk = disk;
    }

    fn touch(&mut self, pages: std::ops::RangeInclusive<usize>) {
        for page in pages {
            self.lost.remove(&page);
            self.dirty.insert(page);
        }
    }

    fn write_back(&mut self, page: usize) {
        let range = self.range(page);
        if self.disk.len() < range.end {
            self.disk.resize(range.end, 0);
        }
        // The rest of the page behind the end of the file is zeros.
        let end = self.disk.len().min((page + 1) * PAGE_BYTES);
        self.disk[range.end..end].fill(0);
        self.disk[range.clone()].copy_from_slice(&self.cache[range]);
        self.allocate(page);
    }

    fn allocate(&mut self, page: usize) {
        let end = self.range(page).end;
        if end > self.length {
            self.allocated.insert(page, end);
        }
    }

    fn read_in(&mut self, page: usize) {
        let range = self.range(page);
        self.cache[range.clone()].fill(0);
        if let Some(known) = self.disk.get(range.start..range.end.min(self.disk.len())) {
            self.cache[range.start..range.start + known.len()].copy_from_slice(known);
        }
    }

    /// Returns the bytes of a page, without those behind the end of the file.
    fn range(&self, page: usize) -> std::ops::Range<usize> {
        page * PAGE_BYTES..((page + 1) * PAGE_BYTES).min(self.cache.len())
    }
}
