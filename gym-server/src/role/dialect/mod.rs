//! The request forms of NeMo Gym and of OpenAI's clients: the keys that they may have, and the events for streaming clients.

pub(crate) mod events;
pub(crate) mod harness;
pub(crate) mod schema;
