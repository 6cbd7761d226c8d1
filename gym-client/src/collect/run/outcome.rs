//! Classifies the response to `/run`: a row for the rollouts, a row for the failures file, or no row.
//!
//! The keys are those of NeMo Gym 0.7.0, so that its `profile`, `aggregate` and `--resume` can read the files.

use std::time::Duration;

use bytes::Bytes;
use gym_core::message::{CODE_METADATA, JsonFields};
use gym_core::rollout::{
    Attempt, EPISODE_KEY, EPISODE_METADATA, EpisodeRecord, FailureClass, Outcome, UNVERIFIED_KEY, non_finite_reward,
};
use gym_core::server::ResponseEnd;
use gym_core::{Code, Error, RawObject, Response, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::collect::ledger::truth;
use crate::collect::run::failure::{AttemptFailure, Evidence, FailureEvidence};
use crate::collect::run::progress::{EpisodeFigures, RolloutFigures};
use crate::collect::run::row::RolloutRow;

/// Maximum number of bytes of a failed response's body in the failures file; NeMo Gym keeps the same number of
/// characters.
const BODY_KEPT_MAX: usize = 2_000;

/// The key by which NeMo Gym's agent marks a response that has neither a message nor a tool call.
const TERMINATION_REASON: &str = "ng_termination_reason";

/// The result of an attempt.
#[derive(Debug)]
pub(super) enum AttemptResult {
    /// A rollout, with its reward if it has one that counts, and what else the summary counts.
    Completed {
        row: RawObject,
        figures: RolloutFigures,
    },
    Failed {
        failure: Box<AttemptFailure>,
        terminal: bool,
        row: RawObject,
    },
    /// The environment requested that no row be kept; a resumed run tries again.
    Lost,
}

/// The key of a row that was made with other settings than the first rows of its collection: the number of their version.
const SETTINGS_KEY: &str = "_gym_settings";

/// The key of a failed row: the place of its task in the input.
const INPUT_KEY: &str = "_ng_failure_input";

impl AttemptResult {
    /// Writes the version of the servers' settings into the row; `None` for the first one, whose rows have no mark. Writes the place of its task
    /// in the input into a failed row.
    pub(super) fn marked(self, version: Option<u32>, input: impl FnOnce() -> Option<String>) -> Result<Self> {
        let mark = |row: RawObject| match version {
            Some(version) => Ok(row.edit().set(SETTINGS_KEY, version.to_string()).to_object()?),
            // A row from an earlier collection may have a mark of that one.
            None if row.contains(SETTINGS_KEY) => Ok(row.edit().remove(SETTINGS_KEY).to_object()?),
            None => Ok::<_, Error>(row),
        };
        Ok(match self {
            Self::Completed { row, figures } => Self::Completed { row: mark(row)?, figures },
            Self::Failed { failure, terminal, row } => {
                let row = match input() {
                    Some(place) => mark(row)?.edit().set_value(INPUT_KEY, &place)?.to_object()?,
                    None => mark(row)?,
                };
                Self::Failed { failure, terminal, row }
            }
            Self::Lost => Self::Lost,
        })
    }

    pub(super) fn into_outcome(self) -> Option<Outcome> {
        match self {
            Self::Completed { row, .. } => Some(Outcome::Completed(row)),
            Self::Failed { failure, terminal, row } => Some(Outcome::Failed { class: failure.class, terminal, row }),
            Self::Lost => None,
        }
    }
}

/// The fields of a result that decide its class.
#[derive(Deserialize)]
struct ResultFields {
    #[serde(default, rename = "_ng_failure_class")]
    failure_class: Option<String>,
    #[serde(default, rename = "_ng_failure_terminal")]
    terminal: Option<Value>,
    #[serde(default, rename = "_ng_no_persist")]
    no_persist: Option<Value>,
    #[serde(default)]
    mask_sample: Option<Value>,
}

/// Classifies the response, or the error of the call. `run_id` identifies the run in NeMo Gym's record of a failure.
pub(super) fn classify(
    wanted: &RolloutRow,
    attempt: Attempt,
    answer: Result<Response>,
    run_id: &str,
    took: Duration,
) -> Result<AttemptResult> {
    let failed = |class, error: &Error, evidence, answer: Option<(u16, &Bytes)>| {
        failed(wanted, attempt, run_id, (class, error, evidence), answer)
    };
    let response = match answer {
        Ok(response) => response,
        Err(error) => {
            return failed(error.failure_class(), &error, Evidence::NoResponse(error.execution()), None);
        }
    };
    let body = response.message.head.to_bytes();
    if !response.status.is_success() {
        let status = response.status.0;
        let code = response.metadata.get(CODE_METADATA).map(str::to_owned);
        let error = match response.into_result() {
            Err(error) => {
                let execution = error.execution();
                error.within(execution, format!("POST {}/run", wanted.server))
            }
            Ok(_) => Error::internal(format!("the response to `/run` has status {status}")),
        };
        // Servers of this SDK send the class. For others as in NeMo Gym: these four mean that the server could not take
        // the request; any other status means that it ran and failed.
        let class = match status {
            _ if error.class().is_some() => error.failure_class(),
            429 | 502 | 503 | 504 => FailureClass::AgentRequestFailed,
            // Not in NeMo Gym: a server was restarted and has lost the episode's session. A new attempt begins a new
            // session.
            412 if code.as_deref() == Some(Code::FailedPrecondition.as_str()) => FailureClass::SessionLost,
            _ => FailureClass::AgentRunError,
        };
        // A proxy may respond in the place of a server of another implementation.
        let uncertain = code.is_none() && matches!(status, 429 | 502 | 503 | 504);
        let evidence = if uncertain { Evidence::Uncertain } else { Evidence::Reported };
        return failed(class, &error, evidence, Some((status, &body)));
    }
    let status = response.status.0;
    let bad = |why: String| {
        let error = Error::internal(why);
        failed(FailureClass::VerifierError, &error, Evidence::Observed, Some((status, &body)))
    };
    let invalid_reward = |reward: &str| {
        let error =
            Error::internal(format!("the response to `/run` has the reward {reward}, which is not a finite number"));
        failed(FailureClass::InvalidReward, &error, Evidence::Observed, Some((status, &body)))
    };
    let result = match response.message.head.to_object() {
        Ok(result) => result,
        Err(error) => match non_finite_reward(&body) {
            Some(reward) => return invalid_reward(reward),
            None => return bad(format!("the response to `/run` is not a JSON object: {error}")),
        },
    };
    // The training arrays of a large row were not parsed on the way, and a line of invalid JSON would corrupt the file.
    if let Err(error) = result.check() {
        return bad(format!("the response to `/run` is not valid JSON: {error}"));
    }
    let fields: ResultFields = match result.view() {
        Ok(fields) => fields,
        Err(error) => return bad(format!("the response to `/run` has a field of the wrong type: {error}")),
    };
    if fields.no_persist.as_ref().is_some_and(truth) {
        return Ok(AttemptResult::Lost);
    }
    let record = response.metadata.get(EPISODE_METADATA).and_then(EpisodeRecord::from_text);
    let row = stamped(wanted, attempt, &result, Some((record.as_ref(), took)))?;
    if let Some(class) = fields.failure_class {
        let class = serde_json::from_value(Value::String(class)).unwrap_or(FailureClass::AgentRunError);
        let terminal = fields.terminal.as_ref().is_some_and(truth);
        let failure = AttemptFailure::told(wanted, class, failure_message(&row));
        let reason = &failure.causes[0].message;
        let told =
            FailureEvidence { evidence: Evidence::Reported, reason, terminal, http_status: None, exception_type: None };
        let row = failure.write(&row, wanted, attempt, run_id, &told)?;
        return Ok(AttemptResult::Failed { failure: Box::new(failure), terminal, row });
    }
    // Our agents have checked each turn, and only they report the episode.
    if record.is_none()
        && let Some(ResponseEnd::Interrupted(how)) = end_of(&row)
    {
        let error = Error::internal(format!("the response of the model was ended by {how}, and is not scored"));
        return failed(FailureClass::ModelError, &error, Evidence::Observed, Some((status, &body)));
    }
    let reward = result.get("reward");
    let value = reward.as_deref().map(serde_json::from_slice).transpose();
    match value.ok().and_then(|value| number(value).ok()) {
        Some(reward) => {
            let masked = fields.mask_sample.as_ref().is_some_and(truth);
            let episode = record.as_ref().map(EpisodeFigures::from);
            let figures = RolloutFigures { reward: reward.filter(|_| !masked), took: Some(took), episode };
            Ok(AttemptResult::Completed { row, figures })
        }
        None => invalid_reward(&String::from_utf8_lossy(&reward.unwrap_or_default())),
    }
}

/// Returns the reward of a completed row, if it has one that counts. The reward of a masked row (`mask_sample`) is a placeholder.
#[must_use]
pub fn reward_of(row: &RawObject) -> Option<f64> {
    let mask: Option<Value> = row.get_as("mask_sample").ok().flatten();
    reward_that_counts(mask.as_ref(), row.get_as("reward").ok()?)
}

/// Returns the same as [`reward_of`] for the fields of a row.
pub(in crate::collect) fn reward_of_fields(row: &JsonFields<'_>) -> Option<f64> {
    let value = |key: &str| row.get(key).and_then(|text| serde_json::from_str::<Value>(text).ok());
    reward_that_counts(value("mask_sample").as_ref(), value("reward"))
}

fn reward_that_counts(mask: Option<&Value>, reward: Option<Value>) -> Option<f64> {
    if mask.is_some_and(truth) {
        return None;
    }
    number(reward).ok()?
}

/// Returns the message of a failures row: that of its error, or else its class.
pub(super) fn failure_message(row: &RawObject) -> String {
    let text = |key: &str| row.get_as::<String>(key).ok().flatten();
    text("_ng_failure_message").or_else(|| text("_ng_failure_class")).unwrap_or_default()
}

/// Parses a reward: a number, or a bool as in Python; `null` is no reward.
fn number(reward: Option<Value>) -> std::result::Result<Option<f64>, Value> {
    match reward {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(reward)) => Ok(reward.as_f64()),
        Some(Value::Bool(reward)) => Ok(Some(f64::from(u8::from(reward)))),
        Some(other) => Err(other),
    }
}

/// Returns the result with the keys that identify its row, in NeMo Gym's order, and then the course of the episode.
fn stamped(
    wanted: &RolloutRow,
    attempt: Attempt,
    result: &RawObject,
    course: Option<(Option<&EpisodeRecord>, Duration)>,
) -> Result<RawObject> {
    let mut edit = result.edit();
    for key in ["_ng_task_index", "_ng_rollout_index", "agent_ref", "task_source", "skills_ref"] {
        edit = edit.copy(key, &wanted.row);
    }
    // A row from an earlier collection may contain the number of an earlier attempt.
    edit = match attempt.number {
        0 => edit.remove("_ng_attempt_index"),
        number => edit.set("_ng_attempt_index", number.to_string()),
    };
    edit = edit.copy("_ng_rollout_id", &wanted.row).set_value("_ng_environment_server", &*wanted.server)?;
    if let Some(kind) = &wanted.result_type {
        edit = edit.set_value("_ng_result_type", &**kind)?;
    }
    if let Some((record, took)) = course {
        edit = EpisodeRecord::write(record, attempt.number.saturating_add(1), took, edit);
    }
    Ok(edit.to_object()?)
}

/// Returns a failure instead of a rollout whose last model response was cut off, and any other result unchanged.
pub(super) fn without_truncated(
    wanted: &RolloutRow,
    attempt: Attempt,
    result: AttemptResult,
    run_id: &str,
) -> Result<AttemptResult> {
    let AttemptResult::Completed { row, .. } = &result else { return Ok(result) };
    let text = match cut_off(row) {
        Some(details) => format!("the model's response was cut off ({})", details.why()),
        None if is_unverified(row) => "the engine may have aborted a response of the model".to_owned(),
        None => return Ok(result),
    };
    let error = Error::internal(format!("{text}, and truncated rollouts are not scored"));
    let error = error.about(format!("POST {}/run", wanted.server));
    failed(wanted, attempt, run_id, (FailureClass::Truncated, &error, Evidence::Observed), Some((200, row.text())))
}

/// Returns how the last model response of a row ended; `None` if the row does not say. Agents of other implementations make responses of their
/// own, which need no status; and a response without message and tool call is incomplete, although its model ended it.
fn end_of(row: &RawObject) -> Option<ResponseEnd> {
    let response = row.get_object("response").ok().flatten()?;
    let has = |key: &str| response.get(key).is_some_and(|value| value != "null");
    let says = has("status") || has("error") || has("incomplete_details");
    let is_empty =
        || response.get_object("metadata").is_ok_and(|kept| kept.is_some_and(|kept| kept.contains(TERMINATION_REASON)));
    (says && (has("incomplete_details") || !is_empty())).then(|| ResponseEnd::of_response(&response))
}

/// Returns `true` if a model response of a row could not be checked: as its agent counted, or as the last response says.
fn is_unverified(row: &RawObject) -> bool {
    [(EPISODE_KEY, "completion_unverified"), ("response", UNVERIFIED_KEY)].iter().any(|(object, key)| {
        let object = row.get_object(object).ok().flatten();
        object.and_then(|object| object.get(key)).is_some_and(|unverified| unverified == "true")
    })
}

/// Returns why the last model response of a row was cut off; `None` if it was not.
pub(super) fn cut_off(row: &RawObject) -> Option<IncompleteDetails> {
    let Some(ResponseEnd::Truncated(reason)) = end_of(row) else { return None };
    let response = row.get_object("response").ok().flatten()?;
    let details = response.get_as::<Option<IncompleteDetails>>("incomplete_details").ok().flatten().flatten();
    Some(details.unwrap_or(IncompleteDetails { reason: Some(reason), code: None, message: None }))
}

#[derive(Deserialize)]
pub(super) struct IncompleteDetails {
    #[serde(default)]
    reason: Option<String>,
    /// `context_length_exceeded`, from this SDK's `vllm_model`.
    #[serde(default)]
    code: Option<String>,
    #[serde(default)]
    message: Option<String>,
}

impl IncompleteDetails {
    pub(super) fn why(self) -> String {
        [self.code.or(self.reason), self.message].into_iter().flatten().collect::<Vec<_>>().join(": ")
    }
}

/// Returns the failure of a response that the ledger rejects because it contradicts its own row.
pub(super) fn contradiction(
    wanted: &RolloutRow,
    attempt: Attempt,
    error: &Error,
    run_id: &str,
) -> Result<AttemptResult> {
    failed(wanted, attempt, run_id, (FailureClass::VerifierError, error, Evidence::Observed), None)
}

/// Returns the failure of an attempt that was not recorded by its deadline.
pub(super) fn superseded(wanted: &RolloutRow) -> AttemptFailure {
    let message = "the attempt was not recorded by its deadline and was superseded".to_owned();
    AttemptFailure::told(wanted, FailureClass::TransportTimeout, message)
}

/// Returns the failures row of an attempt without a result.
fn failed(
    wanted: &RolloutRow,
    attempt: Attempt,
    run_id: &str,
    (class, error, evidence): (FailureClass, &Error, Evidence),
    answer: Option<(u16, &Bytes)>,
) -> Result<AttemptResult> {
    let failure = AttemptFailure::of(wanted, class, error);
    let message = error.to_string();
    let http_status = answer.map(|(status, _)| status);
    let exception_type = Some(error.code().as_str());
    let told = FailureEvidence { evidence, reason: &message, terminal: false, http_status, exception_type };
    let body = answer.map(|(_, body)| {
        let kept = &body[..body.len().min(BODY_KEPT_MAX)];
        String::from_utf8_lossy(kept).into_owned()
    });
    let fields = RawObject::empty()
        .edit()
        .set_value("_ng_failure_class", class.as_str())?
        .set_value("_ng_failure_type", error.code().as_str())?
        .set_value("_ng_failure_message", &message)?
        .set_value("_ng_failure_execution", error.execution().as_str())?
        .set_value("_ng_failure_http_status", &http_status)?
        .set_value("_ng_failure_response_body", &body)?
        .to_object()?;
    let fields = failure.write(&fields, wanted, attempt, run_id, &told)?;
    let row = stamped(wanted, attempt, &fields, None)?;
    Ok(AttemptResult::Failed { failure: Box::new(failure), terminal: false, row })
}

#[cfg(test)]
mod tests {
    use gym_core::rollout::{EPISODE_KEY, TaskKey};
    use gym_core::{Execution, Message, Status};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_is_marked_with_the_version_of_the_settings_unless_it_is_the_first() {
        for (row, version, expected) in [
            (json!({"reward": 1.0}), None, json!({"reward": 1.0})),
            (json!({"reward": 1.0, "_gym_settings": 7}), None, json!({"reward": 1.0})),
            (json!({"reward": 1.0, "_gym_settings": 7}), Some(2), json!({"reward": 1.0, "_gym_settings": 2})),
        ] {
            let row = RawObject::parse(row.to_string()).unwrap();
            let scored = AttemptResult::Completed { row, figures: RolloutFigures::default() };
            let AttemptResult::Completed { row, .. } = scored.marked(version, || None).unwrap() else {
                panic!("it is scored")
            };
            assert_eq!(serde_json::from_slice::<Value>(row.text()).unwrap(), expected);
        }
    }

    #[test]
    fn a_masked_result_is_kept_without_its_reward() {
        let key = TaskKey::new(0, 0);
        let row = RawObject::parse(r#"{"_ng_task_index":0,"_ng_rollout_index":0}"#).unwrap();
        let wanted = RolloutRow { key, agent: "a".into(), server: "e".into(), result_type: None, row };
        for (body, expected) in [
            (r#"{"reward":0.0,"mask_sample":true,"failure_kind":"judge_failed"}"#, None),
            (r#"{"reward":0.5,"mask_sample":false,"failure_kind":"judge_failed"}"#, Some(0.5)),
            (r#"{"reward":0.5,"mask_sample":null}"#, Some(0.5)),
            (r#"{"reward":0.5}"#, Some(0.5)),
        ] {
            match classify(&wanted, Attempt { key, number: 0 }, Ok(Response::json(body)), "run", Duration::ZERO)
                .unwrap()
            {
                AttemptResult::Completed { row, figures } => {
                    assert_eq!((figures.reward, reward_of(&row)), (expected, expected), "{body}");
                    assert!(row.get("reward").is_some(), "the row is kept as it came: {body}");
                }
                other => panic!("{body}: {other:?}"),
            }
        }
    }

    fn class_of(answer: Result<Response>) -> FailureClass {
        let key = TaskKey::new(0, 0);
        let row = RawObject::parse(r#"{"_ng_task_index":0,"_ng_rollout_index":0}"#).unwrap();
        let wanted = RolloutRow { key, agent: "a".into(), server: "e".into(), result_type: None, row };
        match classify(&wanted, Attempt { key, number: 0 }, answer, "run", Duration::ZERO).unwrap() {
            AttemptResult::Failed { failure, terminal: false, .. } => failure.class,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_scored_row_has_the_course_of_its_episode() {
        let key = TaskKey::new(0, 0);
        let row = RawObject::parse(r#"{"_ng_task_index":0,"_ng_rollout_index":0}"#).unwrap();
        let wanted = RolloutRow { key, agent: "a".into(), server: "e".into(), result_type: None, row };
        let course_of = |answer: Response| {
            let took = Duration::from_micros(1_500_001);
            match classify(&wanted, Attempt { key, number: 1 }, Ok(answer), "run", took).unwrap() {
                AttemptResult::Completed { row, .. } => row.get_as::<Value>(EPISODE_KEY).unwrap().unwrap(),
                other => panic!("{other:?}"),
            }
        };
        // A row from an earlier collection, of an agent in another language.
        let foreign = Response::json(r#"{"reward":1.0,"_gym_episode":{"turns":9}}"#);
        assert_eq!(course_of(foreign.clone()), json!({"attempts": 2, "seconds": 1.500_001}));
        let mut ours = foreign.clone();
        let mut record = EpisodeRecord::default();
        record.turns = 3;
        record.truncate("max_steps");
        ours.metadata.push(EPISODE_METADATA, record.to_text());
        let expected = json!({
            "turns": 3, "tool_calls": 0, "tool_errors": 0, "tool_failures": 0, "outputs_cut": 0, "truncated": "max_steps",
            "attempts": 2, "seconds": 1.500_001,
        });
        assert_eq!(course_of(ours), expected);
        let mut invalid = foreign;
        invalid.metadata.push(EPISODE_METADATA, "turns=");
        assert_eq!(course_of(invalid), json!({"attempts": 2, "seconds": 1.500_001}));
    }

    #[test]
    fn a_lost_session_is_distinguished_from_a_failed_episode() {
        let lost = Error::new(Code::FailedPrecondition, Execution::Finished, "no such session");
        assert_eq!(class_of(Ok(Response::from_error(&lost))), FailureClass::SessionLost);
        assert_eq!(class_of(Err(lost)), FailureClass::SessionLost);
        let foreign = Response::new(Status(412), Message::json("{}"));
        assert_eq!(class_of(Ok(foreign)), FailureClass::AgentRunError);
        let busy = Response::new(Status(503), Message::json("{}"));
        assert_eq!(class_of(Ok(busy)), FailureClass::AgentRequestFailed);
    }

    #[test]
    fn only_a_rollout_whose_response_was_cut_off_fails_as_truncated() {
        let key = TaskKey::new(0, 0);
        let row = RawObject::parse(r#"{"_ng_task_index":0,"_ng_rollout_index":0}"#).unwrap();
        let wanted = RolloutRow { key, agent: "a".into(), server: "e".into(), result_type: None, row };
        for (response, says) in [
            (r#"{"incomplete_details":{"reason":"max_output_tokens"}}"#, Some("cut off (max_output_tokens)")),
            (
                r#"{"incomplete_details":{"reason":"max_output_tokens","code":"context_length_exceeded","message":"5 > 4"}}"#,
                Some("cut off (context_length_exceeded: 5 > 4)"),
            ),
            (r#"{"_gym_completion_unverified":true}"#, Some("may have aborted a response")),
            (r#"{},"_gym_episode":{"turns":2,"completion_unverified":true}"#, Some("may have aborted a response")),
            (r#"{"incomplete_details":null}"#, None),
            ("{}", None),
            ("null", None),
            ("3", None),
        ] {
            let row = RawObject::parse(format!(r#"{{"reward":0.0,"response":{response}}}"#)).unwrap();
            let scored = AttemptResult::Completed {
                row,
                figures: RolloutFigures { reward: Some(0.0), ..RolloutFigures::default() },
            };
            match (without_truncated(&wanted, Attempt { key, number: 0 }, scored, "run").unwrap(), says) {
                (AttemptResult::Completed { .. }, None) => {}
                (AttemptResult::Failed { failure, row, .. }, Some(says))
                    if failure.class == FailureClass::Truncated =>
                {
                    let message = failure_message(&row);
                    assert!(message.contains(says), "{message}");
                }
                (other, _) => panic!("{response}: {other:?}"),
            }
        }
    }
}
