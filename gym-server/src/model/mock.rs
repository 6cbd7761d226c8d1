//! A TCP endpoint for tests that sends scripted responses.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Answers each request with the next response, and closes its connection. An empty response leaves the connection open without a
/// reply.
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
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let mut server = JoinSet::new();
        let seen = Arc::clone(&requests);
        server.spawn(async move {
            let mut held = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !whole(&request) {
                    let mut chunk = [0; 4_096];
                    match stream.read(&mut chunk).await {
                        Ok(0) | Err(_) => break,
                        Ok(length) => request.extend_from_slice(&chunk[..length]),
                    }
                }
                seen.lock().unwrap().push(String::from_utf8(request).unwrap());
                if answer.is_empty() {
                    held.push(stream);
                } else {
                    // The client may close the connection before it has read everything.
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
            std::future::pending::<()>().await;
        });
        Self { url, requests, _server: server }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }

    /// Returns the head and body of a request.
    pub(super) fn request(&self, index: usize) -> String {
        self.requests.lock().unwrap()[index].clone()
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
