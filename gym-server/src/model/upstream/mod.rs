//! Calls one OpenAI-compatible endpoint over HTTP: bounded connections, bounded retries, deadlines, and errors that name the URL.
#![cfg_attr(
    not(any(feature = "http", feature = "tls")),
    expect(dead_code, unused_variables, reason = "without a client, an endpoint is refused when it is configured")
)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use gym_core::transport::RetryPolicy;
use gym_core::{CallContext, Code, Error, Execution, RawObject, Result, World};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use tokio::sync::Semaphore;

#[cfg(feature = "http")]
mod plain;
mod response;
#[cfg(feature = "tls")]
mod tls;
mod url;

use crate::model::secret::Secret;
use crate::role::model::EndpointRejection;
use crate::role::route;
#[cfg(feature = "http")]
use plain::PlainClient;
pub(super) use response::EndpointResponse;
#[cfg(feature = "tls")]
use tls::TlsClient;
use url::EndpointUrl;

/// Maximum connections to one endpoint; further requests wait, up to their deadlines. With a dozen servers in one process, more
/// connections would reach the limit of 20,000 file descriptors, which some machines cannot raise.
const CONNECTIONS_MAX: usize = 1_024;

/// After this time, the endpoint's machine is considered unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Connection attempts to an endpoint that refuses connections. Nothing was sent, so an attempt is cheap, and an engine that
/// restarts accepts connections again after a while.
const CONNECT_ATTEMPTS_MAX: u32 = 8;

/// Half a second between attempts, as in NeMo Gym, but doubled for each attempt and randomized.
const BACKOFF: RetryPolicy =
    RetryPolicy { attempts_max: 3, backoff_min: Duration::from_millis(500), backoff_max: Duration::from_secs(8) };

/// The statuses that NeMo Gym's client retries.
const RETRIED: [u16; 8] = [404, 408, 429, 500, 502, 503, 504, 520];

/// Maximum bytes of an endpoint's error body that an error shows.
const SHOWN_BYTES_MAX: usize = 2_000;

/// The options of an endpoint's client.
#[derive(Clone, Debug)]
pub(super) struct UpstreamOptions {
    /// The configuration key of the URL, for errors.
    pub(super) url_key: &'static str,
    pub(super) key: Option<Secret>,
    pub(super) headers: BTreeMap<String, Secret>,
    /// Maximum attempts of a request that the endpoint answers with a retryable status.
    pub(super) attempts_max: u32,
    /// The wait before the second attempt.
    pub(super) backoff_min: Duration,
}

impl UpstreamOptions {
    pub(super) fn new(url_key: &'static str, key: Option<Secret>, headers: BTreeMap<String, Secret>) -> Self {
        let RetryPolicy { attempts_max, backoff_min, .. } = BACKOFF;
        Self { url_key, key, headers, attempts_max, backoff_min }
    }
}

/// One endpoint. Cheap to clone; clones share its connections.
#[derive(Clone)]
pub(super) struct Upstream(Arc<UpstreamState>);

struct UpstreamState {
    client: EndpointClient,
    place: EndpointUrl,
    /// The URL without credentials and without a trailing slash.
    shown: String,
    connections: Semaphore,
    policy: RetryPolicy,
    rng: Mutex<fastrand::Rng>,
}

/// The HTTP client of the endpoint.
#[cfg_attr(
    all(feature = "http", feature = "tls"),
    expect(clippy::large_enum_variant, reason = "there is one for each endpoint, behind an Arc")
)]
enum EndpointClient {
    #[cfg(feature = "http")]
    Http(PlainClient),
    #[cfg(feature = "tls")]
    Https(TlsClient),
}

impl fmt::Debug for Upstream {
    /// Omits the URL's credentials and the headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Upstream({})", self.0.shown)
    }
}

impl Upstream {
    /// Creates a client of the endpoint at `base`.
    ///
    /// # Errors
    /// `InvalidArgument` with the key if the URL or a header is invalid, or if the URL is https and this program has no TLS.
    pub(super) fn new(base: &str, options: &UpstreamOptions, world: &World) -> Result<Self> {
        let key = options.url_key;
        let invalid = |why: String| Error::invalid(format!("`{key}`: {why}"));
        let mut place = EndpointUrl::parse(base).map_err(|why| invalid(format!("{why}; write http://host:port/v1")))?;
        if base.contains(['?', '#']) {
            return Err(invalid(format!("{} is called with a path behind it: leave out `?` and `#`", place.origin())));
        }
        place.path.truncate(place.path.trim_end_matches('/').len());
        let shown = format!("{}{}", place.origin(), place.path);
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in &options.headers {
            let wrong = || Error::invalid(format!("the default header `{name}` is not one that HTTP can send"));
            let name = HeaderName::try_from(name.as_str()).map_err(|_| wrong())?;
            headers.insert(name, HeaderValue::try_from(value.reveal()).map_err(|_| wrong())?);
        }
        if let Some(secret) = &options.key {
            let mut value = HeaderValue::try_from(format!("Bearer {}", secret.reveal())).map_err(|_| {
                Error::invalid(format!("the API key for {shown} has a character that no header can carry"))
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        if let Some(credentials) = &place.credentials
            && !headers.contains_key(AUTHORIZATION)
        {
            let value = format!("Basic {}", base64(route::percent_decoded(credentials).as_bytes()));
            headers.insert(AUTHORIZATION, HeaderValue::try_from(value).expect("base64 is ASCII"));
        }
        let client =
            EndpointClient::to(&place, &headers).map_err(|error| invalid(format!("{shown} {}", error.message())))?;
        let policy = RetryPolicy {
            attempts_max: options.attempts_max.max(1),
            backoff_min: options.backoff_min,
            backoff_max: BACKOFF.backoff_max.max(options.backoff_min),
        };
        Ok(Self(Arc::new(UpstreamState {
            client,
            place,
            shown,
            connections: Semaphore::new(CONNECTIONS_MAX),
            policy,
            rng: Mutex::new(world.rng()),
        })))
    }

    /// Sends a JSON body with `POST` to a path under the base URL, and retries as long as policy and deadline allow. Returns `Ok`
    /// for any complete response.
    pub(super) async fn post(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<EndpointResponse> {
        let state = &*self.0;
        let target = format!("{}{path}", state.place.path);
        self.send(cx, &target, || format!("POST {}{path}", state.shown), body).await
    }

    /// Sends a request as [`Upstream::post`] does, but to a path outside `/v1`, where vLLM has its own routes.
    pub(super) async fn post_outside_v1(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<EndpointResponse> {
        let state = &*self.0;
        let beside = |base: &str| format!("{}{path}", base.strip_suffix("/v1").unwrap_or(base));
        self.send(cx, &beside(&state.place.path), || format!("POST {}", beside(&state.shown)), body).await
    }

    /// Sends a request and retries it. `subject` names the call for errors and logs; it is a function because most calls need no
    /// name.
    async fn send(
        &self,
        cx: &CallContext,
        target: &str,
        subject: impl Fn() -> String,
        body: Bytes,
    ) -> Result<EndpointResponse> {
        let state = &*self.0;
        let (mut tries, mut connects) = (0, 0);
        loop {
            let result = state.send_once(cx, target, body.clone()).await;
            let (number, wait_min) = match &result {
                Ok(answer) => {
                    if let Some(why) = permanent_rejection(answer) {
                        tracing::error!(
                            subject = subject(),
                            status = answer.status,
                            why,
                            "the endpoint refuses this key"
                        );
                        return result;
                    }
                    tries += 1;
                    if !RETRIED.contains(&answer.status) || tries >= state.policy.attempts_max {
                        return result;
                    }
                    (tries, answer.retry_after)
                }
                Err(error) if error.code() == Code::Unavailable => {
                    let limit = if error.execution() == Execution::NotStarted {
                        connects += 1;
                        connects >= CONNECT_ATTEMPTS_MAX
                    } else {
                        // A generation has no side effects, so a lost response can be requested again.
                        tries += 1;
                        tries >= state.policy.attempts_max
                    };
                    if limit {
                        return result.map_err(|error| error.about(subject()));
                    }
                    (tries + connects, None)
                }
                Err(_) => return result.map_err(|error| error.about(subject())),
            };
            let backoff = {
                let mut rng = state.rng.lock().unwrap_or_else(PoisonError::into_inner);
                state.policy.backoff(number, &mut rng)
            };
            let wait = backoff.max(wait_min.unwrap_or_default());
            if cx.remaining() <= wait {
                return result.map_err(|error| error.about(subject()));
            }
            let status = result.as_ref().map_or(0, |answer| answer.status);
            tracing::debug!(subject = subject(), status, number, ?wait, "the endpoint is asked again");
            cx.bound(Execution::Unknown, async {
                tokio::time::sleep(wait).await;
                Ok(())
            })
            .await
            .map_err(|error| error.about(subject()))?;
        }
    }

    /// Returns the JSON object of a successful response.
    ///
    /// # Errors
    /// The error of the status, with the endpoint's own message; `DataLoss` if a successful response is not a JSON object.
    pub(super) fn object(&self, path: &str, answer: EndpointResponse) -> Result<RawObject> {
        let subject = || format!("POST {}{path}", self.0.shown);
        let shown = |body: &Bytes| String::from_utf8_lossy(&body[..body.len().min(SHOWN_BYTES_MAX)]).into_owned();
        if !(200..300).contains(&answer.status) {
            let leads = answer.location.map(|place| format!(" and refers to {place}")).unwrap_or_default();
            let text = format!("answered {}{leads}: {}", answer.status, shown(&answer.body));
            let error = Error::finished(code_of(answer.status), text).about(subject());
            // A redirect is not stored as a rejection: a client that followed it would bypass this server.
            let refused = EndpointRejection { status: answer.status, body: answer.body };
            return Err(if refused.status >= 400 { error.caused_by(refused) } else { error });
        }
        RawObject::parse(answer.body.clone()).map_err(|error| {
            let text =
                format!("answered {} with what is no JSON object ({error}): {}", answer.status, shown(&answer.body));
            Error::finished(Code::DataLoss, text).about(subject())
        })
    }
}

impl UpstreamState {
    async fn send_once(&self, cx: &CallContext, target: &str, body: Bytes) -> Result<EndpointResponse> {
        let room = self.connections.acquire();
        let _room = cx
            .bound(Execution::NotStarted, async {
                room.await.map_err(|_| Error::not_started(Code::Unavailable, "the endpoint is closed"))
            })
            .await?;
        let mut target = target.to_owned();
        let mut hops = 0;
        loop {
            let answer = self.client.post(cx, target.clone(), body.clone()).await?;
            // Follows a redirect only if it keeps method and body and stays on this host and port. Any other redirect would turn
            // the request into a `GET` without its body, or send the headers with their keys to another server. Such a response is
            // returned as an error.
            let place = answer.location.as_deref().filter(|_| matches!(answer.status, 307 | 308) && hops < HOPS_MAX);
            match place.and_then(|place| self.place.redirected(&target, place)) {
                Some(next) => target = next,
                None => return Ok(answer),
            }
            hops += 1;
        }
    }
}

/// Maximum consecutive redirects that are followed.
const HOPS_MAX: usize = 5;

impl EndpointClient {
    /// Creates the client of the URL's scheme.
    ///
    /// # Errors
    /// `InvalidArgument` with the missing feature if this program does not support the URL's scheme.
    fn to(place: &EndpointUrl, headers: &HeaderMap) -> Result<Self> {
        #[cfg(feature = "tls")]
        if place.https {
            return TlsClient::to(&place.origin(), headers, CONNECTIONS_MAX, CONNECT_TIMEOUT).map(Self::Https);
        }
        #[cfg(feature = "http")]
        if !place.https {
            return PlainClient::to(&place.origin(), headers, CONNECTIONS_MAX, CONNECT_TIMEOUT).map(Self::Http);
        }
        let _ = headers;
        Err(Error::invalid(if place.https {
            "is https, and this program was built without TLS: build it with the feature `tls` of gym-server"
        } else {
            "is http, and this program was built without it: build it with the feature `http` of gym-server"
        }))
    }

    #[cfg_attr(
        not(any(feature = "http", feature = "tls")),
        expect(clippy::unused_async, reason = "no client is left to wait for")
    )]
    async fn post(&self, cx: &CallContext, target: String, body: Bytes) -> Result<EndpointResponse> {
        match *self {
            #[cfg(feature = "http")]
            Self::Http(ref direct) => direct.post(cx, target, body).await,
            #[cfg(feature = "tls")]
            Self::Https(ref secured) => secured.post(cx, &target, body).await,
        }
    }
}

/// Returns the bytes in Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = (0..3).fold(0, |word, at| word << 8 | u32::from(chunk.get(at).copied().unwrap_or(0)));
        for at in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * at)) as usize & 63];
            text.push(if at > chunk.len() { '=' } else { char::from(digit) });
        }
    }
    text
}

fn code_of(status: u16) -> Code {
    match status {
        400 | 413 | 422 => Code::InvalidArgument,
        429 => Code::ResourceExhausted,
        408 | 504 => Code::DeadlineExceeded,
        502 | 503 | 520 => Code::Unavailable,
        // A wrong key or path is an error of this server's configuration, not of the caller's request.
        _ => Code::Internal,
    }
}

/// Returns the reason why a retry with this key can never succeed, or `None` if it can.
fn permanent_rejection(answer: &EndpointResponse) -> Option<&'static str> {
    let codes = || -> Vec<String> {
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        match &body["error"] {
            Value::String(code) => vec![code.to_lowercase()],
            error => ["code", "type"].iter().filter_map(|key| error[key].as_str()).map(str::to_lowercase).collect(),
        }
    };
    let any = |known: &[&'static str]| {
        let codes = codes();
        known.iter().copied().find(|known| codes.iter().any(|code| code == known))
    };
    match answer.status {
        429 => any(&["budget_exceeded", "insufficient_quota"]),
        401 | 403 => any(&["invalid_api_key", "invalid_api_token", "authentication_error"]).or_else(|| {
            let text = String::from_utf8_lossy(&answer.body).to_lowercase();
            ["invalid api key", "incorrect api key"].into_iter().find(|known| text.contains(known))
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (plain, encoded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }
}
