//! The endpoints of a model server: whether they respond, and why not. `/health` reports them, so that a collector in another process
//! can show what its rollouts wait for.

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::message::CallContext;

/// The endpoints that a model server calls.
pub trait ModelEndpoints: Send + Sync {
    /// Returns what the calls so far have shown. Sends nothing.
    fn reports(&self) -> Vec<EndpointReport>;

    /// Calls each endpoint now, without retries, and returns what it shows. Ends by the deadline of `cx`.
    fn probe<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Vec<EndpointReport>>;

    /// Calls each endpoint as [`ModelEndpoints::probe`] does, and then makes a trial call as rollouts will. By default, the same as `probe`.
    fn trial<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Vec<EndpointReport>> {
        self.probe(cx)
    }
}

/// The state of one endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct EndpointReport {
    /// The URL, without credentials.
    pub url: String,
    /// Whether it responds.
    pub state: EndpointState,
    /// The reason for the state; empty if there is nothing to say.
    pub reason: String,
    /// The fix; empty if there is nothing to fix.
    pub fix: String,
    /// Seconds since the first of the calls that failed in succession; 0 if the last call succeeded.
    pub failing_seconds: u64,
    /// Calls that wait for the endpoint to respond.
    pub waiting: u64,
    /// Seconds after which a waiting call fails.
    pub gives_up_after_seconds: u64,
    /// Calls that were sent and have no response yet.
    pub in_flight: u64,
    /// Seconds since the oldest of them was sent; 0 unless it takes unusually long (`probe_after_seconds`).
    pub oldest_seconds: u64,
    /// Responses that the engine aborted, as vLLM does when it pauses. They were requested again.
    pub aborted: u64,
}

/// Whether an endpoint responds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndpointState {
    /// It responds.
    Ready,
    /// It does not respond, or reports that it cannot serve at the moment. Waiting may help.
    Unavailable,
    /// It responds, but rejects the key or the model, or is no model endpoint. Waiting does not help.
    Misconfigured,
    /// No call has ended yet.
    #[default]
    #[serde(other)]
    Unknown,
}
