//! `rgym run`: starts the servers of a configuration and serves until a signal arrives.

mod running;

use std::sync::Arc;

use gym_client::registry::is_loopback;
use gym_client::transport::http::HttpConfig;
use gym_client::work::{PoolWatch, WorkPullerOptions};
use gym_core::base::host_name;
use gym_core::registry::{MemberTiming, Registry};
use gym_core::server::ServerKind;
use gym_core::transport::host_port;
use gym_core::{Code, Endpoint, Error, World};

use crate::cli::args::options::{ChecksMode, ClusterArgs, RunArgs};
use crate::cli::console::{self, Console};
use crate::cli::exit::{Failure, Outcome};
use crate::cli::run::running::Running;
use crate::cli::setup::checks::MemberStart;
use crate::cli::setup::cluster::node::{self, HostedNode};
use crate::cli::setup::cluster::{HeadOptions, head_registry, load_member, look_up};
use crate::cli::setup::configuration::{LoadedConfig, Need, load, nothing_named};
use crate::cli::setup::head_server;
use crate::cli::setup::monitor::{MonitorListener, report_waits};
use crate::cli::setup::signals::StopSignals;
use crate::cli::setup::stack_options::{options, prepare_transports};
use crate::stack::{HEAD_NAME, JoinOptions, RunningServer, Servers, Stack, StackOptions, takes_work};

pub(super) async fn run(
    args: RunArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
    console: &Console,
) -> Outcome {
    args.sources.check_endings(None)?;
    let mut args = args;
    let cluster = args.cluster.clone();
    if cluster.head_only {
        args.serve = vec![HEAD_NAME.to_owned()];
    }
    let by_variable = !head_url_given && args.head_url.as_deref().is_some_and(|url| !url.is_empty());
    let joins = cluster.worker || (by_variable && args.serve.is_empty());
    let of_worker = [("--name", &cluster.name), ("--host", &cluster.host), ("--advertise", &cluster.advertise)];
    if let Some((flag, _)) = of_worker.iter().find(|(_, value)| value.is_some() && !joins) {
        return Err(Failure::Usage(format!(
            "{flag} is an option of a worker, and this process joins no head server\n  fix: add --worker --head-url URL, or remove {flag}"
        )));
    }
    // The variable may be there for the workers of the same file of variables.
    if cluster.checks.is_some() && !joins && std::env::var_os("WORKER_CHECKS").is_none_or(|value| value.is_empty()) {
        return Err(Failure::Usage(
            "--checks is an option of a worker, and this process joins no head server; `doctor` checks a machine\n  fix: add --worker \
             --head-url URL, or remove --checks"
                .to_owned(),
        ));
    }
    let mut start = MemberStart::new(cluster.checks.unwrap_or(ChecksMode::Fail));
    let serves_head = !joins && (args.serve.is_empty() || args.serve.iter().any(|name| name == HEAD_NAME));
    if head_url_given && serves_head {
        return Err(Failure::Usage(
            "--head-url names another head server, but this command would start its own\n  fix: add --worker to join it with all \
             servers, name the instances to serve with --serve NAME, or remove --head-url"
                .to_owned(),
        ));
    }
    let pulled_from = args.pull_from.as_deref().map(pull_from).transpose()?;
    let world = World::real();
    let loaded = if joins {
        let head = HeadOptions { url: args.head_url.as_deref(), url_given: head_url_given, wait: cluster.join_timeout };
        load_member(&args.sources, overrides, servers, &head, &world, &mut start, console).await?
    } else {
        load(&args.sources, overrides, servers, Need::Servers(&args.serve)).await?
    };
    if loaded.config.instances.is_empty() && !joins && args.serve.iter().all(|name| name != HEAD_NAME) {
        return Err(nothing_named("run", &loaded.config.files));
    }
    prepare_transports(&loaded, servers, console);
    loaded.config.warnings.iter().chain(&loaded.config.mistakes).for_each(|warning| console.warn(warning));
    let head = head_server::endpoint(args.head_url.as_deref(), head_url_given, overrides, &loaded.config)?;
    #[cfg(feature = "ray")]
    let (loaded, ray) = crate::cli::setup::ray::announce(loaded, args.sources.python.as_deref(), console).await?;
    let serving =
        Serving { args, cluster, start, world, by_variable, joins, serves_head, head, pulled_from, servers, console };
    let ended = Box::pin(serving.serve(loaded)).await;
    #[cfg(feature = "ray")]
    crate::cli::setup::ray::stop(ray, console).await;
    ended
}

/// Adds the fix to the error of servers whose head server does not answer.
fn without_head(error: Error, head: &Endpoint, serves_head: bool) -> Failure {
    if serves_head || error.code() != Code::Unavailable || error.to_string().contains("\n  fix:") {
        return error.into();
    }
    Failure::Failed(format!(
        "{error}\n  fix: start the head server at {head} first, with `{} run --head-only`, or name another one with --head-url or \
         HEAD_SERVER_URL",
        console::program()
    ))
}

/// A command that serves, after its configuration was loaded.
struct Serving<'a> {
    args: RunArgs,
    cluster: ClusterArgs,
    start: MemberStart,
    world: World,
    by_variable: bool,
    joins: bool,
    serves_head: bool,
    /// The head server of this process, or the one that it joins.
    head: Endpoint,
    pulled_from: Option<Endpoint>,
    servers: &'a Servers,
    console: &'a Console,
}

/// The part of this process in the cluster of its head server.
struct Membership {
    joined: Option<JoinOptions>,
    node: Option<HostedNode>,
}

impl Serving<'_> {
    /// Starts the servers, and serves until a signal arrives.
    async fn serve(self, mut loaded: LoadedConfig) -> Outcome {
        self.say_head(&loaded);
        let registry = head_registry(self.head.clone(), self.servers, &self.world);
        look_up(&mut loaded, &registry, self.cluster.join_timeout, self.console).await?;
        let membership = self.membership(&loaded).await?;
        let options = self.stack_options(&loaded, &membership);
        let stop = StopSignals::listen()?;
        let stack = tokio::select! {
            biased;
            // Dropping the future ends the servers that were started.
            () = stop.graceful.cancelled() => {
                return Err(Failure::Failed("stopped before all servers were ready".to_owned()));
            }
            stack = Box::pin(Stack::start(loaded.config, self.servers, &self.world, options)) => {
                stack.map_err(|error| without_head(error, &self.head, self.serves_head))?
            }
        };
        #[cfg(feature = "ray")]
        if let Some(gpus) = gym_group::GpuMetrics::of_this_machine() {
            stack.metrics().with(|known| known.register_collector(Box::new(gpus)));
        }
        let _monitored = MonitorListener::start(&self.args.monitor, stack.metrics(), self.console).await?;
        let _waits = report_waits(stack.client().transports(), Some(self.head.clone()), Some(&stack)).await;
        let puller = self.take_work(&stack, &membership);
        Running { stack, membership, puller, stop, serving: self }.until_stopped().await
    }

    /// Says which head server this process has.
    fn say_head(&self, loaded: &LoadedConfig) {
        let own = format!("http://{}", host_port(&loaded.config.head.host, loaded.config.head.port));
        let other = self.args.head_url.as_deref().filter(|url| self.by_variable && self.serves_head && *url != own);
        if let Some(other) = other {
            self.console.warn(format!(
                "HEAD_SERVER_URL names the head server {other}, and this process starts one of its own at {own}; a worker joins only one \
                 of them. To join {other} instead, remove --head-only and --serve {HEAD_NAME}"
            ));
        }
        if self.joins && !self.cluster.worker {
            self.console.line(&format!(
                "HEAD_SERVER_URL is set: this process joins the head server at {} and starts none of its own",
                self.head
            ));
        }
    }

    async fn membership(&self, loaded: &LoadedConfig) -> Result<Membership, Failure> {
        if let Some(host) = self.cluster.host.as_deref().filter(|host| !is_loopback(host)) {
            let warning = format!("the servers listen on {host} without authentication; use a network that you trust");
            self.console.warn(warning);
        }
        if !self.joins {
            return Ok(Membership { joined: None, node: None });
        }
        let mut joined = join_options(&self.cluster);
        joined.tuning = self.start.tuning().await?;
        let alone = loaded.config.instances.is_empty();
        let node = node::start(&mut joined, &self.head, self.servers, alone, self.console).await?;
        Ok(Membership { joined: Some(joined), node })
    }

    fn stack_options(&self, loaded: &LoadedConfig, membership: &Membership) -> StackOptions {
        let Self { args, cluster, .. } = self;
        let mut http = HttpConfig::default();
        http.default_deadline = args.request_timeout;
        let mut options = options(loaded, &args.starting, self.console);
        options.head = (!self.serves_head).then(|| self.head.clone());
        options.join.clone_from(&membership.joined);
        // A head server without servers is of use once a worker serves.
        options.expected_workers = cluster.expected_workers.unwrap_or(u16::from(cluster.head_only)).into();
        options.recovery = cluster.worker_timeout;
        options.only.clone_from(&args.serve);
        options.stop_grace = args.stop_grace;
        options.http = http;
        options
    }

    /// Takes work from pools, if this process has servers that run or verify rollouts.
    fn take_work(&self, stack: &Stack, membership: &Membership) -> Option<PoolWatch> {
        let runs = |server: &RunningServer| {
            let kind = ServerKind::from_key(&server.kind);
            kind.is_some_and(|kind| takes_work(kind, &server.implementation))
        };
        let joined = || (self.joins && stack.servers().iter().any(runs)).then(|| self.head.clone());
        let head = self.pulled_from.clone().or_else(joined)?;
        let registry: Arc<dyn Registry> = Arc::new(head_registry(head, self.servers, &self.world));
        let mut options = WorkPullerOptions::of_this_process(&self.world);
        options.capacity = self.args.pull_capacity;
        if let Some(joined) = &membership.joined {
            options.name.clone_from(&joined.name);
            // Other workers of the cluster may have other servers.
            options.servers =
                Some(stack.servers().iter().filter(|server| runs(server)).map(|server| server.name.clone()).collect());
        }
        Some(stack.take_work(registry, options))
    }
}

fn join_options(args: &ClusterArgs) -> JoinOptions {
    JoinOptions {
        host: args.host.clone(),
        advertise: args.advertise.clone(),
        timing: MemberTiming {
            heartbeat: args.heartbeat_interval,
            timeout: args.worker_timeout,
            ..MemberTiming::default()
        },
        join_within: args.join_timeout,
        pulls: true,
        ..JoinOptions::new(args.name.clone().unwrap_or_else(host_name))
    }
}

/// Parses `--pull-from`.
fn pull_from(url: &str) -> Result<Endpoint, Failure> {
    head_server::parse(url).map_err(|failure| match failure {
        Failure::Usage(text) => Failure::Usage(text.replace("--head-url", "--pull-from")),
        failure => failure,
    })
}
