//! An episode's calls, which stay with the replicas that they first reached.

use std::sync::Arc;

use gym_core::transport::retry_after;
use gym_core::{CallContext, Code, Error, Request, Response, Result, Rope, Route};

use crate::client::cookies::CookieJar;
use crate::client::replicas::Replica;
use crate::client::server_client::{CallOptions, ServerClient, about, lock};

impl ServerClient {
    /// An episode's calls: they stay with the replica first reached, and carry its cookies.
    #[must_use]
    pub fn session(&self) -> Session {
        Session { client: self.clone(), servers: Vec::new() }
    }
}

/// The calls of one episode. Each server it talks to is one replica from the first call on, with a jar of cookies.
#[derive(Debug)]
pub struct Session {
    client: ServerClient,
    /// A few, in a list: a tree's smallest node is larger than all that most episodes keep.
    servers: Vec<SessionServer>,
}

#[derive(Debug)]
struct SessionServer {
    server: String,
    replica: Option<Arc<Replica>>,
    jar: CookieJar,
}

impl Session {
    /// The cookies held for a server; what is set here goes with the next call.
    pub fn jar(&mut self, server: &str) -> &mut CookieJar {
        &mut self.bound(server).jar
    }

    /// `POST` of a JSON text. Any complete answer is `Ok`.
    ///
    /// # Errors
    /// Before the first answer as [`ServerClient::post`]. After it, a replica that is gone is `FailedPrecondition`: the
    /// session is lost, and only a new episode can help.
    pub fn post(
        &mut self,
        cx: &CallContext,
        server: &str,
        route: impl Into<Route>,
        body: impl Into<Rope>,
    ) -> impl Future<Output = Result<Response>> + Send {
        let mut request = Request::post(cx.clone(), route, body);
        let client = self.client.clone();
        let bound = self.bound(server);
        if let Some(cookies) = bound.jar.header() {
            request.context.metadata.push("cookie", cookies);
        }
        async move {
            let response = bound.call(&client, &request).await?;
            bound.jar.merge(&response.metadata);
            Ok(response)
        }
    }

    fn bound(&mut self, server: &str) -> &mut SessionServer {
        let at = self.servers.iter().position(|bound| bound.server == server).unwrap_or_else(|| {
            // Model and resources are all that most agents call.
            self.servers.reserve_exact(2);
            self.servers.push(SessionServer { server: server.to_owned(), replica: None, jar: CookieJar::new() });
            self.servers.len() - 1
        });
        &mut self.servers[at]
    }
}

impl SessionServer {
    /// The answer of the replica that the session is at, or of the one that it stays at from now on.
    async fn call(&mut self, client: &ServerClient, request: &Request) -> Result<Response> {
        let Some(replica) = &self.replica else {
            let (replica, response) = client.dispatch(&self.server, request, CallOptions::default()).await?;
            self.replica = Some(replica);
            return Ok(response);
        };
        let mut result = client.call(replica, request).await;
        if let Err(error) = result {
            let mut rng = lock(&client.inner.rng).fork();
            let (cx, policy) = (&request.context, &client.inner.policy);
            let again = |_| client.call(replica, request);
            result = Box::pin(retry_after(error, cx, policy, &mut rng, false, again)).await;
        }
        result.map_err(|error| {
            let lost = error.code() == Code::Unavailable;
            let error = about(error, &self.server, request);
            if !lost {
                return error;
            }
            Error::new(Code::FailedPrecondition, error.execution(), "the server of this session is gone")
                .about(self.server.clone())
                .caused_by(error)
        })
    }
}
