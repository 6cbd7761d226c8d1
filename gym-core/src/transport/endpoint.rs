//! Endpoints, and the traits that open channels to them and accept peers at them.
//!
//! A transport implements [`Connector`] for the calling side, and [`Listener`] with [`Incoming`] for the answering side. Both
//! exchange [`Request`](crate::Request)s and [`Response`](crate::Response)s.

use std::fmt;
use std::sync::Arc;

use crate::base::cancel::CancelToken;
use async_trait::async_trait;

use crate::base::error::{Error, Result};
use crate::message::PeerInfo;
use crate::message::{CallContext, Incarnation};
use crate::transport::Channel;
use crate::transport::Handler;
use crate::transport::Transport;

/// The address of a peer: a scheme, and a part that only the transport of that scheme interprets, such as
/// `http://127.0.0.1:11000` or `mem://policy_model`.
///
/// ```
/// use gym_core::Endpoint;
///
/// let head = Endpoint::parse("http://10.0.0.7:11000")?;
/// assert_eq!((head.scheme(), head.address()), ("http", "10.0.0.7:11000"));
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    text: Arc<str>,
    scheme_len: usize,
}

impl Endpoint {
    /// Parses `scheme://address`.
    ///
    /// # Errors
    /// `InvalidArgument` if the scheme or the address is missing.
    pub fn parse(text: &str) -> Result<Self> {
        match text.split_once("://") {
            Some((scheme, address)) if !scheme.is_empty() && !address.is_empty() => {
                Ok(Self { text: text.trim_end_matches('/').into(), scheme_len: scheme.len() })
            }
            _ => Err(Error::invalid(format!("`{text}` is not an endpoint; write scheme://address"))),
        }
    }

    /// Returns the part before `://`.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.text[..self.scheme_len]
    }

    /// Returns the part after `://`, without a slash at the end.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.text[self.scheme_len + 3..]
    }

    /// Returns the whole endpoint.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// Returns host and port as they stand in a URL: an IPv6 address in brackets (RFC 3986, section 3.2.2).
#[must_use]
pub fn host_port(host: &str, port: u16) -> String {
    let host = bare_host(host);
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns a host without the brackets of a URL around an IPv6 address.
#[must_use]
pub fn bare_host(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
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

/// Options of a new channel. The default is any incarnation and any transport.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// The incarnation of the peer; calls that reach another incarnation are rejected.
    pub incarnation: Option<Incarnation>,
    /// The requested transport, for a connector that has several: the connector fails, with the reason, rather than use another
    /// one. `None` selects the most preferred transport that works. A connector with one transport can ignore the field.
    pub transport: Option<Transport>,
    /// `true` if the caller watches the peer in another way. A silent peer then ends the connection at neither end: the peer may compute for minutes on
    /// the threads that serve its connections. Transports without heartbeats can ignore the field. Default: `false`.
    pub watched: bool,
}

impl ConnectOptions {
    /// Creates options for a channel to one incarnation of a peer.
    #[must_use]
    pub fn to_incarnation(incarnation: Incarnation) -> Self {
        Self { incarnation: Some(incarnation), ..Self::default() }
    }

    /// Returns the options for a peer that is [watched](Self::watched) in another way.
    #[must_use]
    pub fn watched(mut self) -> Self {
        self.watched = true;
        self
    }

    /// Returns the options with this transport as the only allowed one.
    #[must_use]
    pub fn at(mut self, transport: Transport) -> Self {
        self.transport = Some(transport);
        self
    }
}

/// Opens channels to endpoints of one scheme. Each call opens an independent channel.
///
/// A failure to connect is `Unavailable, NotStarted`. A transport that connects lazily may report it from the first call instead.
#[async_trait]
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// Returns the scheme of its endpoints, such as `http`.
    fn scheme(&self) -> &'static str;

    /// Returns the transports over which the connector reaches its endpoints, most preferred first. The default is one transport
    /// with the name of the scheme, preferred over `http`. A connector with several honors [`ConnectOptions::transport`].
    fn transports(&self) -> Vec<Transport> {
        vec![Transport::new(self.scheme(), 350)]
    }

    /// Opens a channel, within the context's deadline.
    ///
    /// # Errors
    /// `Unavailable`, not started, if no connection can be opened.
    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel>;
}

/// Accepts peers. Transient accept errors are retried inside; an `Err` means that this listener is finished.
#[async_trait]
pub trait Listener: fmt::Debug + Send + 'static {
    /// Returns the endpoints at which peers reach the listener, most preferred first. A registration contains the same list.
    fn endpoints(&self) -> &[Endpoint];

    /// Accepts the next peer. Cancel safe: dropping the future loses no peer.
    ///
    /// # Errors
    /// The error that finished the listener.
    async fn accept(&mut self) -> Result<Box<dyn Incoming>>;
}

/// One accepted peer.
#[async_trait]
pub trait Incoming: fmt::Debug + Send + 'static {
    /// Returns the identity of the peer.
    fn peer(&self) -> &PeerInfo;

    /// Serves the peer's calls with `handler`. Returns when the peer disconnects, or soon after `drain` fires: the connection then
    /// rejects new calls and running calls finish. Dropping the future breaks the connection: running calls are dropped, and their
    /// callers get `Unavailable, Unknown`.
    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_address_has_brackets_in_a_url_and_nowhere_else() {
        for (host, place, bare) in [
            ("127.0.0.1", "127.0.0.1:7", "127.0.0.1"),
            ("name", "name:7", "name"),
            ("::1", "[::1]:7", "::1"),
            ("[::1]", "[::1]:7", "::1"),
            ("fe80::1%eth0", "[fe80::1%eth0]:7", "fe80::1%eth0"),
            ("", ":7", ""),
            ("[", "[:7", "["),
        ] {
            assert_eq!((host_port(host, 7).as_str(), bare_host(host)), (place, bare), "{host}");
        }
    }
}
