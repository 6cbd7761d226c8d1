//! Memory that is lent to a transport, and comes back.

use std::fmt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

/// The owner of memory that it lends.
pub trait Lender: Send + Sync + 'static {
    /// Takes the memory of a loan back, when nobody holds it any more. Called on any thread; must not block.
    fn take_back(&self, number: usize, memory: BytesMut);
}

/// Memory that is lent: a transport sends from it, or receives into it, without a copy. It goes back to its [`Lender`] when it is dropped, and so also if
/// the call fails, or its connection ends.
///
/// ```
/// # use std::sync::{Arc, Mutex};
/// use bytes::BytesMut;
/// use gym_core::message::{Lender, Loan};
///
/// struct Owner(Mutex<Vec<BytesMut>>);
/// impl Lender for Owner {
///     fn take_back(&self, _: usize, memory: BytesMut) {
///         self.0.lock().unwrap().push(memory);
///     }
/// }
///
/// let owner = Arc::new(Owner(Mutex::default()));
/// let segment = Loan::new(BytesMut::from("weights"), 0, owner.clone()).into_bytes();
/// drop(segment);                    // what a transport does when it has sent the last byte
/// assert_eq!(owner.0.lock().unwrap()[0], "weights");
/// ```
pub struct Loan {
    memory: BytesMut,
    number: usize,
    lender: Arc<dyn Lender>,
}

impl Loan {
    /// Lends memory, under a number that tells the lender which of its loans comes back.
    #[must_use]
    pub fn new(memory: BytesMut, number: usize, lender: Arc<dyn Lender>) -> Self {
        Self { memory, number, lender }
    }

    /// Returns the memory as a segment of a message. It comes back when the last part of the segment is dropped.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        &self.memory
    }
}

impl AsMut<[u8]> for Loan {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.lender.take_back(self.number, std::mem::take(&mut self.memory));
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan(number {}, {} bytes)", self.number, self.memory.len())
    }
}
