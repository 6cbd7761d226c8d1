//! Pulled work between real processes: a head server with a pool, workers, and collectors that pull and push. A worker is killed or
//! stopped in the middle of a collection; the rows are those of an undisturbed one.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod support;

use rustix::process::Signal;
use support::collections::{Collecting, Server};
use support::{examples, gym_examples};

const LATENCY_MS: &str = "+policy_model.responses_api_models.scripted_model.latency_ms=[50,150]";

struct Ground {
    folder: tempfile::TempDir,
    /// The head server, and a pool in front of the math agent.
    _head: Server,
    url: String,
    workers: Vec<Server>,
}

impl Ground {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let pool = folder.path().join("pool.yaml");
        std::fs::write(
            &pool,
            "math_pool: {environment_servers: {pool: {entrypoint: app.py, worker_timeout_seconds: 10, agent_server: {type: \
             responses_api_agents, name: math_simple_agent}}}}\nmath_environment_server: null\n",
        )
        .unwrap();
        let config = examples().join("configs/quickstart.yaml");
        let mut command = gym_examples(folder.path());
        command.arg("run").arg("--config").arg(&config).arg("--config").arg(&pool);
        command.args(["--serve", "head_server", "--serve", "math_pool", "+head_server.port=0"]);
        let mut head = Server::start(&mut command);
        let ready = head.says("ready: ").await;
        let url = ready.rsplit(' ').next().unwrap().to_owned();
        let mut workers = Vec::new();
        for _ in 0..3 {
            let mut command = gym_examples(folder.path());
            command.arg("run").arg("--config").arg(&config).args(["+head_server.port=0", LATENCY_MS]);
            command.args(["--pull-from", &url, "--pull-capacity", "8"]);
            let mut worker = Server::start(&mut command);
            worker.says("ready: ").await;
            workers.push(worker);
        }
        Self { folder, _head: head, url, workers }
    }

    fn collecting<'a>(&'a self, name: &'a str) -> Collecting<'a> {
        Collecting::new(self.folder.path(), &self.url, name)
    }
}

#[tokio::test]
async fn a_collection_survives_its_workers() {
    let mut ground = Ground::new().await;
    let (undisturbed, failed) = ground.collecting("pulled.jsonl").run(&["--dispatch", "pull"], || {}).await;
    assert!(failed.is_empty(), "{failed:?}");

    // The environment server in front of the agent is the pool: a collector that knows only `/run` gets the workers.
    let (pooled, failed) = ground.collecting("pooled.jsonl").run(&[], || {}).await;
    assert_eq!(pooled, undisturbed);
    let text = std::fs::read_to_string(ground.folder.path().join("pooled.jsonl")).unwrap();
    assert!(
        text.lines().all(|line| line.contains(r#""_ng_environment_server":"math_pool""#)),
        "the pool was passed by"
    );
    assert!(failed.is_empty(), "{failed:?}");

    let killed = ground.workers.remove(0);
    let (rows, failed) = ground
        .collecting("killed.jsonl")
        .run(&["--dispatch", "pull", "--attempts", "1"], || killed.signal(Signal::KILL))
        .await;
    assert_eq!(rows, undisturbed);
    assert!(failed.keys().eq(["worker_lost"]) && failed["worker_lost"] <= 8, "{failed:?}");

    // The pool has noticed by its own means too.
    let stopped = ground.workers.remove(0);
    let (rows, failed) =
        ground.collecting("stopped.jsonl").run(&["--attempts", "1"], || stopped.signal(Signal::STOP)).await;
    assert_eq!(rows, undisturbed);
    assert!(failed.keys().eq(["worker_lost"]) && failed["worker_lost"] <= 8, "{failed:?}");
}
