//! The export of spans to an OpenTelemetry collector (OTLP over HTTP): a bounded queue, and one task that sends what is in it.
//!
//! A rollout never waits for the export. While the queue is full, spans are dropped and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_client::transport::http::origin::{OriginClient, OriginOptions};
use gym_core::message::ContentType;
use gym_core::{CallContext, CancelToken, Code, Message, Request, Result, Route};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinHandle;

use crate::cli::console::otlp::wire::{self, SpanRecord};

/// The standard variable with the address of the collector.
pub(in crate::cli) const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Spans that wait: some seconds of a thousand rollouts a second, in at most some megabytes.
const WAITING_MAX: usize = 16_384;
/// Spans of one request: some hundred kilobytes.
const BATCH_MAX: usize = 1_024;
/// Time in which spans are gathered for one request.
const BATCH_TIMEOUT: Duration = Duration::from_millis(500);
/// Limit for a request. A collector that takes longer gets no more of these spans.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a request that runs when the program ends, and for the last spans: more than two requests.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The ends of the queue, before there is a runtime.
pub(in crate::cli) struct ExportSetup {
    origin: String,
    client: OriginClient,
    path: String,
    queue: Receiver<SpanRecord>,
    counts: Arc<ExportCounts>,
}

/// Takes spans that have ended, and never waits.
#[derive(Clone, Debug)]
pub(super) struct SpanQueue {
    sender: Sender<SpanRecord>,
    counts: Arc<ExportCounts>,
}

/// The counts of spans by their outcome.
#[derive(Debug, Default)]
struct ExportCounts {
    dropped: AtomicU64,
}

impl SpanQueue {
    pub(super) fn push(&self, span: SpanRecord) {
        if self.sender.try_send(span).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl ExportSetup {
    /// Parses the address of the collector: `http://HOST:4318` or `https://HOST`, to which the path `/v1/traces` is added.
    ///
    /// # Errors
    /// Why no spans can be sent there, with the variable. It ends no command: clusters set the variable for every container.
    pub(super) fn new(url: &str) -> Result<(Self, SpanQueue), String> {
        let wrong = |why: &str| {
            format!(
                "{ENDPOINT_VARIABLE}={url}: {why}, so no spans are exported; write the address of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318"
            )
        };
        let url = url.trim();
        let Some((scheme @ ("http" | "https"), rest)) = url.split_once("://") else {
            return Err(wrong("the scheme is neither http nor https"));
        };
        let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
        let valid = address.parse::<http::uri::Authority>().is_ok_and(|to| !to.host().is_empty());
        if !valid {
            return Err(wrong("it has no valid host"));
        }
        let origin = format!("{scheme}://{address}");
        let mut options = OriginOptions::default();
        options.connections_max = 1;
        let client = OriginClient::to(&origin, options).map_err(|error| match error.code() {
            Code::Unimplemented => wrong("this program was built without TLS (the feature `tls` of gym-server)"),
            _ => wrong("it is not a URL"),
        })?;
        let path = match path.trim_end_matches('/') {
            "" => "/v1/traces".to_owned(),
            path => format!("/{path}/v1/traces"),
        };
        let (sender, queue) = channel(WAITING_MAX);
        let counts = Arc::new(ExportCounts::default());
        Ok((Self { origin, client, path, queue, counts: Arc::clone(&counts) }, SpanQueue { sender, counts }))
    }

    /// Begins to send, within a runtime.
    pub(in crate::cli) fn start(self) -> SpanExport {
        let ended = CancelToken::new();
        let counts = Arc::clone(&self.counts);
        let task = tokio::spawn(self.send_all(ended.clone()).boxed());
        SpanExport { ended, task, counts }
    }

    async fn send_all(mut self, ended: CancelToken) {
        let service = std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| "gym".to_owned());
        let resource = [("service.name", service), ("process.pid", std::process::id().to_string())];
        let mut warned = false;
        let mut last = false;
        while !last {
            let mut spans = Vec::new();
            let gathering = async {
                let Some(first) = self.queue.recv().await else { return true };
                spans.push(first);
                let rest = async {
                    while spans.len() < BATCH_MAX {
                        let Some(span) = self.queue.recv().await else { return true };
                        spans.push(span);
                    }
                    false
                };
                tokio::time::timeout(BATCH_TIMEOUT, rest).await.unwrap_or(false)
            };
            last = tokio::select! {
                biased;
                () = ended.cancelled() => true,
                closed = gathering => closed,
            };
            if last {
                while let Ok(span) = self.queue.try_recv() {
                    spans.push(span);
                }
            }
            if spans.is_empty() {
                continue;
            }
            let body = wire::request(&resource, &spans);
            if let Err(error) = self.send(body).await {
                self.counts.dropped.fetch_add(spans.len() as u64, Ordering::Relaxed);
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!(endpoint = self.origin, %error, "spans are not exported");
                }
            }
        }
    }

    async fn send(&self, body: Vec<u8>) -> Result<()> {
        let mut request = Request::post(CallContext::within(SEND_TIMEOUT), Route::from(self.path.clone()), "");
        request.message = Message::text(body);
        request.message.content_type = ContentType::Other("application/x-protobuf".into());
        self.client.send(request).await?.into_result().map(drop)
    }
}

/// A running export.
#[derive(Debug)]
pub(in crate::cli) struct SpanExport {
    ended: CancelToken,
    task: JoinHandle<()>,
    counts: Arc<ExportCounts>,
}

impl SpanExport {
    /// Sends what is left, within a limit. Returns the number of spans that were dropped.
    pub(in crate::cli) async fn end(mut self) -> u64 {
        self.ended.cancel();
        if tokio::time::timeout(FLUSH_TIMEOUT, &mut self.task).await.is_err() {
            self.task.abort();
        }
        self.counts.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_spans_and_counts_them() {
        let (setup, queue) = ExportSetup::new("http://127.0.0.1:4318/otel/").map_err(|_| ()).unwrap();
        assert_eq!((setup.origin.as_str(), setup.path.as_str()), ("http://127.0.0.1:4318", "/otel/v1/traces"));
        for _ in 0..WAITING_MAX + 3 {
            queue.push(SpanRecord::default());
        }
        assert_eq!(setup.counts.dropped.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn spans_that_no_collector_takes_are_counted_as_dropped() {
        // Reserved, and nothing listens there.
        let (setup, queue) = ExportSetup::new("http://127.0.0.1:1").map_err(|_| ()).unwrap();
        let export = setup.start();
        (0..5).for_each(|_| queue.push(SpanRecord::default()));
        assert_eq!(export.end().await, 5);
    }

    #[test]
    fn an_address_that_is_none_is_refused_with_an_example() {
        assert!(ExportSetup::new("http://collector").is_ok(), "the port of http is 80");
        #[cfg(feature = "tls")]
        assert!(ExportSetup::new("https://collector").is_ok());
        for url in ["127.0.0.1:4318", "http://", "http://:1", "http://a b", "grpc://h:4317", "word"] {
            let Err(text) = ExportSetup::new(url) else { panic!("{url} is accepted") };
            assert!(text.contains(url) && text.contains("http://127.0.0.1:4318"), "{text}");
        }
    }
}
