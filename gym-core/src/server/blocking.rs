//! Environments that block: their calls run on threads of their own, not on those of the runtime.

use std::fmt;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tracing::Instrument as _;

use crate::base::error::{Code, Error, Execution, Result};
use crate::message::{CallContext, RawObject, Response};
use crate::server::{GymnasiumServer, ModelResponse, ResourcesServer, SessionId, SessionTable, Step, Tool, Verdict};

/// Default of [`Blocking::threads`]: enough for calls that wait for a disk or a process, and few enough that their stacks and their
/// switches cost little. The runtime has at most 512 such threads.
const THREADS: usize = 64;

/// Runs the calls of an environment that blocks on separate threads.
///
/// Use it if a tool or the verifier blocks its thread for longer than a millisecond: it waits for a process or a lock, calls a library that
/// waits, or computes. Without it, such a call also stops the calls of all other servers on its thread. The watchdog reports a thread that has
/// been blocked for a second. A call costs about 20 µs more than without it.
///
/// Each call occupies one thread until it returns, even if its caller has left: a thread cannot be stopped. `cx.cancel` tells it that the caller
/// has left. Calls beyond the number of threads wait, within their deadlines. Worker groups have
/// the same for their workers: `HandlesBlocking`.
///
/// ```
/// use gym_core::prelude::*;
/// use gym_core::server::{Blocking, Harness};
/// use serde_json::json;
///
/// struct Compiler;
///
/// impl ResourcesServer for Compiler {
///     type Task = serde::de::IgnoredAny;
///     tools! { |self, _cx, _session|
///         compile() => std::process::Command::new("true")
///             .status()
///             .map(|status| json!({"compiles": status.success()}))
///             .map_err(|error| Error::internal("cannot start the compiler").caused_by(error)),
///     }
///     async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
///         Ok(Verdict::correct(true))
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// // In a program: `Servers::stock().resources("compiler", |_| Ok(Blocking::new(Compiler).threads(8)))`.
/// let harness = Harness::new(Blocking::new(Compiler).threads(8));
/// let mut episode = harness.seed(json!({"responses_create_params": {"input": "Compile it."}})).await?;
/// assert_eq!(episode.call("compile", json!({})).await?, json!({"compiles": true}));
/// # Ok(()) }
/// ```
pub struct Blocking<S> {
    server: Arc<S>,
    threads: usize,
    free: Arc<Semaphore>,
}

impl<S> Blocking<S> {
    /// Runs the calls of an environment on up to 64 threads.
    #[must_use]
    pub fn new(server: S) -> Self {
        Self { server: Arc::new(server), threads: THREADS, free: Arc::new(Semaphore::new(THREADS)) }
    }

    /// Sets the maximum number of calls that run at once, at least one. With one, calls run one after another, as a library needs that is not safe
    /// for threads.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.clamp(1, Semaphore::MAX_PERMITS);
        self.free = Arc::new(Semaphore::new(self.threads));
        self
    }

    /// Returns the environment.
    #[must_use]
    pub fn server(&self) -> &S {
        &self.server
    }

    /// Runs a call on a thread of its own.
    async fn run<T, F, Fut>(&self, cx: &CallContext, call: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(Arc<S>, CallContext) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>>,
        S: Send + Sync + 'static,
    {
        let free = Arc::clone(&self.free).acquire_owned();
        let free = async { Ok(free.await.expect("the semaphore is never closed")) };
        let permit = cx.bound(Execution::NotStarted, free).await.map_err(|error| match error.code() {
            Code::DeadlineExceeded => {
                let text = format!("all {} threads of this blocking environment are busy", self.threads);
                Error::not_started(error.code(), text).caused_by(error)
            }
            _ => error,
        })?;
        let (server, cx, runtime) = (Arc::clone(&self.server), cx.clone(), Handle::current());
        let span = tracing::Span::current();
        let running = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            // Timers, tasks and calls of other servers still belong to the runtime.
            runtime.block_on(call(server, cx).instrument(span))
        });
        match running.await {
            Ok(result) => result,
            // A panic has the same effect as without this wrapper.
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(Error::unknown(Code::Unavailable, "the runtime is shutting down")),
            },
        }
    }
}

impl<S> fmt::Debug for Blocking<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocking").field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl<S: ResourcesServer<Task: 'static>> ResourcesServer for Blocking<S> {
    type Task = S::Task;

    async fn seed_session(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject> {
        let (session, row) = (session.clone(), row.clone());
        self.run(cx, |server, cx| async move { server.seed_session(&cx, &session, &row).await }).await
    }

    fn tools(&self) -> Vec<Tool> {
        self.server.tools()
    }

    async fn call_tool(
        &self,
        cx: &CallContext,
        session: &SessionId,
        tool: &str,
        arguments: &RawObject,
    ) -> Result<Response> {
        let (session, tool, arguments) = (session.clone(), tool.to_owned(), arguments.clone());
        self.run(cx, |server, cx| async move { server.call_tool(&cx, &session, &tool, &arguments).await }).await
    }

    async fn verify(
        &self,
        cx: &CallContext,
        session: &SessionId,
        task: Self::Task,
        response: &ModelResponse,
    ) -> Result<Verdict> {
        let (session, response) = (session.clone(), response.clone());
        self.run(cx, |server, cx| async move { server.verify(&cx, &session, task, &response).await }).await
    }

    fn returns(&self, key: &str) -> bool {
        self.server.returns(key)
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        self.server.sessions()
    }

    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()> {
        let session = session.clone();
        self.run(cx, |server, cx| async move { server.close_session(&cx, &session).await }).await
    }
}

impl<S: GymnasiumServer<Task: 'static>> GymnasiumServer for Blocking<S> {
    type Task = S::Task;

    async fn reset(&self, cx: &CallContext, session: &SessionId, task: Self::Task) -> Result<Option<String>> {
        let session = session.clone();
        self.run(cx, |server, cx| async move { server.reset(&cx, &session, task).await }).await
    }

    async fn step(
        &self,
        cx: &CallContext,
        session: &SessionId,
        task: Self::Task,
        response: &ModelResponse,
    ) -> Result<Step> {
        let (session, response) = (session.clone(), response.clone());
        self.run(cx, |server, cx| async move { server.step(&cx, &session, task, &response).await }).await
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        self.server.sessions()
    }

    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()> {
        let session = session.clone();
        self.run(cx, |server, cx| async move { server.close_session(&cx, &session).await }).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;

    /// Two calls of a tool meet: each blocks its thread until the other one runs.
    struct Meeting(Barrier);

    impl ResourcesServer for Meeting {
        type Task = serde::de::IgnoredAny;

        async fn call_tool(&self, _: &CallContext, _: &SessionId, _: &str, _: &RawObject) -> Result<Response> {
            self.0.wait();
            Ok(Response::json("{}"))
        }

        async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
            panic!("no ground to stand on")
        }
    }

    fn meeting() -> Blocking<Meeting> {
        Blocking::new(Meeting(Barrier::new(2)))
    }

    async fn meet(server: &Blocking<Meeting>, cx: &CallContext) -> Result<Response> {
        server.call_tool(cx, &SessionId::new("1"), "meet", &RawObject::empty()).await
    }

    #[tokio::test(flavor = "current_thread")]
    async fn blocking_calls_of_a_runtime_with_one_thread_run_at_once() {
        let (server, cx) = (meeting(), CallContext::default());
        let (one, two) = tokio::join!(meet(&server, &cx), meet(&server, &cx));
        one.and(two).unwrap();
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_call_waits_for_a_thread_within_its_deadline_and_a_caller_that_left_keeps_its_thread() {
        let server = Arc::new(meeting().threads(1));
        let left = tokio::spawn({
            let server = Arc::clone(&server);
            async move { meet(&server, &CallContext::default()).await }
        });
        while server.free.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        left.abort();
        let error = meet(&server, &CallContext::within(Duration::from_millis(20))).await.unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::NotStarted));
        assert!(error.to_string().starts_with("all 1 threads of this blocking environment are busy"), "{error}");
        // Meets the call whose caller left, so that its thread ends.
        let inner = Arc::clone(&server.server);
        tokio::task::spawn_blocking(move || inner.0.wait()).await.unwrap();
    }

    #[tokio::test(flavor = "current_thread")]
    #[should_panic(expected = "no ground to stand on")]
    async fn a_panic_arrives_as_it_would_without_a_thread() {
        let response = ModelResponse(RawObject::empty());
        let task = serde::de::IgnoredAny;
        let _ = meeting().verify(&CallContext::default(), &SessionId::new("1"), task, &response).await;
    }
}
