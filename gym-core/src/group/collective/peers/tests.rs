use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{join_all, try_join_all};

use super::*;
use crate::group::batch::tensor::Tensor;
use crate::group::collective::{CommunicatorExt, InProcessCollectives, ReduceOp, Seat};
use crate::message::Incarnation;

fn cx() -> CallContext {
    CallContext::within(Duration::from_secs(60))
}

fn layout() -> RankLayout {
    RankLayout::new([("data", 2), ("tensor", 2)]).unwrap()
}

fn seats(epoch: u64, ranks: impl IntoIterator<Item = Rank>) -> Seats {
    let seat = |rank| Seat::new(rank, Incarnation(1));
    Seats::new(epoch, layout(), ranks.into_iter().map(seat).collect())
}

/// Tells all ranks who meets.
fn tell(peers: &[Peers], seats: &Seats) {
    assert!(peers.iter().all(|peers| peers.seat(seats.clone())), "they are new");
}

/// Four ranks: `data` by `tensor`.
fn group() -> (Vec<Peers>, InProcessCollectives) {
    let backend = InProcessCollectives::new();
    let peers = (0..4).map(|rank| Peers::new("policy", rank, Arc::new(backend.clone()))).collect();
    (peers, backend)
}

fn ranks(communicator: &Arc<dyn Communicator>) -> Vec<Rank> {
    communicator.meeting().seats.iter().map(|seat| seat.rank).collect()
}

async fn along(peers: &[Peers], axis: &str) -> Vec<Arc<dyn Communicator>> {
    let cx = cx();
    try_join_all(peers.iter().map(|peers| peers.communicator(&cx, axis))).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_axis_has_the_ranks_that_differ_only_there() {
    let (peers, _) = group();
    tell(&peers, &seats(3, 0..4));
    let (data, tensor, context) = (along(&peers, "data").await, along(&peers, "tensor").await, cx());
    let all = try_join_all(peers.iter().map(|peers| peers.all(&context))).await.unwrap();
    assert_eq!(data.iter().map(ranks).collect::<Vec<_>>(), [[0, 2], [1, 3], [0, 2], [1, 3]]);
    assert_eq!(tensor.iter().map(ranks).collect::<Vec<_>>(), [[0, 1], [0, 1], [2, 3], [2, 3]]);
    assert!(all.iter().all(|all| ranks(all) == [0, 1, 2, 3]));
    let names = [&data[3], &tensor[1], &all[2]].map(|communicator| communicator.meeting().to_string());
    let expected = ["policy/data[tensor=1] (epoch 3)", "policy/tensor[data=0] (epoch 3)", "policy (epoch 3)"];
    assert_eq!(names, expected.map(|name| format!("meeting {name}")));
    let sums =
        join_all(data.iter().zip([1_i64, 2, 4, 8]).map(|(data, value)| {
            data.all_reduce(&context, Tensor::from_vec([1], vec![value]).unwrap(), ReduceOp::Sum)
        }));
    let sums: Vec<i64> = sums.await.into_iter().map(|sum| sum.unwrap().to_i64s().unwrap()[0]).collect();
    assert_eq!(sums, [5, 10, 5, 10]);
}

#[tokio::test(start_paused = true)]
async fn an_epoch_has_one_communicator_however_often_it_is_asked_for() {
    let (peers, backend) = group();
    // Asked for before the seats are known, by two tasks at once.
    let context = cx();
    let first = join_all(peers.iter().chain(&peers).map(|peers| peers.communicator(&context, "tensor")));
    let known = async {
        tokio::task::yield_now().await;
        // One seat of each pair is missing at first.
        tell(&peers, &seats(1, [0, 3]));
        tokio::task::yield_now().await;
        tell(&peers, &seats(2, 0..4));
    };
    let (first, ()) = tokio::join!(first, known);
    let first: Vec<_> = first.into_iter().map(Result::unwrap).collect();
    let again = along(&peers, "tensor").await;
    for rank in 0..4 {
        assert!(Arc::ptr_eq(&first[rank], &again[rank]) && Arc::ptr_eq(&first[rank], &first[rank + 4]));
        assert_eq!(first[rank].meeting().epoch, 2);
    }
    assert_eq!(backend.meetings(), 2);
    drop((first, again, peers));
    assert_eq!(backend.meetings(), 0, "communicators end with their peers");
}

#[tokio::test(start_paused = true)]
async fn a_newer_epoch_aborts_the_communicators_of_the_old_one() {
    let (peers, backend) = group();
    tell(&peers, &seats(1, 0..4));
    let (old, context) = (along(&peers, "data").await, cx());
    let waiting = old[0].barrier(&context);
    tell(&peers, &seats(2, 0..4));
    // Nobody needs to ask for that.
    let error = waiting.await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.to_string().contains("policy/data[tensor=0] (epoch 1): the group is in epoch 2"), "{error}");
    let new = along(&peers, "data").await;
    assert!(new.iter().zip(&old).all(|(new, old)| new.meeting().epoch == 2 && !Arc::ptr_eq(new, old)));
    assert!(old.iter().all(|old| old.closed().now_or_never().is_some()));
    assert!(join_all(new.iter().map(|new| new.barrier(&context))).await.iter().all(Result::is_ok));
    drop(old);
    assert_eq!(backend.meetings(), 2, "the old meetings are forgotten");
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_waits_for_others_goes_on_in_the_newer_epoch() {
    let (peers, backend) = group();
    tell(&peers, &seats(1, 0..4));
    let context = cx();
    let mut early = std::pin::pin!(peers[0].communicator(&context, "data"));
    assert!(early.as_mut().now_or_never().is_none());
    tell(&peers, &seats(2, 0..4));
    let (early, late) = tokio::join!(early, peers[2].communicator(&context, "data"));
    assert_eq!((early.unwrap().meeting().epoch, late.unwrap().meeting().epoch), (2, 2));
    assert_eq!(backend.meetings(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_error_says_what_was_missing() {
    let (peers, backend) = group();
    let soon = || CallContext::within(Duration::from_secs(1));
    let ask = async |axis: &'static str| peers[1].communicator(&soon(), axis).await.unwrap_err();
    let cases = [
        (
            None,
            "rank 1 of policy meets data: the deadline has passed after a wait of 1.0 s: the supervisor of the group has not told its seats",
        ),
        (Some(seats(4, 0..3).without([(3, "died by signal 9".to_owned())])), "wait of 1.0 s: rank 3 died by signal 9"),
        (
            Some(seats(5, 0..4)),
            "join meeting policy/data[tensor=1] (epoch 5) as rank 1: the deadline has passed after a wait of 1.0 s; rank 3 has not joined",
        ),
    ];
    for (known, text) in cases {
        if let Some(known) = known {
            tell(&peers, &known);
        }
        let error = ask("data").await;
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert!(error.to_string().contains(text), "{error}");
    }
    let unknown = ask("expert").await;
    assert_eq!(unknown.code(), Code::InvalidArgument);
    assert!(unknown.to_string().contains("data, tensor"), "{unknown}");
    assert_eq!(backend.meetings(), 0, "a failed join leaves nothing");
    let empty = Peers::default();
    let error = empty.all(&soon()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.to_string().contains("does not connect ranks"), "{error}");
    assert_eq!((empty.clone(), format!("{empty:?}").as_str()), (Peers::default(), "Peers(none)"));
    assert_ne!(peers[0], peers[1]);
    assert_eq!(peers[0], peers[0].clone());
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_waits_for_a_lost_one_is_told_and_one_that_asks_later_waits_for_its_return() {
    let (peers, backend) = group();
    tell(&peers, &seats(1, 0..4));
    let context = cx();
    let mut waiting = std::pin::pin!(peers[0].communicator(&context, "data"));
    assert!(waiting.as_mut().now_or_never().is_none());
    tell(&peers, &seats(2, [0, 1, 3]).without([(2, "died by signal 9".to_owned())]));
    let error = waiting.await.map(drop).unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted));
    assert!(error.to_string().ends_with("rank 0 of policy meets data: rank 2 died by signal 9"), "{error}");
    // Its next call, which may come before the seats of the restarted rank.
    let mut early = std::pin::pin!(peers[0].communicator(&context, "data"));
    assert!(early.as_mut().now_or_never().is_none());
    let mut back = seats(3, 0..4);
    back.seats[2].incarnation = Incarnation(2);
    tell(&peers, &back);
    let (early, late) = tokio::join!(early, peers[2].communicator(&context, "data"));
    assert_eq!((early.unwrap().meeting().epoch, late.unwrap().meeting().epoch), (3, 3));
    assert_eq!(backend.meetings(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_transfer_names_the_rank_that_was_lost_or_replaced() {
    let mut replaced = seats(2, 0..4);
    replaced.seats[3].incarnation = Incarnation(7);
    for (newer, code, text) in [
        (seats(2, [0, 1, 3]).without([(2, "died".to_owned())]), Code::Unavailable, "(epoch 1): rank 2 died"),
        (replaced, Code::Unavailable, "(epoch 1): rank 3 was replaced by its incarnation 7"),
        (seats(2, 0..4), Code::FailedPrecondition, "(epoch 1): the group is in epoch 2"),
    ] {
        let (peers, _) = group();
        tell(&peers, &seats(1, 0..4));
        let context = cx();
        let all = try_join_all(peers.iter().map(|peers| peers.all(&context))).await.unwrap();
        let waiting = all[0].barrier(&context);
        tell(&peers, &newer);
        let error = waiting.await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(text), "{error}");
        assert!(!peers[0].seat(seats(2, 0..4)), "an epoch is told once");
    }
}

#[tokio::test(start_paused = true)]
async fn peers_that_are_closed_end_what_waits_for_their_rank() {
    let (peers, _) = group();
    tell(&peers, &seats(1, 0..4));
    let context = cx();
    let all = try_join_all(peers.iter().map(|peers| peers.all(&context))).await.unwrap();
    let waiting = all[0].barrier(&context);
    peers[3].close();
    let error = waiting.await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.to_string().contains("rank 3 has ended"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn ranks_that_have_failed_together_meet_again_in_the_same_epoch() {
    let (peers, backend) = group();
    tell(&peers, &seats(1, 0..4));
    let context = cx();
    for name in
        ["policy/data[tensor=0] (epoch 1)", "policy/data[tensor=0]#2 (epoch 1)", "policy/data[tensor=0]#3 (epoch 1)"]
    {
        let data = along(&peers, "data").await;
        assert_eq!(data[0].meeting().to_string(), format!("meeting {name}"));
        let sums = join_all(data.iter().map(|data| data.barrier(&context))).await;
        assert!(sums.iter().all(Result::is_ok));
        // Rank 2 is late.
        let late = data[0].barrier(&CallContext::within(Duration::from_secs(1))).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        data[1].abort(Error::internal("of the other pair"));
    }
    let again = along(&peers, "data").await;
    assert_eq!((again[0].meeting().epoch, backend.meetings()), (1, 2), "the meetings that failed are forgotten");
}
