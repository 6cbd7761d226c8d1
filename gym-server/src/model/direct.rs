//! The short way to an endpoint: our own HTTP transport, for plain `http` without credentials in the URL, which is how engines
//! on the same network are reached. It costs less than half of what reqwest does per call, and starts no task for it; https
//! and what else is rare go through reqwest.

use std::time::Duration;

use bytes::Bytes;
use gym_client::http::{HttpConfig, HttpConnector};
use gym_core::{
    CallContext, Channel, Code, ConnectOptions, Connector as _, Endpoint, Error, Metadata, Request, Response, Result,
    Route,
};
use reqwest::Url;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use tokio::sync::OnceCell;

/// The origin of one endpoint, over our own transport.
pub(super) struct Direct {
    endpoint: Endpoint,
    connector: HttpConnector,
    channel: OnceCell<Channel>,
    metadata: Metadata,
}

impl Direct {
    /// `None` when this URL or these headers are for reqwest.
    pub(super) fn to(
        url: &Url,
        headers: &HeaderMap,
        connections_max: usize,
        connect_timeout: Duration,
    ) -> Option<Self> {
        let plain = url.scheme() == "http" && url.username().is_empty() && url.password().is_none();
        if !plain || url.query().is_some() || url.fragment().is_some() {
            return None;
        }
        let origin = match url.port() {
            Some(port) => format!("http://{}:{port}", url.host_str()?),
            None => format!("http://{}", url.host_str()?),
        };
        let mut metadata = Metadata::new();
        for (name, value) in headers.iter().filter(|(name, _)| **name != CONTENT_TYPE) {
            // What the transport keeps for itself it would leave out.
            if matches!(
                name.as_str(),
                "host" | "connection" | "content-length" | "transfer-encoding" | "accept-encoding"
            ) {
                return None;
            }
            metadata.push(name.as_str().to_owned(), value.to_str().ok()?);
        }
        let config = HttpConfig { connections_max, connect_timeout, ..HttpConfig::default() };
        let endpoint = Endpoint::parse(&origin).ok()?;
        Some(Self { endpoint, connector: HttpConnector::new(config), channel: OnceCell::new(), metadata })
    }

    /// `POST` of a JSON body; any complete answer is `Ok`.
    pub(super) async fn post(&self, cx: &CallContext, path: String, body: Bytes) -> Result<Response> {
        let options = ConnectOptions::default();
        // Opens nothing yet: connections are made call by call.
        let connect = || self.connector.connect(cx, &self.endpoint, &options);
        let channel = self.channel.get_or_try_init(connect).await?;
        let mut own = cx.child();
        own.metadata = self.metadata.clone();
        own.reply_bytes_max = cx.reply_bytes_max;
        channel.call(Request::post(own, Route::from(path), body)).await.map_err(of_transport)
    }
}

/// A model call has no effect but its answer: one that was garbled on its way may be asked for again like a lost one.
fn of_transport(error: Error) -> Error {
    match error.code() {
        Code::DataLoss => Error::unknown(Code::Unavailable, "the answer is not HTTP").caused_by(error),
        _ => error,
    }
}
