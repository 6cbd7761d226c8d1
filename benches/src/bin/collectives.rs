//! Measures all_reduce of 32-bit floats between ranks in processes of this machine: in shared memory, over Unix sockets and over TCP, beside a ring over bare
//! sockets in the same processes, beside Gloo (`--torch PYTHON`), and beside the sum of the same arrays in one process.
//!
//! The contenders take turns in every round. `_cpu` is the CPU time of all ranks for one operation, which decides: with few cores, wall time is that of the
//! rank that another program has pushed aside. `_wall` is the time of the slowest rank after a barrier, and `_p50` of a tight loop. `_pinned`: every thread of
//! rank r runs on core r.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::BytesMut;
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::report::{Peer, compared};
use gym_client::Transports;
use gym_core::{Error, worker};
use gym_group::collective::reduction::{Reduction, order_of, slice_of};
use gym_group::collective::{Buffer, Collective, CommunicatorExt as _, Memory, Peers, ReduceOp};
use gym_group::placement::CommunicationBackend;
use gym_group::prelude::*;
use gym_group::{DType, Group, GroupOptions, LaunchSpec, Local, RankPlace, WorkerKind, Workers};
use parking_lot::Mutex;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

const LARGE: usize = 64 << 20;
const SMALL: usize = 64;
/// Chunks of the bare ring.
const RAW_CHUNK: usize = 64 << 10;

fn main() -> ExitCode {
    // First, because ranks run this program too.
    workers().enter();
    let run = || -> Result<()> {
        let options = Options::of_arguments()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(async { tokio::spawn(bench(options)).await? })
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn workers() -> Workers {
    Workers::new().with("reducer", WorkerKind::of::<Reducer>())
}

// ---- the ranks ----

/// The times of some operations at one rank, in seconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Times {
    wall: Vec<f64>,
    cpu: f64,
}

/// Sums with its peers, or over bare sockets.
struct Reducer {
    rank: usize,
    world_size: usize,
    peers: Peers,
    raw: Arc<Mutex<Option<RawRing>>>,
}

worker! {
    impl Worker for Reducer as reducer {
        fn start(env: WorkerEnv, (): ()) -> gym_core::Result<Self> {
            let (rank, world_size) = (env.rank as usize, env.world_size as usize);
            Ok(Self { rank, world_size, peers: env.peers, raw: Arc::default() })
        }
        /// Keeps all threads on one core.
        exclusive async fn pin(&mut self, _: &CallContext, _: Payload<()>) -> gym_core::Result<Payload<()>> {
            let mut core = CpuSet::new();
            core.set(self.rank);
            let pinned = || -> Result<()> {
                for thread in std::fs::read_dir("/proc/self/task")? {
                    let id = thread?.file_name().to_string_lossy().parse()?;
                    sched_setaffinity(Pid::from_raw(id), &core)?;
                }
                Ok(())
            };
            pinned().map_err(|error| Error::internal(format!("cannot run on core {}: {error:#}", self.rank)))?;
            Ok(().into())
        }
        /// Sums this many bytes, this often.
        exclusive async fn reduce(&mut self, cx: &CallContext, call: Payload<(usize, usize)>) -> gym_core::Result<Payload<Times>> {
            let ((bytes, count), data) = (call.value, self.peers.all(cx).await?);
            let sum = Collective::AllReduce(ReduceOp::Sum);
            let moved = data.start(cx, sum, Buffer::host(DType::F32, numbers(bytes, self.rank))).await;
            moved.result?;
            check(moved.buffer.host_bytes().unwrap_or_default(), self.world_size)?;
            // The same memory, as the peers have: fresh memory has the kernel clear each page.
            let mut buffer = moved.buffer;
            buffer.host_bytes_mut().unwrap_or_default().fill(0);
            let (mut times, used) = (Times::default(), cpu());
            for _ in 0..count {
                if bytes > 1 << 16 {
                    data.barrier(cx).await?;
                }
                let began = Instant::now();
                let moved = data.start(cx, sum, buffer).await;
                times.wall.push(began.elapsed().as_secs_f64());
                moved.result?;
                buffer = moved.buffer;
            }
            data.barrier(cx).await?;
            times.cpu = cpu() - used;
            Ok(times.into())
        }
        /// The same with a tensor that lives in memory that the ranks share.
        exclusive async fn reduce_shared(&mut self, cx: &CallContext, call: Payload<(usize, usize)>) -> gym_core::Result<Payload<Times>> {
            let ((bytes, count), data) = (call.value, self.peers.all(cx).await?);
            let mut buffer = data.allocate(DType::F32, bytes / 4);
            if !matches!(buffer.memory, Memory::Shared(_)) {
                return Err(Error::internal("the ranks share no memory for tensors"));
            }
            let place = buffer.host_bytes_mut().unwrap_or_default();
            place.copy_from_slice(&numbers(bytes, self.rank));
            let sum = Collective::AllReduce(ReduceOp::Sum);
            let moved = data.start(cx, sum, buffer).await;
            moved.result?;
            check(moved.buffer.host_bytes().unwrap_or_default(), self.world_size)?;
            buffer = moved.buffer;
            buffer.host_bytes_mut().unwrap_or_default().fill(0);
            let (mut times, used) = (Times::default(), cpu());
            for _ in 0..count {
                data.barrier(cx).await?;
                let began = Instant::now();
                let moved = data.start(cx, sum, buffer).await;
                times.wall.push(began.elapsed().as_secs_f64());
                moved.result?;
                buffer = moved.buffer;
            }
            data.barrier(cx).await?;
            times.cpu = cpu() - used;
            Ok(times.into())
        }
        /// The same over a ring of bare sockets in this folder.
        exclusive async fn raw(&mut self, _: &CallContext, call: Payload<(String, bool, usize, usize)>) -> gym_core::Result<Payload<Times>> {
            let (raw, rank, world_size) = (Arc::clone(&self.raw), self.rank, self.world_size);
            let work = move || -> Result<Times> {
                let (folder, tcp, bytes, count) = call.value;
                let mut raw = raw.lock();
                let ring = match &mut *raw {
                    Some(ring) => ring,
                    none => none.insert(RawRing::open(Path::new(&folder), rank, world_size, tcp)?),
                };
                let mut memory = numbers(bytes, rank);
                ring.all_reduce(&mut memory)?;
                check(&memory, world_size)?;
                memory.fill(0);
                let (mut times, mut one, used) = (Times::default(), [0; 64], cpu());
                for _ in 0..count {
                    if bytes > 1 << 16 {
                        ring.all_reduce(&mut one)?;
                    }
                    let began = Instant::now();
                    ring.all_reduce(&mut memory)?;
                    times.wall.push(began.elapsed().as_secs_f64());
                }
                ring.all_reduce(&mut one)?;
                times.cpu = cpu() - used;
                Ok(times)
            };
            let times = tokio::task::spawn_blocking(work).await.map_err(|error| Error::internal("the ring panicked").caused_by(error))?;
            Ok(times.map_err(|error| Error::internal(format!("{error:#}")))?.into())
        }
    }
}

/// Returns the CPU time of this process in seconds.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Numbers whose sum is exact.
fn numbers(bytes: usize, rank: usize) -> BytesMut {
    (0..bytes / 4).flat_map(|at| ((at % 13 + rank) as f32).to_le_bytes()).collect()
}

fn check(memory: &[u8], world_size: usize) -> gym_core::Result<()> {
    let ranks = world_size * (world_size - 1) / 2;
    let wrong = memory
        .as_chunks()
        .0
        .iter()
        .enumerate()
        .find(|(at, sum)| f32::from_le_bytes(**sum) != (at % 13 * world_size + ranks) as f32);
    wrong.map_or(Ok(()), |(at, _)| Err(Error::internal(format!("element {at} has a wrong sum"))))
}

// ---- a ring over bare sockets ----

trait Socket: Read + Write + Send {}
impl<S: Read + Write + Send> Socket for S {}

/// A ring over blocking sockets, one thread a rank: what no library over the same sockets can beat by much.
struct RawRing {
    rank: usize,
    world_size: usize,
    next: Box<dyn Socket>,
    previous: Box<dyn Socket>,
    received: Vec<u8>,
}

impl RawRing {
    fn open(folder: &Path, rank: usize, world_size: usize, tcp: bool) -> Result<Self> {
        let after = (rank + 1) % world_size;
        let until = Instant::now() + Duration::from_secs(30);
        let retry = |error: std::io::Error| -> Result<()> {
            ensure!(Instant::now() < until, "rank {after} does not listen: {error}");
            std::thread::park_timeout(Duration::from_millis(2));
            Ok(())
        };
        let (next, previous): (Box<dyn Socket>, Box<dyn Socket>) = if tcp {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let (place, made) = (folder.join(format!("{rank}.tcp")), folder.join(format!("{rank}.made")));
            std::fs::write(&made, listener.local_addr()?.to_string())?;
            std::fs::rename(&made, &place)?;
            let address = loop {
                match std::fs::read_to_string(folder.join(format!("{after}.tcp"))) {
                    Ok(address) => break address,
                    Err(error) => retry(error)?,
                }
            };
            let (next, previous) = (TcpStream::connect(address)?, listener.accept()?.0);
            next.set_nodelay(true)?;
            previous.set_nodelay(true)?;
            (Box::new(next), Box::new(previous))
        } else {
            let listener = UnixListener::bind(folder.join(format!("{rank}.unix")))?;
            let next = loop {
                match UnixStream::connect(folder.join(format!("{after}.unix"))) {
                    Ok(next) => break next,
                    Err(error) => retry(error)?,
                }
            };
            rustix::net::sockopt::set_socket_send_buffer_size(&next, 4 << 20)?;
            (Box::new(next), Box::new(listener.accept()?.0))
        };
        Ok(Self { rank, world_size, next, previous, received: vec![0; RAW_CHUNK] })
    }

    /// All steps of one chunk of every slice before the next.
    fn all_reduce(&mut self, memory: &mut [u8]) -> Result<()> {
        let (world_size, elements) = (self.world_size, memory.len() / 4);
        let back = |steps: usize| (self.rank + 2 * world_size - steps) % world_size;
        let longest =
            (0..world_size).map(|slice| slice_of(elements, world_size, slice).len()).max().unwrap_or_default();
        for first in (0..longest).step_by(RAW_CHUNK / 4) {
            let bytes = |slice: usize| {
                let slice = slice_of(elements, world_size, slice);
                let start = (slice.start + first).min(slice.end);
                start * 4..(start + RAW_CHUNK / 4).min(slice.end) * 4
            };
            for step in 0..2 * world_size - 2 {
                let adds = step < world_size - 1;
                let sent = if adds { back(1 + step) } else { back(step + 1 - world_size) };
                let (out, place) = (bytes(sent), bytes((sent + world_size - 1) % world_size));
                self.next.write_all(&memory[out])?;
                let place = &mut memory[place];
                if adds {
                    let received = &mut self.received[..place.len()];
                    self.previous.read_exact(received)?;
                    for (sum, value) in place.as_chunks_mut().0.iter_mut().zip(received.as_chunks().0) {
                        *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*value)).to_le_bytes();
                    }
                } else {
                    self.previous.read_exact(place)?;
                }
            }
        }
        Ok(())
    }
}

// ---- Gloo ----

/// The ranks of Gloo, which wait for commands.
struct Gloo(Vec<(Child, ChildStdin, BufReader<ChildStdout>)>, String);

impl Gloo {
    fn start(python: &Path, world_size: u32) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut ranks = Vec::new();
        for rank in 0..world_size {
            let mut command = Command::new(python);
            command.args([
                "-c",
                include_str!("../gloo.py"),
                &rank.to_string(),
                &world_size.to_string(),
                &port.to_string(),
            ]);
            command.env("OMP_NUM_THREADS", "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut child = command.spawn().with_context(|| format!("cannot start {}", python.display()))?;
            let (input, output) = (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
            ranks.push((child, input, BufReader::new(output)));
        }
        let mut version = String::new();
        for (.., output) in &mut ranks {
            version.clear();
            output.read_line(&mut version)?;
        }
        let said: serde_json::Value = serde_json::from_str(&version)
            .context("Gloo did not start: --torch needs a Python with torch and numpy")?;
        Ok(Self(ranks, said["torch"].as_str().unwrap_or_default().to_owned()))
    }

    /// Keeps all threads of each rank on one core.
    fn pin(&mut self) -> Result<()> {
        self.all_reduce(SMALL, 1)?;
        for (rank, (child, ..)) in self.0.iter().enumerate() {
            let mut core = CpuSet::new();
            core.set(rank);
            for thread in std::fs::read_dir(format!("/proc/{}/task", child.id()))? {
                sched_setaffinity(Pid::from_raw(thread?.file_name().to_string_lossy().parse()?), &core)?;
            }
        }
        Ok(())
    }

    fn all_reduce(&mut self, bytes: usize, count: usize) -> Result<Vec<Times>> {
        for (_, input, _) in &mut self.0 {
            writeln!(input, "{bytes} {count}")?;
        }
        let read = |(.., output): &mut (Child, ChildStdin, BufReader<ChildStdout>)| {
            let mut line = String::new();
            output.read_line(&mut line)?;
            serde_json::from_str(&line).context("a rank of Gloo has ended")
        };
        self.0.iter_mut().map(read).collect()
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        for (child, ..) in &mut self.0 {
            drop((child.kill(), child.wait()));
        }
    }
}

// ---- the figures ----

async fn group(world_size: u32, way: Way) -> Result<Group> {
    let places = (0..world_size).map(|rank| RankPlace::on_one_node(rank, world_size)).collect();
    let mut spec = LaunchSpec::new("bench", "reducer", serde_json::value::to_raw_value(&())?, places);
    spec.collectives.share_memory = matches!(way, Way::Private | Way::Shared);
    spec.collectives.shared_bytes = if matches!(way, Way::Shared) { LARGE } else { 0 };
    if matches!(way, Way::Tcp) {
        spec.collectives.backend = CommunicationBackend::Tcp;
    }
    let cx = CallContext::within(Duration::from_secs(60));
    Ok(Group::start(&cx, &Local::new(workers()), spec, GroupOptions::new(Transports::standard())).await?)
}

/// How the ranks of a group meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Private tensors, through shared memory.
    Private,
    /// Tensors in shared memory.
    Shared,
    Unix,
    Tcp,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Private => "shm",
            Self::Shared => "shm_tensors",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }
}

/// The ranks that meet in one way, and what they took.
struct Contender {
    way: Way,
    group: Group,
    folder: PathBuf,
    ours: Rounds,
    /// A ring over bare sockets of the same kind, in the same processes.
    raw: Rounds,
}

/// CPU time of all ranks for one operation, and the wall time: of the slowest rank, or of rank 0 in a tight loop. In milliseconds.
fn costs(times: &[Times], tight: bool) -> (f64, f64) {
    let count = times.first().map_or(0, |times| times.wall.len());
    let cpu: f64 = times.iter().map(|times| times.cpu).sum::<f64>() / count as f64 * 1e3;
    let slowest = |at: usize| times.iter().map(|times| times.wall[at]).fold(0.0, f64::max) * 1e3;
    let wall: Vec<f64> = (0..count).map(|at| if tight { times[0].wall[at] * 1e3 } else { slowest(at) }).collect();
    (cpu, measure::median(&wall))
}

#[derive(Default)]
struct Rounds {
    cpu: Vec<f64>,
    wall: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, times: &[Times], tight: bool) {
        let (cpu, wall) = costs(times, tight);
        self.cpu.push(cpu);
        self.wall.push(wall);
    }
}

async fn bench(options: Options) -> Result<()> {
    if !options.json {
        println!("# load average {:.1}; medians of {} rounds", measure::load_average(), options.rounds());
    }
    let cases = [
        ("all_reduce_64MiB_4", 4, LARGE, 3),
        ("all_reduce_64B_2", 2, SMALL, 2_000),
        ("all_reduce_64B_2_pinned", 2, SMALL, 2_000),
    ];
    for (name, world_size, bytes, count) in cases {
        if options.wants(name) {
            one_size(&options, name, world_size, bytes, if options.quick { 1 } else { count }).await?;
        }
    }
    Ok(())
}

async fn one_size(options: &Options, name: &str, world_size: u32, bytes: usize, count: usize) -> Result<()> {
    let (tight, pinned) = (bytes <= 1 << 16, name.ends_with("_pinned"));
    let deadline = Duration::from_secs(120);
    let mut gloo = options.torch.as_deref().map(|python| Gloo::start(python, world_size)).transpose()?;
    if let (true, Some(gloo)) = (pinned, &mut gloo) {
        gloo.pin()?;
    }
    let mut contenders = Vec::new();
    for way in [Way::Private, Way::Shared, Way::Unix, Way::Tcp] {
        let selected = options.wants(&format!("{name}_{}", way.name())) || options.wants(name);
        if selected && !(tight && way == Way::Shared) {
            let (group, folder) = (group(world_size, way).await?, temporary(&format!("{name}-{}", way.name()))?);
            if pinned {
                // One operation, so that every thread has started.
                group.call(reducer::reduce, (bytes, 1)).deadline(deadline).await?;
                group.call(reducer::pin, ()).deadline(deadline).await?;
            }
            contenders.push(Contender { way, group, folder, ours: Rounds::default(), raw: Rounds::default() });
        }
    }
    let (mut of_gloo, mut sums) = (Rounds::default(), Vec::new());
    for _ in 0..options.rounds() {
        for Contender { way, group, folder, ours, raw } in &mut contenders {
            let times = match way {
                Way::Shared => group.call(reducer::reduce_shared, (bytes, count)).deadline(deadline).await?,
                _ => group.call(reducer::reduce, (bytes, count)).deadline(deadline).await?,
            };
            ours.add(&times.into_values(), tight);
            if matches!(way, Way::Unix | Way::Tcp) {
                let arguments = (folder.to_string_lossy().into_owned(), *way == Way::Tcp, bytes, count);
                raw.add(&group.call(reducer::raw, arguments).deadline(deadline).await?.into_values(), tight);
            }
        }
        if let Some(gloo) = &mut gloo {
            of_gloo.add(&gloo.all_reduce(bytes, count)?, tight);
        }
        if !tight {
            sums.push(sum_in_one_process(world_size as usize, bytes)?);
        }
    }
    let version = gloo.as_ref().map(|gloo| format!("gloo of torch {}", gloo.1)).unwrap_or_default();
    let wall = if tight { "p50" } else { "wall" };
    for Contender { way, group, folder, ours, raw } in contenders {
        let figure = |what: &str| format!("{name}_{}_{what}", way.name());
        if !raw.cpu.is_empty() {
            let peer = |values| Peer { name: "a ring over bare sockets", values };
            compared(options, &figure("cpu"), "ms", &ours.cpu, &peer(&raw.cpu));
            compared(options, &figure(wall), "ms", &ours.wall, &peer(&raw.wall));
        }
        if gloo.is_some() {
            let peer = |values| Peer { name: &version, values };
            compared(options, &figure("gloo_cpu"), "ms", &ours.cpu, &peer(&of_gloo.cpu));
            compared(options, &figure(&format!("gloo_{wall}")), "ms", &ours.wall, &peer(&of_gloo.wall));
        }
        if !tight {
            let peer = Peer { name: "the same arrays summed in one process", values: &sums };
            compared(options, &figure("limit_cpu"), "ms", &ours.cpu, &peer);
        } else if gloo.is_none() && raw.cpu.is_empty() {
            println!("{} {:.1} us", figure(wall), measure::median(&ours.wall) * 1e3);
        }
        group.shutdown(Duration::from_secs(5)).await?;
        std::fs::remove_dir_all(folder)?;
    }
    Ok(())
}

fn temporary(name: &str) -> Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("gym-bench-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Returns the CPU time of summing the arrays of all ranks into each of them, in milliseconds: the limit of the machine.
fn sum_in_one_process(world_size: usize, bytes: usize) -> Result<f64> {
    let mut arrays: Vec<BytesMut> = (0..world_size).map(|rank| numbers(bytes, rank)).collect();
    let reduction = Reduction::new(DType::F32, ReduceOp::Sum)?;
    let used = cpu();
    for slice in 0..world_size {
        let place = slice_of(bytes / 4, world_size, slice);
        let mut parts: Vec<Option<&mut [u8]>> =
            arrays.iter_mut().map(|array| Some(&mut array[place.start * 4..place.end * 4])).collect();
        let mut parts: Vec<&mut [u8]> = order_of(world_size, slice).filter_map(|at| parts[at].take()).collect();
        reduction.reduce_into_all(&mut parts);
    }
    let took = (cpu() - used) * 1e3;
    check(&arrays[0], world_size)?;
    Ok(took)
}
