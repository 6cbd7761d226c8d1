//! One suite per seam, run by every implementation of it. A case that fails panics and names itself.

mod files;
mod ledger;
mod transport;

pub use files::files;
pub use ledger::{LedgerBench, ledger};
pub use transport::{TransportPair, TransportSetup, transport};
