//! A load generator that is cheaper than any server. It sends prebuilt requests over raw sockets, and each connection sends the
//! next request after each response.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Maximum wait for a single response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Returns a request as it is sent over the wire.
#[must_use]
pub fn post(path: &str, body: &[u8]) -> Bytes {
    let length = body.len();
    let mut request = BytesMut::with_capacity(length + 256);
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    request.extend_from_slice(head.as_bytes());
    request.extend_from_slice(body);
    request.freeze()
}

/// The parameters of a load.
#[derive(Clone, Debug)]
pub struct Load {
    /// The server.
    pub address: SocketAddr,
    /// The complete request.
    pub request: Bytes,
    /// The number of connections, each with one request in flight.
    pub connections: usize,
    /// Maximum number of requests.
    pub count_max: u64,
    /// The time after which no request is sent.
    pub time_max: Duration,
}

/// The result of a load.
#[derive(Clone, Debug)]
pub struct Done {
    /// Responses with a status below 300.
    pub answered: u64,
    /// All other results: other statuses, broken connections, no response in time.
    pub errors: u64,
    /// The time from the first request to the last response.
    pub wall: Duration,
    /// The time until the first response.
    pub first: Duration,
    /// The time from a request to its response.
    pub latency: Histogram<u64>,
}

impl Done {
    /// Returns the responses per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.answered as f64 / self.wall.as_secs_f64().max(1e-9)
    }

    /// Returns a quantile of the latency in microseconds.
    #[must_use]
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1_000.0
    }
}

impl Load {
    /// Connects, then sends requests until the count or the time is reached. Connecting is not measured.
    ///
    /// # Errors
    /// An error if the server cannot be reached.
    pub async fn run(&self) -> Result<Done> {
        let mut streams = Vec::with_capacity(self.connections);
        for _ in 0..self.connections {
            let stream =
                TcpStream::connect(self.address).await.with_context(|| format!("connect to {}", self.address))?;
            stream.set_nodelay(true)?;
            streams.push(stream);
        }
        let began = Instant::now();
        let shared = Arc::new(Shared {
            request: self.request.clone(),
            begun: AtomicU64::new(0),
            count_max: self.count_max,
            until: began + self.time_max,
        });
        let mut running = JoinSet::new();
        for stream in streams {
            running.spawn(connection(stream, Arc::clone(&shared), began));
        }
        let mut done = Done {
            answered: 0,
            errors: 0,
            wall: Duration::ZERO,
            first: Duration::MAX,
            latency: Histogram::new_with_max(600_000_000_000, 3)?,
        };
        while let Some(one) = running.join_next().await {
            let one = one.context("a load connection ended")?;
            done.errors += one.errors;
            done.answered += one.nanos.len() as u64;
            done.wall = done.wall.max(one.last);
            done.first = done.first.min(one.first.unwrap_or(Duration::MAX));
            for nanos in one.nanos {
                done.latency.saturating_record(nanos);
            }
        }
        Ok(done)
    }

    /// Sends one request, to check the response before the measurement.
    ///
    /// # Errors
    /// An error if the status is not 200.
    pub async fn check(&self) -> Result<()> {
        let once = Self { connections: 1, count_max: 1, ..self.clone() };
        let done = once.run().await?;
        ensure!(done.answered == 1, "{} did not answer 200 to {}", self.address, self.first_line());
        Ok(())
    }

    fn first_line(&self) -> String {
        String::from_utf8_lossy(self.request.split(|byte| *byte == b'\r').next().unwrap_or_default()).into_owned()
    }
}

struct Shared {
    request: Bytes,
    begun: AtomicU64,
    count_max: u64,
    until: Instant,
}

#[derive(Default)]
struct One {
    nanos: Vec<u64>,
    errors: u64,
    first: Option<Duration>,
    last: Duration,
}

async fn connection(mut stream: TcpStream, shared: Arc<Shared>, began: Instant) -> One {
    let mut one = One::default();
    let mut input = BytesMut::with_capacity(16 << 10);
    loop {
        let asked = Instant::now();
        if asked >= shared.until || shared.begun.fetch_add(1, Relaxed) >= shared.count_max {
            return one;
        }
        let answered = timeout_at(asked + ANSWER_TIMEOUT, exchange(&mut stream, &shared.request, &mut input)).await;
        let now = Instant::now();
        match answered {
            Ok(Ok(status)) if (200..300).contains(&status) => {
                one.nanos.push(u64::try_from((now - asked).as_nanos()).unwrap_or(u64::MAX));
                one.first.get_or_insert(now - began);
                one.last = now - began;
            }
            Ok(Ok(_)) => one.errors += 1,
            _ => {
                one.errors += 1;
                return one;
            }
        }
    }
}

/// Sends one request and reads its complete response. Returns the status.
async fn exchange(stream: &mut TcpStream, request: &[u8], input: &mut BytesMut) -> Result<u16> {
    input.clear();
    stream.write_all(request).await?;
    let (status, length) = loop {
        if let Some(end) = memchr::memmem::find(input, b"\r\n\r\n") {
            let status = std::str::from_utf8(input.get(9..12).unwrap_or_default())?.parse()?;
            let length = content_length(&input[..end]).context("an answer without content-length")?;
            break (status, end + 4 + length);
        }
        read(stream, input).await?;
    };
    // Bytes that are not inspected are not kept: a megabyte of response passes through one small buffer.
    let mut left = length.saturating_sub(input.len());
    while left > 0 {
        input.clear();
        input.reserve(left.min(256 << 10));
        read(stream, input).await?;
        left = left.saturating_sub(input.len());
    }
    Ok(status)
}

async fn read(stream: &mut TcpStream, input: &mut BytesMut) -> Result<()> {
    if stream.read_buf(input).await? == 0 {
        bail!("the server closed the connection");
    }
    Ok(())
}

/// Returns the content length in the header section of a response.
pub(crate) fn content_length(head: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"content-length:";
    head.split(|byte| *byte == b'\n').find_map(|line| {
        let value = line.get(NAME.len()..).filter(|_| line[..NAME.len()].eq_ignore_ascii_case(NAME))?;
        std::str::from_utf8(value).ok()?.trim().parse().ok()
    })
}
