//! Collective operations between the ranks of a group: sums of gradients, broadcasts of weights, barriers.
//!
//! ```text
//!     rank 0  all_reduce(+) ──┐
//!     rank 1  all_reduce(+) ──┼── call number 0 of the meeting ──► each rank has the same sum, bit for bit
//!     rank 2  all_reduce(+) ──┘
//! ```
//!
//! The ranks that call together are a [`Meeting`]. Each rank has a [`Communicator`] of it, and all ranks make the same calls in the same
//! order. The first failure ends every transfer of every rank; a new epoch then has a new meeting. A worker gets its communicators from
//! [`Peers`].
//!
//! ```
//! # use std::sync::Arc;
//! # use std::time::Duration;
//! use gym_core::group::collective::{Collectives, CommunicatorExt, InProcessCollectives, Meeting, ReduceOp, Seat};
//! use gym_core::group::Tensor;
//! use gym_core::{CallContext, Incarnation};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> gym_core::Result<()> {
//! let (backend, cx) = (InProcessCollectives::new(), CallContext::within(Duration::from_secs(10)));
//! let seats: Arc<[Seat]> = [0, 1].map(|rank| Seat::new(rank, Incarnation(1))).into();
//! let rank = async |rank: u32| -> gym_core::Result<Tensor> {
//!     let data = backend.join(&cx, Meeting::new("data", 1, rank, seats.clone())?).await?;
//!     data.all_reduce(&cx, Tensor::from_vec([1], vec![rank + 1].into_iter().map(f64::from).collect())?, ReduceOp::Sum).await
//! };
//! let (first, second) = tokio::try_join!(rank(0), rank(1))?;
//! assert_eq!((first.view::<f64>()?[0], second.view::<f64>()?[0]), (3.0, 3.0));
//! # Ok(())
//! # }
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`Communicator`], [`CommunicatorExt`], [`Collectives`] | the calls of a rank; a backend |
//! | [`Meeting`], [`Seat`], [`Seats`], [`Peers`] | which ranks call together, and how a worker reaches them |
//! | [`CompressedCommunicator`] | gradients that travel as bf16 |
//! | [`Buffer`], [`Transfer`] | the memory of a call, and its end |
//! | [`DevicePath`] | what moves memory of devices |
//! | [`reduction`] | the order of all sums, which every backend has |
//! | [`InProcessCollectives`] | the backend `mem`, for the ranks of one process |

mod buffer;
mod cause;
mod communicator;
mod compress;
mod extension;
mod meeting;
mod mem;
mod operation;
mod peers;
pub mod reduction;
mod report;
mod transfer;

pub use buffer::{Buffer, DeviceMemory, Memory, SharedMemory};
pub use cause::FirstCause;
pub use communicator::{Collectives, Communicator};
pub use compress::CompressedCommunicator;
pub use extension::CommunicatorExt;
pub use meeting::{Meeting, Seat, Seats, identities};
pub use mem::InProcessCollectives;
pub use operation::{Call, Collective, ReduceOp, different_calls, has, named};
pub use peers::Peers;
pub use report::{CollectiveReport, CollectiveTotals, OperationTotals, WaitingOperation};
pub use transfer::{Agreed, Completion, DevicePath, DevicePathSlot, Moved, Moving, OnDevice, Started, Transfer};
