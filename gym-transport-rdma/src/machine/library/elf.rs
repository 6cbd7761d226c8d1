//! Reads what a library's file tells without running any of its code: its version, and whether it is whole.
//!
//! The dynamic loader maps what the headers promise, and the process dies (SIGBUS) where the file is shorter: a download that was cut off, a full disk.
//!
//! `ucp_get_version_string` returns a constant: the only string of the form `1.13.1` in the section `.rodata` (checked
//! with Debian's 1.13.1 and PyPI's 1.22.0). A zero marks its end, but the byte before it belongs to another constant.
//! Other sections contain similar strings (`GLIBC_2.2.5`, paths of the compiler).

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Maximum length of a section. libucp has 0.3 MB of constants; a forged file is not read into memory.
const SECTION_BYTES_MAX: u64 = 16 << 20;
/// Most program headers that a library has; NVIDIA's have about ten.
const SEGMENTS_MAX: u64 = 256;
/// Offsets in the header of a 64-bit ELF file, and the length of a section header. Source: `elf.h`.
const SEGMENT_TABLE_AT: usize = 0x20;
const SEGMENT_HEADER_BYTES_AT: usize = 0x36;
const SEGMENT_COUNT_AT: usize = 0x38;
const SECTION_TABLE_AT: usize = 0x28;
const SECTION_COUNT_AT: usize = 0x3c;
const SECTION_NAMES_AT: usize = 0x3e;
const SECTION_HEADER_BYTES: u64 = 64;

/// Returns the version. `None` if the file has no such string, more than one, or is no 64-bit little-endian ELF file.
pub(super) fn version(library: &mut File) -> Option<String> {
    only_version(&constants(library)?)
}

/// Rejects a file that is shorter than its headers say. What is no 64-bit ELF file, or no file with a path, is left to the loader, which says so.
///
/// # Errors
/// Both lengths.
pub(crate) fn check_whole(path: &Path) -> Result<(), String> {
    if path.components().count() < 2 {
        return Ok(());
    }
    let Ok(mut file) = File::open(path) else { return Ok(()) };
    let Ok(length) = file.metadata().map(|metadata| metadata.len()) else { return Ok(()) };
    match needed(&mut file) {
        Some(needed) if needed > length => {
            Err(format!("the file has {length} bytes, and its headers say {needed}: it was cut off; install it again"))
        }
        _ => Ok(()),
    }
}

/// Returns the length that the program headers need; `None` if there are none to read.
fn needed(file: &mut File) -> Option<u64> {
    let header = header(file)?;
    let table = u64::from_le_bytes(at(&header, SEGMENT_TABLE_AT)?);
    let [bytes, count] = [SEGMENT_HEADER_BYTES_AT, SEGMENT_COUNT_AT].map(|offset| at(&header, offset));
    let (bytes, count) = (u64::from(u16::from_le_bytes(bytes?)), u64::from(u16::from_le_bytes(count?)));
    let mut needed = table.checked_add(bytes * count)?;
    for index in 0..count.min(SEGMENTS_MAX) {
        // A header that is not there is beyond the end.
        let Some(segment) = read(file, table.checked_add(index * bytes)?, 56) else { return Some(needed) };
        let [offset, length] = [8, 0x20].map(|offset| at(&segment, offset).map(u64::from_le_bytes));
        needed = needed.max(offset?.saturating_add(length?));
    }
    Some(needed)
}

/// Returns the header of a 64-bit little-endian ELF file.
fn header(file: &mut File) -> Option<Vec<u8>> {
    read(file, 0, 64).filter(|header| header.starts_with(b"\x7fELF\x02\x01"))
}

fn constants(file: &mut File) -> Option<Vec<u8>> {
    let header = header(file)?;
    let table = u64::from_le_bytes(at(&header, SECTION_TABLE_AT)?);
    let count = u64::from(u16::from_le_bytes(at(&header, SECTION_COUNT_AT)?));
    let names_index = usize::from(u16::from_le_bytes(at(&header, SECTION_NAMES_AT)?));
    let table = read(file, table, count * SECTION_HEADER_BYTES)?;
    let sections: Vec<&[u8]> = table.chunks_exact(64).collect();
    // Offset and length of a section's contents.
    let extent =
        |section: &[u8]| Some((u64::from_le_bytes(at(section, 0x18)?), u64::from_le_bytes(at(section, 0x20)?)));
    let (names_at, names_bytes) = extent(sections.get(names_index)?)?;
    let names = read(file, names_at, names_bytes)?;
    let constants = sections.into_iter().find(|section| {
        let name = at(section, 0).map(u32::from_le_bytes).and_then(|at| usize::try_from(at).ok());
        name.and_then(|at| names.get(at..)).is_some_and(|name| name.starts_with(b".rodata\0"))
    })?;
    let (constants_at, bytes) = extent(constants)?;
    read(file, constants_at, bytes)
}

fn read(file: &mut File, offset: u64, bytes: u64) -> Option<Vec<u8>> {
    if bytes > SECTION_BYTES_MAX {
        return None;
    }
    file.seek(SeekFrom::Start(offset)).ok()?;
    let mut content = Vec::new();
    file.take(bytes).read_to_end(&mut content).ok()?;
    (content.len() as u64 == bytes).then_some(content)
}

fn at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

fn only_version(constants: &[u8]) -> Option<String> {
    let versions: BTreeSet<&str> = constants.split_inclusive(|byte| *byte == 0).filter_map(trailing_version).collect();
    let mut versions = versions.into_iter();
    versions.next().filter(|_| versions.next().is_none()).map(str::to_owned)
}

/// Returns the version at the end of a zero-terminated string.
fn trailing_version(text: &[u8]) -> Option<&str> {
    let text = text.strip_suffix(b"\0")?;
    let begin = text.iter().rposition(|byte| !byte.is_ascii_digit() && *byte != b'.').map_or(0, |before| before + 1);
    let version = std::str::from_utf8(text.get(begin..)?).ok()?;
    let numbers: Vec<&str> = version.split('.').collect();
    (numbers.len() == 3 && numbers.iter().all(|number| (1..=4).contains(&number.len()))).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds an ELF file with a section of names and one of constants.
    fn library(constants: &[u8]) -> Vec<u8> {
        let names = b"\0.shstrtab\0.rodata\0";
        let mut file = vec![0_u8; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let names_at = file.len() as u64;
        file.extend_from_slice(names);
        let constants_at = file.len() as u64;
        file.extend_from_slice(constants);
        let table = file.len() as u64;
        for (name, offset, bytes) in
            [(0_u32, 0, 0), (1, names_at, names.len() as u64), (11, constants_at, constants.len() as u64)]
        {
            let mut header = [0_u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&bytes.to_le_bytes());
            file.extend_from_slice(&header);
        }
        file[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        file[0x3c..0x3e].copy_from_slice(&3_u16.to_le_bytes());
        file[0x3e..0x40].copy_from_slice(&1_u16.to_le_bytes());
        file
    }

    fn version_of(file: &[u8]) -> Option<String> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("libucp.so.0");
        std::fs::write(&path, file).expect("writes");
        version(&mut File::open(&path).expect("opens"))
    }

    #[test]
    fn the_only_version_is_found_behind_any_byte() {
        // As in the real files, a floating-point constant precedes the string.
        let constants = b"requires UCX 1.22 or later\0\xcd\xcdA1.22.0\0%d.%d.%d\0";
        assert_eq!(version_of(&library(constants)).as_deref(), Some("1.22.0"));
        assert_eq!(version_of(&library(b"1.13.1\0x\x001.13.1\0")).as_deref(), Some("1.13.1"), "the same twice is one");
    }

    #[test]
    fn no_answer_is_better_than_a_wrong_one() {
        for constants in
            [&b""[..], b"1.13.1", b"1.13\0", b"1.2.3.4\0", b"1..3\0", b"1.13.1\x001.14.0\0", b"1.13.12345\0"]
        {
            assert_eq!(version_of(&library(constants)), None, "{constants:?}");
        }
    }

    #[test]
    fn a_file_that_was_cut_off_is_not_whole() {
        // This program itself.
        let whole = std::fs::read("/proc/self/exe").expect("reads");
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("libnccl.so.2");
        let check = |bytes: &[u8]| {
            std::fs::write(&path, bytes).expect("writes");
            check_whole(&path)
        };
        assert_eq!(check(&whole), Ok(()));
        for length in [64, 4096, whole.len() / 2] {
            let why = check(&whole[..length]).expect_err("cut off");
            assert!(why.contains(&format!("the file has {length} bytes, and its headers say ")), "{why}");
        }
        for other in [&b""[..], b"no library", &whole[..63]] {
            assert_eq!(check(other), Ok(()), "the loader says it");
        }
        assert_eq!(check_whole(Path::new("libc.so.6")), Ok(()), "the loader finds it");
    }

    #[test]
    fn a_damaged_file_is_no_version_and_no_panic() {
        let whole = library(b"\x001.13.1\0");
        for end in 0..whole.len() {
            assert_eq!(version_of(&whole[..end]), None, "cut at {end}");
        }
        for position in 0..64 {
            let mut damaged = whole.clone();
            damaged[position] ^= 0xff;
            let read = version_of(&damaged);
            assert!(read.is_none() || read.as_deref() == Some("1.13.1"), "byte {position}: {read:?}");
        }
    }
}
