//! The command line that all benchmarks share.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// How a benchmark runs.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Everything within a minute, with small counts: shows that it runs, not how fast.
    pub quick: bool,
    /// A Python with `nemo-gym`: its figures are taken in the same run.
    pub peer: Option<PathBuf>,
    /// Only the figures whose name contains one of these.
    pub only: Vec<String>,
}

const HELP: &str = "options:
  --quick         everything within a minute, with small counts
  --peer PYTHON   a Python that has nemo-gym 0.7.0: takes its figures in the same run
  --only NAME     only figures whose name contains NAME; may be given several times";

impl Options {
    /// The options of this process.
    ///
    /// # Errors
    /// For an option that there is none of; names those that there are.
    pub fn of_arguments() -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value\n{HELP}"));
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--peer" => options.peer = Some(value()?.into()),
                "--only" => options.only.push(value()?),
                // Cargo's own, when a bench is run as one.
                "--bench" => {}
                "--help" | "-h" => {
                    println!("{HELP}");
                    std::process::exit(0);
                }
                _ => bail!("unknown option {argument}\n{HELP}"),
            }
        }
        Ok(options)
    }

    /// Whether the figure is wanted.
    #[must_use]
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only))
    }

    /// How long one figure's load runs.
    #[must_use]
    pub fn seconds(&self) -> Duration {
        if self.quick { Duration::from_millis(300) } else { Duration::from_secs(3) }
    }

    /// How often ours and the peer's are measured in turn.
    #[must_use]
    pub fn rounds(&self) -> usize {
        if self.quick { 1 } else { 5 }
    }
}
