//! Measures one hop at a time: the cost of a request for its server, the latency, and the requests per second.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use gym_benches::load::{Load, post};
use gym_benches::options::Options;
use gym_benches::peer::Peer;
use gym_benches::report::{Aim, figure};
use gym_benches::stack::{INSTANCES, ModelAt, Scratch, Served, free_port, start_mock, write_config};
use gym_benches::{bodies, measure, role};

fn main() -> Result<()> {
    role::main(bench)
}

/// One request to one kind of server.
struct Hop {
    name: &'static str,
    instance: &'static str,
    kind: &'static str,
    path: &'static str,
    body: Vec<u8>,
    rate_min: Option<f64>,
    p50_us_max: Option<f64>,
}

fn hops() -> Vec<Hop> {
    let [model, resources, agent, environment] = INSTANCES;
    let hop =
        |name, instance, kind, path, body| Hop { name, instance, kind, path, body, rate_min: None, p50_us_max: None };
    let of_resources = |name, path, body| hop(name, resources, "resources_servers", path, body);
    let rate = |rate, hop| Hop { rate_min: Some(rate), ..hop };
    vec![
        rate(60_000.0, of_resources("verify_small", "/verify", bodies::verify(None))),
        rate(8_000.0, of_resources("verify_175k", "/verify", bodies::verify(Some((8_192, 4_096))))),
        rate(1_000.0, of_resources("verify_1.16M", "/verify", bodies::verify(Some((32_768, 32_768))))),
        of_resources("tool_call", "/get_weather", bodies::tool()),
        of_resources("seed_session", "/seed_session", bodies::row()),
        hop("model_responses", model, "responses_api_models", "/v1/responses", bodies::responses()),
        Hop { p50_us_max: Some(300.0), ..hop("agent_run", agent, "responses_api_agents", "/run", bodies::row()) },
        hop("environment_run", environment, "environment_servers", "/run", bodies::row()),
    ]
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("hops")?;
    let (mock, upstream) = start_mock(0).await?;
    let head_port = free_port()?;
    let config = write_config(&scratch, "config.yaml", ModelAt::Mock(upstream), head_port)?;
    let served = Served::start(&config, head_port, true).await?;
    let peer = match &options.peer {
        Some(python) => Some(Peer::start(python, &scratch, upstream).await?),
        None => None,
    };
    println!("# load average {:.1}; medians of {} runs", measure::load_average(), options.rounds());
    for hop in hops().into_iter().filter(|hop| options.wants(hop.name)) {
        for connections in [1, 32, 1_000] {
            let ours = (served.address(hop.instance)?, served.pid(hop.instance));
            let peer = peer.as_ref().map(|peer| peer.server(hop.kind)).transpose()?;
            measure_hop(&hop, connections, ours, peer, &options).await?;
        }
    }
    if let Some(peer) = peer {
        peer.stop().await?;
    }
    served.stop().await?;
    mock.end(Duration::from_secs(5)).await
}

#[derive(Default)]
struct Figures {
    cpu_us: Vec<f64>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    rate: Vec<f64>,
    errors: u64,
}

async fn measure_hop(
    hop: &Hop,
    connections: usize,
    ours: (SocketAddr, u32),
    peer: Option<(SocketAddr, u32)>,
    options: &Options,
) -> Result<()> {
    let load = |address| Load {
        address,
        request: post(hop.path, &hop.body),
        connections,
        count_max: u64::MAX,
        time_max: options.seconds(),
    };
    load(ours.0).check().await?;
    let (mut mine, mut theirs) = (Figures::default(), Figures::default());
    for _ in 0..options.rounds() {
        once(&load(ours.0), ours.1, &mut mine).await?;
        if let Some((address, pid)) = peer {
            once(&load(address), pid, &mut theirs).await?;
        }
    }
    let name = format!("{}_c{connections}", hop.name);
    figure(&format!("{name}_cpu"), "us", &mine.cpu_us, &theirs.cpu_us, None);
    let p50_aim = hop.p50_us_max.filter(|_| connections == 1).map(Aim::AtMost);
    figure(&format!("{name}_p50"), "us", &mine.p50_us, &theirs.p50_us, p50_aim);
    figure(&format!("{name}_p99"), "us", &mine.p99_us, &theirs.p99_us, None);
    let rate_aim = hop.rate_min.filter(|_| connections == 32).map(Aim::AtLeast);
    figure(&format!("{name}_rate"), "/s", &mine.rate, &theirs.rate, rate_aim);
    if mine.errors + theirs.errors > 0 {
        println!("{name}_errors ours={} peer={}", mine.errors, theirs.errors);
    }
    Ok(())
}

async fn once(load: &Load, pid: u32, figures: &mut Figures) -> Result<()> {
    let before = measure::cpu(pid);
    let done = load.run().await?;
    let cpu = measure::cpu(pid).saturating_sub(before);
    figures.cpu_us.push(cpu.as_secs_f64() * 1e6 / done.answered.max(1) as f64);
    figures.p50_us.push(done.quantile_us(0.5));
    figures.p99_us.push(done.quantile_us(0.99));
    figures.rate.push(done.rate());
    figures.errors += done.errors;
    Ok(())
}
