//! `POST /aggregate_metrics`: the statistics of many rollouts, as NeMo Gym 0.7.0 writes them.
//!
//! Body and reply are complete messages in memory. The transport bounds the body, and the caller's limit bounds the reply.

use gym_core::rollout::metrics::{MetricsError, aggregate_metrics, standard_response};
use gym_core::{CallContext, Code, Error, RawObject, Response, Result, Status};

pub(crate) fn reply(cx: &CallContext, body: &RawObject) -> Result<Response> {
    match aggregate_metrics(body.text(), cx.reply_bytes_max) {
        Ok(reply) => Ok(standard_response(reply)),
        Err(error @ MetricsError::ReplyTooLarge { .. }) => {
            let error = Error::finished(Code::ResourceExhausted, error.to_string());
            // Not 429, the default status of this code, because a Python client would then resend the same request.
            Ok(Response { status: Status(413), ..Response::from_error(&error) })
        }
        Err(error) => Err(Error::invalid("these rollouts cannot be aggregated").caused_by(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_that_the_caller_does_not_take_are_refused_for_their_size() {
        let body = RawObject::parse(r#"{"verify_responses":[{"_ng_task_index":0,"reward":1.0}]}"#).unwrap();
        let mut cx = CallContext::default();
        assert_eq!(reply(&cx, &body).unwrap().status, Status::OK);
        cx.reply_bytes_max = 100;
        let refused = reply(&cx, &body).unwrap();
        assert_eq!(refused.status, Status(413));
        let error = refused.into_result().unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.to_string().contains("larger than 100 bytes"), "{error}");
    }
}
