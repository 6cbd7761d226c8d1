//! The environment server that most configurations use: it passes `/run` to an agent and the agent's answer back.

use std::time::Duration;

use bytes::Bytes;
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
    agent: String,
    client: ServerClient,
    once: Once,
}

impl Relay {
    /// A relay that reaches its agent through `client`.
    #[must_use]
    pub fn new(config: RelayConfig, client: ServerClient) -> Self {
        let grace: Duration = config.replay_grace_seconds.map_or(DEFAULT_GRACE, |seconds| seconds.0);
        Self { agent: config.agent_server.name, client, once: Once::new(grace) }
    }

    async fn relay(
        client: &ServerClient,
        agent: &str,
        cx: CallContext,
        route: &'static str,
        body: Bytes,
        options: CallOptions,
    ) -> Result<Response> {
        let request = Request::post(cx, Route::from_static(route), body);
        let mut response = client.send(agent, &request, options).await?;
        response.metadata.retain(|name| !HOP.contains(&name));
        Ok(response)
    }
}

impl EnvironmentServer for Relay {
    async fn run(&self, cx: &CallContext, row: &RawObject) -> Result<Response> {
        let route = "/run";
        let Some(identity) = Identity::of(row) else {
            let inner = inner(cx.child(), &cx.metadata);
            return Self::relay(&self.client, &self.agent, inner, route, row.text().clone(), CallOptions::default())
                .await;
        };
        let start = || {
            // Not `child`: the episode must not end with this caller's token.
            let mut own = CallContext::until(cx.deadline);
            own.trace = cx.trace;
            own.reply_bytes_max = cx.reply_bytes_max;
            let own = inner(own, &cx.metadata);
            let (client, agent, row) = (self.client.clone(), self.agent.clone(), row.text().clone());
            async move {
                match Self::relay(&client, &agent, own, route, row, CallOptions::default()).await {
                    Ok(response) => response,
                    Err(error) => reply::of_error(&error),
                }
            }
        };
        Ok(self.once.run(identity, row.text(), cx.deadline, start).await)
    }

    async fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> Result<Response> {
        let (agent, options) = (&self.agent, CallOptions::idempotent());
        Self::relay(
            &self.client,
            agent,
            inner(cx.child(), &cx.metadata),
            "/aggregate_metrics",
            body.text().clone(),
            options,
        )
        .await
    }
}

/// The context with the metadata that is meant for the other end.
fn inner(mut cx: CallContext, metadata: &Metadata) -> CallContext {
    cx.metadata = metadata.clone();
    cx.metadata.retain(|name| !HOP.contains(&name));
    cx
}
