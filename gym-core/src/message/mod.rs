//! Calls: context, request, response, and their contents.

mod bounds;
mod content;
mod context;
mod failure;
pub mod frame;
mod json;
mod loan;
mod metadata;
mod request;
mod response;

pub(crate) use bounds::CallBounds;
pub use content::{ContentType, Message};
pub use context::{
    CALL_METADATA, CALL_WAIT_METADATA, CALL_WAIT_TIMEOUT, CallContext, DEFAULT_CALL_TIMEOUT, DEFAULT_REPLY_BYTES_MAX,
    Incarnation, TraceContext,
};
#[doc(hidden)]
pub use failure::{FAILURE_METADATA, readable, shorten};
pub use failure::{read as read_failure, write as write_failure};
pub use json::{
    Edit, FieldEdit, JsonError, JsonFields, RawObject, Rope, json_string, json_string_length, push_json_string,
};
pub use loan::{Lender, Loan};
pub use metadata::Metadata;
pub use request::{PeerInfo, Request, Route, Verb};
#[doc(hidden)]
pub use response::{CODE_METADATA, EXECUTION_METADATA};
pub use response::{Response, Status};
