//! The names with which environments, agents and models are written: `use gym_core::prelude::*`.

pub use crate::base::cancel::CancelToken;
pub use crate::base::error::{Code, Error, Result};
pub use crate::base::world::World;
pub use crate::message::{CallContext, Message, RawObject, Request, Response};
pub use crate::server::{
    AgentServer, Arguments, ModelResponse, ModelServer, ResourcesServer, RolloutServer, SessionId, SessionTable,
    Sessions, Verdict,
};
pub use crate::tools;
pub use crate::transport::{Endpoint, Handler};
