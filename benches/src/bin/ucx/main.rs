//! Measures calls over UCX between two processes of one machine, compared with `ucx_perftest`, a raw socket, frames and HTTP.
//!
//! Three layers are measured, to show the cost of each: UCX itself (`ucx_perftest`), active messages between the progress threads
//! of two fabrics, and calls of a channel. Comparisons use equal conditions: a busy fabric with `ucx_perftest`, which also polls
//! busily. All of them send bulk data repeatedly from one registered buffer.

mod active_messages;
mod channel;
mod perftest;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::ray::Ray;
use gym_benches::report::{Aim, figure};
use gym_core::testing::figures::{Figures, RoundTrips};
use gym_transport_rdma::transport::FabricOptions;

const MIB: usize = 1 << 20;
/// The bulk sizes, the number of transfers for a figure, and the messages or calls in flight. The last number is small:
/// `ucx_perftest` receives into one buffer repeatedly. The SDK needs a separate buffer for each message that is arriving or not yet
/// released.
const BULK: [(&str, usize, usize, usize); 2] = [("1MiB", MIB, 2_000, 8), ("64MiB", 64 * MIB, 40, 2)];

/// The transport between two processes of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    SharedMemory,
    Tcp,
}

impl Way {
    const ALL: [Self; 2] = [Self::SharedMemory, Self::Tcp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shm",
            Self::Tcp => "tcp",
        }
    }

    /// Returns the transports that UCX can use.
    pub(crate) fn transports(self) -> &'static str {
        match self {
            Self::SharedMemory => "posix,cma,self",
            Self::Tcp => "tcp",
        }
    }

    pub(crate) fn device(self) -> Option<&'static str> {
        (self == Self::Tcp).then_some("lo")
    }

    pub(crate) fn fabric(self) -> FabricOptions {
        let mut options = FabricOptions::default();
        options.transports = Some(self.transports().to_owned());
        options.devices = self.device().map(str::to_owned);
        options
    }

    /// Returns the maximum ratio of a message's round trip to twice `ucx_perftest`'s latency. Over shared memory, that latency is
    /// less than the cost of a queue between two threads.
    fn message_factor_max(self) -> f64 {
        match self {
            Self::SharedMemory => 2.5,
            Self::Tcp => 1.2,
        }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let way = || {
        let name = arguments.get(1).map(String::as_str);
        Way::ALL.into_iter().find(|way| Some(way.name()) == name).context("which way?")
    };
    match arguments.first().map(String::as_str) {
        Some(active_messages::SERVE) => {
            return active_messages::serve(way()?, arguments.get(2).is_some_and(|word| word == "busy"));
        }
        Some(channel::SERVE) => return runtime()?.block_on(channel::serve(way()?)),
        _ => {}
    }
    let options = Options::of_arguments()?;
    let ray = options.peer.as_deref().map(|python| Ray::measure(python, options.quick)).transpose()?;
    println!("# load average {:.1}; medians of {} runs", measure::load_average(), options.rounds());
    for way in Way::ALL {
        let hybrid = message_figures(&options, way)?;
        runtime()?.block_on(call_figures(&options, way, ray.as_ref(), hybrid))?;
    }
    Ok(())
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Measures the figures of the SDK and of the peer alternately.
fn in_turn(
    options: &Options,
    mut ours: impl FnMut() -> Result<f64>,
    mut peer: impl FnMut() -> Result<f64>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds() {
        mine.push(ours()?);
        theirs.push(peer()?);
    }
    Ok((mine, theirs))
}

fn shares(ours: &[f64], peer: &[f64]) -> Vec<f64> {
    ours.iter().zip(peer).map(|(ours, peer)| ours / peer).collect()
}

/// Prints the figures of the progress threads. Returns the hybrid round trip if it was selected.
fn message_figures(options: &Options, way: Way) -> Result<Option<f64>> {
    let (name, trips) = (way.name(), if options.quick { 2_000 } else { 50_000 });
    let mut hybrid = None;
    if options.wants(&format!("{name}_parcel_busy")) {
        // One pair per round: while it exists, its threads leave no core for other threads.
        let (ours, peer) = in_turn(
            options,
            || Ok(micros(active_messages::Pair::start(way, true)?.round_trips(trips)?.p50)),
            || Ok(2.0 * perftest::latency(way, u32::try_from(trips)?)?.p50_us),
        )?;
        figure(&format!("{name}_parcel_busy_p50"), "us", &ours, &peer, None);
        let aim = Aim::AtMost(way.message_factor_max());
        figure(&format!("{name}_parcel_busy_of_perftest"), "", &shares(&ours, &peer), &[], Some(aim));
    }
    for (label, bytes, count, window) in BULK {
        let wanted = format!("{name}_parcel_{label}");
        if options.wants(&wanted) {
            let count = if options.quick { count / 10 } else { count };
            let (ours, peer) = in_turn(
                options,
                || {
                    let pair = active_messages::Pair::start(way, true)?;
                    Ok(pair.bandwidth(&pair.segment(bytes)?, count, window)? / 1e9)
                },
                || Ok(perftest::bandwidth(way, bytes, u32::try_from(count)?)?.bandwidth / 1e9),
            )?;
            figure(&wanted, "GB/s", &ours, &[], None);
            figure(&format!("{wanted}_of_perftest"), "", &shares(&ours, &peer), &[], Some(Aim::AtLeast(0.9)));
        }
    }
    if options.wants(&format!("{name}_parcel_hybrid")) || options.wants(&format!("{name}_call_adds")) {
        let pair = active_messages::Pair::start(way, false)?;
        let trips: Vec<RoundTrips> = (0..options.rounds()).map(|_| pair.round_trips(trips)).collect::<Result<_>>()?;
        let p50: Vec<f64> = trips.iter().map(|trips| micros(trips.p50)).collect();
        figure(&format!("{name}_parcel_hybrid_p50"), "us", &p50, &[], None);
        hybrid = Some(measure::median(&p50));
    }
    Ok(hybrid)
}

/// Prints the figures of calls.
async fn call_figures(options: &Options, way: Way, ray: Option<&Ray>, hybrid: Option<f64>) -> Result<()> {
    let (name, options) = (way.name(), options.clone());
    let peer = channel::Peer::start(way)?;
    let ray = ray.cloned();
    // Spawned: `block_on` does not run its future on a worker.
    tokio::spawn(async move {
        let figures = peer.over_ucx().await?;
        if options.wants(&format!("{name}_call")) {
            latency(&options, name, &peer, &figures, hybrid).await?;
        }
        for (label, bytes, count, window) in BULK {
            let wanted = format!("{name}_call_{label}");
            if options.wants(&wanted) {
                bulk(&options, way, &figures, &wanted, (bytes, count, window)).await?;
            }
        }
        if options.wants(&format!("{name}_idle")) {
            let lasting = if options.quick { Duration::from_secs(2) } else { Duration::from_secs(20) };
            let cpu = || measure::cpu_of(&[std::process::id(), peer.pid()]) / 2;
            let percent = [figures.idle(lasting, cpu).await? * 100.0];
            figure(&format!("{name}_idle"), "%", &percent, &[], Some(Aim::AtMost(0.5)));
            let percent = [figures.waiting(lasting, cpu).await? * 100.0];
            figure(&format!("{name}_idle_one_call_waiting"), "%", &percent, &[], Some(Aim::AtMost(0.5)));
        }
        if way == Way::SharedMemory && options.wants("shm_group_call") {
            group(&options, &peer, ray.as_ref()).await?;
        }
        drop(figures);
        Ok(())
    })
    .await?
}

async fn latency(
    options: &Options,
    name: &str,
    peer: &channel::Peer,
    figures: &Figures,
    hybrid: Option<f64>,
) -> Result<()> {
    let (http, frames) = (peer.over_http().await?, peer.over_frames().await?);
    let lasting = options.seconds() / 2;
    let (mut ours, mut p99, mut over_http, mut over_frames, mut raw) = (vec![], vec![], vec![], vec![], vec![]);
    for _ in 0..options.rounds() {
        let trips = figures.round_trips(None, lasting).await?;
        ours.push(micros(trips.p50));
        p99.push(micros(trips.p99));
        over_http.push(micros(http.round_trips(None, lasting).await?.p50));
        over_frames.push(micros(frames.round_trips(None, lasting).await?.p50));
        raw.push(micros(peer.raw_round_trips(lasting)?.p50));
    }
    figure(&format!("{name}_call_p50"), "us", &ours, &over_http, None);
    figure(&format!("{name}_call_p99"), "us", &p99, &[], None);
    figure(&format!("{name}_call_p50_of_frames"), "us", &ours, &over_frames, None);
    figure(&format!("{name}_call_p50_of_raw_tcp"), "us", &ours, &raw, None);
    if let Some(hybrid) = hybrid {
        let adds: Vec<f64> = ours.iter().map(|p50| p50 - hybrid).collect();
        figure(&format!("{name}_call_adds"), "us", &adds, &[], Some(Aim::AtMost(15.0)));
    }
    let mut rates = Vec::new();
    for _ in 0..options.rounds() {
        rates.push(figures.rate(256, lasting).await?);
    }
    figure(&format!("{name}_call_rate_256"), "/s", &rates, &[], None);
    Ok(())
}

async fn bulk(
    options: &Options,
    way: Way,
    figures: &Figures,
    wanted: &str,
    (bytes, count, window): (usize, usize, usize),
) -> Result<()> {
    let segment = Bytes::from(vec![7; bytes]);
    let (mut ours, mut peer) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds() {
        ours.push(figures.bandwidth(&segment, window, options.seconds()).await? / 1e9);
        let count = if options.quick { count / 10 } else { count };
        peer.push(perftest::bandwidth(way, bytes, u32::try_from(count)?)?.bandwidth / 1e9);
    }
    figure(wanted, "GB/s", &ours, &[], None);
    figure(&format!("{wanted}_of_perftest"), "", &shares(&ours, &peer), &[], Some(Aim::AtLeast(0.9)));
    Ok(())
}

/// Measures a typed call to a worker group.
async fn group(options: &Options, peer: &channel::Peer, ray: Option<&Ray>) -> Result<()> {
    let (mut p50, mut p99, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds() {
        let (trips, rate) = peer.group(options.seconds() / 2).await?;
        if trips.calls == 0 {
            bail!("no call of the group was answered");
        }
        p50.push(micros(trips.p50));
        p99.push(micros(trips.p99));
        rates.push(rate);
    }
    let of = |of: fn(&Ray) -> f64| vec![ray.map(of); p50.len()].into_iter().flatten().collect::<Vec<f64>>();
    figure("shm_group_call_p50", "us", &p50, &of(|ray| ray.call.p50_us), Some(Aim::AtMost(30.0)));
    figure("shm_group_call_p99", "us", &p99, &of(|ray| ray.call.p99_us), None);
    // Twenty times the 2,700 calls per second that Ray's actors answer on two cores, if Ray is not measured itself.
    let least = 20.0 * ray.map_or(2_700.0, |ray| ray.pipelined_1_per_s);
    let peers = of(|ray| ray.pipelined_1_per_s);
    figure("shm_group_call_rate", "/s", &rates, &peers, Some(Aim::AtLeast(least)));
    Ok(())
}
