//! One instance of a configuration: how it is registered and shown.

use std::collections::BTreeMap;

use gym_client::config::{InstanceConfig, ServerReference};
use gym_core::registry::{Instance, Registration};
use gym_core::server::ServerKind;
use gym_core::{Endpoint, Error, Incarnation, World};

use crate::head::START_TIME_LABEL;
use crate::stack::servers::Servers;

/// A server of a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunningServer {
    /// The instance's name.
    pub name: String,
    /// The kind of server; `head_server` for the head server.
    pub kind: String,
    /// The implementation's name.
    pub implementation: String,
    /// The URL of the server.
    pub url: String,
    /// `native`, or `python` with the process id of the child.
    pub runs_as: String,
}

/// The references that decide the route of a rollout. Labels of a registration have the same names.
const ROUTED: [&str; 2] = ["agent_server", "resources_server"];

/// Returns the references that a registered server has told.
pub(super) fn references(instance: &Instance) -> Vec<ServerReference> {
    let kinds = [ServerKind::Agent, ServerKind::Resources];
    let told = ROUTED.iter().zip(kinds).filter_map(|(field, kind)| {
        let name = instance.labels.get(*field)?.clone();
        Some(ServerReference { field: (*field).to_owned(), kind, name })
    });
    told.collect()
}

/// Returns the registration of an instance that starts now.
pub(super) fn registration(
    instance: &InstanceConfig,
    endpoints: Vec<Endpoint>,
    incarnation: Incarnation,
    mut labels: BTreeMap<String, String>,
    world: &World,
) -> Registration {
    labels.insert(START_TIME_LABEL.to_owned(), world.now().as_secs_f64().to_string());
    // A head server whose files do not define this server knows from them who is in front of whom.
    for reference in instance.references.iter().filter(|reference| ROUTED.contains(&&*reference.field)) {
        labels.insert(reference.field.clone(), reference.name.clone());
    }
    let mut registration = Registration::new(instance.name.clone(), instance.kind, endpoints);
    registration.implementation = instance.implementation.clone();
    registration.incarnation = incarnation;
    registration.labels = labels;
    registration
}

pub(super) fn unknown_implementation(instance: &InstanceConfig, servers: &Servers) -> Error {
    let known: Vec<_> = servers.names(instance.kind).collect();
    let fix = match servers.nearest(instance.kind, &instance.implementation) {
        Some(near) => format!("did you mean `{near}`? To run the block with Python, add `entrypoint: app.py`"),
        None => format!("add `entrypoint: app.py` to run it with Python, or use one of {}", known.join(", ")),
    };
    Error::invalid(format!(
        "{}: {}.{}.{}: this program has no implementation `{}`, and the block names no Python entrypoint\n  fix: {fix}",
        instance.origin, instance.name, instance.kind, instance.implementation, instance.implementation,
    ))
}
