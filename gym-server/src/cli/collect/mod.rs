//! `rgym collect`: collects rollouts from running servers, or starts the servers of a configuration for the collection.

mod causes;
mod dispatch;
pub(in crate::cli) mod figures;
pub(super) mod plan;
mod progress;
mod report;
mod settings;
mod summary;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_client::ServerClient;
use gym_client::collect::input::DEFAULT_KEY;
use gym_client::collect::monitor::CollectionMonitor;
use gym_client::collect::{
    CollectOptions, CollectSummary, ExistingOutput, OutputFiles, RolloutCollector, ServerNames, connect_head,
};
use gym_client::config::Problem;
use gym_client::registry::{RemoteRegistry, WaitsListener};
use gym_core::server::ServerKind;
use gym_core::transport::TransportPolicy;
use gym_core::{CancelToken, Endpoint, World};
use tokio::task::JoinHandle;

use crate::cli::args::options::{CollectArgs, Starting};
use crate::cli::collect::dispatch::{PullPlan, PulledWork};
use crate::cli::collect::report::CollectReport;
use crate::cli::console::{self, Console};
use crate::cli::exit::{FAILED, Failure, INCOMPLETE, Outcome, SUCCESS};
use crate::cli::setup::configuration::{LoadedConfig, Need, load, nothing_named};
use crate::cli::setup::head_server;
use crate::cli::setup::models::ModelWatch;
use crate::cli::setup::monitor::{MonitorListener, report_waits};
use crate::cli::setup::signals::StopSignals;
use crate::cli::setup::stack_options::{options, prepare_transports};
use crate::metrics::Metrics;
use crate::stack::{HEAD_NAME, Servers, Stack, StackOptions};

pub(super) async fn collect(
    args: CollectArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
    console: &Console,
) -> Outcome {
    args.sources.check_endings(args.input.as_deref())?;
    let serves = !args.no_serve && (args.serve || !args.sources.files.is_empty());
    if serves && head_url_given {
        return Err(Failure::Usage(
            "--head-url names running servers, but the configuration would start its own servers\n  fix: add --no-serve to \
             collect from the running servers, or remove --head-url"
                .to_owned(),
        ));
    }
    let need = if serves { Need::OwnServers } else { Need::Values };
    let loaded = load(&args.sources, overrides, servers, need).await?;
    if !loaded.idle.is_empty() {
        return Err(Failure::Usage(loaded.idle.join("\n")));
    }
    if serves && loaded.config.instances.is_empty() {
        return Err(nothing_named("serve", &loaded.config.files));
    }
    prepare_transports(&loaded, servers, console);
    loaded.config.warnings.iter().chain(&loaded.config.mistakes).for_each(|warning| console.warn(warning));
    // Each agent rejects such a request.
    let of_params =
        |mistake: &&Problem| mistake.key.as_deref().is_some_and(|key| key.starts_with("responses_create_params"));
    if let Some(mistake) = loaded.config.mistakes.iter().find(of_params) {
        return Err(Failure::Usage(mistake.to_string()));
    }
    let options = settings::read(&args, &loaded, overrides, |warning| console.warn(warning))?;
    let world = World::real();
    // Before servers start, which may take minutes.
    if serves {
        check_agent(&options, &ServerNames::of_config(&loaded.config))?;
    }
    let existing = options.check_output(&*world.files).await?;
    if options.existing == ExistingOutput::Resume && existing.is_empty() {
        let output = options.output.display();
        if let Some(near) = OutputFiles::beside(&options.output).misspelled_of() {
            return Err(Failure::Usage(format!(
                "{output}: there are no results to resume; did you mean `{}`?\n  fix: name it with --output, or leave out --resume to \
                 begin a new collection",
                near.display()
            )));
        }
        console.line(&format!("{output}: there are no results to resume yet; this run begins them"));
    }
    if serves {
        let names = ServerNames::of_config(&loaded.config);
        let names = match PullPlan::own(&args, &loaded.config.head.host) {
            Some(plan) => plan.names(names),
            None => names,
        };
        options.check_rows(&names).await?;
        options.check_start(&names, &world).await?;
    }
    if let (ExistingOutput::Overwrite, Some(first)) = (options.existing, existing.first()) {
        console.line(&format!(
            "{}: this run replaces the results of an earlier one; with --resume, it would continue them",
            first.display()
        ));
    }
    #[cfg(feature = "ray")]
    let (loaded, ray) = match serves {
        true => crate::cli::setup::ray::connect_servers(loaded, args.sources.python.as_deref(), console).await?,
        false => (loaded, None),
    };
    let collection = Collection { args, options, loaded, overrides, head_url_given, servers, console, serves, world };
    let ended = Box::pin(collection.run()).await;
    #[cfg(feature = "ray")]
    crate::cli::setup::ray::stop(ray, console).await;
    ended
}

/// A collection, after its configuration and its options were read.
struct Collection<'a> {
    args: CollectArgs,
    options: CollectOptions,
    loaded: LoadedConfig,
    overrides: &'a [String],
    head_url_given: bool,
    servers: &'a Servers,
    console: &'a Console,
    /// Starts the servers of the configuration.
    serves: bool,
    world: World,
}

/// The callees of a collection, once its servers are known.
struct Prepared {
    client: ServerClient,
    names: ServerNames,
    /// How workers take the rollouts, if they do.
    plan: Option<PullPlan>,
}

/// The observers of a running collection, apart from its files.
struct Watched {
    models: ModelWatch,
    /// The responses that each endpoint had aborted before.
    aborted: BTreeMap<(String, String), u64>,
    tasks: [JoinHandle<()>; 2],
    shown: JoinHandle<()>,
    ended: CancelToken,
    _waits: Option<WaitsListener>,
    _monitored: Option<MonitorListener>,
}

impl Watched {
    /// Ends what watches. The tasks only draw, so their errors are ignored.
    async fn end(self) -> (ModelWatch, BTreeMap<(String, String), u64>) {
        self.ended.cancel();
        self.tasks.iter().for_each(JoinHandle::abort);
        drop(self._waits);
        let _ = self.shown.await;
        (self.models, self.aborted)
    }
}

impl Collection<'_> {
    async fn run(self) -> Outcome {
        let stop = StopSignals::listen()?;
        let early = || Failure::Failed("stopped before the first rollout".to_owned());
        let mut stack = None;
        let prepared = tokio::select! {
            biased;
            () = stop.graceful.cancelled() => Err(early()),
            prepared = Box::pin(self.prepare(&mut stack)) => prepared,
        };
        let prepared = prepared?;
        self.say_stack(stack.as_ref());
        let metrics = stack.as_ref().map_or_else(Metrics::new, |stack| stack.metrics().clone());
        let transports = prepared.client.transports().clone();
        if stack.is_none() {
            metrics.with(|known| known.register_collector(Box::new(transports.metrics())));
        }
        let pulled = tokio::select! {
            biased;
            () = stop.graceful.cancelled() => return Err(early()),
            pulled = Box::pin(self.pull(&prepared, stack.as_ref(), &metrics)) => pulled?,
        };
        let (collector, shown_by) = self.collector(&prepared, stack.as_ref(), pulled.as_ref())?;
        let watched =
            self.watch(&prepared, &collector, stack.as_ref(), pulled.as_ref(), shown_by, &metrics, &stop).await?;
        let began = tokio::time::Instant::now();
        let collected = tokio::select! {
            biased;
            () = stop.immediate.cancelled() => None,
            collected = Box::pin(collector.collect(self.options.clone(), stop.graceful.clone())) => Some(collected),
        };
        let (models, aborted) = watched.end().await;
        let Some(collected) = collected else {
            self.console.line("stopped at once; recorded rollouts are kept, and --resume continues from them");
            return Ok(ExitCode::from(FAILED));
        };
        let outcome = collected?;
        let exit_code = self.report(&outcome, began.elapsed(), summary::transports(&transports))?;
        models.aborted_since(&aborted).await.iter().for_each(|line| self.console.line(line));
        if let Some(advice) = summary::advice(&outcome) {
            self.console.line(&advice);
        }
        let ending = async {
            if let Some(pulled) = pulled {
                Box::pin(pulled.end()).await;
            }
            if let Some(stack) = stack {
                Box::pin(Stack::stop(stack)).await;
            }
        };
        tokio::select! {
            biased;
            () = stop.immediate.cancelled() => {}
            () = ending => {}
        }
        match &outcome.aggregate_error {
            Some(error) => Err(Failure::Failed(format!(
                "the rollouts are recorded, but their statistics are missing: {error}\n  fix: repeat the command with --resume to \
                 request them again, or with --disable-aggregation to skip them"
            ))),
            None => Ok(ExitCode::from(exit_code)),
        }
    }

    fn say_stack(&self, stack: Option<&Stack>) {
        let Some(stack) = stack else { return };
        if let Some(head) = stack.servers().iter().find(|server| server.kind == HEAD_NAME) {
            let servers = stack.servers().len() - 1;
            self.console.line(&format!(
                "started {servers} servers for this collection, head {0}; its page is {0}/ui",
                head.url
            ));
        }
    }

    /// Lets workers take the rollouts, if the plan says so.
    async fn pull(
        &self,
        prepared: &Prepared,
        stack: Option<&Stack>,
        metrics: &Metrics,
    ) -> Result<Option<PulledWork>, Failure> {
        let Self { args, options, console, world, .. } = self;
        let Some(plan) = &prepared.plan else {
            if !args.weights.is_empty() {
                console.warn(
                    "--weight has no effect: the rollouts are sent to the servers by name, and not pulled by workers"
                        .to_owned(),
                );
            }
            return Ok(None);
        };
        let weights = dispatch::weights(args, &prepared.names())?;
        let client = &prepared.client;
        Ok(PulledWork::start(plan, weights, client, &options.driver, stack, metrics, world, console).await?)
    }

    /// Returns the collector, and the head server that shows its waits, if it is not that of `stack`.
    fn collector(
        &self,
        prepared: &Prepared,
        stack: Option<&Stack>,
        pulled: Option<&PulledWork>,
    ) -> Result<(RolloutCollector, Option<Endpoint>), Failure> {
        let mut collector = RolloutCollector::new(prepared.client.clone(), prepared.names(), self.world.clone());
        let mut shown_by = None;
        let monitor = match stack {
            Some(stack) => stack.monitor(),
            None => {
                let head = self.head()?;
                let registry = RemoteRegistry::new(head.clone(), self.servers.transports(), self.world.clone());
                shown_by = Some(head);
                Some(Arc::new(registry) as Arc<dyn CollectionMonitor>)
            }
        };
        if let Some(monitor) = monitor {
            collector = collector.reporting_to(monitor);
        }
        if let Some(pulled) = pulled {
            collector = collector.pulled_from(pulled.pool.clone());
            if let Some(servers) = prepared.plan.as_ref().and_then(|plan| plan.servers.clone()) {
                collector = collector.pulling_only(servers);
            }
        }
        Ok((collector, shown_by))
    }

    #[allow(clippy::too_many_arguments)] // The parts of one collection, used once.
    async fn watch(
        &self,
        prepared: &Prepared,
        collector: &RolloutCollector,
        stack: Option<&Stack>,
        pulled: Option<&PulledWork>,
        shown_by: Option<Endpoint>,
        metrics: &Metrics,
        stop: &StopSignals,
    ) -> Result<Watched, Failure> {
        let Self { args, options, console, .. } = self;
        let names = prepared.names();
        // Workers have their own models.
        let (models, others) = if pulled.is_some() { Default::default() } else { (names.models(), others(&names)) };
        let models = ModelWatch::new(prepared.client.clone(), models).with_others(others);
        let (waits_for, watching) = models.clone().watch();
        let watching = tokio::spawn(watching.boxed());
        let aborted = models.aborted().await;
        let (graceful, give_up) = (stop.graceful.clone(), options.driver.give_up.clone());
        let giving_up = models.clone().give_up_after(graceful, give_up, collector.progress(), (*console).clone());
        let giving_up = tokio::spawn(giving_up.boxed());
        let waits = report_waits(prepared.client.transports(), shown_by, stack).await;
        metrics.watch_collection(collector.progress(), pulled.map(|pulled| pulled.pool.clone()));
        let monitored = MonitorListener::start(&args.monitor, metrics, console).await?;
        let ended = CancelToken::new();
        let showing = progress::show(
            collector.progress(),
            waits_for,
            args.progress,
            (*console).clone(),
            args.stop_grace,
            stop.graceful.clone(),
            ended.clone(),
        );
        Ok(Watched {
            models,
            aborted,
            tasks: [watching, giving_up],
            shown: tokio::spawn(showing.boxed()),
            ended,
            _waits: waits,
            _monitored: monitored,
        })
    }

    /// Prints the summary, and returns the exit code.
    fn report(
        &self,
        outcome: &CollectSummary,
        elapsed: Duration,
        used: Vec<(&'static str, usize)>,
    ) -> Result<u8, Failure> {
        outcome.warnings.iter().for_each(|warning| self.console.warn(warning));
        let exit_code = match (outcome.is_complete(), &outcome.aggregate_error) {
            (_, Some(_)) => FAILED,
            (true, None) => SUCCESS,
            (false, None) => INCOMPLETE,
        };
        if self.args.json {
            let report = CollectReport::new(outcome, elapsed, used.into_iter().collect(), exit_code);
            let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::Failed(error.to_string()))?;
            console::print(&text);
        } else {
            console::print(&summary::text(outcome, elapsed));
            if let Some(used) = summary::transports_line(&used) {
                console::print(&used);
            }
        }
        Ok(exit_code)
    }

    /// Returns the head server of running servers.
    fn head(&self) -> Result<Endpoint, Failure> {
        let Self { args, overrides, head_url_given, loaded, .. } = self;
        head_server::endpoint(args.head_url.as_deref(), *head_url_given, overrides, &loaded.config)
    }

    async fn prepare(&self, stack: &mut Option<Stack>) -> Result<Prepared, Failure> {
        let Self { args, options: collection, loaded, servers, console, serves, world, .. } = self;
        if *serves {
            let options = own_stack(loaded, &args.starting, args.concurrency.unwrap_or(0), console);
            let started = stack.insert(Stack::start(loaded.config.clone(), servers, world, options).await?);
            let (client, names) = (started.client().clone(), started.names().clone());
            ModelWatch::new(client.clone(), names.models()).at_start(args.starting.wait_for_model, console).await?;
            let plan = PullPlan::own(args, &loaded.config.head.host);
            return Ok(Prepared { client, names, plan });
        }
        let head = self.head()?;
        let policy = loaded.config.transport_policy.clone().unwrap_or_else(TransportPolicy::unconfigured);
        let transports = servers.transports().scoped(&policy, None);
        let (client, names) = connect_head(&head, transports, world).await.map_err(|error| {
            Failure::Failed(format!(
                "{error}\n  fix: start servers with `{} run`, set their head server with --head-url or HEAD_SERVER_URL, or \
                 start the servers of a configuration with --config",
                console::program()
            ))
        })?;
        check_agent(collection, &names)?;
        let plan = PullPlan::choose(args, collection, &client, &names, &head).await?;
        if plan.is_none() {
            ModelWatch::new(client.clone(), names.models()).at_start(args.starting.wait_for_model, console).await?;
        }
        Ok(Prepared { client, names, plan })
    }
}

impl Prepared {
    /// Returns the names for the plan.
    fn names(&self) -> ServerNames {
        self.plan.as_ref().map_or_else(|| self.names.clone(), |plan| plan.names(self.names.clone()))
    }
}

/// Checks that the agent of `--agent`, if it is given, can be called.
fn check_agent(options: &CollectOptions, names: &ServerNames) -> Result<(), Failure> {
    let checked = options.materialize.agent_map.get(DEFAULT_KEY).map(|agent| names.check_target(agent));
    checked.transpose().map(drop).map_err(|error| Failure::Usage(error.message().to_owned()))
}

/// Returns the servers that are no model servers.
fn others(names: &ServerNames) -> Vec<String> {
    names.servers().filter(|(_, kind)| *kind != ServerKind::Model).map(|(name, _)| name.to_owned()).collect()
}

/// Returns the options of a stack that serves only rollouts of this command, so many at a time.
fn own_stack(loaded: &LoadedConfig, starting: &Starting, concurrency: u32, console: &Console) -> StackOptions {
    StackOptions {
        // The rollouts have ended by then, so no caller waits for the remaining requests. With the grace of the rollouts, one Ctrl-C ends within
        // 25 s: Kubernetes kills after 30 s.
        stop_grace: Duration::from_secs(2),
        in_process_calls_max: StackOptions::default()
            .in_process_calls_max
            .max((concurrency as usize).saturating_mul(2)),
        ..options(loaded, starting, console)
    }
}
