//! A failed attempt: where and why it failed, its fields in the failures file, and NeMo Gym's own record of it.

use gym_core::base::ErrorLink;
use gym_core::rollout::{Attempt, FailureClass};
use gym_core::{Error, Execution, RawObject, Result};
use serde::Serialize;

use crate::collect::run::row::RolloutRow;

/// Maximum number of characters of a reason in NeMo Gym's record.
const REASON_CHARS_MAX: usize = 2_000;

/// Where and why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AttemptFailure {
    pub(super) class: FailureClass,
    /// The innermost server whose call failed.
    pub(super) server: String,
    /// The route of that call.
    pub(super) route: String,
    /// The causes, outermost first.
    pub(super) causes: Vec<ErrorLink>,
}

/// Who reported a failure, and what is known about the delivery of the request. The names are those of NeMo Gym.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evidence {
    /// The environment server responded with the failure.
    Reported,
    /// The environment server's response is not a rollout.
    Observed,
    /// Something in front of the environment server may have responded.
    Uncertain,
    /// There is no response.
    NoResponse(Execution),
}

impl Evidence {
    fn source(self) -> &'static str {
        if self == Self::Reported { "environment" } else { "collector" }
    }

    fn delivery(self) -> &'static str {
        match self {
            Self::Reported | Self::Observed | Self::NoResponse(Execution::Finished) => "delivered",
            Self::Uncertain | Self::NoResponse(Execution::Unknown) => "possibly_delivered",
            Self::NoResponse(Execution::NotStarted) => "not_sent",
        }
    }
}

impl AttemptFailure {
    pub(super) fn of(wanted: &RolloutRow, class: FailureClass, error: &Error) -> Self {
        Self::new(wanted, class, error.chain())
    }

    /// Creates the failure of an attempt for which a text is all that is known.
    pub(super) fn told(wanted: &RolloutRow, class: FailureClass, message: String) -> Self {
        Self::new(wanted, class, vec![ErrorLink { subject: String::new(), message }])
    }

    fn new(wanted: &RolloutRow, class: FailureClass, causes: Vec<ErrorLink>) -> Self {
        let call = causes.iter().rev().find_map(|link| call_in(&link.subject));
        let (server, route) = call.unwrap_or((&*wanted.server, "/run"));
        Self { class, server: server.to_owned(), route: route.to_owned(), causes }
    }

    /// Returns the causes after the failed call: what tells this failure from others of the same call.
    pub(super) fn own_causes(&self) -> impl Iterator<Item = &ErrorLink> {
        let call = self.causes.iter().rposition(|link| call_in(&link.subject).is_some());
        self.causes.iter().skip(call.unwrap_or(0))
    }

    /// Adds the fields that say where and why the attempt failed, and NeMo Gym's record.
    pub(super) fn write(
        &self,
        row: &RawObject,
        wanted: &RolloutRow,
        attempt: Attempt,
        run_id: &str,
        seen: &FailureEvidence<'_>,
    ) -> Result<RawObject> {
        let record = RolloutFailureRecord {
            schema_version: 1,
            episode_id: EpisodeId { rollout_id: rollout_id(wanted), attempt: attempt.number },
            run_id,
            source: seen.evidence.source(),
            delivery: seen.evidence.delivery(),
            failure: EpisodeFailure {
                failure_reason: seen.reason.chars().take(REASON_CHARS_MAX).collect(),
                terminal: seen.terminal,
                failure_kind: kind(self.class),
                stage: stage(self.class),
            },
            http_status: seen.http_status.filter(|status| (100..=599).contains(status)),
            exception_type: seen.exception_type,
        };
        let edit = row
            .edit()
            .set_value("_ng_failure_server", &self.server)?
            .set_value("_ng_failure_route", &self.route)?
            .set_value("_ng_failure_causes", &self.causes)?
            .set_value("_ng_failure_record", &record)?;
        Ok(edit.to_object()?)
    }
}

/// The fields of NeMo Gym's record of a failure, without its causes.
pub(super) struct FailureEvidence<'a> {
    pub(super) evidence: Evidence,
    pub(super) reason: &'a str,
    pub(super) terminal: bool,
    pub(super) http_status: Option<u16>,
    pub(super) exception_type: Option<&'a str>,
}

/// NeMo Gym's `RolloutFailure`, schema 1. Its readers reject unknown fields.
#[derive(Serialize)]
struct RolloutFailureRecord<'a> {
    schema_version: u32,
    episode_id: EpisodeId,
    run_id: &'a str,
    source: &'static str,
    delivery: &'static str,
    failure: EpisodeFailure,
    http_status: Option<u16>,
    exception_type: Option<&'a str>,
}

#[derive(Serialize)]
struct EpisodeId {
    rollout_id: String,
    attempt: u32,
}

#[derive(Serialize)]
struct EpisodeFailure {
    failure_reason: String,
    terminal: bool,
    failure_kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<&'static str>,
}

/// Returns the server and the route of a subject such as `POST math/verify`. An address is not a server's name.
fn call_in(subject: &str) -> Option<(&str, &str)> {
    let (verb, target) = subject.split_once(' ')?;
    let at = target.find('/').filter(|at| *at > 0)?;
    (matches!(verb, "GET" | "POST") && !target.contains("://") && !target.contains(' ')).then(|| target.split_at(at))
}

/// Returns the row's rollout ID if NeMo Gym accepts it, or else the ID that NeMo Gym derives from the indices.
fn rollout_id(wanted: &RolloutRow) -> String {
    // NeMo Gym derives such names for further attempts.
    let reserved = |id: &str| {
        let number = id.rsplit_once("-a").map_or("", |(_, number)| number);
        number.starts_with(|c: char| ('1'..='9').contains(&c)) && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let named = wanted.row.get_as::<String>("_ng_rollout_id").ok().flatten().filter(|id| {
        id.starts_with(|c: char| c.is_ascii_alphanumeric())
            && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
            && !reserved(id)
    });
    named.unwrap_or_else(|| format!("{}-{}", wanted.key.task_index, wanted.key.rollout_index))
}

/// Returns NeMo Gym's name for a class. A class without one gets a name in our namespace, as its vocabulary asks for.
fn kind(class: FailureClass) -> &'static str {
    match class {
        FailureClass::EpisodeTimeout => "agent_timeout",
        FailureClass::RowInvalid => "gym:row_invalid",
        FailureClass::EnvironmentError => "gym:environment_error",
        FailureClass::ToolError => "gym:tool_error",
        FailureClass::ModelError => "gym:model_error",
        FailureClass::ModelUnavailable => "gym:model_unavailable",
        FailureClass::Truncated => "gym:truncated",
        FailureClass::WorkerLost => "gym:worker_lost",
        FailureClass::VerifierPanic | FailureClass::InvalidReward => FailureClass::VerifierError.as_str(),
        other => other.as_str(),
    }
}

/// Returns NeMo Gym's stage of the episode, where the class tells it. A failure of the transport does not.
fn stage(class: FailureClass) -> Option<&'static str> {
    match class {
        FailureClass::ToolError
        | FailureClass::ModelError
        | FailureClass::ModelUnavailable
        | FailureClass::EpisodeTimeout => Some("agent"),
        FailureClass::JudgeFailed
        | FailureClass::VerifierError
        | FailureClass::VerifierPanic
        | FailureClass::InvalidReward => Some("verification"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_call_names_the_server() {
        assert_eq!(call_in("POST math/verify"), Some(("math", "/verify")));
        assert_eq!(call_in("POST policy_model/v1/responses"), Some(("policy_model", "/v1/responses")));
        for other in ["POST http://127.0.0.1:1/v1", "connect to a/b", "POST /verify", "", "POST math", "GET a b/c"] {
            assert_eq!(call_in(other), None, "{other}");
        }
    }
}
