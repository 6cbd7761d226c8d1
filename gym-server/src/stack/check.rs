//! Checks the instances of a configuration without starting them, and reports how each would run.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use gym_client::config::{GymConfig, InstanceConfig};
use gym_client::{ServerClient, Transports};
use gym_core::registry::MemoryRegistry;
use gym_core::server::ServerKind;
use gym_core::transport::InProcess;
use gym_core::{Result, World};

use crate::role::ServerContext;
use crate::stack::instance::unknown_implementation;
use crate::stack::python;
use crate::stack::servers::{Build, Made, Servers};

/// The way in which an instance runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RunsAs {
    /// Runs in this process.
    Native,
    /// Runs as a child process, from this directory.
    Python(PathBuf),
}

impl fmt::Display for RunsAs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("native"),
            Self::Python(folder) => write!(f, "python {}", folder.display()),
        }
    }
}

/// Returns how an instance would run with these implementations and these directories of Python servers.
///
/// # Errors
/// The error of starting the instance.
pub(crate) fn runs_as(instance: &InstanceConfig, servers: &Servers, roots: &[PathBuf]) -> Result<RunsAs> {
    if servers.has(instance.kind, &instance.implementation) {
        return Ok(RunsAs::Native);
    }
    if instance.entrypoint.is_none() {
        return Err(unknown_implementation(instance, servers));
    }
    python::find(instance, roots).map(|(folder, _)| RunsAs::Python(folder))
}

/// Creates a native instance without serving it, to find errors in its block, and returns it with the keys that it ignores. `None` for a
/// Python instance, which is not checked.
///
/// # Errors
/// The error of starting the instance.
pub(crate) fn try_build(instance: &InstanceConfig, servers: &Servers, world: &World) -> Result<Option<Made>> {
    let registry = Arc::new(MemoryRegistry::new());
    let client = ServerClient::new(registry, Transports::from_features(InProcess::new()), world);
    let context = ServerContext::new(&instance.name, &instance.implementation, world);
    servers.make(Build::new(instance, &context, &client)).transpose()
}

/// Returns the error of a stock agent whose resources server plays another way than the agent does: with tools, or by replying as a user.
pub(crate) fn mismatched(instance: &InstanceConfig, config: &GymConfig, servers: &Servers) -> Option<String> {
    let plays =
        servers.plays(ServerKind::Agent, &instance.implementation).filter(|_| instance.kind == ServerKind::Agent)?;
    let reference = instance.references.iter().find(|reference| reference.field == "resources_server")?;
    let other = config.instance(&reference.name)?;
    let wanted = servers.plays(other.kind, &other.implementation).filter(|wanted| *wanted != plays)?;
    let InstanceConfig { name, kind, implementation, .. } = instance;
    let origin = instance.origin_of("resources_server");
    Some(format!(
        "{origin}: {name}.{kind}.{implementation}.resources_server: '{}' is an environment that {}, and a {implementation} {}\n  fix: write \
         {} in the place of {implementation}",
        other.name,
        wanted.of_environment(),
        plays.of_agent(),
        wanted.agent(),
    ))
}
