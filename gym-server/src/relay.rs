//! The environment server that most configurations use: it passes `/run` to an agent and the agent's answer back.

use std::sync::Arc;
use std::time::Duration;

use gym_client::{CallOptions, ServerClient};
use gym_core::{
    CallContext, EnvironmentServer, INCARNATION_METADATA, Metadata, RawObject, Request, Response, Result, Route,
};
use serde::Deserialize;

use crate::agent::{Seconds, ServerRef};
use crate::once::{DEFAULT_GRACE, Identity, Once};
use crate::reply;

/// What describes one hop and not what is carried over it. Each hop writes its own.
const HOP: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "date",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    INCARNATION_METADATA,
];

/// The keys of a `legacy_agent` block; other keys of the block are not this server's.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RelayConfig {
    /// To whom everything goes.
    pub agent_server: ServerRef,
    /// How long an unanswered `/run` outlives its caller, in seconds, so that the caller's second try joins it; 30 unless
    /// given.
    #[serde(default)]
    pub replay_grace_seconds: Option<Seconds>,
}

impl RelayConfig {
    /// The defaults, in front of an agent.
    #[must_use]
    pub fn new(agent_server: impl Into<String>) -> Self {
        Self { agent_server: ServerRef::new(agent_server), replay_grace_seconds: None }
    }
}

/// Relays `/run` and `/aggregate_metrics` to an agent: body as it came; status, cookies and what else is meant for the other
/// end both ways. A `/run` that comes twice, because its caller lost the connection, runs once.
#[derive(Clone, Debug)]
pub struct Relay {
    agent: Agent,
    once: Once,
}

/// To whom everything goes. Apart from the table of episodes, because each episode holds one: it must not hold the table.
#[derive(Clone, Debug)]
struct Agent {
    name: Arc<str>,
    client: ServerClient,
}

impl Agent {
    async fn ask(&self, request: &Request, options: CallOptions) -> Result<Response> {
        let mut response = self.client.send(&self.name, request, options).await?;
        response.metadata.retain(|name| !HOP.contains(&name));
        Ok(response)
    }
}

impl Relay {
    /// A relay that reaches its agent through `client`.
    #[must_use]
    pub fn new(config: RelayConfig, client: ServerClient) -> Self {
        let grace: Duration = config.replay_grace_seconds.map_or(DEFAULT_GRACE, |seconds| seconds.0);
        Self { agent: Agent { name: config.agent_server.name.into(), client }, once: Once::new(grace) }
    }
}

impl EnvironmentServer for Relay {
    async fn run(&self, cx: &CallContext, row: &RawObject) -> Result<Response> {
        let Some(identity) = Identity::of(row) else {
            let request = outgoing(cx.child(), &cx.metadata, "/run", row);
            return self.agent.ask(&request, CallOptions::default()).await;
        };
        let start = || {
            // Not `child`: the episode must not end with this caller's token.
            let mut own = CallContext::until(cx.deadline);
            own.trace = cx.trace;
            own.reply_bytes_max = cx.reply_bytes_max;
            let request = outgoing(own, &cx.metadata, "/run", row);
            let agent = self.agent.clone();
            async move {
                match agent.ask(&request, CallOptions::default()).await {
                    Ok(response) => response,
                    Err(error) => reply::of_error(&error),
                }
            }
        };
        Ok(self.once.run(identity, row.text(), cx.deadline, start).await)
    }

    async fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> Result<Response> {
        let request = outgoing(cx.child(), &cx.metadata, "/aggregate_metrics", body);
        self.agent.ask(&request, CallOptions::idempotent()).await
    }
}

/// The body as it came, with the metadata that is meant for the other end.
fn outgoing(mut cx: CallContext, metadata: &Metadata, route: &'static str, body: &RawObject) -> Request {
    cx.metadata = metadata.clone();
    cx.metadata.retain(|name| !HOP.contains(&name));
    Request::post(cx, Route::from_static(route), body.clone())
}
