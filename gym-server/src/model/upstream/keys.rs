//! The configuration keys of an endpoint, which messages name, and the failures that they explain.

use gym_core::message::readable;
use gym_core::server::EndpointState;
use gym_core::{Error, Execution};

use crate::model::upstream::health::EndpointFailure;

/// The names of the keys in a block, and its dialect.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct EndpointKeys {
    pub(in crate::model) url: &'static str,
    pub(in crate::model) api_key: &'static str,
    pub(in crate::model) model: &'static str,
    /// Requests are sent in the Responses dialect.
    pub(in crate::model) uses_responses: bool,
}

impl EndpointKeys {
    /// Returns the failure of a response that is not the response of a model endpoint.
    pub(super) fn not_an_endpoint(self, body: &[u8]) -> EndpointFailure {
        let said: String = readable(body).chars().take(200).collect();
        EndpointFailure {
            state: EndpointState::Misconfigured,
            reason: format!("it is no model endpoint; it answered {said}"),
            fix: format!(
                "correct `{}`: it is the engine's URL with the version, such as http://127.0.0.1:8000/v1",
                self.url
            ),
        }
    }

    /// Returns the failure of a call without a response.
    pub(super) fn no_response(self, error: &Error) -> EndpointFailure {
        let said = innermost(error);
        // What rustls says of a port that answers without TLS.
        if ["InvalidContentType", "corrupt message"].iter().any(|sign| said.contains(sign)) {
            return EndpointFailure {
                state: EndpointState::Misconfigured,
                reason: "it does not speak https".to_owned(),
                fix: format!("write http:// in the place of https:// in `{}`", self.url),
            };
        }
        // A port that expects TLS closes the connection, or answers with an alert.
        let closed = ["connection reset", "connection closed", "invalid HTTP version"];
        if closed.iter().any(|sign| said.contains(sign)) && error.to_string().contains("http://") {
            let fix = format!("see the log of the engine; if it serves https, write https:// in `{}`", self.url);
            return EndpointFailure { state: EndpointState::Unavailable, reason: said, fix };
        }
        let fix = match error.execution() {
            Execution::NotStarted => format!("start the engine, or correct `{}`", self.url),
            _ => "see the log of the engine".to_owned(),
        };
        EndpointFailure { state: EndpointState::Unavailable, reason: said, fix }
    }
}

/// Returns the innermost cause, without the number of the operating system's error.
fn innermost(error: &Error) -> String {
    let said = error.chain().into_iter().rev().map(|link| link.message).find(|message| !message.is_empty());
    let said = said.unwrap_or_else(|| error.to_string());
    let text = said.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use gym_core::Code;

    use super::*;

    #[test]
    fn a_url_with_the_wrong_scheme_is_named_with_the_right_one() {
        let keys = EndpointKeys { url: "base_url", api_key: "api_key", model: "model", uses_responses: false };
        for (url, cause, fix) in [
            (
                "https://h/v1",
                "received corrupt message of type InvalidContentType",
                "write http:// in the place of https:// in `base_url`",
            ),
            (
                "http://h/v1",
                "connection reset by peer (os error 104)",
                "if it serves https, write https:// in `base_url`",
            ),
            ("http://h/v1", "invalid HTTP version parsed", "if it serves https, write https:// in `base_url`"),
            ("http://h/v1", "connection refused", "start the engine, or correct `base_url`"),
        ] {
            let cause = Error::not_started(Code::Unavailable, cause);
            let error =
                Error::not_started(Code::Unavailable, "cannot connect").about(format!("GET {url}")).caused_by(cause);
            let failure = keys.no_response(&error);
            assert!(failure.fix.ends_with(fix), "{url}: {failure:?}");
        }
    }
}
