//! Calls that are wrong, and workers that go wrong in a call.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::CallContext;
use gym_core::registry::Balance;
use gym_group::Group;
use gym_group::{Balancer, Batch, Dispatch, Method, RankState, Tensor, WorkerGroupExt};
use rustix::process::Signal;

use super::super::types::{Collapse, Deafen, Describe, Hold, Job, Leave, Warm, Work};
use super::super::{LONG, pid, signal, status, until};
use super::{Case, Got, outcome};

const DATA: &str = "data that cannot be divided";
const DISPATCH: &str = "ranks that do not exist";
const METHOD: &str = "method that the worker does not implement";
const WORKER: &str = "worker that fails during a call";
const LIMIT: &str = "limit that is exceeded";
const WRONG: &str = "refused: invalid_argument";

macro_rules! stranger {
    ($name:ident, $text:literal, $args:ty, $reply:ty) => {
        #[derive(Clone, Copy, Debug)]
        struct $name;
        impl Method for $name {
            const NAME: &'static str = $text;
            type Args = $args;
            type Reply = $reply;
        }
    };
}
stranger!(Unheard, "unheard", (), ());
stranger!(WorkInWords, "work", String, u64);
stranger!(DescribeInNumbers, "describe", (), u64);

const HOURS: Job = Job { ms: 3_600_000, tells: false };

/// A wrong call to the group that stands beside everything: it must be unharmed.
fn wrong(
    kind: &'static str,
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    call: impl AsyncFn(&Group) -> Got + Copy + 'static,
) -> Case {
    Case::new(kind, name, outcome, says, move |fixture| Box::pin(async move { call(&fixture.group).await }))
}

/// A wrong done to a group of its own, which is usable again afterwards.
fn harm(
    kind: &'static str,
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    worker: &'static str,
    call: impl AsyncFn(&Group) -> Got + Copy + 'static,
) -> Case {
    Case::new(kind, name, outcome, says, move |fixture| {
        Box::pin(async move {
            let mut spec = fixture.spec(worker);
            spec.memory_limit_bytes = Some(200 << 20);
            fixture.wronged(spec, async |group| call(group).await).await
        })
    })
}

fn rows(count: i64) -> Batch {
    let ids = Tensor::from_vec([count as usize], (0..count).collect::<Vec<i64>>()).expect("fits");
    Batch::empty().with("id", ids).expect("one column")
}

async fn described(group: &Group, dispatch: Dispatch, batch: Batch) -> Got {
    outcome::called(group.call(Describe, ()).batch(batch).dispatch(dispatch).deadline(LONG).await)
}

async fn warmed_each(group: &Group, count: usize) -> Got {
    outcome::called(group.call_each(Warm, vec![true; count]).deadline(LONG).await)
}

/// Waits for the end that the call already told of, so that a restart finds it.
async fn ended(group: &Group, got: Got) -> Got {
    until("its end is known", || status(group, 0).state == RankState::Dead).await;
    got
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = wrong_calls();
    cases.extend(harms());
    cases
}

fn wrong_calls() -> Vec<Case> {
    vec![
        wrong(
            DATA,
            "five rows for two ranks",
            WRONG,
            &["call describe of policy", "batch size (5) is not a multiple of shards (2)"],
            async |group| described(group, Dispatch::shard("rank"), rows(5)).await,
        ),
        wrong(DATA, "one argument for two ranks", WRONG, &["1 arguments for 2 ranks"], async |group| {
            warmed_each(group, 1).await
        }),
        wrong(DATA, "three arguments for two ranks", WRONG, &["3 arguments for 2 ranks"], async |group| {
            warmed_each(group, 3).await
        }),
        wrong(DATA, "a column with another number of rows", WRONG, &["more", "3", "2"], async |_| {
            let more = Tensor::from_vec([3], vec![0_i64; 3]).expect("fits");
            Got::refused(rows(2).with("more", more))
        }),
        wrong(DISPATCH, "an unknown axis", WRONG, &["call describe of policy", "pipeline", "rank"], async |group| {
            described(group, Dispatch::shard("pipeline"), rows(2)).await
        }),
        wrong(DISPATCH, "an axis sharded and replicated", WRONG, &["call describe of policy", "rank"], async |group| {
            described(group, Dispatch::shard("rank").replicate(["rank"]), rows(2)).await
        }),
        wrong(DISPATCH, "an unknown rank", WRONG, &["call describe of policy", "7"], async |group| {
            described(group, Dispatch::rank(7), Batch::empty()).await
        }),
        wrong(
            METHOD,
            "an unknown name",
            "fails: refused",
            &["rank 0 failed: no method at /worker/unheard", "describe, work"],
            async |group| outcome::called(group.call(Unheard, ()).dispatch(Dispatch::rank(0)).deadline(LONG).await),
        ),
        wrong(
            METHOD,
            "arguments of another type",
            "fails: refused",
            &["rank 0", "expected struct Job"],
            async |group| {
                outcome::called(
                    group.call(WorkInWords, "hard".to_owned()).dispatch(Dispatch::rank(0)).deadline(LONG).await,
                )
            },
        ),
        wrong(METHOD, "a reply of another type", "fails: bad_reply", &["no reply of describe"], async |group| {
            outcome::called(group.call(DescribeInNumbers, ()).deadline(LONG).await)
        }),
        wrong(LIMIT, "a deadline that has passed", "refused: deadline_exceeded", &["call describe of policy"], {
            async |group| outcome::called(group.call(Describe, ()).deadline(Duration::ZERO).await)
        }),
        wrong(LIMIT, "a reply larger than the caller accepts", "fails: exception", &["call describe of policy"], {
            async |group| {
                let mut cx = CallContext::within(LONG);
                cx.reply_bytes_max = 10;
                outcome::called(group.call(Describe, ()).context(&cx).await)
            }
        }),
        wrong(DISPATCH, "an unknown rank to kill", "refused: not_found", &["group policy has no rank 7"], {
            async |group| Got::refused(group.kill(7).await)
        }),
        Case::new(DISPATCH, "weights for one of two ranks", WRONG, &["weights [1] for 2 ranks"], |fixture| {
            Box::pin(async move {
                let group =
                    fixture.start(&super::super::local(), fixture.spec("obedient"), super::super::options()).await;
                let group: Arc<dyn WorkerGroupExt> = Arc::new(group.expect("starts"));
                Got::refused(Balancer::new(group, Balance::Weighted(vec![1])))
            })
        }),
    ]
}

fn harms() -> Vec<Case> {
    vec![
        harm(WORKER, "fails", "fails: exception", &["rank 0 failed: no weights to load"], "obedient", async |group| {
            outcome::called(group.call(Warm, false).dispatch(Dispatch::rank(0)).deadline(LONG).await)
        }),
        harm(
            WORKER,
            "panics",
            "fails: exception",
            &["rank 0 failed: the worker panicked: no ground to stand on"],
            "obedient",
            async |group| outcome::called(group.call(Collapse, ()).dispatch(Dispatch::rank(0)).deadline(LONG).await),
        ),
        harm(WORKER, "exits", "fails: died", &["rank 0", "exit code 7", "leaving with 7"], "obedient", async |group| {
            ended(group, outcome::called(group.call(Leave, 7).dispatch(Dispatch::rank(0)).deadline(LONG).await)).await
        }),
        harm(WORKER, "is killed", "fails: died", &["rank 0", "signal 9"], "obedient", async |group| {
            let call =
                group.call(Work, HOURS).dispatch(Dispatch::rank(0)).deadline(LONG).start().await.expect("started");
            signal(pid(group, 0), Signal::KILL);
            ended(group, outcome::called(call.await)).await
        }),
        harm(
            WORKER,
            "never responds",
            "fails: timeout",
            &["call work of policy", "deadline", "rank 1 (incarnation 1): no answer to work", "group.restart_workers("],
            "obedient",
            async |group| outcome::called(group.call(Work, HOURS).deadline(Duration::from_secs(1)).await),
        ),
        harm(
            WORKER,
            "never responds and ignores the cancellation",
            "fails: timeout",
            &["deadline", "rank 1 (incarnation 1): no answer to deafen"],
            "obedient",
            async |group| {
                let got = outcome::called(group.call(Deafen, ()).deadline(Duration::from_secs(1)).await);
                // What it does not hear cannot be told to it: only its end helps.
                for rank in 0..2 {
                    group.kill(rank).await.expect("it lives");
                    until("its end is known", || status(group, rank).state == RankState::Dead).await;
                }
                got
            },
        ),
        harm(
            LIMIT,
            "more memory than allowed",
            "fails: memory_limit_exceeded",
            &["rank 0", "exceeded its memory limit", "of 209715200 bytes", "raise its memory limit"],
            "obedient",
            async |group| {
                let hold = group.call(Hold, 400 << 20).dispatch(Dispatch::rank(0)).deadline(LONG).await;
                until("its end is known", || status(group, 0).state == RankState::Dead).await;
                // It may have answered before it was measured; then the next call tells.
                outcome::called(match hold {
                    Ok(_) => group.call(Describe, ()).deadline(LONG).await.map(drop),
                    Err(error) => Err(error),
                })
            },
        ),
        harm(LIMIT, "more calls than it accepts", "fails: refused", &["3 calls run or wait", "calls_max"], "narrow", {
            async |group| {
                let dispatch = || Dispatch::rank(0);
                let calls = (0..3).map(|_| group.call(Work, HOURS).dispatch(dispatch()).deadline(LONG).start());
                let running = join_all(calls).await;
                until_taken(group, 3).await;
                let got = outcome::called(group.call(Describe, ()).dispatch(dispatch()).deadline(LONG).await);
                drop(running);
                until_taken(group, 0).await;
                got
            }
        }),
    ]
}

/// Until that many calls run or wait at rank 0.
async fn until_taken(group: &Group, calls: usize) {
    let cx = CallContext::within(LONG);
    loop {
        let statuses = group.ask_hosts(&cx).await;
        if statuses[0].as_ref().is_ok_and(|host| host.waiting + host.running.len() == calls) {
            return;
        }
        tokio::task::yield_now().await;
    }
}
