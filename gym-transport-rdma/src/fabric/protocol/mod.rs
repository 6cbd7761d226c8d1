//! Protocol between two fabrics: identities, the prefix of each message, and its position in the order.

#[cfg(feature = "testing")]
pub(crate) mod fuzzing;
pub(crate) mod identity;
pub(crate) mod prefix;
pub(crate) mod reorder;
