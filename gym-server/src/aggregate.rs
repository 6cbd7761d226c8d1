//! `POST /aggregate_metrics`: the statistics of many rollouts, as NeMo Gym 0.7.0 writes them.

use gym_core::{Error, RawObject, Response, Result};

pub(crate) fn reply(body: &RawObject) -> Result<Response> {
    let reply = gym_core::metrics::aggregate_metrics(body.text())
        .map_err(|error| Error::invalid("these rollouts cannot be aggregated").caused_by(error))?;
    Ok(Response::json(reply))
}
