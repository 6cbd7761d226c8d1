//! Servers that run: what is said when they are ready, and how they stop.

use std::process::ExitCode;

use gym_client::work::PoolWatch;
use gym_core::server::ServerKind;

use crate::cli::console;
use crate::cli::exit::{FAILED, Failure, Outcome};
use crate::cli::run::{Membership, Serving};
use crate::cli::setup::cluster::node;
use crate::cli::setup::models::ModelWatch;
use crate::cli::setup::signals::StopSignals;
use crate::stack::{HEAD_NAME, Stack};

/// The servers of a command.
pub(super) struct Running<'a> {
    pub(super) serving: Serving<'a>,
    pub(super) stack: Stack,
    pub(super) membership: Membership,
    pub(super) puller: Option<PoolWatch>,
    pub(super) stop: StopSignals,
}

impl Running<'_> {
    /// Says that the servers are ready, and serves until a signal arrives or the head server asks this process to drain.
    pub(super) async fn until_stopped(self) -> Outcome {
        let ready = async {
            self.probe_models().await?;
            self.say_membership().await;
            self.wait_for_workers().await
        };
        if let Err(failure) = ready.await {
            Box::pin(self.stack.stop()).await;
            return Err(failure);
        }
        let drained = match self.stack.draining() {
            None => {
                self.stop.graceful.cancelled().await;
                false
            }
            Some(draining) => tokio::select! {
                biased;
                () = self.stop.graceful.cancelled() => false,
                () = draining.cancelled() => true,
            },
        };
        self.stop(drained).await
    }

    /// Calls the endpoints of the model servers, and prints the table of servers: before that, or if the command waits for the endpoints, after it.
    async fn probe_models(&self) -> Result<(), Failure> {
        let models = self.stack.servers().iter().filter(|server| server.kind == ServerKind::Model.as_str());
        let models = models.map(|server| server.name.clone()).collect();
        let models = ModelWatch::new(self.stack.client().clone(), models);
        let wait = self.serving.args.starting.wait_for_model;
        if wait.is_none() {
            self.announce();
        }
        tokio::select! {
            biased;
            () = self.stop.graceful.cancelled() => {}
            probed = models.at_start(wait, self.serving.console) => probed?,
        }
        if wait.is_some() && !self.stop.graceful.is_cancelled() {
            self.announce();
        }
        Ok(())
    }

    async fn say_membership(&self) {
        let Serving { cluster, console, head, start, .. } = &self.serving;
        if let Some(joined) = &self.membership.joined {
            let tuning = joined.tuning.as_ref();
            let tuning = tuning.map_or_else(String::new, |tuning| {
                format!(", with the tuning {} ({} settings)", tuning.digest, tuning.settings.len())
            });
            console.line(&format!("joined the cluster of {head} as {}{tuning}", joined.name));
            start.said_later(console).await;
        }
        if cluster.head_only && cluster.expected_workers.is_none() {
            console.line("/health is 503 until a worker serves; with NUM_EXPECTED_WORKERS=0, it expects none");
        }
    }

    /// Waits for the members that a head server expects.
    async fn wait_for_workers(&self) -> Result<(), Failure> {
        let Serving { cluster, console, head, serves_head, .. } = &self.serving;
        let Some(expected) = cluster.expected_workers.filter(|expected| *expected > 0 && *serves_head) else {
            return Ok(());
        };
        let waited = tokio::select! {
            biased;
            () = self.stop.graceful.cancelled() => return Ok(()),
            waited = self.stack.wait_for_members(cluster.join_timeout, |text| console.line(text)) => waited,
        };
        waited.map_err(|error| {
            Failure::Failed(format!(
                "{error}\n  fix: start the missing workers with `{} run --worker --head-url {head}`, or raise --join-timeout",
                console::program()
            ))
        })?;
        console.line(&format!("all {expected} expected workers serve"));
        Ok(())
    }

    /// Stops the servers: gracefully after a first signal, or after the head server asked this process to drain.
    async fn stop(self, drained: bool) -> Outcome {
        let Self { serving, stack, membership: Membership { node, .. }, puller, stop } = self;
        let (console, grace) = (serving.console, serving.args.stop_grace);
        if drained {
            let until = if node.is_some() { "; it ends when no worker group has ranks on it" } else { "" };
            console.line(&format!("the head server asked this worker to drain{until}"));
        }
        console
            .line(&format!("stopping: requests in flight may take up to {grace:?}; repeat the signal to stop at once"));
        let stopping = async {
            // Work that this process has taken is finished before its servers stop.
            if let Some(puller) = puller {
                puller.drain(grace).await;
            }
            if drained {
                tokio::select! {
                    biased;
                    () = stop.graceful.cancelled() => {}
                    () = node::released(node.as_ref()) => {}
                }
            }
            stack.stop().await;
            node::stop(node, grace).await;
        };
        tokio::select! {
            biased;
            () = stop.immediate.cancelled() => {
                console.line("stopped at once; requests in flight were aborted");
                Ok(ExitCode::from(FAILED))
            }
            () = Box::pin(stopping) => {
                console.line("stopped");
                Ok(ExitCode::SUCCESS)
            }
        }
    }

    /// Prints the servers.
    fn announce(&self) {
        let head = self.serving.head.as_str();
        let rows = self.stack.servers();
        let table = rows.iter().map(|row| {
            [row.name.clone(), row.kind.clone(), row.implementation.clone(), row.url.clone(), row.runs_as.clone()]
        });
        console::print(&console::table(["name", "kind", "implementation", "url", "runs as"], table));
        let own = rows.iter().find(|row| row.kind == HEAD_NAME);
        let servers = rows.len() - usize::from(own.is_some());
        console::print(&format!("ready: {servers} servers, head {}", own.map_or(head, |own| own.url.as_str())));
    }
}
