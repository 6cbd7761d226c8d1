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

/// Builds a program over the library, whose source is this.
#[allow(dead_code)] // Not in every program that has this module.
pub(crate) fn program(name: &str, source: &str) -> PathBuf {
    let (folder, program) = (BUILT.path(), BUILT.path().join(name));
    let file = folder.join(format!("{name}.c"));
    std::fs::write(&file, source).expect("writes");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread", "-o"]).arg(&program).arg(file).arg(folder.join("libfake.so"));
    let built =
        cc.arg(format!("-Wl,-rpath,{}", folder.display())).output().expect("a C compiler (apt-get install gcc)");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

/// Returns the paths of `libnccl.so.2` and `libcuda.so.1`.
pub(crate) fn libraries() -> (PathBuf, PathBuf) {
    (BUILT.path().join("libnccl.so.2"), BUILT.path().join("libcuda.so.1"))
}
