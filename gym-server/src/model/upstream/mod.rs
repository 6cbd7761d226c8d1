//! Calls one OpenAI-compatible endpoint over HTTP: bounded connections, bounded retries, deadlines, and errors that name the URL.
#![cfg_attr(
    not(feature = "http"),
    expect(dead_code, reason = "without a client, an endpoint is refused when it is configured")
)]

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gym_client::client_url::EndpointUrl;
use gym_core::message::readable;
use gym_core::observe::waits::{Wait, WaitKind, recorded};
use gym_core::rollout::{FailureClass, UNVERIFIED_KEY};
use gym_core::server::{EndpointReport, EndpointState, ResponseEnd};
use gym_core::{CallContext, Code, Error, Execution, RawObject, Result, World};
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

mod aborts;
mod client;
mod engine;
mod health;
mod keys;
mod probe;
mod response;
pub(super) mod retry;

use crate::model::secret::Secret;
use crate::role::model::EndpointRejection;
use crate::role::route;
use aborts::{Aborts, Before};
use client::EndpointClient;
use health::EndpointHealth;
pub(super) use keys::EndpointKeys;
use probe::Engine;
pub(super) use response::EndpointResponse;
use response::{Completeness, StatusMeaning};
use retry::{Attempts, EndpointRetries, NextAttempt, is_local};

/// Maximum connections to one endpoint; further requests wait, up to their deadlines. With a dozen servers in one process, more
/// connections would reach the limit of 20,000 file descriptors, which some machines cannot raise.
const CONNECTIONS_MAX: usize = 1_024;

/// Further connections, for questions about the endpoint: its models, its metrics and its state.
const QUESTIONS_MAX: usize = 4;

/// After this time, the endpoint's machine is considered unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The ends of the paths of calls over the Responses API and over chat.
const RESPONSES_PATH: &str = "/responses";
const CHAT_PATH: &str = "/chat/completions";

/// Limit of a probe. An endpoint lists its models from memory.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The options of an endpoint's client.
#[derive(Clone, Debug)]
pub(super) struct UpstreamOptions {
    /// The names of the configuration keys, for messages.
    pub(super) keys: EndpointKeys,
    pub(super) key: Option<Secret>,
    pub(super) headers: BTreeMap<String, Secret>,
    /// The model of every request, for messages and for probes.
    pub(super) model: String,
    pub(super) retries: EndpointRetries,
    /// Age of a call in flight from which the engine is asked what it does.
    pub(super) probe_after: Duration,
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
    /// The engine, once a list of models told.
    engine: Mutex<Option<Engine>>,
    aborts: Aborts,
    probe_after: Duration,
    /// The last time that the engine was asked because calls take long. Held while it responds, so that one call at a time asks; none waits for it.
    asked: tokio::sync::Mutex<Option<Instant>>,
    keys: EndpointKeys,
    model: String,
    retries: EndpointRetries,
    health: EndpointHealth,
    world: World,
    rng: Mutex<fastrand::Rng>,
}

impl fmt::Debug for Upstream {
    /// Omits the URL's credentials and the headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Upstream({})", self.0.shown)
    }
}

/// Routes that a call adds to the URL, the longest first.
const ROUTES: [&str; 3] = ["/chat/completions", "/completions", "/responses"];

impl Upstream {
    /// Creates a client of the endpoint at `base`.
    ///
    /// # Errors
    /// `InvalidArgument` with the key if the URL or a header is invalid, or if the URL is https and this program has no TLS.
    pub(super) fn new(base: &str, options: &UpstreamOptions, world: &World) -> Result<Self> {
        let key = options.keys.url;
        let invalid = |why: String| Error::invalid(format!("`{key}`: {why}"));
        let mut place = EndpointUrl::parse(base).map_err(|why| invalid(format!("{why}; write http://host:port/v1")))?;
        if base.contains(['?', '#']) {
            return Err(invalid(format!("{} is called with a path behind it: leave out `?` and `#`", place.origin())));
        }
        place.path.truncate(place.path.trim_end_matches('/').len());
        if place.path.contains(char::is_whitespace) {
            return Err(invalid(format!("{} has a blank in its path; remove it", place.origin())));
        }
        if let Some((route, above)) = ROUTES.iter().find_map(|route| Some((route, place.path.strip_suffix(route)?))) {
            let base = format!("{}{above}", place.origin());
            return Err(invalid(format!("{base} is called with `{route}` or another route behind it; write {base}")));
        }
        let shown = format!("{}{}", place.origin(), place.path);
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (CONTENT_TYPE, "application/json"),
            (ACCEPT, "application/json"),
            (ACCEPT_ENCODING, "identity"),
            (USER_AGENT, concat!("gym/", env!("CARGO_PKG_VERSION"))),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        for (name, value) in &options.headers {
            let wrong = || Error::invalid(format!("the default header `{name}` is not one that HTTP can send"));
            let name = HeaderName::try_from(name.as_str()).map_err(|_| wrong())?;
            headers.insert(name, HeaderValue::try_from(value.reveal()).map_err(|_| wrong())?);
        }
        if let Some(secret) = &options.key {
            let mut value = HeaderValue::try_from(format!("Bearer {}", secret.reveal())).map_err(|_| {
                let odd = secret.reveal().chars().enumerate().find(|(_, c)| c.is_control() || !c.is_ascii());
                let odd =
                    odd.map(|(at, c)| format!(" ({} at place {})", c.escape_unicode(), at + 1)).unwrap_or_default();
                Error::invalid(format!("the API key for {shown} has a character that no header can carry{odd}"))
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
        Ok(Self(Arc::new(UpstreamState {
            client,
            place,
            health: EndpointHealth::new(shown.clone(), options.probe_after),
            shown,
            connections: Semaphore::new(CONNECTIONS_MAX),
            engine: Mutex::default(),
            aborts: Aborts::default(),
            probe_after: options.probe_after,
            asked: tokio::sync::Mutex::default(),
            keys: options.keys,
            model: options.model.clone(),
            retries: options.retries.clone(),
            world: world.clone(),
            rng: Mutex::new(world.rng()),
        })))
    }

    /// Returns what the calls so far have shown.
    pub(super) fn report(&self) -> EndpointReport {
        self.0.health.report(self.0.retries.budget)
    }

    /// Returns the tokens of the model's context, if a probe was told.
    pub(super) fn context_tokens(&self) -> Option<u64> {
        self.0.engine()?.context_tokens
    }

    /// Requests the list of models, once, and returns what the response shows.
    pub(super) async fn probe(&self, cx: &CallContext) -> EndpointReport {
        let state = &*self.0;
        let listed = state.list(cx).await;
        let mut judged = state.judge_list(&listed);
        if judged.as_ref().err().is_none_or(|found| found.state == EndpointState::Ready)
            && let Err(paused) = state.paused(cx).await
        {
            judged = Err(paused);
        }
        let mut report = self.report();
        report.url = state.shown.clone();
        report.state = EndpointState::Ready;
        (report.reason, report.fix, report.failing_seconds) = (String::new(), String::new(), 0);
        if let Err(failure) = judged {
            (report.state, report.reason, report.fix) = (failure.state, failure.reason, failure.fix);
        }
        report
    }

    /// Returns the owner of the model, if a list of models told it.
    pub(super) fn owner(&self) -> Option<Arc<str>> {
        self.0.engine()?.owner
    }

    /// Returns `true` if a list of models told that the engine is a vLLM.
    pub(super) fn is_vllm(&self) -> bool {
        self.0.is_vllm() == Some(true)
    }

    /// Sends a JSON body with `POST` to a path under the base URL, once. Says nothing about the endpoint's health.
    pub(super) async fn try_once(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<EndpointResponse> {
        self.0.send_once(cx, &format!("{}{path}", self.0.place.path), Some(body)).await
    }

    /// Sends a JSON body with `POST` to a path under the base URL, and retries as long as policy and deadline allow. Returns `Ok`
    /// for any complete response.
    pub(super) async fn post(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<EndpointResponse> {
        let answer = self.post_or_leave(cx, path, body, false).await?;
        Ok(answer.expect("it may not leave"))
    }

    /// Sends a request as [`Upstream::post`] does. If `may_leave`, returns `None` instead of waiting for an endpoint that rejects the
    /// request or cannot be reached: another endpoint may serve it.
    pub(super) async fn post_or_leave(
        &self,
        cx: &CallContext,
        path: &str,
        body: Bytes,
        may_leave: bool,
    ) -> Result<Option<EndpointResponse>> {
        let state = &*self.0;
        let target = format!("{}{path}", state.place.path);
        self.send(cx, &target, || format!("POST {}{path}", state.shown), body, may_leave).await
    }

    /// Sends a request as [`Upstream::post`] does, but to a path outside `/v1`, where vLLM has its own routes.
    pub(super) async fn post_outside_v1(&self, cx: &CallContext, path: &str, body: Bytes) -> Result<EndpointResponse> {
        let state = &*self.0;
        let subject = || format!("POST {}", outside_v1(&state.shown, path));
        let answer = self.send(cx, &outside_v1(&state.place.path, path), subject, body, false).await?;
        Ok(answer.expect("it may not leave"))
    }

    /// Sends a request and retries it. `subject` names the call for errors and logs; it is a function because most calls need no
    /// name. Returns `None` only if `may_leave`, as [`Upstream::post_or_leave`] does.
    async fn send(
        &self,
        cx: &CallContext,
        target: &str,
        subject: impl Fn() -> String,
        body: Bytes,
        may_leave: bool,
    ) -> Result<Option<EndpointResponse>> {
        let state = &*self.0;
        let mut attempts = Attempts::default();
        let mut waiting = None;
        loop {
            let wait = || {
                let shown = Arc::clone(&self.0);
                let wait = Wait::new(WaitKind::Endpoint, cx.trace.trace_id).until(cx.deadline);
                wait.on(Arc::new(move || shown.shown.clone()))
            };
            let result = recorded(pin!(state.call(cx, target, body.clone())), wait).await;
            if matches!(&result, Ok(answer) if answer.status < 400 && !answer.is_aborted()) {
                return result.map(Some);
            }
            let next = {
                let mut rng = state.rng.lock();
                attempts.next(&result, &state.retries, cx.remaining(), &state.world, &mut rng)
            };
            match next {
                NextAttempt::Never(why) => {
                    return match result {
                        Ok(mut answer) => {
                            answer.attempts = why;
                            Ok(Some(answer))
                        }
                        Err(error) => Err(state.gave_up(error, &why).about(subject())),
                    };
                }
                NextAttempt::After(wait) => {
                    match &result {
                        Ok(answer) => state.note(answer),
                        Err(error) if is_local(error) => {}
                        Err(error) => state.health.failed(state.keys.no_response(error)),
                    }
                    if may_leave && result.as_ref().map_or(true, EndpointResponse::is_rejection) {
                        return Ok(None);
                    }
                    waiting.get_or_insert_with(|| state.health.wait());
                    tracing::debug!(
                        subject = subject(),
                        attempts = attempts.made,
                        ?wait,
                        "the endpoint is asked again"
                    );
                    let made = attempts.made;
                    let paused = || {
                        let shown = Arc::clone(&self.0);
                        let text = move || shown.failing(made);
                        Wait::new(WaitKind::EndpointBackoff, cx.trace.trace_id)
                            .until(Instant::now() + wait)
                            .on(Arc::new(text))
                    };
                    let pause = cx.bound(Execution::Unknown, async {
                        tokio::time::sleep(wait).await;
                        Ok(())
                    });
                    recorded(pin!(pause), paused).await.map_err(|error| error.about(subject()))?;
                    if result.is_ok_and(|answer| answer.is_aborted()) {
                        // It did answer. Whether it goes on is not known until this call ends, or takes long.
                        state.health.resent();
                        waiting = None;
                    }
                }
            }
        }
    }

    /// Returns the JSON object of a successful response, if it has a list under `key`, as each response of the dialect has.
    ///
    /// # Errors
    /// The error of the status, with the endpoint's own message; `DataLoss` if a successful response is not of the dialect.
    pub(super) fn object(&self, path: &str, answer: EndpointResponse, key: &str) -> Result<RawObject> {
        let state = &*self.0;
        let subject = || format!("POST {}{path}", state.shown);
        if let Some(coding) = &answer.coding {
            let text = format!(
                "answered {} in the content coding `{coding}`, although the request accepts none (`accept-encoding: identity`): have the endpoint, or the gateway before it, not compress",
                answer.status
            );
            return Err(Error::finished(Code::DataLoss, text).about(subject()).with_class(FailureClass::ModelError));
        }
        if !(200..300).contains(&answer.status) {
            state.note(&answer);
            let leads = answer.location.map(|place| format!(" and refers to {place}")).unwrap_or_default();
            let attempts = Some(answer.attempts).filter(|attempts| !attempts.is_empty());
            let attempts = attempts.map(|attempts| format!(" ({attempts})")).unwrap_or_default();
            let text = format!("answered {}{leads}: {}{attempts}", answer.status, readable(&answer.body));
            let error = Error::finished(code_of(answer.status), text).about(subject());
            // Set here, because the code of a 504 would be that of an expired deadline of this call.
            let error = error.with_class(match StatusMeaning::of(answer.status) {
                StatusMeaning::Busy | StatusMeaning::Late => FailureClass::ModelUnavailable,
                StatusMeaning::Failed | StatusMeaning::Final => FailureClass::ModelError,
            });
            // A redirect is not stored as a rejection: a client that followed it would bypass this server.
            let refused = EndpointRejection { status: answer.status, body: answer.body };
            return Err(if refused.status >= 400 { error.caused_by(refused) } else { error });
        }
        if answer.is_aborted() {
            state.note(&answer);
            let text =
                format!("the engine aborted the response, as vLLM does when it pauses or sleeps ({})", answer.attempts);
            let error = Error::finished(Code::Unavailable, text).about(subject());
            return Err(error.with_class(FailureClass::ModelUnavailable));
        }
        let wrong = |why: String| {
            state.health.failed(state.keys.not_an_endpoint(&answer.body));
            let text = format!("answered {} {why}: {}", answer.status, readable(&answer.body));
            Error::finished(Code::DataLoss, text).about(subject())
        };
        let object = RawObject::parse(answer.body.clone()).map_err(|error| {
            if is_event_stream(&answer.body) {
                let text = format!(
                    "answered {} with an event stream, although the request has `\"stream\": false`: have the endpoint, or the gateway before it, not stream",
                    answer.status
                );
                return Error::finished(Code::DataLoss, text).about(subject()).with_class(FailureClass::ModelError);
            }
            wrong(format!("with what is no JSON object ({error})"))
        })?;
        if object.get(key).is_none_or(|list| list.first() != Some(&b'[')) {
            return Err(wrong(format!("with a JSON object that has no list `{key}`, so it is no response of a model")));
        }
        state.health.responded();
        let object = match answer.completeness {
            Completeness::Unverified => object.edit().set(UNVERIFIED_KEY, "true").to_object()?,
            _ => object,
        };
        let ends: Vec<ResponseEnd> = match key {
            "output" => vec![ResponseEnd::of_response(&object)],
            "choices" => {
                let choices: Vec<RawObject> = serde_json::from_slice(&object.get(key).unwrap_or_default())
                    .map_err(|error| wrong(format!("with `choices` that cannot be read ({error})")))?;
                choices.iter().map(ResponseEnd::of_choice).collect()
            }
            _ => Vec::new(),
        };
        for end in ends {
            // A truncated response is the caller's.
            end.truncation().map_err(|error| error.about(subject()))?;
        }
        Ok(object)
    }
}

impl UpstreamState {
    /// Describes why a call waits before it is sent again.
    fn failing(&self, made: u32) -> String {
        let report = self.health.report(self.retries.budget);
        format!("{} failed {made} times, for {} s: {}", self.shown, report.failing_seconds, report.reason)
    }

    /// Records what an error response says about the endpoint. An error that the request caused says nothing.
    fn note(&self, answer: &EndpointResponse) {
        if answer.is_aborted() {
            self.health.aborted();
        }
        match probe::of_status(answer, self.keys, &self.model) {
            Some(failure) => self.health.failed(failure),
            None => self.health.responded(),
        }
    }

    /// Returns the final error of a call without a response. It is `Finished`, so that no caller repeats the call once more: the
    /// budget covers the whole call.
    fn gave_up(&self, error: Error, attempts: &str) -> Error {
        if is_local(&error) {
            return error.with_class(FailureClass::TransportLocalResource);
        }
        if error.code() != Code::Unavailable {
            return error;
        }
        self.health.failed(self.keys.no_response(&error));
        if attempts.is_empty() {
            // No repetition was allowed, so the error remains as it is.
            return error;
        }
        Error::finished(Code::Unavailable, format!("no response after {attempts}"))
            .caused_by(error)
            .with_class(FailureClass::ModelUnavailable)
    }

    /// Sends a call of a rollout, once. While it takes long, the engine is asked what it does.
    async fn call(&self, cx: &CallContext, target: &str, body: Bytes) -> Result<EndpointResponse> {
        let is_chat = target.ends_with(CHAT_PATH);
        let generates = is_chat || target.ends_with(RESPONSES_PATH);
        let before = if generates { self.before(cx, is_chat).await? } else { Before::Other };
        let began = Instant::now();
        let _in_flight = self.health.begin(began);
        let mut answer = tokio::select! {
            biased;
            answer = self.send_once(cx, target, Some(body)) => answer?,
            never = self.ask_while_slow(cx, began) => match never {},
        };
        if answer.status < 400 && !answer.is_aborted() {
            answer.completeness = self.completeness(cx, before, &answer, is_chat).await?;
        }
        Ok(answer)
    }

    /// Sends a `POST` with the body, or a `GET` without one.
    async fn send_once(&self, cx: &CallContext, target: &str, body: Option<Bytes>) -> Result<EndpointResponse> {
        // A question about the endpoint does not wait behind its calls.
        let _room = match &body {
            None => None,
            Some(_) => Some(
                cx.bound(Execution::NotStarted, async {
                    let closed = |_| Error::not_started(Code::Unavailable, "the endpoint is closed");
                    self.connections.acquire().await.map_err(closed)
                })
                .await?,
            ),
        };
        let mut target = target.to_owned();
        let mut hops = 0;
        loop {
            let answer = self.client.send(cx, target.clone(), body.clone()).await?;
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

/// Returns a path beside the version of a base path or URL.
fn outside_v1(base: &str, path: &str) -> String {
    format!("{}{path}", base.strip_suffix("/v1").unwrap_or(base))
}

/// Maximum consecutive redirects that are followed.
const HOPS_MAX: usize = 5;

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

/// Returns `true` for server-sent events.
fn is_event_stream(body: &[u8]) -> bool {
    let body = body.trim_ascii_start();
    ["data:", "event:", ":"].iter().any(|field| body.starts_with(field.as_bytes()))
}

fn code_of(status: u16) -> Code {
    match (status, StatusMeaning::of(status)) {
        (400 | 413 | 422, _) => Code::InvalidArgument,
        (429, _) => Code::ResourceExhausted,
        (408 | 504 | 524, _) => Code::DeadlineExceeded,
        (_, StatusMeaning::Busy | StatusMeaning::Late) => Code::Unavailable,
        // A wrong key or path is an error of this server's configuration, not of the caller's request.
        _ => Code::Internal,
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
