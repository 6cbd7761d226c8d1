//! The processes of a launcher: shim, watchdog, and the families that they end.

pub(in crate::launch) mod roles;
pub(in crate::launch) mod shim;
pub(in crate::launch) mod spawner;
pub(crate) mod tree;
pub(in crate::launch) mod watchdog;
