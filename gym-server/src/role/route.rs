//! Requests to a role and their paths: rollout prefixes, the paths of tools, percent-encoding (RFC 3986, section 2.1).

use std::borrow::Cow;

use gym_core::rollout::FailureClass;
use gym_core::server::ServerKind;
use gym_core::{CallContext, Code, Error, Message, Route, SessionId, Verb};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// The properties that all implementations of a role share.
#[derive(Debug)]
pub(crate) struct RoleSpec {
    pub(crate) kind: ServerKind,
    /// The routes that metrics count separately; all other routes are counted together.
    pub(crate) routes: &'static [&'static str],
    /// `true` if the role keeps sessions; an environment server forwards the sessions of other servers.
    pub(crate) sessions: bool,
}

/// A request to a role whose session is known.
#[derive(Debug)]
pub(crate) struct RoleRequest {
    pub(crate) verb: Verb,
    pub(crate) route: Route,
    pub(crate) context: CallContext,
    pub(crate) session: SessionId,
    pub(crate) message: Message,
}

impl RoleRequest {
    /// Returns the verb and the path, for a `match`.
    pub(crate) fn target(&self) -> (Verb, &str) {
        (self.verb, self.path())
    }

    /// Returns the path without the rollout prefix and the query.
    pub(crate) fn path(&self) -> &str {
        without_rollout_prefix(self.route.path())
    }
}

/// Strips the prefix `/ng-rollout/<id>[/training-token-capture]`, which can precede any path.
fn without_rollout_prefix(path: &str) -> &str {
    let Some(rest) = path.strip_prefix("/ng-rollout/") else { return path };
    let Some((id, _)) = rest.split_once('/') else { return path };
    let valid = id.starts_with(|c: char| c.is_ascii_alphanumeric())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if !valid {
        return path;
    }
    let rest = &rest[id.len()..];
    match rest.strip_prefix("/training-token-capture") {
        Some(route) if route.starts_with('/') => route,
        _ => rest,
    }
}

/// Adds the class of a failure to the error of a model server or a resources server, unless it has one. Errors whose code explains
/// them, such as a passed deadline, get none.
pub(crate) fn classified(path: &str, error: Error) -> Error {
    let busy = match error.code() {
        Code::DeadlineExceeded | Code::Cancelled | Code::FailedPrecondition => return error,
        code => matches!(code, Code::Unavailable | Code::ResourceExhausted),
    };
    error.or_class(match path {
        "/v1/responses" | "/v1/chat/completions" if busy => FailureClass::ModelUnavailable,
        "/v1/responses" | "/v1/chat/completions" => FailureClass::ModelError,
        _ if busy => FailureClass::AgentRequestFailed,
        "/verify" => FailureClass::VerifierError,
        "/seed_session" | "/close_session" | "/reset" | "/step" | "/close" => FailureClass::EnvironmentError,
        "/aggregate_metrics" | "/reverify_mode" => FailureClass::AgentRunError,
        _ => FailureClass::ToolError,
    })
}

/// Decodes escapes such as `%20`. A `%` without two hexadecimal digits is kept. A string whose decoded bytes are not UTF-8 is
/// returned unchanged.
pub(crate) fn percent_decoded(text: &str) -> Cow<'_, str> {
    percent_decode_str(text).decode_utf8().unwrap_or(Cow::Borrowed(text))
}

/// Routes of a resources server that are not tools. A model that could call one could end, score or restart its own episode.
const PROTOCOL: [&str; 4] = ["seed_session", "verify", "close_session", "aggregate_metrics"];

/// Returns `true` if a tool of this name would collide with a protocol path on a server that ignores extra slashes.
pub(crate) fn is_protocol(name: &str) -> bool {
    let path = name.split('?').next().unwrap_or_default().trim_matches('/');
    let path = match path.strip_prefix("ng-rollout/") {
        Some(prefixed) => prefixed.rsplit('/').next().unwrap_or_default(),
        None => path,
    };
    PROTOCOL.contains(&path)
}

/// The characters that the path of a tool cannot contain.
const ESCAPED: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'!')
    .remove(b'$')
    .remove(b'&')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b'+')
    .remove(b',')
    .remove(b';')
    .remove(b'=')
    .remove(b':')
    .remove(b'@')
    .remove(b'/')
    .remove(b'?');

/// Returns the path of a tool. Characters that a path cannot contain are percent-encoded, because the name comes from a model.
pub(crate) fn tool_route(name: &str) -> Route {
    let mut route = String::with_capacity(name.len() + 1);
    route.push('/');
    route.extend(utf8_percent_encode(name, &ESCAPED));
    Route::from(route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_prefix_is_taken_off() {
        for (path, bare) in [
            ("/run", "/run"),
            ("/ng-rollout/3-0-a1/v1/responses", "/v1/responses"),
            ("/ng-rollout/a.b/training-token-capture/v1/responses", "/v1/responses"),
            ("/ng-rollout/-x/run", "/ng-rollout/-x/run"),
            ("/ng-rollout/x", "/ng-rollout/x"),
        ] {
            assert_eq!(without_rollout_prefix(path), bare);
        }
    }

    #[test]
    fn escapes_become_the_text_they_stand_for() {
        for (written, meant) in [
            ("plain", "plain"),
            ("get%20weather", "get weather"),
            ("%C3%A9t%c3%a9", "été"),
            ("a%2Fb", "a/b"),
            ("100%", "100%"),
            ("%zz%2", "%zz%2"),
            ("%ff", "%ff"),
        ] {
            assert_eq!(percent_decoded(written), meant);
        }
    }

    #[test]
    fn a_tool_has_a_path_whatever_the_model_calls_it() {
        for (name, path) in [
            ("get_weather", "/get_weather"),
            ("-._~!$&'()*+,;=:@/?", "/-._~!$&'()*+,;=:@/?"),
            ("a b#\"%<>[]^`{|}\\\n", "/a%20b%23%22%25%3C%3E%5B%5D%5E%60%7B%7C%7D%5C%0A"),
            ("été", "/%C3%A9t%C3%A9"),
        ] {
            assert_eq!(tool_route(name).as_str(), path);
        }
    }
}
