//! Measures calls between two processes of one machine over framed connections, compared with raw sockets that move the same bytes.
//!
//! The raw peer ([`gym_benches::raw`]) is the least work with which bytes can pass through a socket.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener as RawUnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::raw;
use gym_benches::report::{Aim, figure};
use gym_client::Transports;
use gym_client::transport::http::frames::{FRAMES_SCHEME, UNIX_SCHEME, UnixListener};
use gym_client::transport::http::http1::HttpListener;
use gym_client::transport::http::{FramesConfig, HttpConfig};
use gym_core::transport::{ConnectOptions, InProcess, Listener, handler_fn};
use gym_core::{CallContext, CancelToken, Channel, Endpoint, Handler, Message, Request, Response, Status};
use hdrhistogram::Histogram;
use tokio::time::Instant;

/// The argument that makes this program the answering process.
const SERVE: &str = "serve-frames";
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Twenty times the 2,700 calls per second that Ray's actors answer (`peers/ray`, on two cores).
const PIPELINED_MIN: f64 = 54_000.0;
/// Calls in flight in the pipelined figure.
const WINDOW: usize = 256;

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some(SERVE) {
        let folder = std::env::args().nth(2).context("the folder is missing")?;
        return serve(&PathBuf::from(folder));
    }
    let options = Options::of_arguments()?;
    println!("# load average {:.1}; medians of {} runs", measure::load_average(), options.rounds());
    let peer = Peer::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Spawned: `block_on` does not run its future on a worker.
    runtime.block_on(async { tokio::spawn(async move { bench(&options, &peer).await }).await? })
}

/// The answering process.
struct Peer {
    child: Child,
    folder: PathBuf,
    frames: [Endpoint; 2],
    raw_tcp: String,
}

impl Peer {
    fn start() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("gym-bench-frames-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg(SERVE)
            .arg(&folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let mut line = || lines.next().context("the answering process ended")?.context("unreadable");
        let (tcp, raw_tcp) = (line()?, line()?);
        let unix = format!("{UNIX_SCHEME}://{}", folder.join("frames").display());
        Ok(Self { child, frames: [Endpoint::parse(&tcp)?, Endpoint::parse(&unix)?], raw_tcp, folder })
    }

    fn raw(&self, scheme: &str) -> Result<Box<dyn Stream>> {
        if scheme == UNIX_SCHEME {
            return Ok(Box::new(UnixStream::connect(self.folder.join("raw"))?));
        }
        let stream = TcpStream::connect(&self.raw_tcp)?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if let Err(error) = self.child.wait().and_then(|_| std::fs::remove_dir_all(&self.folder)) {
            eprintln!("the answering process: {error}");
        }
    }
}

fn serve(folder: &std::path::Path) -> Result<()> {
    let raw = TcpListener::bind("127.0.0.1:0")?;
    let raw_address = raw.local_addr()?;
    std::thread::spawn(move || {
        for stream in raw.incoming().map_while(Result::ok) {
            std::thread::spawn(move || stream.set_nodelay(true).and_then(|()| raw::answer(stream)));
        }
    });
    let raw = RawUnixListener::bind(folder.join("raw"))?;
    std::thread::spawn(move || {
        for stream in raw.incoming().map_while(Result::ok) {
            std::thread::spawn(move || raw::answer(stream));
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let tcp = HttpListener::bind(([127, 0, 0, 1], 0).into(), HttpConfig::default())?;
        let unix = UnixListener::bind(folder.join("frames"), FramesConfig::default())?;
        let endpoint =
            tcp.endpoints().iter().find(|endpoint| endpoint.scheme() == FRAMES_SCHEME).context("no frames")?;
        println!("{endpoint}\n{raw_address}");
        // `/take` responds without the segments, all other routes with them.
        let handler: Arc<dyn Handler> = Arc::new(handler_fn(|request: Request| async move {
            let message = if request.route.path() == "/take" { Message::default() } else { request.message };
            Ok(Response::new(Status::OK, message))
        }));
        for listener in [Box::new(tcp) as Box<dyn Listener>, Box::new(unix)] {
            let drain = CancelToken::new();
            tokio::spawn(gym_core::transport::serve(listener, Arc::clone(&handler), drain, Duration::ZERO));
        }
        // Until the benchmark has ended in any way.
        tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
        Ok(())
    })
}

trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

async fn bench(options: &Options, peer: &Peer) -> Result<()> {
    let transports = Transports::from_features(InProcess::new());
    for endpoint in &peer.frames {
        let scheme = endpoint.scheme();
        let name = if scheme == UNIX_SCHEME { "unix" } else { "tcp" };
        let open = async || {
            transports
                .connect_ordered(&CallContext::default(), std::slice::from_ref(endpoint), &ConnectOptions::default())
                .await
        };
        let channel = open().await?;
        let p50_max = if scheme == UNIX_SCHEME { 30.0 } else { 60.0 };
        for (size, label) in [(0, "0"), (KIB, "1KiB"), (MIB, "1MiB"), (64 * MIB, "64MiB")] {
            let name = format!("{name}_call_{label}");
            if options.wants(&name) {
                let aim = (size == 0).then_some(Aim::AtMost(p50_max));
                latency(&name, options, &channel, peer.raw(scheme)?, size, aim).await?;
            }
        }
        if options.wants(&format!("{name}_pipelined")) {
            pipelined(&format!("{name}_pipelined"), options, &channel).await?;
        }
        if options.wants(&format!("{name}_1GiB")) {
            bandwidth(&format!("{name}_1GiB"), options, &channel, peer.raw(scheme)?).await?;
        }
    }
    Ok(())
}

fn request(route: &'static str, segment: Option<&Bytes>) -> Request {
    let mut context = CallContext::default();
    context.reply_bytes_max = 2 << 30;
    let mut request = Request::post(context, route, r#"{"method":"echo","args":{"step":17}}"#);
    request.message.segments.extend(segment.cloned());
    request
}

/// Measures round trips in sequence, with the same bytes in both directions.
async fn latency(
    name: &str,
    options: &Options,
    channel: &Channel,
    mut raw: Box<dyn Stream>,
    size: usize,
    aim: Option<Aim>,
) -> Result<()> {
    let segment = (size > 0).then(|| Bytes::from(vec![7; size]));
    let mut buffer = vec![7; size.max(64)];
    let small = 36;
    let (mut ours, mut peers) = ([vec![], vec![]], [vec![], vec![]]);
    for _ in 0..options.rounds() {
        let mut mine = Histogram::<u64>::new(3)?;
        let began = Instant::now();
        while began.elapsed() < options.seconds() / 2 || mine.len() < 5 {
            let at = Instant::now();
            let answer = channel.call(request("/echo", segment.as_ref())).await?;
            if answer.message.segments.first().map_or(0, Bytes::len) != size {
                bail!("{name}: the answer is of another size");
            }
            drop(answer);
            mine.record(u64::try_from(at.elapsed().as_nanos())?)?;
        }
        let mut theirs = Histogram::<u64>::new(3)?;
        let began = Instant::now();
        while began.elapsed() < options.seconds() / 2 || theirs.len() < 5 {
            let at = Instant::now();
            raw::call(raw.as_mut(), &mut buffer, size.max(small), size.max(small))?;
            theirs.record(u64::try_from(at.elapsed().as_nanos())?)?;
        }
        for (at, quantile) in [0.5, 0.99].into_iter().enumerate() {
            ours[at].push(mine.value_at_quantile(quantile) as f64 / 1e3);
            peers[at].push(theirs.value_at_quantile(quantile) as f64 / 1e3);
        }
    }
    figure(&format!("{name}_p50"), "us", &ours[0], &peers[0], aim);
    figure(&format!("{name}_p99"), "us", &ours[1], &peers[1], None);
    Ok(())
}

/// Measures small calls, with [`WINDOW`] of them always in flight.
async fn pipelined(name: &str, options: &Options, channel: &Channel) -> Result<()> {
    let mut rates = Vec::new();
    for _ in 0..options.rounds() {
        let began = Instant::now();
        let (mut replies, mut answered) = (std::collections::VecDeque::new(), 0_u32);
        while began.elapsed() < options.seconds() {
            while replies.len() < WINDOW {
                replies.push_back(channel.start(request("/echo", None)).await?);
            }
            // Half at a time, so that starts and responses occur in batches, as in a group.
            while replies.len() > WINDOW / 2 {
                replies.pop_front().context("there is one")?.await?;
                answered += 1;
            }
        }
        rates.push(f64::from(answered) / began.elapsed().as_secs_f64());
    }
    figure(name, "/s", &rates, &[], Some(Aim::AtLeast(PIPELINED_MIN)));
    Ok(())
}

/// Measures one large segment in one direction, with a small response.
async fn bandwidth(name: &str, options: &Options, channel: &Channel, mut raw: Box<dyn Stream>) -> Result<()> {
    let size = if options.quick { 256 * MIB } else { 1 << 30 };
    let segment = Bytes::from(vec![7; size]);
    let mut buffer = vec![7; size];
    let (mut ours, mut peers) = (vec![], vec![]);
    // The first round of each touches the receiver's memory for the others.
    for round in 0..=options.rounds() {
        let at = Instant::now();
        channel.call(request("/take", Some(&segment))).await?;
        let mine = at.elapsed();
        let at = Instant::now();
        raw::call(raw.as_mut(), &mut buffer, size, 1)?;
        if round > 0 {
            ours.push(mine.as_secs_f64() * 1e3);
            peers.push(at.elapsed().as_secs_f64() * 1e3);
        }
    }
    figure(&format!("{name}_time"), "ms", &ours, &peers, None);
    let shares: Vec<f64> = ours.iter().zip(&peers).map(|(ours, peer)| peer / ours).collect();
    figure(&format!("{name}_of_raw"), "", &shares, &[], Some(Aim::AtLeast(0.8)));
    let rates: Vec<f64> = ours.iter().map(|ms| size as f64 / ms / 1e6).collect();
    figure(&format!("{name}_rate"), "GB/s", &rates, &[], None);
    Ok(())
}
