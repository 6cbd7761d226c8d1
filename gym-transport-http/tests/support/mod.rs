//! A raw client and a server under test.
#![allow(dead_code, unreachable_pub)] // Each test binary uses a part of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use gym_core::transport::{ConnectOptions, Connector, Listener};
use gym_core::{CallContext, CancelToken, Channel, Endpoint, Handler};
use gym_transport_http::http1::{HttpConfig, HttpConnector, HttpListener};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Far longer than any operation here takes, so that only a hang reaches it.
pub const TIMEOUT: Duration = Duration::from_secs(60);

pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("it does not hang")
}

/// A server with one handler.
pub struct Server {
    pub address: SocketAddr,
    pub drain: CancelToken,
    /// Number of connections accepted so far.
    pub accepted: watch::Receiver<usize>,
    accepting: JoinHandle<()>,
}

impl Server {
    pub fn start(config: HttpConfig, handler: impl Handler) -> Self {
        let mut listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), config).unwrap();
        let address = listener.local_address();
        let drain = CancelToken::new();
        let (count, accepted) = watch::channel(0);
        let draining = drain.clone();
        let handler: Arc<dyn Handler> = Arc::new(handler);
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    biased;
                    () = draining.cancelled() => break,
                    incoming = listener.accept() => {
                        count.send_modify(|count| *count += 1);
                        connections.spawn(incoming.unwrap().serve(Arc::clone(&handler), draining.clone()));
                    }
                }
            }
            drop(listener);
            while connections.join_next().await.is_some() {}
        });
        Self { address, drain, accepted, accepting }
    }

    pub async fn client(&self) -> Client {
        Client(TcpStream::connect(self.address).await.unwrap())
    }

    pub async fn end(&mut self) {
        soon(&mut self.accepting).await.unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

pub async fn channel_to(address: SocketAddr, config: HttpConfig) -> Channel {
    let endpoint = Endpoint::parse(&format!("http://{address}")).unwrap();
    let connector = HttpConnector::new(config);
    connector.connect(&within(), &endpoint, &ConnectOptions::default()).await.unwrap()
}

pub fn within() -> CallContext {
    CallContext::within(TIMEOUT)
}

/// A client that sends raw bytes.
pub struct Client(pub TcpStream);

/// A response as it was received.
#[derive(Debug)]
pub struct Answer {
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (known, value) = line.split_once(':')?;
            known.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

impl Client {
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        soon(self.0.write_all(bytes.as_ref())).await.unwrap();
    }

    pub async fn post(&mut self, route: &str, body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        let head = format!(
            "POST {route} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.write([head.as_bytes(), body].concat()).await;
    }

    /// Reads the next response.
    pub async fn answer(&mut self) -> Answer {
        soon(self.read_answer()).await
    }

    async fn read_answer(&mut self) -> Answer {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.expect("a whole head"));
        }
        let mut answer = Answer { head: String::from_utf8(head).unwrap(), body: Vec::new() };
        let length = answer.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        answer.body = vec![0; length];
        self.0.read_exact(&mut answer.body).await.expect("a whole body");
        answer
    }

    /// Reads the remaining bytes until the server closes.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        match soon(self.0.read_to_end(&mut rest)).await {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
        rest
    }
}
