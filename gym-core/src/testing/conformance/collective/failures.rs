//! Cases about failures: every rank ends, with the same cause and its buffer.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use super::reference::buffer;
use super::{CollectiveFixture, Ranks, all, cx, meeting, ranks, still_waits};
use crate::base::error::{Code, Error};
use crate::group::batch::tensor::{DType, Device};
use crate::group::collective::{Buffer, Collective, CommunicatorExt, DeviceMemory, Memory, Moved, ReduceOp, Transfer};
use crate::message::CallContext;

const SUM: Collective = Collective::AllReduce(ReduceOp::Sum);
/// The deadline of a call that nobody meets.
const SHORT_TIMEOUT: Duration = Duration::from_millis(200);
/// The time after a deadline in which every rank must have ended.
const MARGIN_TIMEOUT: Duration = Duration::from_secs(5);

fn floats(elements: usize) -> Buffer {
    buffer(DType::F32, &vec![0; elements * 4])
}

/// Checks that a transfer has failed, and that its buffer came back. Returns the error.
async fn failed(transfer: Transfer, bytes: usize, what: &str) -> Error {
    let ended = tokio::time::timeout(MARGIN_TIMEOUT, transfer).await;
    let Moved { buffer, result } = ended.unwrap_or_else(|_| panic!("{what}: does not end"));
    assert_eq!(buffer.bytes(), bytes, "{what}: the buffer comes back");
    result.expect_err(what)
}

/// Checks that the meeting has failed on every rank with this cause, now and for later calls.
async fn check_closed(communicators: &Ranks, cause: &Error) {
    for rank in communicators {
        let closed = tokio::time::timeout(MARGIN_TIMEOUT, rank.closed()).await.expect("the meeting is closed");
        same(&closed, cause);
        for operation in [SUM, Collective::AllGather, Collective::Send { to: rank.meeting().rank }] {
            let later = failed(rank.start(&cx(), operation, floats(3)), 12, "a later call").await;
            same(&later, cause);
        }
        rank.abort(Error::internal("a later cause"));
        same(&rank.closed().await, cause);
    }
}

fn same(error: &Error, cause: &Error) {
    assert_eq!((error.code(), error.to_string()), (cause.code(), cause.to_string()), "every rank has the first cause");
}

fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "`{text}` must contain `{part}`");
    }
}

pub(super) async fn different_calls_fail_on_every_rank(fixture: &dyn CollectiveFixture, _: u64) {
    let numbers = ranks(3);
    let (root, other_root) = (numbers[0], numbers[1]);
    let typed = |dtype, elements: usize| buffer(dtype, &vec![0; elements * dtype.size()]);
    let cases: [(&str, [(Collective, Buffer); 2]); 7] = [
        ("another operation", [(SUM, floats(4)), (Collective::AllGather, floats(4))]),
        ("no operation", [(SUM, floats(0)), (Collective::Barrier, Buffer::empty())]),
        ("another arithmetic", [(SUM, floats(4)), (Collective::AllReduce(ReduceOp::Max), floats(4))]),
        ("another type", [(Collective::AllGather, floats(4)), (Collective::AllGather, typed(DType::I32, 4))]),
        ("another length", [(SUM, floats(4)), (SUM, floats(5))]),
        ("another length to scatter", {
            let scatter = Collective::ReduceScatter(ReduceOp::Sum);
            [(scatter, floats(4)), (scatter, floats(6))]
        }),
        ("another root", {
            let from = |root| Collective::Broadcast { root };
            [(from(root), floats(4)), (from(other_root), floats(4))]
        }),
    ];
    for (what, [(usual, usual_buffer), (odd, odd_buffer)]) in cases {
        let communicators = meeting(fixture, 3).await;
        let cx = cx();
        // An operation before it, so that the number in the subject counts.
        assert!(all(communicators.iter().map(|rank| rank.barrier(&cx))).await.iter().all(Result::is_ok), "{what}");
        let copy = buffer(usual_buffer.dtype, usual_buffer.host_bytes().expect("host memory"));
        let sizes = [usual_buffer.bytes(), odd_buffer.bytes(), copy.bytes()];
        let calls = [(usual, usual_buffer), (odd, odd_buffer), (usual, copy)];
        let transfers: Vec<Transfer> = communicators
            .iter()
            .zip(calls)
            .map(|(rank, (operation, buffer))| rank.start(&cx, operation, buffer))
            .collect();
        let errors = all(transfers.into_iter().zip(sizes).map(|(transfer, bytes)| failed(transfer, bytes, what))).await;
        assert_eq!(errors[0].code(), Code::FailedPrecondition, "{what}: {}", errors[0]);
        // The backend may compare any rank with the odd one.
        says(&errors[0], &[&format!("rank {} calls {odd}", numbers[1]), &format!("calls {usual}"), "meeting", "epoch"]);
        let other_named = [numbers[0], numbers[2]]
            .iter()
            .any(|rank| errors[0].to_string().contains(&format!("rank {rank} calls {usual}")));
        assert!(other_named, "{what}: both ranks are named: {}", errors[0]);
        assert!(errors[0].subject().contains(" 1 of meeting"), "{what}: the subject has the number: {}", errors[0]);
        errors.iter().for_each(|error| same(error, &errors[0]));
        check_closed(&communicators, &errors[0]).await;
    }
}

pub(super) async fn a_send_that_does_not_fit_fails_on_both_ranks(fixture: &dyn CollectiveFixture, _: u64) {
    let numbers = ranks(2);
    for (what, place) in [("another length", floats(3)), ("another type", buffer(DType::I32, &[0; 16]))] {
        let (communicators, cx, bytes) = (meeting(fixture, 2).await, cx(), place.bytes());
        let send = communicators[0].start(&cx, Collective::Send { to: numbers[1] }, floats(4));
        let receive = communicators[1].start(&cx, Collective::Receive { from: numbers[0] }, place);
        let (send, receive) = tokio::join!(failed(send, 16, what), failed(receive, bytes, what));
        assert_eq!(send.code(), Code::FailedPrecondition, "{what}: {send}");
        says(&send, &[&format!("rank {} calls send", numbers[0]), &format!("rank {} calls receive", numbers[1])]);
        same(&send, &receive);
        check_closed(&communicators, &send).await;
    }
}

/// Memory that no backend knows.
#[derive(Debug, PartialEq)]
struct Foreign(usize);

impl DeviceMemory for Foreign {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn bytes(&self) -> usize {
        self.0
    }
}

pub(super) async fn an_invalid_call_is_rejected_and_takes_no_place(fixture: &dyn CollectiveFixture, _: u64) {
    let (communicators, cx) = (meeting(fixture, 2).await, cx());
    let integers = || buffer(DType::I32, &[0; 8]);
    let mean = ReduceOp::Mean;
    let unknown = 1_000_000;
    let cases = [
        (Collective::AllReduce(mean), integers(), Code::InvalidArgument, "use the sum"),
        (Collective::ReduceScatter(mean), integers(), Code::InvalidArgument, "use the sum"),
        (SUM, buffer(DType::Bool, &[0; 4]), Code::Unimplemented, "U8, I32, I64, F16, BF16, F32, F64"),
        (Collective::AllGather, buffer(DType::U16, &[0; 4]), Code::Unimplemented, "U8, I32, I64, F16, BF16, F32, F64"),
        (SUM, buffer(DType::F32, &[0; 7]), Code::InvalidArgument, "7 bytes"),
        (Collective::Barrier, floats(1), Code::InvalidArgument, "empty"),
        (Collective::Broadcast { root: unknown }, floats(1), Code::InvalidArgument, "has no seat"),
        (Collective::Send { to: unknown }, floats(1), Code::InvalidArgument, "has no seat"),
        (Collective::Receive { from: unknown }, floats(1), Code::InvalidArgument, "has no seat"),
    ];
    for (operation, given, code, text) in cases {
        let bytes = given.bytes();
        let error = failed(communicators[0].start(&cx, operation, given), bytes, operation.name()).await;
        assert_eq!(error.code(), code, "{error}");
        says(&error, &[text, operation.name(), "meeting"]);
    }
    let foreign = Buffer::new(DType::F32, Memory::Device(Box::new(Foreign(64))));
    let Moved { buffer: foreign, result } = communicators[0].start(&cx, SUM, foreign).await;
    assert_eq!(result.expect_err("foreign memory").code(), Code::Unimplemented);
    let Memory::Device(memory) = foreign.memory else { panic!("another memory came back") };
    let memory: Box<dyn std::any::Any> = memory;
    assert_eq!(memory.downcast::<Foreign>().ok().as_deref(), Some(&Foreign(64)));
    // Nothing of this took a place or ended the meeting.
    let moved = all(communicators.iter().map(|rank| rank.start(&cx, SUM, floats(2)))).await;
    assert!(moved.iter().all(|moved| moved.result.is_ok()), "{moved:?}");
}

pub(super) async fn a_passed_deadline_names_the_ranks_that_did_not_call(fixture: &dyn CollectiveFixture, _: u64) {
    let (communicators, numbers) = (meeting(fixture, 4).await, ranks(4));
    let began = Instant::now();
    // The deadline of one call ends all, also a call that has more time and one of another operation.
    let soon = CallContext::within(SHORT_TIMEOUT);
    let first = communicators[0].start(&soon, SUM, floats(4));
    let third = communicators[2].start(&cx(), SUM, floats(4));
    let send = communicators[2].start(&cx(), Collective::Send { to: numbers[0] }, floats(2));
    let (first, third, send) =
        tokio::join!(failed(first, 16, "the first"), failed(third, 16, "the third"), failed(send, 8, "the send"));
    assert!(
        began.elapsed() >= SHORT_TIMEOUT && began.elapsed() < SHORT_TIMEOUT + MARGIN_TIMEOUT,
        "{:?}",
        began.elapsed()
    );
    assert_eq!(first.code(), Code::DeadlineExceeded, "{first}");
    says(&first, &["all_reduce 0 of meeting", &format!("ranks {}, {} have not called", numbers[1], numbers[3])]);
    [&third, &send].into_iter().for_each(|error| same(error, &first));
    check_closed(&communicators, &first).await;

    let communicators = meeting(fixture, 2).await;
    let receive = communicators[1].start(
        &CallContext::within(SHORT_TIMEOUT),
        Collective::Receive { from: numbers[0] },
        floats(1),
    );
    let error = failed(receive, 4, "a receive").await;
    says(&error, &[&format!("receive 0 from rank {}", numbers[0]), &format!("rank {} has not called", numbers[0])]);
    // A deadline that has passed before the call ends the meeting too: the other ranks wait for this one.
    let communicators = meeting(fixture, 2).await;
    let waiting = communicators[0].start(&cx(), SUM, floats(1));
    let late = communicators[1].start(&CallContext::within(Duration::ZERO), SUM, floats(1));
    let (waiting, late) = tokio::join!(failed(waiting, 4, "the other rank"), failed(late, 4, "the late rank"));
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    same(&waiting, &late);
    // A dropped transfer keeps its deadline.
    let communicators = meeting(fixture, 2).await;
    drop(communicators[0].start(&CallContext::within(SHORT_TIMEOUT), SUM, floats(1)));
    let closed = tokio::time::timeout(SHORT_TIMEOUT + MARGIN_TIMEOUT, communicators[1].closed())
        .await
        .expect("the deadline passes");
    assert_eq!(closed.code(), Code::DeadlineExceeded, "{closed}");
}

pub(super) async fn a_cancelled_call_ends_the_meeting(fixture: &dyn CollectiveFixture, _: u64) {
    let (communicators, numbers) = (meeting(fixture, 3).await, ranks(3));
    let cancelled = cx();
    let mut first = communicators[0].start(&cancelled, Collective::Barrier, Buffer::empty());
    let second = communicators[1].start(&cx(), Collective::Barrier, Buffer::empty());
    still_waits(&mut first, "a barrier").await;
    cancelled.cancel.cancel();
    let (first, second) = tokio::join!(failed(first, 0, "the first"), failed(second, 0, "the second"));
    assert_eq!(first.code(), Code::Cancelled, "{first}");
    says(&first, &["barrier 0 of meeting", &format!("rank {} has not called", numbers[2])]);
    same(&second, &first);
    check_closed(&communicators, &first).await;
    // A cancellation after the end changes nothing.
    let (communicators, context) = (meeting(fixture, 2).await, cx());
    let ended = all(communicators.iter().map(|rank| rank.barrier(&context))).await;
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    context.cancel.cancel();
    let ended = all(communicators.iter().map(|rank| rank.barrier(&cx()))).await;
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}

pub(super) async fn the_first_cause_wins(fixture: &dyn CollectiveFixture, _: u64) {
    let communicators = meeting(fixture, 3).await;
    assert!(communicators[0].closed().now_or_never().is_none(), "nothing has failed");
    let mut waiting = communicators[0].start(&cx(), SUM, floats(4));
    let receive = communicators[1].start(&cx(), Collective::Receive { from: ranks(3)[0] }, floats(1));
    still_waits(&mut waiting, "a sum").await;
    let cause = Error::unknown(Code::DataLoss, "rank 5 read other weights").about("refit 7");
    communicators[2].abort(cause);
    // Another rank has its own opinion, later.
    tokio::task::yield_now().await;
    communicators[2].abort(Error::internal("a second cause"));
    let (waiting, receive) = tokio::join!(failed(waiting, 16, "a sum"), failed(receive, 4, "a receive"));
    assert_eq!((waiting.code(), waiting.to_string().as_str()), (Code::DataLoss, "refit 7: rank 5 read other weights"));
    same(&receive, &waiting);
    check_closed(&communicators, &waiting).await;
}

pub(super) async fn survivors_name_the_killed_rank(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    for world_size in 2..=6 {
        let mut communicators = meeting(fixture, world_size).await;
        let killed = generator.usize(..world_size);
        let (victim, rank) = (communicators.remove(killed), ranks(world_size)[killed]);
        // Some survivors wait in the operation, others call it later.
        let early = generator.usize(1..world_size.max(2));
        let mut transfers: Vec<Transfer> =
            communicators[..early].iter().map(|rank| rank.start(&cx(), SUM, floats(8))).collect();
        still_waits(&mut transfers[0], "a sum").await;
        fixture.kill(victim).await;
        transfers.extend(communicators[early..].iter().map(|rank| rank.start(&cx(), SUM, floats(8))));
        let errors = all(transfers.into_iter().map(|transfer| failed(transfer, 32, "a survivor"))).await;
        assert_eq!(errors[0].code(), Code::Unavailable, "{}", errors[0]);
        says(&errors[0], &[&format!("rank {rank} has left")]);
        errors.iter().for_each(|error| same(error, &errors[0]));
        check_closed(&communicators, &errors[0]).await;
        // The end of a survivor is no second cause.
        let last = communicators.pop().expect("a survivor");
        fixture.kill(Arc::clone(&last)).await;
        same(&last.closed().await, &errors[0]);
    }
}

pub(super) async fn a_rank_that_left_earlier_holds_nobody_up(fixture: &dyn CollectiveFixture, _: u64) {
    let mut communicators = meeting(fixture, 3).await;
    let numbers = ranks(3);
    // It leaves between two operations, after it has called the first, while nobody waits for it.
    let left = communicators.remove(1);
    let own = left.start(&cx(), SUM, floats(2));
    drop(left);
    let moved = all(communicators.iter().map(|rank| rank.start(&cx(), SUM, floats(2)))).await;
    assert!(moved.iter().all(|moved| moved.result.is_ok()), "its call was made: {moved:?}");
    assert!(own.await.result.is_ok(), "its transfer went on");
    // Operations without it go on. The next one that needs it fails at once.
    let (send, receive) = tokio::join!(
        communicators[0].start(&cx(), Collective::Send { to: numbers[2] }, floats(1)),
        communicators[1].start(&cx(), Collective::Receive { from: numbers[0] }, floats(1))
    );
    assert!(send.result.is_ok() && receive.result.is_ok(), "{send:?} {receive:?}");
    let error = failed(communicators[0].start(&cx(), SUM, floats(2)), 8, "a call without it").await;
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    says(&error, &["all_reduce 1 of meeting", &format!("rank {} has left", numbers[1])]);
    check_closed(&communicators, &error).await;
}
