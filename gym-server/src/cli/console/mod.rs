//! Standard error, shared by log lines, the output of Python servers and the progress bar, so that they do not
//! overwrite each other.

pub(super) mod otlp;

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};

use gym_client::launch::LineSink;
use indicatif::ProgressBar;
use parking_lot::Mutex;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::cli::args::options::{CommonOptions, LogFormat};
use crate::cli::console::otlp::export::ExportSetup;

/// Writes whole lines to standard error. Cheap to clone; clones share the bar.
#[derive(Clone, Debug)]
pub(super) struct Console {
    bar: Arc<Mutex<Option<ProgressBar>>>,
}

impl Console {
    pub(super) fn new() -> Self {
        Self { bar: Arc::default() }
    }

    /// Keeps a bar below all later lines.
    pub(super) fn keep_below(&self, bar: &ProgressBar) {
        *self.bar.lock() = Some(bar.clone());
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        if let Some(bar) = self.bar.lock().take() {
            bar.finish_and_clear();
        }
    }

    /// Writes one line.
    pub(super) fn line(&self, text: &str) {
        // Fails if the reader closed the pipe; the error cannot be reported anywhere.
        let _ = self.clone().write_all(format!("{text}\n").as_bytes());
    }

    /// Writes a warning.
    pub(super) fn warn(&self, warning: impl Display) {
        self.line(&format!("warning: {warning}"));
    }

    /// Returns the sink for the output of Python servers; it prefixes each line with the server's name.
    pub(super) fn lines(&self) -> LineSink {
        let console = self.clone();
        Arc::new(move |name, _stream, line| console.line(&with_name(name, line)))
    }
}

/// Prefixes a line with the server's name, unless NeMo Gym's server has already done so.
fn with_name(name: &str, line: &str) -> String {
    let named =
        line.strip_prefix('(').and_then(|rest| rest.strip_prefix(name)).is_some_and(|rest| rest.starts_with(')'));
    if named { line.to_owned() } else { format!("[{name}] {line}") }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bar = self.bar.lock();
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

/// Sends log lines to the console. `RUST_LOG` sets the levels; without it, `-v` does. Commands that serve log more than others.
///
/// Returns the export of spans, to start within a runtime, if there is one.
pub(super) fn log_to(console: &Console, shared: &CommonOptions, serves: bool) -> Option<ExportSetup> {
    let ours = match (shared.verbose, serves) {
        (0, false) => LevelFilter::WARN,
        (0, true) => LevelFilter::INFO,
        (1, _) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let usual = || {
        // Libraries used by the SDK log too much at these levels.
        let libraries = ["hyper", "hyper_util", "reqwest", "rustls", "tokio"];
        Targets::new().with_default(ours).with_targets(libraries.map(|library| (library, LevelFilter::WARN)))
    };
    // A variable that was set for other programs ends no command.
    let filter: Targets = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.is_empty() => directives.parse().unwrap_or_else(|error| {
            console.line(&format!(
                "warning: RUST_LOG={directives}: {error}, so it is ignored; set levels per target, such as RUST_LOG=warn,gym_client=debug"
            ));
            usual()
        }),
        _ => usual(),
    };
    let spans = otlp::layer().unwrap_or_else(|why| {
        console.line(&format!("warning: {why}"));
        None
    });
    let (spans, export) = spans.unzip();
    let console = console.clone();
    let layer = tracing_subscriber::fmt::layer().with_writer(move || console.clone());
    let registry = tracing_subscriber::registry().with(spans);
    // Fails if the program has installed its own subscriber, which is kept.
    let _ = match shared.log_format {
        LogFormat::Text => registry.with(layer.with_filter(filter)).try_init(),
        LogFormat::Json => registry.with(layer.json().with_filter(filter)).try_init(),
    };
    export
}

static PROGRAM: OnceLock<String> = OnceLock::new();

/// Sets the name that messages use for this program. The first call counts.
pub(super) fn set_program(name: &str) {
    let _ = PROGRAM.set(name.to_owned());
}

/// Returns the name of this program, as the user typed it.
pub(super) fn program() -> &'static str {
    PROGRAM.get().map_or("rgym", String::as_str)
}

/// Returns a table without rules, for people as well as `grep` and `awk`.
pub(super) fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    wide_table(&header, rows.into_iter().map(Vec::from))
}

/// Returns the same table for columns that are known at run time only. Each row has as many cells as the header.
pub(super) fn wide_table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let header = header.iter().map(|name| name.to_uppercase()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Prints to standard output; a closed pipe is not an error.
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
