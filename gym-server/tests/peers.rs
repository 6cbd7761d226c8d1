//! Bugs of other projects, each as a scenario on the real parts: what happened there, and that it cannot happen here.
//!
//! The name of a test is the project and the number of its issue. Except where a test says so, the clock is simulated.

mod function_agent;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use function_agent::Agent;
use gym_client::collect::{CollectOptions, DriverOptions, ExistingOutput, RolloutCollector, ServerNames};
use gym_core::rollout::FailureClass;
use gym_core::{CancelToken, World};
use gym_server::agent::{SimpleAgent, SimpleAgentConfig};
use gym_server::model::{ScriptedItem, ScriptedModel};
use gym_server::prelude::*;
use parking_lot::Mutex;
use tokio::time::Instant;

/// What becomes of a task.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
enum Fate {
    Scored,
    SeedFails,
    VerifierPanics,
    VerifierHangs,
    Masked,
    ModelPanics,
    ModelHangs,
}

#[derive(serde::Deserialize)]
struct Task {
    fate: Fate,
    number: u32,
}

/// An environment that remembers which task each session has.
#[derive(Default)]
struct Fated {
    sessions: Mutex<BTreeMap<String, u32>>,
}

impl ResourcesServer for Fated {
    type Task = Task;

    async fn seed_session(&self, _: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject> {
        let (fate, number) = (row.get_as::<Fate>("fate")?, row.get_as::<u32>("number")?);
        if fate == Some(Fate::SeedFails) {
            return Err(Error::internal("the sandbox cannot be reset"));
        }
        self.sessions.lock().insert(session.to_string(), number.unwrap_or_default());
        Ok(RawObject::empty())
    }

    async fn verify(&self, _: &CallContext, session: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        match task.fate {
            Fate::VerifierPanics => panic!("the environment crashed"),
            Fate::VerifierHangs => std::future::pending().await,
            _ => {}
        }
        let own = self.sessions.lock().get(&session.to_string()) == Some(&task.number);
        let verdict = Verdict::correct(own);
        Ok(if task.fate == Fate::Masked { verdict.with("mask_sample", true) } else { verdict })
    }
}

fn task(number: u32, fate: Fate) -> RawObject {
    let input = serde_json::to_value(fate).expect("a name");
    let row = serde_json::json!({"responses_create_params": {"input": input}, "fate": fate, "number": number});
    RawObject::parse(row.to_string()).expect("an object")
}

/// A model that answers after a moment, unless the task says otherwise.
struct FatedModel(ScriptedModel);

impl ModelServer for FatedModel {
    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        let request = String::from_utf8_lossy(body.text()).into_owned();
        if request.contains(r#""model_panics""#) {
            panic!("the tokenizer is already borrowed");
        }
        if request.contains(r#""model_hangs""#) {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.0.responses(cx, session, body).await
    }

    async fn chat_completions(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<RawObject> {
        self.0.chat_completions(cx, session, body).await
    }
}

async fn stack_with(agent: impl FnOnce(&mut SimpleAgentConfig) + Send + 'static) -> Stack {
    let answers = |_: &RawObject, _: &mut fastrand::Rng| vec![ScriptedItem::message("4")];
    let mut config = SimpleAgentConfig::new("policy", "fated");
    agent(&mut config);
    Stack::embedded()
        .resources("fated", Fated::default())
        .model("policy", FatedModel(ScriptedModel::from_policy(answers)))
        .agent("agent", move |client| SimpleAgent::new(config, client))
        .start()
        .await
        .expect("the servers start")
}

async fn stack() -> Stack {
    stack_with(|_| ()).await
}

async fn stack_of<F, Fut>(agent: F) -> Stack
where
    F: Fn(RawObject) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Response>> + Send + 'static,
{
    Stack::embedded().agent("agent", move |_| Agent(agent)).start().await.expect("the server starts")
}

fn attempts(attempts_max: u32, seconds: u64) -> DriverOptions {
    let attempt_timeout = Duration::from_secs(seconds);
    let mut options = DriverOptions::default();
    options.attempts_max = attempts_max;
    options.attempt_timeout = attempt_timeout;
    options
}

async fn all(mut rollouts: Rollouts) -> Vec<Rollout> {
    let mut ended = Vec::new();
    while let Some(rollout) = rollouts.next().await {
        ended.push(rollout.expect("nothing else fails"));
    }
    ended.sort_by_key(|rollout| rollout.key);
    ended
}

/// 1,172 of 1,280 rollouts failed when their session was reset, and entered training as reward 0.
#[tokio::test(start_paused = true)]
async fn nemo_gym_2552_a_failed_reset_is_no_reward() {
    let stack = stack().await;
    let fate = |n: u32| if n.is_multiple_of(12) { Fate::Scored } else { Fate::SeedFails };
    let ended = all(stack.rollouts_with("agent", (0..1_280).map(move |n| task(n, fate(n))), attempts(1, 60)).unwrap());
    let ended = ended.await;
    let rewards: Vec<f64> = ended.iter().filter_map(Rollout::reward).collect();
    assert_eq!((ended.len(), rewards.len()), (1_280, 107));
    assert!(rewards.iter().all(|reward| *reward == 1.0), "the mean is that of the scored ones");
    let classes: BTreeSet<_> = ended.iter().filter_map(|rollout| rollout.outcome.as_ref().err()?.class()).collect();
    assert_eq!(classes, BTreeSet::from([FailureClass::EnvironmentError]));
    stack.stop().await;
}

/// A server that stays unavailable was called again without an end, and nothing said so.
#[tokio::test(start_paused = true)]
async fn nemo_gym_2216_retries_have_an_end_and_a_name() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let stack = stack_of(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Err(Error::finished(Code::Unavailable, "busy")) }
    })
    .await;
    let began = Instant::now();
    let ended = all(stack.rollouts_with("agent", [task(0, Fate::Scored)], attempts(3, 60)).unwrap()).await;
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    assert_eq!((ended[0].attempts, calls.load(Ordering::Relaxed)), (3, 3));
    assert_eq!(ended[0].outcome.as_ref().unwrap_err().class(), Some(FailureClass::AgentRequestFailed));
    stack.stop().await;
}

/// An environment that crashed took the rewards of its other rollouts with it.
#[tokio::test(start_paused = true)]
async fn nemo_gym_1351_a_crash_costs_only_its_own_rollout() {
    let stack = stack().await;
    let fate = |n| if n == 4 { Fate::VerifierPanics } else { Fate::Scored };
    let ended = all(stack.rollouts_with("agent", (0..10).map(move |n| task(n, fate(n))), attempts(1, 60)).unwrap());
    for (number, rollout) in ended.await.iter().enumerate() {
        let expected = (number != 4).then_some(1.0);
        assert_eq!(rollout.reward(), expected, "{number}: {:?}", rollout.outcome);
        if let Err(error) = &rollout.outcome {
            assert_eq!(error.class(), Some(FailureClass::VerifierPanic));
        }
    }
    stack.stop().await;
}

/// One cookie jar for all rollouts sent each of them to the session of another.
#[tokio::test(start_paused = true)]
async fn nemo_gym_3316_each_rollout_has_its_own_cookies() {
    let stack = stack().await;
    let ended = all(stack.rollouts("agent", (0..500).map(|n| task(n, Fate::Scored))).unwrap()).await;
    // The verifier compares the session with that of the task's reset.
    assert!(ended.iter().all(|rollout| rollout.reward() == Some(1.0)));
    stack.stop().await;
}

/// An outcome that arrived after its attempt had been given up replaced that of the next attempt.
#[tokio::test(start_paused = true)]
async fn nemo_gym_3302_a_late_outcome_of_an_older_attempt_does_not_count() {
    let calls = Arc::new(AtomicU32::new(0));
    let stack = stack_of(move |row: RawObject| {
        let number = calls.fetch_add(1, Ordering::Relaxed);
        async move {
            // On a task of its own, so that it goes on after the deadline.
            let late = tokio::spawn(tokio::time::sleep(Duration::from_secs(if number == 0 { 12 } else { 5 })));
            late.await.expect("the sleep ends");
            Ok(Response::json(row.edit().set("reward", if number == 0 { "0.0" } else { "1.0" }).to_rope()))
        }
    })
    .await;
    let ended = all(stack.rollouts_with("agent", [task(0, Fate::Scored)], attempts(2, 10)).unwrap()).await;
    assert_eq!(ended.len(), 1);
    assert_eq!((ended[0].reward(), ended[0].attempts), (Some(1.0), 2));
    stack.stop().await;
}

/// After a burst of 16,000 requests, the first of them went out after 40 minutes: each looked at all others.
#[tokio::test(start_paused = true)]
async fn nemo_gym_burst_all_rollouts_begin_at_once() {
    let stack = stack().await;
    let mut options = DriverOptions::default();
    options.concurrency = 2_000;
    let began = Instant::now();
    let ended = all(stack.rollouts_with("agent", (0..2_000).map(|n| task(n, Fate::Scored)), options).unwrap()).await;
    assert!(ended.len() == 2_000 && ended.iter().all(|rollout| rollout.reward() == Some(1.0)));
    // The model answers after 0.1 s.
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    stack.stop().await;
}

/// Rollouts that failed were left out of their batch, which nobody noticed.
#[tokio::test(start_paused = true)]
async fn nemo_rl_2305_every_task_has_one_end() {
    let stack = stack().await;
    let fates =
        [Fate::Scored, Fate::SeedFails, Fate::VerifierPanics, Fate::Masked, Fate::ModelPanics, Fate::ModelHangs];
    let tasks = (0..120).map(move |n| task(n, fates[n as usize % fates.len()]));
    let ended = all(stack.rollouts_with("agent", tasks, attempts(2, 30)).unwrap()).await;
    let numbers: Vec<u32> = ended.iter().map(|rollout| rollout.key.task_index).collect();
    assert_eq!(numbers, (0..120).collect::<Vec<_>>());
    for rollout in &ended {
        let fate = fates[rollout.key.task_index as usize % fates.len()];
        match fate {
            Fate::Scored => assert_eq!(rollout.outcome, Ok(Some(1.0))),
            Fate::Masked => assert_eq!(rollout.outcome, Ok(None)),
            _ => assert!(rollout.outcome.is_err(), "{fate:?}: {:?}", rollout.outcome),
        }
    }
    stack.stop().await;
}

/// A masked sample voted in the baseline of its group.
#[tokio::test(start_paused = true)]
async fn nemo_rl_3201_a_masked_sample_has_no_reward() {
    let stack = stack().await;
    let ended = all(stack.rollouts("agent", [task(0, Fate::Masked), task(1, Fate::Scored)]).unwrap()).await;
    assert_eq!([ended[0].reward(), ended[1].reward()], [None, Some(1.0)]);
    assert_eq!(ended[0].row.get_as::<bool>("mask_sample").unwrap(), Some(true));
    stack.stop().await;
}

/// One rollout that never ended held up all others, and again after the run was resumed. Files are real; the clock stands still while one is written.
#[tokio::test(start_paused = true)]
async fn nemo_rl_3238_a_stuck_rollout_holds_nothing_up_and_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("tasks.jsonl"), folder.path().join("rollouts.jsonl"));
    let row = |number| serde_json::json!({"number": number, "responses_create_params": {"input": "2 + 2"}, "agent_ref": {"name": "agent"}});
    let rows: String = (0..40).map(|number| format!("{}\n", row(number))).collect();
    std::fs::write(&input, rows).unwrap();
    let stuck = Arc::new(AtomicU32::new(7));
    let which = Arc::clone(&stuck);
    let stack = stack_of(move |row: RawObject| {
        let stuck = row.get_as::<u32>("number").ok().flatten() == Some(which.load(Ordering::Relaxed));
        async move {
            if stuck {
                std::future::pending::<()>().await;
            }
            Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
        }
    })
    .await;
    let names = ServerNames::of_merged(&serde_json::json!({"agent": {"responses_api_agents": {"small": {}}}}));
    let collector = RolloutCollector::new(stack.client().clone(), names, World::real());
    let mut options = CollectOptions::new(&input, &output);
    options.aggregate = false;
    options.driver.attempts_max = 1;
    options.driver.attempt_timeout = Duration::from_secs(300);
    let summary = collector.collect(options.clone(), CancelToken::new()).await.unwrap();
    assert_eq!((summary.snapshot.completed, summary.is_complete()), (39, false));
    stuck.store(u32::MAX, Ordering::Relaxed);
    options.existing = ExistingOutput::Resume;
    options.driver.attempts_max = 2;
    let summary = collector.collect(options, CancelToken::new()).await.unwrap();
    assert_eq!((summary.snapshot.completed, summary.is_complete()), (1, true));
    let text = std::fs::read_to_string(&output).unwrap();
    let rows =
        text.lines().map(|line| RawObject::parse(line.to_owned()).unwrap().get_as::<u32>("number").unwrap().unwrap());
    assert_eq!(rows.collect::<BTreeSet<_>>(), (0..40).collect());
    assert_eq!(text.lines().count(), 40);
    stack.stop().await;
}

/// A verification that ran out of time was reported as a success.
#[tokio::test(start_paused = true)]
async fn rock_374_a_verification_without_an_end_is_no_success() {
    let stack = stack().await;
    let ended = all(stack.rollouts_with("agent", [task(0, Fate::VerifierHangs)], attempts(1, 30)).unwrap()).await;
    assert_eq!(ended[0].reward(), None);
    assert!(ended[0].outcome.is_err());
    stack.stop().await;
}

/// After a recovery, more rollouts were in flight than the limit allows: those that had been given up were not counted, and went on.
#[tokio::test(start_paused = true)]
async fn areal_1345_the_limit_holds_while_attempts_are_given_up() {
    struct Running(Arc<AtomicU32>);
    impl Drop for Running {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (now, peak) = (Arc::clone(&running), Arc::clone(&most));
    let stack = stack_of(move |row: RawObject| {
        peak.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        let guard = Running(Arc::clone(&now));
        async move {
            let _guard = guard;
            let seconds = if row.get_as::<u32>("number")?.unwrap_or_default().is_multiple_of(3) { 60 } else { 1 };
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
        }
    })
    .await;
    let mut options = attempts(2, 5);
    options.concurrency = 4;
    let ended = all(stack.rollouts_with("agent", (0..60).map(|n| task(n, Fate::Scored)), options).unwrap()).await;
    assert_eq!(ended.iter().filter(|rollout| rollout.reward() == Some(1.0)).count(), 40);
    assert_eq!((most.load(Ordering::Relaxed), running.load(Ordering::Relaxed)), (4, 0));
    stack.stop().await;
}

/// An agent stood still for 1,800 s without a word.
#[tokio::test(start_paused = true)]
async fn harbor_2418_an_agent_that_stands_still_is_named_after_its_own_limit() {
    let limit = serde_json::json!({
        "model_server": {"type": "responses_api_models", "name": "policy"},
        "resources_server": {"type": "resources_servers", "name": "fated"},
        "max_seconds": 60,
    });
    let stack = stack_with(move |config| *config = serde_json::from_value(limit).expect("a configuration")).await;
    let began = Instant::now();
    let ended = all(stack.rollouts_with("agent", [task(0, Fate::ModelHangs)], attempts(1, 1_800)).unwrap()).await;
    assert!(began.elapsed() < Duration::from_secs(70), "{:?}", began.elapsed());
    let error = ended[0].outcome.as_ref().unwrap_err();
    assert_eq!(error.class(), Some(FailureClass::EpisodeTimeout));
    assert!(error.to_string().contains("`max_seconds`"), "{error}");
    stack.stop().await;
}

/// A tokenizer that several threads used at once raised an error, and the rollouts were dropped without a word.
#[tokio::test(start_paused = true)]
async fn prime_rl_1999_a_model_server_that_panics_is_named_by_each_of_its_rollouts() {
    let stack = stack().await;
    let fate = |n: u32| if n.is_multiple_of(2) { Fate::ModelPanics } else { Fate::Scored };
    let ended = all(stack.rollouts_with("agent", (0..50).map(move |n| task(n, fate(n))), attempts(1, 60)).unwrap());
    let ended = ended.await;
    let failed: Vec<_> = ended.iter().filter_map(|rollout| rollout.outcome.as_ref().err()).collect();
    assert_eq!((ended.len(), failed.len()), (50, 25));
    for error in failed {
        assert_eq!(error.class(), Some(FailureClass::ModelError));
        assert!(error.to_string().contains("the tokenizer is already borrowed"), "{error}");
    }
    stack.stop().await;
}
