//! The collector's files after a kill or a power failure within each step of its writes: a resumed run completes them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use gym_client::collect::ledger::index_path;
use gym_client::collect::{CollectOptions, CollectSummary, ExistingOutput, OutputFiles, RolloutCollector, ServerNames};
use gym_client::registry::StaticRegistry;
use gym_client::{ServerClient, Transports};
use gym_core::base::{FileLock, Files, RealFiles};
use gym_core::registry::Instance;
use gym_core::server::ServerKind;
use gym_core::testing::{FileEnd, SimFiles};
use gym_core::transport::{InProcess, handler_fn, serve};
use gym_core::{CancelToken, Endpoint, Incarnation, RawObject, Request, Response, Result, World};

const TASKS: usize = 4;
/// Two pages, so that a power failure can lose a part of a file.
const PADDING: usize = 2_000;

/// Changes a simulated disk, which decides what survives, and then the real files, which the collector reads.
#[derive(Debug)]
struct MirroredFiles {
    disk: SimFiles,
    real: RealFiles,
}

#[async_trait]
impl Files for MirroredFiles {
    async fn length(&self, path: &Path) -> Result<Option<u64>> {
        self.disk.length(path).await
    }

    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes> {
        self.disk.read(path, from, bytes_max).await
    }

    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()> {
        self.disk.append(path, pieces, durable).await?;
        self.real.append(path, pieces, false).await
    }

    async fn rewrite(&self, path: &Path, from: u64, pieces: &[Bytes]) -> Result<()> {
        self.disk.rewrite(path, from, pieces).await?;
        self.real.rewrite(path, from, pieces).await
    }

    async fn truncate(&self, path: &Path, length: u64) -> Result<()> {
        self.disk.truncate(path, length).await?;
        self.real.truncate(path, length).await
    }

    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()> {
        self.disk.replace(path, contents).await?;
        self.real.replace(path, contents).await
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.disk.rename(from, to).await?;
        self.real.rename(from, to).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.disk.remove(path).await?;
        self.real.remove(path).await
    }

    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>> {
        let lock = self.disk.lock(path).await?;
        self.real.append(path, &[], false).await?;
        Ok(lock)
    }
}

/// A folder with an input, and a server that rewards each rollout.
struct Ground {
    folder: tempfile::TempDir,
    servers: InProcess,
}

impl Ground {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("the test sets it up right");
        let padding = "x".repeat(PADDING);
        let rows = (0..TASKS).map(|task| {
            format!(r#"{{"responses_create_params":{{"input":[]}},"agent_ref":{{"name":"agent"}},"task":{task},"x":"{padding}"}}"#)
                + "\n"
        });
        std::fs::write(folder.path().join("tasks.jsonl"), rows.collect::<String>()).expect("the test sets it up right");
        let servers = InProcess::new();
        let listener = servers.listen("agent").expect("the test sets it up right");
        let answer = handler_fn(|request: Request| async move {
            let row = RawObject::parse(request.message.head.to_bytes())?;
            Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
        });
        tokio::spawn(serve(Box::new(listener), Arc::new(answer), CancelToken::new(), Duration::ZERO));
        Self { folder, servers }
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("results/rollouts.jsonl")
    }

    /// Runs one process of the collector. Returns its result and the number of outcomes that it acknowledged.
    async fn collect(&self, disk: &SimFiles) -> (Result<CollectSummary>, u64) {
        let output = self.output();
        let folder = output.parent().expect("the test sets it up right");
        let _ = std::fs::remove_dir_all(folder);
        std::fs::create_dir(folder).expect("the test sets it up right");
        for path in self.files() {
            if disk.length(&path).await.expect("the test sets it up right").is_some() {
                std::fs::write(&path, disk.contents(&path)).expect("the test sets it up right");
            }
        }
        let files = MirroredFiles { disk: disk.clone(), real: RealFiles::new() };
        let world = World::new(Arc::new(files), 1, Duration::ZERO);
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
        let collector = RolloutCollector::new(client, names, world);
        let mut options = CollectOptions::new(self.folder.path().join("tasks.jsonl"), output);
        options.existing = ExistingOutput::Resume;
        options.aggregate = false;
        // One after another, so that the same step is always the same place.
        options.driver.concurrency = 1;
        let ended = collector.collect(options, CancelToken::new()).await;
        (ended, collector.progress().snapshot().completed)
    }

    fn files(&self) -> [PathBuf; 4] {
        let OutputFiles { rollouts, failures, materialized, .. } = OutputFiles::beside(self.output());
        let index = index_path(&rollouts);
        [rollouts, failures, materialized, index]
    }

    fn rows(&self, disk: &SimFiles) -> usize {
        disk.contents(&self.output())
            .split(|byte| *byte == b'\n')
            .filter(|line| RawObject::parse(line.to_vec()).is_ok())
            .count()
    }
}

#[tokio::test]
async fn a_collection_that_ends_within_any_step_of_its_writes_is_completed_by_resumed_ones() {
    let ground = Ground::new();
    let mut ended = BTreeSet::new();
    for (end, seed) in [FileEnd::Kill, FileEnd::Crash, FileEnd::Crash].into_iter().zip(0..) {
        for step in 0.. {
            let mut disk = SimFiles::new(seed << 32 | step);
            disk.set_latency_max(Duration::ZERO);
            disk.end_at_step(step, end);
            let (first, acknowledged) = ground.collect(&disk).await;
            if !disk.has_ended() {
                first.unwrap();
                break;
            }
            ended.insert(step);
            let context = format!("{end:?} within step {step}, seed {seed}");
            disk = disk.next_process();
            assert!(ground.rows(&disk) as u64 >= acknowledged, "{context}: {acknowledged} were acknowledged");
            // The resumed run ends too, in some of its steps.
            disk.end_at_step((step * 7 + seed) % 29, end);
            let (again, more) = ground.collect(&disk).await;
            assert!(again.is_ok() || disk.has_ended(), "{context}: {again:?}");
            disk.clear_fault();
            disk = disk.next_process();
            assert!(ground.rows(&disk) as u64 >= acknowledged + more, "{context}: {more} more were acknowledged");
            let (last, _) = ground.collect(&disk).await;
            assert!(last.unwrap_or_else(|error| panic!("{context}: {error}")).is_complete(), "{context}");
            let rows = [0, 2].map(|file| String::from_utf8(disk.contents(&ground.files()[file])).unwrap());
            for rows in rows {
                let tasks: BTreeSet<u32> = rows
                    .lines()
                    .map(|row| RawObject::parse(row.to_owned()).unwrap().get_as("task").unwrap().unwrap())
                    .collect();
                assert_eq!((rows.lines().count(), tasks.len()), (TASKS, TASKS), "{context}");
            }
        }
    }
    assert!(ended.len() >= 15, "{ended:?}");
}
