//! Verification of many small items over ranks: batches by time, a shared input by reference, and items that fail or end their rank.
//!
//! The numbers in the names of [`super::ray`] are those of the cases 36 to 39 in `tests/tables/conformance-ray.md`; the cases here are the same without Ray.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_client::values::{HeldValue, ValueRef, Values, ValuesOptions};
use gym_group::Group;
use gym_group::health::{FailureOrigin, RetryBudgets};
use gym_group::prelude::*;
use gym_group::{BatchOptions, ItemError};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{LONG, options, spec, start, stop};

/// What a check takes. Ranks of one machine wait at the same time, so their shares do not depend on its cores.
const CHECK: Duration = Duration::from_millis(2);

/// An answer to the question of how many bytes of the table are at most `number`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Answer {
    number: u8,
    answer: usize,
    panics: bool,
    aborts: bool,
}

/// Whether the answer is right, and where and with how many others it was checked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Checked {
    right: bool,
    pub(super) rank: Rank,
    pub(super) together: usize,
    batch: u64,
}

/// Checks answers about a table that it gets by reference.
pub(super) struct Verifier {
    env: WorkerEnv,
    values: Values,
    batches: u64,
}

worker! {
    impl Worker for Verifier as verifier {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> {
            Ok(Self { env, values: Values::new(Transports::standard(), ValuesOptions::default()), batches: 0 })
        }
        exclusive(idempotent) async fn check(
            &mut self, cx: &CallContext, call: Payload<(ValueRef, Vec<Answer>)>
        ) -> Result<Payload<Vec<Checked>>> {
            let (table, answers) = call.value;
            let table = self.values.fetch(cx, &table).await?;
            let table = table.bytes().await?;
            self.batches += 1;
            let mut checked = Vec::new();
            for item in &answers {
                tokio::time::sleep(CHECK).await;
                assert!(!item.panics, "no case for {}", item.number);
                if item.aborts {
                    std::process::abort();
                }
                let right = table.iter().filter(|byte| **byte <= item.number).count() == item.answer;
                checked.push(Checked { right, rank: self.env.rank, together: answers.len(), batch: self.batches });
            }
            Ok(checked.into())
        }
    }
}

/// The table of the questions, held for ranks that reach this process at `host`.
pub(super) struct Table(HeldValue, #[expect(dead_code, reason = "values end with it")] Values);

impl Table {
    pub(super) async fn at(host: &str) -> Self {
        let mut options = ValuesOptions::default();
        options.host = host.to_owned();
        let values = Values::new(Transports::standard(), options);
        // The value n stands there n times.
        let table: Vec<u8> = (0..=255_u8).flat_map(|value| std::iter::repeat_n(value, usize::from(value))).collect();
        Self(values.put("table", table).await.expect("holds it"), values)
    }

    pub(super) fn fetches(&self) -> u64 {
        self.0.fetches()
    }
}

/// Returns answers of which every third one is wrong.
pub(super) fn answers(count: usize) -> Vec<Answer> {
    let answer = |at: usize| {
        let number = u8::try_from(at % 256).expect("fits");
        let right = usize::from(number) * (usize::from(number) + 1) / 2;
        Answer { number, answer: right + usize::from(at.is_multiple_of(3)), ..Answer::default() }
    };
    (0..count).map(answer).collect()
}

pub(super) async fn check(group: &Arc<Group>, table: &Table, answers: Vec<Answer>) -> Vec<Result<Checked, ItemError>> {
    let mut budgets = RetryBudgets::default();
    budgets.infrastructure_attempts = 9;
    budgets.backoff_min = Duration::from_millis(50);
    let balancer = group.balancer().expect("no weights").again(budgets);
    let reference = table.0.reference().clone();
    let cx = CallContext::within(2 * LONG);
    let arguments = |batch| (reference.clone(), batch);
    balancer.map_batched_with(&cx, verifier::check, answers, arguments, &BatchOptions::default()).await
}

/// Checks that each answer has its own result, and returns the items that were checked by each rank.
pub(super) fn all_checked(results: &[Result<Checked, ItemError>], count: usize) -> BTreeMap<Rank, usize> {
    assert_eq!(results.len(), count);
    let mut by_rank = BTreeMap::new();
    for (at, result) in results.iter().enumerate() {
        let checked = result.as_ref().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(checked.right, !at.is_multiple_of(3), "item {at} has the result of another one");
        *by_rank.entry(checked.rank).or_default() += 1;
    }
    by_rank
}

/// Checks case 37: at least four batches for each rank, each within the bounds.
pub(super) fn batches_are_bounded(results: &[Result<Checked, ItemError>], ranks: usize) {
    let mut batches: BTreeMap<(Rank, u64), usize> = BTreeMap::new();
    for checked in results.iter().flatten() {
        batches.insert((checked.rank, checked.batch), checked.together);
    }
    let largest = *batches.values().max().expect("batches");
    println!("    {} items in {} batches, the largest of {largest}", results.len(), batches.len());
    assert!(batches.len() >= 4 * ranks, "{batches:?}");
    // More would take longer than the target, even if calls took no time; and none has more than its share.
    assert!(largest <= 10 && largest <= results.len() / (4 * ranks), "{largest}");
}

/// Case 39: the item at which the verifier panics fails, and no other one.
pub(super) async fn a_panic_names_its_item(group: &Arc<Group>, table: &Table) {
    let mut items = answers(200);
    items[77].panics = true;
    let results = check(group, table, items).await;
    let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!((failed[0].item(), failed[0].origin()), (77, FailureOrigin::Data));
    let text = failed[0].to_string();
    assert!(text.starts_with("item 77: call verifier.check of") && text.contains("no case for 77"), "{text}");
}

async fn verifiers(ranks: u32) -> Arc<Group> {
    let mut spec = spec("verifier", ranks);
    spec.init = serde_json::value::to_raw_value(&()).expect("JSON");
    Arc::new(start(spec, options().restarting(20)).await.expect("starts"))
}

pub(crate) async fn items_are_verified_in_batches_by_time_and_share_an_input_by_reference() {
    let (group, table) = (verifiers(2).await, Table::at("127.0.0.1").await);
    let begin = Instant::now();
    let results = check(&group, &table, answers(1_000)).await;
    println!("    1,000 items of 2 ms on 2 ranks in {:.2} s", begin.elapsed().as_secs_f64());
    let by_rank = all_checked(&results, 1_000);
    // How much of it, depends on when each of them gets a core.
    assert_eq!(by_rank.len(), 2, "each rank takes part: {by_rank:?}");
    batches_are_bounded(&results, 2);
    assert_eq!(table.fetches(), 1, "the ranks of a node share one copy");
    stop(&group).await;
}

pub(crate) async fn an_item_at_which_the_verifier_panics_fails_alone() {
    let (group, table) = (verifiers(2).await, Table::at("127.0.0.1").await);
    a_panic_names_its_item(&group, &table).await;
    stop(&group).await;
}

pub(crate) async fn an_item_that_ends_its_rank_fails_alone_and_is_no_verdict() {
    let (group, table) = (verifiers(2).await, Table::at("127.0.0.1").await);
    let mut items = answers(200);
    items[120].aborts = true;
    let results = check(&group, &table, items).await;
    let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert_eq!(failed.iter().map(|error| error.item()).collect::<Vec<_>>(), [120], "{failed:?}");
    assert_eq!(failed[0].origin(), FailureOrigin::Infrastructure, "{}", failed[0]);
    assert!(failed[0].to_string().contains("it died by signal 6"), "{}", failed[0]);
    println!("    {}", failed[0]);
    stop(&group).await;
}
