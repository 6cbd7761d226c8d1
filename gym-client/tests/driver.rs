//! The driver over a disk that stands still: what is counted, and whether the run goes on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, stream};
use gym_client::collect::ledger::{JsonlLedger, OpenMode};
use gym_client::collect::{Driver, DriverOptions, ProgressSnapshot, RolloutRow, RunEnd};

use gym_client::{ServerClient, Transports};
use gym_core::registry::{MemoryRegistry, Registration, Registry};
use gym_core::rollout::TaskKey;
use gym_core::server::ServerKind;
use gym_core::testing::{Faults, SimFiles, SimNet};
use gym_core::transport::{handler_fn, serve};
use gym_core::{CallContext, CancelToken, Endpoint, RawObject, Request, Response, Result, World};

const OUTPUT: &str = "rollouts.jsonl";

/// Collects one rollout, whose environment answers at once, over a disk of this latency.
async fn collect(latency_max: Duration, options: DriverOptions) -> (Result<RunEnd>, ProgressSnapshot, Vec<u8>) {
    let net = SimNet::new(1, Faults::calm());
    let host = net.host("env");
    let listener = Box::new(host.listen("gym").expect("the test sets it up right"));
    let answer = handler_fn(|request: Request| async move {
        let row = RawObject::parse(request.message.head.to_bytes())?;
        Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
    });
    let answer = Arc::new(answer);
    host.spawn(serve(listener, answer, CancelToken::new(), Duration::from_secs(100_000)).map(drop));
    let registry = Arc::new(MemoryRegistry::default());
    let mut registration = Registration::new(
        "env",
        ServerKind::Environment,
        [Endpoint::parse("sim://env/gym").expect("the test sets it up right")],
    );
    registration.replica = Some(0);
    registration.ttl = Duration::from_secs(100_000);
    registry.register(&CallContext::default(), registration).await.expect("the test sets it up right");
    let files = SimFiles::new(1);
    let world = World::new(Arc::new(files.clone()), 1, Duration::ZERO);
    let transports = Transports::new().with_connector(Arc::new(net.host("collector")));
    let client = ServerClient::new(registry as _, transports, &world);
    let cx = CallContext::within(Duration::from_secs(100_000));
    let (ledger, _) = JsonlLedger::open(&cx, Arc::new(files.clone()), OUTPUT, OpenMode::Resume)
        .await
        .expect("the test sets it up right");
    files.set_latency_max(latency_max);
    let ledger = Arc::new(ledger);
    let driver = Arc::new(Driver::new(client, Arc::clone(&ledger) as _, &world, options));
    let row = RolloutRow {
        key: TaskKey::new(0, 0),
        agent: "agent".into(),
        server: "env".into(),
        result_type: None,
        row: RawObject::parse(r#"{"_ng_task_index":0,"_ng_rollout_index":0}"#).expect("the test sets it up right"),
    };
    let ended = driver.run(stream::iter([Ok(row)]), CancelToken::new()).await;
    files.set_latency_max(Duration::ZERO);
    ledger.close(&cx).await.expect("the test sets it up right");
    (ended, driver.progress().snapshot(), files.contents(Path::new(OUTPUT)))
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_stands_still_for_minutes_holds_the_run_up_and_does_not_end_it() {
    let (ended, counted, written) = collect(Duration::from_secs(3_600), DriverOptions::default()).await;
    assert_eq!(ended.unwrap(), RunEnd::Exhausted);
    assert_eq!((counted.completed, counted.given_up), (1, 0));
    assert_eq!(written.iter().filter(|byte| **byte == b'\n').count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_rollout_whose_superseded_attempt_is_recorded_late_counts_once() {
    // Superseded after 20 s, recorded after that: its last attempt is over, and has completed the rollout all the same.
    let mut options = DriverOptions::default();
    options.attempts_max = 1;
    options.attempt_timeout = Duration::from_secs(10);
    options.record_timeout = Duration::from_secs(10);
    let mut late = 0;
    for latency in 5..20 {
        let (ended, counted, written) = collect(Duration::from_secs(latency), options.clone()).await;
        ended.unwrap();
        let lines = written.iter().filter(|byte| **byte == b'\n').count() as u64;
        assert_eq!(counted.completed + counted.given_up, 1, "{latency}: {counted:?}");
        assert!(counted.completed <= lines, "{latency}");
        late += u64::from(counted.completed == 1 && !counted.failures.is_empty());
    }
    assert!(late > 0, "no latency brought the outcome of a superseded attempt");
}
