//! A client of `https` origins outside the SDK, such as model endpoints and Ray's dashboard: HTTP/1.1 with reqwest and rustls.
//!
//! It is no transport: servers of the SDK speak no TLS. The system determines the trusted certificates; `SSL_CERT_FILE` names others.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::base::is_out_of_descriptors;
use gym_core::{CallContext, Code, Error, Execution, Result};
pub use http::{HeaderMap, HeaderName, HeaderValue, Method};
use reqwest::Client;
use reqwest::redirect::Policy;

/// The client of one `https` origin. It follows no redirects and uses no proxy.
#[derive(Clone, Debug)]
pub struct HttpsClient {
    client: Client,
    origin: String,
}

/// A complete response.
#[derive(Clone, Debug)]
pub struct HttpsResponse {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl HttpsClient {
    /// Creates a client of an origin such as `https://api.example.com`. Connects to nothing.
    ///
    /// # Errors
    /// `Internal` if the client cannot be created.
    pub fn to(origin: &str, connections_max: usize, connect_timeout: Duration) -> Result<Self> {
        static INSTALL: std::sync::Once = std::sync::Once::new();
        INSTALL.call_once(|| {
            // Fails if the program has installed its own provider, which is then used.
            let _ = rustls::crypto::ring::default_provider().install_default();
        });
        let client = Client::builder()
            .connect_timeout(connect_timeout)
            .pool_max_idle_per_host(connections_max)
            // uvicorn, and therefore vLLM, closes idle connections after 5 s; a request on a closing connection would be lost.
            .pool_idle_timeout(Duration::from_secs(4))
            .tcp_keepalive(Duration::from_secs(60))
            .redirect(Policy::none())
            .no_proxy()
            .http1_only()
            .build()
            .map_err(|error| {
                Error::internal("cannot set up the HTTP client").about(origin.to_owned()).caused_by(error)
            })?;
        Ok(Self { client, origin: origin.to_owned() })
    }

    /// Sends a request, and returns the complete response, whatever its status.
    ///
    /// # Errors
    /// `Unavailable` if there is no response, with `NotStarted` if the peer has received nothing; `ResourceExhausted` if the body is larger than
    /// `cx.reply_bytes_max`, and with `NotStarted` if this process has no file descriptor left; `DeadlineExceeded`.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection; the peer may have received the request.
    pub async fn send(
        &self,
        cx: &CallContext,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Option<Bytes>,
    ) -> Result<HttpsResponse> {
        // Boxed because the future is large.
        Box::pin(cx.bound(Execution::Unknown, async {
            let request = self.client.request(method, format!("{}{path}", self.origin)).headers(headers);
            let request = match body {
                Some(body) => request.body(body),
                None => request,
            };
            let mut response = request.send().await.map_err(of_reqwest)?;
            let too_large = |length: u64| {
                let text = format!("the answer has {length} bytes or more; at most {} are taken", cx.reply_bytes_max);
                Error::finished(Code::ResourceExhausted, text)
            };
            let limit = cx.reply_bytes_max as u64;
            if let Some(length) = response.content_length().filter(|length| *length > limit) {
                return Err(too_large(length));
            }
            let mut whole = BytesMut::new();
            while let Some(chunk) = response.chunk().await.map_err(of_reqwest)? {
                let length = (whole.len() + chunk.len()) as u64;
                if length > limit {
                    return Err(too_large(length));
                }
                whole.extend_from_slice(&chunk);
            }
            let headers = std::mem::take(response.headers_mut());
            Ok(HttpsResponse { status: response.status().as_u16(), headers, body: whole.freeze() })
        }))
        .await
    }
}

/// Returns `true` if the client does not trust the certificate of the peer. No repetition changes that.
#[must_use]
pub fn distrusts_certificate(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if matches!(error.downcast_ref(), Some(rustls::Error::InvalidCertificate(_))) {
            return true;
        }
        // The source of an I/O error is that of the error in it, not this error itself.
        let inner = error.downcast_ref().and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    false
}

/// Converts an error, and reports whether the peer can have received the request. Omits the URL, which may contain credentials.
fn of_reqwest(error: reqwest::Error) -> Error {
    let (code, execution, text) = match error.is_connect() {
        true if is_out_of_descriptors(&error) => (Code::ResourceExhausted, Execution::NotStarted, "cannot connect"),
        true => (Code::Unavailable, Execution::NotStarted, "cannot connect"),
        false => (Code::Unavailable, Execution::Unknown, "the connection was lost before the answer was complete"),
    };
    Error::new(code, execution, text).caused_by(error.without_url())
}
