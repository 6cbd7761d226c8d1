//! A segment: one file in memory, mapped by every rank of a node.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gym_core::{Code, Error, Result};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::{Errno, pread, pwrite};

use crate::control::Control;
use crate::layout::{Layout, Sizes};
use crate::mapping::Mapping;
use crate::memory;

/// First bytes of a segment.
const MAGIC: [u8; 8] = *b"gym-segm";
/// Changes with the layout, and with what the ranks do in it.
const VERSION: u32 = 1;
/// Magic, version, ranks, bytes of a piece, bytes of shared tensors.
const HEADER_BYTES: usize = 32;
/// Without them, a peer could shrink the file, and our next access would end us with SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Memory that the ranks of one node share, for one epoch.
///
/// It lives as long as a process has it mapped or holds its file, and leaves no name behind. Any thread may
/// [`abort`](Self::abort) it.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use gym_segment::{Failure, Segment, SegmentCommunicator, Sizes, deadline_in};
///
/// let segment = Arc::new(Segment::create(2, Sizes::default())?);
/// let mut first = SegmentCommunicator::join(&segment, 0)?;
/// // The process of the other rank has ended. Whoever learns of it ends the waits of those that are left.
/// segment.abort();
/// let failure = first.barrier(deadline_in(Duration::from_secs(10))).unwrap_err();
/// assert!(matches!(failure, Failure::Aborted));
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Segment {
    file: OwnedFd,
    control: Control,
}

impl Segment {
    /// Creates a segment for `world_size` ranks, from 1 to 1,024. All of its memory is allocated here: a rank that uses
    /// it later finds it.
    ///
    /// It takes `2 * (world_size + 1) * piece_bytes + world_size * shared_bytes`, and a page or more for its words.
    /// More than the machine has available, or than the control group may have, is refused. Where less is left at that
    /// moment, the kernel may end a process instead.
    ///
    /// # Errors
    /// `InvalidArgument` if a size is outside its limits; `ResourceExhausted` if there is not enough memory, or no file
    /// descriptor left; `Unavailable` if the kernel has no sealed memory.
    pub fn create(world_size: usize, sizes: Sizes) -> Result<Self> {
        let layout = Layout::new(world_size, sizes)?;
        let subject = || format!("create a segment of {} bytes for {world_size} ranks", layout.total());
        if let Some(available) = memory::available().filter(|available| layout.total() as u64 > *available) {
            let why = format!("{available} bytes of memory are available");
            return Err(Error::not_started(Code::ResourceExhausted, why).about(subject()));
        }
        let file = allocate(&layout).map_err(|errno| system_error(errno).about(subject()))?;
        Self::map(file, layout).map_err(|errno| system_error(errno).about(subject()))
    }

    /// Opens the segment of a file that another process has created, and verifies it.
    ///
    /// # Errors
    /// `FailedPrecondition` if the file is no segment of this version for `world_size` ranks, if its length is not that
    /// of its header, or if a process could change its length; `ResourceExhausted` if it cannot be mapped.
    pub fn open(file: OwnedFd, world_size: usize) -> Result<Self> {
        let opened = verify(&file, world_size).and_then(|layout| Self::map(file, layout).map_err(system_error));
        opened.map_err(|error| error.about(format!("open a segment of {world_size} ranks")))
    }

    fn map(file: OwnedFd, layout: Layout) -> rustix::io::Result<Self> {
        let mapping = Mapping::new(&file, layout.total())?;
        Ok(Self { file, control: Control { mapping, layout } })
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.layout().world_size
    }

    /// Returns the sizes, with the bytes of shared tensors rounded up to pages.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        self.layout().sizes
    }

    /// Ends the segment: every wait of every rank, now or later, fails with
    /// [`Failure::Aborted`](crate::Failure::Aborted). A barrier to which all ranks had come by then has succeeded for
    /// all. For whoever learns that a rank is lost, or that its operation has failed elsewhere.
    pub fn abort(&self) {
        self.control.abort();
    }

    /// Returns `true` after an abort.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.control.is_aborted()
    }

    /// Returns the number of barriers that each rank has come to. The ranks with the lowest number are those that
    /// others wait for.
    #[must_use]
    pub fn progress(&self) -> Vec<u64> {
        self.control.progress()
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.control.mapping
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.control.layout
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Creates the file, with its memory, its header and its seals.
fn allocate(layout: &Layout) -> rustix::io::Result<OwnedFd> {
    let file = empty_file()?;
    let bytes = layout.total() as u64;
    ftruncate(&file, bytes)?;
    // Without it, the first access to a page would allocate it, and end the process if it cannot be.
    loop {
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::INTR) => {}
            allocated => break allocated?,
        }
    }
    let header = header(layout);
    let written = pwrite(&file, &header, 0)?;
    assert_eq!(written, header.len(), "memory takes a header whole");
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Creates a file that can be sealed and not executed. Machines may allow no other, and kernels before 6.3 do not know
/// these.
fn empty_file() -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create("gym-segment", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create("gym-segment", flags),
        created => created,
    }
}

fn header(layout: &Layout) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_ne_bytes());
    header[12..16].copy_from_slice(&(layout.world_size as u32).to_ne_bytes());
    header[16..24].copy_from_slice(&(layout.sizes.piece_bytes as u64).to_ne_bytes());
    header[24..].copy_from_slice(&(layout.sizes.shared_bytes as u64).to_ne_bytes());
    header
}

/// Returns the layout of a file, if it is a segment that cannot change its length.
fn verify(file: &OwnedFd, world_size: usize) -> Result<Layout> {
    // Other files than memory have no seals, and the kernel says so.
    let seals = match fcntl_get_seals(file) {
        Ok(seals) => seals,
        Err(errno) => return Err(refused("the file has no seals, so that it is no segment").caused_by(errno)),
    };
    if !seals.contains(SEALS) {
        let missing = SEALS.difference(seals);
        let why = format!("the file lacks the seals {missing:?}; a process could cut it off and end the others");
        return Err(refused(why));
    }
    let bytes = fstat(file).map_err(system_error)?.st_size as u64;
    let mut header = [0; HEADER_BYTES];
    let read = pread(file, &mut header, 0).map_err(system_error)?;
    if read < HEADER_BYTES || header[..8] != MAGIC {
        return Err(refused("the file is no segment: it does not begin as one"));
    }
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let long_word = |at: usize| u64::from_ne_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    if word(8) != VERSION {
        let why = format!("the segment has version {}, and this program has {VERSION}; run one build", word(8));
        return Err(refused(why));
    }
    if word(12) as usize != world_size {
        return Err(refused(format!("the segment is for {} ranks", word(12))));
    }
    let size = |at| usize::try_from(long_word(at)).unwrap_or(usize::MAX);
    let sizes = Sizes { piece_bytes: size(16), shared_bytes: size(24) };
    let layout = Layout::new(world_size, sizes).map_err(|error| refused("its header is wrong").caused_by(error))?;
    if layout.total() as u64 != bytes {
        let why = format!("the file has {bytes} bytes, and a segment with its header has {}", layout.total());
        return Err(refused(why));
    }
    Ok(layout)
}

fn refused(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::not_started(Code::FailedPrecondition, why)
}

/// Returns the error of the kernel about memory or file descriptors.
fn system_error(errno: Errno) -> Error {
    let code = match errno {
        Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE | Errno::DQUOT => Code::ResourceExhausted,
        _ => Code::Unavailable,
    };
    Error::not_started(code, "").caused_by(errno)
}
