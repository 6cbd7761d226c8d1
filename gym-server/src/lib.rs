//! The answering side of the gym SDK: head server, role servers, the rgym command line.
#![forbid(unsafe_code)]

mod aggregate;
pub mod metrics;
mod reply;
mod role;
mod serve;

pub use metrics::Metrics;
pub use reply::{Detail, unprocessable};
pub use role::{Agent, Environment, Model, Resources, Site};
pub use serve::serve;
