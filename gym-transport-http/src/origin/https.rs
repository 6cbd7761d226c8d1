//! HTTP/1.1 over TLS, with reqwest and rustls.
//!
//! It is no transport: servers of the SDK speak no TLS. The system determines the trusted certificates; `SSL_CERT_FILE` names others.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use gym_core::base::is_out_of_descriptors;
use gym_core::{Code, Error, Execution, Message, Request, Response, Result, Status};
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use reqwest::Client;
use reqwest::redirect::Policy;

use crate::origin::OriginOptions;

/// The client of one `https` origin.
#[derive(Clone, Debug)]
pub(crate) struct HttpsClient {
    client: Client,
    origin: String,
    host: Option<HeaderValue>,
}

impl HttpsClient {
    /// Creates a client of an origin such as `https://api.example.com`. Connects to nothing.
    ///
    /// # Errors
    /// `Internal` if the client cannot be created; `InvalidArgument` for a host that no header can have.
    pub(crate) fn to(origin: &str, options: OriginOptions) -> Result<Self> {
        static INSTALL: std::sync::Once = std::sync::Once::new();
        INSTALL.call_once(|| {
            // Fails if the program has installed its own provider, which is then used.
            let _ = rustls::crypto::ring::default_provider().install_default();
        });
        let host = options.host.map(|host| header_value("host", &host)).transpose()?;
        let client = Client::builder()
            .connect_timeout(options.connect_timeout)
            .pool_max_idle_per_host(options.connections_max)
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
        Ok(Self { client, origin: origin.to_owned(), host })
    }

    /// Sends a request. The errors are those of the public client.
    pub(crate) async fn send(&self, request: Request) -> Result<Response> {
        let Request { verb, route, context: cx, message, .. } = request;
        let wrong = |_| Error::invalid(format!("`{}` is no method of HTTP", verb.as_str()));
        let method = Method::from_bytes(verb.as_str().as_bytes()).map_err(wrong)?;
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.extend(self.host.clone().map(|host| (HOST, host)));
        for (name, value) in cx.metadata.iter() {
            let known = HeaderName::from_bytes(name.as_bytes());
            let known = known.map_err(|_| Error::invalid(format!("`{name}` cannot be a header of HTTP")))?;
            headers.insert(known, header_value(name, value)?);
        }
        let body = message.head.to_bytes();
        if !body.is_empty() {
            headers.insert(CONTENT_TYPE, header_value("content-type", message.content_type.as_str())?);
        }
        // Boxed because the future is large.
        Box::pin(cx.bound(Execution::Unknown, async {
            let request = self.client.request(method, format!("{}{}", self.origin, route.as_str())).headers(headers);
            let request = if body.is_empty() { request } else { request.body(body) };
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
            let mut answer = Response::new(Status(response.status().as_u16()), Message::json(whole.freeze()));
            for (name, value) in response.headers() {
                if let Ok(value) = value.to_str() {
                    answer.metadata.push(name.as_str().to_owned(), value);
                }
            }
            Ok(answer)
        }))
        .await
    }
}

/// Returns a value of a header. It may be a token, so no error shows it, and no log.
fn header_value(name: &str, value: &str) -> Result<HeaderValue> {
    let wrong = |_| Error::invalid(format!("the header `{name}` has a character that no header can carry"));
    let mut value = HeaderValue::from_str(value).map_err(wrong)?;
    value.set_sensitive(name.eq_ignore_ascii_case("authorization"));
    Ok(value)
}

/// Returns why the client does not trust the certificate of the peer, if that is the cause. No repetition changes it.
pub(crate) fn distrust(error: &Error) -> Option<String> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(cause @ rustls::Error::InvalidCertificate(_)) = error.downcast_ref() {
            return Some(cause.to_string());
        }
        // The source of an I/O error is that of the error in it, not this error itself.
        let inner = error.downcast_ref().and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
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
