//! Builds the library that answers as NCCL and as CUDA's driver.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

use tempfile::TempDir;

static BUILT: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("nccl.c");
    std::fs::write(&source, include_str!("nccl.c")).expect("writes");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-shared", "-fPIC", "-pthread", "-o"]).arg(folder.path().join("libfake.so")).arg(source);
    let built = cc.output().expect("a C compiler (apt-get install gcc)");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    for name in ["libnccl.so.2", "libcuda.so.1"] {
        // Two links to one file are one library.
        std::os::unix::fs::symlink("libfake.so", folder.path().join(name)).expect("a link");
    }
    folder
});

/// Returns the paths of `libnccl.so.2` and `libcuda.so.1`.
pub(crate) fn libraries() -> (PathBuf, PathBuf) {
    (BUILT.path().join("libnccl.so.2"), BUILT.path().join("libcuda.so.1"))
}
