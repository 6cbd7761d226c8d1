//! Calls of servers by name, and the episodes' sessions with them.

mod background;
mod cookies;
mod pending;
mod replicas;
mod server_client;
mod session;

pub use cookies::CookieJar;
pub use server_client::{CallOptions, ServerClient};
pub use session::Session;
