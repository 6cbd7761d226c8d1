//! Failed rollouts: what the failures file says about each, and when a run stops because of them.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, stream};
use gym_client::collect::ledger::{JsonlLedger, OpenMode};
use gym_client::collect::{Driver, DriverOptions, FailFast, ProgressSnapshot, RolloutRow, RunEnd};
use gym_client::{ServerClient, Transports};
use gym_core::registry::{MemoryRegistry, Registration, Registry};
use gym_core::rollout::{FailureClass, TaskKey};
use gym_core::server::ServerKind;
use gym_core::testing::{Faults, SimFiles, SimNet};
use gym_core::transport::{handler_fn, serve};
use gym_core::{
    CallContext, CancelToken, Endpoint, Error, Execution, Message, RawObject, Request, Response, Result, Status, World,
};
use serde_json::{Value, json};

const OUTPUT: &str = "rollouts.jsonl";
const ENDLESS_TIMEOUT: Duration = Duration::from_secs(1_000_000);

/// What the environment does with the row of a task.
type Play = fn(u32, &RawObject) -> (Duration, Result<Response>);

struct Ground {
    net: SimNet,
    files: SimFiles,
    world: World,
    registry: Arc<MemoryRegistry>,
}

impl Ground {
    async fn new(play: Play) -> Self {
        let net = SimNet::new(1, Faults::calm());
        let host = net.host("env");
        let listener = Box::new(host.listen("gym").unwrap());
        let answer = Arc::new(handler_fn(move |request: Request| async move {
            let row = RawObject::parse(request.message.head.to_bytes())?;
            let (after, response) = play(row.get_as("_ng_task_index")?.unwrap(), &row);
            tokio::time::sleep(after).await;
            response
        }));
        host.spawn(serve(listener, answer, CancelToken::new(), ENDLESS_TIMEOUT).map(drop));
        let registry = Arc::new(MemoryRegistry::default());
        let mut registration =
            Registration::new("env", ServerKind::Environment, [Endpoint::parse("sim://env/gym").unwrap()]);
        registration.replica = Some(0);
        registration.ttl = ENDLESS_TIMEOUT;
        registry.register(&CallContext::default(), registration).await.unwrap();
        let files = SimFiles::new(1);
        let world = World::new(Arc::new(files.clone()), 1, Duration::from_secs(1_763_845_564));
        Self { net, files, world, registry }
    }

    /// Runs the rows that have no outcome yet.
    async fn run(&self, rows: Vec<RolloutRow>, options: DriverOptions) -> (RunEnd, ProgressSnapshot) {
        let transports = Transports::new().with_connector(Arc::new(self.net.host("collector")));
        let client = ServerClient::new(Arc::clone(&self.registry) as _, transports, &self.world);
        let cx = CallContext::within(ENDLESS_TIMEOUT);
        let files = Arc::new(self.files.clone());
        let (ledger, _) = JsonlLedger::open(&cx, files, OUTPUT, OpenMode::Resume).await.unwrap();
        let ledger = Arc::new(ledger);
        let driver = Arc::new(Driver::new(client, Arc::clone(&ledger) as _, &self.world, options));
        let ended = driver.run(stream::iter(rows.into_iter().map(Ok)), CancelToken::new()).await.unwrap();
        ledger.close(&cx).await.unwrap();
        (ended, driver.progress().snapshot())
    }

    fn failures(&self) -> Vec<Value> {
        let text = String::from_utf8(self.files.contents(Path::new("rollouts_failures.jsonl"))).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn row(task: u32) -> RolloutRow {
    RolloutRow {
        key: TaskKey::new(task, 0),
        agent: "agent".into(),
        server: "env".into(),
        result_type: None,
        row: RawObject::parse(format!(r#"{{"_ng_task_index":{task},"_ng_rollout_index":0}}"#)).unwrap(),
    }
}

fn rows(count: u32) -> Vec<RolloutRow> {
    (0..count).map(row).collect()
}

fn options(concurrency: usize, fail_fast: FailFast) -> DriverOptions {
    let mut options = DriverOptions::default();
    options.concurrency = concurrency;
    options.fail_fast = fail_fast;
    options.attempts_max = 1;
    options
}

fn scored(row: &RawObject) -> Result<Response> {
    Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
}

/// Fails each task in the same way, apart from its number.
fn broken(task: u32) -> Result<Response> {
    let cause = Error::internal(format!("no account {task} in table accounts")).with_class(FailureClass::ToolError);
    let error = cause.within(Execution::Finished, "POST bank/transfer").within(Execution::Finished, "POST agent/run");
    Ok(Response::from_error(&error))
}

#[tokio::test(start_paused = true)]
async fn a_run_in_which_all_fails_alike_stops_and_can_go_on() {
    let ground = Ground::new(|task, _| (Duration::from_secs(1), broken(task))).await;
    let (ended, counted) = ground.run(rows(500), options(8, FailFast::Alike)).await;
    assert_eq!(ended, RunEnd::FailedFast);
    assert!((FailFast::ALIKE_MIN..FailFast::ALIKE_MIN + 8).contains(&counted.given_up), "{counted:?}");
    assert_eq!(ground.failures().len() as u64, counted.given_up, "each failed row is recorded");
    let [cause] = &counted.causes[..] else { panic!("{:?}", counted.causes) };
    assert_eq!((cause.class, &*cause.server, &*cause.route), (FailureClass::ToolError, "bank", "/transfer"));
    assert_eq!((cause.count, cause.example.key), (counted.given_up, TaskKey::new(0, 0)));
    assert_eq!(cause.causes.last().unwrap().message, "no account 0 in table accounts");

    let (ended, rest) = ground.run(rows(500), options(8, FailFast::Never)).await;
    assert_eq!(ended, RunEnd::Exhausted);
    assert_eq!((rest.given_up, rest.already_given_up), (500 - counted.given_up, counted.given_up));
}

#[tokio::test(start_paused = true)]
async fn a_rollout_in_flight_that_succeeds_lets_the_run_go_on() {
    // 60 rows fail at once, while the first success takes a minute.
    let play: Play = |task, row| match task {
        0 => (Duration::from_secs(60), scored(row)),
        1..=60 => (Duration::ZERO, broken(task)),
        _ => (Duration::ZERO, scored(row)),
    };
    let ground = Ground::new(play).await;
    let (ended, counted) = ground.run(rows(100), options(16, FailFast::Alike)).await;
    assert_eq!((ended, counted.completed, counted.given_up), (RunEnd::Exhausted, 40, 60));
}

#[tokio::test(start_paused = true)]
async fn different_causes_do_not_stop_a_run() {
    let ground = Ground::new(|task, _| {
        let other = Ok(Response::from_error(&Error::internal("the disk is full").about("POST bank/transfer")));
        (Duration::ZERO, if task == 20 { other } else { broken(task) })
    });
    let (ended, counted) = ground.await.run(rows(100), options(4, FailFast::Alike)).await;
    assert_eq!((ended, counted.given_up), (RunEnd::Exhausted, 100));
    let counts: Vec<u64> = counted.causes_by_count().iter().map(|cause| cause.count).collect();
    assert_eq!(counts, [99, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_run_without_remaining_rows_did_not_stop_early() {
    for fail_fast in [FailFast::Alike, FailFast::After(32)] {
        let ground = Ground::new(|task, _| (Duration::ZERO, broken(task))).await;
        let (ended, counted) = ground.run(rows(32), options(1, fail_fast)).await;
        assert_eq!((ended, counted.given_up), (RunEnd::Exhausted, 32), "{fail_fast:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_stops_after_the_requested_number_of_failures() {
    let ground =
        Ground::new(|task, row| (Duration::ZERO, if task % 10 == 9 { broken(task) } else { scored(row) })).await;
    let (ended, counted) = ground.run(rows(1_000), options(1, FailFast::After(5))).await;
    assert_eq!((ended, counted.given_up, counted.completed), (RunEnd::FailedFast, 5, 45));
}

/// Plays each kind of failure.
fn every_failure(task: u32, row: &RawObject) -> (Duration, Result<Response>) {
    let foreign = |status, body: &'static str| Ok(Response::new(Status(status), Message::json(body)));
    let answer = match task {
        0 => broken(task),
        1 => foreign(500, r#"{"detail":"the judge is out of office"}"#),
        2 => foreign(502, "<html><title>Bad Gateway</title></html>"),
        3 => foreign(200, "[]"),
        4 => Ok(Response::json(row.edit().set("reward", r#""NaN""#).to_rope())),
        5 => Ok(Response::json(
            row.edit()
                .set("_ng_failure_class", r#""judge_failed""#)
                .set("_ng_failure_message", r#""no judge""#)
                .to_rope(),
        )),
        6 => Ok(Response::json(
            row.edit().set("_ng_failure_class", r#""skipped""#).set("_ng_failure_terminal", "true").to_rope(),
        )),
        7 => return (ENDLESS_TIMEOUT, scored(row)),
        8 => Ok(Response::from_error(&Error::internal("é".repeat(10_000)).with_class(FailureClass::VerifierPanic))),
        // A row of another rollout.
        9 => foreign(413, r#"{"detail":"too large"}"#),
        10 => foreign(404, ""),
        class => {
            let class = FailureClass::ALL[class as usize - 11];
            Ok(Response::from_error(&Error::internal("x").with_class(class)))
        }
    };
    (Duration::ZERO, answer)
}

async fn every_failed_row() -> Vec<Value> {
    let ground = Ground::new(every_failure).await;
    let mut rows: Vec<_> = (0..11 + FailureClass::ALL.len() as u32).map(row).collect();
    let count = rows.len() as u32;
    for (at, id) in ["\"mine.1\"", "\"mine-a3\"", "\"not allowed\"", "7"].into_iter().enumerate() {
        rows[at].row = rows[at].row.edit().set("_ng_rollout_id", id).to_object().unwrap();
    }
    rows.push(RolloutRow { server: "nobody".into(), ..row(1_000) });
    let mut options = options(64, FailFast::Never);
    options.lost_max = 1;
    options.attempt_timeout = Duration::from_secs(60);
    let (_, counted) = ground.run(rows, options).await;
    let mut failures = ground.failures();
    assert_eq!((failures.len() as u32, counted.completed), (count + 1, 0));
    failures.sort_by_key(|row| row["_ng_task_index"].as_u64());
    failures
}

#[tokio::test(start_paused = true)]
async fn a_failures_row_has_class_causes_server_and_nemo_gyms_record_as_fields() {
    let rows = every_failed_row().await;
    for row in &rows {
        assert!(row["_ng_failure_class"].is_string() && row["_ng_failure_server"].is_string(), "{row}");
        let causes = row["_ng_failure_causes"].as_array().unwrap();
        assert!(!causes.is_empty() && causes.iter().all(|cause| cause.is_object()), "{row}");
        let record = row["_ng_failure_record"].as_object().unwrap();
        let keys: Vec<&str> = record.keys().map(String::as_str).collect();
        let expected = [
            "schema_version",
            "episode_id",
            "run_id",
            "source",
            "delivery",
            "failure",
            "http_status",
            "exception_type",
        ];
        assert_eq!(keys, expected);
        let reason = record["failure"]["failure_reason"].as_str().unwrap();
        assert!(!reason.is_empty() && reason.chars().count() <= 2_000, "{row}");
    }
    let of = |task: u64| rows.iter().find(|row| row["_ng_task_index"] == task).unwrap();
    let seen = |task: u64| {
        let record = &of(task)["_ng_failure_record"];
        [&record["source"], &record["delivery"], &record["failure"]["failure_kind"]]
            .map(|value| value.as_str().unwrap())
    };
    assert_eq!(seen(0), ["environment", "delivered", "gym:tool_error"]);
    assert_eq!(seen(1), ["environment", "delivered", "agent_run_error"]);
    assert_eq!(seen(2), ["collector", "possibly_delivered", "agent_request_failed"]);
    assert_eq!(seen(3), ["collector", "delivered", "verifier_error"]);
    assert_eq!(seen(6), ["environment", "delivered", "agent_run_error"]);
    assert_eq!(seen(7), ["collector", "possibly_delivered", "transport_timeout"]);
    assert_eq!(seen(1_000), ["collector", "not_sent", "transport_unreachable"]);
    let tool = of(0);
    assert_eq!((&tool["_ng_failure_server"], &tool["_ng_failure_route"]), (&json!("bank"), &json!("/transfer")));
    let chain = json!([
        {"subject": "POST env/run"}, {"subject": "POST agent/run"}, {"subject": "POST bank/transfer"},
        {"message": "no account 0 in table accounts"},
    ]);
    assert_eq!(tool["_ng_failure_causes"], chain);
    let ids: Vec<_> = (0..4).map(|task| of(task)["_ng_failure_record"]["episode_id"]["rollout_id"].clone()).collect();
    assert_eq!(ids, ["mine.1", "1-0", "2-0", "3-0"]);
    assert_eq!(of(6)["_ng_failure_record"]["failure"]["terminal"], true);
}

/// Only when `GYM_PEER_PYTHON` names an interpreter that has `nemo-gym` 0.7.0.
#[tokio::test(start_paused = true)]
async fn nemo_gym_validates_its_own_failure_record() {
    let Some(python) = std::env::var_os("GYM_PEER_PYTHON") else {
        println!("NOT RUN: GYM_PEER_PYTHON names no interpreter");
        return;
    };
    let rows = every_failed_row().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python/failure_records.py");
    let mut child = Command::new(python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert_eq!(said.trim(), format!("{} records", rows.len()));
}
