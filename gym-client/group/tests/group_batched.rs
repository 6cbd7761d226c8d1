//! Lists of small items in batches by time: sizes, order, lost ranks, and items that fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gym_core::registry::Balance;
use gym_core::{Code, Execution};
use gym_group::health::{FailureOrigin, RetryBudgets};
use gym_group::prelude::*;
use gym_group::{Balancer, BatchOptions, ItemError};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// An item of the lists: its number, how long its check takes, and what happens then.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Item {
    number: usize,
    micros: u64,
    panics: bool,
    rejected: bool,
    breaks_the_rank: bool,
}

/// The number of the item, the rank, and how many items the batch had.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Checked {
    number: usize,
    rank: Rank,
    together: usize,
}

/// Needs longer by this factor on rank 1.
struct Verifier(Rank, u32);
worker! {
    impl Worker for Verifier as verifier {
        fn start(env: WorkerEnv, slower: u32) -> Result<Self> { Ok(Self(env.rank, if env.rank == 1 { slower } else { 1 })) }
        exclusive(idempotent) async fn check(&mut self, _: &CallContext, call: Payload<Vec<Item>>) -> Result<Payload<Vec<Checked>>> {
            let mut replies = Vec::new();
            for item in &call.value {
                tokio::time::sleep(Duration::from_micros(item.micros) * self.1).await;
                assert!(!item.panics, "no verifier expects this");
                if item.rejected {
                    return Err(Error::invalid("not a number"));
                }
                if item.breaks_the_rank {
                    return Err(Error::finished(Code::Unavailable, "the sandbox is gone"));
                }
                replies.push(Checked { number: item.number, rank: self.0, together: call.value.len() });
            }
            Ok(replies.into())
        }
        /// Forgets the last item of each batch.
        exclusive(idempotent) async fn forget(&mut self, _: &CallContext, call: Payload<Vec<Item>>) -> Result<Payload<Vec<usize>>> {
            Ok(call.value.iter().skip(1).map(|item| item.number).collect::<Vec<_>>().into())
        }
        /// Adds a common number.
        exclusive(idempotent) async fn add(&mut self, _: &CallContext, call: Payload<(usize, Vec<Item>)>) -> Result<Payload<Vec<usize>>> {
            Ok(call.value.1.iter().map(|item| item.number + call.value.0).collect::<Vec<_>>().into())
        }
    }
}

async fn verifiers(ranks: usize, slower: u32) -> (Arc<InProcessGroup>, Balancer) {
    let layout = RankLayout::line(ranks).expect("starts");
    let group = Arc::new(InProcessGroup::start::<Verifier>("verifiers", layout, slower).await.expect("starts"));
    let balancer = Balancer::new(Arc::clone(&group) as _, Balance::LeastPending).expect("starts");
    (group, balancer)
}

fn items(count: usize, micros: u64) -> Vec<Item> {
    (0..count).map(|number| Item { number, micros, ..Item::default() }).collect()
}

/// Returns the replies, which must be in the order of the items.
fn in_order(results: Vec<Result<Checked, ItemError>>) -> Vec<Checked> {
    let replies: Vec<_> = results.into_iter().map(|result| result.expect("a reply")).collect();
    assert!(replies.iter().enumerate().all(|(at, reply)| reply.number == at), "{replies:?}");
    replies
}

fn by_rank(replies: &[Checked]) -> BTreeMap<Rank, usize> {
    let mut counts = BTreeMap::new();
    replies.iter().for_each(|reply| *counts.entry(reply.rank).or_default() += 1);
    counts
}

async fn check(balancer: &Balancer, items: Vec<Item>) -> Vec<Result<Checked, ItemError>> {
    balancer.map_batched(&CallContext::within(WAIT_TIMEOUT), verifier::check, items, &BatchOptions::default()).await
}

#[tokio::test(start_paused = true)]
async fn batches_take_the_target_time_and_all_ranks_end_together() {
    let (_group, balancer) = verifiers(4, 1).await;
    let begin = Instant::now();
    let replies = in_order(check(&balancer, items(1_000, 1_000)).await);
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(270), "1,000 items of 1 ms on 4 ranks need 250 ms: {took:?}");
    let largest = replies.iter().map(|reply| reply.together).max().unwrap();
    assert!((15..=20).contains(&largest), "{largest} items of 1 ms in a batch of 20 ms");
    assert!(by_rank(&replies).values().all(|count| (230..=270).contains(count)), "{:?}", by_rank(&replies));
}

#[tokio::test(start_paused = true)]
async fn items_that_take_longer_than_a_batch_go_one_by_one_and_quick_ones_in_few_batches() {
    let (group, balancer) = verifiers(2, 1).await;
    let replies = in_order(check(&balancer, items(40, 50_000)).await);
    assert!(replies.iter().all(|reply| reply.together == 1), "{replies:?}");
    let calls = async || {
        group
            .ask_hosts(&CallContext::within(WAIT_TIMEOUT))
            .await
            .iter()
            .map(|host| host.as_ref().unwrap().succeeded)
            .sum::<u64>()
    };
    let before = calls().await;
    in_order(check(&balancer, items(10_000, 0)).await);
    let batches = calls().await - before;
    assert!((8..150).contains(&batches), "{batches} batches");
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_is_three_times_slower_gets_a_quarter() {
    let (_group, balancer) = verifiers(2, 3).await;
    let begin = Instant::now();
    let replies = in_order(check(&balancer, items(1_000, 1_000)).await);
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(830), "750 items of 1 ms beside 250 of 3 ms: {took:?}");
    assert!((200..=300).contains(&by_rank(&replies)[&1]), "{:?}", by_rank(&replies));
}

#[tokio::test(start_paused = true)]
async fn an_item_that_fails_is_named_and_the_others_get_their_replies() {
    for again in [false, true] {
        let (_group, mut balancer) = verifiers(3, 1).await;
        if again {
            balancer = balancer.again(RetryBudgets::default());
        }
        let mut items = items(1_000, 500);
        items[137].panics = true;
        items[138].rejected = true;
        items[999].panics = true;
        let results = check(&balancer, items).await;
        for (at, result) in results.into_iter().enumerate() {
            match (at, result) {
                (137 | 138 | 999, Err(error)) => {
                    assert_eq!((error.item(), error.origin()), (at, FailureOrigin::Data), "{error}");
                    let text = error.to_string();
                    let why = if at == 138 { "not a number" } else { "no verifier expects this" };
                    assert!(
                        text.starts_with(&format!("item {at}: call verifier.check")) && text.contains(why),
                        "{text}"
                    );
                    assert_eq!(gym_core::Error::from(error).execution(), Execution::Finished);
                }
                (_, result) => assert_eq!(result.expect("a reply").number, at),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn batches_of_a_lost_rank_are_handed_out_again() {
    let (group, balancer) = verifiers(3, 1).await;
    let balancer = balancer.again(RetryBudgets::default());
    let (results, ()) = tokio::join!(check(&balancer, items(600, 1_000)), async {
        tokio::time::sleep(Duration::from_millis(60)).await;
        group.kill(1).unwrap();
    });
    let replies = in_order(results);
    let lost = by_rank(&replies)[&1];
    assert!((10..100).contains(&lost), "rank 1 checked {lost} items before it was killed");
}

#[tokio::test(start_paused = true)]
async fn without_repetition_the_items_of_a_lost_rank_fail_and_no_others() {
    let (group, balancer) = verifiers(2, 1).await;
    let (results, ()) = tokio::join!(check(&balancer, items(600, 1_000)), async {
        tokio::time::sleep(Duration::from_millis(60)).await;
        group.kill(1).unwrap();
    });
    let failed: Vec<&ItemError> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!((1..=40).contains(&failed.len()), "at most two batches: {}", failed.len());
    assert!(failed.iter().all(|error| error.origin() == FailureOrigin::Infrastructure), "{failed:?}");
}

#[tokio::test(start_paused = true)]
async fn an_item_that_breaks_its_rank_takes_few_others_along() {
    let (_group, balancer) = verifiers(4, 1).await;
    let mut budgets = RetryBudgets::default();
    budgets.infrastructure_attempts = 8;
    let balancer = balancer.again(budgets);
    let mut items = items(400, 1_000);
    items[200].breaks_the_rank = true;
    let results = balancer
        .map_batched(&CallContext::within(60 * WAIT_TIMEOUT), verifier::check, items, &BatchOptions::default())
        .await;
    let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert_eq!(failed.iter().map(|error| error.item()).collect::<Vec<_>>(), [200]);
    assert_eq!(failed[0].origin(), FailureOrigin::Infrastructure);
    assert!(failed[0].to_string().contains("the sandbox is gone"), "{}", failed[0]);
}

// In real time: a rank starts on a thread, for which a paused clock does not wait.
#[tokio::test]
async fn a_list_waits_for_a_rank_that_comes_back() {
    let (group, balancer) = verifiers(1, 1).await;
    // Only the rank ends the pause: it is longer than the deadline.
    let pause = Duration::from_secs(3_600);
    let mut budgets = RetryBudgets::default();
    budgets.backoff_min = pause;
    budgets.backoff_max = pause;
    let balancer = balancer.again(budgets);
    group.kill(0).unwrap();
    let (results, ()) = tokio::join!(check(&balancer, items(30, 1_000)), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        group.restart::<Verifier>(0, 1).await.unwrap();
    });
    in_order(results);
}

#[tokio::test(start_paused = true)]
async fn a_list_without_ranks_fails_at_once_or_when_its_budget_is_spent() {
    let (group, balancer) = verifiers(1, 1).await;
    group.kill(0).unwrap();
    let failed = async |balancer: &Balancer| {
        let begin = Instant::now();
        for result in check(balancer, items(3, 1)).await {
            let error = result.expect_err("no rank");
            assert_eq!(error.origin(), FailureOrigin::Infrastructure);
            assert!(error.to_string().contains("no rank is healthy"), "{error}");
        }
        begin.elapsed().as_secs()
    };
    assert_eq!(failed(&balancer).await, 0);
    assert_eq!(failed(&balancer.again(RetryBudgets::default())).await, 15, "the pauses of the budget: 1, 2, 4 and 8 s");
}

#[tokio::test(start_paused = true)]
async fn at_the_deadline_the_finished_items_keep_their_replies() {
    let (_group, balancer) = verifiers(2, 1).await;
    let balancer = balancer.again(RetryBudgets::default());
    let cx = CallContext::within(Duration::from_millis(200));
    let results = balancer.map_batched(&cx, verifier::check, items(1_000, 1_000), &BatchOptions::default()).await;
    let finished = results.iter().filter(|result| result.is_ok()).count();
    assert!((300..400).contains(&finished), "{finished} items of 1 ms in 200 ms on 2 ranks");
    let late = results.iter().filter_map(|result| result.as_ref().err());
    assert!(late.clone().all(|error| error.origin() == FailureOrigin::Infrastructure));
    assert!(late.clone().all(|error| error.error().cause().code() == Code::DeadlineExceeded));
    let cx = CallContext::within(WAIT_TIMEOUT);
    cx.cancel.cancel();
    let results = balancer.map_batched(&cx, verifier::check, items(2, 1_000), &BatchOptions::default()).await;
    for result in results {
        let error = result.expect_err("cancelled");
        assert_eq!((error.origin(), error.error().cause().code()), (FailureOrigin::Infrastructure, Code::Cancelled));
    }
}

#[tokio::test(start_paused = true)]
async fn a_method_that_forgets_items_is_told_so() {
    let (_group, balancer) = verifiers(1, 1).await;
    let cx = CallContext::within(WAIT_TIMEOUT);
    let results = balancer.map_batched(&cx, verifier::forget, items(10, 0), &BatchOptions::default()).await;
    for result in results {
        let text = result.expect_err("a reply is missing").to_string();
        assert!(text.contains("0 replies for 1 items; return one reply for each item"), "{text}");
    }
    assert!(balancer.map_batched(&cx, verifier::forget, Vec::new(), &BatchOptions::default()).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_all_items_share_is_part_of_the_arguments() {
    let (_group, balancer) = verifiers(2, 1).await;
    let cx = CallContext::within(WAIT_TIMEOUT);
    let results = balancer
        .map_batched_with(&cx, verifier::add, items(100, 0), |batch| (7, batch), &BatchOptions::default())
        .await;
    let sums: Vec<_> = results.into_iter().map(|result| result.expect("a reply")).collect();
    assert_eq!(sums, (7..107).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn two_lists_share_the_ranks() {
    let (_group, balancer) = verifiers(2, 1).await;
    let begin = Instant::now();
    let short = async {
        let replies = check(&balancer, items(20, 1_000)).await;
        (replies, begin.elapsed())
    };
    let (long, (short, took)) = tokio::join!(check(&balancer, items(2_000, 1_000)), short);
    assert!(took < Duration::from_millis(500), "a short list does not wait for the end of a long one: {took:?}");
    in_order(long);
    in_order(short);
}
