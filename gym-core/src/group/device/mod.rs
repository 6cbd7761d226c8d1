//! Batches in the memory of devices. This crate does not read that memory: a device provider, which the program registers, copies it there and back.
//!
//! ```text
//!                 to_device("cuda")                      lend ──► Buffer ──► a collective operation
//!   Batch ─────────────────────────────► DeviceBatch ──┤                        │
//!     ▲                                    │           restore ◄── Buffer ◄─────┘
//!     └──────────── cpu() ─────────────────┘
//! ```
//!
//! The tensors of dense columns move. Ragged columns, JSON and packed media stay in host memory, and come back with the batch. A [`DeviceBatch`]
//! has no arithmetic and cannot be sliced or sent: take it to the host first.

mod batch;
mod provider;
mod tensor;

pub use batch::DeviceBatch;
pub use provider::{DeviceProvider, device_provider, register_device_provider};
pub use tensor::DeviceTensor;
