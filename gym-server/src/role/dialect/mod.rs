//! The request forms of NeMo Gym and of OpenAI's clients: which keys they may have, and how streaming clients are answered.

pub(crate) mod events;
pub(crate) mod harness;
pub(crate) mod schema;
