//! Server roles: the traits of environments, models and agents, with their requests, sessions and tool arguments.

mod arguments;
mod responses;
mod role;
mod sessions;
mod validation;

pub use arguments::{Argument, ArgumentErrors, Arguments, ToolReply};
pub use responses::{
    Content, ContentPart, FunctionCall, FunctionCallOutput, Ignored, IncompleteDetails, ModelResponse, OutputItem,
    OutputMessage, ResponseOutline,
};
pub use role::{
    AgentServer, EnvironmentServer, ModelServer, ResourcesServer, ServerKind, SessionId, Verdict, unknown_tool,
};
pub use sessions::{IDLE_MIN, SCORED_MAX, SESSIONS_MAX, Sessions, session_lost};
pub use validation::{ValidationProblem, unprocessable};
