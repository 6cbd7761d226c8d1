//! A cluster of real processes: a head server, workers that join it, and collectors. Workers and the head are killed, stopped and
//! drained in the middle of collections; the rows are those of an undisturbed one.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod support;

use std::time::Duration;

use gym_core::testing::free_port;
use rustix::process::Signal;
use serde_json::Value;
use support::collections::{Collecting, Server};
use support::{WAIT_TIMEOUT, examples, gym_examples};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

const LATENCY_MS: &str = "+policy_model.responses_api_models.scripted_model.latency_ms=[50,150]";

struct Cluster {
    folder: tempfile::TempDir,
    head: Server,
    url: String,
}

impl Cluster {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Another head gets the port later.
        let (head, url) = start_head(&folder, free_port()).await;
        Self { folder, head, url }
    }

    async fn worker(&self, name: &str) -> Server {
        let mut command = gym_examples(self.folder.path());
        command.arg("run").arg("--config").arg(examples().join("configs/quickstart.yaml")).arg(LATENCY_MS);
        command.args(["--worker", "--head-url", &self.url, "--name", name, "--pull-capacity", "8"]);
        command.args(["--heartbeat-interval", "1", "--worker-timeout", "5"]);
        let mut worker = Server::start(&mut command);
        worker.says("ready: ").await;
        worker
    }

    /// Waits until a worker has a state, and returns how long that took.
    async fn is(&self, name: &str, state: &str) -> Duration {
        let began = Instant::now();
        let reached = async {
            while self.state(name).await != state {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(WAIT_TIMEOUT, reached).await.unwrap_or_else(|_| panic!("{name} is never {state}"));
        began.elapsed()
    }

    async fn state(&self, name: &str) -> String {
        let mut command: Command = gym_examples(self.folder.path());
        let listed = command.args(["workers", "--json", "--head-url", &self.url]).output().await.unwrap();
        let members: Value = serde_json::from_slice(&listed.stdout).unwrap_or_default();
        let member = members.as_array().into_iter().flatten().find(|member| member["name"] == name);
        member.and_then(|member| member["state"].as_str()).unwrap_or_default().to_owned()
    }

    fn collecting<'a>(&'a self, name: &'a str) -> Collecting<'a> {
        Collecting::new(self.folder.path(), &self.url, name)
    }
}

async fn start_head(folder: &tempfile::TempDir, port: u16) -> (Server, String) {
    let mut command = gym_examples(folder.path());
    command.arg("run").arg("--config").arg(examples().join("configs/quickstart.yaml"));
    command.args(["--head-only", &format!("+head_server.port={port}")]);
    let mut head = Server::start(&mut command);
    let url = head.says("ready: ").await.rsplit(' ').next().unwrap().to_owned();
    (head, url)
}

#[tokio::test]
async fn collections_survive_killed_frozen_and_drained_workers_and_a_killed_head() {
    let mut cluster = Cluster::new().await;
    let first = cluster.worker("w1").await;
    let second = cluster.worker("w2").await;
    let third = cluster.worker("w3").await;
    let (undisturbed, failed) = cluster.collecting("undisturbed.jsonl").run(&[], || {}).await;
    assert!(failed.is_empty(), "{failed:?}");

    // Calls in flight to a killed worker end at once.
    let (rows, failed) =
        cluster.collecting("killed.jsonl").run(&["--dispatch", "push"], || first.signal(Signal::KILL)).await;
    assert_eq!(rows, undisturbed);
    assert!(failed.keys().eq(["transport_peer_drop"]), "{failed:?}");
    cluster.is("w1", "gone").await;

    // A frozen one is noticed by its silence. Its connections stay open.
    let (rows, failed) =
        cluster.collecting("frozen.jsonl").run(&["--dispatch", "push"], || second.signal(Signal::STOP)).await;
    assert_eq!(rows, undisturbed);
    assert!(failed.keys().eq(["transport_peer_drop"]), "{failed:?}");
    second.signal(Signal::CONT);
    cluster.is("w2", "serving").await;

    // While the head is away, workers and collections go on.
    let port = cluster.url.rsplit(':').next().unwrap().parse().unwrap();
    let (rows, failed) =
        cluster.collecting("beheaded.jsonl").run(&["--dispatch", "push"], || cluster.head.signal(Signal::KILL)).await;
    assert_eq!(rows, undisturbed);
    assert!(failed.is_empty(), "{failed:?}");
    cluster.head = start_head(&cluster.folder, port).await.0;
    for name in ["w2", "w3"] {
        cluster.is(name, "serving").await;
    }

    // A drained worker finishes its rollouts and ends.
    let mut third = third;
    let drained = async {
        let mut command: Command = gym_examples(cluster.folder.path());
        let asked = command.args(["drain", "w3", "--head-url", &cluster.url]).output().await.unwrap();
        assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
        timeout(WAIT_TIMEOUT, third.ended()).await.expect("a drained worker ends")
    };
    let collection = cluster.collecting("drained.jsonl");
    let ((rows, failed), ended) = tokio::join!(collection.run(&[], || {}), drained);
    assert!(ended.success(), "{ended}");
    assert_eq!(rows, undisturbed);
    assert!(failed.is_empty(), "{failed:?}");
    cluster.is("w3", "gone").await;
}
