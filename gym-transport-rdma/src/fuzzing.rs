//! What comes from a peer, without UCX: for fuzzers. Only with the feature `testing`.

use gym_core::Result;

use crate::bootstrap::{Answer, Ask};
pub use crate::fabric::fuzzing::read_message;
pub use crate::pipe::fuzzing::{take_answers, take_parcels};

/// Reads the question of a bootstrap and writes it again.
///
/// # Errors
/// What a peer would be told.
pub fn read_question(bytes: &[u8]) -> Result<String> {
    Ask::read(bytes).map(|ask| ask.write())
}

/// Reads the answer of a bootstrap and writes it again.
///
/// # Errors
/// Why no connection is tried.
pub fn read_answer(bytes: &[u8]) -> Result<String> {
    Answer::read(bytes).map(|answer| answer.write())
}
