//! The example of large inputs prints what its description says.

use std::process::Command;

#[test]
fn a_corpus_is_fetched_once_and_refused_after_its_release() {
    let folder = tempfile::tempdir().expect("a directory");
    let mut run = Command::new(env!("CARGO_BIN_EXE_large_inputs"));
    let run =
        run.env("GYM_VALUES_DIR", folder.path().join("copies")).output().expect("the example is built with its test");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let printed = String::from_utf8_lossy(&run.stdout).into_owned();
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 5, "{printed}");
    // Its size depends on the transports of the build, which have an endpoint each.
    let reference = lines[0].strip_prefix("a corpus of 40015891 bytes, and a reference of ").expect("two sizes");
    assert!(reference.parse::<usize>().is_ok_and(|bytes| (100..1_000).contains(&bytes)), "{printed}");
    assert_eq!(lines[1], "documents with `document 7`, by rank: [55, 56]; fetches by this machine: 1");
    assert_eq!(lines[2], "documents with `nothing`, by rank: [0, 0]; fetches by this machine: 1");
    assert_eq!(lines[3], "rewards of the rows: [Some(0.0), Some(1.0), Some(0.0), Some(0.0)]");
    assert_eq!(lines[4], "after its release: value `corpus`: it is gone: it was released");
    let left = std::fs::read_dir(folder.path().join("copies")).expect("a directory").count();
    assert_eq!(left, 0, "the last process removes the copy");
}
