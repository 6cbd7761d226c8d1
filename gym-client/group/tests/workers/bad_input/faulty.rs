//! Programs that answer as a worker does, and lie.
//!
//! They are this executable, run as a worker whose type begins with `rogue-`: it takes its assignment by hand and then does not
//! keep to what a worker promises.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_client::transport::http::FramesConfig;
use gym_client::transport::http::frames::UnixListener;
use gym_core::transport::{INCARNATION_METADATA, Listener, handler_fn};
use gym_core::{CancelToken, Error, Handler, Message, Request, Response, Result, Verb};
use gym_group::Group;
use gym_group::LaunchSpec;
use gym_group::{Batch, Dispatch, Tensor, WorkerGroupExt};
use tokio::io::AsyncWriteExt;

use super::super::types::Describe;
use super::super::{LONG, local, options};
use super::{Case, outcome};

const GREETING: &str = "worker that reports a wrong address";
const ANSWER: &str = "rank that returns invalid replies";
const PREFIX: &str = "rogue-";

/// All types of rogues.
pub(crate) const FAULTY_WORKERS: [&str; 13] = [
    "rogue-twice",
    "rogue-nowhere",
    "rogue-nobody",
    "rogue-words",
    "rogue-scheme",
    "rogue-none",
    "rogue-noise",
    "rogue-short",
    "rogue-more",
    "rogue-rows",
    "rogue-other",
    "rogue-text",
    "rogue-life",
];

// ── the rogue itself ──

/// Becomes a rogue if this process is to be one.
pub(crate) fn enter() {
    if std::env::args().nth(1).as_deref() != Some("--gym-worker") {
        return;
    }
    let assignment: serde_json::Value = match std::env::var("GYM_WORKER").map(|text| serde_json::from_str(&text)) {
        Ok(Ok(assignment)) => assignment,
        _ => return,
    };
    let Some(lie) = assignment["worker"].as_str().and_then(|worker| worker.strip_prefix(PREFIX)) else { return };
    let token = assignment["token"].as_str().expect("a token").to_owned();
    let socket = PathBuf::from(assignment["door"]["socket"].as_str().expect("a path"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(be_faulty(lie.to_owned(), &token, socket));
    std::process::exit(0);
}

async fn be_faulty(lie: String, token: &str, socket: PathBuf) {
    let endpoint = format!("unix+frames://{}", socket.display());
    let serves = |endpoints: &[&str]| println!("\ngym-worker {token} {}", serde_json::json!({ "serves": endpoints }));
    match lie.as_str() {
        "nowhere" => serves(&[&format!("{endpoint}-elsewhere")]),
        "nobody" => serves(&[&format!("{endpoint}{}", "/deeper".repeat(20))]),
        "words" => serves(&["over there"]),
        "scheme" => serves(&["carrier+pigeon://roof"]),
        "none" => serves(&[]),
        "noise" => {
            let listener = tokio::net::UnixListener::bind(&socket).expect("binds");
            serves(&[&endpoint]);
            loop {
                let (mut peer, _) = listener.accept().await.expect("accepts");
                let _ = peer.write_all(&[0xee; 4096]).await;
            }
        }
        _ => {
            let listener = UnixListener::bind(&socket, FramesConfig::default()).expect("binds");
            let endpoint = listener.endpoints()[0].to_string();
            serves(&[&endpoint]);
            if lie == "twice" {
                serves(&["unix+frames:///somewhere/else"]);
            }
            let handler: Arc<dyn Handler> = Arc::new(handler_fn(move |request| answer(&lie, &request)));
            let _ = gym_core::transport::serve(Box::new(listener), handler, CancelToken::new(), Duration::ZERO).await;
            return;
        }
    }
    std::future::pending::<()>().await;
}

fn answer(lie: &str, request: &Request) -> BoxFuture<'static, Result<Response>> {
    let response = if request.verb == Verb::Get {
        Response::json(r#"{"rank":0,"incarnation":1,"waiting":0,"running":[],"succeeded":0,"failed":0}"#)
    } else {
        Response::new(gym_core::Status::OK, lied(lie))
    };
    let mut response = response;
    if lie == "life" && request.verb != Verb::Get {
        response.metadata.push(INCARNATION_METADATA, "7");
    }
    Box::pin(async move { Ok::<_, Error>(response) })
}

fn lied(lie: &str) -> Message {
    let truth = r#"{"pid":1,"incarnation":1,"variables":{},"init":{"name":"","number":0},"warmed":0}"#;
    let batch =
        Batch::empty().with("id", Tensor::from_vec([4], vec![1_i64, 2, 3, 4]).expect("four")).expect("one column");
    let (schema, mut segments) = batch.encode();
    let mut schema = serde_json::to_string(&schema).expect("JSON");
    match lie {
        "short" => segments[0] = segments[0].slice(..segments[0].len() - 1),
        "more" => segments.push(segments[0].clone()),
        "rows" => schema = schema.replace("[4]", "[4000000000]").replace(":4", ":4000000000"),
        "other" => return Message::json(r#"{"value":[1,2,3]}"#),
        "text" => return Message::json("good morning"),
        _ => return Message::json(format!(r#"{{"value":{truth}}}"#)),
    }
    Message { segments, ..Message::json(format!(r#"{{"value":{truth},"batch":{schema}}}"#)) }
}

// ── what the controller makes of it ──

/// A rogue that is found out at its start.
fn greeting(name: &'static str, worker: &'static str, outcome: &'static str, says: &'static [&'static str]) -> Case {
    Case::new(GREETING, name, outcome, says, move |fixture| {
        Box::pin(async move {
            let change = |spec: &mut LaunchSpec| {
                if worker == "rogue-words" {
                    spec.start_timeout = Duration::from_millis(300);
                }
            };
            fixture.starts(worker, change).await
        })
    })
}

/// A rogue that is found out at its first call.
fn call(name: &'static str, worker: &'static str, outcome: &'static str, says: &'static [&'static str]) -> Case {
    Case::new(ANSWER, name, outcome, says, move |fixture| {
        Box::pin(async move {
            let group: Group = fixture.start(&local(), fixture.spec(worker), options()).await.expect("starts");
            let got = outcome::called(group.call(Describe, ()).dispatch(Dispatch::rank(0)).deadline(LONG).await);
            group.shutdown(LONG).await.expect("stops");
            got
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    const FAILED: &str = "does not start: start_failed";
    const BAD: &str = "fails: bad_reply";
    vec![
        greeting("twice", "rogue-twice", "starts", &[]),
        greeting("without a listener", "rogue-nowhere", FAILED, &["rank 0", "-elsewhere", "cannot connect"]),
        greeting("an invalid path", "rogue-nobody", FAILED, &["rank 0", "/deeper"]),
        greeting("a sentence", "rogue-words", FAILED, &["rank 0", "did not say within 300ms where it serves"]),
        greeting("an unknown transport", "rogue-scheme", FAILED, &["rank 0", "carrier+pigeon", "unix+frames"]),
        greeting("nowhere", "rogue-none", FAILED, &["rank 0", "no transport here"]),
        greeting(
            "with a listener that sends noise",
            "rogue-noise",
            FAILED,
            &["it cannot be reached where it says that it serves", "no frame begins with"],
        ),
        call("a segment shorter than announced", "rogue-short", BAD, &["call describe of policy", "rank 0"]),
        call("one segment more than announced", "rogue-more", BAD, &["call describe of policy", "rank 0"]),
        call("more rows than fit in memory", "rogue-rows", BAD, &["call describe of policy", "rank 0"]),
        call("the reply of another method", "rogue-other", BAD, &["rank 0", "no reply of describe"]),
        call("a reply that is not JSON", "rogue-text", BAD, &["rank 0", "no reply of describe"]),
        call("a reply of another incarnation", "rogue-life", "fails: unreachable", &["rank 0", "incarnation 7"]),
    ]
}
