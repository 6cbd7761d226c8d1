//! The endpoints of model servers: probed when a command starts, and watched while rollouts run.
//!
//! Model servers report them in `/health`, so this works for the servers of this process and for running servers alike. Model servers
//! in Python report none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use gym_client::collect::CollectProgress;
use gym_client::{AwaitedServer, ServerClient};
use gym_core::server::{EndpointReport, EndpointState};
use gym_core::{CallContext, CancelToken, Code, Execution, Handler, Request, Response};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cli::console::Console;
use crate::cli::exit::Failure;
use crate::head::waits::process::{Address, of_this_machine};
use crate::head::waits::{WaitsWanted, follow};
use crate::role::reply::health::{PROBE_QUERY, TRIAL_QUERY};

/// Limit for a model server that calls its endpoints, which has a limit of its own for them.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the probes while a command waits for endpoints, and of the health requests while rollouts run. A user sees a failure
/// within two intervals.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which a server that does not answer is named.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// Interval of the lines while a command waits for endpoints.
const LINE_INTERVAL: Duration = Duration::from_secs(15);

/// Time after a stop in which rollouts that all wait for something absent are looked for, and the interval.
const RESTS_TIMEOUT: Duration = Duration::from_secs(3);
const RESTS_INTERVAL: Duration = Duration::from_millis(250);

/// Rollouts of which each must wait, and servers that are asked for waits.
const RESTS_SHOWN: usize = 64;
const ASKED_MAX: usize = 256;

/// Minimum time from a stop until the rollouts are given up whose endpoints do not respond.
const GIVE_UP_AFTER: Duration = Duration::from_secs(5);

/// An endpoint, and the model server that calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct ModelEndpoint {
    pub(in crate::cli) server: String,
    pub(in crate::cli) report: EndpointReport,
}

/// The model servers of a command.
#[derive(Clone, Debug)]
pub(in crate::cli) struct ModelWatch {
    client: ServerClient,
    servers: Vec<String>,
    /// The other servers: those that call others by name say which of them they wait for, and one that does not answer is named.
    others: Vec<String>,
}

/// The part of `/health` that is read; other servers have no `endpoints`.
#[derive(Deserialize)]
struct Health {
    #[serde(default)]
    endpoints: Vec<EndpointReport>,
    #[serde(default)]
    awaits: Vec<AwaitedServer>,
}

impl ModelWatch {
    /// Creates a watch of these model servers.
    pub(in crate::cli) fn new(client: ServerClient, servers: Vec<String>) -> Self {
        Self { client, servers, others: Vec::new() }
    }

    /// Watches also these servers, and which servers they wait for.
    pub(in crate::cli) fn with_others(self, others: Vec<String>) -> Self {
        Self { others, ..self }
    }

    /// Calls all endpoints, and prints which respond. With `wait`, repeats this until all respond.
    ///
    /// # Errors
    /// `Failed` with the endpoints that do not respond at the end of `wait`.
    pub(in crate::cli) async fn at_start(&self, wait: Option<Duration>, console: &Console) -> Result<(), Failure> {
        let began = Instant::now();
        let mut printed: Option<(Instant, Vec<ModelEndpoint>)> = None;
        loop {
            let endpoints = self.request(Some(PROBE_QUERY), PROBE_TIMEOUT).await;
            let silent: Vec<&ModelEndpoint> = endpoints.iter().filter(|endpoint| endpoint.is_silent()).collect();
            let left = wait.map(|wait| wait.saturating_sub(began.elapsed())).unwrap_or_default();
            let again = !silent.is_empty() && !left.is_zero();
            if !again && !silent.is_empty() && wait.is_some() {
                let texts: Vec<String> = silent.iter().map(|endpoint| endpoint.at_start(false)).collect();
                let waited = began.elapsed().as_secs();
                return Err(Failure::Failed(format!("after {waited} s (--wait-for-model), {}", texts.join("\n"))));
            }
            let known = |endpoint: &ModelEndpoint| {
                printed.as_ref().is_some_and(|(_, known)| known.iter().any(|known| known.same(endpoint)))
            };
            for endpoint in endpoints.iter().filter(|endpoint| !known(endpoint)) {
                endpoint.print(wait.is_none(), console);
            }
            if !again {
                // Once, when no endpoint is waited for any more.
                let tried = self.request(Some(TRIAL_QUERY), PROBE_TIMEOUT).await;
                let news = |found: &&ModelEndpoint| {
                    !found.report.reason.is_empty() && endpoints.iter().all(|known| !known.same(found))
                };
                tried.iter().filter(news).for_each(|found| found.print(wait.is_none(), console));
                return Ok(());
            }
            let quiet = printed.as_ref().is_some_and(|(at, _)| at.elapsed() < LINE_INTERVAL);
            if !quiet {
                let names: Vec<&str> = silent.iter().map(|endpoint| endpoint.report.url.as_str()).collect();
                let (names, seconds) = (names.join(", "), left.as_secs());
                console.line(&format!("waiting for {names}: up to {seconds} s more; Ctrl-C stops"));
            }
            let at = printed.as_ref().filter(|_| quiet).map_or_else(Instant::now, |(at, _)| *at);
            printed = Some((at, endpoints));
            tokio::time::sleep(PROBE_INTERVAL.min(left)).await;
        }
    }

    /// Returns the endpoints for which calls wait now, as one text that is empty if there are none. The text is updated until the
    /// receiver is dropped; the future must be polled.
    pub(in crate::cli) fn watch(self) -> (watch::Receiver<String>, impl Future<Output = ()> + Send + 'static) {
        let (sender, receiver) = watch::channel(String::new());
        let watching = async move {
            let mut silent: BTreeMap<String, Instant> = BTreeMap::new();
            while !sender.is_closed() {
                tokio::time::sleep(PROBE_INTERVAL).await;
                let (endpoints, awaited) = tokio::join!(self.request(None, PROBE_INTERVAL), self.awaited(&mut silent));
                let endpoints = endpoints.iter().filter_map(|endpoint| in_progress(&endpoint.server, &endpoint.report));
                let silent = silent.iter().map(|(server, since)| (server, since.elapsed()));
                let silent = silent.filter(|(_, silent)| *silent >= SILENT_AFTER).map(|(server, silent)| {
                    format!("{server} accepts connections and has not answered `/health` for {} s", silent.as_secs())
                });
                let text = awaited.iter().map(absent).chain(silent).chain(endpoints).collect::<Vec<_>>().join("; ");
                sender.send_if_modified(|known| {
                    let changed = *known != text;
                    *known = text;
                    changed
                });
            }
        };
        (receiver, watching)
    }

    /// Waits for `stop`, and cancels `give_up` once the rollouts cannot finish: at once if no call of theirs runs, because all wait for a server or
    /// an endpoint that is away, and after some seconds if no endpoint that has calls in flight serves them.
    pub(in crate::cli) async fn give_up_after(
        self,
        stop: CancelToken,
        give_up: CancelToken,
        progress: Arc<CollectProgress>,
        console: Console,
    ) {
        stop.cancelled().await;
        let stopped = Instant::now();
        while stopped.elapsed() < RESTS_TIMEOUT {
            if let Some(why) = self.rest(progress.snapshot().in_flight).await {
                console.line(&format!("the rollouts in flight are given up: {why}"));
                return give_up.cancel();
            }
            tokio::time::sleep(RESTS_INTERVAL).await;
        }
        if self.unserved().await.is_none() {
            return;
        }
        // For the rollouts that are between their last response and their reward, and for an engine that is paused for a moment.
        tokio::time::sleep_until(stopped + GIVE_UP_AFTER).await;
        let Some(why) = self.unserved().await else { return };
        console.line(&format!("the rollouts in flight are given up: {}", why.join("; ")));
        give_up.cancel();
    }

    /// Returns why none of the rollouts in flight runs; `None` if one may.
    async fn rest(&self, rollouts: u64) -> Option<String> {
        let cx = CallContext::within(PROBE_INTERVAL);
        let listed = self.client.registry().list(&cx).await.unwrap_or_default();
        let addresses =
            listed.into_iter().map(Address::of).take(ASKED_MAX).chain(of_this_machine()).collect::<Vec<_>>();
        let wanted = WaitsWanted { rollout: None, older: Duration::ZERO, collectors: None, limit: RESTS_SHOWN };
        let waits = follow(&self.client.transports().aside(), &addresses, &BTreeMap::new(), wanted).await;
        if !waits.all_rest(rollouts) {
            return None;
        }
        let why = waits.chains.iter().find(|chain| chain.rollout.is_some()).map(|chain| chain.leaf.clone());
        Some(format!("none of them runs; the oldest {}", why.unwrap_or_default()))
    }

    /// Calls the endpoints. Returns what those with calls in flight say, if none of them serves its calls.
    async fn unserved(&self) -> Option<Vec<String>> {
        let endpoints = self.request(Some(PROBE_QUERY), PROBE_TIMEOUT).await;
        let busy: Vec<&ModelEndpoint> = endpoints.iter().filter(|endpoint| endpoint.report.in_flight > 0).collect();
        let none = !busy.is_empty() && busy.iter().all(|endpoint| endpoint.is_silent());
        none.then(|| busy.iter().map(|endpoint| endpoint.summary()).collect())
    }

    /// Returns the responses that each endpoint has aborted so far.
    pub(in crate::cli) async fn aborted(&self) -> BTreeMap<(String, String), u64> {
        let endpoints = self.request(None, PROBE_INTERVAL).await.into_iter();
        endpoints.map(|ModelEndpoint { server, report }| ((server, report.url), report.aborted)).collect()
    }

    /// Returns a line on each endpoint that aborted responses since `before`.
    pub(in crate::cli) async fn aborted_since(&self, before: &BTreeMap<(String, String), u64>) -> Vec<String> {
        let counts = self.aborted().await.into_iter().map(|(endpoint, count)| {
            let before = before.get(&endpoint).copied().unwrap_or_default();
            (endpoint, count.saturating_sub(before))
        });
        let lines = counts.filter(|(_, count)| *count > 0).map(|((server, url), count)| {
            format!("{server}: {url} aborted {count} responses or may have, as vLLM does when it pauses or sleeps; the calls were repeated")
        });
        lines.collect()
    }

    /// Returns the servers for which calls of this process and of the other servers wait. Calls of several processes are not added, because the
    /// servers of one process report the same ones. Notes in `silent` since when servers do not answer.
    async fn awaited(&self, silent: &mut BTreeMap<String, Instant>) -> Vec<AwaitedServer> {
        let asked = self.others.iter().map(async |server| {
            (server, self.client.get(&CallContext::within(PROBE_INTERVAL), server, "/health").await)
        });
        let mut told = Vec::new();
        for (server, answer) in join_all(asked).await {
            match answer {
                Ok(answer) => {
                    let health = serde_json::from_slice::<Health>(&answer.message.head.to_bytes());
                    told.extend(health.map(|health| health.awaits).unwrap_or_default());
                    silent.remove(server);
                }
                Err(error) if (error.code(), error.execution()) == (Code::DeadlineExceeded, Execution::Unknown) => {
                    silent.entry(server.clone()).or_insert_with(|| Instant::now() - PROBE_INTERVAL);
                }
                Err(_) => drop(silent.remove(server)),
            }
        }
        let mut longest: BTreeMap<String, AwaitedServer> = BTreeMap::new();
        for awaited in self.client.awaited().list().into_iter().chain(told) {
            let known = longest.entry(awaited.server.clone()).or_insert_with(|| awaited.clone());
            if awaited.waiting > known.waiting {
                *known = awaited;
            }
        }
        longest.into_values().filter(|awaited| awaited.seconds > 0).collect()
    }

    /// Requests the health of all model servers. One that does not answer has no endpoints.
    async fn request(&self, query: Option<&str>, within: Duration) -> Vec<ModelEndpoint> {
        let route = query.map_or_else(|| "/health".to_owned(), |query| format!("/health?{query}"));
        let requests = self.servers.iter().map(|server| async {
            let cx = CallContext::within(within);
            let answer = self.client.get(&cx, server, route.clone()).await;
            answer.map(|answer| endpoints(server, &answer)).unwrap_or_default()
        });
        join_all(requests).await.into_iter().flatten().collect()
    }
}

impl ModelEndpoint {
    /// Returns `true` if waiting for the endpoint may help.
    pub(in crate::cli) fn is_silent(&self) -> bool {
        self.report.state == EndpointState::Unavailable
    }

    fn same(&self, other: &Self) -> bool {
        let key = |endpoint: &Self| {
            (
                endpoint.server.clone(),
                endpoint.report.url.clone(),
                endpoint.report.state,
                endpoint.report.reason.clone(),
            )
        };
        key(self) == key(other)
    }

    fn print(&self, advises: bool, console: &Console) {
        let text = self.at_start(advises);
        if self.report.reason.is_empty() { console.line(&text) } else { console.warn(text) }
    }

    /// Describes the result of a probe: `model endpoint http://… (policy_model) is unavailable: connection refused`.
    pub(in crate::cli) fn summary(&self) -> String {
        let Self { server, report } = self;
        let said = match report.state {
            EndpointState::Ready => "responds",
            EndpointState::Unavailable => "is unavailable",
            _ => "cannot be used",
        };
        let reason = if report.reason.is_empty() { String::new() } else { format!(": {}", report.reason) };
        format!("model endpoint {} ({server}) {said}{reason}", report.url)
    }

    /// Returns the summary with the fix.
    fn at_start(&self, advises: bool) -> String {
        let EndpointReport { fix, gives_up_after_seconds: seconds, .. } = &self.report;
        let mut text = self.summary();
        if !fix.is_empty() {
            text.push_str(&format!("\n  fix: {fix}"));
        }
        if advises && self.is_silent() {
            text.push_str(&format!(
                "; --wait-for-model SECS waits for it, and without it each call waits up to {seconds} s"
            ));
        }
        text
    }
}

/// Calls the endpoints of a model server that was built but not started.
pub(in crate::cli) async fn probe(server: &str, handler: &dyn Handler) -> Vec<ModelEndpoint> {
    let request = Request::get(CallContext::within(PROBE_TIMEOUT), format!("/health?{TRIAL_QUERY}"));
    match handler.handle(request).await {
        Ok(answer) => endpoints(server, &answer),
        Err(_) => Vec::new(),
    }
}

/// Returns the endpoints in a response to `/health`.
fn endpoints(server: &str, answer: &Response) -> Vec<ModelEndpoint> {
    let health = serde_json::from_slice::<Health>(&answer.message.head.to_bytes());
    let endpoints = health.map(|health| health.endpoints).unwrap_or_default().into_iter();
    endpoints.map(|report| ModelEndpoint { server: server.to_owned(), report }).collect()
}

/// Describes an endpoint of a model server in one line, if calls wait for it or take long.
pub(in crate::cli) fn in_progress(server: &str, report: &EndpointReport) -> Option<String> {
    if report.oldest_seconds > 0 && report.failing_seconds == 0 {
        return Some(slow(server, report));
    }
    let verb = match report.state {
        EndpointState::Unavailable => "is unavailable",
        EndpointState::Misconfigured => "cannot be used",
        _ => return None,
    };
    let EndpointReport { url, failing_seconds, reason, fix, waiting, gives_up_after_seconds, .. } = report;
    let mut text = format!("{server}: {url} {verb} for {failing_seconds} s: {reason} (fix: {fix})");
    match waiting {
        0 => {}
        1 => text.push_str(&format!(", 1 call waits up to {gives_up_after_seconds} s")),
        calls => text.push_str(&format!(", {calls} calls wait up to {gives_up_after_seconds} s")),
    }
    Some(text)
}

/// Describes a server for which calls wait.
fn absent(awaited: &AwaitedServer) -> String {
    let AwaitedServer { server, seconds, waiting, gives_up_after_seconds, reason } = awaited;
    let calls = if *waiting == 1 { "1 call waits".to_owned() } else { format!("{waiting} calls wait") };
    format!("{server} has been away for {seconds} s: {reason}, {calls} up to {gives_up_after_seconds} s")
}

/// Describes an endpoint with calls that take long.
fn slow(server: &str, report: &EndpointReport) -> String {
    let EndpointReport { url, in_flight, oldest_seconds, reason, fix, .. } = report;
    let calls = if *in_flight == 1 { "1 call".to_owned() } else { format!("{in_flight} calls") };
    let mut text = format!("{server}: {url} has {calls} without a response, the oldest for {oldest_seconds} s");
    if !reason.is_empty() {
        text.push_str(&format!(": {reason}"));
    }
    if !fix.is_empty() {
        text.push_str(&format!(" (fix: {fix})"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(state: EndpointState, reason: &str, fix: &str) -> ModelEndpoint {
        let mut report = EndpointReport::default();
        report.url = "http://h:8000/v1".into();
        report.state = state;
        report.reason = reason.into();
        report.fix = fix.into();
        report.failing_seconds = 12;
        report.waiting = 3;
        report.gives_up_after_seconds = 300;
        ModelEndpoint { server: "policy_model".into(), report }
    }

    #[test]
    fn a_failing_endpoint_is_named_with_reason_and_fix() {
        let dead =
            endpoint(EndpointState::Unavailable, "connection refused", "start the engine, or correct `base_url`");
        assert_eq!(
            dead.at_start(true),
            "model endpoint http://h:8000/v1 (policy_model) is unavailable: connection refused\n  fix: start the engine, or \
             correct `base_url`; --wait-for-model SECS waits for it, and without it each call waits up to 300 s"
        );
        assert_eq!(
            in_progress(&dead.server, &dead.report).unwrap(),
            "policy_model: http://h:8000/v1 is unavailable for 12 s: connection refused (fix: start the engine, or correct \
             `base_url`), 3 calls wait up to 300 s"
        );
        let mut paused = endpoint(EndpointState::Unavailable, "it is paused", "continue it with POST /resume");
        (paused.report.in_flight, paused.report.oldest_seconds, paused.report.failing_seconds) = (16, 75, 0);
        assert_eq!(
            in_progress(&paused.server, &paused.report).unwrap(),
            "policy_model: http://h:8000/v1 has 16 calls without a response, the oldest for 75 s: it is paused (fix: continue it with POST \
             /resume)"
        );
        let ready = endpoint(EndpointState::Ready, "", "");
        assert_eq!(ready.at_start(true), "model endpoint http://h:8000/v1 (policy_model) responds");
        assert_eq!((in_progress("m", &ready.report), ready.is_silent()), (None, false));
    }
}
