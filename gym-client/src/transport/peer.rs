//! One peer whose channel is opened by the first call and opened again after it was lost.

use std::sync::{PoisonError, RwLock};

use futures_util::FutureExt;

use gym_core::transport::ConnectOptions;
use gym_core::{CallContext, Channel, Code, Endpoint, Execution, Request, Response, Result};

use crate::transport::Transports;

#[derive(Debug)]
pub(crate) struct ReconnectingPeer {
    endpoints: Vec<Endpoint>,
    options: ConnectOptions,
    open: RwLock<Option<Channel>>,
    /// One caller connects, the others wait for it.
    connecting: tokio::sync::Mutex<()>,
}

impl ReconnectingPeer {
    pub(crate) fn new(endpoints: Vec<Endpoint>, options: ConnectOptions) -> Self {
        Self { endpoints, options, open: RwLock::default(), connecting: tokio::sync::Mutex::default() }
    }

    pub(crate) fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Calls the peer. After a loss the next call opens a new channel; calls under way on the old one keep it.
    pub(crate) async fn call(&self, transports: &Transports, request: &Request) -> Result<Response> {
        let channel = match self.channel() {
            Some(channel) => channel,
            // Boxed, because it is rare and every waiting call would be as large.
            None => Box::pin(self.connect(transports, &request.context)).await?,
        };
        let result = channel.call(request.clone()).await;
        if let Err(error) = &result
            && error.code() == Code::Unavailable
            && error.execution() != Execution::Finished
        {
            // Only the channel that failed, and only if it is gone: a pool of connections outlives one of them.
            let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
            let failed = open.as_ref().is_some_and(|open| open.is_same(&channel));
            if failed && channel.closed().now_or_never().is_some() {
                *open = None;
            }
        }
        result
    }

    fn channel(&self) -> Option<Channel> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn connect(&self, transports: &Transports, cx: &CallContext) -> Result<Channel> {
        cx.bound(Execution::NotStarted, async {
            // A fair lock held over the connect on purpose: whoever waits here wants the same channel.
            let _one = self.connecting.lock().await;
            if let Some(channel) = self.channel() {
                return Ok(channel);
            }
            let channel = transports.connect(cx, &self.endpoints, &self.options).await?;
            *self.open.write().unwrap_or_else(PoisonError::into_inner) = Some(channel.clone());
            Ok(channel)
        })
        .await
    }
}
