//! Values by reference, between sets of values with directories of their own, as on several nodes, and with a shared one.

#![cfg(feature = "http")]

use std::fs::OpenOptions;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use gym_client::Transports;
use gym_client::values::{HeldValue, Value, ValueRef, Values, ValuesOptions};
use gym_core::{CallContext, Code, Endpoint, Request, Result, World};
use tempfile::TempDir;
use tokio::time::sleep;

const LONG: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_millis(300);

fn cx() -> CallContext {
    CallContext::within(LONG)
}

fn options(node: &Path) -> ValuesOptions {
    let mut options = ValuesOptions::default();
    options.copies = Some(node.join("copies"));
    options
}

fn on(node: &TempDir) -> Values {
    Values::new(Transports::standard(), options(node.path()))
}

fn short_lease(node: &TempDir) -> Values {
    let mut options = options(node.path());
    options.lease = LEASE;
    Values::new(Transports::standard(), options)
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + World::real().now()
}

fn node() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// Bytes of which no two parts are equal.
fn pattern(bytes: usize) -> Vec<u8> {
    let mut pattern = vec![0; bytes];
    for (at, part) in (1_u64..).zip(pattern.chunks_mut(4096)) {
        let number = at.to_le_bytes();
        let end = part.len().min(number.len());
        part[..end].copy_from_slice(&number[..end]);
    }
    pattern
}

async fn bytes(value: Result<Value>) -> Vec<u8> {
    value.expect("fetched").bytes().await.expect("reads").to_vec()
}

fn files(node: &TempDir) -> usize {
    std::fs::read_dir(node.path().join("copies")).map_or(0, Iterator::count)
}

async fn until(what: &str, reached: impl Fn() -> bool) {
    let waiting = async {
        while !reached() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("{what}: never"));
}

#[tokio::test]
async fn a_value_arrives_whole_in_its_own_process_and_on_another_node() {
    let (here, there) = (node(), node());
    let (holder, other) = (on(&here), on(&there));
    for size in [0, 1, (8 << 20) - 1, 8 << 20, (24 << 20) + 5] {
        let expected = pattern(size);
        let held = holder.put("weights", expected.clone()).await.expect("held");
        // As a row or a call carries it.
        let text = serde_json::to_string(held.reference()).expect("writes");
        let reference: ValueRef = serde_json::from_str(&text).expect("reads");
        assert_eq!(bytes(holder.fetch(&cx(), &reference).await).await, expected);
        assert_eq!(held.fetches(), 0, "the holder has the value");
        let value = other.fetch(&cx(), &reference).await.expect("fetched");
        assert_eq!(value.bytes().await.expect("reads"), expected);
        assert_eq!(std::fs::read(value.path().expect("a copy")).expect("reads"), expected);
        assert_eq!(held.fetches(), u64::from(size > 0));
    }
}

#[tokio::test]
async fn a_file_is_held_without_being_read_and_json_is_deserialized() {
    let (here, there) = (node(), node());
    let file = here.path().join("corpus.json");
    std::fs::write(&file, r#"["one", "two"]"#).expect("writes");
    let (holder, other) = (on(&here), on(&there));
    let held = holder.put_file("corpus", &file).await.expect("held");
    let fetched = other.fetch(&cx(), held.reference()).await.expect("fetched");
    assert_eq!(fetched.json::<Vec<String>>().await.expect("reads"), ["one", "two"]);
    let error = fetched.json::<Vec<u64>>().await.expect_err("these are texts");
    assert!(error.to_string().contains("value `corpus`"), "{error}");
    let error = holder.put_file("corpus", here.path().join("missing")).await.expect_err("there is none");
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("value `corpus`") && error.to_string().contains("missing"), "{error}");
    let error = holder.put_file("corpus", here.path()).await.expect_err("it is a directory");
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_node_fetches_a_value_once_whatever_number_of_processes_needs_it() {
    let (here, nodes) = (node(), [node(), node(), node()]);
    let holder = on(&here);
    let held = holder.put("images", pattern(20 << 20)).await.expect("held");
    // Four sets on each node are four processes: they share the directory alone.
    let processes: Vec<Values> = nodes.iter().flat_map(|node| [on(node), on(node), on(node), on(node)]).collect();
    let cx = cx();
    let fetching = processes.iter().flat_map(|values| (0..5).map(|_| values.fetch(&cx, held.reference())));
    let fetched: Vec<Value> =
        join_all(fetching.collect::<Vec<_>>()).await.into_iter().collect::<Result<_>>().expect("all");
    assert_eq!(held.fetches(), 3);
    let expected = pattern(20 << 20);
    for value in &fetched {
        assert_eq!(value.bytes().await.expect("reads"), expected);
    }
    assert!(nodes.iter().all(|node| files(node) == 1));
}

fn refused(error: &gym_core::Error, name: &str, why: &str) {
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("value `{name}`")) && text.contains(why), "{text}");
}

#[tokio::test]
async fn a_value_that_is_gone_is_refused_with_its_name() {
    let (here, there) = (node(), node());
    let mut seconds = options(here.path());
    // Long enough that a busy machine fetches within it.
    seconds.lease = Duration::from_secs(2);
    let (holder, other) = (Values::new(Transports::standard(), seconds), on(&there));
    let released = holder.put("released", "1").await.expect("held");
    let reference = released.reference().clone();
    released.release();
    refused(&other.fetch(&cx(), &reference).await.expect_err("released"), "released", "it was released");
    refused(&holder.fetch(&cx(), &reference).await.expect_err("released"), "released", "it was released");

    let dropped = holder.put("dropped", "2").await.expect("held");
    let reference = dropped.reference().clone();
    drop(dropped);
    let elsewhere = node();
    let late = on(&elsewhere);
    assert_eq!(bytes(other.fetch(&cx(), &reference).await).await, b"2", "held for the lease");
    sleep(Duration::from_secs(3)).await;
    refused(&late.fetch(&cx(), &reference).await.expect_err("expired"), "dropped", "its lease has ended");
}

#[tokio::test]
async fn a_copy_is_used_for_its_lease_and_then_its_node_asks() {
    let (here, there) = (node(), node());
    let (holder, other) = (short_lease(&here), on(&there));
    let held = holder.put("adapter", "bytes").await.expect("held");
    let reference = held.reference().clone();
    for _ in 0..3 {
        assert_eq!(bytes(other.fetch(&cx(), &reference).await).await, b"bytes");
        sleep(LEASE * 2).await;
    }
    // Another process of the node, after the lease of the copy.
    assert_eq!(bytes(on(&there).fetch(&cx(), &reference).await).await, b"bytes");
    assert_eq!(held.fetches(), 1, "asked, and not sent again");
    held.release();
    sleep(LEASE * 2).await;
    refused(&other.fetch(&cx(), &reference).await.expect_err("released"), "adapter", "it was released");
    refused(&on(&there).fetch(&cx(), &reference).await.expect_err("released"), "adapter", "it was released");
    drop(other);
    until("the copy goes with its last user", || files(&there) == 0).await;
}

#[tokio::test]
async fn a_dead_holder_is_named_and_a_restarted_one_does_not_know_the_value() {
    let (here, there) = (node(), node());
    let holder = short_lease(&here);
    let held = holder.put("prompts", "x").await.expect("held");
    let mut reference = held.reference().clone();
    drop((held, holder));
    let other = on(&there);
    let error =
        other.fetch(&CallContext::within(Duration::from_secs(10)), &reference).await.expect_err("nobody is there");
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("value `prompts`") && text.contains(reference.endpoints[0].as_str()), "{text}");

    let again = short_lease(&here);
    let held = again.put("other", "y").await.expect("held");
    reference.endpoints.clone_from(&held.reference().endpoints);
    refused(&other.fetch(&cx(), &reference).await.expect_err("unknown"), "prompts", "never had it");
}

#[tokio::test]
async fn memory_and_copies_have_limits_with_a_fix() {
    let (here, there) = (node(), node());
    let mut small = options(here.path());
    small.memory_max = 100;
    let holder = Values::new(Transports::standard(), small);
    let first = holder.put("first", vec![1; 60]).await.expect("held");
    let error = holder.put("second", vec![2; 60]).await.expect_err("no room");
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("value `second`") && error.to_string().contains("memory_max"), "{error}");
    first.release();
    let second = holder.put("second", vec![2; 60]).await.expect("there is room again");

    let mut small = options(there.path());
    small.copies_max = Some(100);
    let other = Values::new(Transports::standard(), small);
    let in_use = other.fetch(&cx(), second.reference()).await.expect("fetched");
    second.release();
    let third = holder.put("third", vec![3; 60]).await.expect("held");
    let error = other.fetch(&cx(), third.reference()).await.expect_err("no room");
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("value `third`") && error.to_string().contains("copies_max"), "{error}");
    drop(in_use);
    assert_eq!(bytes(other.fetch(&cx(), third.reference()).await).await, [3; 60]);
}

#[tokio::test]
async fn what_a_dead_process_left_is_fetched_again() {
    let (here, there) = (node(), node());
    let holder = on(&here);
    let held = holder.put("half", pattern(1 << 20)).await.expect("held");
    let other = on(&there);
    // Creates the directory.
    let first = holder.put("first", "1").await.expect("held");
    other.fetch(&cx(), first.reference()).await.expect("fetched");
    let part = there.path().join("copies").join(format!("{}.part", held.reference().id));
    let mut left = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part).expect("creates");
    std::io::Write::write_all(&mut left, &[7; 3 << 20]).expect("writes");
    drop(left);
    assert_eq!(bytes(other.fetch(&cx(), held.reference()).await).await, pattern(1 << 20));
    assert!(!part.exists());
}

#[tokio::test]
async fn a_fetch_that_is_cancelled_leaves_the_value_to_the_next() {
    let (here, there) = (node(), node());
    let (holder, other) = (on(&here), on(&there));
    let held = holder.put("large", pattern(64 << 20)).await.expect("held");
    for micros in [1, 500, 5_000, 20_000] {
        let short = CallContext::within(Duration::from_micros(micros));
        if let Err(error) = other.fetch(&short, held.reference()).await {
            assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
            assert!(error.to_string().contains("value `large`"), "{error}");
        }
    }
    assert_eq!(bytes(other.fetch(&cx(), held.reference()).await).await, pattern(64 << 20));
    assert_eq!(files(&there), 1);
}

#[tokio::test]
async fn references_and_directories_of_strangers_are_refused() {
    let (here, there) = (node(), node());
    let (holder, other) = (on(&here), on(&there));
    let held: HeldValue = holder.put("mine", "1").await.expect("held");
    for id in ["", "../../etc/passwd", "0123456789abcdef0123456789abcde/", "0123456789ABCDEF0123456789ABCDEF"] {
        let reference = ValueRef { id: id.to_owned(), ..held.reference().clone() };
        let error = other.fetch(&cx(), &reference).await.expect_err("no id");
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
    for name in ["", "two\nlines"] {
        assert_eq!(holder.put(name, "1").await.expect_err("no name").code(), Code::InvalidArgument);
    }
    let open = node();
    std::fs::create_dir(open.path().join("copies")).expect("creates");
    std::fs::set_permissions(open.path().join("copies"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("sets");
    let error = on(&open).fetch(&cx(), held.reference()).await.expect_err("others can open it");
    assert_eq!(error.code(), Code::Internal);
    assert!(error.to_string().contains("copies") && error.to_string().contains("fix:"), "{error}");
}

#[tokio::test]
async fn programs_without_this_sdk_get_the_bytes_over_http() {
    let here = node();
    let holder = on(&here);
    let held = holder.put("corpus", pattern(3 << 20)).await.expect("held");
    let http: &Endpoint = held.reference().endpoints.iter().find(|at| at.scheme() == "http").expect("an http endpoint");
    let channel =
        Transports::standard().connect(&cx(), std::slice::from_ref(http), &Default::default()).await.expect("connects");
    let get = async |path: String| channel.call(Request::get(cx(), path)).await.expect("answers");
    let whole = get(format!("/values/{}", held.reference().id)).await;
    assert_eq!(whole.message.content_type.as_str(), "application/octet-stream");
    assert_eq!(whole.message.head.to_bytes(), pattern(3 << 20));
    assert_eq!(get(format!("/values/{:032x}", 1)).await.status.0, 404);
}

#[tokio::test]
async fn other_files_of_the_directory_are_never_touched() {
    let (here, there) = (node(), node());
    let copies = there.path().join("copies");
    std::fs::DirBuilder::new().mode(0o700).create(&copies).expect("creates");
    let names =
        ["thesis.txt", "notes.part", "0123456789abcdef0123456789abcdeX", "0123456789abcdef0123456789abcdef.bak"];
    for name in names {
        std::fs::write(copies.join(name), [0; 90]).expect("writes");
    }
    let mut small = options(there.path());
    small.copies_max = Some(100);
    let (holder, other) = (on(&here), Values::new(Transports::standard(), small));
    let held = holder.put("value", vec![1; 60]).await.expect("held");
    assert_eq!(bytes(other.fetch(&cx(), held.reference()).await).await, [1; 60]);
    assert!(names.iter().all(|name| copies.join(name).exists()));
}

#[tokio::test]
async fn a_node_keeps_a_copy_while_the_value_is_held_used_or_not() {
    let (here, there) = (node(), node());
    let (holder, other) = (short_lease(&here), short_lease(&there));
    let held = holder.put("adapter", pattern(1 << 20)).await.expect("held");
    let dropped = holder.put("dropped", "x").await.expect("held");
    let reference = dropped.reference().clone();
    other.fetch(&cx(), &reference).await.expect("fetched");
    for _ in 0..3 {
        assert_eq!(bytes(other.fetch(&cx(), held.reference()).await).await, pattern(1 << 20));
        sleep(LEASE * 4).await;
    }
    assert_eq!(held.fetches(), 1);
    // The node that keeps it up does not keep a value alive whose handle was dropped.
    drop(dropped);
    until("the copy of a value that is gone is removed", || files(&there) == 1).await;
    refused(&other.fetch(&cx(), &reference).await.expect_err("expired"), "dropped", "its lease has ended");
}

#[tokio::test]
async fn processes_one_after_another_share_a_copy_within_its_lease() {
    let (here, there) = (node(), node());
    let holder = on(&here);
    let held = holder.put("corpus", pattern(1 << 20)).await.expect("held");
    for _ in 0..3 {
        let process = on(&there);
        assert_eq!(bytes(process.fetch(&cx(), held.reference()).await).await, pattern(1 << 20));
    }
    assert_eq!(held.fetches(), 1);
}

#[tokio::test]
async fn a_call_without_time_to_ask_leaves_the_copy() {
    let (here, there) = (node(), node());
    let (holder, other) = (short_lease(&here), on(&there));
    let held = holder.put("weights", pattern(1 << 20)).await.expect("held");
    other.fetch(&cx(), held.reference()).await.expect("fetched");
    sleep(LEASE * 2).await;
    for _ in 0..3 {
        let hasty = CallContext::within(Duration::from_micros(1));
        let error = other.fetch(&hasty, held.reference()).await.expect_err("no time");
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    }
    assert_eq!(bytes(other.fetch(&cx(), held.reference()).await).await, pattern(1 << 20));
    assert_eq!(held.fetches(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_make_room_at_the_same_time_keep_to_the_limit() {
    let (here, there) = (node(), node());
    let holder = on(&here);
    let limited = || {
        let mut options = options(there.path());
        options.copies_max = Some(5 << 20);
        Values::new(Transports::standard(), options)
    };
    for _ in 0..10 {
        let puts = (0..6).map(|at| holder.put("value", vec![at; 4 << 20])).collect::<Vec<_>>();
        let held: Vec<HeldValue> = join_all(puts).await.into_iter().collect::<Result<_>>().expect("held");
        let processes: Vec<Values> = held.iter().map(|_| limited()).collect();
        let cx = cx();
        let fetching = processes.iter().zip(&held).map(|(values, held)| values.fetch(&cx, held.reference()));
        let fetched: Vec<Result<Value>> = join_all(fetching.collect::<Vec<_>>()).await;
        let (fits, refused): (Vec<_>, Vec<_>) = fetched.iter().partition(|value| value.is_ok());
        assert_eq!(fits.len(), 1, "one has room: {fetched:?}");
        assert!(refused.iter().all(|value| value.as_ref().is_err_and(|error| error.code() == Code::ResourceExhausted)));
        assert_eq!(files(&there), 1);
    }
}

#[tokio::test]
async fn all_callers_of_a_dead_holder_fail_alike() {
    let (here, there) = (node(), node());
    let holder = on(&here);
    let reference = holder.put("prompts", "x").await.expect("held").reference().clone();
    drop(holder);
    let (other, cx) = (on(&there), CallContext::within(Duration::from_secs(30)));
    for failed in join_all((0..200).map(|_| other.fetch(&cx, &reference))).await {
        let error = failed.expect_err("nobody is there");
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(error.to_string().contains("value `prompts`"), "{error}");
        assert!(error.to_string().contains("fix: if that process is on another machine"), "{error}");
    }
}

#[tokio::test]
async fn a_clock_that_was_set_back_ends_the_lease_of_a_copy() {
    let (here, there) = (node(), node());
    let (holder, other) = (short_lease(&here), on(&there));
    let held = holder.put("value", "x").await.expect("held");
    let reference = held.reference().clone();
    other.fetch(&cx(), &reference).await.expect("fetched");
    held.release();
    drop(other);
    // As after a step of an hour: the lease begins and ends in the future.
    let copy = there.path().join("copies").join(&reference.id);
    let hour = now() + Duration::from_secs(3_600);
    let times = std::fs::FileTimes::new().set_accessed(hour).set_modified(hour + LEASE);
    OpenOptions::new().write(true).open(copy).expect("the copy is there").set_times(times).expect("sets");
    refused(&on(&there).fetch(&cx(), &reference).await.expect_err("released"), "value", "it was released");
}

#[tokio::test]
async fn a_reference_with_another_size_and_a_changed_file_are_refused() {
    let (here, there) = (node(), node());
    let (holder, other) = (on(&here), on(&there));
    let held = holder.put("value", vec![1; 1_000]).await.expect("held");
    for bytes in [0, 5, u64::MAX] {
        let wrong = ValueRef { bytes, ..held.reference().clone() };
        for values in [&holder, &other] {
            let error = values.fetch(&cx(), &wrong).await.expect_err("another size");
            assert!(matches!(error.code(), Code::InvalidArgument | Code::ResourceExhausted), "{error}");
            assert!(error.to_string().contains("value `value`"), "{error}");
        }
    }
    other.fetch(&cx(), held.reference()).await.expect("fetched");
    for values in [&other, &on(&there)] {
        let wrong = ValueRef { bytes: 5, ..held.reference().clone() };
        assert_eq!(values.fetch(&cx(), &wrong).await.expect_err("another size").code(), Code::InvalidArgument);
    }

    let file = here.path().join("corpus");
    std::fs::write(&file, [1; 100]).expect("writes");
    let held = holder.put_file("corpus", &file).await.expect("held");
    let later = now() + Duration::from_secs(1);
    let changed = OpenOptions::new().write(true).open(&file).expect("opens");
    std::io::Write::write_all(&mut &changed, &[2; 100]).expect("writes");
    changed.set_modified(later).expect("sets");
    let error = other.fetch(&cx(), held.reference()).await.expect_err("it changed");
    assert_eq!(error.code(), Code::DataLoss, "{error}");
    assert!(error.to_string().contains("value `corpus`") && error.to_string().contains("changed"), "{error}");
}
