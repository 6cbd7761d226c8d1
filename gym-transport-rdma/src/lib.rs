//! UCX transport of the gym SDK: carries calls over shared memory, RDMA or TCP behind the `Connector` and `Listener`
//! traits.
//!
//! ```text
//!   Channel ── UcxConnector ─── POST /.gym/ucx over another transport (bootstrap) ──► UcxListener ── Handler
//!                   │                                                                      │
//!               messaging     splits messages into chunks, reassembles them            messaging
//!                   │                                                                      │
//!                fabric ═══════ UCX active messages over shm, RDMA or TCP ═════════════ fabric
//!                               (one thread and one memory pool per process)
//! ```
//!
//! The calling end sends a bootstrap request over another transport, such as HTTP, and the listener responds with its
//! UCX address. Two processes on one host then share memory; all others connect over the network.
//! [`PathInfo::lanes`](gym_core::transport::PathInfo) reports the lanes that UCX negotiated. Everything builds without
//! UCX: the library is loaded when [`Ucx`] is first used.
//!
//! ```no_run
//! # async fn example(server: std::sync::Arc<dyn gym_core::Handler>) -> gym_core::Result<()> {
//! use gym_core::CallContext;
//! use gym_core::transport::{ConnectOptions, Connector, InProcess, Listener};
//! use gym_transport_rdma::transport::{UcxConnector, UcxListener};
//! use gym_transport_rdma::{Ucx, UcxConfig};
//!
//! // Any transport can carry the bootstrap; between processes it is HTTP.
//! let (names, ucx) = (InProcess::new(), Ucx::new(UcxConfig::default()));
//! let bootstrap = names.listen("bootstrap")?;
//! let listener = UcxListener::open(ucx.clone(), bootstrap.endpoints()).await?;
//! // Serve this handler on `bootstrap`, and accept connections from `listener` as from any other listener.
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
//! | `fabric` | the progress thread, its connections and UCX workers |
//! | [`memory`] | pool of registered buffers |
//! | `ucx`, `sys` | safe wrappers of UCX; its bindings and the loader of the library |
//! | [`nccl`] | loads NCCL when it is used: version, texts of errors, unique id |
//! | [`mod@probe`] | reports the RDMA and NCCL support of this machine, without loading UCX |
//! | [`tuning`] | rules about the settings of NCCL, RoCE and UCX, from which the probe also takes its verdicts |
//! | [`machine`] | what both ask: this machine, a folder that holds one, or a recording |
//!
//! # The path of a message
//!
//! A request with one large segment, from the caller to the handler. Responses take the same path in the other
//! direction.
//!
//! ```text
//!   calling process                                             answering process
//!   ───────────────                                             ─────────────────
//!   Channel::call
//!   mux::CallingEnd      waits for capacity, numbers the call
//!   UcxSendQueue         splits the message; at most 128 active messages in flight
//!     first chunk: header ‖ head ‖ small segments
//!     chunk 1:     the large segment, not copied
//!   Connection::post ──► command queue
//!   ┌ fabric thread ──────────────────────┐                     ┌ fabric thread ─────────────────────────────────────┐
//!   │ PeerConnection::send                │                     │                                                    │
//!   │   first chunk  ucp_am_send (eager) ─┼─ lengths, content ─►│ ReorderBuffer ► RequestQueue: all lengths, limits  │
//!   │   chunk 1      ucp_am_send (rndv) ──┼─ announcement ─────►│ Disposition::Land ► buffer of the memory pool      │
//!   │                                     │◄─ RDMA read, copy ──┼── ucp_am_recv_data                                 │
//!   │   `done`: the capacity is released  │                     │ `landed` ► RequestQueue::next, in request order    │
//!   └─────────────────────────────────────┘                     └───────────────────────────┬────────────────────────┘
//!                                                               mux::AnsweringEnd ► task on the tokio runtime ► Handler
//! ```
//!
//! A cancellation, a rejection, a drain request or a heartbeat is an urgent active message and can overtake the ordered
//! ones.
//!
//! # Effects on the process
//!
//! Opening a fabric loads UCX permanently:
//!
//! - UCX's constructors replace the handlers of SIGSEGV, SIGBUS, SIGILL and SIGFPE. This crate restores the handlers.
//! - UCX patches libc's `mmap` in memory. [`UcxReport`](transport::UcxReport) has the patched functions.
//! - The soft limit on file descriptors is raised to the hard limit. The environment is only read.
//! - A process with an open fabric must not fork without exec; UCX does not support it.
//!
//! # Probe
//!
//! [`probe()`](fn@probe) reports the RDMA and NCCL support of this machine:
//!
//! ```text
//!   /sys/class/infiniband  /dev/infiniband  /proc/self/{limits,status}  library directories
//!               └────────────────┴────────────┬─────────────┴──────────────┘
//!                    Machine: Live, a Folder, or a Recording ──► Probe: summary, findings, fixes
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
//! The probe loads only the libraries of CUDA and NCCL, calls their version functions, and never unloads them. **It
//! does not load UCX**, because the variables that prevent the effects above must be in the environment beforehand. A
//! library must not set them. The probe therefore reads UCX's version from its file. libibverbs has no version
//! function; its version is part of its file name.
//!
//! # Design decisions
//!
//! ### A message is one first chunk and one chunk per large segment
//! - **Decision.** The first chunk is short, eager, and contains all lengths. Large segments are sent by rendezvous,
//!   uncopied, into registered buffers, and can land in any order.
//! - **Why.** A message that exceeds a limit is rejected before anything is allocated. Both ends compute the same
//!   layout.
//! - **Alternatives.** One contiguous message: rejected, because the sender would copy every large batch.
//!
//! ### Over shared memory, one chunk per peer lands at a time
//! - **Decision.** The fabric's thread takes a buffer when its chunk begins to land, and receives one chunk per peer.
//! - **Why.** The thread copies the chunks itself, and the buffer returned last is still in its cache.
//! - **Alternatives.** Several chunks at a time: a quarter slower at 1 MiB.
//!
//! ### Everything that a peer can make an end hold is bounded
//! - **Decision.** Exceeding a bound ends the connection. Bounds cover unreceived messages and responses, incomplete
//!   messages, landings of cancelled calls, and messages out of order, in number and bytes. Commands that end something
//!   always fit.
//! - **Why.** Peers that run this crate respect the capacity of both ends and stay far below the bounds; other peers
//!   may not.
//! - **Alternatives.** The limits of `mux` alone: rejected, because they hold only if the peer keeps to them.
//!
//! ### The UCX port is for trusted hosts only
//! - **Decision.** Our limits apply to announced payloads and to messages that UCX delivers, not to UCX's own wire
//!   protocol.
//! - **Why.** UCX assembles fragmented eager messages itself. It allocates the length in the first fragment, writes the
//!   others at unchecked offsets, and offers no earlier hook. Any peer of the port, with or without a token, can
//!   exploit this.
//! - **Alternatives.** `UCP_AM_FLAG_WHOLE_MSG` on or off: no difference. Put the port on a network whose hosts are
//!   trusted.
//!
//! ### The bindings are our own, and UCX is loaded at run time
//! - **Decision.** The bindings are generated from the headers of UCX 1.13, the oldest supported version, and
//!   committed. A test compares sizes and offsets with the header.
//! - **Why.** The workspace builds on machines without UCX.
//! - **Alternatives.** The published `ucx-sys` crate: it no longer builds.
//!
//! ### Memory belongs to the operation until UCX returns it
//! - **Decision.** An operation owns its header, payload, buffer and callback. Memory that UCX never returns is leaked,
//!   unless every process that could use it has ended. Closing a connection is a handshake of this crate.
//! - **Why.** UCX may read or write the memory until then. UCX's flush completes too late or never.
//!
//! ### UCX addresses come over another transport
//! - **Decision.** The program passes in the transport that carries the bootstrap.
//! - **Why.** That transport already has authorization (clients that can call can connect) and a path through
//!   firewalls.
//! - **Alternatives.** A UCX listener alone: it would need both again, and never negotiates shared memory.
//!
//! ### Each peer on the same host gets a dedicated UCX worker
//! - **Decision.** A `PeerWorker` of the fabric serves one connection over shared memory. It is kept until both
//!   ends report that no operation is in flight, the peer's worker is destroyed, or the peer's process has ended
//!   (pidfd).
//! - **Why.** All writers to a worker share its queue. One that dies or stops between reserving and marking a slot
//!   blocks it permanently. A worker costs about 1 MB, seven descriptors and some 50 ns per round of the thread.
//! - **Alternatives.** Replacing the queue after a death: rejected, because the other peers lose their connections too.
//!
//! ### With UCX 1.13, TCP copies; shared memory and RDMA fetch
//! - **Decision.** Rendezvous may only fetch. TCP cannot fetch, so it sends parts of 256 KiB that each side copies
//!   once.
//! - **Why.** UCX 1.13 aborts the process when a TCP peer dies at the wrong moment of a zero-copy send.
//! - **Cost.** About 2/3 of `ucx_perftest`'s bandwidth at 1 MiB, 9/10 at 64 MiB. `ucx_perftest` measures the same with
//!   these settings.
//! - **Alternatives.** UCX's own choice of protocol: used with later versions.
//!
//! ### The negotiated transport is compared with the requested one
//! - **Decision.** The connector opens one transport at a time and rejects a connection over a lower transport than
//!   requested.
//! - **Why.** UCX falls back from RDMA to TCP without an error. Separate attempts give each rejection its own reason.
//! - **Alternatives.** Compare transports by measurement at run time: not done.
//!
//! ### UCX is used only if the configuration names it, and the program then re-executes itself
//! - **Decision.** `gym-client` restarts the program with the two settings that UCX reads from the environment when it
//!   loads. Worker processes get them from the provisioner, with the lowest precedence.
//! - **Why.** Loading UCX changes the process permanently, and a library must not write to the environment.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod backend;
#[doc(hidden)] // For this crate's tests and a benchmark; `transport` has the names of the public interface.
pub mod fabric;
#[cfg(feature = "testing")]
pub mod fuzzing;
pub mod machine;
pub mod memory;
mod messaging;
pub mod nccl;
pub mod probe;
mod sys;
pub mod transport;
pub mod tuning;
mod ucx;

pub use backend::{UCX_VARIABLES, UcxBackend};
pub use probe::probe;
pub use transport::{RDMA, SHM, UCX_TCP, Ucx, UcxConfig};

/// The program of README.md, as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
