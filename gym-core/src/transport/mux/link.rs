//! The link of a channel over an ordered connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::calling::CallingEnd;
use super::sender::MessageSender;
use crate::base::error::{Error, Result};
use crate::message::Request;
use crate::transport::{Link, PathInfo, Reply};

/// A link over one connection, which runs many calls concurrently. After the link is dropped, its last call closes the connection.
pub struct MuxLink<O: MessageSender> {
    end: Arc<CallingEnd<O>>,
    path: PathInfo,
}

impl<O: MessageSender> MuxLink<O> {
    /// Creates the link of a calling end.
    #[must_use]
    pub fn new(end: Arc<CallingEnd<O>>, path: PathInfo) -> Self {
        Self { end, path }
    }
}

impl<O: MessageSender> fmt::Debug for MuxLink<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MuxLink({}://{})", self.path.scheme, self.path.peer)
    }
}

#[async_trait]
impl<O: MessageSender> Link for MuxLink<O> {
    async fn send(&self, request: Request) -> Result<Reply> {
        let subject = |request: &Request| {
            format!("{} {} at {}://{}", request.verb, request.route, self.path.scheme, self.path.peer)
        };
        let pending = self.end.send(&request).await.map_err(|error| error.about(subject(&request)))?;
        let Request { verb, route, .. } = request;
        let path = self.path.clone();
        Ok(Box::pin(async move {
            pending
                .answered()
                .await
                .map_err(|error| error.about(format!("{verb} {route} at {}://{}", path.scheme, path.peer)))
        }))
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.end.over().await;
        self.end.lost(false).about(format!("{}://{}", self.path.scheme, self.path.peer))
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        self.end.close(grace).await.map_err(|error| error.about(self.path.peer.to_string()))
    }
}

impl<O: MessageSender> Drop for MuxLink<O> {
    fn drop(&mut self) {
        // Replies to started calls may still arrive, and the last of them closes the connection.
        self.end.refuse("the channel was dropped", true);
    }
}
