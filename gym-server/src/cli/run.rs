//! `rgym run`: starts the servers of a configuration and serves until a signal arrives.

use std::process::ExitCode;
use std::sync::Arc;

use gym_client::registry::is_loopback;
use gym_client::transport::http::HttpConfig;
use gym_client::work::WorkPullerOptions;
use gym_core::base::host_name;
use gym_core::registry::{MemberTiming, Registry};
use gym_core::server::ServerKind;
use gym_core::transport::host_port;
use gym_core::{Code, Endpoint, Error, World};

use crate::cli::args::options::{ChecksMode, ClusterArgs, RunArgs};
use crate::cli::console::{self, Console};
use crate::cli::exit::{FAILED, Failure, Outcome};
use crate::cli::setup::checks::WorkerStart;
use crate::cli::setup::cluster::node;
use crate::cli::setup::cluster::{HeadOptions, head_registry, load_worker, look_up};
use crate::cli::setup::configuration::{LoadedConfig, Need, load, nothing_named};
use crate::cli::setup::head_server;
use crate::cli::setup::models::ModelWatch;
use crate::cli::setup::monitor::{MonitorListener, report_waits};
use crate::cli::setup::signals::StopSignals;
use crate::cli::setup::stack_options::{options, prepare_transports};
use crate::stack::{HEAD_NAME, RunningServer, Servers, Stack, StackOptions, WorkerOptions, takes_work};

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
    let mut start = WorkerStart::new(cluster.checks.unwrap_or(ChecksMode::Fail));
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
        load_worker(&args.sources, overrides, servers, &head, &world, &mut start, console).await?
    } else {
        load(&args.sources, overrides, servers, Need::Servers(&args.serve)).await?
    };
    if loaded.config.instances.is_empty() && !joins && args.serve.iter().all(|name| name != HEAD_NAME) {
        return Err(nothing_named("run", &loaded.config.files));
    }
    prepare_transports(&loaded, servers, console);
    loaded.config.warnings.iter().chain(&loaded.config.mistakes).for_each(|warning| console.warn(warning));
    #[cfg(feature = "ray")]
    let (loaded, ray) = crate::cli::setup::ray::announce(loaded, args.sources.python.as_deref(), console).await?;
    let serving =
        Serving { args, cluster, loaded, start, world, by_variable, joins, serves_head, head_url_given, pulled_from };
    let ended = Box::pin(serve(serving, overrides, servers, console)).await;
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

/// What a command serves, after its configuration was loaded.
struct Serving {
    args: RunArgs,
    cluster: ClusterArgs,
    loaded: LoadedConfig,
    start: WorkerStart,
    world: World,
    by_variable: bool,
    joins: bool,
    serves_head: bool,
    head_url_given: bool,
    pulled_from: Option<Endpoint>,
}

/// Starts the servers, and serves until a signal arrives.
async fn serve(serving: Serving, overrides: &[String], servers: &Servers, console: &Console) -> Outcome {
    let Serving {
        args,
        cluster,
        mut loaded,
        start,
        world,
        by_variable,
        joins,
        serves_head,
        head_url_given,
        pulled_from,
    } = serving;
    let head = head_server::endpoint(args.head_url.as_deref(), head_url_given, overrides, &loaded.config)?;
    let own = format!("http://{}", host_port(&loaded.config.head.host, loaded.config.head.port));
    if let Some(other) = args.head_url.as_deref().filter(|url| by_variable && serves_head && *url != own) {
        console.warn(format!(
            "HEAD_SERVER_URL names the head server {other}, and this process starts one of its own at {own}; a worker joins only one \
             of them. To join {other} instead, remove --head-only and --serve {HEAD_NAME}"
        ));
    }
    if joins && !cluster.worker {
        console.line(&format!(
            "HEAD_SERVER_URL is set: this process joins the head server at {head} and starts none of its own"
        ));
    }
    let registry = head_registry(head.clone(), servers, &world);
    look_up(&mut loaded, &registry, cluster.join_timeout, console).await?;
    let mut worker = joins.then(|| worker_options(&cluster));
    if let Some(worker) = &mut worker {
        worker.tuning = start.tuning().await?;
    }
    if let Some(host) = cluster.host.as_deref().filter(|host| !is_loopback(host)) {
        console.warn(format!("the servers listen on {host} without authentication; use a network that you trust"));
    }
    let node = match &mut worker {
        Some(worker) => node::start(worker, &head, servers, loaded.config.instances.is_empty(), console).await?,
        None => None,
    };
    let options = StackOptions {
        head: (!serves_head).then(|| head.clone()),
        worker: worker.clone(),
        // A head server without servers is of use once a worker serves.
        expected_workers: cluster.expected_workers.unwrap_or(u16::from(cluster.head_only)).into(),
        recovery: cluster.worker_timeout,
        only: args.serve,
        stop_grace: args.stop_grace,
        http: {
            let mut config = HttpConfig::default();
            config.default_deadline = args.request_timeout;
            config
        },
        ..options(&loaded, &args.starting, console)
    };
    let stop = StopSignals::listen()?;
    let stack = tokio::select! {
        biased;
        // Dropping the future ends the servers that were started.
        () = stop.graceful.cancelled() => {
            return Err(Failure::Failed("stopped before all servers were ready".to_owned()));
        }
        stack = Box::pin(Stack::start(loaded.config, servers, &world, options)) => {
            stack.map_err(|error| without_head(error, &head, serves_head))?
        }
    };
    #[cfg(feature = "ray")]
    if let Some(gpus) = gym_group::GpuMetrics::of_this_machine() {
        stack.metrics().with(|known| known.register_collector(Box::new(gpus)));
    }
    let _monitored = MonitorListener::start(&args.monitor, stack.metrics(), console).await?;
    let _waits = report_waits(stack.client().transports(), Some(head.clone()), Some(&stack)).await;
    // A worker runs what its agents and environments can run, and verifies.
    let runs = |server: &RunningServer| {
        let kind = ServerKind::from_key(&server.kind);
        kind.is_some_and(|kind| takes_work(kind, &server.implementation))
    };
    let pulled_from = pulled_from.or_else(|| (joins && stack.servers().iter().any(runs)).then(|| head.clone()));
    let puller = pulled_from.map(|head| {
        let registry: Arc<dyn Registry> = Arc::new(head_registry(head, servers, &world));
        let mut options = WorkPullerOptions::of_this_process(&world);
        options.capacity = args.pull_capacity;
        if let Some(worker) = &worker {
            options.name.clone_from(&worker.name);
            // Other workers of the cluster may have other servers.
            options.servers =
                Some(stack.servers().iter().filter(|server| runs(server)).map(|server| server.name.clone()).collect());
        }
        stack.take_work(registry, options)
    });
    let models = stack.servers().iter().filter(|server| server.kind == ServerKind::Model.as_str());
    let models = ModelWatch::new(stack.client().clone(), models.map(|server| server.name.clone()).collect());
    let waits = args.starting.wait_for_model.is_some();
    if !waits {
        announce(&stack, head.as_str());
    }
    let probed = tokio::select! {
        biased;
        () = stop.graceful.cancelled() => Ok(()),
        probed = models.at_start(args.starting.wait_for_model, console) => probed,
    };
    if let Err(failure) = probed {
        Box::pin(stack.stop()).await;
        return Err(failure);
    }
    if waits && !stop.graceful.is_cancelled() {
        announce(&stack, head.as_str());
    }
    if let Some(worker) = &worker {
        let tuning = worker.tuning.as_ref();
        let tuning = tuning.map_or_else(String::new, |tuning| {
            format!(", with the tuning {} ({} settings)", tuning.digest, tuning.settings.len())
        });
        console.line(&format!("joined the cluster of {head} as {}{tuning}", worker.name));
        start.said_later(console).await;
    }
    if cluster.head_only && cluster.expected_workers.is_none() {
        console.line("/health is 503 until a worker serves; with NUM_EXPECTED_WORKERS=0, it expects none");
    }
    if let Some(expected) = cluster.expected_workers.filter(|expected| *expected > 0 && serves_head) {
        let waited = tokio::select! {
            biased;
            () = stop.graceful.cancelled() => Ok(()),
            waited = stack.wait_for_workers(cluster.join_timeout, |text| console.line(text)) => waited,
        };
        if let Err(error) = waited {
            Box::pin(stack.stop()).await;
            return Err(Failure::Failed(format!(
                "{error}\n  fix: start the missing workers with `{} run --worker --head-url {head}`, or raise --join-timeout",
                console::program()
            )));
        }
        if !stop.graceful.is_cancelled() {
            console.line(&format!("all {expected} expected workers serve"));
        }
    }
    let drained = match stack.draining() {
        None => {
            stop.graceful.cancelled().await;
            false
        }
        Some(draining) => tokio::select! {
            biased;
            () = stop.graceful.cancelled() => false,
            () = draining.cancelled() => true,
        },
    };
    if drained {
        let until = if node.is_some() { "; it ends when no worker group has ranks on it" } else { "" };
        console.line(&format!("the head server asked this worker to drain{until}"));
    }
    console.line(&format!(
        "stopping: requests in flight may take up to {:?}; repeat the signal to stop at once",
        args.stop_grace
    ));
    let stopping = async {
        // Work that this process has taken is finished before its servers stop.
        if let Some(puller) = puller {
            puller.drain(args.stop_grace).await;
        }
        if drained {
            tokio::select! {
                biased;
                () = stop.graceful.cancelled() => {}
                () = node::released(node.as_ref()) => {}
            }
        }
        stack.stop().await;
        node::stop(node, args.stop_grace).await;
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

fn worker_options(args: &ClusterArgs) -> WorkerOptions {
    WorkerOptions {
        host: args.host.clone(),
        advertise: args.advertise.clone(),
        timing: MemberTiming {
            heartbeat: args.heartbeat_interval,
            timeout: args.worker_timeout,
            ..MemberTiming::default()
        },
        join_within: args.join_timeout,
        pulls: true,
        ..WorkerOptions::new(args.name.clone().unwrap_or_else(host_name))
    }
}

/// Parses `--pull-from`.
fn pull_from(url: &str) -> Result<Endpoint, Failure> {
    head_server::parse(url).map_err(|failure| match failure {
        Failure::Usage(text) => Failure::Usage(text.replace("--head-url", "--pull-from")),
        failure => failure,
    })
}

fn announce(stack: &Stack, head: &str) {
    let rows = stack.servers();
    let table = rows.iter().map(|row| {
        [row.name.clone(), row.kind.clone(), row.implementation.clone(), row.url.clone(), row.runs_as.clone()]
    });
    console::print(&console::table(["name", "kind", "implementation", "url", "runs as"], table));
    let own = rows.iter().find(|row| row.kind == HEAD_NAME);
    let servers = rows.len() - usize::from(own.is_some());
    console::print(&format!("ready: {servers} servers, head {}", own.map_or(head, |own| own.url.as_str())));
}
