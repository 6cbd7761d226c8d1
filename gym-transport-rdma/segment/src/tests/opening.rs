//! What is a segment, and what is not.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gym_core::{Code, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

use super::SIZES;
use crate::{Segment, SegmentCommunicator, Sizes};

/// Creates a file with the header of a segment, changed at one place, and this length.
fn forged(segment: &Segment, bytes: u64, seals: SealFlags, change: Option<(usize, u8)>) -> OwnedFd {
    let file = memfd_create("forged", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    let mut header = [0; 32];
    pread(segment, &mut header, 0).unwrap();
    if let Some((at, value)) = change {
        header[at] = value;
    }
    ftruncate(&file, bytes).unwrap();
    pwrite(&file, &header[..(bytes as usize).min(32)], 0).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn bytes_of(segment: &Segment) -> u64 {
    rustix::fs::fstat(segment).unwrap().st_size as u64
}

#[test]
fn what_is_no_segment_is_refused_with_the_reason() {
    let segment = Segment::create(2, SIZES).unwrap();
    let bytes = bytes_of(&segment);
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let forged = |bytes, seals, change| forged(&segment, bytes, seals, change);
    let program: OwnedFd = std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into();
    let clone = segment.as_fd().try_clone_to_owned().unwrap();
    for (file, world_size, why) in [
        (forged(bytes, SealFlags::empty(), None), 2, "lacks the seals"),
        (forged(bytes, SealFlags::GROW | SealFlags::SEAL, None), 2, "lacks the seals SealFlags(SHRINK)"),
        (program, 2, "no seals"),
        (forged(bytes + 4_096, all, None), 2, "a segment with its header has"),
        (forged(4_096, all, None), 2, "a segment with its header has"),
        (forged(16, all, None), 2, "does not begin as one"),
        (forged(bytes, all, Some((0, b'x'))), 2, "does not begin as one"),
        (forged(bytes, all, Some((8, 99))), 2, "version 99"),
        (forged(bytes, all, Some((23, 1))), 2, "its header is wrong"),
        (clone, 3, "is for 2 ranks"),
    ] {
        let error = Segment::open(file, world_size).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(error.to_string().contains(why), "{error}: {why}");
    }
    Segment::open(forged(bytes, all, None), 2).unwrap();
}

#[test]
fn nobody_can_change_the_length_of_a_segment() {
    let segment = Segment::create(2, SIZES).unwrap();
    let bytes = bytes_of(&segment);
    for length in [0, bytes - 1, bytes + 1] {
        assert_eq!(ftruncate(&segment, length), Err(rustix::io::Errno::PERM));
    }
    assert_eq!(fcntl_add_seals(&segment, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
}

#[test]
fn more_memory_than_there_is_is_refused_at_creation() {
    let error = Segment::create(2, Sizes { shared_bytes: 1 << 50, ..SIZES }).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    // The memory is there from the beginning: blocks have 512 bytes.
    let stat = rustix::fs::fstat(Segment::create(2, SIZES).unwrap()).unwrap();
    assert!(stat.st_blocks * 512 >= stat.st_size);
}

#[test]
fn a_position_is_taken_once_in_all_processes() {
    let segment = Arc::new(Segment::create(2, SIZES).unwrap());
    let clone = Arc::new(Segment::open(segment.as_fd().try_clone_to_owned().unwrap(), 2).unwrap());
    let code = |joined: Result<_>| joined.map(drop).unwrap_err().code();
    drop(SegmentCommunicator::join(&segment, 0).unwrap());
    assert_eq!(code(SegmentCommunicator::join(&clone, 0)), Code::AlreadyExists);
    assert_eq!(code(SegmentCommunicator::join(&clone, 2)), Code::InvalidArgument);
    SegmentCommunicator::join(&clone, 1).unwrap();
}

#[test]
fn a_shared_tensor_outlives_everything_else_of_its_segment() {
    let segment = Arc::new(Segment::create(1, SIZES).unwrap());
    let rank = SegmentCommunicator::join(&segment, 0).unwrap();
    let mut buffer = rank.shared_buffer(5).unwrap();
    drop((segment, rank));
    buffer.copy_from_slice(b"weigh");
    assert_eq!(&buffer[..], b"weigh");
}
