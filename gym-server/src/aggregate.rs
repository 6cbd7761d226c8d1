//! `POST /aggregate_metrics`.

use gym_core::{RawObject, Response, Result};

pub(crate) fn reply(body: &RawObject) -> Result<Response> {
    let _ = body;
    Ok(Response::json("{}"))
}
