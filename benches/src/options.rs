//! The command line that all benchmarks share.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// The options of a benchmark.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Runs everything within a minute, with small counts: a check that it runs, not a measurement. Off by default.
    pub quick: bool,
    /// A Python with `nemo-gym`, whose figures are measured in the same run. None by default.
    pub peer: Option<PathBuf>,
    /// Measures only figures whose name contains one of these. Empty by default, which means all figures.
    pub only: Vec<String>,
    /// A Python with torch and numpy, whose Gloo is measured in the same run by the benchmark `collectives`. None by default.
    pub torch: Option<PathBuf>,
    /// Prints one JSON object a line, for the benchmark `collectives`. Off by default.
    pub json: bool,
    /// Rollouts in flight, for the benchmark `in_flight`. None by default, which means its own number.
    pub rollouts: Option<u32>,
}

const HELP: &str = "options:
  --quick         everything within a minute, with small counts
  --peer PYTHON   a Python that has nemo-gym 0.7.0: takes its figures in the same run
  --torch PYTHON  a Python that has torch and numpy: the benchmark `collectives` takes Gloo's figures in the same run
  --json          the benchmark `collectives` prints one JSON object a line
  --only NAME     only figures whose name contains NAME; may be given several times
  --rollouts N    rollouts in flight, for the benchmark `in_flight`; 100000 by default";

impl Options {
    /// Parses the options of this process.
    ///
    /// # Errors
    /// An error for an unknown option, with the names of the known options.
    pub fn of_arguments() -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value\n{HELP}"));
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--peer" => options.peer = Some(value()?.into()),
                "--torch" => options.torch = Some(value()?.into()),
                "--json" => options.json = true,
                "--only" => options.only.push(value()?),
                "--rollouts" => {
                    let text = value()?;
                    options.rollouts =
                        Some(text.parse().with_context(|| format!("--rollouts {text}: not a number of rollouts"))?);
                }
                // Added by Cargo when it runs a benchmark.
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

    /// Returns `true` if the figure is selected.
    #[must_use]
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only))
    }

    /// Returns the duration of one figure's load.
    #[must_use]
    pub fn seconds(&self) -> Duration {
        if self.quick { Duration::from_millis(300) } else { Duration::from_secs(3) }
    }

    /// Returns the number of alternating measurements of the SDK and the peer.
    #[must_use]
    pub fn rounds(&self) -> usize {
        if self.quick { 1 } else { 5 }
    }
}
