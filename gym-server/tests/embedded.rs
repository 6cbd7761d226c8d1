//! Tests stacks without files and ports: their rollouts, and the resources that they leave unused.

mod function_agent;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use function_agent::Agent;
use gym_client::collect::{DriverOptions, RolloutError};
use gym_core::rollout::FailureClass;
use gym_server::agent::SimpleAgent;
use gym_server::model::{ScriptedItem, ScriptedModel};
use gym_server::prelude::*;

struct Exact;

#[derive(serde::Deserialize)]
struct Task {
    expected: String,
}

impl ResourcesServer for Exact {
    type Task = Task;

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        match task.expected.as_str() {
            "broken" => Err(Error::internal("the judge is broken")),
            expected => Ok(Verdict::correct(response.last_text()? == expected)),
        }
    }
}

fn task(expected: &str) -> RawObject {
    let row = serde_json::json!({"responses_create_params": {"input": "2 + 2"}, "expected": expected});
    RawObject::parse(row.to_string()).expect("an object")
}

async fn exact() -> Stack {
    let policy = |_: &RawObject, _: &mut fastrand::Rng| vec![ScriptedItem::message("4")];
    Stack::embedded()
        .resources("exact", Exact)
        .model("policy", ScriptedModel::from_policy(policy))
        .agent("exact_agent", |client| SimpleAgent::between("policy", "exact", client))
        .start()
        .await
        .expect("the servers start")
}

/// Returns the sockets of this process that accept connections: inodes of its descriptors that the kernel lists as listening.
fn listening() -> BTreeSet<String> {
    let own: BTreeSet<String> = std::fs::read_dir("/proc/self/fd")
        .expect("Linux lists descriptors")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|to| Some(to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut found = BTreeSet::new();
    for table in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/self/net/{table}")).unwrap_or_default();
        let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        found.extend(rows.filter(|row| row[3] == "0A").map(|row| row[9].to_owned()));
    }
    let text = std::fs::read_to_string("/proc/self/net/unix").unwrap_or_default();
    let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    // __SO_ACCEPTCON
    found.extend(rows.filter(|row| row[3] == "00010000").map(|row| row[6].to_owned()));
    found.intersection(&own).cloned().collect()
}

#[tokio::test]
async fn an_embedded_stack_listens_on_no_socket() {
    let stack = exact().await;
    let mut rollouts = stack.rollouts("exact_agent", [task("4")]).unwrap();
    assert_eq!(rollouts.next().await.unwrap().unwrap().reward(), Some(1.0));
    assert_eq!(listening(), BTreeSet::new());
    assert_eq!(
        stack.servers().iter().map(|server| server.url.as_str()).collect::<Vec<_>>(),
        ["mem://exact", "mem://policy", "mem://exact_agent"]
    );
    stack.stop().await;
    // The same check finds a socket if there is one.
    let folder = tempfile::tempdir().unwrap();
    let _tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let _unix = UnixListener::bind(folder.path().join("socket")).unwrap();
    assert_eq!(listening().len(), 2);
}

#[tokio::test]
async fn each_task_is_one_rollout_and_a_failure_is_a_typed_error() {
    let stack = exact().await;
    let mut rollouts = stack.rollouts("exact_agent", [task("4"), task("5"), task("broken")]).unwrap();
    let mut ended = Vec::new();
    while let Some(rollout) = rollouts.next().await {
        ended.push(rollout.unwrap());
    }
    ended.sort_by_key(|rollout| rollout.key);
    let rewards: Vec<_> = ended.iter().map(Rollout::reward).collect();
    assert_eq!(rewards, [Some(1.0), Some(0.0), None]);
    for (at, rollout) in ended.iter().enumerate() {
        assert_eq!(rollout.key.task_index as usize, at);
        assert_eq!(rollout.row.get_as::<u32>("_ng_task_index").unwrap(), Some(rollout.key.task_index));
        assert_eq!(rollout.attempts, 1);
        assert!(rollout.duration > Duration::ZERO);
    }
    assert_eq!(ended[0].row.get_as::<String>("expected").unwrap().as_deref(), Some("4"));
    let error = ended[2].outcome.as_ref().unwrap_err();
    assert_eq!(error.class(), Some(FailureClass::VerifierError));
    assert!(matches!(error, RolloutError::Failed { message, .. } if message.contains("/run")), "{error}");
    stack.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_rollout_that_succeeds_after_failed_attempts_is_one_item() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let stack = Stack::embedded()
        .agent("flaky", move |_| {
            Agent(move |row: RawObject| {
                let number = counted.fetch_add(1, Ordering::Relaxed);
                async move {
                    match number {
                        0 | 1 => Err(Error::finished(Code::Unavailable, "busy")),
                        _ => Ok(Response::json(row.edit().set("reward", "0.5").to_rope())),
                    }
                }
            })
        })
        .start()
        .await
        .unwrap();
    let mut rollouts = stack.rollouts("flaky", [task("4")]).unwrap();
    let rollout = rollouts.next().await.unwrap().unwrap();
    assert_eq!((rollout.reward(), rollout.attempts), (Some(0.5), 3));
    // Three attempts have two waits between them.
    assert!(rollout.duration >= Duration::from_millis(200), "{:?}", rollout.duration);
    assert!(rollouts.next().await.is_none());
    calls.store(0, Ordering::Relaxed);
    let mut options = DriverOptions::default();
    options.attempts_max = 2;
    let mut rollouts = stack.rollouts_with("flaky", [task("4")], options).unwrap();
    let rollout = rollouts.next().await.unwrap().unwrap();
    assert_eq!(rollout.outcome.unwrap_err().class(), Some(FailureClass::AgentRequestFailed));
    assert_eq!(rollout.attempts, 2);
    assert!(rollouts.next().await.is_none());
    stack.stop().await;
}

/// An agent that only passes on the error of a call does not say that its own run did not start.
#[tokio::test(start_paused = true)]
async fn an_episode_whose_call_did_not_start_runs_once() {
    let cases = [("absent", FailureClass::TransportUnreachable), ("policy", FailureClass::AgentRunError)];
    for (server, class) in cases {
        let runs = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&runs);
        let stack = Stack::embedded()
            .model("policy", ScriptedModel::from_policy(|_: &RawObject, _: &mut _| Vec::new()))
            .agent("passes_on", move |client| {
                Agent(move |_| {
                    counted.fetch_add(1, Ordering::Relaxed);
                    let mut session = client.session();
                    async move {
                        let cx = CallContext::within(Duration::from_secs(2));
                        // The model rejects it, because it has no input.
                        session.post(&cx, server, "/v1/responses", "{}").await?.into_result()
                    }
                })
            })
            .start()
            .await
            .unwrap();
        let mut options = DriverOptions::default();
        options.attempts_max = 1;
        let mut rollouts = stack.rollouts_with("passes_on", [task("4")], options).unwrap();
        let rollout = rollouts.next().await.unwrap().unwrap();
        assert_eq!(rollout.outcome.unwrap_err().class(), Some(class), "{server}");
        assert_eq!(runs.load(Ordering::Relaxed), 1, "{server}");
        stack.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_rollout_of_which_nothing_is_kept_is_an_item_too() {
    let stack = Stack::embedded()
        .agent("forgetful", |_| Agent(|_| async { Ok(Response::json(r#"{"_ng_no_persist": true}"#)) }))
        .start()
        .await
        .unwrap();
    let mut rollouts = stack.rollouts("forgetful", [task("4")]).unwrap();
    let rollout = rollouts.next().await.unwrap().unwrap();
    assert_eq!(rollout.outcome, Err(RolloutError::Unrecorded));
    assert!(rollouts.next().await.is_none());
    stack.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_program_that_takes_no_rollouts_holds_the_others_up() {
    let started = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&started);
    let stack = Stack::embedded()
        .agent("quick", move |_| {
            Agent(move |row: RawObject| {
                counted.fetch_add(1, Ordering::Relaxed);
                async move { Ok(Response::json(row.edit().set("reward", "1").to_rope())) }
            })
        })
        .start()
        .await
        .unwrap();
    let mut options = DriverOptions::default();
    options.concurrency = 4;
    let mut rollouts = stack.rollouts_with("quick", (0..100).map(|_| task("4")), options).unwrap();
    tokio::time::sleep(Duration::from_secs(100_000)).await;
    // Four rollouts wait in the stream, and four wait for space in it.
    assert_eq!(started.load(Ordering::Relaxed), 8);
    let mut count = 0;
    while let Some(rollout) = rollouts.next().await {
        assert_eq!(rollout.unwrap().reward(), Some(1.0));
        count += 1;
    }
    assert_eq!(count, 100);
    stack.stop().await;
}

#[tokio::test(start_paused = true)]
async fn dropping_the_stream_stops_what_is_in_flight() {
    let (begun, mut begins) = tokio::sync::mpsc::channel::<tokio::sync::oneshot::Receiver<()>>(1);
    let stack = Stack::embedded()
        .agent("endless", move |_| {
            Agent(move |_| {
                let begun = begun.clone();
                async move {
                    // Dropped together with the call.
                    let (_alive, ended) = tokio::sync::oneshot::channel();
                    begun.send(ended).await.unwrap();
                    std::future::pending().await
                }
            })
        })
        .start()
        .await
        .unwrap();
    let rollouts = stack.rollouts("endless", [task("4")]).unwrap();
    let ended = begins.recv().await.unwrap();
    let dropped = tokio::time::Instant::now();
    drop(rollouts);
    assert!(ended.await.is_err());
    assert!(dropped.elapsed() < Duration::from_secs(1), "{:?}", dropped.elapsed());
    stack.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_episode_whose_calls_never_wait_can_be_stopped() {
    // More than there are before a busy machine drops the rollouts.
    const TURNS_MAX: u32 = 100_000;
    let turns = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&turns);
    let policy = move |_: &RawObject, _: &mut fastrand::Rng| match counted.fetch_add(1, Ordering::Relaxed) {
        TURNS_MAX.. => vec![ScriptedItem::message("4")],
        _ => vec![ScriptedItem::tool_call("look", "{}")],
    };
    let stack = Stack::embedded()
        .resources("exact", Exact)
        .model("policy", ScriptedModel::from_policy(policy))
        .agent("exact_agent", |client| SimpleAgent::between("policy", "exact", client))
        .start()
        .await
        .unwrap();
    let rollouts = stack.rollouts("exact_agent", [task("4")]).unwrap();
    while turns.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    drop(rollouts);
    let mut before = 0;
    while before != turns.load(Ordering::Relaxed) {
        before = turns.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(before < TURNS_MAX, "the episode ran to its end");
    stack.stop().await;
}

#[tokio::test]
async fn a_stack_without_servers_is_rejected_and_a_misspelled_server_is_named_with_the_nearest() {
    let error = Stack::embedded().start().await.expect_err("nothing to serve").to_string();
    assert!(error.contains("the embedded stack has no servers; add some with `.resources`"), "{error}");

    let policy = |_: &RawObject, _: &mut fastrand::Rng| vec![ScriptedItem::message("4")];
    let stack = Stack::embedded()
        .resources("exact", Exact)
        .model("policy", ScriptedModel::from_policy(policy))
        .agent("exact_agent", |client| SimpleAgent::between("polcy", "exact", client))
        .start()
        .await
        .expect("the servers start");
    let mut rollouts = stack.rollouts_with("exact_agent", [task("4")], one_attempt()).expect("the agent is known");
    let rollout = rollouts.next().await.expect("one task").expect("the rows are read");
    let error = rollout.outcome.expect_err("there is no such model").to_string();
    assert!(error.contains("polcy: no server of this name is registered; did you mean `policy`?"), "{error}");
    stack.stop().await;
}

#[tokio::test]
async fn two_servers_of_one_name_are_rejected() {
    let started = Stack::embedded().resources("exact", Exact).resources("exact", Exact).start().await;
    let error = started.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("two servers 'exact'"), "{error}");
    let stack = exact().await;
    let error = stack.rollouts("exact_agnet", [task("4")]).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("exact_agent"), "{error}");
    stack.stop().await;
}

/// An environment with a tool that blocks its thread until the test lets it go.
struct Bank(parking_lot::Mutex<std::sync::mpsc::Receiver<()>>);

impl ResourcesServer for Bank {
    type Task = serde::de::IgnoredAny;

    tools! { |self, _cx, _session|
        slow() => {
            let _ = self.0.lock().recv();
            serde_json::json!({"balance": 4})
        },
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
        Ok(Verdict::correct(true))
    }
}

/// A stack whose model calls the tool `slow` in the rows that say so.
async fn banking(bank: impl ResourcesServer) -> Stack {
    let policy = |request: &RawObject, _: &mut fastrand::Rng| {
        let text = String::from_utf8_lossy(request.text()).into_owned();
        let answered = text.contains("function_call_output") || !text.contains("slowly");
        vec![if answered { ScriptedItem::message("4") } else { ScriptedItem::tool_call("slow", "{}") }]
    };
    Stack::embedded()
        .resources("bank", bank)
        .model("policy", ScriptedModel::from_policy(policy))
        .agent("bank_agent", |client| SimpleAgent::between("policy", "bank", client))
        .start()
        .await
        .expect("the servers start")
}

fn row(input: &str) -> RawObject {
    RawObject::parse(serde_json::json!({"responses_create_params": {"input": input}}).to_string()).expect("an object")
}

/// Long enough that an attempt reaches the tool before.
const ATTEMPT: Duration = Duration::from_secs(3);

fn one_attempt() -> DriverOptions {
    let mut options = DriverOptions::default();
    options.attempts_max = 1;
    options.attempt_timeout = ATTEMPT;
    options
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_that_blocks_its_thread_is_reported_while_it_blocks_and_named_by_the_failed_rollout() {
    let (release, released) = std::sync::mpsc::sync_channel(1);
    let stack = banking(Bank(released.into())).await;
    let mut rollouts = stack.rollouts_with("bank_agent", [row("slowly")], one_attempt()).unwrap();
    let counted = r#"gym_handler_stalls_total{server="bank",route="/slow"} 1"#;
    let reported = async {
        while !stack.metrics().text().contains(counted) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reported).await.expect("the stall is reported");
    let blocks = tokio::time::Instant::now();
    assert!(stack.metrics().text().contains(r#"gym_handler_stalled_seconds{server="bank",route="/slow",thread="#));
    let health = stack.client().get(&CallContext::default(), "policy", "/health").await.unwrap();
    let health: serde_json::Value = serde_json::from_slice(&health.message.head.to_bytes()).unwrap();
    assert_eq!(health["stalls"][0]["server"], "bank", "{health}");
    assert_eq!(health["stalls"][0]["route"], "/slow", "{health}");
    // The attempt has begun before, so its deadline passes while the tool blocks.
    tokio::time::sleep_until(blocks + ATTEMPT).await;
    release.send(()).unwrap();
    let rollout = rollouts.next().await.unwrap().unwrap();
    let text = String::from_utf8_lossy(rollout.row.text()).into_owned();
    assert!(text.contains("the deadline has passed while `/slow` of server `bank` blocked its thread for "), "{text}");
    stack.stop().await;
}

#[tokio::test(flavor = "current_thread")]
async fn a_blocking_environment_on_threads_of_its_own_stops_no_other_rollout_and_is_named_at_its_deadline() {
    let (release, released) = std::sync::mpsc::sync_channel(1);
    let stack = banking(gym_core::server::Blocking::new(Bank(released.into()))).await;
    let mut slow = stack.rollouts_with("bank_agent", [row("slowly")], one_attempt()).unwrap();
    let mut quick = stack.rollouts("bank_agent", [row("quickly")]).unwrap();
    assert_eq!(quick.next().await.unwrap().unwrap().reward(), Some(1.0), "the only thread of the runtime is free");
    let rollout = slow.next().await.unwrap().unwrap();
    let text = String::from_utf8_lossy(rollout.row.text()).into_owned();
    assert!(text.contains("POST bank/slow: the deadline has passed after a wait of "), "{text}");
    release.send(()).unwrap();
    stack.stop().await;
}
