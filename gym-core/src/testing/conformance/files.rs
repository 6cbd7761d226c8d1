//! The conformance suite of [`Files`].

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use crate::base::error::Code;
use crate::base::world::Files;

/// Checks an implementation. `folder` must be used by nothing else.
///
/// # Panics
/// Panics if the implementation violates the contract of [`Files`].
pub async fn files(files: Arc<dyn Files>, folder: &Path) {
    let files = &*files;
    absent_files(files, folder).await;
    pieces_come_back_in_order(files, folder).await;
    cutting_and_going_on(files, folder).await;
    writing_again(files, folder).await;
    replacing(files, folder).await;
    renaming(files, folder).await;
    removing(files, folder).await;
    locking(files, folder).await;
}

async fn all(files: &dyn Files, path: &Path) -> Bytes {
    files.read(path, 0, usize::MAX).await.expect("the file can be read")
}

async fn absent_files(files: &dyn Files, folder: &Path) {
    let path = folder.join("absent");
    assert_eq!(files.length(&path).await.expect("no error"), None, "the length of an absent file");
    let read = files.read(&path, 0, 10).await.expect_err("reading an absent file");
    assert_eq!(read.code(), Code::NotFound);
    assert!(read.to_string().contains("absent"), "the error names the path: {read}");
    assert_eq!(files.truncate(&path, 0).await.expect_err("cutting an absent file").code(), Code::NotFound);
    files.remove(&path).await.expect("removing an absent file is fine");
}

async fn pieces_come_back_in_order(files: &dyn Files, folder: &Path) {
    // In a directory that does not exist.
    let path = folder.join("made/deep/pieces");
    let small: Vec<Bytes> =
        (0..5000).map(|n| Bytes::from(if n % 7 == 0 { String::new() } else { format!("{n},") })).collect();
    let large = Bytes::from(vec![b'x'; 3 << 20]);
    files.append(&path, &small, true).await.expect("a durable append");
    files.append(&path, &[large.clone(), Bytes::from_static(b"end")], false).await.expect("an append");
    files.append(&path, &[], true).await.expect("a sync");
    let wanted = Bytes::from([small.concat(), large.to_vec(), b"end".to_vec()].concat());
    assert_eq!(files.length(&path).await.expect("a length"), Some(wanted.len() as u64));
    assert!(all(files, &path).await == wanted, "what was added comes back in order");
    let middle = files.read(&path, 100, 50).await.expect("a window");
    assert_eq!(middle, wanted.slice(100..150));
    let last = files.read(&path, wanted.len() as u64 - 2, 50).await.expect("the end");
    assert_eq!(last, "nd", "a read is short only at the end");
    assert!(files.read(&path, wanted.len() as u64 + 9, 50).await.expect("beyond the end").is_empty());
}

async fn cutting_and_going_on(files: &dyn Files, folder: &Path) {
    let path = folder.join("cut");
    files.append(&path, &[Bytes::from_static(b"0123456789")], true).await.expect("an append");
    files.truncate(&path, 4).await.expect("a cut");
    files.append(&path, &[Bytes::from_static(b"ab")], true).await.expect("an append after a cut");
    assert_eq!(all(files, &path).await, "0123ab");
    let longer = files.truncate(&path, 100).await.expect_err("a cut never makes a file longer");
    assert_eq!(longer.code(), Code::InvalidArgument);
    assert_eq!(all(files, &path).await, "0123ab");
}

async fn writing_again(files: &dyn Files, folder: &Path) {
    let path = folder.join("again");
    files.append(&path, &[Bytes::from_static(b"0123456789")], true).await.expect("an append");
    files.rewrite(&path, 4, &[Bytes::from_static(b"45"), Bytes::from_static(b"67")]).await.expect("a rewrite");
    assert_eq!(all(files, &path).await, "0123456789", "the same bytes at their place");
    files.rewrite(&path, 9, &[Bytes::from_static(b"9\n")]).await.expect("a rewrite that makes the file longer");
    files.append(&path, &[Bytes::from_static(b"ab")], true).await.expect("an append goes to the new end");
    assert_eq!(all(files, &path).await, "0123456789\nab");
    let beyond = files.rewrite(&path, 100, &[Bytes::from_static(b"x")]).await.expect_err("no gap");
    assert_eq!(beyond.code(), Code::InvalidArgument);
    let absent = files.rewrite(&folder.join("absent"), 0, &[]).await.expect_err("rewriting an absent file");
    assert_eq!(absent.code(), Code::NotFound);
}

async fn renaming(files: &dyn Files, folder: &Path) {
    let (from, to) = (folder.join("renamed-from"), folder.join("renamed-to"));
    for round in ["first", "second"] {
        files.append(&from, &[Bytes::from_static(round.as_bytes())], true).await.expect("an append");
        files.rename(&from, &to).await.expect("a rename");
        assert_eq!(files.length(&from).await.expect("no error"), None);
        assert_eq!(all(files, &to).await, round, "the file that had the name is gone");
    }
    // An append through a handle of the old file would be lost.
    files.append(&to, &[Bytes::from_static(b"!")], true).await.expect("an append after a rename");
    assert_eq!(all(files, &to).await, "second!");
    let absent = files.rename(&folder.join("absent"), &to).await.expect_err("renaming an absent file");
    assert_eq!(absent.code(), Code::NotFound);
}

async fn replacing(files: &dyn Files, folder: &Path) {
    let path = folder.join("new-folder/replaced");
    files.replace(&path, &[Bytes::from_static(b"first")]).await.expect("creates");
    files.append(&path, &[Bytes::from_static(b"!")], true).await.expect("an append");
    files.replace(&path, &[Bytes::from_static(b"sec"), Bytes::from_static(b"ond")]).await.expect("replaces");
    // An append through a handle of the old file would be lost.
    files.append(&path, &[Bytes::from_static(b"?")], true).await.expect("an append after a replacement");
    assert_eq!(all(files, &path).await, "second?");
}

async fn removing(files: &dyn Files, folder: &Path) {
    let path = folder.join("removed");
    files.append(&path, &[Bytes::from_static(b"old")], true).await.expect("an append");
    files.remove(&path).await.expect("a removal");
    assert_eq!(files.length(&path).await.expect("no error"), None);
    files.append(&path, &[Bytes::from_static(b"new")], true).await.expect("creates it again");
    assert_eq!(all(files, &path).await, "new");
}

async fn locking(files: &dyn Files, folder: &Path) {
    let path = folder.join("locked");
    let held = files.lock(&path).await.expect("locks a file that was not there");
    assert_eq!(files.length(&path).await.expect("no error"), Some(0), "locking creates the file");
    let refused = files.lock(&path).await.expect_err("a second guard");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.to_string().contains("locked"), "the error names the path: {refused}");
    files.append(&path, &[Bytes::from_static(b"row")], true).await.expect("the holder writes");
    drop(held);
    let again = files.lock(&path).await.expect("free again after the guard is dropped");
    assert_eq!(all(files, &path).await, "row", "locking keeps the contents");
    drop(again);
}
