//! How two ends of a connection know each other.

use std::fmt;

/// Names a connection at the end that made it up; the other end writes it into every message. Whoever knows it can write
/// into the connection, so it is told to the peer alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub u64);

impl ConnectionId {
    /// A new one, from the operating system's random numbers.
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

/// What a calling end shows once to prove that it is the one of the bootstrap.
#[derive(Clone)]
pub struct Token(pub [u8; Self::BYTES]);

impl Token {
    /// Its length.
    pub const BYTES: usize = 32;

    /// A new one, from the operating system's random numbers.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; Self::BYTES];
        fill(&mut bytes);
        Self(bytes)
    }

    /// In a time that does not depend on where they differ.
    #[must_use]
    pub fn matches(&self, shown: &[u8]) -> bool {
        // The hint keeps the compiler from leaving the loop early.
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
            // A signal came before the kernel had its randomness, early at boot.
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
