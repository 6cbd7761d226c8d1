//! A resumed collection: its rows are those that were recorded, it runs only the missing ones, and its statistics are those of the
//! whole file.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gym_client::collect::input::Repeats;
use gym_client::collect::report::RecordedSummary;
use gym_client::collect::{
    CollectOptions, CollectSummary, ExistingOutput, FailFast, OutputFiles, RolloutCollector, ServerNames, TaskCoverage,
};
use gym_client::registry::StaticRegistry;
use gym_client::{ServerClient, Transports};
use gym_core::registry::Instance;
use gym_core::rollout::metrics::{aggregate_metrics, standard_response};
use gym_core::server::ServerKind;
use gym_core::transport::{InProcess, handler_fn, serve};
use gym_core::{CancelToken, Endpoint, Error, Incarnation, RawObject, Request, Response, Result, World};
use parking_lot::Mutex;

/// More rollouts than the collector sends without asking how the server computes its statistics.
const MANY: usize = 10_050;

/// The requests that the server received.
#[derive(Default)]
struct Received {
    runs: AtomicUsize,
    aggregate_bytes: Mutex<Vec<usize>>,
}

/// Decides by task and repeat whether a rollout fails.
type Fails = fn(u32, u32) -> bool;

/// A folder with an input, and a server that rewards each rollout and computes the standard statistics. It says so if it is `native`.
struct Ground {
    folder: tempfile::TempDir,
    servers: InProcess,
    received: Arc<Received>,
    repeats: u32,
}

impl Ground {
    fn new(tasks: usize, native: bool) -> Self {
        Self::failing(tasks, 1, native, |_, _| false)
    }

    fn failing(tasks: usize, repeats: u32, native: bool, fails: Fails) -> Self {
        let folder = tempfile::tempdir().expect("the test sets it up right");
        let rows = (0..tasks).map(|task| {
            format!(r#"{{"responses_create_params":{{"input":[]}},"agent_ref":{{"name":"agent"}},"n":{task}}}"#) + "\n"
        });
        std::fs::write(folder.path().join("tasks.jsonl"), rows.collect::<String>()).expect("the test sets it up right");
        let servers = InProcess::new();
        let listener = servers.listen("agent").expect("the test sets it up right");
        let received = Arc::new(Received::default());
        let counts = Arc::clone(&received);
        let answer = handler_fn(move |request: Request| {
            let counts = Arc::clone(&counts);
            async move {
                let body = request.message.head.to_bytes();
                if request.route.path() == "/aggregate_metrics" {
                    counts.aggregate_bytes.lock().push(body.len());
                    let reply = aggregate_metrics(&body, usize::MAX).expect("the test sets it up right");
                    return Ok(if native { standard_response(reply) } else { Response::json(reply) });
                }
                counts.runs.fetch_add(1, Ordering::Relaxed);
                let row = RawObject::parse(body)?;
                let index = |key| row.get_as::<u32>(key).map(Option::unwrap_or_default);
                if fails(index("_ng_task_index")?, index("_ng_rollout_index")?) {
                    return Err(Error::invalid("this one fails"));
                }
                Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
            }
        });
        tokio::spawn(serve(Box::new(listener), Arc::new(answer), CancelToken::new(), Duration::ZERO));
        Self { folder, servers, received, repeats }
    }

    fn files(&self) -> OutputFiles {
        OutputFiles::beside(self.folder.path().join("rollouts.jsonl"))
    }

    async fn collect(&self, aggregate: bool) -> Result<CollectSummary> {
        let world = World::real();
        let agent = Instance {
            name: "agent".to_owned(),
            replica: 0,
            kind: ServerKind::Agent,
            implementation: String::new(),
            endpoints: vec![Endpoint::parse("mem://agent").expect("the test sets it up right")],
            incarnation: Incarnation(1),
            labels: Default::default(),
            member: None,
            paused: false,
        };
        let transports = Transports::new().with_connector(Arc::new(self.servers.clone()));
        let client = ServerClient::new(Arc::new(StaticRegistry::new(vec![agent])), transports, &world);
        let names = ServerNames::of_merged(&serde_json::json!({"agent": {"responses_api_agents": {"small": {}}}}));
        let mut options = CollectOptions::new(self.folder.path().join("tasks.jsonl"), self.files().rollouts);
        options.existing = ExistingOutput::Resume;
        options.aggregate = aggregate;
        options.materialize.repeats = Repeats::Each(self.repeats);
        options.driver.fail_fast = FailFast::Never;
        RolloutCollector::new(client, names, world).collect(options, CancelToken::new()).await
    }

    /// Removes the rows of the last rollouts that were recorded, as a power failure before their sync does.
    fn lose(&self, rollouts: usize) {
        let path = self.files().rollouts;
        let text = std::fs::read_to_string(&path).expect("the test sets it up right");
        let kept = text.lines().count() - rollouts;
        std::fs::write(path, text.lines().take(kept).map(|line| format!("{line}\n")).collect::<String>())
            .expect("the test sets it up right");
    }

    fn entries(&self) -> Vec<PathBuf> {
        let mut entries: Vec<_> = std::fs::read_dir(self.folder.path())
            .expect("the test sets it up right")
            .map(|entry| entry.expect("the test sets it up right").path())
            .collect();
        entries.sort();
        entries
    }
}

#[tokio::test]
async fn the_same_rows_are_not_written_again_and_only_missing_rollouts_run() {
    let ground = Ground::new(7, true);
    ground.collect(false).await.unwrap();
    let materialized = || std::fs::metadata(ground.files().materialized).unwrap();
    let (before, entries) = (materialized(), ground.entries());
    ground.lose(3);
    ground.received.runs.store(0, Ordering::Relaxed);
    let summary = ground.collect(false).await.unwrap();
    assert_eq!((summary.snapshot.completed, summary.snapshot.already_completed), (3, 4));
    assert_eq!(ground.received.runs.load(Ordering::Relaxed), 3);
    // The figures are those of all rows, and each row is counted once.
    assert_eq!(summary.snapshot.scores["agent"].count, 7);
    assert!(summary.is_complete());
    let after = materialized();
    assert_eq!((after.ino(), after.mtime_nsec()), (before.ino(), before.mtime_nsec()), "the file was written again");
    assert_eq!(ground.entries(), entries, "a file was left behind");
    assert_eq!(std::fs::read_to_string(ground.files().rollouts).unwrap().lines().count(), 7);
}

#[tokio::test]
async fn recorded_rows_with_another_text_are_compared_row_by_row() {
    let recorded = |ground: &Ground| std::fs::read_to_string(ground.files().materialized).unwrap();
    let torn = |text: String| text[..text.len() - 20].to_owned();
    // Each case: what happened to the recorded file, and what the error names.
    type Change = fn(String) -> String;
    let cases: [(Change, Option<&str>); 5] = [
        (|text| text.trim_end().to_owned(), None),
        (|text| text.replace('\n', "\r\n"), None),
        (
            |text| text.replace(r#""n":3"#, r#""n":4"#),
            Some("n: was 4, is 3 (1 row, first in line 4: task 3, repeat 0)"),
        ),
        (
            |text| text.clone() + &text.lines().last().unwrap().replace("_index\":6", "_index\":9") + "\n",
            Some("there are fewer tasks"),
        ),
        (torn, Some("malformed JSON")),
    ];
    for (change, expected) in cases {
        let ground = Ground::new(7, true);
        ground.collect(false).await.unwrap();
        ground.lose(2);
        let text = recorded(&ground);
        assert_ne!(change(text.clone()), text, "the case changes nothing");
        std::fs::write(ground.files().materialized, change(text.clone())).unwrap();
        let rollouts = std::fs::read(ground.files().rollouts).unwrap();
        match (ground.collect(false).await, expected) {
            (Ok(summary), None) => assert_eq!(summary.snapshot.completed, 2),
            (Err(error), Some(expected)) => {
                assert!(error.to_string().contains(expected), "{error}");
                assert_eq!(std::fs::read(ground.files().rollouts).unwrap(), rollouts, "a rollout was recorded");
            }
            (result, expected) => panic!("expected {expected:?}, got {result:?}"),
        }
    }
}

#[tokio::test]
async fn statistics_of_many_rollouts_need_no_large_message_if_the_server_computes_the_standard_ones() {
    let mut reports = Vec::new();
    for native in [true, false] {
        let ground = Ground::new(MANY, native);
        let summary = ground.collect(true).await.unwrap();
        assert_eq!(summary.aggregate_error, None);
        let sent = ground.received.aggregate_bytes.lock().clone();
        match native {
            true => assert_eq!(sent, [r#"{"verify_responses":[]}"#.len()]),
            // A server in another language receives all rollouts, as NeMo Gym's wire defines.
            false => assert!(sent.len() == 2 && sent[1] > MANY * 50, "{sent:?}"),
        }
        let report = std::fs::read_to_string(ground.files().aggregate).unwrap();
        assert!(report.contains(&format!(r#""rollout_id": "{}:0""#, MANY - 1)), "a rollout is missing");
        reports.push(report);
    }
    assert!(reports[0] == reports[1], "the reports differ");
}

#[tokio::test]
async fn what_is_missing_is_counted_from_the_requested_rows_and_not_from_the_recorded_ones() {
    // Of four repeats: task 0 has all, of task 1 one succeeds, and none of tasks 2 and 5.
    const FAILS: Fails = |task, repeat| task == 2 || task == 5 || (task == 1 && repeat != 2);
    for (tasks, native) in [(6, false), (MANY / 4, true)] {
        let ground = Ground::failing(tasks, 4, native, FAILS);
        let (first, resumed) = (ground.collect(true).await.unwrap(), ground.collect(true).await.unwrap());
        for summary in [&first, &resumed] {
            assert_eq!(summary.aggregate_error, None);
            let agent = &summary.agents["agent"];
            let expected = 4 * tasks as u64;
            assert_eq!((agent.expected, agent.rollouts, agent.missing), (expected, expected - 11, 11));
            let counts = (agent.tasks, agent.tasks_incomplete, agent.tasks_without_rollout);
            assert_eq!(counts, (tasks as u64, 3, 2));
            let task = |task_index, recorded| TaskCoverage { task_index, expected: 4, recorded, missing: 4 - recorded };
            assert_eq!(summary.incomplete_tasks["agent"], [task(2, 0), task(5, 0), task(1, 1)]);
        }
        let read = RecordedSummary::read(&ground.files()).unwrap().unwrap();
        assert_eq!(read.incomplete_tasks, first.incomplete_tasks);
        assert_eq!(read.agents["agent"].missing, 11);

        let report = std::fs::read(ground.files().aggregate).unwrap();
        let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
        let coverage = &report[0]["_gym_coverage"];
        assert_eq!((&coverage["expected"], &coverage["missing"]), (&(4 * tasks).into(), &11.into()));
        let listed = coverage["incomplete_tasks"].as_array().unwrap().iter().map(|task| task["task_index"].as_u64());
        assert_eq!(listed.collect::<Vec<_>>(), [Some(1), Some(2), Some(5)]);
        // The keys of NeMo Gym are there, and true.
        let groups = report[0]["group_level_metrics"].as_array().unwrap();
        for (group, expected) in groups.iter().zip([(0, 4, 0, 100.0), (1, 4, 3, 25.0), (3, 4, 0, 100.0)]) {
            let count = |key: &str| group[key].as_u64().unwrap();
            let share = group["reward_profile_completion_pct"].as_f64().unwrap();
            let counts =
                (count("_ng_task_index"), count("expected_num_rollouts"), count("missing_num_rollouts"), share);
            assert_eq!(counts, expected);
        }
    }
}

#[tokio::test]
async fn a_collection_without_a_single_success_has_an_entry_that_says_so() {
    let ground = Ground::failing(2, 3, false, |_, _| true);
    let summary = ground.collect(true).await.unwrap();
    assert_eq!((summary.agents["agent"].rollouts, summary.agents["agent"].missing), (0, 6));
    let report = std::fs::read(ground.files().aggregate).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report[0]["agent_ref"]["name"], "agent");
    assert_eq!(report[0]["_gym_coverage"]["tasks_without_rollout"], 2);
}
