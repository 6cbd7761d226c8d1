//! Collective operations of the ranks of one node, through memory that they share.
//!
//! ```text
//!   rank 0 ──┐   ┌──────────── one sealed memfd ────────────┐   ┌── rank 2
//!            ├──►│ barrier + abort │ pieces │ shared tensors │◄──┤
//!   rank 1 ──┘   └──────────────────────────────────────────┘   └── rank 3
//! ```
//!
//! One rank creates a [`Segment`], and the others get its file through an [`FdOffer`]. Each rank then joins, and calls
//! operations on a thread that may block:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use gym_core::group::collective::ReduceOp;
//! use gym_core::group::DType;
//! use gym_segment::{FdOffer, Segment, SegmentCommunicator, Sizes, deadline_in, fetch};
//!
//! # fn main() -> gym_core::Result<()> {
//! let deadline = deadline_in(Duration::from_secs(10));
//! let first = Arc::new(Segment::create(2, Sizes::default())?);
//! let offer = FdOffer::new(&first)?;
//! let name = offer.name().to_owned();
//! // Another process, in the end.
//! let other = std::thread::spawn(move || -> gym_core::Result<Vec<u8>> {
//!     let second = Arc::new(Segment::open(fetch(&name, deadline)?, 2)?);
//!     let mut data = vec![2, 20];
//!     SegmentCommunicator::join(&second, 1)?.all_reduce(DType::U8, ReduceOp::Sum, &mut data, deadline)?;
//!     Ok(data)
//! });
//! offer.serve(1, deadline)?;
//! let mut data = vec![1, 10];
//! SegmentCommunicator::join(&first, 0)?.all_reduce(DType::U8, ReduceOp::Sum, &mut data, deadline)?;
//! assert_eq!((data, other.join().expect("no panic")?), (vec![3, 30], vec![3, 30]));
//! # Ok(())
//! # }
//! ```
//!
//! - **Sums** have the order of [`reduction`](gym_core::group::collective::reduction), and so the bits of every other
//!   backend.
//! - **Failure.** Memory tells nobody that a process has ended. Whoever learns of it elsewhere calls
//!   [`Segment::abort`], which ends every wait at once. Each wait has a deadline as well. A barrier succeeds for all
//!   ranks or for none, and so does an operation: none fails for some. A segment is never used again after an abort: it
//!   belongs to one epoch.
//! - **Trust.** The file goes to processes of the same user only, and cannot be shrunk. A process that has it can spoil
//!   the numbers of the others, as it could through `/proc`.
//!
//! | module | purpose |
//! |---|---|
//! | `segment` | the file: created, opened, verified, aborted |
//! | `offer` | the file descriptor, from one process to the others |
//! | `communicator` | a rank and its operations |
//! | `shared` | tensors that live in the segment |
//! | `control` | barrier, abort, progress, calls |
//! | `layout`, `mapping`, `memory` | where everything lies; its memory in this process; how much there is |
#![cfg(target_os = "linux")]

mod communicator;
mod control;
mod failure;
mod layout;
mod mapping;
mod memory;
mod offer;
mod segment;
mod shared;
mod time;

#[cfg(test)]
mod tests;

pub use communicator::SegmentCommunicator;
pub use failure::Failure;
pub use layout::Sizes;
pub use offer::{FdOffer, fetch};
pub use segment::Segment;
pub use shared::{SharedBuffer, SharedSpace};
pub use time::deadline_in;

/// The program of README.md, as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
