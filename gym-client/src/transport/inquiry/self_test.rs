//! A test of a transport between two processes of this machine.

use std::io::Read as _;
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, ready};
use gym_core::transport::{ConnectOptions, ListenOptions, Transport, TransportPolicy, serve};
use gym_core::{CallContext, CancelToken, Channel, Endpoint, Handler, Request, Response, Result};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::Instant;

use super::MARK;
use crate::transport::Transports;

/// First argument that makes a process listen over a transport, until its standard input closes.
pub(super) const LISTENING_ROLE: &str = "--gym-self-test-listen";
/// First argument that makes a process call one that listens, and print what it measured.
pub(super) const CALLING_ROLE: &str = "--gym-self-test-call";

const ROUTE: &str = "/self-test";
/// Bytes of a small call: those of a tool call or a heartbeat.
const SMALL_BYTES: usize = 64;
const SMALL_CALLS: usize = 200;
/// Bytes of a large call: those of a batch.
const LARGE_BYTES: usize = 16 << 20;
/// Time for which large calls are made; at least two.
const LARGE_CALLS_TIMEOUT: Duration = Duration::from_millis(250);

/// The measurements between two processes of this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfTest {
    /// Median time from a small call (64 bytes) to its response, in microseconds.
    pub round_trip_us: f64,
    /// Bytes of large calls (16 MiB, one after the other) in a second, in GB/s (10⁹).
    pub gb_per_s: f64,
    /// The lanes that UCX negotiated; empty for other transports.
    pub lanes: String,
}

/// Connects two child processes over a transport that this program was built with, and measures small and large calls. Neither side computes anything, so
/// the figures are the transport's own on this machine; between machines, the network decides. [`enter`](crate::launch::enter) must have been called in this
/// program.
///
/// # Errors
/// The reason why the processes cannot connect over the transport; one of them crashed, or took longer than `within`.
pub async fn self_test(transport: Transport, within: Duration) -> Result<SelfTest, String> {
    let test = async {
        let mut command = super::child(LISTENING_ROLE)?;
        #[cfg(feature = "rdma")]
        command.envs(super::ucx::missing_variables());
        command.arg(transport.as_str()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut listening =
            command.spawn().map_err(|error| format!("the process that listens cannot be started: {error}"))?;
        let mut lines =
            BufReader::new(listening.stdout.take().ok_or("the process that listens has no output")?).lines();
        let endpoints = loop {
            match lines
                .next_line()
                .await
                .map_err(|error| format!("the process that listens cannot be read: {error}"))?
            {
                Some(line) => {
                    let answered = line.strip_prefix(MARK).map(serde_json::from_str::<Result<Vec<String>, String>>);
                    if let Some(Ok(endpoints)) = answered {
                        break endpoints?;
                    }
                }
                None => {
                    let status = listening.wait().await.map_err(|error| error.to_string())?;
                    return Err(format!("the process that listens {}", super::ended(status)));
                }
            }
        };
        let mut command = super::child(CALLING_ROLE)?;
        #[cfg(feature = "rdma")]
        command.envs(super::ucx::missing_variables());
        command.arg(transport.as_str()).args(endpoints);
        // The one that listens ends with its standard input.
        let measured = super::ask(command, "calls", within).await;
        drop(listening.stdin.take());
        measured
    };
    let ended = tokio::time::timeout(within, test).await;
    ended.unwrap_or_else(|_| Err(format!("the two processes took longer than {within:?}")))
}

/// Responds to each call without looking at it.
#[derive(Debug)]
struct Answering;

impl Handler for Answering {
    fn handle(&self, _: Request) -> BoxFuture<'static, Result<Response>> {
        Box::pin(ready(Ok(Response::json("{}"))))
    }
}

/// Listens over one transport until standard input closes, and prints the endpoints.
pub(super) fn listen(transport: &str) -> ! {
    let ended = in_runtime(async {
        let transports = only(transport)?;
        let place = ListenOptions::default().at(Ipv4Addr::LOCALHOST.to_string(), 0);
        let (listener, handler) = transports.listen(place, Arc::new(Answering), &[]).await?;
        let endpoints = listener.endpoints().iter().map(|endpoint| endpoint.as_str().to_owned()).collect::<Vec<_>>();
        let drain = CancelToken::new();
        let serving = tokio::spawn(serve(listener, handler, drain.clone(), Duration::ZERO));
        let _ = super::say(&Ok(endpoints));
        let _ = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0])).await;
        drain.cancel();
        let _ = serving.await;
        Ok(())
    });
    match ended {
        Ok(()) => std::process::exit(0),
        Err(error) => super::answer::<Vec<String>>(&Err(error)),
    }
}

/// Calls the first endpoint that can be reached over the transport.
pub(super) fn call(mut arguments: impl Iterator<Item = String>) -> Result<SelfTest, String> {
    let transport = arguments.next().unwrap_or_default();
    in_runtime(async {
        let endpoints = arguments.map(|endpoint| Endpoint::parse(&endpoint)).collect::<Result<Vec<_>>>()?;
        let cx = CallContext::within(Duration::from_secs(60));
        let channel = only(&transport)?.connect(&cx, &endpoints, &ConnectOptions::default()).await?;
        measure(&cx, &channel).await
    })
}

async fn measure(cx: &CallContext, channel: &Channel) -> Result<SelfTest> {
    let call = async |segment: &Bytes| {
        let mut request = Request::post(cx.child(), ROUTE, "{}");
        request.message.segments.push(segment.clone());
        channel.call(request).await?.into_result()
    };
    let small = Bytes::from(vec![7; SMALL_BYTES]);
    let mut times = Vec::with_capacity(SMALL_CALLS);
    for _ in 0..SMALL_CALLS {
        let begin = Instant::now();
        call(&small).await?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    let median = times[times.len() / 2];
    let large = Bytes::from(vec![7; LARGE_BYTES]);
    // The first one pays for buffers and their registration.
    call(&large).await?;
    let (begin, mut calls) = (Instant::now(), 0.0);
    while calls < 2.0 || begin.elapsed() < LARGE_CALLS_TIMEOUT {
        call(&large).await?;
        calls += 1.0;
    }
    let per_second = calls * LARGE_BYTES as f64 / begin.elapsed().as_secs_f64();
    let lanes = channel.path().lanes.to_string();
    Ok(SelfTest { round_trip_us: median.as_secs_f64() * 1e6, gb_per_s: per_second / 1e9, lanes })
}

/// Returns the transports of this program, restricted to one.
fn only(transport: &str) -> Result<Transports> {
    let transports = Transports::standard();
    let transport = Transport::named(transport, &transports.known())?;
    Ok(transports
        .scoped(&TransportPolicy::of([transport])?.require(transport.as_str()), Some(Ipv4Addr::LOCALHOST.into())))
}

fn in_runtime<T>(work: impl Future<Output = Result<T>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| format!("the runtime cannot be started: {error}"))?;
    runtime.block_on(work).map_err(|error| error.to_string())
}
