//! The calls of one episode, which stay with the replicas that answered first. Those to several replicas of a model stay as long as
//! the load allows.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gym_core::rollout::FailureClass;
use gym_core::server::ServerKind;
use gym_core::{CallContext, Code, Error, Request, Response, Result, Rope, Route};

use crate::client::cookies::CookieJar;
use crate::client::replicas::{Replica, SessionAffinity};
use crate::client::server_client::{CallOptions, ServerClient, about};

impl ServerClient {
    /// Creates a session for the calls of one episode.
    #[must_use]
    pub fn session(&self) -> Session {
        let number = self.inner.sessions.fetch_add(1, Ordering::Relaxed);
        Session { client: self.clone(), number, servers: Vec::new() }
    }
}

/// The calls of one episode. From its first response on, each server is represented by one replica, with a jar of cookies.
///
/// ```
/// use gym_client::ServerClient;
/// use gym_core::{CallContext, Response, Result};
///
/// async fn two_calls(client: &ServerClient, cx: &CallContext) -> Result<Response> {
///     let mut session = client.session();
///     session.post(cx, "shop", "/seed_session", "{}").await?.into_result()?;
///     // To the same replica, with the cookies of the first response.
///     session.post(cx, "shop", "/list", "{}").await?.into_result()
/// }
/// ```
#[derive(Debug)]
pub struct Session {
    client: ServerClient,
    /// Identifies the session among those of its client.
    number: u64,
    /// A list, because most episodes call two servers: the smallest node of a tree is larger.
    servers: Vec<SessionServer>,
}

#[derive(Debug)]
struct SessionServer {
    server: String,
    replica: Option<Arc<Replica>>,
    jar: CookieJar,
}

impl Session {
    /// Returns the cookies of a server; cookies set here are sent with the next call.
    pub fn jar(&mut self, server: &str) -> &mut CookieJar {
        &mut self.bound(server).jar
    }

    /// Sends a `POST` with a JSON body. Any complete response is `Ok`, including error statuses.
    ///
    /// # Errors
    /// Before the first response, as [`ServerClient::post`]. Later, `FailedPrecondition` if the replica has exited: the session
    /// is lost, and a new episode is needed. A replica of a model that has exited is replaced by another one. `Unavailable, Unknown` of the class
    /// `transport_peer_drop` if only a reused connection broke: the session may go on, but the request may have run.
    pub fn post<'s, R, B>(
        &'s mut self,
        cx: &CallContext,
        server: &str,
        route: R,
        body: B,
    ) -> impl Future<Output = Result<Response>> + Send + use<'s, R, B>
    where
        R: Into<Route>,
        B: Into<Rope>,
    {
        let mut request = Request::post(cx.clone(), route, body);
        let client = self.client.clone();
        let number = self.number;
        let bound = self.bound(server);
        if let Some(cookies) = bound.jar.header() {
            request.context.metadata.push("cookie", cookies);
        }
        async move {
            let response = bound.call(&client, &request, number).await?;
            bound.jar.merge(&response.metadata);
            Ok(response)
        }
    }

    fn bound(&mut self, server: &str) -> &mut SessionServer {
        let at = self.servers.iter().position(|bound| bound.server == server).unwrap_or_else(|| {
            // Most agents call a model and a resources server.
            if self.servers.is_empty() {
                self.servers.reserve_exact(2);
            }
            self.servers.push(SessionServer { server: server.to_owned(), replica: None, jar: CookieJar::new() });
            self.servers.len() - 1
        });
        &mut self.servers[at]
    }
}

impl SessionServer {
    /// Returns the response of the session's replica. The first call chooses the replica; among several replicas of a model, each
    /// call does.
    #[expect(clippy::manual_async_fn, reason = "the future of an async fn holds its arguments twice")]
    fn call(
        &mut self,
        client: &ServerClient,
        request: &Request,
        number: u64,
    ) -> impl Future<Output = Result<Response>> + Send {
        async move {
            let Some(replica) = self.replica.as_ref().filter(|replica| !self.moves(client, replica)) else {
                let session = SessionAffinity { number, home: self.replica.as_ref().map(|replica| replica.number) };
                let (replica, response) =
                    client.dispatch(&self.server, request, CallOptions::default(), Some(session)).await?;
                self.replica = Some(replica);
                return Ok(response);
            };
            let options = CallOptions::default();
            let error = match client.call(&self.server, replica, request, options).await {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            let again = |_| client.call(&self.server, replica, request, options);
            let again = client.resend(error, &request.context, options.idempotent, again);
            again.await.map_err(|error| match error.code() {
                // Only a connection that was kept for the next call is known to have ended; the server may be well.
                Code::Unavailable if error.class() == Some(FailureClass::TransportPeerDrop) => {
                    about(error, &self.server, request)
                }
                Code::Unavailable => self.lost(about(error, &self.server, request)),
                _ => about(error, &self.server, request),
            })
        }
    }

    /// Returns `true` if the next call may go to another replica than `replica`.
    fn moves(&self, client: &ServerClient, replica: &Replica) -> bool {
        replica.kind == ServerKind::Model && client.known(&self.server).is_some_and(|known| known.moves_sessions())
    }

    /// Returns the error of a session whose server does not respond any more.
    fn lost(&self, error: Error) -> Error {
        let text = "the server of this session is gone, and the state of the episode with it: a further attempt begins it again";
        Error::new(Code::FailedPrecondition, error.execution(), text)
            .about(self.server.clone())
            .caused_by(error)
            .of_nested_call()
    }
}
