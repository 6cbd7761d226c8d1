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
        // What rustls says of a port that answers without TLS, and hyper of one that answers with it.
        if ["InvalidContentType", "corrupt message"].iter().any(|sign| said.contains(sign)) {
            return EndpointFailure {
                state: EndpointState::Misconfigured,
                reason: "it does not speak https".to_owned(),
                fix: format!("write http:// in the place of https:// in `{}`", self.url),
            };
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
