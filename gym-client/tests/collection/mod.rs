//! A collection in a folder of its own, with a server that answers each row with the row's own answers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gym_client::collect::{CollectOptions, CollectSummary, RolloutCollector, ServerNames};
use gym_client::registry::StaticRegistry;
use gym_client::{ServerClient, Transports};
use gym_core::registry::Instance;
use gym_core::server::ServerKind;
use gym_core::transport::{InProcess, handler_fn, serve};
use gym_core::{CancelToken, Endpoint, Incarnation, RawObject, Request, Response, Result, World};
use serde_json::{Value, json};

/// A folder with an input, and a server that answers each row with the row's `answers`, one for each attempt.
pub(crate) struct Ground {
    pub(crate) folder: tempfile::TempDir,
    servers: InProcess,
}

impl Ground {
    pub(crate) fn new(tasks: &[Value]) -> Self {
        let folder = tempfile::tempdir().expect("the test sets it up right");
        let rows = tasks.iter().map(|answers| {
            let row =
                json!({"responses_create_params": {"input": []}, "agent_ref": {"name": "agent"}, "answers": answers});
            format!("{row}\n")
        });
        std::fs::write(folder.path().join("tasks.jsonl"), rows.collect::<String>()).expect("the test sets it up right");
        let servers = InProcess::new();
        let listener = servers.listen("agent").expect("the test sets it up right");
        let answer = handler_fn(|request: Request| async move {
            let row = RawObject::parse(request.message.head.to_bytes())?;
            let attempt: Option<usize> = row.get_as("_ng_attempt_index")?;
            let answers: Vec<Value> = row.get_as("answers")?.unwrap_or_default();
            let answer =
                answers.get(attempt.unwrap_or(0)).map_or_else(|| r#"{"reward":1.0}"#.to_owned(), Value::to_string);
            Ok(Response::json(answer))
        });
        tokio::spawn(serve(Box::new(listener), Arc::new(answer), CancelToken::new(), Duration::ZERO));
        Self { folder, servers }
    }

    pub(crate) fn events(&self) -> PathBuf {
        self.folder.path().join("events.jsonl")
    }

    pub(crate) fn options(&self) -> CollectOptions {
        let at = |name: &str| self.folder.path().join(name);
        let mut options = CollectOptions::new(at("tasks.jsonl"), at("rollouts.jsonl"));
        options.aggregate = false;
        options.driver.concurrency = 1;
        options.events = Some(self.events());
        options
    }

    pub(crate) async fn collect(&self, options: CollectOptions) -> Result<CollectSummary> {
        self.collector().collect(options, CancelToken::new()).await
    }

    pub(crate) fn collector(&self) -> RolloutCollector {
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
        RolloutCollector::new(client, self.names(), world)
    }

    pub(crate) fn names(&self) -> ServerNames {
        ServerNames::of_merged(&json!({"agent": {"responses_api_agents": {"small": {}}}}))
    }
}
