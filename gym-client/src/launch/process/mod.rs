//! The processes of a launcher: the shim, the watchdog, and the process trees that they end.

pub(in crate::launch) mod roles;
pub(in crate::launch) mod shim;
pub(in crate::launch) mod spawner;
pub(crate) mod tree;
pub(in crate::launch) mod watchdog;
