//! UCX transport of the gym SDK: shared memory, RDMA and TCP behind the `Connector` and `Listener` traits.
//!
//! ```text
//!  Channel ── UcxConnector ─┐ POST /.gym/ucx over any other transport ┌─ UcxListener::bootstrap
//!                           └── messaging ── fabric ═══ UCX ═══ fabric ── messaging ── UcxListener ── Handler
//! ```
//!
//! - A [`UcxConnector`](transport::UcxConnector) asks the peer for its address over another transport (the *bootstrap*), and a
//!   [`UcxListener`](transport::UcxListener) answers. Two processes on one host share memory; others connect to UCX's listener.
//!   [`PathInfo::lanes`](gym_core::transport::PathInfo) reports what UCX negotiated.
//! - Calls on both ends use [`gym_core::transport::mux`], as framed sockets do: order, capacity, cancellation, drain and heartbeats.
//! - Large segments are sent from where they lie, received into registered buffers of the [memory pool](memory), and passed on
//!   without a copy.
//! - [`Ucx`] is one [`fabric`], shared by all connectors and listeners of a process. It loads UCX on first use, so everything
//!   builds without UCX.
//!
//! ```no_run
//! # async fn example(server: std::sync::Arc<dyn gym_core::Handler>) -> gym_core::Result<()> {
//! use gym_core::{CallContext, transport::{ConnectOptions, Connector, InProcess, Listener}};
//! use gym_transport_rdma::transport::{UcxConnector, UcxListener};
//! use gym_transport_rdma::{Ucx, UcxConfig};
//!
//! // Any transport can carry the bootstrap; between processes it is HTTP.
//! let (names, ucx) = (InProcess::new(), Ucx::new(UcxConfig::default()));
//! let bootstrap = names.listen("bootstrap")?;
//! let listener = UcxListener::open(ucx.clone(), bootstrap.endpoints()).await?;
//! // Wraps the handler that `bootstrap` serves. Accept from `listener` as from any other.
//! let handler = listener.bootstrap(server);
//!
//! let connector = UcxConnector::new(std::sync::Arc::new(names), ucx);
//! let endpoint = &listener.endpoints()[0];
//! let channel = connector.connect(&CallContext::default(), endpoint, &ConnectOptions::default()).await?;
//! println!("connected over {}", channel.path().lanes);
//! # Ok(())
//! # }
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`UcxBackend`] | the backend of a program; [`Ucx`] and [`UcxConfig`] hold its fabric, limits and timeouts |
//! | [`transport`] | connector, listener, bootstrap and statistics |
//! | `messaging` | one connection: splits messages into chunks, reassembles them, restores the order of requests |
//! | [`fabric`] | the progress thread, its connections and workers |
//! | [`memory`] | registered buffers that are reused |
//! | `ucx`, `sys` | UCX in safe Rust; its bindings, and how the library is loaded |
//! | [`mod@probe`] | what this machine has for RDMA and NCCL, without loading UCX |
//!
//! [`probe()`](fn@probe) reports what this machine has:
//!
//! ```text
//!   /sys/class/infiniband  /dev/infiniband  /proc/self/{limits,status}  library directories
//!               └────────────────┴────────────┬─────────────┴──────────────┘
//!                                          probe() ──▶ Probe: summary, findings, fixes
//! ```
//!
//! ```
//! let probe = gym_transport_rdma::probe();
//! println!("{}", probe.summary);
//! for finding in probe.findings.iter().filter(|finding| finding.fix.is_some()) {
//!     println!("{finding}");
//! }
//! ```
//!
//! # What probing does to the process
//!
//! The probe loads only NVIDIA's two libraries, for their version functions, and never unloads them. **It does not load UCX**:
//! UCX's constructors replace the handlers of SIGSEGV, SIGBUS, SIGILL and SIGFPE (so Rust's message about a stack overflow is
//! lost) and patch libc's `mmap` in memory. The variables that prevent this must be in the environment before, and a library must
//! not put them there. The probe therefore reads UCX's version from its file. libibverbs has no version function; its version
//! is in its file name.
//!
//! # What opening a fabric does to the process
//!
//! Opening loads UCX permanently. The signal handlers are put back; [`LibraryInfo`](fabric::LibraryInfo) reports the patches. The
//! environment is only read. The soft limit on file descriptors is raised to the hard one. UCX does not support forking without
//! exec while a fabric is open.
#![deny(unsafe_code)]

mod backend;
pub mod fabric;
#[cfg(feature = "testing")]
pub mod fuzzing;
pub mod memory;
mod messaging;
pub mod probe;
mod sys;
pub mod transport;
mod ucx;

pub use backend::UcxBackend;
pub use probe::probe;
pub use transport::{Ucx, UcxConfig};
