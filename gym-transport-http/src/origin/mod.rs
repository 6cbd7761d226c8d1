//! A client of one origin outside the SDK, such as a model endpoint, Ray's dashboard or an OpenTelemetry collector: HTTP/1.1 over `http`, and with the
//! feature `tls` over `https`.

#[cfg(feature = "tls")]
mod https;

use std::time::Duration;

use gym_core::transport::{ConnectOptions, Connector as _};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Request, Response, Result};
use tokio::sync::OnceCell;

use crate::http1::{HttpConfig, HttpConnector};
#[cfg(feature = "tls")]
use https::HttpsClient;

/// The connections to an origin.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OriginOptions {
    /// Maximum number of connections over `http`, and of idle connections that are kept over `https`. Default: that of [`HttpConfig`].
    pub connections_max: usize,
    /// Limit for a connection, with the handshake of TLS. Default: that of [`HttpConfig`].
    pub connect_timeout: Duration,
    /// Sends a request again if an idle connection was closed by its peer, although the peer may have received it. Default: `false`.
    pub repeats_on_new_connection: bool,
    /// The header `host`. Default: host and port of the origin.
    pub host: Option<String>,
}

impl Default for OriginOptions {
    fn default() -> Self {
        let HttpConfig { connections_max, connect_timeout, repeats_on_new_connection, .. } = HttpConfig::default();
        Self { connections_max, connect_timeout, repeats_on_new_connection, host: None }
    }
}

/// The client of one origin. It follows no redirects and uses no proxy.
#[derive(Debug)]
pub struct OriginClient(Scheme);

#[derive(Debug)]
enum Scheme {
    Http {
        endpoint: Endpoint,
        connector: Box<HttpConnector>,
        channel: OnceCell<Channel>,
    },
    #[cfg(feature = "tls")]
    Https(Box<HttpsClient>),
}

impl OriginClient {
    /// Creates a client of an origin: scheme, host and port, without a path. Connects to nothing.
    ///
    /// # Errors
    /// `Unimplemented` for `https` without the feature `tls`; `InvalidArgument` if the text is no origin.
    pub fn to(origin: &str, options: OriginOptions) -> Result<Self> {
        if origin.starts_with("https:") {
            #[cfg(feature = "tls")]
            return HttpsClient::to(origin, options).map(|client| Self(Scheme::Https(Box::new(client))));
            #[cfg(not(feature = "tls"))]
            return Err(Error::not_started(
                Code::Unimplemented,
                format!(
                    "{origin} is https, and this program was built without TLS\n  fix: build it with the feature `tls`"
                ),
            ));
        }
        let OriginOptions { connections_max, connect_timeout, repeats_on_new_connection, host } = options;
        let config =
            HttpConfig { connections_max, connect_timeout, repeats_on_new_connection, host, ..HttpConfig::default() };
        Ok(Self(Scheme::Http {
            endpoint: Endpoint::parse(origin)?,
            connector: Box::new(HttpConnector::new(config)),
            channel: OnceCell::new(),
        }))
    }

    /// Sends a request with the headers in its metadata, and returns the complete response, whatever its status.
    ///
    /// # Errors
    /// `Unavailable` if there is no response, with `NotStarted` if the peer has received nothing; `DataLoss` if the response is not HTTP;
    /// `ResourceExhausted` if the body is larger than `reply_bytes_max` of the context; `DeadlineExceeded`; `InvalidArgument` for a header that
    /// HTTP cannot send; `FailedPrecondition` with `NotStarted` if this machine does not trust the certificate of the origin, which no repetition changes.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection; the peer may have received the request.
    pub async fn send(&self, request: Request) -> Result<Response> {
        match &self.0 {
            Scheme::Http { endpoint, connector, channel } => {
                let options = ConnectOptions::default();
                // Opens no connection yet: each call opens one if it needs it.
                let connect = || async { connector.connect(&CallContext::default(), endpoint, &options).await };
                channel.get_or_try_init(connect).await?.call(request).await
            }
            #[cfg(feature = "tls")]
            Scheme::Https(client) => client.send(request).await.map_err(|error| match https::distrust(&error) {
                None => error,
                Some(cause) => Error::not_started(
                    Code::FailedPrecondition,
                    format!(
                        "this machine does not trust the certificate ({cause})\n  fix: name a file with the certificate of its authority in \
                         SSL_CERT_FILE, and use a host name that the certificate has"
                    ),
                ),
            }),
        }
    }
}
