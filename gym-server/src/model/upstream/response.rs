//! The response of an endpoint.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use gym_core::{RawObject, World};
use serde_json::Value;

/// The finish reason of a response that vLLM aborted, as JSON.
const ABORTED: &str = r#""abort""#;

/// The meaning of an error status of an endpoint: whether the same request may be answered when it is sent again, and who is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum StatusMeaning {
    /// The endpoint, or a gateway before it, takes no request at the moment. Repeated for as long as the budget allows.
    Busy,
    /// A response did not come in time, or was lost on the way. Repeated as often as a failure.
    Late,
    /// The endpoint failed with this request. Repeated `max_http_attempts` times.
    Failed,
    /// No repetition changes it.
    Final,
}

impl StatusMeaning {
    /// Returns the meaning of a status. 521 to 527 and 530 are Cloudflare's, 529 is Anthropic's "overloaded".
    pub(in crate::model) fn of(status: u16) -> Self {
        match status {
            429 | 502 | 503 | 521..=523 | 525..=530 => Self::Busy,
            // 409: OpenAI's clients repeat it too, because a lock was not free.
            404 | 409 | 500 => Self::Failed,
            // Not implemented, another version of HTTP, a misconfigured negotiation, an extension, a network that wants a login.
            501 | 505 | 506 | 510 | 511 => Self::Final,
            // A wait that ended (408, 504, 524), a request that came too early (425), and whatever a gateway invents.
            408 | 425 | 500..600 => Self::Late,
            _ => Self::Final,
        }
    }
}

/// Whether the engine ended the generation, or something else did. Most responses tell it themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Completeness {
    /// What the response says is true.
    #[default]
    Known,
    /// The engine aborted the response, or may have: it aborted requests meanwhile.
    Aborted,
    /// The engine may have aborted the response, and does not tell.
    Unverified,
}

/// A complete response with any status.
#[derive(Debug)]
pub(in crate::model) struct EndpointResponse {
    pub(in crate::model) status: u16,
    pub(in crate::model) body: Bytes,
    /// The header of that name: seconds, or a date.
    retry_after: Option<String>,
    /// The content coding of the body, if it has one.
    pub(super) coding: Option<String>,
    /// The target of a redirect that is not followed.
    pub(super) location: Option<String>,
    /// The attempts that were made, if there were several.
    pub(super) attempts: String,
    pub(super) completeness: Completeness,
}

impl EndpointResponse {
    /// Creates a response. `retry_after` and `location` are header values.
    pub(in crate::model) fn new(
        status: u16,
        retry_after: Option<String>,
        location: Option<String>,
        body: Bytes,
    ) -> Self {
        let location = location.filter(|_| (300..400).contains(&status));
        Self {
            status,
            body,
            retry_after,
            coding: None,
            location,
            attempts: String::new(),
            completeness: Completeness::Known,
        }
    }

    /// Sets the header `content-encoding`.
    pub(super) fn coded(mut self, coding: Option<String>) -> Self {
        self.coding = coding.filter(|coding| !coding.eq_ignore_ascii_case("identity"));
        self
    }

    /// Returns the time that the endpoint asks its clients to wait (RFC 9110, section 10.2.3).
    pub(super) fn retry_after(&self, world: &World) -> Option<Duration> {
        let text = self.retry_after.as_deref()?.trim();
        if let Ok(seconds) = text.parse() {
            return Some(Duration::from_secs(seconds));
        }
        let at = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(at.saturating_sub(world.now()))
    }

    /// Returns `true` if the endpoint, or a proxy in front of it, cannot serve the request at the moment.
    pub(in crate::model) fn is_rejection(&self) -> bool {
        StatusMeaning::of(self.status) == StatusMeaning::Busy || self.is_aborted()
    }

    /// Returns `true` for a response that the engine aborted. vLLM ends with this `finish_reason` of a chat completion what runs when it pauses or
    /// sleeps, as before an update of its weights.
    pub(in crate::model) fn is_aborted(&self) -> bool {
        if self.completeness == Completeness::Aborted {
            return true;
        }
        self.choices_that_end_with(ABORTED).next().is_some()
    }

    /// Returns the choices of a chat completion with this finish reason, which is JSON.
    pub(super) fn choices_that_end_with(&self, reason: &'static str) -> impl Iterator<Item = RawObject> + use<> {
        let may = self.status < 400 && memchr::memmem::find(&self.body, reason.as_bytes()).is_some();
        let whole = may.then(|| RawObject::parse(self.body.clone()).ok()).flatten();
        let choices = whole.and_then(|whole| whole.get_as::<Vec<RawObject>>("choices").ok().flatten());
        let ends = move |choice: &RawObject| choice.get("finish_reason").is_some_and(|said| said == reason);
        choices.unwrap_or_default().into_iter().filter(ends)
    }

    /// Returns the endpoint's name for a spent quota, which no repetition changes.
    pub(super) fn exhausted_quota(&self) -> Option<&'static str> {
        if self.status != 429 {
            return None;
        }
        let codes = self.codes();
        ["budget_exceeded", "insufficient_quota"].into_iter().find(|known| codes.iter().any(|code| code == known))
    }

    /// Returns the names of the error in the forms of OpenAI and vLLM, in lower case.
    pub(in crate::model) fn codes(&self) -> Vec<String> {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let names = |error: &Value| {
            let names = ["code", "type"].into_iter().filter_map(|key| error[key].as_str());
            names.map(str::to_lowercase).collect::<Vec<_>>()
        };
        match &body["error"] {
            Value::String(code) => vec![code.to_lowercase()],
            Value::Null => names(&body),
            error => names(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::world;

    #[test]
    fn a_completion_is_aborted_if_a_choice_says_so() {
        for (status, body, expected) in [
            (200, r#"{"choices":[{"finish_reason":"abort"}]}"#, true),
            (200, r#"{"choices":[{"finish_reason":"stop"},{"index":1,"finish_reason":"abort"}]}"#, true),
            (200, r#"{"choices":[{"finish_reason":"stop","message":{"content":"\"abort\"","name":"abort"}}]}"#, false),
            (500, r#"{"choices":[{"finish_reason":"abort"}]}"#, false),
            (200, r#"{"choices":"abort"}"#, false),
            (200, r#"{"choices":[{"finish_reason":["abort"]}]}"#, false),
            (200, r#"["abort"]"#, false),
            (200, r#""abort"#, false),
        ] {
            let answer = EndpointResponse::new(status, None, None, Bytes::from_static(body.as_bytes()));
            assert_eq!(answer.is_aborted(), expected, "{body}");
        }
    }

    #[test]
    fn a_retry_after_is_seconds_or_a_date() {
        let world = world();
        let date = httpdate::fmt_http_date(UNIX_EPOCH + world.now() + Duration::from_secs(90));
        let asked =
            |text: &str| EndpointResponse::new(429, Some(text.to_owned()), None, Bytes::new()).retry_after(&world);
        assert_eq!(asked(" 7 "), Some(Duration::from_secs(7)));
        // A date has no fraction of a second.
        assert!(asked(&date).is_some_and(|asked| (88..=90).contains(&asked.as_secs())), "{:?}", asked(&date));
        assert_eq!(asked("Thu, 01 Jan 1970 00:00:00 GMT"), Some(Duration::ZERO));
        assert_eq!(asked("soon"), None);
    }
}
