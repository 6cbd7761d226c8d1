//! The machines of all cases: written, judged, recorded and replayed.

mod machines;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use machines::cases;

/// Returns a line for each entry below a folder: its path, its kind, and what it holds.
fn listing(folder: &Path, path: &str, lines: &mut Vec<String>) {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    for name in names {
        let (full, path) = (folder.join(&name), format!("{path}/{}", name.to_str().unwrap()));
        let metadata = fs::symlink_metadata(&full).unwrap();
        if metadata.is_symlink() {
            lines.push(format!("{path} -> {}", fs::read_link(&full).unwrap().display()));
        } else if metadata.is_dir() {
            lines.push(format!("{path}/"));
            listing(&full, &path, lines);
        } else if metadata.mode() & 0o777 == 0 {
            lines.push(format!("{path} closed"));
        } else if metadata.len() > 1 << 20 {
            lines.push(format!("{path} of {} bytes", metadata.len()));
        } else {
            lines.push(format!("{path} {:016x}", fnv(&fs::read(&full).unwrap())));
        }
    }
}

/// FNV-1a, of 64 bits.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Number of entries, and their digest. The program that came with the cases has written the same trees (compared when this was written).
const TREES: (usize, u64) = (38_135, 0xc92a_8fed_cb1f_ada0);

#[test]
fn the_machines_of_the_cases_are_written_as_they_were_meant() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases() {
        case.write(folder.path());
    }
    let mut lines = Vec::new();
    listing(folder.path(), "", &mut lines);
    let digest = fnv(lines.join("\n").as_bytes());
    assert_eq!((lines.len(), digest), TREES, "{digest:#x}");
}
