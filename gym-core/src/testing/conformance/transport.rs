//! What every transport must do, whatever moves the bytes.
//!
//! Each case is a function with a name that reads as a sentence; a failure names its case. Nothing sleeps: cases wait for
//! events, under one deadline for all of them.

mod answers;
mod bounds;
mod endings;
mod ordered;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::channel::Channel;
use crate::context::CallContext;
use crate::handler::Handler;
use crate::message::Request;
use crate::transport::{ConnectOptions, Connector, Endpoint, Listener};

/// A deadline that no call is meant to reach.
const FAR: Duration = Duration::from_secs(20);
/// A deadline that a call is meant to reach.
const NEAR: Duration = Duration::from_millis(60);

/// What a case asks of a fresh pair.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TransportSetup {
    /// Calls that one channel can have under way.
    pub calls_max: usize,
    /// Bytes of the requests that one channel can have under way, where the transport bounds them.
    pub request_bytes_in_flight_max: usize,
}

/// Both ends of a transport, not yet connected.
pub type TransportPair = (Box<dyn Connector>, Box<dyn Listener>);

type Make<'a> = &'a dyn Fn(TransportSetup) -> LocalBoxFuture<'a, TransportPair>;

/// Runs every case against pairs that `make` builds. To be called within a tokio runtime with time and, where the transport
/// needs it, I/O.
///
/// # Panics
/// When a case fails; the message names it.
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

/// Runs what a transport must do beside [`transport`] if its calls are to arrive in the order in which they were sent, as worker groups
/// want it: every case against pairs that `make` builds.
///
/// # Panics
/// When a case fails; the message names it.
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
struct Bench {
    connector: Box<dyn Connector>,
    endpoint: Endpoint,
    drain: CancellationToken,
    /// Fires when nothing is accepted any more.
    deaf: CancellationToken,
    accepting: JoinHandle<()>,
}

impl Bench {
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
        let (drain, deaf) = (CancellationToken::new(), CancellationToken::new());
        let accepting = tokio::spawn(accept(listener, Arc::new(handler), drain.clone(), deaf.clone()));
        Self { connector, endpoint, drain, deaf, accepting }
    }

    async fn channel(&self) -> Channel {
        self.channel_with(&ConnectOptions::default()).await
    }

    async fn channel_with(&self, options: &ConnectOptions) -> Channel {
        self.connector.connect(&far(), &self.endpoint, options).await.expect("the listener accepts")
    }

    /// Has the server take nothing new; returns once its door is closed.
    async fn begin_drain(&self) {
        self.drain.cancel();
        self.deaf.cancelled().await;
    }

    /// Waits until all connections have ended.
    async fn end(&mut self) {
        (&mut self.accepting).await.expect("the server did not panic");
    }

    /// Ends the server without a farewell.
    async fn kill(&mut self) {
        self.accepting.abort();
        let ended = (&mut self.accepting).await;
        assert!(ended.is_err_and(|error| error.is_cancelled()), "the server was killed");
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    mut listener: Box<dyn Listener>,
    handler: Arc<dyn Handler>,
    drain: CancellationToken,
    deaf: CancellationToken,
) {
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
    deaf.cancel();
    while connections.join_next().await.is_some() {}
}

fn far() -> CallContext {
    CallContext::within(FAR)
}

fn near() -> CallContext {
    CallContext::within(NEAR)
}

fn post(cx: CallContext, route: &'static str) -> Request {
    Request::post(cx, route, "{}")
}

/// A handler's own account of what happens to its calls.
#[derive(Clone)]
struct Witness {
    started: mpsc::Sender<Request>,
    release: Arc<Notify>,
    dropped: mpsc::Sender<()>,
}

/// The case's end of a witness.
struct Seen {
    started: mpsc::Receiver<Request>,
    release: Arc<Notify>,
    dropped: mpsc::Receiver<()>,
}

/// More calls than any case makes.
const SEEN_MAX: usize = 1_024;

fn witness() -> (Witness, Seen) {
    let (started, started_seen) = mpsc::channel(SEEN_MAX);
    let (dropped, dropped_seen) = mpsc::channel(SEEN_MAX);
    let release = Arc::new(Notify::new());
    (
        Witness { started, release: Arc::clone(&release), dropped },
        Seen { started: started_seen, release, dropped: dropped_seen },
    )
}

impl Witness {
    /// Tells that a call has started; the guard tells, when it is dropped, that its future is gone.
    fn enter(&self, request: &Request) -> Told {
        self.started.try_send(request.clone()).expect("a case makes few calls");
        Told(self.dropped.clone())
    }
}

struct Told(mpsc::Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.try_send(());
    }
}

impl Seen {
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
