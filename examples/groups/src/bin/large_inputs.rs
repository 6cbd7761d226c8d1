//! A large input by reference, for ranks and for an environment: `cargo run --release -p gym-group-examples --bin large_inputs`.
//!
//! This program puts a corpus of 40 MB once. Two ranks in processes of their own get a reference with each call, and share the one copy of
//! this machine. The rows of a collection contain the reference too, and the environment reads the corpus to score an answer.

use std::time::Duration;

use gym_client::Transports;
use gym_client::values::{ValueRef, Values, ValuesOptions};
use gym_group::placement::ClusterSpec;
use gym_group::prelude::*;
use gym_group::{GroupOptions, GroupRequest, Local, VirtualCluster, WorkerKind, Workers};
use gym_server::{
    agent::SimpleAgent,
    model::{ScriptedItem, ScriptedModel},
    prelude::*,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

fn values() -> Values {
    Values::new(Transports::standard(), ValuesOptions::default())
}

#[derive(Clone, Serialize, Deserialize)]
struct Query {
    corpus: ValueRef,
    word: String,
}

/// A rank that searches its part of the corpus.
struct Search(Values, WorkerEnv);
worker! {
    impl Worker for Search as search {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> { Ok(Self(values(), env)) }
        /// Counts the documents with a word among those of the rank.
        shared async fn count(&self, cx: &CallContext, call: Payload<Query>) -> Result<Payload<usize>> {
            let documents: Vec<String> = self.0.fetch(cx, &call.value.corpus).await?.json().await?;
            let (rank, ranks) = (self.1.rank as usize, self.1.world_size as usize);
            let own = documents.iter().skip(rank).step_by(ranks);
            Ok(own.filter(|document| document.contains(&call.value.word)).count().into())
        }
    }
}

/// An environment whose verifier needs the corpus.
struct Lookup(Values);

#[derive(Deserialize)]
struct Task {
    corpus: ValueRef,
    document: usize,
}

impl ResourcesServer for Lookup {
    type Task = Task;

    async fn verify(&self, cx: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        let documents: Vec<String> = self.0.fetch(cx, &task.corpus).await?.json().await?;
        Ok(Verdict::correct(
            documents
                .get(task.document)
                .is_some_and(|text| response.last_text().is_ok_and(|last| text.starts_with(&last))),
        ))
    }
}

fn main() -> anyhow::Result<()> {
    let workers = Workers::new().with("search", WorkerKind::of::<Search>());
    // First, because ranks run this program too.
    workers.enter();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run(workers))
}

async fn run(workers: Workers) -> anyhow::Result<()> {
    let documents: Vec<String> = (0..1_000).map(|at| format!("document {at} {}", "text ".repeat(8_000))).collect();
    let values = values();
    let corpus = values.put("corpus", json!(documents).to_string()).await?;
    let text = json!(corpus.reference()).to_string();
    println!("a corpus of {} bytes, and a reference of {}", corpus.reference().bytes, text.len());

    let mut bundles = ClusterSpec::new([2]);
    bundles.use_gpus = false;
    let cluster = VirtualCluster::new(bundles, Local::new(workers))?;
    let cx = CallContext::within(Duration::from_secs(120));
    let request = GroupRequest::new("search", "search", &(), GroupOptions::new(Transports::standard()))?;
    let group = cluster.start(&cx, request).await?;
    for word in ["document 7", "nothing"] {
        let query = Query { corpus: corpus.reference().clone(), word: word.to_owned() };
        let counts = group.call(search::count, query).context(&cx).await?.into_values();
        println!("documents with `{word}`, by rank: {counts:?}; fetches by this machine: {}", corpus.fetches());
    }
    cluster.shutdown(Duration::from_secs(10)).await?;

    let stack = Stack::embedded()
        .resources("lookup", Lookup(values.clone()))
        .model(
            "policy",
            ScriptedModel::from_policy(|_: &RawObject, _: &mut _| vec![ScriptedItem::message("document 1")]),
        )
        .agent("lookup_agent", |client| SimpleAgent::between("policy", "lookup", client))
        .start()
        .await?;
    let row = |document| {
        let row = json!({"responses_create_params": {"input": "Name the document."}, "corpus": corpus.reference(), "document": document});
        RawObject::from_value(&row)
    };
    let rows = (0..4).map(row).collect::<Result<Vec<_>, _>>()?;
    let mut rollouts = stack.rollouts("lookup_agent", rows)?;
    let mut rewards = Vec::new();
    while let Some(rollout) = rollouts.next().await {
        let rollout = rollout?;
        rewards.push((rollout.key, rollout.outcome?));
    }
    rewards.sort_by_key(|(key, _)| *key);
    println!("rewards of the rows: {:?}", rewards.into_iter().map(|(_, reward)| reward).collect::<Vec<_>>());
    stack.stop().await;

    let gone = corpus.reference().clone();
    corpus.release();
    if let Err(error) = values.fetch(&cx, &gone).await {
        println!("after its release: {error}");
    }
    Ok(())
}
