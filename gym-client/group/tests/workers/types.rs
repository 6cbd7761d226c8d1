//! The workers of the cases: one that does as it is told, and some that do not start.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gym_client::Transports;
use gym_client::values::{ValueRef, Values, ValuesOptions};
use gym_core::{CallContext, Error, Result};
use gym_group::testing::{TestBlockingWorker, TestWorker};
use gym_group::{Handles, HandlesShared, HostOptions, Method, Methods, Payload, Worker, WorkerEnv};
use gym_group::{RankOverrides, WorkerKind, Workers};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Barrier;

use super::bad_input::faulty::FAULTY_WORKERS;

pub(crate) fn workers() -> Workers {
    // A program with other worker types than its controller's.
    if std::env::var_os("GYM_WITHOUT_WORKERS").is_some() {
        return Workers::new();
    }
    let variables = |name: &str| {
        BTreeMap::from([("SHARED".to_owned(), name.to_owned()), (format!("ONLY_{name}"), name.to_owned())])
    };
    let layered = WorkerKind::of::<Obedient>().with_defaults(variables("defaults")).with_configure(move |place| {
        RankOverrides::variables(variables("configured")).with_init("name", format!("w{}", place.rank))
    });
    let own = Workers::new()
        .with("obedient", WorkerKind::of::<Obedient>())
        .with("layered", layered)
        .with("rubbish", WorkerKind::of::<Unwilling<0>>())
        .with("exits", WorkerKind::of::<Unwilling<1>>())
        .with("fails", WorkerKind::of::<Unwilling<2>>())
        .with("never", WorkerKind::of::<Unwilling<3>>())
        .with("panics", WorkerKind::of::<Unwilling<4>>())
        .with("meeting", WorkerKind::of::<Meeting>())
        .with("counted", WorkerKind::of::<Counted>())
        .with("first-only", WorkerKind::of::<Unwilling<5>>())
        .with("summing", WorkerKind::of::<super::collectives::Summing>())
        .with("verifier", WorkerKind::of::<super::verify::Verifier>())
        .with("narrow", WorkerKind::of::<Obedient>().with_host(taking(3)));
    // What the controller knows of them is their name.
    let own = FAULTY_WORKERS.into_iter().fold(own, |all, name| all.with(name, WorkerKind::of::<Obedient>()));
    // The bounds that the cases of the suite ask for are part of the names.
    [3, 8, 64].into_iter().fold(own, |all, calls_max| {
        let waiting = WorkerKind::of::<TestWorker>().with_host(taking(calls_max));
        let blocking = WorkerKind::of::<TestBlockingWorker>().with_host(taking(calls_max));
        all.with(format!("test-async-{calls_max}"), waiting).with(format!("test-blocking-{calls_max}"), blocking)
    })
}

/// The bounds that the suite of all groups asks for.
fn taking(calls_max: usize) -> HostOptions {
    let mut options = HostOptions::default();
    options.calls_max = calls_max;
    options
}

macro_rules! method {
    ($name:ident, $text:literal, $args:ty, $reply:ty) => {
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name;
        impl Method for $name {
            const NAME: &'static str = $text;
            type Args = $args;
            type Reply = $reply;
        }
    };
}

method!(Describe, "describe", (), Description);
method!(Work, "work", Job, u64);
method!(Hold, "hold", u64, u64);
method!(Breed, "breed", (), u32);
method!(Python, "python", String, ());
method!(Leave, "leave", i32, ());
method!(Warm, "warm", bool, ());
method!(Deafen, "deafen", (), ());
method!(Compute, "compute", String, ());
method!(Collapse, "collapse", (), ());
method!(Meet, "meet", (), ());
method!(Sum, "sum", ValueRef, u64);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) pid: u32,
    pub(crate) incarnation: u64,
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) init: Init,
    pub(crate) warmed: u32,
    /// The CPUs that it may run on, as the kernel writes them.
    #[serde(default)]
    pub(crate) cpus: String,
    /// Its name in a list of processes.
    #[serde(default)]
    pub(crate) program: String,
}

/// For how long, and whether it tells of its progress.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) ms: u64,
    pub(crate) tells: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Init {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) number: u32,
}

/// Does as it is told.
pub(crate) struct Obedient {
    env: WorkerEnv,
    init: Init,
    held: Vec<u8>,
    warmed: u32,
    values: Values,
}

impl Worker for Obedient {
    type Init = Init;

    fn start(env: WorkerEnv, init: Init) -> Result<Self> {
        let values = Values::new(Transports::standard(), ValuesOptions::default());
        Ok(Self { env, init, held: Vec::new(), warmed: 0, values })
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.shared(Describe).exclusive(Work).exclusive(Hold).exclusive(Breed).exclusive(Leave).exclusive(Warm);
        methods.exclusive(Python).exclusive(Deafen).exclusive(Compute).exclusive(Collapse).shared(Sum);
    }
}

/// Adds the bytes of a large input.
impl HandlesShared<Sum> for Obedient {
    async fn handle(&self, cx: &CallContext, call: Payload<ValueRef>) -> Result<Payload<u64>> {
        let value = self.values.fetch(cx, &call.value).await?;
        Ok(value.bytes().await?.iter().map(|byte| u64::from(*byte)).sum::<u64>().into())
    }
}

impl HandlesShared<Describe> for Obedient {
    async fn handle(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<Description>> {
        Ok(Description {
            pid: std::process::id(),
            incarnation: self.env.incarnation.0,
            variables: self.env.variables.clone(),
            init: self.init.clone(),
            warmed: self.warmed,
            cpus: allowed_cpus(),
            program: std::env::args().next().unwrap_or_default(),
        }
        .into())
    }
}

impl Handles<Work> for Obedient {
    async fn handle(&mut self, cx: &CallContext, call: Payload<Job>) -> Result<Payload<u64>> {
        let Job { ms, tells } = call.value;
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        let end = tokio::time::Instant::now() + Duration::from_millis(ms);
        while tokio::time::Instant::now() < end && !cx.cancel.is_cancelled() {
            ticks.tick().await;
            if tells {
                cx.progress.advance(1);
            }
        }
        Ok(self.env.incarnation.0.into())
    }
}

impl Handles<Hold> for Obedient {
    /// Holds that many bytes, every page touched.
    async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
        let bytes = usize::try_from(call.value).map_err(|_| Error::invalid("too much"))?;
        self.held = vec![1; bytes];
        Ok(u64::try_from(self.held.len()).unwrap_or(u64::MAX).into())
    }
}

impl Handles<Breed> for Obedient {
    /// Starts a process of its own that left its session; returns its id.
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<u32>> {
        let child = Command::new("setsid").args(["sleep", "1000"]).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        Ok(child.map_err(|error| Error::internal("cannot start sleep").caused_by(error))?.id().into())
    }
}

impl Handles<Python> for Obedient {
    /// Starts a program in Python that runs on.
    async fn handle(&mut self, _: &CallContext, call: Payload<String>) -> Result<Payload<()>> {
        let child = Command::new("python3").args(["-I", "-S", "-c", &call.value]).stdin(Stdio::null()).spawn();
        child.map_err(|error| Error::internal("cannot start python3").caused_by(error))?;
        Ok(().into())
    }
}

impl Handles<Leave> for Obedient {
    async fn handle(&mut self, _: &CallContext, call: Payload<i32>) -> Result<Payload<()>> {
        eprintln!("leaving with {}", call.value);
        std::process::exit(call.value)
    }
}

impl Handles<Warm> for Obedient {
    async fn handle(&mut self, _: &CallContext, call: Payload<bool>) -> Result<Payload<()>> {
        if !call.value {
            return Err(Error::internal("no weights to load"));
        }
        self.warmed += 1;
        Ok(().into())
    }
}

impl Handles<Deafen> for Obedient {
    /// Hears nothing and never comes back.
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        std::future::pending().await
    }
}

impl Handles<Compute> for Obedient {
    /// Blocks its thread until there is a file of that name.
    async fn handle(&mut self, _: &CallContext, call: Payload<String>) -> Result<Payload<()>> {
        while !std::fs::exists(&call.value).unwrap_or(true) {
            std::thread::yield_now();
        }
        Ok(().into())
    }
}

impl Handles<Collapse> for Obedient {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        panic!("no ground to stand on")
    }
}

/// The CPUs that this process may run on.
pub(crate) fn allowed_cpus() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_owned()
}

/// Does not start as it should: 0 prints first, 1 exits, 2 fails, 3 never comes back, 4 panics, 5 fails on
/// all ranks but the first.
pub(crate) struct Unwilling<const HOW: u8>;

impl<const HOW: u8> Worker for Unwilling<HOW> {
    type Init = Init;

    fn start(env: WorkerEnv, init: Init) -> Result<Self> {
        match HOW {
            0 => {
                println!("gym-worker 0123 {{\"serves\":[\"http://127.0.0.1:1\"]}}");
                println!("{{}}\u{7}\n\ngym-worker");
                print!("half a line");
            }
            1 => {
                eprintln!("no GPU for {}", init.name);
                std::process::exit(3);
            }
            2 => return Err(Error::invalid(format!("no model called {}", init.name))),
            3 => loop {
                std::thread::park();
            },
            5 if env.rank > 0 => return Err(Error::invalid("only rank 0 has room")),
            5 => {}
            _ => panic!("the driver is too old"),
        }
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.shared(Describe);
    }
}

impl<const HOW: u8> HandlesShared<Describe> for Unwilling<HOW> {
    async fn handle(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<Description>> {
        let (pid, variables, init) = (std::process::id(), BTreeMap::new(), Init::default());
        Ok(Description { pid, incarnation: 0, variables, init, warmed: 0, cpus: String::new(), program: String::new() }
            .into())
    }
}

/// Waits inside its calls for all ranks of its group, which are in one process: what a collective does.
pub(crate) struct Meeting(Arc<Barrier>);

/// Where the ranks of each group meet in each of their lives.
static MEETINGS: Mutex<BTreeMap<(String, u64), Arc<Barrier>>> = Mutex::new(BTreeMap::new());

impl Worker for Meeting {
    type Init = Init;

    fn start(env: WorkerEnv, _: Init) -> Result<Self> {
        let mut meetings = MEETINGS.lock();
        let meeting = meetings.entry((env.group.to_string(), env.incarnation.0));
        Ok(Self(Arc::clone(meeting.or_insert_with(|| Arc::new(Barrier::new(env.world_size as usize))))))
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Meet);
    }
}

impl Handles<Meet> for Meeting {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        self.0.wait().await;
        Ok(().into())
    }
}

/// Workers of the type below that live in this process.
pub(crate) static COUNTED: AtomicUsize = AtomicUsize::new(0);

/// Is counted while it lives.
pub(crate) struct Counted;

impl Worker for Counted {
    type Init = Init;

    fn start(_: WorkerEnv, _: Init) -> Result<Self> {
        COUNTED.fetch_add(1, Ordering::Relaxed);
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Deafen);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNTED.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Handles<Deafen> for Counted {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        std::future::pending().await
    }
}
