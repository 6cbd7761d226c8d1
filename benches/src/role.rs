//! Runs parts of a benchmark in separate processes. A part is this program started as `PROGRAM role PART …`. It prints a line of
//! JSON when it is ready, and another with its result, and exits when its standard input closes.

use std::future::Future;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::runtime::Builder;
use tokio::time::{Instant, timeout};

use crate::options::Options;
use crate::{count, mock, stack};

/// The first argument that makes this program a part.
const ROLE: &str = "role";

/// Runs the `main` of a benchmark: a part if this process was started as one, and otherwise the benchmark.
///
/// # Errors
/// The error of the benchmark or of the part.
pub fn main<Fut>(bench: impl FnOnce(Options) -> Fut) -> Result<()>
where
    Fut: Future<Output = Result<()>> + Send + 'static,
{
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).map(String::as_str) == Some(ROLE) {
        let runtime = match arguments.get(2).map(String::as_str) {
            // A single thread is cheapest.
            Some("mock") => Builder::new_current_thread().enable_all().build()?,
            // As in `rgym --threads N run`.
            Some("serve") => {
                let threads = arguments.get(5).context("the number of threads is missing")?.parse()?;
                Builder::new_multi_thread().worker_threads(threads).enable_all().build()?
            }
            _ => Builder::new_multi_thread().enable_all().build()?,
        };
        // Spawned: `block_on` does not run its future on a worker, so each wake-up would cross threads.
        return runtime.block_on(async { tokio::spawn(take_part(arguments)).await? });
    }
    // A thousand connections need a thousand descriptors.
    gym_core::base::raise_descriptors();
    let options = Options::of_arguments()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let bench = bench(options);
    runtime.block_on(async { tokio::spawn(bench).await? })
}

async fn take_part(arguments: Vec<String>) -> Result<()> {
    let text = |at: usize| arguments.get(at).cloned().with_context(|| format!("{ROLE}: argument {at} is missing"));
    let number = |at: usize| -> Result<u64> { Ok(text(at)?.parse()?) };
    match text(2)?.as_str() {
        "mock" => {
            let listener = mock::bind()?;
            tell(&listener.local_addr()?);
            let delay = Duration::from_millis(number(3)?);
            tokio::select! {
                ended = mock::serve(listener, delay) => ended,
                () = end_of_input() => Ok(()),
            }
        }
        "serve" => {
            let stack = stack::start(&text(3)?, &text(4)?).await?;
            tell(&stack.servers().iter().map(|row| (row.name.clone(), row.url.clone())).collect::<Vec<_>>());
            end_of_input().await;
            stack.stop().await;
            Ok(())
        }
        "collect" => tell_result(stack::collect_from_head(&text(3)?, &plan(&arguments)?).await),
        "all-in-one" => tell_result(stack::collect_all_in_one(&text(3)?, &plan(&arguments)?).await),
        other => bail!("{ROLE}: there is no part `{other}`"),
    }
}

fn plan(arguments: &[String]) -> Result<stack::Plan> {
    let plan = arguments.get(4).context("a plan is missing")?;
    Ok(serde_json::from_str(plan)?)
}

fn tell(what: &impl Serialize) {
    println!("{}", serde_json::to_string(what).unwrap_or_default());
}

fn tell_result(result: Result<stack::Collection>) -> Result<()> {
    tell(&result?);
    Ok(())
}

async fn end_of_input() {
    let mut rest = [0; 64];
    let mut input = tokio::io::stdin();
    while matches!(input.read(&mut rest).await, Ok(1..)) {}
}

/// A process that runs a part. Dropping this value ends it.
#[derive(Debug)]
pub struct Part {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    input: Option<ChildStdin>,
    /// The start time of the process.
    pub began: Instant,
}

impl Part {
    /// Starts a part.
    ///
    /// # Errors
    /// An error if the program cannot be started.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        Self::run(Command::new(std::env::current_exe()?), arguments)
    }

    /// Starts a part under valgrind, which writes the number of instructions to `log` when the part ends.
    ///
    /// # Errors
    /// An error if valgrind cannot be started.
    pub fn start_counted(arguments: &[&str], log: &Path) -> Result<Self> {
        let mut command = count::valgrind(log);
        command.arg(std::env::current_exe()?);
        Self::run(command, arguments)
    }

    fn run(mut command: Command, arguments: &[&str]) -> Result<Self> {
        let began = Instant::now();
        let mut child = command
            .arg(ROLE)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {arguments:?}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("a part without output")?;
        Ok(Self { child, lines: BufReader::new(output).lines(), input, began })
    }

    /// Returns the next message of the part.
    ///
    /// # Errors
    /// An error if no message arrives within `limit`, or if the part ends.
    pub async fn told<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T> {
        let line = timeout(limit, self.lines.next_line()).await.context("a part is silent")??;
        Ok(serde_json::from_str(&line.context("a part has ended")?)?)
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    /// Asks the part to end, and waits.
    ///
    /// # Errors
    /// An error if the part does not end within `limit`; it is then killed.
    pub async fn end(mut self, limit: Duration) -> Result<()> {
        drop(self.input.take());
        let status = timeout(limit, self.child.wait()).await.context("a part did not end")??;
        if !status.success() {
            bail!("a part ended with {status}");
        }
        Ok(())
    }
}
