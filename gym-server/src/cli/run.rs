//! `rgym run`: starts the servers of a configuration and serves until a signal arrives.

use std::process::ExitCode;
use std::sync::Arc;

use gym_client::registry::RemoteRegistry;
use gym_client::transport::http::HttpConfig;
use gym_client::work::WorkPullerOptions;
use gym_core::registry::Registry;
use gym_core::server::ServerKind;
use gym_core::transport::TransportPolicy;
use gym_core::{Endpoint, World};

use crate::cli::args::options::RunArgs;
use crate::cli::console::{self, Console};
use crate::cli::exit::{FAILED, Failure, Outcome};
use crate::cli::setup::configuration::{Need, load, nothing_named};
use crate::cli::setup::head_server;
use crate::cli::setup::models::ModelWatch;
use crate::cli::setup::signals::StopSignals;
use crate::cli::setup::stack_options::{options, prepare_transports};
use crate::stack::{HEAD_NAME, Servers, Stack, StackOptions};

pub(super) async fn run(
    args: RunArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
    console: &Console,
) -> Outcome {
    reject_unsupported(&args)?;
    let serves_head = args.serve.is_empty() || args.serve.iter().any(|name| name == HEAD_NAME);
    if head_url_given && serves_head {
        return Err(Failure::Usage(
            "--head-url names another head server, but this command would start its own\n  fix: name the instances to \
             serve with --serve NAME, or remove --head-url"
                .to_owned(),
        ));
    }
    let pulled_from = args.pull_from.as_deref().map(pull_from).transpose()?;
    let loaded = load(&args.sources, overrides, servers, Need::Servers(&args.serve)).await?;
    if loaded.config.instances.is_empty() && args.serve.iter().all(|name| name != HEAD_NAME) {
        return Err(nothing_named("run", &loaded.config.files));
    }
    prepare_transports(&loaded, servers, console);
    loaded.config.warnings.iter().for_each(|warning| console.warn(warning));
    let head = head_server::endpoint(args.head_url.as_deref(), head_url_given, overrides, &loaded.config)?;
    let options = StackOptions {
        head: (!serves_head).then(|| head.clone()),
        only: args.serve,
        stop_grace: args.stop_grace,
        http: HttpConfig { default_deadline: args.request_timeout, ..HttpConfig::default() },
        ..options(&loaded, &args.starting, console)
    };
    let world = World::real();
    let stop = StopSignals::listen()?;
    let stack = tokio::select! {
        biased;
        // Dropping the future ends the servers that were started.
        () = stop.graceful.cancelled() => {
            return Err(Failure::Failed("stopped before all servers were ready".to_owned()));
        }
        stack = Box::pin(Stack::start(loaded.config, servers, &world, options)) => stack?,
    };
    let puller = pulled_from.map(|head| {
        // The head server is asked over HTTP, whatever the transport policy allows.
        let control = servers.transports().with_policy(TransportPolicy::unconfigured());
        let registry: Arc<dyn Registry> = Arc::new(RemoteRegistry::new(head, control, world.clone()));
        let options = WorkPullerOptions { capacity: args.pull_capacity, ..WorkPullerOptions::of_this_process(&world) };
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
    stop.graceful.cancelled().await;
    console.line(&format!(
        "stopping: requests in flight may take up to {:?}; repeat the signal to stop at once",
        args.stop_grace
    ));
    let stopping = async {
        // Work that this process has taken is finished before its servers stop.
        if let Some(puller) = puller {
            puller.drain(args.stop_grace).await;
        }
        stack.stop().await;
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

/// Parses `--pull-from`.
fn pull_from(url: &str) -> Result<Endpoint, Failure> {
    head_server::parse(url).map_err(|failure| match failure {
        Failure::Usage(text) => Failure::Usage(text.replace("--head-url", "--pull-from")),
        failure => failure,
    })
}

fn reject_unsupported(args: &RunArgs) -> Result<(), Failure> {
    let (flag, fix) = match (args.head_only, args.worker) {
        (true, _) => ("--head-only", "use --serve head_server to start only the head server"),
        (_, true) => (
            "--worker",
            "use --serve NAME --head-url URL to serve some instances of a configuration and register them with a head server",
        ),
        _ => return Ok(()),
    };
    Err(Failure::Usage(format!(
        "{flag} is not supported yet: this version cannot distribute one run over several machines\n  fix: {fix}"
    )))
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
