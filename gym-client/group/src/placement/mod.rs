//! Clusters as data: requested bundles, available nodes, and the placement of bundles and ranks. No I/O; a provisioner applies
//! the result.
//!
//! ```text
//!   ClusterSpec (bundles per node, GPU ids, strategy, …)  ┐
//!   NodeResources (what each node offers)                 ┴─ place ─► Placement (bundle → node, GPU)
//!                                                                        │ workers
//!                                                                        ▼
//!                                                      WorkerPlacement (rank → bundles, leader or tied, name)
//! ```
//!
//! A *bundle* is one GPU (or none) and the CPUs of its workers. A *node* of the spec is logical: several may share a machine.

mod config;
mod numa;
mod options;
mod place;
mod ports;
mod spec;
mod topology;
mod workers;

pub use config::{WorkerGroupConfig, parse_memory};
pub use numa::parse_cpu_list;
pub use options::{ProfilerRequest, merge_options};
pub(crate) use place::machine_of;
pub use place::{Devices, NodeResources, PlacedBundle, Placement, PlacementGroup, place, place_each};
pub use ports::{ENGINE_PORTS, ENGINE_PORTS_EACH, GENERATION_PORTS, GYM_PORTS, MASTER_PORTS, engine_port};
pub use spec::{ClusterSpec, CommunicationBackend, GpuIds, PlacementStrategy};
pub use topology::{BundleLocation, Segments, Topology, order_bundles, select_segments};
pub use workers::{ModelSpan, WorkerPlacement, WorkersOn, leaders};
