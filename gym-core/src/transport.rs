//! The transport seam: how channels are opened and peers accepted, whatever moves the bytes.
//!
//! A transport implements [`Connector`] for the calling end and [`Listener`] with [`Incoming`] for the answering end. Both
//! speak [`Request`](crate::Request) and [`Response`](crate::Response); what they do not offer has a default that says so.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::channel::Channel;
use crate::context::{CallContext, Incarnation};
use crate::error::{Error, Result};
use crate::handler::Handler;
use crate::ladder::Level;

/// Where a peer can be reached: a scheme and what that scheme's transport makes of the rest, such as
/// `http://127.0.0.1:11000` or `mem://policy_model`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    text: Arc<str>,
    scheme_len: usize,
}

impl Endpoint {
    /// Reads `scheme://address`.
    ///
    /// # Errors
    /// `InvalidArgument` when the scheme or the address is missing.
    pub fn parse(text: &str) -> Result<Self> {
        match text.split_once("://") {
            Some((scheme, address)) if !scheme.is_empty() && !address.is_empty() => {
                Ok(Self { text: text.trim_end_matches('/').into(), scheme_len: scheme.len() })
            }
            _ => Err(Error::invalid(format!("`{text}` is not an endpoint; write scheme://address"))),
        }
    }

    /// The part before `://`.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.text[..self.scheme_len]
    }

    /// The part after `://`, without a slash at the end.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.text[self.scheme_len + 3..]
    }

    /// The whole text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl serde::Serialize for Endpoint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> serde::Deserialize<'de> for Endpoint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// Who is at the other end of an accepted connection, as far as the transport knows.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PeerInfo {
    /// Where it called from, as the transport writes it.
    pub address: Arc<str>,
}

/// What a caller asks of a new channel.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// Which life of the peer is meant; calls that reach another are refused.
    pub incarnation: Option<Incarnation>,
    /// The one rung that is asked for, of a connector that has several: another one is an error, which says why this one cannot
    /// be. `None`: the best that it can. A connector with one way only need not look at it.
    pub level: Option<Level>,
}

impl ConnectOptions {
    /// Options of a channel to one particular life of a peer.
    #[must_use]
    pub fn to_incarnation(incarnation: Incarnation) -> Self {
        Self { incarnation: Some(incarnation), ..Self::default() }
    }

    /// The same, asking for this rung only.
    #[must_use]
    pub fn at(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }
}

/// Opens channels to endpoints of one scheme; asking twice gives two independent ones. A failure to connect is
/// `Unavailable, NotStarted`. A transport that connects lazily may report it from the first call instead.
#[async_trait]
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// The scheme it serves, such as `http`.
    fn scheme(&self) -> &'static str;

    /// Opens a channel, within the context's deadline.
    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel>;
}

/// Accepts peers. Transient accept errors are retried inside; an `Err` means that this listener is finished.
#[async_trait]
pub trait Listener: fmt::Debug + Send + 'static {
    /// Where peers can reach it, best first; a registration carries the same list.
    fn endpoints(&self) -> &[Endpoint];

    /// The next peer. Dropping the future loses none.
    async fn accept(&mut self) -> Result<Box<dyn Incoming>>;
}

/// One accepted peer.
#[async_trait]
pub trait Incoming: fmt::Debug + Send + 'static {
    /// Who it is.
    fn peer(&self) -> &PeerInfo;

    /// Answers its calls with `handler`. Ends when the peer leaves, or soon after `drain` fires: no new calls are taken,
    /// running calls finish. Dropping the future breaks the connection: running calls are dropped, their callers see
    /// `Unavailable, Unknown`.
    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancellationToken) -> Result<()>;
}
