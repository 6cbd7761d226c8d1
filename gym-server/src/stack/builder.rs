//! Builds a stack from files, overrides, servers and transports.

use std::path::PathBuf;

use gym_client::Transports;
use gym_client::config::{ConfigLoader, GymConfig, Overrides, free_port};
use gym_core::{Error, Result, World};

use crate::stack::options::StackOptions;
use crate::stack::running::Stack;
use crate::stack::servers::Servers;

/// Builds and starts a [`Stack`]; created by [`Stack::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it is started"]
pub struct StackBuilder {
    config: Option<GymConfig>,
    files: Vec<PathBuf>,
    overrides: Vec<String>,
    servers: Servers,
    world: World,
    options: StackOptions,
}

impl StackBuilder {
    /// Adds a configuration file. Values of later files take precedence.
    pub fn config_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.files.push(path.into());
        self
    }

    /// Uses a loaded configuration instead of files.
    pub fn config(mut self, config: GymConfig) -> Self {
        self.config = Some(config);
        self
    }

    /// Adds an override, as on the command line: `+head_server.port=0`.
    pub fn set(mut self, assignment: impl Into<String>) -> Self {
        self.overrides.push(assignment.into());
        self
    }

    /// Sets the implementations. [`Servers::stock`] by default.
    pub fn servers(mut self, servers: Servers) -> Self {
        self.servers = servers;
        self
    }

    /// Sets the transports that the servers listen on and call with. By default those that the program was built with.
    pub fn transports(mut self, transports: Transports) -> Self {
        self.options.transports = Some(transports);
        self
    }

    /// Sets all other options, and the transports.
    pub fn options(mut self, options: StackOptions) -> Self {
        self.options = options;
        self
    }

    /// Starts the servers and waits until all of them serve.
    ///
    /// # Errors
    /// `InvalidArgument` with file, line and key for a mistake in the files; the errors of [`Stack::start`].
    pub async fn start(self) -> Result<Stack> {
        let config = match self.config {
            Some(config) => config,
            None => {
                let mut random = self.world.rng();
                let wrong = |error: gym_client::config::ConfigError| Error::invalid(error.to_string());
                let overrides = Overrides::parse(self.overrides).map_err(wrong)?;
                let files: Vec<_> = self.files.iter().map(|path| path.display().to_string()).collect();
                let files: Vec<&str> = files.iter().map(String::as_str).collect();
                ConfigLoader::new(".")
                    .transports(self.options.transports.clone().unwrap_or_else(|| self.servers.transports()).known())
                    .pick_port(move |wish| free_port(wish, &mut random))
                    .load(&files, &overrides)
                    .map_err(wrong)?
            }
        };
        Stack::start(config, &self.servers, &self.world, self.options).await
    }
}

impl Stack {
    /// Creates a builder with the stock servers and no configuration.
    pub fn builder() -> StackBuilder {
        StackBuilder {
            config: None,
            files: Vec::new(),
            overrides: Vec::new(),
            servers: Servers::stock(),
            world: World::real(),
            options: StackOptions::default(),
        }
    }
}
