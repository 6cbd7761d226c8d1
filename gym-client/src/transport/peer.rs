//! A peer whose channel the first call opens; after the channel is lost, the next call opens it again.

use parking_lot::RwLock;

use futures_util::FutureExt;

use gym_core::rollout::FailureClass;
use gym_core::transport::ConnectOptions;
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Request, Response, Result};
use tokio::time::Instant;

use crate::transport::Transports;

/// A peer whose channel the first call opens; after the channel is lost, the next call opens it again.
#[derive(Debug)]
pub struct ReconnectingPeer {
    endpoints: Vec<Endpoint>,
    options: ConnectOptions,
    open: RwLock<Option<Channel>>,
    /// Held by the one caller that connects; the others wait for the result, which may be a failure.
    connecting: tokio::sync::Mutex<Option<FailedConnect>>,
}

/// The end of the last attempt to connect, if it failed.
#[derive(Debug)]
struct FailedConnect {
    at: Instant,
    code: Code,
    class: Option<FailureClass>,
    why: String,
}

impl ReconnectingPeer {
    /// Creates the peer at these endpoints, in order of preference. Connects nothing.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, options: ConnectOptions) -> Self {
        Self { endpoints, options, open: RwLock::default(), connecting: tokio::sync::Mutex::default() }
    }

    /// Returns the endpoints, in order of preference.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Returns the address of the peer: its name in this process if it is reached there, else the endpoint that every client supports.
    #[must_use]
    pub fn address(&self) -> Option<&Endpoint> {
        let in_process = self.channel().is_some_and(|channel| channel.path().scheme == "mem");
        if in_process { self.endpoints.first() } else { self.endpoints.last() }
    }

    /// Calls the peer. After the channel is lost, the next call opens a new one; calls in flight on the old one keep it.
    ///
    /// # Errors
    /// The error of the connection or of the call.
    pub fn call(&self, transports: &Transports, request: &Request) -> impl Future<Output = Result<Response>> + Send {
        self.call_with(transports, request, false)
    }

    /// Like [`ReconnectingPeer::call`], of a request that may be [`repeatable`](CallContext::repeatable) although its context does not say so.
    ///
    /// Not an async fn, whose future would hold the arguments twice. Neither are the other functions on the way of a call, because every rollout
    /// in flight waits in several of these futures.
    ///
    /// # Errors
    /// As [`ReconnectingPeer::call`].
    pub fn call_with(
        &self,
        transports: &Transports,
        request: &Request,
        repeatable: bool,
    ) -> impl Future<Output = Result<Response>> + Send {
        let mut open = self.channel();
        async move {
            let channel = match &mut open {
                Some(channel) => channel,
                // Boxed, because connecting is rare, and every waiting call would be as large otherwise.
                none => none.insert(Box::pin(self.connect(transports, &request.context)).await?),
            };
            let mut sent = request.clone();
            sent.context.repeatable |= repeatable;
            let result = channel.call(sent).await;
            if let Err(error) = &result {
                self.drop_if_lost(channel, error);
            }
            result
        }
    }

    /// Removes only the channel that failed, and only if it is closed: a pool of connections outlives a single failed connection.
    fn drop_if_lost(&self, channel: &Channel, error: &Error) {
        if error.code() == Code::Unavailable && error.execution() != Execution::Finished {
            let mut open = self.open.write();
            let failed = open.as_ref().is_some_and(|open| open.is_same(channel));
            if failed && channel.closed().now_or_never().is_some() {
                *open = None;
            }
        }
    }

    fn channel(&self) -> Option<Channel> {
        self.open.read().clone()
    }

    async fn connect(&self, transports: &Transports, cx: &CallContext) -> Result<Channel> {
        let from = Instant::now();
        cx.bound(Execution::NotStarted, async {
            // This fair lock is held during the connection attempt on purpose: all callers that wait here need the same channel.
            let mut one = self.connecting.lock().await;
            if let Some(channel) = self.channel() {
                return Ok(channel);
            }
            // And they share a failure: one after the other, a thousand callers would wait for as many failures.
            if let Some(FailedConnect { at, code, class, why }) = &*one
                && *at > from
            {
                let error = Error::not_started(*code, why.clone());
                return Err(match class {
                    Some(class) => error.with_class(*class),
                    None => error,
                });
            }
            let connected = transports.connect(cx, &self.endpoints, &self.options).await;
            *one = connected.as_ref().err().filter(|_| cx.check().is_ok()).map(|error| FailedConnect {
                at: Instant::now(),
                code: error.code(),
                class: error.class(),
                why: error.to_string(),
            });
            let channel = connected?;
            *self.open.write() = Some(channel.clone());
            Ok(channel)
        })
        .await
    }
}
