//! Computations of a training step outside the model: advantages of rewards, and token masks of message logs.
//!
//! ```text
//!   rewards by prompt ──► advantages ──► loss
//!   messages of a rollout ── message_log ──► token ids, loss mask, log probabilities
//! ```

pub mod advantages;
pub mod message_log;
