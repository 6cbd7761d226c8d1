//! Both file systems fulfill the contract of `Files`, and errors of the real one name cause and fix.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use gym_core::base::{Files as _, RealFiles};
use gym_core::testing::{FileFault, SimFiles, conformance};
use gym_core::{Code, World};

#[tokio::test]
async fn real_files_keep_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    conformance::files(Arc::new(RealFiles::new()), folder.path()).await;
}

#[tokio::test(start_paused = true)]
async fn simulated_files_keep_the_contract() {
    for seed in 0..20 {
        conformance::files(Arc::new(SimFiles::new(seed)), Path::new("folder")).await;
    }
}

#[tokio::test]
async fn a_full_disk_is_named_and_nothing_is_added_before_a_cut() {
    let files = RealFiles::new();
    let path = Path::new("/dev/full");
    let error = files.append(path, &[Bytes::from_static(b"x")], false).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().starts_with("append to /dev/full: the disk is full; free space"), "{error}");
    let error = files.append(path, &[], true).await.unwrap_err();
    assert!(error.to_string().contains("an earlier write failed"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn after_a_failed_append_the_simulated_disk_wants_a_cut_too() {
    for fault in [FileFault::DiskFull, FileFault::SyncFailed] {
        let (files, path) = (SimFiles::new(3), Path::new("f"));
        files.append(path, &[Bytes::from_static(b"kept")], true).await.unwrap();
        files.fail_write(0, fault);
        files.append(path, &[Bytes::from_static(b"lost")], true).await.unwrap_err();
        files.append(path, &[Bytes::from_static(b"more")], true).await.unwrap_err();
        files.truncate(path, 4).await.unwrap();
        files.append(path, &[Bytes::from_static(b"more")], true).await.unwrap();
        assert_eq!(files.crash().contents(path), b"keptmore");
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_opened_is_not_changed() {
    let (files, path) = (SimFiles::new(3), Path::new("f"));
    let kept = [Bytes::from_static(b"kept")];
    files.append(path, &kept, true).await.unwrap();
    files.fail_write(0, FileFault::OpenFailed);
    // It is open for appending, and another file is the one that fails.
    files.append(path, &kept, true).await.unwrap();
    let error = files.append(Path::new("g"), &kept, true).await.unwrap_err();
    assert_eq!(error.to_string(), "open g: failed: input/output error");
    // The second opening from now.
    files.fail_write(1, FileFault::OpenFailed);
    assert_eq!(files.read(path, 0, 4).await.unwrap(), "kept");
    assert_eq!(files.replace(path, &[Bytes::from_static(b"new")]).await.unwrap_err().code(), Code::Internal);
    assert_eq!(files.read(path, 0, 99).await.unwrap(), "keptkept");
}

#[tokio::test]
async fn paths_that_cannot_be_used_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let files = RealFiles::new();
    let file = folder.path().join("file");
    files.append(&file, &[Bytes::from_static(b"x")], true).await.unwrap();
    for path in [folder.path().to_owned(), file.join("below")] {
        let error = files.append(&path, &[Bytes::from_static(b"x")], true).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.to_string().contains(&*path.to_string_lossy()), "{error}");
        assert!(error.to_string().contains("directory"), "{error}");
    }
    std::fs::set_permissions(&file, Permissions::from_mode(0o400)).unwrap();
    let fresh = RealFiles::new();
    // The superuser may write everywhere, so there is no error to check.
    if let Err(error) = fresh.append(&file, &[Bytes::from_static(b"y")], true).await {
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.to_string().contains("permission denied"), "{error}");
    }
}

#[tokio::test]
async fn a_lock_holds_against_another_world_and_more_files_than_are_kept_open_work() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rollouts.jsonl");
    let (one, two) = (World::real(), World::real());
    let held = one.files.lock(&path).await.unwrap();
    assert_eq!(two.files.lock(&path).await.unwrap_err().code(), Code::FailedPrecondition);
    drop(held);
    two.files.lock(&path).await.unwrap();
    for round in 0..2 {
        for n in 0..100 {
            let path = folder.path().join(format!("{n}"));
            one.files.append(&path, &[Bytes::from(format!("{round}"))], false).await.unwrap();
        }
    }
    for n in 0..100 {
        assert_eq!(std::fs::read(folder.path().join(format!("{n}"))).unwrap(), b"01");
    }
    assert_ne!(one.unique_id(), two.unique_id());
}
