//! One episode of an agent: seeds, plays and verifies it, keeps the cookies of each server, and closes the session.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, TryFutureExt};
use gym_client::{CallOptions, CookieJar, ServerClient, Session};
use gym_core::message::TraceContext;
use gym_core::observe::waits::{Wait, WaitGuard, WaitKind, WaitTarget};
use gym_core::rollout::metrics::STATISTICS_METADATA;
use gym_core::rollout::{EPISODE_METADATA, EpisodeRecord, FailureClass, Phase, UNVERIFIED_KEY, non_finite_reward};
use gym_core::server::{ResponseEnd, ResponseOutline, ToolErrors};
use gym_core::{
    CallContext, CancelToken, Code, Error, Execution, Message, Metadata, ModelResponse, RawObject, Response, Result,
    Rope, Route,
};
use serde::Deserialize;
use tokio::time::Instant;

use crate::agent::config::OutputLimits;
use crate::agent::observation::ToolRules;
use crate::agent::prefix::PrefixIds;
use crate::agent::reports::TurnReports;
use crate::agent::turn::{TokenUsage, Turn, yield_after};
use crate::role::resources::{SESSION_METADATA, TOOLS_KEY};
use crate::role::route::{classified, tool_route};

/// The key of a row with the request for the model.
pub(super) const PARAMS_KEY: &str = "responses_create_params";

/// Maximum bytes of a route that an error shows; routes are ASCII.
const ROUTE_SHOWN_BYTES: usize = 120;

/// Turns of a loop from which the error of a deadline names them: the loop may have no end.
const LONG_LOOP_TURNS: u32 = 16;

/// The limit that ends a long loop of an agent that calls [`Episode`] itself.
const LIMIT_IN_CODE: &str = "limit the turns in the code of the agent";

/// The deadline of a request that closes a session. It is long enough for a busy server, and short enough that requests to an
/// exited server do not accumulate. A session that was not closed expires.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// An episode in progress. Dropping it closes its session in the background, verified or not. It has no limit of turns: an agent that calls a model in a
/// loop needs one, and names it with [`Episode::truncate`].
///
/// ```
/// use gym_server::prelude::*;
///
/// /// An agent of one turn.
/// struct OneTurn(ServerClient);
///
/// impl AgentServer for OneTurn {
///     async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
///         let mut episode = Episode::seed(cx, &self.0, "math", row).await?;
///         let params = row.get_object("responses_create_params")?.unwrap_or_default();
///         let answer = episode.ask("policy_model", params).await?;
///         episode.verify(answer).await
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Episode {
    session: ResourcesSession,
    cx: CallContext,
    row: RawObject,
    course: Course,
    reports: TurnReports,
    /// `true` if the model was offered the tools of the server.
    offered: bool,
    tool_errors: ToolErrors,
    limits: Option<OutputLimits>,
}

impl Episode {
    /// Begins the episode of a row at a resources server.
    ///
    /// # Errors
    /// The error of `/seed_session`.
    pub async fn seed(cx: &CallContext, client: &ServerClient, resources: &str, row: &RawObject) -> Result<Self> {
        let mut course = Course::begin(cx);
        let session = ResourcesSession::seed(&cx.child(), &cx.metadata, client, resources, row).await?;
        course.add(Phase::Seed, course.began);
        Ok(Self {
            session,
            cx: cx.child(),
            row: row.clone(),
            course,
            reports: TurnReports::default(),
            offered: false,
            tool_errors: ToolErrors::Auto,
            limits: None,
        })
    }

    /// Sets what happens with the errors of tools that the model did not cause. By default [`ToolErrors::Auto`].
    #[must_use]
    pub fn with_tool_errors(mut self, rule: ToolErrors) -> Self {
        self.tool_errors = rule;
        self
    }

    /// Sets the maximum bytes of the outputs of tools. Unlimited by default.
    #[must_use]
    pub fn with_output_limits(mut self, limits: OutputLimits) -> Self {
        self.limits = Some(limits);
        self
    }

    /// Records that a limit of the agent ends the episode, such as `max_steps`. The reason is in the scored row.
    pub fn truncate(&mut self, reason: &str) {
        self.course.record.truncate(reason);
    }

    /// Sends a request to a model server, with the tools of the resources server unless the request has `tools`. The scored row has
    /// the tools that were added. Of an agent that changes the request otherwise, [`Episode::seed`] should get the changed row.
    ///
    /// # Errors
    /// The error of `/v1/responses`; `InvalidArgument` if the request has a tool that the resources server lacks, or if the
    /// response is not a JSON object.
    pub async fn ask(&mut self, model: &str, params: impl Into<Rope>) -> Result<ModelResponse> {
        yield_after(self.course.record.turns).await;
        let mut params = params.into();
        if self.session.tools.is_some() {
            let request = params.to_object()?;
            let offered = self.session.with_tools(&request)?;
            self.offered |= offered.is_some();
            params = offered.unwrap_or(request).into();
        }
        let asked = Instant::now();
        let answer = post(self.session.calls(), &self.cx, model, "/v1/responses", params).await;
        let answer: Message = answer.map_err(|error| self.course.late(error, LIMIT_IN_CODE))?;
        self.course.add(Phase::Model, asked);
        let answer = answer.head.to_object()?;
        // A response without counts is as good as one with them.
        let usage = answer.get_as::<TokenUsage>("usage").ok().flatten();
        self.course.answered(model, &answer, usage.map_or((None, None), |usage| usage.tokens()));
        self.reports.add(&answer);
        self.course.record.truncated = None;
        let end = ResponseEnd::of_response(&answer).truncation().and_then(|end| {
            // As the verifier will read it: what it cannot read is the model's fault.
            let readable = answer.outline::<ResponseOutline>();
            readable
                .map(|_| end)
                .map_err(|error| Error::finished(Code::DataLoss, "the response cannot be read").caused_by(error))
        });
        let of_model =
            |error: Error| error.or_class(FailureClass::ModelError).about(format!("POST {model}/v1/responses"));
        if let Some(reason) = end.map_err(of_model)? {
            self.course.record.truncate(&reason);
        }
        Ok(ModelResponse(answer))
    }

    /// Calls a tool of the resources server, and returns the message for the model.
    ///
    /// # Errors
    /// The error of the call, or that of the tool if it must fail the attempt. An error that the model caused is not an error here: it
    /// is data for the model. [`Episode::with_tool_errors`] sets the rule.
    pub async fn call_tool(&mut self, tool: &str, arguments: impl Into<Rope>) -> Result<Message> {
        let route = tool_route(tool);
        let server = Arc::clone(&self.session.server);
        let called = Instant::now();
        let answer = self.session.calls().post(&self.cx, &server, route.clone(), arguments).await;
        self.course.add(Phase::Tool, called);
        self.course.record.tool_calls = self.course.record.tool_calls.saturating_add(1);
        let rules = ToolRules { errors: self.tool_errors, limits: self.limits.as_ref() };
        let message = answer.and_then(|answer| rules.observe(&mut self.course.record, tool, answer));
        message.map_err(|error| self.course.late(of_inner(error, &server, route.as_str()), LIMIT_IN_CODE))
    }

    /// Verifies the episode: returns the row with the response and its reward.
    ///
    /// # Errors
    /// The error of `/verify`; `DataLoss` if its response has no reward.
    pub async fn verify(mut self, response: ModelResponse) -> Result<Response> {
        let offered = if self.offered { self.session.row_params_with_tools(&self.row)? } else { None };
        let row = self.row.edit();
        let row = match offered {
            Some(params) => row.set_object(PARAMS_KEY, params),
            None => row,
        };
        let row = row.set_object("response", self.reports.write(response)?.0).to_rope();
        let asked = Instant::now();
        let response = self.session.verify(&self.cx, row).await?;
        self.course.add(Phase::Verify, asked);
        Ok(recorded(response, &self.course.record))
    }
}

/// The course of an episode in progress.
#[derive(Debug)]
pub(super) struct Course {
    pub(super) began: Instant,
    pub(super) record: EpisodeRecord,
    prefix: PrefixIds,
    trace_id: u128,
    /// Tells the turns to `rgym stuck` and to the collector's progress line. `None` for short episodes, which pay nothing for it.
    shown: Option<ShownTurns>,
}

/// The turns of an episode that goes on, in the table of waits.
#[derive(Debug)]
struct ShownTurns {
    turns: Arc<TurnCount>,
    _wait: WaitGuard,
}

#[derive(Debug)]
struct TurnCount(AtomicU32);

impl WaitTarget for TurnCount {
    fn describe(&self) -> String {
        format!("{} turns", self.0.load(Ordering::Relaxed))
    }

    fn turns(&self) -> Option<u32> {
        Some(self.0.load(Ordering::Relaxed))
    }
}

impl Course {
    /// Begins now, on behalf of this call.
    pub(super) fn begin(cx: &CallContext) -> Self {
        Self {
            began: Instant::now(),
            record: EpisodeRecord::default(),
            prefix: PrefixIds::default(),
            trace_id: cx.trace.trace_id,
            shown: None,
        }
    }

    /// Adds a response of a model, with the tokens that it read and wrote.
    pub(super) fn answered(&mut self, model: &str, response: &RawObject, (input, output): (Option<u64>, Option<u64>)) {
        let record = &mut self.record;
        record.turns = record.turns.saturating_add(1);
        record.add_tokens(input, output);
        record.completion_unverified |= response.get(UNVERIFIED_KEY).is_some_and(|unverified| unverified == "true");
        if let Some(breaks) = self.prefix.add(model, response) {
            record.prefix_breaks = Some(record.prefix_breaks.unwrap_or(0).saturating_add(breaks.into()));
        }
        self.show();
    }

    /// Shows the turns from the second one on.
    fn show(&mut self) {
        let turns = self.record.turns;
        match &self.shown {
            Some(shown) => shown.turns.0.store(turns, Ordering::Relaxed),
            None if turns < 2 || self.trace_id == 0 => {}
            None => {
                let turns = Arc::new(TurnCount(AtomicU32::new(turns)));
                let wait = Wait::new(WaitKind::Episode, self.trace_id).since(self.began).on(turns.clone());
                self.shown = Some(ShownTurns { turns, _wait: WaitGuard::begin(wait) });
            }
        }
    }

    /// Adds the turns of a long loop to the error of a call whose deadline has passed. `fix` says what ends such a loop.
    pub(super) fn late(&self, error: Error, fix: &str) -> Error {
        let EpisodeRecord { turns, tool_calls, .. } = self.record;
        if error.code() != Code::DeadlineExceeded || turns < LONG_LOOP_TURNS {
            return error;
        }
        let text = format!("the episode had not ended after {turns} turns and {tool_calls} tool calls; {fix}");
        Error::finished(error.code(), text).caused_by(error)
    }

    /// Adds a call that began at `call` and has just ended.
    pub(super) fn add(&mut self, phase: Phase, call: Instant) {
        self.record.phases.add(phase, self.began, call);
    }
}

/// The calls of one episode, with the session at its resources server. The session is closed when this is dropped.
#[derive(Debug)]
pub(super) struct ResourcesSession {
    client: ServerClient,
    /// `None` after a drop.
    calls: Option<Session>,
    server: Arc<str>,
    /// The route that closes the session; `None` if the server does not support it, or the session has been closed.
    close: Option<&'static str>,
    trace: TraceContext,
    /// The tools that the server declares, as a JSON list.
    tools: Option<Bytes>,
}

/// A session whose first request is in flight. The session may already have begun, so after a drop the request continues in the
/// background until its reply reports whether the session can be closed.
struct BeginningSession {
    client: ServerClient,
    /// `None` after completion.
    begun: Option<BoxFuture<'static, Result<(ResourcesSession, Response)>>>,
}

impl Drop for BeginningSession {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.client.in_background(async move { drop(tokio::time::timeout(CLOSE_TIMEOUT, begun).await) });
        }
    }
}

impl ResourcesSession {
    /// Begins an episode with `POST /seed_session`, which carries the cookies of the caller's request.
    pub(super) async fn seed(
        cx: &CallContext,
        caller: &Metadata,
        client: &ServerClient,
        server: &str,
        row: &RawObject,
    ) -> Result<Self> {
        let has = |reply: &Response, wanted: &str| {
            reply.metadata.get(SESSION_METADATA).unwrap_or_default().split(", ").any(|flag| flag == wanted)
        };
        let close = move |reply: &Response| has(reply, "close").then_some("/close_session");
        let (mut session, reply) = Self::begin(cx, caller, client, server, "/seed_session", row, close).await?;
        if has(&reply, "tools") {
            session.tools = reply.message.head.to_object()?.get(TOOLS_KEY);
        }
        Ok(session)
    }

    /// Begins an episode with a first request, and returns the session and the response. `close` returns the route that closes the
    /// session, or `None` if the response does not report such support.
    pub(super) async fn begin(
        cx: &CallContext,
        caller: &Metadata,
        client: &ServerClient,
        server: &str,
        route: &'static str,
        row: &RawObject,
        close: impl Fn(&Response) -> Option<&'static str> + Send + 'static,
    ) -> Result<(Self, Response)> {
        let mut calls = client.session();
        let cookies = CookieJar::of_request(caller);
        if cookies.header().is_some() {
            *calls.jar(server) = cookies;
        }
        // The request is not cancelled with the episode, because a session that began without a visible reply could not be closed.
        let mut own = cx.child();
        own.cancel = CancelToken::new();
        own.deadline += CLOSE_TIMEOUT;
        let mut session = Self {
            client: client.clone(),
            calls: Some(calls),
            server: server.into(),
            close: None,
            trace: cx.trace,
            tools: None,
        };
        let row = row.clone();
        let begun = async move {
            let server = Arc::clone(&session.server);
            let reply = post_whole(session.calls(), &own, &server, route, row).await?;
            session.close = close(&reply);
            Ok((session, reply))
        };
        let mut beginning = BeginningSession { client: client.clone(), begun: Some(begun.boxed()) };
        let finished = cx.bound(Execution::Finished, async {
            let begun = beginning.begun.as_mut().expect("taken only when this is dropped").await;
            beginning.begun = None;
            Ok(begun)
        });
        match finished.await {
            Ok(begun) => begun,
            Err(stopped) => Err(stopped.about(format!("POST {server}{route}"))),
        }
    }

    /// Verifies the episode: returns the row with its reward.
    pub(super) fn verify(
        &mut self,
        cx: &CallContext,
        row: Rope,
    ) -> impl Future<Output = Result<Response>> + Send + use<'_> {
        let server = Arc::clone(&self.server);
        self.calls().post(cx, &server, Route::from_static("/verify"), row).map(move |answer| {
            let verdict = of_call(answer, &server, "/verify")?.message;
            let scored = scored(verdict.head).map(Response::json);
            scored.map_err(|error| classified("/verify", error).about(format!("POST {server}/verify")))
        })
    }

    /// Returns a context that is not a child of the episode's: the session is closed even if the episode was cancelled or timed
    /// out.
    fn closing(&self) -> CallContext {
        let mut cx = CallContext::within(CLOSE_TIMEOUT);
        cx.trace = self.trace;
        cx
    }

    /// Closes the session now, if the server supports it.
    pub(super) async fn close(&mut self) -> Result<()> {
        let Some(route) = self.close else { return Ok(()) };
        let (cx, server) = (self.closing(), Arc::clone(&self.server));
        post(self.calls(), &cx, &server, route, "{}").await?;
        self.close = None;
        Ok(())
    }

    /// Returns the calls of the episode, to this server and to others.
    pub(super) fn calls(&mut self) -> &mut Session {
        self.calls.as_mut().expect("taken only when this is dropped")
    }

    /// Returns a request for a model with the server's tools; `None` if the server declares none, or if the request has tools of its
    /// own. The server must have all of those.
    pub(super) fn with_tools(&self, params: &RawObject) -> Result<Option<RawObject>> {
        let Some(tools) = &self.tools else { return Ok(None) };
        match own_tools(params) {
            Some(own) => self.check_tools(&own, tools).map(|()| None),
            None => Ok(Some(params.edit().set("tools", tools.clone()).to_object()?)),
        }
    }

    /// Returns the request of a row with the server's tools, unless the row has tools of its own.
    fn row_params_with_tools(&self, row: &RawObject) -> Result<Option<RawObject>> {
        match row.get_object(PARAMS_KEY)?.filter(|params| own_tools(params).is_none()) {
            Some(params) => self.with_tools(&params),
            None => Ok(None),
        }
    }

    fn check_tools(&self, own: &Bytes, declared: &Bytes) -> Result<()> {
        #[derive(Deserialize)]
        struct ToolName {
            #[serde(rename = "type", default)]
            kind: String,
            #[serde(default)]
            name: String,
        }
        let read = |tools: &Bytes, whose: &str| {
            serde_json::from_slice::<Vec<ToolName>>(tools).map_err(|error| {
                Error::invalid(format!("the `tools` of {whose} are not a list of tools")).caused_by(error)
            })
        };
        let own = read(own, "the row")?;
        let declared = read(declared, &self.server)?;
        let mut functions = own.iter().filter(|tool| tool.kind == "function");
        match functions.find(|tool| declared.iter().all(|known| known.name != tool.name)) {
            None => Ok(()),
            Some(unknown) => {
                let names: Vec<&str> = declared.iter().map(|tool| tool.name.as_str()).collect();
                Err(Error::invalid(format!(
                    "the row has tool `{}`, which server `{}` does not have; remove it from the row, or use one of {}",
                    unknown.name,
                    self.server,
                    names.join(", ")
                )))
            }
        }
    }
}

fn own_tools(params: &RawObject) -> Option<Bytes> {
    params.get("tools").filter(|own| &own[..] != b"null")
}

impl Drop for ResourcesSession {
    fn drop(&mut self) {
        if let (Some(route), Some(mut calls)) = (self.close, self.calls.take()) {
            let (cx, server) = (self.closing(), Arc::clone(&self.server));
            // Boxed, because a task that awaits a call is as large as the call.
            self.client.in_background(Box::pin(async move {
                if let Err(error) = post(&mut calls, &cx, &server, route, "{}").await {
                    tracing::debug!(%server, route, %error, "a session was not closed; it will expire");
                }
            }));
        }
    }
}

/// Calls the model for one turn.
pub(super) fn ask(
    session: &mut Session,
    cx: &CallContext,
    model: &str,
    body: Rope,
) -> impl Future<Output = Result<Turn>> + Send {
    post(session, cx, model, "/v1/responses", body).map(move |answer| {
        let turn = Turn::parse(&answer?.head);
        turn.map_err(|error| error.or_class(FailureClass::ModelError).about(format!("POST {model}/v1/responses")))
    })
}

/// Adds the course of an episode to its response. In metadata, because the verifier's row can be a megabyte, and callers in other
/// languages see the body that they know.
pub(super) fn recorded(mut response: Response, record: &EpisodeRecord) -> Response {
    response.metadata.push(EPISODE_METADATA, record.to_text());
    response
}

/// Adds the cookies that the calls of an episode received to its response: a Python caller sends them to `/verify`.
pub(super) fn return_cookies(response: &mut Response, jar: &CookieJar) {
    for (name, value) in jar.iter() {
        response.metadata.push("set-cookie", format!("{name}={value}; Path=/; SameSite=lax"));
    }
}

/// Sends `/aggregate_metrics` to the resources server of an agent.
pub(super) async fn aggregate(
    cx: &CallContext,
    client: &ServerClient,
    server: &str,
    body: &RawObject,
) -> Result<Response> {
    const ROUTE: &str = "/aggregate_metrics";
    let route = Route::from_static(ROUTE);
    let answer = client.post(&cx.child(), server, route, body.text().clone(), CallOptions::idempotent()).await;
    let answer = answer.and_then(Response::into_result).map_err(|error| of_inner(error, server, ROUTE))?;
    let mut response = Response::json(answer.message.head);
    if let Some(statistics) = answer.metadata.get(STATISTICS_METADATA) {
        response.metadata.push(STATISTICS_METADATA, statistics.to_owned());
    }
    Ok(response)
}

/// Sends a request of an episode. Like the other calls here, not an async fn: its future would hold each argument twice, and every rollout in
/// flight holds one of these.
pub(super) fn post(
    session: &mut Session,
    cx: &CallContext,
    server: &str,
    route: &'static str,
    body: impl Into<Rope>,
) -> impl Future<Output = Result<Message>> + Send {
    post_whole(session, cx, server, route, body).map_ok(|response| response.message)
}

/// Sends a request as [`post`] does, and also returns the metadata of the response.
fn post_whole(
    session: &mut Session,
    cx: &CallContext,
    server: &str,
    route: &'static str,
    body: impl Into<Rope>,
) -> impl Future<Output = Result<Response>> + Send {
    session.post(cx, server, Route::from_static(route), body).map(move |answer| of_call(answer, server, route))
}

/// Returns the response of an inner call, or its failure as that of the outer call.
fn of_call(answer: Result<Response>, server: &str, route: &str) -> Result<Response> {
    answer.and_then(Response::into_result).map_err(|error| of_inner(error, server, route))
}

/// Converts the failure of an inner call to the failure of the outer call. The outer call has run, so its caller must not resend
/// it. A request that the inner server rejects is a defect of this agent, not of the caller's request.
pub(super) fn of_inner(error: Error, server: &str, route: &str) -> Error {
    let code = error.code().of_served_request();
    // The server rejected the request, although it did not start.
    let rejected = error.execution() == Execution::NotStarted && code != error.code();
    let error = if error.execution() == Execution::Finished || rejected {
        classified(route, error)
    } else {
        // The server was not reached, or was lost: the code and the execution tell which.
        let class = error.failure_class();
        error.or_class(class)
    };
    // A tool's name comes from a model and can be long.
    let route = &route[..route.len().min(ROUTE_SHOWN_BYTES)];
    Error::new(code, Execution::Finished, "").about(format!("POST {server}{route}")).caused_by(error)
}

/// Returns the verifier's response if it is a row with a reward.
pub(super) fn scored(text: Rope) -> Result<Rope> {
    let lost = |what: String| Error::finished(Code::DataLoss, what);
    let invalid = |reward: &[u8]| {
        let text =
            format!("the response's `reward` is {}, which is not a finite number", String::from_utf8_lossy(reward));
        lost(text).or_class(FailureClass::InvalidReward)
    };
    let row = text.to_object().map_err(|error| match non_finite_reward(&text.to_bytes()) {
        Some(reward) => invalid(reward.as_bytes()),
        None => lost(format!("the response is not a row: {error}")),
    })?;
    let reward = row.get("reward").ok_or_else(|| lost("the response has no `reward`".into()))?;
    // Follows pydantic's conversion of a reward that is not written as a number.
    match &reward[..] {
        b"true" => Ok(row.edit().set("reward", "1.0").to_rope()),
        b"false" => Ok(row.edit().set("reward", "0.0").to_rope()),
        number if serde_json::from_slice::<f64>(number).is_ok_and(f64::is_finite) => Ok(text),
        other => Err(invalid(other)),
    }
}
