//! Group calls of NeMo RL's worker groups: the cases of its `RayWorkerGroup`, by their numbers in
//! `tests/tables/conformance.md`, and balanced calls.

use std::sync::Arc;
use std::time::Duration;

use gym_core::base::watch;
use gym_core::registry::Balance;
use gym_core::{CallContext, Code, Error, Execution, Result};
use gym_group::health::RetryBudgets;
use gym_group::testing::TestWorker;
use gym_group::{
    Balancer, Batch, Dispatch, Free, Gathered, GroupView, Handles, InProcessGroup, InProcessOptions, Method, Methods,
    Payload, Rank, RankLayout, RankView, Tensor, Worker, WorkerEnv, WorkerGroup, WorkerGroupExt,
};
use serde::{Deserialize, Serialize};

/// The same as NeMo RL's test worker: returns its arguments, and counts its calls.
#[derive(Clone, Copy, Debug)]
struct Record;

impl Method for Record {
    const NAME: &'static str = "record";
    type Args = (String, u32);
    type Reply = Recorded;
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Recorded {
    rank: Rank,
    data: String,
    common: u32,
    rows: Option<Vec<i64>>,
    calls: u32,
}

struct Recorder {
    rank: Rank,
    calls: u32,
}

impl Worker for Recorder {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self { rank: env.rank, calls: 0 })
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Record);
    }
}

impl Handles<Record> for Recorder {
    async fn handle(&mut self, _: &CallContext, call: Payload<(String, u32)>) -> Result<Payload<Recorded>> {
        self.calls += 1;
        let (data, common) = call.value;
        let rows = match call.batch.get("id") {
            Some(column) => Some(column.dense()?.view::<i64>()?.to_vec()),
            None => None,
        };
        Ok(Recorded { rank: self.rank, data, common, rows, calls: self.calls }.into())
    }
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

async fn line(ranks: usize) -> Arc<InProcessGroup> {
    started(RankLayout::line(ranks).expect("the test is right")).await
}

/// dp2 × tp2: ranks 0 and 1 hold one replica, 2 and 3 the other.
async fn square() -> Arc<InProcessGroup> {
    started(RankLayout::new([("dp", 2), ("tp", 2)]).expect("the test is right")).await
}

async fn started(layout: RankLayout) -> Arc<InProcessGroup> {
    Arc::new(InProcessGroup::start::<Recorder>("recorders", layout, ()).await.expect("the test is right"))
}

fn rows(count: i64) -> Batch {
    let ids = Tensor::from_vec([count as usize], (0..count).collect::<Vec<i64>>()).expect("the test is right");
    Batch::empty().with("id", ids).expect("the test is right")
}

async fn record(group: &InProcessGroup, batch: Batch, dispatch: Dispatch) -> Gathered<Recorded> {
    let call = group.call(Record, ("x".to_owned(), 1)).batch(batch).dispatch(dispatch);
    call.deadline(WAIT_TIMEOUT).await.expect("the test is right")
}

/// Returns the number of calls of each rank so far.
async fn calls(group: &InProcessGroup) -> Vec<u64> {
    let statuses = group.ask_hosts(&CallContext::within(WAIT_TIMEOUT)).await;
    statuses.iter().map(|status| status.as_ref().expect("every rank answers").succeeded).collect()
}

fn ranks(answers: &Gathered<Recorded>) -> Vec<Rank> {
    answers.replies().iter().map(|reply| reply.value.rank).collect()
}

fn shards(answers: &Gathered<Recorded>) -> Vec<Option<Vec<i64>>> {
    answers.replies().iter().map(|reply| reply.value.rows.clone()).collect()
}

#[tokio::test]
async fn c143_a_call_to_a_single_worker_runs_once_on_it() {
    let group = line(2).await;
    for rank in 0..2 {
        let answer = record(&group, Batch::empty(), Dispatch::rank(rank)).await.into_one().unwrap().value;
        assert_eq!((answer.rank, answer.calls), (rank, 1));
    }
}

#[tokio::test]
async fn c144_single_data_reaches_all_workers_once() {
    let group = line(2).await;
    let answers = record(&group, Batch::empty(), Dispatch::all()).await.into_values();
    let expected = |rank| Recorded { rank, data: "x".to_owned(), common: 1, rows: None, calls: 1 };
    assert_eq!(answers, [expected(0), expected(1)]);
}

#[tokio::test]
async fn c145_with_one_axis_at_rank_zero_only_one_of_each_replica_runs() {
    let group = square().await;
    let answers = record(&group, Batch::empty(), Dispatch::all().run_rank_0_only_axes(["tp"])).await;
    assert_eq!((ranks(&answers), calls(&group).await), (vec![0, 2], vec![1, 0, 1, 0]));
}

#[tokio::test]
async fn c146_with_both_axes_at_rank_zero_only_rank_zero_runs() {
    let group = square().await;
    let answers = record(&group, Batch::empty(), Dispatch::all().run_rank_0_only_axes(["dp", "tp"])).await;
    assert_eq!((ranks(&answers), calls(&group).await), (vec![0], vec![1, 0, 0, 0]));
}

#[tokio::test]
async fn c147_multiple_data_gives_item_i_to_rank_i_and_the_common_argument_to_both() {
    let group = line(2).await;
    let items = vec![("a".to_owned(), 9), ("b".to_owned(), 9)];
    let answers = group.call_each(Record, items).deadline(WAIT_TIMEOUT).await.unwrap().into_values();
    let got: Vec<_> = answers.iter().map(|answer| (answer.rank, answer.data.as_str(), answer.common)).collect();
    assert_eq!(got, [(0, "a", 9), (1, "b", 9)]);
}

#[tokio::test]
async fn c148_multiple_data_for_fewer_workers_than_there_are_is_refused() {
    let group = line(4).await;
    let items = vec![("a".to_owned(), 9), ("b".to_owned(), 9)];
    let error = group.call_each(Record, items).deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::InvalidArgument, Execution::NotStarted));
    assert!(error.to_string().contains("2 arguments for 4 ranks"), "{error}");
    assert_eq!(calls(&group).await, [0; 4]);
}

#[tokio::test]
async fn c150_one_axis_of_two_shards_gives_shard_i_to_rank_i() {
    let group = line(2).await;
    let answers = record(&group, rows(4), Dispatch::shard("rank")).await;
    assert_eq!(shards(&answers), [Some(vec![0, 1]), Some(vec![2, 3])]);
}

#[tokio::test]
async fn c151_sharded_over_dp_and_replicated_over_tp_gives_both_of_a_replica_its_shard() {
    let group = square().await;
    let answers = record(&group, rows(4), Dispatch::shard("dp").replicate(["tp"])).await;
    assert_eq!(shards(&answers), [Some(vec![0, 1]), Some(vec![0, 1]), Some(vec![2, 3]), Some(vec![2, 3])]);
}

#[tokio::test]
async fn c152_ranks_beyond_the_first_of_a_free_axis_are_not_called() {
    let group = square().await;
    let answers = record(&group, rows(4), Dispatch::shard("tp")).await;
    assert_eq!((ranks(&answers), calls(&group).await), (vec![0, 1], vec![1, 1, 0, 0]));
}

#[tokio::test]
async fn c153_or_they_are_called_without_data_and_their_results_dropped() {
    let group = square().await;
    let answers = record(&group, rows(4), Dispatch::shard("tp").free(Free::Dummy)).await;
    assert_eq!((ranks(&answers), calls(&group).await), (vec![0, 1], vec![1; 4]));
    assert_eq!(shards(&answers), [Some(vec![0, 1]), Some(vec![2, 3])]);
}

#[tokio::test]
async fn c154_of_a_replicated_output_one_result_comes_back_in_rank_order() {
    let group = square().await;
    let answers = record(&group, rows(4), Dispatch::shard("dp").replicate(["tp"]).collect_once(["tp"])).await;
    assert_eq!((ranks(&answers), calls(&group).await), (vec![0, 2], vec![1; 4]));
    assert_eq!(shards(&answers), [Some(vec![0, 1]), Some(vec![2, 3])]);
}

#[tokio::test]
async fn c155_an_axis_both_sharded_and_replicated_is_refused() {
    let group = square().await;
    let call = group.call(Record, ("x".to_owned(), 1)).batch(rows(4)).dispatch(Dispatch::shard("dp").replicate(["dp"]));
    let error = call.deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!(error.cause().code(), Code::InvalidArgument);
    assert!(error.to_string().contains("'dp'"), "{error}");
}

#[tokio::test]
async fn c156_a_sharded_call_over_an_axis_that_the_group_does_not_name_is_refused() {
    let group = line(2).await;
    let call = group.call(Record, ("x".to_owned(), 1)).batch(rows(4)).dispatch(Dispatch::shard("data_parallel"));
    let error = call.deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!(error.cause().code(), Code::InvalidArgument);
    assert!(error.to_string().contains("'data_parallel'"), "{error}");
}

#[tokio::test]
async fn c159_stopping_a_group_twice_succeeds() {
    let group = line(2).await;
    group.stop(WAIT_TIMEOUT).await.unwrap();
    group.stop(WAIT_TIMEOUT).await.unwrap();
    let error = group.call(Record, ("x".to_owned(), 1)).deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::Unavailable, Execution::NotStarted));
}

#[tokio::test]
async fn an_unknown_method_is_told_with_the_methods_that_there_are() {
    let group = InProcessGroup::start::<TestWorker>("tested", RankLayout::line(1).unwrap(), ()).await.unwrap();
    let error = group.call(Record, ("x".to_owned(), 1)).deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::NotFound, Execution::NotStarted));
    assert!(error.to_string().contains("test.echo, test.echo_shared"), "{error}");
}

#[tokio::test]
async fn more_items_than_workers_come_back_in_their_order_whatever_the_strategy() {
    let strategies =
        [Balance::RoundRobin, Balance::LeastPending, Balance::Weighted(vec![3, 1, 0]), Balance::PowerOfTwoChoices];
    for balance in strategies {
        let group = line(3).await;
        let balancer = Balancer::new(Arc::clone(&group) as _, balance.clone()).unwrap();
        let items: Vec<_> = (0..100).map(|number| (number.to_string(), number)).collect();
        let cx = CallContext::within(WAIT_TIMEOUT);
        let replies = balancer.map(&cx, Record, items.clone(), 2).await.unwrap();
        let got: Vec<_> = replies.into_iter().map(|reply| (reply.data, reply.common)).collect();
        assert_eq!(got, items, "{balance:?}");
        let calls = calls(&group).await;
        assert_eq!(calls.iter().sum::<u64>(), 100);
        assert_eq!(calls[2] == 0, matches!(balance, Balance::Weighted(_)), "{balance:?}: {calls:?}");
    }
}

#[tokio::test]
async fn submitted_one_by_one_round_robin_takes_turns_and_weights_are_kept() {
    let cx = CallContext::within(WAIT_TIMEOUT);
    for (balance, expected) in [
        (Balance::RoundRobin, [0, 1, 0, 1, 0, 1, 0, 1]),
        (Balance::LeastPending, [0, 1, 0, 1, 0, 1, 0, 1]),
        (Balance::Weighted(vec![3, 1]), [0, 0, 1, 0, 0, 0, 1, 0]),
    ] {
        let balancer = Balancer::new(line(2).await as _, balance.clone()).unwrap();
        let mut chosen = Vec::new();
        for _ in 0..8 {
            let answer = balancer.submit(&cx, Record, ("x".to_owned(), 1), Batch::empty()).await.unwrap();
            chosen.push(answer.value.rank);
        }
        assert_eq!(chosen, expected, "{balance:?}");
    }
}

#[tokio::test]
async fn balanced_calls_pass_over_dead_ranks_and_fail_when_none_is_left() {
    let group = line(2).await;
    let balancer = Balancer::new(Arc::clone(&group) as _, Balance::RoundRobin).unwrap();
    let cx = CallContext::within(WAIT_TIMEOUT);
    group.kill(0).unwrap();
    for _ in 0..3 {
        let answer = balancer.submit(&cx, Record, ("x".to_owned(), 1), Batch::empty()).await.unwrap();
        assert_eq!(answer.value.rank, 1);
    }
    group.kill(1).unwrap();
    let error = balancer.submit(&cx, Record, ("x".to_owned(), 1), Batch::empty()).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::Unavailable, Execution::NotStarted));
}

/// A group some of whose ranks are on nodes that are about to be taken away.
#[derive(Debug)]
struct Drained {
    group: Arc<InProcessGroup>,
    view: watch::Sender<Arc<GroupView>>,
}

impl Drained {
    fn of(group: Arc<InProcessGroup>, drained: &[Rank]) -> Arc<Self> {
        let members = group.view().borrow().members().to_vec();
        let drains = |mut member: RankView| {
            member.draining = drained.contains(&member.rank);
            member
        };
        let view = GroupView::new(1, members.into_iter().map(drains).collect());
        Arc::new(Self { group, view: watch::Sender::new(Arc::new(view)) })
    }
}

impl WorkerGroup for Drained {
    fn name(&self) -> &Arc<str> {
        self.group.name()
    }

    fn layout(&self) -> &RankLayout {
        self.group.layout()
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.view.subscribe()
    }
}

impl WorkerGroupExt for Drained {}

#[tokio::test]
async fn ranks_whose_node_is_taken_away_are_the_last_choice_of_balanced_calls() {
    let cx = CallContext::within(WAIT_TIMEOUT);
    for balance in [Balance::RoundRobin, Balance::LeastPending, Balance::Weighted(vec![9, 1, 1])] {
        let group = Drained::of(line(3).await, &[0]);
        let balancer = Balancer::new(Arc::clone(&group) as _, balance.clone()).unwrap();
        let items: Vec<_> = (0..40).map(|number| (number.to_string(), number)).collect();
        let replies = balancer.map(&cx, Record, items, 2).await.unwrap();
        assert!(replies.iter().all(|reply| reply.rank != 0), "{balance:?}");
        // Calls to all ranks reach it.
        assert_eq!(group.call(Record, ("x".to_owned(), 1)).deadline(WAIT_TIMEOUT).await.unwrap().replies().len(), 3);
    }
    let all = Drained::of(line(2).await, &[0, 1]);
    let balancer = Balancer::new(all as _, Balance::RoundRobin).unwrap();
    balancer.submit(&cx, Record, ("x".to_owned(), 1), Batch::empty()).await.expect("there is no other");
}

/// Fails with an error of the rank on rank 0, and with an error of the data if its argument is `true`.
#[derive(Clone, Copy, Debug)]
struct Try;

impl Method for Try {
    const NAME: &'static str = "try";
    const IDEMPOTENT: bool = true;
    type Args = bool;
    type Reply = Rank;
}

struct Wedged(Rank);

impl Worker for Wedged {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        // The second incarnation does not fail.
        Ok(Self(if env.incarnation.0 > 1 { 7 } else { env.rank }))
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Try);
    }
}

impl Handles<Try> for Wedged {
    async fn handle(&mut self, _: &CallContext, call: Payload<bool>) -> Result<Payload<Rank>> {
        match (call.value, self.0) {
            (false, _) => Err(gym_core::Error::invalid("a row that nobody can read")),
            (true, 0) => Err(gym_core::Error::finished(Code::Unavailable, "the engine does not move")),
            (true, rank) => Ok(rank.into()),
        }
    }
}

async fn wedged(ranks: usize) -> Arc<InProcessGroup> {
    let layout = RankLayout::line(ranks).expect("the test is right");
    Arc::new(InProcessGroup::start::<Wedged>("wedged", layout, ()).await.expect("the test is right"))
}

#[tokio::test]
async fn a_rank_whose_calls_fail_is_given_up_until_its_next_life() {
    let group = wedged(2).await;
    let balancer = Balancer::new(Arc::clone(&group) as _, Balance::RoundRobin).unwrap();
    let cx = CallContext::within(WAIT_TIMEOUT);
    let submit = || async { balancer.submit(&cx, Try, true, Batch::empty()).await.map(|reply| reply.value).ok() };
    let mut came_to = Vec::new();
    for _ in 0..8 {
        came_to.push(submit().await);
    }
    assert_eq!(came_to, [None, Some(1), None, Some(1), None, Some(1), Some(1), Some(1)]);
    assert_eq!(balancer.ejected(), [0]);
    group.restart::<Wedged>(0, ()).await.unwrap();
    assert_eq!(balancer.ejected(), [0; 0]);
    assert!([submit().await, submit().await].contains(&Some(7)));
}

#[tokio::test]
async fn ranks_that_are_all_given_up_are_called_all_the_same() {
    let group = wedged(1).await;
    let balancer = Balancer::new(Arc::clone(&group) as _, Balance::LeastPending).unwrap();
    for _ in 0..5 {
        let error = balancer.submit(&CallContext::within(WAIT_TIMEOUT), Try, true, Batch::empty()).await.unwrap_err();
        assert!(error.to_string().contains("the engine does not move"), "{error}");
    }
    assert_eq!(balancer.ejected(), [0]);
}

#[tokio::test]
async fn a_rank_without_weight_is_no_alternative_to_one_that_is_given_up() {
    let group = wedged(2).await;
    let balancer = Balancer::new(Arc::clone(&group) as _, Balance::Weighted(vec![1, 0])).unwrap();
    let cx = CallContext::within(WAIT_TIMEOUT);
    for _ in 0..5 {
        let error = balancer.submit(&cx, Try, true, Batch::empty()).await.unwrap_err();
        assert!(error.to_string().contains("the engine does not move"), "{error}");
    }
    assert_eq!(balancer.ejected(), [0]);
    group.kill(0).unwrap();
    let error = balancer.submit(&cx, Try, true, Batch::empty()).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::Unavailable, Execution::NotStarted));
    assert!(error.to_string().contains("ranks [1] are healthy and have weight 0"), "{error}");
    group.kill(1).unwrap();
    let error = balancer.submit(&cx, Try, true, Batch::empty()).await.unwrap_err();
    assert!(error.to_string().contains("no rank is healthy"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn failed_calls_are_made_again_within_their_budget() {
    let group = wedged(2).await;
    let balancer = Balancer::new(Arc::clone(&group) as _, Balance::RoundRobin).unwrap().again(RetryBudgets::default());
    let cx = CallContext::within(WAIT_TIMEOUT);
    let replies = balancer.map(&cx, Try, vec![true; 6], 1).await.unwrap();
    assert_eq!(replies, [1; 6], "what rank 0 failed, rank 1 did");
    let error = balancer.submit(&cx, Try, false, Batch::empty()).await.unwrap_err();
    assert!(error.to_string().contains("nobody can read"), "{error}");
    let failed: u64 = group.ask_hosts(&cx).await.iter().map(|host| host.as_ref().unwrap().failed).sum();
    assert!(failed >= 3, "bad data is tried twice");
}

#[tokio::test]
async fn weights_that_do_not_fit_the_ranks_and_affinity_without_sessions_are_refused() {
    let group = line(2).await;
    let refused = Balancer::new(Arc::clone(&group) as Arc<dyn WorkerGroupExt>, Balance::Affinity).unwrap_err();
    assert!(refused.to_string().contains("`affinity` balances the replicas of a model"), "{refused}");
    for weights in [vec![1], vec![0, 0], vec![1, 2, 3]] {
        let refused = Balancer::new(Arc::clone(&group) as Arc<dyn WorkerGroupExt>, Balance::Weighted(weights));
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    }
}

/// Returns the remaining seconds until the deadline of its call.
#[derive(Clone, Copy, Debug)]
struct SecondsLeft;

impl Method for SecondsLeft {
    const NAME: &'static str = "seconds_left";
    type Args = ();
    type Reply = u64;
}

struct Clock;

impl Worker for Clock {
    type Init = ();

    fn start(_: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(SecondsLeft);
    }
}

impl Handles<SecondsLeft> for Clock {
    async fn handle(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<u64>> {
        Ok(cx.remaining().as_secs().into())
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_has_the_time_that_it_asks_for_and_no_more_than_its_caller_has() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let group = InProcessGroup::start::<Clock>("clock", RankLayout::line(1).unwrap(), ()).await.unwrap();
    let caller = CallContext::within(2 * HOUR);
    let call = || group.call(SecondsLeft, ());
    let calls = [
        (call(), gym_core::message::DEFAULT_CALL_TIMEOUT),
        (call().deadline(HOUR), HOUR),
        (call().context(&caller), 2 * HOUR),
        (call().context(&caller).deadline(HOUR), HOUR),
        (call().deadline(3 * HOUR).context(&caller), 2 * HOUR),
    ];
    for (call, expected) in calls {
        assert_eq!(call.await.unwrap().into_one().unwrap().value, expected.as_secs());
    }
}

/// Hangs at one rank, or fails there.
#[derive(Clone, Copy, Debug)]
struct Train;

impl Method for Train {
    const NAME: &'static str = "train";
    type Args = (Rank, bool);
    type Reply = ();
}

struct Trainer(Rank);

impl Worker for Trainer {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self(env.rank))
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Train);
    }
}

impl Handles<Train> for Trainer {
    async fn handle(&mut self, cx: &CallContext, call: Payload<(Rank, bool)>) -> Result<Payload<()>> {
        let (rank, hangs) = call.value;
        match (self.0 == rank, hangs) {
            (false, true) => Ok(().into()),
            (true, true) => std::future::pending().await,
            (true, false) => Err(Error::internal("no weights to load")),
            (false, false) => {
                cx.cancel.cancelled().await;
                Ok(().into())
            }
        }
    }
}

async fn trainers() -> InProcessGroup {
    let layout = RankLayout::line(4).expect("the test is right");
    InProcessGroup::start::<Trainer>("policy", layout, ()).await.expect("the test is right")
}

#[tokio::test(start_paused = true)]
async fn a_call_that_a_rank_does_not_answer_names_the_rank_what_it_runs_and_since_when() {
    let policy = trainers().await;
    let error = policy.call(Train, (3, true)).deadline(Duration::from_secs(30)).await.unwrap_err();
    assert_eq!((error.cause().code(), error.unanswered().collect::<Vec<_>>()), (Code::DeadlineExceeded, vec![3]));
    let late = "rank 3 (incarnation 1): no answer to train for 30.0 s; it has run train for 30.0 s, without progress";
    let text = format!("call train of policy: the deadline has passed (3 of 4 ranks answered); {late}");
    assert_eq!(error.to_string(), text);
    // The next call waits behind the one that hangs. A call to one rank has the same error as a call to all.
    let next = policy.call(Train, (0, true)).dispatch(Dispatch::rank(3)).deadline(Duration::from_secs(5));
    let late = "rank 3 (incarnation 1): no answer to train for 5.0 s; it has run train for 35.0 s, without progress";
    assert_eq!(next.await.unwrap_err().to_string(), format!("call train of policy: the deadline has passed; {late}"));
}

#[tokio::test(start_paused = true)]
async fn an_error_names_its_rank_once() {
    let policy = trainers().await;
    let error = policy.call(Train, (3, false)).deadline(WAIT_TIMEOUT).await.unwrap_err();
    let text = "call train of policy: rank 3 failed: no weights to load (0 of 4 ranks answered)";
    assert_eq!(error.to_string(), text);
    let error =
        policy.call(Record, (String::new(), 0)).dispatch(Dispatch::rank(3)).deadline(WAIT_TIMEOUT).await.unwrap_err();
    let text = "call record of policy: rank 3 failed: no method at /worker/record; this worker handles train";
    assert_eq!(error.to_string(), text);
}

/// Recorders whose configuration has `async_communication`, or not.
async fn recorders(async_communication: bool) -> InProcessGroup {
    let mut options = InProcessOptions::default();
    options.async_communication = async_communication;
    let layout = RankLayout::line(2).expect("the test is right");
    InProcessGroup::start_with::<Recorder>("recorders", layout, (), options).await.expect("the test is right")
}

#[tokio::test]
async fn submitted_calls_give_the_same_replies_in_the_same_order_with_and_without_async_communication() {
    let mut replies = Vec::new();
    for async_communication in [false, true] {
        let group = recorders(async_communication).await;
        let submitted: Vec<_> = (0..5)
            .map(|number| group.call(Record, (format!("call {number}"), number)).deadline(WAIT_TIMEOUT).submit())
            .collect();
        let mut all = Vec::new();
        for call in submitted {
            all.push(call.await.unwrap().into_values());
        }
        group.flush(&CallContext::within(WAIT_TIMEOUT)).await.unwrap();
        replies.push(all);
    }
    assert_eq!(replies[0], replies[1]);
    let calls: Vec<u32> = replies[1].iter().map(|reply| reply[1].calls).collect();
    assert_eq!(calls, [1, 2, 3, 4, 5], "each rank has the calls in the order in which they were submitted");
}

#[tokio::test]
async fn with_async_communication_calls_run_without_being_awaited() {
    for (async_communication, calls) in [(true, 4), (false, 1)] {
        let group = recorders(async_communication).await;
        for number in 0..3 {
            drop(group.call(Record, (String::new(), number)).deadline(WAIT_TIMEOUT).submit());
        }
        group.flush(&CallContext::within(WAIT_TIMEOUT)).await.unwrap();
        let last = group.call(Record, (String::new(), 3)).deadline(WAIT_TIMEOUT).await.unwrap().into_values();
        assert_eq!(last[0].calls, calls, "async_communication: {async_communication}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_error_of_a_call_that_nobody_awaits_is_returned_by_the_next_flush() {
    let mut options = InProcessOptions::default();
    options.async_communication = true;
    let layout = RankLayout::line(4).expect("the test is right");
    let policy = InProcessGroup::start_with::<Trainer>("policy", layout, (), options).await.expect("the test is right");
    let cx = CallContext::within(WAIT_TIMEOUT);
    drop(policy.call(Train, (3, false)).deadline(WAIT_TIMEOUT).submit());
    let unknown_rank = policy.call(Train, (0, true)).dispatch(Dispatch::rank(9)).submit();
    drop(unknown_rank);
    let text = policy.flush(&cx).await.unwrap_err().to_string();
    assert!(text.starts_with("flush the calls of policy: 2 submitted calls failed: "), "{text}");
    assert!(text.contains("rank 3 failed: no weights to load") && text.contains("worker ID 9"), "{text}");
    policy.flush(&cx).await.expect("each error is returned once");
    // A call that hangs: the flush ends with its own context.
    let hung = policy.call(Train, (1, true)).deadline(Duration::from_secs(60)).submit();
    let error = policy.flush(&CallContext::within(Duration::from_secs(1))).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    assert_eq!(hung.await.unwrap_err().unanswered().collect::<Vec<_>>(), [1]);
}
