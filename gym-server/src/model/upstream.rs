//! One OpenAI-compatible endpoint over HTTP: bounded connections, bounded retries, deadlines, and errors that name the place.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::{CallContext, Code, Error, Execution, RawObject, Result, RetryPolicy, World};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, StatusCode, Url};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::secret::Secret;

/// Connections to one endpoint. More would meet the limit of 20,000 file descriptors that some machines cannot raise, with a
/// dozen servers in one process; further requests wait their turn under their deadlines.
const CONNECTIONS_MAX: usize = 1_024;

/// Longer, and the endpoint's machine is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Tries to reach an endpoint that refuses connections: nothing was sent, so trying costs little, and an engine that
/// restarts is back after a while.
const CONNECT_ATTEMPTS_MAX: u32 = 8;

/// Half a second between tries, as NeMo Gym waits, but doubled each time and spread.
const BACKOFF: RetryPolicy =
    RetryPolicy { attempts_max: 3, backoff_min: Duration::from_millis(500), backoff_max: Duration::from_secs(8) };

/// The statuses that NeMo Gym's client tries again.
const RETRIED: [u16; 8] = [404, 408, 429, 500, 502, 503, 504, 520];

/// How much of a foreign error body is shown.
const SHOWN_BYTES_MAX: usize = 2_000;

/// How an endpoint is called.
#[derive(Clone, Debug)]
pub(super) struct UpstreamOptions {
    /// The configuration key of the URL, for errors.
    pub(super) url_key: &'static str,
    pub(super) key: Option<Secret>,
    pub(super) headers: BTreeMap<String, Secret>,
    /// Tries of a request that the endpoint answers with a status worth trying again.
    pub(super) attempts_max: u32,
    /// The wait before the second try.
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
pub(super) struct Upstream(Arc<Inner>);

struct Inner {
    http: Client,
    /// The short way, where there is one.
    #[cfg(feature = "http")]
    direct: Option<super::direct::Direct>,
    /// Without a slash at the end.
    base: String,
    /// The same without credentials.
    shown: String,
    headers: HeaderMap,
    connections: Semaphore,
    policy: RetryPolicy,
    rng: Mutex<fastrand::Rng>,
}

/// A complete answer, whatever it says.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Bytes,
    retry_after: Option<Duration>,
    /// Where a redirect that is not followed leads.
    location: Option<String>,
}

impl fmt::Debug for Upstream {
    /// Without the URL's credentials and the headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Upstream({})", self.0.shown)
    }
}

impl Upstream {
    /// # Errors
    /// `InvalidArgument` naming the key when the URL or a header is wrong, or when it is https and this program has no TLS.
    pub(super) fn new(base: &str, options: &UpstreamOptions, world: &World) -> Result<Self> {
        let key = options.url_key;
        let mut url = Url::parse(base).map_err(|error| {
            // What cannot be taken apart may have a password in it.
            let shown = if base.contains('@') { "the value" } else { base };
            Error::invalid(format!("`{key}`: `{shown}` is not a URL: {error}; write http://host:port/v1"))
        })?;
        let _ = url.set_username("");
        let _ = url.set_password(None);
        let shown = url.as_str().trim_end_matches('/').to_owned();
        match url.scheme() {
            "http" => {}
            "https" => tls(key, &shown)?,
            other => {
                return Err(Error::invalid(format!(
                    "`{key}`: {shown} has the scheme `{other}`; only http and https can be called"
                )));
            }
        }
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
        let http = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(CONNECTIONS_MAX)
            // uvicorn, and so vLLM, closes idle connections after 5 s; a request on one that is just closing would be lost.
            .pool_idle_timeout(Duration::from_secs(4))
            .tcp_keepalive(Duration::from_secs(60))
            .redirect(same_place())
            .no_proxy()
            .http1_only()
            .build()
            .map_err(|error| Error::internal("cannot set up the HTTP client").about(shown.clone()).caused_by(error))?;
        let policy = RetryPolicy {
            attempts_max: options.attempts_max.max(1),
            backoff_min: options.backoff_min,
            backoff_max: BACKOFF.backoff_max.max(options.backoff_min),
        };
        Ok(Self(Arc::new(Inner {
            http,
            #[cfg(feature = "http")]
            direct: base
                .parse()
                .ok()
                .and_then(|url| super::direct::Direct::to(&url, &headers, CONNECTIONS_MAX, CONNECT_TIMEOUT)),
            base: base.trim_end_matches('/').to_owned(),
            shown,
            headers,
            connections: Semaphore::new(CONNECTIONS_MAX),
            policy,
            rng: Mutex::new(world.rng()),
        })))
    }

    /// `POST` of a JSON body to a path under the base URL, tried again as long as policy and deadline allow. Any complete
    /// answer is `Ok`.
    pub(super) async fn post(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<Answer> {
        let inner = &*self.0;
        let url = format!("{}{path}", inner.base);
        self.send(cx, &url, || format!("POST {}{path}", inner.shown), body).await
    }

    /// The same for a path beside `/v1`, where vLLM has its own routes.
    pub(super) async fn post_beside(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<Answer> {
        let inner = &*self.0;
        let beside = |base: &str| format!("{}{path}", base.strip_suffix("/v1").unwrap_or(base));
        self.send(cx, &beside(&inner.base), || format!("POST {}", beside(&inner.shown)), body).await
    }

    /// `subject` names the call, for errors and logs: most calls need no name.
    async fn send(&self, cx: &CallContext, url: &str, subject: impl Fn() -> String, body: Bytes) -> Result<Answer> {
        let inner = &*self.0;
        let (mut tries, mut connects) = (0, 0);
        loop {
            let result = inner.once(cx, url, body.clone()).await;
            let (number, wait_min) = match &result {
                Ok(answer) => {
                    if let Some(why) = permanent(answer) {
                        tracing::error!(
                            subject = subject(),
                            status = answer.status,
                            why,
                            "the endpoint refuses this key"
                        );
                        return result;
                    }
                    tries += 1;
                    if !RETRIED.contains(&answer.status) || tries >= inner.policy.attempts_max {
                        return result;
                    }
                    (tries, answer.retry_after)
                }
                Err(error) if error.code() == Code::Unavailable => {
                    let limit = if error.execution() == Execution::NotStarted {
                        connects += 1;
                        connects >= CONNECT_ATTEMPTS_MAX
                    } else {
                        // A generation has no effect but its answer, so a lost one may be asked for again.
                        tries += 1;
                        tries >= inner.policy.attempts_max
                    };
                    if limit {
                        return result.map_err(|error| error.about(subject()));
                    }
                    (tries + connects, None)
                }
                Err(_) => return result.map_err(|error| error.about(subject())),
            };
            let backoff = {
                let mut rng = inner.rng.lock().unwrap_or_else(PoisonError::into_inner);
                inner.policy.backoff(number, &mut rng)
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

    /// The JSON object of a successful answer.
    ///
    /// # Errors
    /// What the status says, with the endpoint's own words; `DataLoss` when a success carries no JSON object.
    pub(super) fn object(&self, path: &str, answer: Answer) -> Result<RawObject> {
        let subject = || format!("POST {}{path}", self.0.shown);
        let shown = |body: &Bytes| String::from_utf8_lossy(&body[..body.len().min(SHOWN_BYTES_MAX)]).into_owned();
        if !(200..300).contains(&answer.status) {
            let leads = answer.location.map(|place| format!(" and refers to {place}")).unwrap_or_default();
            let text = format!("answered {}{leads}: {}", answer.status, shown(&answer.body));
            let error = Error::finished(code_of(answer.status), text).about(subject());
            // A redirect is no refusal: whoever followed it from here would leave this server out.
            let refused = Refused { status: answer.status, body: answer.body };
            return Err(if refused.status >= 400 { error.caused_by(refused) } else { error });
        }
        RawObject::parse(answer.body.clone()).map_err(|error| {
            let text =
                format!("answered {} with what is no JSON object ({error}): {}", answer.status, shown(&answer.body));
            Error::finished(Code::DataLoss, text).about(subject())
        })
    }
}

/// What an endpoint answered instead of a result: kept as the cause, so that a client of ours sees the endpoint's own status
/// and words.
#[derive(Debug, thiserror::Error)]
#[error("answered {status}")]
pub(crate) struct Refused {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

impl Inner {
    async fn once(&self, cx: &CallContext, url: &str, body: Bytes) -> Result<Answer> {
        let room = self.connections.acquire();
        let _room = cx
            .bound(Execution::NotStarted, async {
                room.await.map_err(|_| Error::not_started(Code::Unavailable, "the endpoint is closed"))
            })
            .await?;
        #[cfg(feature = "http")]
        if let Some(direct) = &self.direct {
            // The path begins after `http://` and the host.
            let mut path = format!("/{}", url.splitn(4, '/').nth(3).unwrap_or_default());
            for hop in 0.. {
                let answer = direct.post(cx, path.clone(), body.clone()).await?;
                let status = answer.status.0;
                let location = answer.metadata.get("location").filter(|_| (300..400).contains(&status));
                if let Some(place) = location
                    && matches!(status, 307 | 308)
                    && hop < HOPS_MAX
                    && let Some(next) = path_at_same_place(url, &path, place)
                {
                    path = next;
                    continue;
                }
                let retry_after = answer.metadata.get("retry-after").and_then(|value| value.trim().parse().ok());
                let (retry_after, location) = (retry_after.map(Duration::from_secs), location.map(str::to_owned));
                return Ok(Answer { status, body: answer.message.head.to_bytes(), retry_after, location });
            }
        }
        // Boxed: it is the rarer way by far, and large.
        Box::pin(cx.bound(Execution::Unknown, async {
            let request = self.http.post(url).headers(self.headers.clone()).body(body);
            let mut response = request.send().await.map_err(of_reqwest)?;
            let status = response.status().as_u16();
            let retry_after = response
                .headers()
                .get(RETRY_AFTER)
                .and_then(|value| value.to_str().ok()?.trim().parse().ok())
                .map(Duration::from_secs);
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok().map(str::to_owned));
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
            Ok(Answer { status, body: whole.freeze(), retry_after, location })
        }))
        .await
    }
}

/// Redirects that are followed one after the other.
const HOPS_MAX: usize = 5;

/// Path and query of where a redirect from `path` leads, if that is on the host and port of `url`.
#[cfg(feature = "http")]
fn path_at_same_place(url: &str, path: &str, place: &str) -> Option<String> {
    let from = Url::parse(url).ok()?.join(path).ok()?;
    let to = from.join(place).ok().filter(|to| to.origin() == from.origin())?;
    Some(match to.query() {
        Some(query) => format!("{}?{query}", to.path()),
        None => to.path().to_owned(),
    })
}

/// Follows a redirect that keeps method and body and stays on the same host and port. After any other the request would be a
/// `GET` without its body, or a stranger would be sent the headers with their keys: it is an answer, and an error.
fn same_place() -> Policy {
    Policy::custom(|attempt| {
        let keeps_body = matches!(attempt.status(), StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT);
        let stays = attempt.previous().last().is_some_and(|from| from.origin() == attempt.url().origin());
        if keeps_body && stays && attempt.previous().len() <= HOPS_MAX { attempt.follow() } else { attempt.stop() }
    })
}

/// Whether the peer can have seen the request. The URL is left out: it may have credentials.
fn of_reqwest(error: reqwest::Error) -> Error {
    let (execution, text) = if error.is_connect() {
        (Execution::NotStarted, "cannot connect")
    } else {
        (Execution::Unknown, "the connection was lost before the answer was complete")
    };
    Error::new(Code::Unavailable, execution, text).caused_by(error.without_url())
}

fn code_of(status: u16) -> Code {
    match status {
        400 | 413 | 422 => Code::InvalidArgument,
        429 => Code::ResourceExhausted,
        408 | 504 => Code::DeadlineExceeded,
        502 | 503 | 520 => Code::Unavailable,
        // A wrong key or path is this server's configuration, not its caller's request.
        _ => Code::Internal,
    }
}

/// Why trying again with this key can never help, if so.
fn permanent(answer: &Answer) -> Option<&'static str> {
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

#[cfg(feature = "tls")]
fn tls(_: &str, _: &str) -> Result<()> {
    static INSTALL: std::sync::Once = std::sync::Once::new();
    INSTALL.call_once(|| {
        // Refused when the program has installed one of its own, which is then used.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    Ok(())
}

#[cfg(not(feature = "tls"))]
fn tls(key: &str, shown: &str) -> Result<()> {
    Err(Error::invalid(format!(
        "`{key}`: {shown} is https, and this program was built without TLS: build it with the feature `tls` of gym-server"
    )))
}
