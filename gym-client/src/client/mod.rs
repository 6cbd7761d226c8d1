//! Calls servers by name, and keeps the sessions of episodes.

mod background;
mod cookies;
mod outage;
mod replicas;
mod server_client;
mod session;
pub mod url;
pub mod values;

pub use cookies::CookieJar;
pub use outage::{AwaitedServer, AwaitedServers, SERVER_TIMEOUT};
pub use replicas::JOINS_RUNS_LABEL;
pub use server_client::{CallOptions, ServerClient};
pub use session::Session;
