//! Calls `https` endpoints.

use std::time::Duration;

use bytes::Bytes;
use gym_client::transport::http::https::{HttpsClient, distrusts_certificate};
use gym_core::rollout::FailureClass;
use gym_core::{CallContext, Result};
use http::Method;
use http::header::{CONTENT_ENCODING, HeaderMap, LOCATION, RETRY_AFTER};

use crate::model::upstream::response::EndpointResponse;

/// The client of one `https` origin.
pub(super) struct TlsClient {
    client: HttpsClient,
    headers: HeaderMap,
}

impl TlsClient {
    /// Creates a client that sends `headers` with each request.
    ///
    /// # Errors
    /// `Internal` if the client cannot be created.
    pub(super) fn to(
        origin: &str,
        headers: &HeaderMap,
        connections_max: usize,
        connect_timeout: Duration,
    ) -> Result<Self> {
        Ok(Self { client: HttpsClient::to(origin, connections_max, connect_timeout)?, headers: headers.clone() })
    }

    /// Sends a JSON body with `POST`, or a `GET` without a body. Returns `Ok` for any complete response.
    pub(super) async fn send(&self, cx: &CallContext, path: &str, body: Option<Bytes>) -> Result<EndpointResponse> {
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let sent = self.client.send(cx, method, path, self.headers.clone(), body).await;
        let response = sent.map_err(|error| {
            // An error of the configuration, not an endpoint that may respond later.
            let permanent = distrusts_certificate(&error);
            if permanent { error.with_class(FailureClass::ModelError) } else { error }
        })?;
        let header = |name| response.headers.get(name).and_then(|value| value.to_str().ok().map(str::to_owned));
        let (retry_after, location) = (header(RETRY_AFTER), header(LOCATION));
        let coding = header(CONTENT_ENCODING);
        Ok(EndpointResponse::new(response.status, retry_after, location, response.body).coded(coding))
    }
}
