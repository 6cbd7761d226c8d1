//! Operations on the rows of a batch: select, concatenate, pad, truncate, assemble, validate, and move to a device.

mod assemble;
pub(super) mod concat;
mod device;
mod media;
mod pad;
pub(super) mod select;
mod sides;
mod truncate;
mod validate;

pub use assemble::Assembly;
pub use device::Device;
pub use pad::Padding;
