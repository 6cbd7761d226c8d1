//! Standard error, shared by log lines, the lines of Python servers and the progress bar, so that none garbles another.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use gym_client::launch::LineSink;
use indicatif::ProgressBar;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::cli::args::options::{CommonOptions, LogFormat};
use crate::cli::exit::Failure;

/// Standard error. Cheap to clone; clones share the bar. As a writer it takes whole lines.
#[derive(Clone, Debug)]
pub(super) struct Console {
    bar: Arc<Mutex<Option<ProgressBar>>>,
}

impl Console {
    pub(super) fn new() -> Self {
        Self { bar: Arc::default() }
    }

    /// Keeps a bar below all further lines.
    pub(super) fn keep_below(&self, bar: &ProgressBar) {
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
    }

    /// Takes the bar away.
    pub(super) fn clear(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
    }

    /// Writes one line.
    pub(super) fn line(&self, text: &str) {
        // Nobody reads any more: then there is nobody to tell.
        let _ = self.clone().write_all(format!("{text}\n").as_bytes());
    }

    /// Writes what is only probably wrong.
    pub(super) fn warn(&self, warning: impl Display) {
        self.line(&format!("warning: {warning}"));
    }

    /// Takes the output of Python servers: each line with the server's name in front.
    pub(super) fn lines(&self) -> LineSink {
        let console = self.clone();
        Arc::new(move |name, _stream, line| console.line(&with_name(name, line)))
    }
}

/// NeMo Gym's servers put their name in front of some lines themselves.
fn with_name(name: &str, line: &str) -> String {
    let named =
        line.strip_prefix('(').and_then(|rest| rest.strip_prefix(name)).is_some_and(|rest| rest.starts_with(')'));
    if named { line.to_owned() } else { format!("[{name}] {line}") }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        let write = || io::stderr().lock().write_all(bytes);
        match &*bar {
            Some(bar) => bar.suspend(write)?,
            None => write()?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Sends the log to the console: `RUST_LOG` decides, else `-v`; servers tell more than other commands.
pub(super) fn log_to(console: &Console, shared: &CommonOptions, serves: bool) -> Result<(), Failure> {
    let ours = match (shared.verbose, serves) {
        (0, false) => LevelFilter::WARN,
        (0, true) => LevelFilter::INFO,
        (1, _) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let filter: Targets = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.is_empty() => directives.parse().map_err(|error| {
            Failure::Usage(format!(
                "RUST_LOG={directives}: {error}\n  fix: levels by target, as in RUST_LOG=warn,gym_client=debug"
            ))
        })?,
        // The libraries below us have their own ideas of what is worth a line.
        _ => {
            let libraries = ["hyper", "hyper_util", "reqwest", "rustls", "tokio"];
            Targets::new().with_default(ours).with_targets(libraries.map(|library| (library, LevelFilter::WARN)))
        }
    };
    let console = console.clone();
    let layer = tracing_subscriber::fmt::layer().with_writer(move || console.clone());
    let registry = tracing_subscriber::registry().with(filter);
    // A program that has its own subscriber keeps it.
    let _ = match shared.log_format {
        LogFormat::Text => registry.with(layer).try_init(),
        LogFormat::Json => registry.with(layer.json()).try_init(),
    };
    Ok(())
}

/// A table without lines, which `grep` and `awk` read as well as people.
pub(super) fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = std::iter::once(header.map(str::to_uppercase)).chain(rows).collect();
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Prints to standard output; a reader that has gone is no failure.
pub(super) fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gets_its_servers_name_once() {
        assert_eq!(with_name("math", "started"), "[math] started");
        assert_eq!(with_name("math", "(math) started"), "(math) started");
        assert_eq!(with_name("math", "(math_agent) started"), "[math] (math_agent) started");
    }

    #[test]
    fn a_table_has_a_header_and_its_rows() {
        let text = table(["name", "url"], [["a".to_owned(), "http://h:1".to_owned()]]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines, [["NAME", "URL"], ["a", "http://h:1"]]);
    }
}
