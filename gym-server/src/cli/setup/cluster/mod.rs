//! The parts that a process of a cluster reads from its head server: a configuration if it has none of its own, and the servers that its files
//! name and do not define.

pub(in crate::cli) mod node;

use std::time::Duration;

use gym_client::collect::ServerNames;
use gym_client::config::{MissingServer, Problem};
use gym_client::registry::{RemoteRegistry, SharedConfiguration};
use gym_core::registry::Registry as _;
use gym_core::transport::TransportPolicy;
use gym_core::{CallContext, Code, Endpoint, Result, World};
use tokio::time::{Instant, sleep};

use crate::cli::args::options::Sources;
use crate::cli::console::Console;
use crate::cli::exit::Failure;
use crate::cli::setup::checks::MemberStart;
use crate::cli::setup::configuration::{LoadedConfig, Need, SharedText, load, load_over};
use crate::cli::setup::head_server;
use crate::environment::POOL_IMPLEMENTATION;
use crate::stack::{Servers, live_servers};

/// Waits between two attempts to reach the head server: doubled from the first to the last.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(50);
const LAST_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two messages while the head server does not respond.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Time in which a server may appear whose name resembles a known one. Other workers may start at the same time; a typing error must
/// not cost the whole wait.
const NEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// The head server of a command, and how long to wait for it.
pub(in crate::cli) struct HeadOptions<'a> {
    pub(in crate::cli) url: Option<&'a str>,
    pub(in crate::cli) url_given: bool,
    pub(in crate::cli) wait: Duration,
}

/// Returns the client of a head server. It uses HTTP, whatever the transport policy allows.
pub(in crate::cli) fn head_registry(head: Endpoint, servers: &Servers, world: &World) -> RemoteRegistry {
    let control = servers.transports().with_policy(TransportPolicy::unconfigured());
    RemoteRegistry::new(head, control, world.clone())
}

/// Loads the configuration of a worker: its own, else that of its head server, else one without servers.
pub(in crate::cli) async fn load_member(
    sources: &Sources,
    overrides: &[String],
    servers: &Servers,
    options: &HeadOptions<'_>,
    world: &World,
    start: &mut MemberStart,
    console: &Console,
) -> Result<LoadedConfig, Failure> {
    let key = |text: &str| text.trim_start_matches(['"', '\'', '+']).split(['=', '.']).next() == Some("config_paths");
    let named = !sources.files.is_empty() || overrides.iter().any(|text| key(text));
    let own = if named {
        load(sources, overrides, servers, Need::Worker).await?
    } else {
        // The other overrides may change keys of the head server's configuration.
        let mut own = overrides.to_vec();
        own.retain(|text| text.trim_start_matches(['"', '\'', '+']).starts_with("head_server"));
        let found = load(sources, &own, servers, Need::Values).await?;
        // `env.yaml` may define or name servers.
        if found.config.instances.is_empty() { found } else { load(sources, overrides, servers, Need::Worker).await? }
    };
    // Before the wait for the head server: what is wrong here is not mended by it.
    start.examine(&own.config, overrides, None, console).await?;
    if !own.config.instances.is_empty() {
        return Ok(own);
    }
    let head = head_server::endpoint(options.url, options.url_given, overrides, &own.config)?;
    let registry = head_registry(head.clone(), servers, world);
    let shared = wait_for_head(&registry, options.wait, console, |cx| {
        let registry = registry.clone();
        async move {
            match registry.configuration(&cx).await {
                // A head server of another kind.
                Err(error) if error.code() == Code::NotFound => Ok(SharedConfiguration::default()),
                shared => shared,
            }
        }
    })
    .await?;
    let Some(yaml) = shared.yaml else {
        console.line(&format!(
            "neither this worker nor the head server {head} has a configuration: this worker joins without servers"
        ));
        return load(sources, overrides, servers, Need::Worker).await;
    };
    let base = SharedText { yaml, source: format!("configuration of the head server {head}") };
    let mut loaded = load_over(sources, overrides, servers, Need::Worker, Some(&base)).await?;
    // A pool hands out work to workers. If the head server's process has it, that one gets all callers.
    loaded
        .config
        .instances
        .retain(|instance| instance.implementation != POOL_IMPLEMENTATION || !shared.served.contains(&instance.name));
    console.line(&format!(
        "this worker has no configuration of its own; it serves that of the head server {head}: {} servers",
        loaded.config.instances.len()
    ));
    start.examine(&loaded.config, overrides, Some(&base.source), console).await?;
    Ok(loaded)
}

/// The fix if no head server responds.
const HEAD_FIX: &str = "start the head server, or name the right one with --head-url or HEAD_SERVER_URL";

/// Asks the head server, and waits while it does not respond.
async fn wait_for_head<T, F: Future<Output = Result<T>>>(
    registry: &RemoteRegistry,
    limit: Duration,
    console: &Console,
    ask: impl Fn(CallContext) -> F,
) -> Result<T, Failure> {
    let began = Instant::now();
    let deadline = began + limit;
    let (mut wait, mut next, mut before) = (FIRST_RETRY_INTERVAL, began, None);
    loop {
        let error = match ask(CallContext::until(deadline)).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error.after_attempt(before.as_ref()),
        };
        let temporary = matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded);
        if !temporary || Instant::now() + wait >= deadline {
            return Err(Failure::Failed(format!("{error}\n  fix: {HEAD_FIX}")));
        }
        if next <= Instant::now() {
            // Who named a wrong address does not wait for the end to learn how it is corrected.
            let fix = if next == began { format!("\n  fix: {HEAD_FIX}") } else { String::new() };
            while next <= Instant::now() {
                next += LOG_INTERVAL;
            }
            let (waited, head) = (began.elapsed().as_secs(), registry.head());
            console.line(&format!(
                "waiting for the head server {head}: {error}; {waited} s of {} s{fix}",
                limit.as_secs()
            ));
        }
        // The line comes on time, also between two attempts.
        sleep(wait.min(next.saturating_duration_since(Instant::now()))).await;
        wait = (wait * 2).min(LAST_RETRY_INTERVAL);
        before = Some(error);
    }
}

/// Looks up the servers that the files name and do not define: among those of the head server's configuration, and those that its
/// members serve. Waits for servers that may still join.
pub(in crate::cli) async fn look_up(
    loaded: &mut LoadedConfig,
    registry: &RemoteRegistry,
    limit: Duration,
    console: &Console,
) -> Result<(), Failure> {
    if loaded.config.elsewhere.is_empty() {
        return Ok(());
    }
    let began = Instant::now();
    let (mut wait, mut said) = (FIRST_RETRY_INTERVAL, None::<String>);
    loop {
        let text = wait_for_head(registry, limit, console, |cx| {
            let registry = registry.clone();
            async move { registry.global_configuration(&cx).await }
        })
        .await?;
        let known = ServerNames::of_global_yaml(&text, registry.head().as_str())?;
        let missing: Vec<&MissingServer> = loaded
            .config
            .elsewhere
            .iter()
            .filter(|wanted| !known.servers().any(|(name, kind)| name == wanted.name && kind == wanted.kind))
            .collect();
        if missing.is_empty() {
            break;
        }
        let of_kind = |wanted: &MissingServer| -> Vec<&str> {
            known.servers().filter(|(_, kind)| *kind == wanted.kind).map(|(name, _)| name).collect()
        };
        let near = missing.iter().any(|wanted| wanted.nearest(&of_kind(wanted)).is_some());
        let problems: Vec<Problem> = missing.iter().map(|wanted| wanted.problem(&of_kind(wanted))).collect();
        let text = problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n");
        let limit = if near { limit.min(NEAR_TIMEOUT) } else { limit };
        if began.elapsed() + wait >= limit {
            return Err(Failure::Usage(format!(
                "{text}\n  note: the head server {} has no such server either, after {limit:?}",
                registry.head()
            )));
        }
        if said.as_ref() != Some(&text) {
            console.line(&format!("waiting up to {limit:?} for servers of other workers:\n{text}"));
            said = Some(text);
        }
        sleep(wait).await;
        wait = (wait * 2).min(LAST_RETRY_INTERVAL);
    }
    let names: Vec<&str> = loaded.config.elsewhere.iter().map(|wanted| wanted.name.as_str()).collect();
    console.line(&format!("{}: looked up at the head server {}", names.join(", "), registry.head()));
    let mut live = registry.list(&CallContext::within(limit)).await?;
    live.retain(|server| names.contains(&server.name.as_str()));
    let live = live_servers(&live);
    loaded.config.add_live(&live);
    Ok(())
}
