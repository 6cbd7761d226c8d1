//! An endpoint that misbehaves; the first segment of the path selects the behavior.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Calls by behavior, and the number of open calls.
#[derive(Debug, Default)]
struct Seen {
    calls: BTreeMap<String, usize>,
    open: BTreeMap<String, usize>,
}

#[derive(Debug)]
pub(crate) struct Upstream {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    _serving: JoinSet<()>,
}

impl Upstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut serving = JoinSet::new();
        let shared = Arc::clone(&seen);
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, seen, _serving: serving }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of requests with this behavior so far.
    pub(crate) fn calls(&self, manner: &str) -> usize {
        self.seen.lock().calls.get(manner).copied().unwrap_or(0)
    }

    /// Returns the number of requests with this behavior whose client is still waiting.
    pub(crate) fn open(&self, manner: &str) -> usize {
        self.seen.lock().open.get(manner).copied().unwrap_or(0)
    }
}

async fn serve(mut stream: TcpStream, seen: Arc<Mutex<Seen>>) {
    while let Some((method, path, body)) = read_request(&mut stream).await {
        if method == "GET" && ["/models", "/metrics"].iter().any(|known| path.ends_with(known)) {
            // A question about the endpoint is no call.
            let none = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            // The client may have left. Calls get connections of their own.
            drop(stream.write_all(none).await);
            return;
        }
        let manner = path.trim_start_matches('/').split('/').next().unwrap_or_default().to_owned();
        let call = {
            let mut seen = seen.lock();
            *seen.open.entry(manner.clone()).or_default() += 1;
            let calls = seen.calls.entry(manner.clone()).or_default();
            *calls += 1;
            *calls
        };
        let goes_on = answer(&mut stream, &manner, call, &body).await;
        *seen.lock().open.get_mut(&manner).unwrap() -= 1;
        if !goes_on {
            return;
        }
    }
}

async fn read_request(stream: &mut TcpStream) -> Option<(String, String, String)> {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok())
                .unwrap_or(0);
            if body.len() >= length {
                let mut line = head.split(' ');
                return Some((line.next()?.to_owned(), line.next()?.to_owned(), body.to_owned()));
            }
        }
        let mut piece = [0; 4_096];
        let read = stream.read(&mut piece).await.ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&piece[..read]);
    }
}

/// Invalid tool arguments of a model, by behavior.
const ARGUMENTS: [(&str, &str); 5] = [
    ("tool_json", "{\"expression\": "),
    ("tool_type", "{\"expression\": [1, {\"a\": null}]}"),
    ("tool_list", "[1, 2]"),
    ("tool_deep", ""),
    ("tool_name", "{}"),
];

/// Returns `true` if the connection can be reused.
async fn answer(stream: &mut TcpStream, manner: &str, call: usize, body: &str) -> bool {
    let message = json!({
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "\\boxed{4}", "annotations": []}],
    });
    let good = |output: serde_json::Value| {
        json!({
            "id": "resp_1", "object": "response", "created_at": 0, "model": "m", "output": output, "status": "completed",
            "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
        })
        .to_string()
    };
    let error = |text: &str| json!({"error": {"message": text, "type": "server_error"}}).to_string();
    match manner {
        "s429" => put(stream, 429, "retry-after: 1\r\n", &error("slow down")).await,
        "s429_once" if call == 1 => put(stream, 429, "retry-after: 1\r\n", &error("slow down")).await,
        "s500" => put(stream, 500, "", &error("the engine is on fire")).await,
        "s401" => put(stream, 401, "", &error("who are you?")).await,
        "s400" => put(stream, 400, "", &error("maximum context length is 5 tokens")).await,
        "s503" => put(stream, 503, "", &error("loading the weights")).await,
        "max_tokens" => put(stream, 400, "", &error("max_tokens must be at least 1, got -186.")).await,
        "empty_object" => put(stream, 200, "", "{}").await,
        "failed" => {
            let failed =
                r#"{"status":"failed","output":[],"error":{"code":"server_error","message":"the GPU is gone"}}"#;
            put(stream, 200, "", failed).await
        }
        "redirect" => put(stream, 302, "location: /good/v1/responses\r\n", "").await,
        "hang" => {
            hold(stream).await;
            false
        }
        "garbage" => put(stream, 200, "", "<html>It works!</html>").await,
        "list" => put(stream, 200, "", "[1, 2, 3]").await,
        "not_http" => {
            let _ = stream.write_all(b"220 smtp.example ESMTP\r\n").await;
            false
        }
        "truncated" => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"id\": \"resp").await;
            false
        }
        "reset" => {
            let _ = stream.set_zero_linger();
            false
        }
        "endless" => {
            let head = b"HTTP/1.1 200 OK\r\ncontent-length: 100000000000\r\n\r\n{\"id\": \"";
            let _ = stream.write_all(head).await;
            hold(stream).await;
            false
        }
        "drip" => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n").await;
            while stream.write_all(b" ").await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
            false
        }
        "no_output" => put(stream, 200, "", r#"{"id": "resp_1", "object": "response"}"#).await,
        "text_output" => put(stream, 200, "", &good(json!("4"))).await,
        "empty_output" => put(stream, 200, "", &good(json!([]))).await,
        "unknown_item" => put(stream, 200, "", &good(json!([{"type": "hologram", "beam": 3}]))).await,
        "item_without_type" => put(stream, 200, "", &good(json!([{"role": "assistant"}]))).await,
        "call_without_name" => {
            put(stream, 200, "", &good(json!([{"type": "function_call", "call_id": "c", "arguments": "{}"}]))).await
        }
        _ => match ARGUMENTS.iter().find(|(known, _)| *known == manner) {
            Some((manner, arguments)) if !body.contains("function_call_output") => {
                let name = if *manner == "tool_name" { "../verify?x=\r\nhost: evil" } else { "calculator" };
                let arguments = if *manner == "tool_deep" { "[".repeat(100_000) } else { (*arguments).to_owned() };
                let call = json!({
                    "type": "function_call", "call_id": "c", "name": name, "arguments": arguments,
                    "id": "fc_1", "status": "completed",
                });
                put(stream, 200, "", &good(json!([call]))).await
            }
            _ => put(stream, 200, "", &good(json!([message]))).await,
        },
    }
}

async fn put(stream: &mut TcpStream, status: u16, headers: &str, body: &str) -> bool {
    let length = body.len();
    let text = format!("HTTP/1.1 {status} Said\r\n{headers}content-length: {length}\r\n\r\n{body}");
    stream.write_all(text.as_bytes()).await.is_ok()
}

/// Sends nothing until the client disconnects.
async fn hold(stream: &mut TcpStream) {
    let mut piece = [0; 64];
    while stream.read(&mut piece).await.is_ok_and(|read| read > 0) {}
}
