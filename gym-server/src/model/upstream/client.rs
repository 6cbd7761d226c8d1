//! Calls an endpoint with the headers of its configuration.

use bytes::Bytes;
#[cfg(feature = "http")]
pub(super) use calling::EndpointClient;
use gym_core::{CallContext, Error, Result};
use http::HeaderMap;

use crate::model::upstream::response::EndpointResponse;
use gym_client::client_url::EndpointUrl;

/// The client of a program without HTTP: there is none.
#[cfg(not(feature = "http"))]
pub(super) enum EndpointClient {}

#[cfg(not(feature = "http"))]
impl EndpointClient {
    pub(super) fn to(place: &EndpointUrl, _: &HeaderMap) -> Result<Self> {
        let scheme = if place.https { "https" } else { "http" };
        Err(Error::invalid(format!(
            "is {scheme}, and this program was built without it: build it with the feature `http` of gym-server"
        )))
    }

    #[expect(clippy::unused_async, reason = "as in a build with HTTP")]
    pub(super) async fn send(&self, _: &CallContext, _: String, _: Option<Bytes>) -> Result<EndpointResponse> {
        match *self {}
    }
}

#[cfg(feature = "http")]
mod calling {
    use gym_client::transport::http::origin::{OriginClient, OriginOptions};
    use gym_core::rollout::FailureClass;
    use gym_core::{Code, Metadata, Request, Route};
    use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING};

    use super::*;
    use crate::model::upstream::{CONNECT_TIMEOUT, CONNECTIONS_MAX, QUESTIONS_MAX};

    /// The client of one endpoint.
    pub(in crate::model::upstream) struct EndpointClient {
        origin: OriginClient,
        metadata: Metadata,
    }

    impl EndpointClient {
        /// Creates a client that sends `headers` with each request.
        ///
        /// # Errors
        /// `InvalidArgument` if the connection sets one of the headers itself, or if this program does not support the URL's scheme.
        pub(in crate::model::upstream) fn to(place: &EndpointUrl, headers: &HeaderMap) -> Result<Self> {
            if place.https && cfg!(not(feature = "tls")) {
                return Err(Error::invalid(
                    "is https, and this program was built without TLS: build it with the feature `tls` of gym-server",
                ));
            }
            let mut metadata = Metadata::new();
            let mut options = OriginOptions::default();
            options.connections_max = CONNECTIONS_MAX + QUESTIONS_MAX;
            options.connect_timeout = CONNECT_TIMEOUT;
            // A generation has no side effects.
            options.repeats_on_new_connection = true;
            for (name, value) in headers {
                let value = value.to_str().map_err(|_| {
                    Error::invalid(format!("the header `{name}` has a character that no header can carry"))
                })?;
                if name == CONTENT_TYPE || (name == ACCEPT_ENCODING && value == "identity") {
                    // The connection already sends this header.
                } else if name == HOST {
                    options.host = Some(value.to_owned());
                } else if [ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING].contains(name) {
                    return Err(Error::invalid(format!(
                        "the default header `{name}` is set by the connection: leave it out"
                    )));
                } else {
                    metadata.push(name.as_str().to_owned(), value);
                }
            }
            Ok(Self { origin: OriginClient::to(&place.origin(), options)?, metadata })
        }

        /// Sends a JSON body with `POST`, or a `GET` without a body. Returns `Ok` for any complete response.
        pub(in crate::model::upstream) async fn send(
            &self,
            cx: &CallContext,
            target: String,
            body: Option<Bytes>,
        ) -> Result<EndpointResponse> {
            let mut own = cx.child();
            own.metadata = self.metadata.clone();
            own.reply_bytes_max = cx.reply_bytes_max;
            let request = match body {
                Some(body) => Request::post(own, Route::from(target), body),
                None => Request::get(own, Route::from(target)),
            };
            let answer = self.origin.send(request).await.map_err(of_origin)?;
            let header = |name: &str| answer.metadata.get(name).map(str::to_owned);
            let (retry_after, location) = (header("retry-after"), header("location"));
            Ok(EndpointResponse::new(answer.status.0, retry_after, location, answer.message.head.to_bytes())
                .coded(header("content-encoding")))
        }
    }

    /// Converts the error of a call. A model call has no side effects, so a malformed response can be requested again like a lost one.
    fn of_origin(error: Error) -> Error {
        match error.code() {
            Code::DataLoss => Error::unknown(Code::Unavailable, "the answer is not HTTP").caused_by(error),
            // An error of the configuration, not an endpoint that may respond later.
            Code::FailedPrecondition => error.with_class(FailureClass::ModelError),
            _ => error,
        }
    }
}
