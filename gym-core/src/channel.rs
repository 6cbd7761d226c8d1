//! The client end of one peer: what a transport implements ([`Link`]) and what everybody calls ([`Channel`]).
//!
//! A call has two steps: handed over, answered. Until it is handed over the peer has seen nothing, so a failure in the first
//! step is `NotStarted` and one in the second is `Unknown`. Every wait in either step ends at the call's deadline.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;

use crate::cancel::CancelToken;
use crate::context::{Incarnation, bounded};
use crate::error::{Code, Error, Execution, Result};
use crate::ladder::Level;
use crate::message::{Request, Response};

/// The answer still to come. Dropping it cancels the call; what the wire still reads or writes outlives the drop.
///
/// One that nobody polls keeps its room on the link: await it or drop it.
pub type Reply = BoxFuture<'static, Result<Response>>;

/// What a transport implements: one open path to one peer. Faults, recorders and throttles are links around a link.
#[async_trait]
pub trait Link: fmt::Debug + Send + Sync + 'static {
    /// Waits for room, hands the request over, and returns the answer still to come.
    ///
    /// Until it returns the peer has seen nothing: failing or being dropped here means `NotStarted`. From then on the request
    /// has arrived or is on its way; if `path().ordered`, in the order of these returns. It sets no timer: the channel does.
    async fn send(&self, request: Request) -> Result<Reply>;

    /// Hands the request over at once if nothing is to be waited for, and gives it back otherwise, for [`Link::send`]; order,
    /// room and failures are as there. A link that always has something to wait for leaves it.
    fn try_send(&self, request: Request) -> Handing {
        Handing::Waits(request)
    }

    /// How the peer is reached.
    fn path(&self) -> &PathInfo;

    /// Resolves when the peer is gone. A link that connects call by call never knows, and never resolves.
    async fn closed(&self) -> Error;

    /// Takes no new calls, waits up to `grace` for the running ones, and closes.
    async fn close(&self, grace: Duration) -> Result<()>;
}

/// What [`Link::try_send`] came to.
#[allow(clippy::large_enum_variant, reason = "a request comes back only where a call has to wait for room")]
pub enum Handing {
    /// It is handed over, or failed before it was.
    Done(Result<Reply>),
    /// Nothing has happened; this is the request.
    Waits(Request),
}

impl fmt::Debug for Handing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done(Ok(_)) => "Done",
            Self::Done(Err(_)) => "Failed",
            Self::Waits(_) => "Waits",
        })
    }
}

/// How a peer is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathInfo {
    /// The transport's scheme.
    pub scheme: &'static str,
    /// The peer's address, for logs.
    pub peer: Arc<str>,
    /// Whether requests arrive in the order in which `send` returned.
    pub ordered: bool,
    /// Whether the peer reads the caller's own memory, so that nothing need be written out for it.
    pub shares_memory: bool,
    /// The rung of the [`Ladder`](crate::Ladder) that was negotiated; `None` where the scheme alone says it.
    pub level: Option<Level>,
    /// What moves the bytes, as the transport names it, such as `posix/memory, cma/memory`; empty where the scheme says it.
    pub lanes: Arc<str>,
}

impl PathInfo {
    /// A path over a scheme to a peer.
    #[must_use]
    pub fn new(scheme: &'static str, peer: impl Into<Arc<str>>, ordered: bool) -> Self {
        Self { scheme, peer: peer.into(), ordered, ..Self::default() }
    }

    /// The same path, to a peer that reads the caller's own memory.
    #[must_use]
    pub fn sharing_memory(mut self) -> Self {
        self.shares_memory = true;
        self
    }

    /// The same path, with what was negotiated for it: the rung, and the lanes as the transport names them.
    #[must_use]
    pub fn at(mut self, level: Level, lanes: impl Into<Arc<str>>) -> Self {
        (self.level, self.lanes) = (Some(level), lanes.into());
        self
    }
}

/// The client end of one peer. Cheap to clone; also a tower service that is always ready.
#[derive(Clone, Debug)]
pub struct Channel {
    link: Arc<dyn Link>,
    incarnation: Option<Incarnation>,
}

impl Channel {
    /// A channel over a link.
    #[must_use]
    pub fn new(link: impl Link) -> Self {
        Self { link: Arc::new(link), incarnation: None }
    }

    /// The same channel, meant for one life of the peer: calls are stamped, and answers of another life are refused.
    #[must_use]
    pub fn fenced(mut self, incarnation: Option<Incarnation>) -> Self {
        self.incarnation = incarnation;
        self
    }

    /// Room, hand over, answer: all under the request's deadline.
    ///
    /// # Errors
    /// `NotStarted` up to the hand-over, `Unknown` after it. Any complete answer is `Ok`, 404 and 500 too.
    pub fn call(&self, request: Request) -> impl Future<Output = Result<Response>> + Send {
        // Not an async fn: what one is given stays in its future to the end, and a request is larger than the wait for its
        // answer.
        let begun = self.begin(request);
        async move {
            let Begun { incarnation, bounds, sending } = begun?;
            let reply = bounds.hold(Execution::NotStarted, sending).await?;
            let response = bounds.hold(Execution::Unknown, reply).await?;
            check_incarnation(incarnation, response)
        }
    }

    /// Hands the request over; the rest is awaited later. This is pipelining.
    ///
    /// # Errors
    /// `NotStarted` when it could not be handed over by the deadline.
    pub async fn start(&self, request: Request) -> Result<Reply> {
        let Begun { incarnation, bounds, sending } = self.begin(request)?;
        let reply = bounds.hold(Execution::NotStarted, sending).await?;
        Ok(Box::pin(async move {
            let response = bounds.hold(Execution::Unknown, reply).await?;
            check_incarnation(incarnation, response)
        }))
    }

    /// As [`Channel::start`], without a timer and a look at the clock: for who has one of each for many calls.
    #[cfg(feature = "groups")]
    pub(crate) async fn hand_over(&self, request: Request) -> Result<Reply> {
        match self.link.try_send(request) {
            Handing::Done(handed) => handed,
            Handing::Waits(request) => self.link.send(request).await,
        }
    }

    /// As [`Link::try_send`].
    #[cfg(feature = "groups")]
    pub(crate) fn try_hand_over(&self, request: Request) -> Handing {
        self.link.try_send(request)
    }

    /// Whether both are clones of one channel.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.link, &other.link)
    }

    /// How the peer is reached.
    #[must_use]
    pub fn path(&self) -> &PathInfo {
        self.link.path()
    }

    /// Resolves when the peer is gone.
    pub async fn closed(&self) -> Error {
        self.link.closed().await
    }

    /// Takes no new calls, waits up to `grace` for the running ones, and closes.
    ///
    /// # Errors
    /// `DeadlineExceeded` when calls were still running at the end of the grace.
    pub async fn close(&self, grace: Duration) -> Result<()> {
        self.link.close(grace).await
    }

    /// A passed deadline or a caller that has left is refused before anything is sent.
    fn begin(&self, mut request: Request) -> Result<Begun<'_>> {
        request.context.check()?;
        let incarnation = request.context.incarnation.or(self.incarnation);
        request.context.incarnation = incarnation;
        let bounds = Bounds::of(&request);
        Ok(Begun { incarnation, bounds, sending: self.link.send(request) })
    }
}

/// The metadata name under which a fenced host tells its incarnation.
pub const INCARNATION_METADATA: &str = "x-gym-incarnation";

/// Refuses an answer of another life than `expected`.
pub(crate) fn check_incarnation(expected: Option<Incarnation>, response: Response) -> Result<Response> {
    let Some(expected) = expected else { return Ok(response) };
    match response.metadata.get(INCARNATION_METADATA) {
        Some(answered) if answered.parse() != Ok(expected.0) => Err(Error::unknown(
            Code::Unavailable,
            format!("the answer is of incarnation {answered}; the call was meant for {expected}"),
        )),
        _ => Ok(response),
    }
}

/// A call whose request is in the link's hands.
struct Begun<'a> {
    incarnation: Option<Incarnation>,
    bounds: Bounds,
    sending: BoxFuture<'a, Result<Reply>>,
}

/// The deadline and the cancel token of one call.
struct Bounds {
    cancel: CancelToken,
    deadline: tokio::time::Instant,
}

impl Bounds {
    fn of(request: &Request) -> Self {
        Self { cancel: request.context.cancel.clone(), deadline: request.context.deadline }
    }

    /// Waits for `future` within the bounds; a wait that ends early means `execution`.
    async fn hold<T>(&self, execution: Execution, future: impl Future<Output = Result<T>>) -> Result<T> {
        bounded(&self.cancel, self.deadline, execution, future).await
    }
}

impl tower_service::Service<Request> for Channel {
    type Response = Response;
    type Error = Error;
    type Future = Reply;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Reply {
        let channel = self.clone();
        Box::pin(async move { Self::call(&channel, request).await })
    }
}
