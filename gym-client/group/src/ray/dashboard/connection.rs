//! The connections to a dashboard, over `http` or `https`.

use std::time::Duration;

use bytes::Bytes;
use gym_core::transport::{ConnectOptions, Connector as _};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Request, Result, Route, Verb};
use gym_transport_http::HttpConfig;
use gym_transport_http::http1::HttpConnector;
#[cfg(feature = "tls")]
use gym_transport_http::https::{HttpsClient, distrusts_certificate};
use tokio::sync::OnceCell;

/// Limit of a connection.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// The TLS handshake comes on top of the connection.
#[cfg(feature = "tls")]
const TLS_CONNECT_TIME: Duration = Duration::from_secs(4);
/// Idle connections that are kept.
#[cfg(feature = "tls")]
const TLS_CONNECTIONS_MAX: usize = 4;

/// The connections to one dashboard.
#[derive(Debug)]
pub(super) enum Connection {
    Plain {
        endpoint: Endpoint,
        connector: Box<HttpConnector>,
        channel: OnceCell<Channel>,
    },
    #[cfg(feature = "tls")]
    Tls(HttpsClient),
}

impl Connection {
    /// Creates the connections to a URL without a path. Connects to nothing.
    ///
    /// # Errors
    /// `Unimplemented` for `https`, if this program was built without TLS.
    pub(super) fn to(dashboard: &str) -> Result<Self> {
        if dashboard.starts_with("https:") {
            #[cfg(feature = "tls")]
            return HttpsClient::to(dashboard, TLS_CONNECTIONS_MAX, TLS_CONNECT_TIME).map(Self::Tls);
            #[cfg(not(feature = "tls"))]
            return Err(Error::not_started(
                Code::Unimplemented,
                format!(
                    "{dashboard} is https, and this program was built without TLS\n  fix: build it with the feature `tls` of gym-client (for rgym: of \
                     gym-server), or use the http address inside the cluster's network"
                ),
            ));
        }
        let mut config = HttpConfig::default();
        config.connect_timeout = CONNECT_TIME;
        let connector = HttpConnector::new(config);
        Ok(Self::Plain {
            endpoint: Endpoint::parse(dashboard)?,
            connector: Box::new(connector),
            channel: OnceCell::new(),
        })
    }

    /// Sends a request with the headers in `cx.metadata`, and returns the status and the body.
    pub(super) async fn send(
        &self,
        cx: CallContext,
        verb: Verb,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<(u16, Bytes)> {
        match self {
            Self::Plain { endpoint, connector, channel } => {
                let options = ConnectOptions::default();
                let channel = channel.get_or_try_init(|| connector.connect(&cx, endpoint, &options)).await?;
                let mut request = match body {
                    Some(body) => Request::post(cx, Route::from(path.to_owned()), body),
                    None => Request::get(cx, Route::from(path.to_owned())),
                };
                request.verb = verb;
                let answer = channel.call(request).await?;
                Ok((answer.status.0, answer.message.head.to_bytes()))
            }
            #[cfg(feature = "tls")]
            Self::Tls(client) => tls(client, &cx, verb, path, body).await,
        }
    }
}

#[cfg(feature = "tls")]
async fn tls(
    client: &HttpsClient,
    cx: &CallContext,
    verb: Verb,
    path: &str,
    body: Option<Bytes>,
) -> Result<(u16, Bytes)> {
    use gym_transport_http::https::{HeaderMap, HeaderName, HeaderValue, Method};

    let wrong = |what: &str| Error::invalid(format!("{what} cannot be a header of HTTP"));
    let mut headers = HeaderMap::new();
    if body.is_some() {
        headers.insert("content-type", HeaderValue::from_static("application/json"));
    }
    for (name, value) in cx.metadata.iter() {
        // The value may be a token, so no error shows it.
        let value = HeaderValue::from_str(value).map_err(|_| wrong("a value"))?;
        headers.insert(HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong(name))?, value);
    }
    let method = Method::from_bytes(verb.as_str().as_bytes()).map_err(|_| wrong(verb.as_str()))?;
    let response = client.send(cx, method, path, headers, body).await.map_err(|error| {
        if !distrusts_certificate(&error) {
            return error;
        }
        let message = "this machine does not trust the certificate of the dashboard\n  fix: name a file with the certificate of its authority in \
                       SSL_CERT_FILE, and use a host name that the certificate has";
        Error::not_started(Code::FailedPrecondition, message).caused_by(error)
    })?;
    Ok((response.status, response.body))
}
