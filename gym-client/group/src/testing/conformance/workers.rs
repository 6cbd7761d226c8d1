//! The workers that the cases call. They tell what they saw through their own methods, so that they may live in another process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use gym_core::group::batch::Payload;
use gym_core::group::layout::Rank;
use gym_core::group::worker::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Worker, WorkerEnv};
use gym_core::message::CallContext;
use gym_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident = $text:literal: $args:ty => $reply:ty;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name;

        impl Method for $name {
            const NAME: &'static str = $text;
            type Args = $args;
            type Reply = $reply;
        })*
    };
}

methods! {
    /// Gives arguments and batch back, with the rank.
    Echo = "test.echo": String => Echoed;
    /// The same beside other calls.
    EchoShared = "test.echo_shared": String => Echoed;
    /// Gives numbers back, with what the worker saw of them.
    Measure = "test.measure": Figures => (String, Figures);
    /// Writes a number into the worker's log.
    Note = "test.note": u64 => ();
    /// The log.
    Notes = "test.notes": () => Vec<String>;
    /// Waits until it is told to stop, and notes that.
    Hold = "test.hold": () => ();
    /// The same, dropped instead of told.
    HoldShared = "test.hold_shared": () => ();
    /// Fails on one rank; the others hold.
    FailOn = "test.fail_on": Rank => ();
    /// Panics.
    Panic = "test.panic": () => ();
    /// Tells of units of work, then holds.
    Advance = "test.advance": u64 => ();
}

/// The answer of [`Echo`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Echoed {
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) incarnation: u64,
    pub(super) text: String,
    pub(super) rows: usize,
}

/// Numbers in the places where values have them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) loss: f32,
    pub(super) clip: Option<f64>,
    pub(super) by_name: BTreeMap<String, (f32, Limit)>,
}

/// A number that serde reads without knowing its type, or a text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Limit {
    Number(f64),
    Word(String),
}

fn echo(env: &WorkerEnv, call: Payload<String>) -> Payload<Echoed> {
    let (rank, world_size, incarnation) = (env.rank, env.world_size, env.incarnation.0);
    let rows = call.batch.rows();
    Payload { value: Echoed { rank, world_size, incarnation, text: call.value, rows }, batch: call.batch }
}

/// The async worker of the suite.
#[derive(Debug)]
pub struct TestWorker {
    env: WorkerEnv,
    notes: Vec<String>,
}

impl Worker for TestWorker {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self { env, notes: Vec::new() })
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Echo).shared(EchoShared).exclusive(Note).exclusive(Notes).exclusive(Hold);
        methods.shared(HoldShared).exclusive(Measure).exclusive(FailOn).exclusive(Panic).exclusive(Advance);
    }
}

impl Handles<Echo> for TestWorker {
    async fn handle(&mut self, _: &CallContext, call: Payload<String>) -> Result<Payload<Echoed>> {
        Ok(echo(&self.env, call))
    }
}

impl HandlesShared<EchoShared> for TestWorker {
    async fn handle(&self, _: &CallContext, call: Payload<String>) -> Result<Payload<Echoed>> {
        Ok(echo(&self.env, call))
    }
}

impl Handles<Measure> for TestWorker {
    async fn handle(&mut self, _: &CallContext, call: Payload<Figures>) -> Result<Payload<(String, Figures)>> {
        Ok((format!("{:?}", call.value), call.value).into())
    }
}

impl Handles<Note> for TestWorker {
    async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<()>> {
        self.notes.push(call.value.to_string());
        Ok(().into())
    }
}

impl Handles<Notes> for TestWorker {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<Vec<String>>> {
        Ok(self.notes.clone().into())
    }
}

impl Handles<Hold> for TestWorker {
    async fn handle(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        cx.cancel.cancelled().await;
        self.notes.push("told".to_owned());
        Err(told())
    }
}

impl HandlesShared<HoldShared> for TestWorker {
    async fn handle(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        std::future::pending().await
    }
}

impl Handles<FailOn> for TestWorker {
    async fn handle(&mut self, cx: &CallContext, call: Payload<Rank>) -> Result<Payload<()>> {
        if call.value == self.env.rank {
            return Err(Error::internal("loss is not a number"));
        }
        cx.cancel.cancelled().await;
        self.notes.push("told".to_owned());
        Err(told())
    }
}

impl Handles<Panic> for TestWorker {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        panic!("the worker lost its mind")
    }
}

impl Handles<Advance> for TestWorker {
    async fn handle(&mut self, cx: &CallContext, call: Payload<u64>) -> Result<Payload<()>> {
        cx.progress.advance(call.value);
        cx.cancel.cancelled().await;
        Err(told())
    }
}

/// The blocking worker of the suite. It is not `Send`: its notes are in an `Rc`, as an interpreter's handles are.
#[derive(Debug)]
pub struct TestBlockingWorker {
    env: WorkerEnv,
    thread: std::thread::ThreadId,
    notes: Rc<RefCell<Vec<String>>>,
}

impl Worker for TestBlockingWorker {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self { env, thread: std::thread::current().id(), notes: Rc::default() })
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.blocking(Echo).blocking(Note).blocking(Notes).blocking(Hold).blocking(Panic);
    }
}

impl TestBlockingWorker {
    fn check_thread(&self) -> Result<()> {
        match std::thread::current().id() {
            same if same == self.thread => Ok(()),
            other => Err(Error::internal(format!("called on {other:?}, born on {:?}", self.thread))),
        }
    }
}

impl HandlesBlocking<Echo> for TestBlockingWorker {
    fn handle(&mut self, _: &CallContext, call: Payload<String>) -> Result<Payload<Echoed>> {
        self.check_thread()?;
        Ok(echo(&self.env, call))
    }
}

impl HandlesBlocking<Note> for TestBlockingWorker {
    fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<()>> {
        self.check_thread()?;
        self.notes.borrow_mut().push(call.value.to_string());
        Ok(().into())
    }
}

impl HandlesBlocking<Notes> for TestBlockingWorker {
    fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<Vec<String>>> {
        Ok(self.notes.borrow().clone().into())
    }
}

impl HandlesBlocking<Hold> for TestBlockingWorker {
    fn handle(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        tokio::runtime::Handle::current().block_on(cx.cancel.cancelled());
        self.notes.borrow_mut().push("told".to_owned());
        Err(told())
    }
}

impl HandlesBlocking<Panic> for TestBlockingWorker {
    fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        panic!("the worker lost its mind")
    }
}

fn told() -> Error {
    Error::finished(Code::Cancelled, "told to stop")
}
