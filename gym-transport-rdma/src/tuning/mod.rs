//! Tuning, checked: the settings of NCCL, RoCE and UCX against their syntax, the machine and the other nodes.
//!
//! ```text
//!   variables, nccl.conf ──► settings   what each library gets, and who won
//!                              │
//!   table ──► syntax           │        how a value is really read
//!   host  ──► rules            ▼        cards, GID rows, interfaces, limits, GPUDirect, plug-ins
//!   nodes ──► cluster        findings   what differs, and must not
//! ```
//!
//! All of it is a pure function of a [`Machine`]: no library is loaded, and a recording is judged like the machine itself. What a recording lacks is no
//! fault. On a healthy machine nothing is found.

mod agreement;
mod cluster;
mod finding;
pub(crate) mod host;
mod profile;
pub(crate) mod rules;
mod settings;
mod syntax;
mod table;
mod vllm;

pub use agreement::agreement;
pub use finding::{Finding, Severity, with_reason};
pub use profile::{Fabric, Profile, profile};
pub(crate) use rules::limits::{MORE as MORE_SHARED_MEMORY, size};
pub use table::{Kind, NCCL, UCX, Variable, variable};
pub use vllm::{CopiedVariables, VLLM_COPIES};

use serde::Serialize;

use crate::machine::Machine;
use host::Host;

/// Checks the settings of one machine. The worst come first.
#[must_use]
pub fn judge(machine: &dyn Machine) -> Vec<Finding> {
    sorted(of_host(&Host::of(machine)))
}

/// Compares the settings of the nodes of a cluster: what differs, and must not. Each node by itself is for [`judge`].
#[must_use]
pub fn compare(nodes: &[(String, &dyn Machine)]) -> Vec<Finding> {
    let hosts: Vec<Host<'_>> = nodes.iter().map(|(_, machine)| Host::of(*machine)).collect();
    let named: Vec<cluster::Node<'_, '_>> =
        nodes.iter().zip(&hosts).map(|((name, _), host)| (name.as_str(), host)).collect();
    let mut findings = Vec::new();
    cluster::check(&named, &mut findings);
    sorted(findings)
}

/// A setting with which UCX does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unreadable {
    /// The variable.
    pub variable: String,
    /// Its value.
    pub value: String,
    /// Where the value comes from, such as `set in the environment`, or `/etc/ucx/ucx.conf:3`.
    pub origin: String,
    /// The fix.
    pub fix: String,
}

/// Returns a setting that UCX cannot read, so that it does not start. UCX 1.13 dies of some of them (signal 11), so ask before it is loaded.
#[must_use]
pub fn unreadable(machine: &dyn Machine) -> Option<Unreadable> {
    let library = machine.library("libucp.so.0").ok().flatten();
    let version = library.as_ref().and_then(|library| settings::Version::read(library.version.as_ref()?));
    let settings =
        settings::Settings::of(machine, None, version, library.as_ref().map(|library| library.path.as_str()));
    let (setting, finding) = syntax::unreadable(&settings)?;
    Some(Unreadable {
        variable: setting.name.clone(),
        value: setting.value.clone(),
        origin: setting.origin(),
        fix: finding.fix,
    })
}

/// Returns the devices that UCX is to be kept to, in the form of `UCX_NET_DEVICES`, on a machine with so many interfaces that it would
/// abort the process. `None` on others, and where a setting names devices.
pub(crate) fn devices_of_crowd(machine: &dyn Machine) -> Option<String> {
    let interfaces = machine.names("/sys/class/net").unwrap_or_default().len();
    // Most machines have few, and are not looked at any further.
    (interfaces >= rules::ucx::INTERFACES_OF_CROWD).then(|| rules::ucx::devices_of_crowd(&Host::of(machine)))?
}

/// A variable of NCCL as the library gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Explained {
    /// The variable.
    pub name: String,
    /// Its value. Empty, if an empty variable hides the files.
    pub value: String,
    /// Where the value comes from: `the environment`, or `/etc/nccl.conf:3`.
    pub from: String,
    /// The values of other sources, which are not heard, in their order.
    pub hides: Vec<(String, String)>,
}

/// Says of each variable of NCCL which source has won, sorted by name.
#[must_use]
pub fn explain(machine: &dyn Machine) -> Vec<Explained> {
    let host = Host::of(machine);
    let explained = host.settings.all_of_nccl().map(|setting| Explained {
        name: setting.name.clone(),
        value: setting.value.clone(),
        from: setting.source.to_string(),
        hides: setting.hides.iter().map(|(source, value)| (source.to_string(), value.clone())).collect(),
    });
    explained.collect()
}

fn of_host(host: &Host<'_>) -> Vec<Finding> {
    let mut findings = host.settings.of_files.clone();
    syntax::check(&host.settings, &mut findings);
    rules::check(host, &mut findings);
    findings
}

fn sorted(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by(|one, other| {
        (other.severity, &one.about, &one.found).cmp(&(one.severity, &other.about, &other.found))
    });
    findings.dedup();
    findings
}
