//! Identity of a connection: the ids of both ends, and the token of the bootstrap.

use std::fmt;

/// Id of a connection at the end that chose it. The other end writes it into every message.
///
/// Any process that knows the id can write into the connection, so only the peer receives it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub u64);

impl ConnectionId {
    /// Creates an id from the operating system's random numbers.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; 8];
        fill(&mut bytes);
        Self(u64::from_le_bytes(bytes))
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionId({:016x})", self.0)
    }
}

/// One-time secret from the bootstrap that a calling end shows to prove its identity.
#[derive(Clone)]
pub struct Token(pub [u8; Self::BYTES]);

impl Token {
    /// Length of a token.
    pub const BYTES: usize = 32;

    /// Creates a token from the operating system's random numbers.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; Self::BYTES];
        fill(&mut bytes);
        Self(bytes)
    }

    /// Compares the token in constant time.
    #[must_use]
    pub fn matches(&self, shown: &[u8]) -> bool {
        // `black_box` keeps the compiler from leaving the loop early.
        let differences =
            self.0.iter().zip(shown).fold(0, |seen, (ours, theirs)| std::hint::black_box(seen | (ours ^ theirs)));
        shown.len() == Self::BYTES && differences == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

fn fill(mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(got) => bytes = &mut bytes[got..],
            // A signal interrupted the wait for entropy, early at boot.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("getrandom exists since Linux 3.17 and does not fail otherwise: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_matches_itself_alone_and_is_not_shown_in_logs() {
        let token = Token::random();
        assert!(token.matches(&token.0));
        let mut other = token.0;
        other[31] ^= 1;
        assert!(!token.matches(&other) && !token.matches(&token.0[..31]) && !token.matches(&[]));
        assert_eq!(format!("{token:?}"), "Token(…)");
        assert_ne!(Token::random().0, token.0);
    }
}
