//! `rgym workers` and `rgym drain`: the members of a cluster.

use std::process::ExitCode;
use std::time::Duration;

use gym_client::config::{GymConfig, nearest_name};
use gym_client::registry::RemoteRegistry;
use gym_core::registry::{Member, MemberRegistry, MemberState};
use gym_core::{CallContext, Code, Endpoint, Error, World};

use crate::cli::args::options::{DrainArgs, Sources, StatusArgs};
use crate::cli::collect::figures::duration;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
#[cfg(feature = "ray")]
use crate::cli::inspect::ray;
use crate::cli::inspect::{HEAD_TIMEOUT, with_notice, without_head};
use crate::cli::setup::configuration::{LoadedConfig, Need, load};
use crate::cli::setup::head_server;
use crate::stack::Servers;

/// Servers of a worker that the table names; `--json` has all of them.
const SHOWN_MAX: usize = 3;

/// Prints the members.
pub(in crate::cli) async fn list(
    args: StatusArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
) -> Outcome {
    let (config, registry) = configured(args.head_url.as_deref(), overrides, head_url_given, servers).await?;
    #[cfg(not(feature = "ray"))]
    drop(config);
    let cx = CallContext::within(HEAD_TIMEOUT);
    let members = with_notice(registry.head(), HEAD_TIMEOUT, registry.members(&cx)).await;
    let members = members.map_err(|error| no_head(&error))?;
    if args.json {
        let text = serde_json::to_string_pretty(&members).map_err(|error| Failure::Failed(error.to_string()))?;
        console::print(&text);
    } else if members.is_empty() {
        console::print(&format!("no worker has joined {}", registry.head()));
    } else {
        console::print(&text(&members));
    }
    // Scripts read a list of members. The nodes of Ray are none: `rgym ray status --json` has them.
    #[cfg(feature = "ray")]
    if !args.json
        && let Some(ray) = ray::of_configuration(&config).await?
    {
        console::print(&format!("\n{}", ray.text()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks a member to finish and leave.
pub(in crate::cli) async fn drain(
    args: DrainArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
) -> Outcome {
    let (_, registry) = configured(args.head_url.as_deref(), overrides, head_url_given, servers).await?;
    if let Err(error) = registry.drain(&CallContext::within(HEAD_TIMEOUT), &args.name).await {
        let members = match error.code() {
            Code::NotFound => registry.members(&CallContext::within(HEAD_TIMEOUT)).await.ok(),
            _ => None,
        };
        return Err(match members {
            Some(members) => Failure::Usage(no_member(&args.name, &members)),
            None => no_head(&error),
        });
    }
    console::print(&format!("{} gets no more work; it ends when its rollouts have ended", args.name));
    Ok(ExitCode::SUCCESS)
}

fn no_head(error: &Error) -> Failure {
    Failure::Failed(format!("{error}\n  fix: {}", without_head()))
}

/// Says that no worker has this name, and which ones there are.
fn no_member(name: &str, members: &[Member]) -> String {
    let serving = members.iter().filter(|member| !matches!(member.state, MemberState::Gone));
    let names: Vec<&str> = serving.map(|member| &*member.spec.name).collect();
    let fix = match nearest_name(name, names.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if names.is_empty() => {
            format!("no worker has joined; start one with `{} run --worker --head-url URL`", console::program())
        }
        None => format!("name one of the workers that have joined: {}", names.join(", ")),
    };
    format!("no worker has the name {name}\n  fix: {fix}")
}

async fn configured(
    head_url: Option<&str>,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
) -> Result<(GymConfig, RemoteRegistry), Failure> {
    let LoadedConfig { config, .. } = load(&Sources::default(), overrides, servers, Need::Values).await?;
    let head: Endpoint = head_server::endpoint(head_url, head_url_given, overrides, &config)?;
    Ok((config, RemoteRegistry::new(head, servers.transports(), World::real())))
}

/// Returns the names of a member's servers, the first of them if there are many.
fn servers(member: &Member) -> String {
    // A node agent is no server of the configuration: it starts ranks of worker groups.
    let node = member.spec.node.as_ref().map(|_| "(node agent)");
    let names = member.spec.servers.iter().map(|server| server.name.as_str());
    let names: Vec<&str> = names.chain(node).collect();
    match names.get(SHOWN_MAX..).map(<[_]>::len) {
        None | Some(0) => names.join(","),
        Some(more) => format!("{},… ({more} more)", names[..SHOWN_MAX].join(",")),
    }
}

/// Returns the members as a table.
pub(super) fn text(members: &[Member]) -> String {
    let rows = members.iter().map(|member| {
        let heard = match member.state {
            MemberState::Gone => "-".to_owned(),
            _ => format!("{:.1} s ago", Duration::from_millis(member.silent_ms).as_secs_f64()),
        };
        [
            member.spec.name.clone(),
            member.state.to_string(),
            member.since_ms.map_or("-".to_owned(), |since| duration(Duration::from_millis(since))),
            member.spec.host.clone(),
            servers(member),
            heard,
            member.why(),
        ]
    });
    console::table(["name", "state", "for", "host", "servers", "heartbeat", "reason"], rows)
}
