//! Plays episodes of an environment in a test: without a server, a model or a port.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::base::error::{Code, Error, Execution, Result};
use crate::base::failure::FailureClass;
use crate::message::{CallContext, RawObject};
use crate::server::{ModelResponse, ResourcesServer, SessionId, TaskCheck, ToolErrors, Verdict, tool_error_response};

/// Plays episodes of an environment in a test. The test plays the model: it calls tools and writes messages.
///
/// ```
/// use gym_core::prelude::*;
/// use gym_core::server::Harness;
/// use serde_json::json;
///
/// #[derive(Default)]
/// struct Counter(Sessions<i64>);
///
/// impl ResourcesServer for Counter {
///     type Task = serde::de::IgnoredAny;
///     tools! { |self, _cx, session|
///         count(by: i64) => self.0.with_or(session, || 0, |count| {
///             *count += by;
///             json!({"count": count})
///         }),
///     }
///     async fn verify(&self, _: &CallContext, session: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
///         self.0.score(session, |count| Verdict::correct(*count == 3))
///     }
///     fn sessions(&self) -> Option<&dyn SessionTable> {
///         Some(&self.0)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let harness = Harness::new(Counter::default());
/// let mut episode = harness.seed(json!({"responses_create_params": {"input": "Count to 3."}})).await?;
/// assert_eq!(episode.call("count", json!({"by": 3})).await?, json!({"count": 3}));
/// episode.say("Done.");
/// assert_eq!(episode.verify().await?.reward, 1.0);
/// assert_eq!(harness.server().0.count(), 0);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Harness<S> {
    server: S,
    context: CallContext,
    seeded: AtomicU64,
}

/// An episode of a [`Harness`], created by [`Harness::seed`].
#[derive(Debug)]
#[must_use = "an episode ends when it is verified or closed"]
pub struct HarnessEpisode<'a, S> {
    harness: &'a Harness<S>,
    session: SessionId,
    row: RawObject,
    output: Vec<Value>,
}

impl<S: ResourcesServer> Harness<S> {
    /// Creates a harness of an environment. Its calls have the default deadline of a call.
    #[must_use]
    pub fn new(server: S) -> Self {
        Self { server, context: CallContext::default(), seeded: AtomicU64::new(0) }
    }

    /// Returns the environment.
    #[must_use]
    pub fn server(&self) -> &S {
        &self.server
    }

    /// Begins an episode of a row, in its own session.
    ///
    /// # Errors
    /// `InvalidArgument` if the row is not a JSON object or does not fit the environment's task; the error of the environment.
    pub async fn seed(&self, row: Value) -> Result<HarnessEpisode<'_, S>> {
        let row = RawObject::parse(row.to_string())?;
        TaskCheck::of::<S::Task>().check(&row)?;
        // Distinct from the ids of all other episodes of this harness.
        let session = SessionId::new(format!("harness-{}", self.seeded.fetch_add(1, Ordering::Relaxed)));
        self.server.seed_session(&self.context, &session, &row).await?;
        Ok(HarnessEpisode { harness: self, session, row, output: Vec::new() })
    }
}

impl<S: ResourcesServer> HarnessEpisode<'_, S> {
    /// Returns the session of the episode.
    #[must_use]
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// Calls a tool as the model would, and returns the body of its response. An error that the model caused is returned in the same
    /// way, such as the 422 of invalid arguments or the 404 of an unknown tool.
    ///
    /// # Errors
    /// The error of the tool if it fails an attempt, see [`ToolErrors::Auto`]; `InvalidArgument` if the arguments are not a JSON object;
    /// `DataLoss` if the body is not JSON.
    pub async fn call(&mut self, tool: &str, arguments: Value) -> Result<Value> {
        let arguments = RawObject::parse(arguments.to_string())?;
        let call_id = format!("call_{}", self.output.len());
        let text = String::from_utf8_lossy(arguments.text());
        self.output.push(json!({"type": "function_call", "call_id": call_id, "name": tool, "arguments": text}));
        let called = self.harness.server.call_tool(&self.harness.context, &self.session, tool, &arguments).await;
        let response = called.unwrap_or_else(|error| tool_error_response(&error.or_class(FailureClass::ToolError)));
        let admitted = ToolErrors::Auto.admit(response);
        let (response, _) = admitted.map_err(|error| error.within(Execution::Finished, format!("tool `{tool}`")))?;
        let body = response.message.head.to_bytes();
        let text = String::from_utf8_lossy(&body);
        self.output.push(json!({"type": "function_call_output", "call_id": call_id, "output": text}));
        serde_json::from_slice(&body).map_err(|error| {
            Error::finished(Code::DataLoss, format!("tool `{tool}`: the response is not JSON")).caused_by(error)
        })
    }

    /// Writes a message as the model would.
    pub fn say(&mut self, text: &str) -> &mut Self {
        let content = json!([{"type": "output_text", "text": text, "annotations": []}]);
        let id = format!("msg_{}", self.output.len());
        self.output
            .push(json!({"type": "message", "id": id, "role": "assistant", "status": "completed", "content": content}));
        self
    }

    /// Verifies the episode, and closes it.
    ///
    /// # Errors
    /// `InvalidArgument` if the row does not fit the environment's task; the error of the environment.
    pub async fn verify(self) -> Result<Verdict> {
        let response = json!({"id": "harness", "object": "response", "output": self.output});
        let response = ModelResponse(RawObject::parse(response.to_string())?);
        let (server, cx) = (&self.harness.server, &self.harness.context);
        let verdict = match self.row.view() {
            Ok(task) => server.verify(cx, &self.session, task, &response).await,
            Err(error) => Err(error),
        };
        self.close().await?;
        verdict.and_then(|verdict| verdict.check().map(|()| verdict))
    }

    /// Closes the episode without a verification, as an agent does when the episode fails.
    ///
    /// # Errors
    /// The error of the environment.
    pub async fn close(self) -> Result<()> {
        match self.harness.server.close_session(&self.harness.context, &self.session).await {
            Err(error) if error.code() == Code::Unimplemented => Ok(()),
            closed => closed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Response;

    struct Bank;

    impl ResourcesServer for Bank {
        type Task = serde::de::IgnoredAny;

        async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, _: &RawObject) -> Result<Response> {
            Err(match tool {
                "account" => Error::not_started(Code::NotFound, "there is no account 7"),
                _ => Error::internal("the ledger is locked"),
            })
        }

        async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
            Ok(Verdict::correct(true))
        }
    }

    struct Numbers;

    #[derive(serde::Deserialize)]
    struct NumberTask {
        #[expect(dead_code, reason = "only its presence is checked")]
        expected: u64,
    }

    impl ResourcesServer for Numbers {
        type Task = NumberTask;

        async fn verify(&self, _: &CallContext, _: &SessionId, _: NumberTask, _: &ModelResponse) -> Result<Verdict> {
            Ok(Verdict::correct(true))
        }
    }

    #[tokio::test]
    async fn a_row_that_does_not_fit_the_task_is_rejected_at_the_seed() {
        let error = Harness::new(Numbers).seed(json!({"expected": "many"})).await.map(drop).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains("`expected`: invalid type: string \"many\", expected u64"), "{error}");
    }

    #[tokio::test]
    async fn the_model_of_a_test_sees_its_mistakes_and_a_broken_tool_fails_the_test() {
        let harness = Harness::new(Bank);
        let mut episode = harness.seed(json!({"responses_create_params": {"input": "x"}})).await.unwrap();
        assert_eq!(episode.call("account", json!({})).await.unwrap(), json!({"detail": "there is no account 7"}));
        let error = episode.call("transfer", json!({})).await.unwrap_err();
        assert_eq!(error.failure_class(), FailureClass::ToolError);
        assert_eq!(error.to_string(), "tool `transfer`: the ledger is locked");
    }
}
