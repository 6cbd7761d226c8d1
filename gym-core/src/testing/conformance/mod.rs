//! One suite per seam, run by every implementation of it. A case that fails panics and names itself.

mod files;
mod ledger;

pub use files::files;
pub use ledger::{LedgerBench, ledger};
