//! Calls `https` endpoints with reqwest and rustls.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::rollout::FailureClass;
use gym_core::{CallContext, Code, Error, Execution, Result};
use http::header::{HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::Client;
use reqwest::redirect::Policy;

use crate::model::upstream::response::EndpointResponse;

/// The client of one `https` origin.
pub(super) struct TlsClient {
    client: Client,
    origin: String,
    headers: HeaderMap,
}

impl TlsClient {
    /// Creates a client that sends `headers` with each request.
    ///
    /// # Errors
    /// `Internal` if the client cannot be created.
    pub(super) fn to(
        origin: &str,
        headers: &HeaderMap,
        connections_max: usize,
        connect_timeout: Duration,
    ) -> Result<Self> {
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
        Ok(Self { client, origin: origin.to_owned(), headers: headers.clone() })
    }

    /// Sends a JSON body with `POST`, or a `GET` without a body. Returns `Ok` for any complete response.
    pub(super) async fn send(&self, cx: &CallContext, path: &str, body: Option<Bytes>) -> Result<EndpointResponse> {
        // Boxed because the future is large.
        Box::pin(cx.bound(Execution::Unknown, async {
            let url = format!("{}{path}", self.origin);
            let request = match body {
                Some(body) => self.client.post(url).body(body),
                None => self.client.get(url),
            };
            let mut response = request.headers(self.headers.clone()).send().await.map_err(of_reqwest)?;
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
            let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok().map(str::to_owned));
            let (retry_after, location) = (header(RETRY_AFTER), header(LOCATION));
            Ok(EndpointResponse::new(response.status().as_u16(), retry_after, location, whole.freeze()))
        }))
        .await
    }
}

/// Returns `true` if the client does not trust the certificate of the endpoint.
fn distrusts(error: &reqwest::Error) -> bool {
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
    let (execution, text) = if error.is_connect() {
        (Execution::NotStarted, "cannot connect")
    } else {
        (Execution::Unknown, "the connection was lost before the answer was complete")
    };
    // No repetition changes a certificate, so this is an error of the configuration, not an endpoint that may respond later.
    let permanent = distrusts(&error);
    let error = Error::new(Code::Unavailable, execution, text).caused_by(error.without_url());
    if permanent { error.with_class(FailureClass::ModelError) } else { error }
}
