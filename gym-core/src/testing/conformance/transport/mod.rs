//! The conformance suite of every transport.
//!
//! Each case is a function whose name is a sentence; a failure contains the name. No case sleeps: cases wait for
//! events, with a common deadline.

mod answers;
mod bounds;
mod endings;
mod ordered;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::base::cancel::CancelToken;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::message::CallContext;
use crate::message::Request;
use crate::transport::Channel;
use crate::transport::Handler;
use crate::transport::{ConnectOptions, Connector, Endpoint, Listener};

/// A deadline that no call reaches.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
/// A deadline that a call reaches.
const SHORT_TIMEOUT: Duration = Duration::from_millis(60);

/// The limits that a case requests of a new pair.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TransportSetup {
    /// Concurrent calls of one channel.
    pub calls_max: usize,
    /// Bytes of the requests in flight on one channel, if the transport bounds them.
    pub request_bytes_in_flight_max: usize,
}

/// Both ends of a transport, not yet connected.
pub type TransportPair = (Box<dyn Connector>, Box<dyn Listener>);

type Make<'a> = &'a dyn Fn(TransportSetup) -> LocalBoxFuture<'a, TransportPair>;

/// Runs all cases against pairs that `make` builds. Must be called within a tokio runtime with time and, if the
/// transport needs it, I/O.
///
/// # Panics
/// Panics if a case fails; the message contains its name.
pub async fn transport<F, Fut>(make: F)
where
    F: Fn(TransportSetup) -> Fut,
    Fut: Future<Output = TransportPair>,
{
    let make = |setup| make(setup).boxed_local();
    answers::run(&make).await;
    bounds::run(&make).await;
    endings::run(&make).await;
}

/// Runs the cases of an ordered transport, whose calls arrive in the order in which they were sent, as worker groups
/// require. Runs in addition to [`transport`], against pairs that `make` builds.
///
/// # Panics
/// Panics if a case fails; the message contains its name.
pub async fn ordered_transport<F, Fut>(make: F)
where
    F: Fn(TransportSetup) -> Fut,
    Fut: Future<Output = TransportPair>,
{
    ordered::run(&|setup| make(setup).boxed_local()).await;
}

macro_rules! run_cases {
    ($make:expr; $($case:ident),* $(,)?) => {
        $(crate::testing::conformance::run_case("transport", stringify!($case), $case($make)).await;)*
    };
}
use run_cases;

/// A server with one handler, and a connector to it.
struct Fixture {
    connector: Box<dyn Connector>,
    endpoint: Endpoint,
    drain: CancelToken,
    /// Fires when the server has stopped accepting.
    closed: CancelToken,
    accepting: JoinHandle<()>,
}

impl Fixture {
    async fn new(make: Make<'_>, handler: impl Handler) -> Self {
        Self::with_calls_max(make, 64, handler).await
    }

    async fn with_calls_max(make: Make<'_>, calls_max: usize, handler: impl Handler) -> Self {
        Self::with(make, TransportSetup { calls_max, request_bytes_in_flight_max: 4 << 30 }, handler).await
    }

    async fn with(make: Make<'_>, setup: TransportSetup, handler: impl Handler) -> Self {
        let (connector, listener) = make(setup).await;
        let endpoint = listener.endpoints().first().expect("a listener has an endpoint").clone();
        assert_eq!(endpoint.scheme(), connector.scheme(), "connector and listener have one scheme");
        let (drain, closed) = (CancelToken::new(), CancelToken::new());
        let accepting = tokio::spawn(accept(listener, Arc::new(handler), drain.clone(), closed.clone()));
        Self { connector, endpoint, drain, closed, accepting }
    }

    async fn channel(&self) -> Channel {
        self.channel_with(&ConnectOptions::default()).await
    }

    async fn channel_with(&self, options: &ConnectOptions) -> Channel {
        self.connector.connect(&far(), &self.endpoint, options).await.expect("the listener accepts")
    }

    /// Starts to drain the server. Returns when it has stopped accepting.
    async fn begin_drain(&self) {
        self.drain.cancel();
        self.closed.cancelled().await;
    }

    /// Waits until all connections have ended.
    async fn end(&mut self) {
        (&mut self.accepting).await.expect("the server did not panic");
    }

    /// Ends the server without a close handshake.
    async fn kill(&mut self) {
        self.accepting.abort();
        let ended = (&mut self.accepting).await;
        assert!(ended.is_err_and(|error| error.is_cancelled()), "the server was killed");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(mut listener: Box<dyn Listener>, handler: Arc<dyn Handler>, drain: CancelToken, closed: CancelToken) {
    let mut connections = JoinSet::new();
    loop {
        let incoming = tokio::select! {
            biased;
            () = drain.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept() => accepted.expect("the listener accepts"),
        };
        connections.spawn(incoming.serve(Arc::clone(&handler), drain.clone()));
    }
    drop(listener);
    closed.cancel();
    while connections.join_next().await.is_some() {}
}

fn far() -> CallContext {
    CallContext::within(LONG_TIMEOUT)
}

fn near() -> CallContext {
    CallContext::within(SHORT_TIMEOUT)
}

fn post(cx: CallContext, route: &'static str) -> Request {
    Request::post(cx, route, "{}")
}

/// Reports the calls of a handler to the case.
#[derive(Clone)]
struct CallProbe {
    started: mpsc::Sender<Request>,
    release: Arc<Notify>,
    dropped: mpsc::Sender<()>,
}

/// The receiving end of a [`CallProbe`].
struct ProbeEvents {
    started: mpsc::Receiver<Request>,
    release: Arc<Notify>,
    dropped: mpsc::Receiver<()>,
}

/// More calls than any case makes.
const SEEN_MAX: usize = 1_024;

fn probe() -> (CallProbe, ProbeEvents) {
    let (started, started_seen) = mpsc::channel(SEEN_MAX);
    let (dropped, dropped_seen) = mpsc::channel(SEEN_MAX);
    let release = Arc::new(Notify::new());
    (
        CallProbe { started, release: Arc::clone(&release), dropped },
        ProbeEvents { started: started_seen, release, dropped: dropped_seen },
    )
}

impl CallProbe {
    /// Reports that a call has started. The guard reports, when it is dropped, that the future of the call was dropped.
    fn enter(&self, request: &Request) -> DropNotice {
        self.started.try_send(request.clone()).expect("a case makes few calls");
        DropNotice(self.dropped.clone())
    }
}

struct DropNotice(mpsc::Sender<()>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        let _ = self.0.try_send(());
    }
}

impl ProbeEvents {
    async fn started(&mut self) -> Request {
        self.started.recv().await.expect("a call starts")
    }

    async fn dropped(&mut self) {
        self.dropped.recv().await.expect("a call's future is dropped");
    }

    fn nothing_started(&mut self) -> bool {
        self.started.try_recv().is_err()
    }
}
