//! The UCX transport: shared memory, RDMA and TCP behind the same seam; and what of it this machine has, said in a sentence.
//!
//! ```text
//!  Channel ── UcxConnector ─┐ POST /.gym/ucx over any other transport ┌─ UcxListener::bootstrap
//!                           └── pipe ── fabric ═══ UCX ═══ fabric ── pipe ── UcxListener ── Handler
//! ```
//!
//! - A [`UcxConnector`] asks the peer, over a transport that is handed in, where it is; a [`UcxListener`] tells it. On one host
//!   both share memory, else they meet at UCX's listener. [`PathInfo::lanes`](gym_core::PathInfo) says what was negotiated.
//! - What the calls of both ends need is [`gym_core::mux`], as over framed sockets: order, room, cancels, drain, heartbeats.
//! - Large segments leave from where they lie and land in registered buffers of the [`pool`], and are handed up as they are.
//! - [`Ucx`] is one [`fabric`], loaded when it is first needed, for all connectors and listeners of a process. Everything
//!   builds without UCX.
//!
//! ```no_run
//! # async fn example(server: std::sync::Arc<dyn gym_core::Handler>) -> gym_core::Result<()> {
//! use gym_core::{CallContext, ConnectOptions, Connector, InProcess, Listener};
//! use gym_transport_rdma::{Ucx, UcxConfig, UcxConnector, UcxListener};
//!
//! // Any transport does for the bootstrap; between processes it is HTTP.
//! let (names, ucx) = (InProcess::new(), Ucx::new(UcxConfig::default()));
//! let bootstrap = names.listen("bootstrap")?;
//! let listener = UcxListener::open(ucx.clone(), bootstrap.endpoints()).await?;
//! // Stands before what `bootstrap` serves anyway; `listener` is accepted from as any other.
//! let handler = listener.bootstrap(server);
//!
//! let connector = UcxConnector::new(std::sync::Arc::new(names), ucx);
//! let endpoint = &listener.endpoints()[0];
//! let channel = connector.connect(&CallContext::default(), endpoint, &ConnectOptions::default()).await?;
//! println!("reached over {}", channel.path().lanes);
//! # Ok(())
//! # }
//! ```
//!
//! [`probe()`] says what there is:
//!
//! ```text
//!   /sys/class/infiniband  /dev/infiniband  /proc/self/{limits,status}  library folders
//!               └────────────────┴────────────┬─────────────┴──────────────┘
//!                                          probe() ──▶ Probe: sentence, findings, fixes
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
//! Only NVIDIA's two libraries are loaded, for their version functions, and never unloaded. **UCX is not loaded**: its
//! constructors replace the handlers of SIGSEGV, SIGBUS, SIGILL and SIGFPE (so Rust's message about a stack overflow is
//! lost) and patch libc's `mmap` in memory, and the variables that prevent it have to be in the environment before, where
//! a library must not put them. So UCX's version is read from its file. libibverbs has no version function, and says its
//! version in its file name.
//!
//! # What opening a fabric does to the process
//!
//! UCX is loaded, once and for ever. The handlers are put back; the patches are reported in [`LibraryInfo`]. The
//! environment is only read. The soft limit on file descriptors is raised to the hard one. Forking without exec is not supported by UCX while a fabric is open.
#![deny(unsafe_code)]

mod bootstrap;
mod config;
mod connector;
mod container;
mod elf;
pub mod fabric;
mod files;
#[cfg(feature = "testing")]
pub mod fuzzing;
mod host;
mod listener;
mod pipe;
pub mod pool;
mod ports;
mod probe;
mod report;
mod sys;
mod ucx;
mod versions;

pub use bootstrap::ROUTE;
pub use config::{ConnectionReport, Ucx, UcxConfig, UcxStats};
pub use connector::UcxConnector;
pub use listener::{UcxIncoming, UcxListener};
pub use pipe::RoundTrips;
pub use ports::{Gid, Port};
pub use probe::{Finding, Probe, ProbeOptions, Status, Topic, probe};
pub use report::UcxReport;
pub use sys::{LIBRARY_VARIABLE, LibraryInfo, LoadError, LoadOptions};

/// The scheme of UCX connections: `ucx://` and the address at which the peer's bootstrap answers.
pub const SCHEME: &str = "ucx";
