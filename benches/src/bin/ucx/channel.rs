//! Channels to a process that serves the same handler over UCX, frames and HTTP; bytes over a raw socket; and a worker group.

use std::io::{BufRead as _, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gym_benches::worker::{Bencher, Ping};
use gym_client::Transports;
use gym_client::transport::http::HttpConfig;
use gym_client::transport::http::http1::{HttpConnector, HttpListener, SCHEME as HTTP_SCHEME};
use gym_core::base::watch;
use gym_core::testing::figures::{Figures, RoundTrips, answering};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Listener, handler_fn};
use gym_core::{CallContext, CancelToken, Endpoint, Handler, Incarnation, Request};
use gym_group::{
    GroupView, HostOptions, RankLayout, RankState, RankView, WorkerEnv, WorkerGroup, WorkerGroupExt, WorkerHost,
};
use gym_transport_rdma::transport::{UcxConnector, UcxListener};
use gym_transport_rdma::{Ucx, UcxConfig};
use tokio::time::Instant;

use crate::Way;

/// The argument that makes this program the answering process.
pub(crate) const SERVE: &str = "serve-calls";
const WAIT_TIMEOUT: Duration = Duration::from_secs(600);

fn ucx(way: Way, listen: bool) -> Ucx {
    let mut fabric = way.fabric();
    fabric.listen = (listen && way == Way::Tcp).then(|| ([127, 0, 0, 1], 0).into());
    let mut config = UcxConfig::default();
    config.fabric = fabric;
    config.limits = ConnectionLimits::default();
    Ucx::new(config)
}

/// Runs the answering process.
pub(crate) async fn serve(way: Way) -> Result<()> {
    let raw = TcpListener::bind("127.0.0.1:0")?;
    let raw_address = raw.local_addr()?;
    std::thread::spawn(move || {
        for stream in raw.incoming().map_while(Result::ok) {
            // The figure closes this connection when it ends.
            let _ = answer_raw(&stream);
        }
    });
    let host = WorkerHost::start::<Bencher>(WorkerEnv::new("bench", 0, 1), (), &HostOptions::default()).await?;
    let figures = answering();
    let served: Arc<dyn Handler> = Arc::new(handler_fn(move |request: Request| {
        if request.route.path().starts_with("/figures/") { figures.handle(request) } else { host.handle(request) }
    }));
    let http = HttpListener::bind(([127, 0, 0, 1], 0).into(), HttpConfig::default())?;
    let bootstraps: Vec<Endpoint> =
        http.endpoints().iter().filter(|endpoint| endpoint.scheme() == HTTP_SCHEME).cloned().collect();
    let fabric = UcxListener::open(ucx(way, true), &bootstraps).await?;
    println!("{} {} {raw_address}", bootstraps[0], fabric.endpoints()[0]);
    let front: Arc<dyn Handler> = Arc::new(fabric.bootstrap(Arc::clone(&served)));
    let drain = CancelToken::new();
    tokio::spawn(gym_core::transport::serve(Box::new(http), front, drain.clone(), Duration::ZERO));
    tokio::spawn(gym_core::transport::serve(Box::new(fabric), served, drain, Duration::ZERO));
    // Until the benchmark has ended in any way.
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}

/// Reads without sleeping, like a busy progress thread.
fn read_busily(mut stream: &TcpStream, bytes: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn answer_raw(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let mut bytes = [0; 64];
    loop {
        read_busily(stream, &mut bytes)?;
        stream.write_all(&bytes)?;
    }
}

/// A group of one rank, which is reached over a channel.
#[derive(Debug)]
struct Alone {
    name: Arc<str>,
    layout: RankLayout,
    view: watch::Sender<Arc<GroupView>>,
}

impl WorkerGroup for Alone {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn layout(&self) -> &RankLayout {
        &self.layout
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.view.subscribe()
    }
}

impl WorkerGroupExt for Alone {}

/// The answering process and its endpoints.
pub(crate) struct Peer {
    child: Child,
    way: Way,
    ucx: Ucx,
    http: Endpoint,
    fabric: Endpoint,
    raw: String,
}

impl Peer {
    pub(crate) fn start(way: Way) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([SERVE, way.name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let mut word = || words.next().context("the answering process ended");
        let (http, fabric, raw) = (Endpoint::parse(word()?)?, Endpoint::parse(word()?)?, word()?.to_owned());
        Ok(Self { child, way, ucx: ucx(way, false), http, fabric, raw })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Measures over UCX, and checks that UCX negotiated the requested transport.
    pub(crate) async fn over_ucx(&self) -> Result<Figures> {
        let level = if self.way == Way::Tcp { gym_client::transport::UCX_TCP } else { gym_client::transport::SHM };
        let bootstrap = HttpConnector::new(HttpConfig::default());
        let connector = UcxConnector::new(Arc::new(bootstrap), self.ucx.clone());
        let figures = Figures::of(&connector, &self.fabric).await?;
        let path = figures.channel().path();
        ensure!(path.transport == Some(level), "{path:?} instead of {level}");
        println!("# calls over {}", path.lanes);
        Ok(figures)
    }

    /// Measures over HTTP, served by hyper.
    pub(crate) async fn over_http(&self) -> Result<Figures> {
        Ok(Figures::of(&HttpConnector::new(HttpConfig::default()), &self.http).await?)
    }

    /// Measures over frames on the same port.
    pub(crate) async fn over_frames(&self) -> Result<Figures> {
        let endpoint = Endpoint::parse(&format!("http+frames://{}", self.http.address()))?;
        let transports = Transports::from_features(gym_core::transport::InProcess::new());
        let (context, options) = (CallContext::within(WAIT_TIMEOUT), ConnectOptions::default());
        Ok(Figures::over(transports.connect_ordered(&context, &[endpoint], &options).await?))
    }

    /// Measures round trips of 64 bytes over a raw socket that both ends poll busily.
    pub(crate) fn raw_round_trips(&self, lasting: Duration) -> Result<RoundTrips> {
        let mut stream = TcpStream::connect(&self.raw)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let (began, mut times, mut bytes) = (Instant::now(), Vec::new(), [7; 64]);
        while began.elapsed() < lasting {
            let at = Instant::now();
            stream.write_all(&bytes)?;
            read_busily(&stream, &mut bytes)?;
            times.push(at.elapsed());
        }
        Ok(RoundTrips::of(times))
    }

    /// Measures typed calls to a worker group over the channel: the round trips of calls in sequence, and the calls per second with
    /// 1,000 in flight.
    pub(crate) async fn group(&self, lasting: Duration) -> Result<(RoundTrips, f64)> {
        let channel = self.over_ucx().await?.channel().clone();
        let member = RankView::starting(0, Incarnation(1)).in_state(RankState::Healthy).reached_over(channel);
        let view = watch::Sender::new(Arc::new(GroupView::new(1, vec![member])));
        let group = Alone { name: "bench".into(), layout: RankLayout::line(1)?, view };
        let context = CallContext::within(WAIT_TIMEOUT);
        let (began, mut times) = (Instant::now(), Vec::new());
        while began.elapsed() < lasting {
            let at = Instant::now();
            ensure!(group.call(Ping, 7).context(&context).await?.into_one()?.value == 7, "what is sent comes back");
            times.push(at.elapsed());
        }
        let (began, mut calls, mut pending) = (Instant::now(), 0, Vec::new());
        while began.elapsed() < lasting {
            for number in 0..1_000 {
                pending.push(group.call(Ping, number).context(&context).start().await?);
            }
            for (number, call) in pending.drain(..).enumerate() {
                ensure!(call.await?.into_one()?.value == number as u64, "each call has its own answer");
                calls += 1;
            }
        }
        Ok((RoundTrips::of(times), f64::from(calls) / began.elapsed().as_secs_f64()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if let Err(error) = self.child.wait() {
            eprintln!("the answering process: {error}");
        }
    }
}
