//! The checksum of the SDK's sources, which the build script computes.

use std::io;
use std::path::{Path, PathBuf};

/// The crates whose sources count: those that a head server and its workers have in common, whatever their programs are.
const CRATES: [&str; 6] =
    ["gym-core", "gym-transport-http", "gym-transport-rdma", "gym-client", "gym-client/group", "gym-server"];

/// Returns the folders of the sources below the folder of the crates, those that are there.
pub(crate) fn folders(crates: &Path) -> impl Iterator<Item = PathBuf> {
    CRATES.iter().map(|name| crates.join(name).join("src")).filter(|folder| folder.is_dir())
}

/// Returns a checksum of the paths and contents of all sources.
///
/// # Errors
/// The errors of the disk.
pub(crate) fn checksum(crates: &Path) -> io::Result<u64> {
    let mut sum = FNV_OFFSET;
    for folder in folders(crates) {
        let mut files = Vec::new();
        collect(&folder, &mut files)?;
        files.sort();
        for file in files {
            let place = file.strip_prefix(crates).unwrap_or(&file);
            add(&mut sum, place.to_string_lossy().as_bytes());
            add(&mut sum, &std::fs::read(&file)?);
        }
    }
    Ok(sum)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// The hash FNV-1a, which every toolchain computes alike. It finds differences, and withstands no attack.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

fn add(sum: &mut u64, bytes: &[u8]) {
    // The length separates a part from the next one.
    for byte in bytes.iter().copied().chain((bytes.len() as u64).to_le_bytes()) {
        *sum = (*sum ^ u64::from(byte)).wrapping_mul(FNV_PRIME);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::head::BUILD;

    #[test]
    fn the_build_is_that_of_the_sources_of_now() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        assert_eq!(folders(crates).count(), CRATES.len());
        let expected = format!("gym-server {} {:016x}", env!("CARGO_PKG_VERSION"), checksum(crates).expect("reads"));
        assert_eq!(BUILD, expected, "the build script runs when a source changes");
    }

    #[test]
    fn any_change_of_a_source_is_another_build_and_nothing_else_is() {
        let root = tempfile::tempdir().expect("a folder");
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("gym-core/src/base")).expect("a folder");
        fs::create_dir_all(at("gym-client/src")).expect("a folder");
        fs::create_dir_all(at("gym-core/tests")).expect("a folder");
        fs::write(at("gym-core/src/base/a.rs"), "fn a() {}").expect("writes");
        fs::write(at("gym-client/src/lib.rs"), "").expect("writes");
        let sum = || checksum(root.path()).expect("reads");
        let first = sum();
        fs::write(at("gym-core/tests/t.rs"), "a test").expect("writes");
        fs::write(at("program.rs"), "a program").expect("writes");
        assert_eq!(sum(), first, "tests and programs differ");
        fs::write(at("gym-core/src/base/a.rs"), "fn b() {}").expect("writes");
        let changed = sum();
        fs::rename(at("gym-core/src/base/a.rs"), at("gym-core/src/base/b.rs")).expect("renames");
        let renamed = sum();
        fs::write(at("gym-client/src/new.rs"), "").expect("writes");
        let added = sum();
        let distinct = std::collections::BTreeSet::from([first, changed, renamed, added]);
        assert_eq!(distinct.len(), 4, "{distinct:x?}");
    }
}
