//! The start of a worker: its configuration with the sources, the settings of the communication libraries with who has won, and the checks of what is asked
//! for.
//!
//! ```text
//!   configuration, environment ──► asked ──► report ──► lines, warnings, failures (exit code 2)
//!                                             ▲
//!                              a machine: this one, or in a test a recorded one
//! ```
//!
//! A worker of which nothing is asked starts without waiting for a check: what is wrong with its machine is told after it has joined.

mod asked;
#[cfg(feature = "rdma")]
mod report;
#[cfg(feature = "rdma")]
pub(in crate::cli) mod settings;
mod sources;
#[cfg(all(test, feature = "rdma"))]
mod tests;

use gym_client::config::GymConfig;
use gym_core::registry::MemberTuning;

use crate::cli::args::options::ChecksMode;
use crate::cli::console::Console;
use crate::cli::exit::Failure;
use asked::Asked;

/// The start of this process as a worker.
#[derive(Debug)]
pub(in crate::cli) struct MemberStart {
    mode: ChecksMode,
    asked: Asked,
    /// Whether the environment was looked at.
    began: bool,
}

impl MemberStart {
    pub(in crate::cli) fn new(mode: ChecksMode) -> Self {
        Self { mode, asked: Asked::default(), began: false }
    }

    /// Prints where a configuration comes from, and checks what it asks for. `of_head` names the head server whose configuration it is.
    ///
    /// # Errors
    /// A usage error with the fix of each check that has failed.
    pub(in crate::cli) async fn examine(
        &mut self,
        config: &GymConfig,
        overrides: &[String],
        of_head: Option<&str>,
        console: &Console,
    ) -> Result<(), Failure> {
        let whole = tracing::enabled!(tracing::Level::DEBUG);
        sources::lines(config, overrides, of_head, whole).iter().for_each(|line| console.line(line));
        let began = std::mem::replace(&mut self.began, true);
        self.checked(config, !began, console).await
    }
}

#[cfg(feature = "rdma")]
mod with_machine {
    use std::mem;

    use gym_client::transport::rdma::probe::machine::{Live, Machine};
    use gym_client::transport::rdma::tuning;
    use gym_core::World;

    use super::report::StartReport;
    use super::{Asked, ChecksMode, Console, Failure, GymConfig, MemberStart, MemberTuning, settings};

    impl MemberStart {
        pub(super) async fn checked(
            &mut self,
            config: &GymConfig,
            first: bool,
            console: &Console,
        ) -> Result<(), Failure> {
            let before = self.asked.clone();
            if first {
                // Few variables, of the process itself: nothing to wait for.
                self.asked = Asked::of_environment(&Live::new().variables().unwrap_or_default());
            }
            self.asked = mem::take(&mut self.asked).and_of_configuration(config);
            let (asked, mode) = (self.asked.clone(), self.mode);
            if asked.is_nothing() {
                return Ok(());
            }
            // The configuration of the head server may ask for more than the environment.
            if !first && asked == before {
                return Ok(());
            }
            // Some hundred small files are read.
            let (lines, report) = World::real()
                .blocking(move || (settings::lines(&Live::new()), StartReport::of(&Live::new(), &asked, mode)))
                .await?;
            if first {
                lines.iter().for_each(|line| console.line(line));
            }
            if mode == ChecksMode::Off {
                console.line("checks: none, because of --checks off");
            }
            report.said().for_each(|line| console.line(&line));
            report.failure().map_or(Ok(()), Err)
        }

        /// Says what is wrong with a machine of which nothing is asked. After the worker has joined, so that it starts as fast as without checks.
        pub(in crate::cli) async fn said_later(&self, console: &Console) {
            let (asked, mode) = (self.asked.clone(), self.mode);
            if !asked.is_nothing() {
                return;
            }
            let report = World::real().blocking(move || StartReport::of(&Live::new(), &asked, mode)).await;
            report.unwrap_or_default().said().for_each(|line| console.line(&line));
        }

        /// Returns the settings that must be the same on all workers; `None` on a machine without such libraries.
        pub(in crate::cli) async fn tuning(&self) -> Result<Option<MemberTuning>, Failure> {
            let agreement = World::real().blocking(|| tuning::agreement(&Live::new())).await?;
            Ok(agreement.map(MemberTuning::new))
        }
    }
}

#[cfg(not(feature = "rdma"))]
impl MemberStart {
    /// This build has no checks. Says so where something is asked for.
    #[expect(clippy::unused_async, reason = "as in a build with checks")]
    async fn checked(&mut self, config: &GymConfig, first: bool, console: &Console) -> Result<(), Failure> {
        let before = self.asked.clone();
        if first {
            let variables = std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
            self.asked = Asked::of_environment(&variables.collect());
        }
        self.asked = std::mem::take(&mut self.asked).and_of_configuration(config);
        if self.mode != ChecksMode::Off && !self.asked.is_nothing() && self.asked != before {
            console.line(&format!(
                "checks: none of {}: this program was built without the feature `rdma` of gym-server",
                self.asked.text()
            ));
        }
        Ok(())
    }

    #[expect(clippy::unused_async, reason = "as in a build with checks")]
    pub(in crate::cli) async fn said_later(&self, _: &Console) {}

    #[expect(clippy::unused_async, reason = "as in a build with checks")]
    pub(in crate::cli) async fn tuning(&self) -> Result<Option<MemberTuning>, Failure> {
        Ok(None)
    }
}
