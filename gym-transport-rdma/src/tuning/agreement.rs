//! The settings that all nodes of a cluster must share, as one node has them: what its head compares.

use std::collections::BTreeMap;

use super::host::Host;
use super::table::{NCCL, UCX, Variable, variable};
use crate::machine::Machine;
use crate::tuning::host::is_gpu_node;

/// The name under which the version of NCCL is listed.
const NCCL_VERSION: &str = "NCCL";

/// Returns the settings of a node that must be the same on all nodes, by name, and the version of NCCL as `NCCL`. Settings that are not set are not listed.
///
/// `None` for a node that has neither a GPU nor such a variable in its environment: nobody meets it over these libraries, so it may differ.
#[must_use]
pub fn agreement(machine: &dyn Machine) -> Option<BTreeMap<String, String>> {
    // Most machines have neither, and then nothing is read.
    let variables = machine.variables().unwrap_or_default();
    let is_set =
        |name: &String| variable(name).is_some_and(|variable| variable.same_everywhere && !variables[name].is_empty());
    let has_gpu = || machine.names("/dev").unwrap_or_default().iter().any(|name| is_gpu_node(name));
    if !variables.keys().any(is_set) && !has_gpu() {
        return None;
    }
    let host = Host::of(machine);
    let shared = |variables: &'static [Variable]| variables.iter().filter(|variable| variable.same_everywhere);
    let nccl =
        shared(NCCL).filter_map(|variable| Some((variable.name, host.settings.nccl(variable.name)?.value.clone())));
    let ucx =
        shared(UCX).filter_map(|variable| Some((variable.name, host.settings.variable(variable.name)?.to_owned())));
    let version = host.nccl.map(|version| (NCCL_VERSION, version.to_string()));
    Some(nccl.chain(ucx).chain(version).map(|(name, value)| (name.to_owned(), value)).collect())
}
