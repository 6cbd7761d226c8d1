//! Calls `http` endpoints over the HTTP transport of the SDK, which starts no task for a call.

use std::time::Duration;

use bytes::Bytes;
use gym_client::transport::http::HttpConfig;
use gym_client::transport::http::http1::HttpConnector;
use gym_core::transport::{ConnectOptions, Connector as _};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Metadata, Request, Result, Route};
use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, TRANSFER_ENCODING};
use tokio::sync::OnceCell;

use crate::model::upstream::response::EndpointResponse;

/// The client of one `http` origin.
pub(super) struct PlainClient {
    endpoint: Endpoint,
    connector: HttpConnector,
    channel: OnceCell<Channel>,
    metadata: Metadata,
}

impl PlainClient {
    /// Creates a client that sends `headers` with each request.
    ///
    /// # Errors
    /// `InvalidArgument` if the connection sets one of the headers itself.
    pub(super) fn to(
        origin: &str,
        headers: &HeaderMap,
        connections_max: usize,
        connect_timeout: Duration,
    ) -> Result<Self> {
        let mut metadata = Metadata::new();
        let mut config = HttpConfig::default();
        config.connections_max = connections_max;
        config.connect_timeout = connect_timeout;
        // A generation has no side effects.
        config.repeats_on_new_connection = true;
        for (name, value) in headers {
            let value = value
                .to_str()
                .map_err(|_| Error::invalid(format!("the header `{name}` has a character that no header can carry")))?;
            if name == CONTENT_TYPE || (name == ACCEPT_ENCODING && value == "identity") {
                // The connection already sends this header.
            } else if name == HOST {
                config.host = Some(value.to_owned());
            } else if [ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING].contains(name) {
                return Err(Error::invalid(format!(
                    "the default header `{name}` is set by the connection: leave it out"
                )));
            } else {
                metadata.push(name.as_str().to_owned(), value);
            }
        }
        let endpoint = Endpoint::parse(origin)?;
        Ok(Self { endpoint, connector: HttpConnector::new(config), channel: OnceCell::new(), metadata })
    }

    /// Sends a JSON body with `POST`, or a `GET` without a body. Returns `Ok` for any complete response.
    pub(super) async fn send(&self, cx: &CallContext, path: String, body: Option<Bytes>) -> Result<EndpointResponse> {
        let options = ConnectOptions::default();
        // Opens no connection yet: each call opens a connection if it needs one.
        let connect = || self.connector.connect(cx, &self.endpoint, &options);
        let channel = self.channel.get_or_try_init(connect).await?;
        let mut own = cx.child();
        own.metadata = self.metadata.clone();
        own.reply_bytes_max = cx.reply_bytes_max;
        let request = match body {
            Some(body) => Request::post(own, Route::from(path), body),
            None => Request::get(own, Route::from(path)),
        };
        let answer = channel.call(request).await.map_err(of_transport)?;
        let header = |name: &str| answer.metadata.get(name).map(str::to_owned);
        Ok(EndpointResponse::new(
            answer.status.0,
            header("retry-after"),
            header("location"),
            answer.message.head.to_bytes(),
        )
        .coded(header("content-encoding")))
    }
}

/// Converts the error of a call. A model call has no side effects, so a malformed response can be requested again like a lost one.
fn of_transport(error: Error) -> Error {
    match error.code() {
        Code::DataLoss => Error::unknown(Code::Unavailable, "the answer is not HTTP").caused_by(error),
        _ => error,
    }
}
