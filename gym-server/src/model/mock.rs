//! A TCP endpoint for tests that sends scripted responses.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Answers each `POST` with the next response, and closes its connection. An empty response leaves the connection open without a
/// reply. A `GET` has responses of its own, or 404; it is not counted.
#[derive(Debug)]
pub(super) struct MockEndpoint {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
    _server: JoinSet<()>,
}

/// Returns a complete HTTP response.
pub(super) fn answer(status: u16, body: &str) -> String {
    answer_with(status, "", body)
}

/// Returns a complete HTTP response with further headers, each of which ends with a line break.
pub(super) fn answer_with(status: u16, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status} x\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}")
}

impl MockEndpoint {
    pub(super) async fn new(answers: Vec<String>) -> Self {
        Self::with_gets(answers, &[]).await
    }

    /// Creates an endpoint with responses to `GET`: the path, and the response. Of several with the same path, each is sent once, but the last one.
    pub(super) async fn with_gets(answers: Vec<String>, gets: &[(&str, String)]) -> Self {
        let mut answers = answers.into_iter();
        let mut gets: Vec<(String, String)> =
            gets.iter().map(|(path, answer)| (format!("GET {path} "), answer.clone())).collect();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let mut server = JoinSet::new();
        let seen = Arc::clone(&requests);
        server.spawn(async move {
            let mut held = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !whole(&request) {
                    let mut chunk = [0; 4_096];
                    match stream.read(&mut chunk).await {
                        Ok(0) | Err(_) => break,
                        Ok(length) => request.extend_from_slice(&chunk[..length]),
                    }
                }
                let request = String::from_utf8(request).unwrap();
                let answer = if request.starts_with("GET ") {
                    let equal = |(start, _): &(String, String)| request.starts_with(start);
                    match gets.iter().position(equal) {
                        None => answer(404, "{}"),
                        Some(at) if gets[at + 1..].iter().any(equal) => gets.remove(at).1,
                        Some(at) => gets[at].1.clone(),
                    }
                } else if let Some(answer) = answers.next() {
                    seen.lock().push(request);
                    answer
                } else {
                    String::new()
                };
                if answer.is_empty() {
                    held.push(stream);
                } else {
                    // The client may close the connection before it has read everything.
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
        });
        Self { url, requests, _server: server }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn count(&self) -> usize {
        self.requests.lock().len()
    }

    /// Returns the head and body of a request.
    pub(super) fn request(&self, index: usize) -> String {
        self.requests.lock()[index].clone()
    }

    /// Returns the body of a request.
    pub(super) fn body(&self, index: usize) -> serde_json::Value {
        serde_json::from_str(self.request(index).split_once("\r\n\r\n").unwrap().1).unwrap()
    }
}

fn whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.parse().unwrap());
    body.len() >= length
}
