//! Server roles: the traits of environments, models and agents, with their requests, sessions and tool arguments.

mod arguments;
mod blocking;
mod harness;
mod responses;
mod role;
mod sessions;
mod tool_errors;
mod tools;
mod validation;

#[cfg(feature = "schemars")]
pub use arguments::Json;
pub use arguments::{Argument, ArgumentErrors, Arguments, bool_in_string};
pub use blocking::Blocking;
pub use harness::{Harness, HarnessEpisode};
pub use responses::{
    Content, ContentPart, FunctionCall, FunctionCallOutput, Ignored, IncompleteDetails, ModelResponse, OutputItem,
    OutputMessage, ResponseEnd, ResponseOutline,
};
pub use role::{
    AgentServer, EndpointReport, EndpointState, GymnasiumServer, ModelEndpoints, ModelServer, ResourcesServer,
    RolloutServer, ServerKind, Step, Verdict, unknown_tool,
};
pub use sessions::{
    IDLE_MAX, IDLE_MIN, SCORED_MAX, SESSIONS_MAX, SessionCounts, SessionId, SessionTable, Sessions, session_lost,
};
pub use tool_errors::{ToolErrorCause, ToolErrors, tool_error_response};
#[doc(hidden)]
pub use tools::{ArgumentType, argument_type};
pub use tools::{Tool, ToolReply};
pub use validation::{RESPONSES_KEYS, TaskCheck, ValidationProblem, unprocessable};
