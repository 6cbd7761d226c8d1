//! The names with which programs that call servers are written: `use gym_client::prelude::*`.

pub use crate::client::{CallOptions, ServerClient, Session};
pub use crate::collect::{CollectOptions, ExistingOutput, Rollout, RolloutCollector, RolloutError, Rollouts};
pub use crate::config::{ConfigLoader, GymConfig, Overrides};
#[cfg(target_os = "linux")]
pub use crate::launch;
pub use crate::transport::Transports;
