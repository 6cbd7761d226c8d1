//! Tables of bad inputs. A test tries each input, compares the error with its row, and checks that other clients are
//! not affected. The table is also a document.

use std::collections::BTreeSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use tokio::time::timeout;

use crate::base::error::{Error, Result};

/// The deadline of one case; none takes longer than a few seconds.
const WAIT_TIMEOUT: Duration = Duration::from_secs(90);
/// If this environment variable is set, a run writes the document.
const WRITES: &str = "GYM_BAD_INPUT_TABLE";

type Run<G> = Box<dyn for<'a> Fn(&'a G) -> LocalBoxFuture<'a, Got>>;

/// One row of the table: a bad input to a system under test `G`, and the expected outcome.
#[allow(missing_debug_implementations, reason = "a row of functions, in a test")]
pub struct Case<G> {
    kind: &'static str,
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    run: Run<G>,
}

impl<G> Case<G> {
    /// Creates a row. `outcome` is the expected outcome in a few words. `says` lists the texts that the error must
    /// contain, such as the position of the mistake.
    pub fn new(
        kind: &'static str,
        name: &'static str,
        outcome: &'static str,
        says: &'static [&'static str],
        run: impl for<'a> Fn(&'a G) -> LocalBoxFuture<'a, Got> + 'static,
    ) -> Self {
        Self { kind, name, outcome, says, run: Box::new(run) }
    }

    /// Describes how the outcome differs from the expected one; `None` if it does not.
    fn complaint(&self, got: &Got) -> Option<String> {
        let missing: Vec<_> = self.says.iter().filter(|part| !got.text.contains(*part)).collect();
        (got.outcome != self.outcome || !missing.is_empty()).then(|| {
            format!(
                "{} / {}\n  expected {} with {:?}\n  got      {}: {}\n  without  {missing:?}",
                self.kind, self.name, self.outcome, self.says, got.outcome, got.text
            )
        })
    }
}

/// The outcome of one bad input.
#[derive(Debug)]
pub struct Got {
    /// The outcome in a few words.
    pub outcome: String,
    /// The complete text of the error.
    pub text: String,
}

impl Got {
    /// Creates an outcome with its text.
    pub fn new(outcome: impl Into<String>, text: impl Into<String>) -> Self {
        Self { outcome: outcome.into(), text: text.into() }
    }

    /// Converts the result of a call that must be rejected.
    pub fn refused<T>(outcome: Result<T>) -> Self {
        match outcome {
            Ok(_) => Self::new("accepted", ""),
            Err(error) => Self::refusal(&error),
        }
    }

    /// Converts the error of a rejected call.
    #[must_use]
    pub fn refusal(error: &Error) -> Self {
        Self::new(format!("refused: {}", error.code().as_str()), error.to_string())
    }
}

/// The system under test.
pub trait Ground {
    /// Checks that the last case affected no other client and left nothing behind.
    fn assert_well(&self) -> impl Future<Output = ()>;

    /// Shortens a text for the table: one line, without parts that differ between runs, with the texts in `says`.
    fn shown(&self, text: &str, says: &[&str]) -> String;
}

/// The outcomes of all cases.
#[derive(Debug)]
pub struct Tried {
    lines: Vec<String>,
    kinds: usize,
    wrong: Vec<String>,
}

/// Tries each case, and passes each line of the table to `say`.
pub async fn try_all<G: Ground>(ground: &G, cases: &[Case<G>], say: impl Fn(&str)) -> Tried {
    let kinds = cases.iter().map(|case| case.kind).collect::<BTreeSet<_>>().len();
    let mut tried = Tried { lines: Vec::new(), kinds, wrong: Vec::new() };
    for case in cases {
        // A case that panics must not hide the others.
        let got = match timeout(WAIT_TIMEOUT, AssertUnwindSafe((case.run)(ground)).catch_unwind()).await {
            Ok(Ok(got)) => got,
            Ok(Err(_)) => Got::new("panic", "the case itself failed; see above"),
            Err(_) => Got::new("hang", format!("still running after {WAIT_TIMEOUT:?}")),
        };
        tried.wrong.extend(case.complaint(&got));
        let well = timeout(WAIT_TIMEOUT, AssertUnwindSafe(ground.assert_well()).catch_unwind()).await;
        if !matches!(well, Ok(Ok(()))) {
            tried
                .wrong
                .push(format!("{} / {}: the case affected others or left something behind", case.kind, case.name));
        }
        let shown = ground.shown(&got.text, case.says);
        let line = format!("| {} | {} | {} | {shown} |", case.kind, case.name, got.outcome);
        say(&line);
        tried.lines.push(line);
    }
    say(&format!("{} bad inputs of {kinds} kinds, {} not as expected", cases.len(), tried.wrong.len()));
    tried
}

impl Tried {
    /// Checks that all outcomes were as expected, and that there were at least this many cases and kinds.
    ///
    /// # Panics
    /// Panics if a check fails.
    pub fn assert(&self, cases_min: usize, kinds_min: usize) {
        let (cases, kinds) = (self.lines.len(), self.kinds);
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(cases >= cases_min && kinds >= kinds_min, "{cases} cases of {kinds} kinds");
    }

    /// Writes the document if `GYM_BAD_INPUT_TABLE` is set. `about` follows the number of bad inputs and kinds.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn document(&self, file: &Path, title: &str, about: &str) {
        if std::env::var_os(WRITES).is_none() {
            return;
        }
        let text = format!(
            "# {title}\n\n{} bad inputs of {} kinds, {about}\n\n\
             | kind | bad input | result | message |\n|---|---|---|---|\n{}\n",
            self.lines.len(),
            self.kinds,
            self.lines.join("\n")
        );
        std::fs::write(file, text).expect("writes the table");
    }
}

/// Checks that the rows of the document are these cases, unless the document is being written, and that all names
/// differ.
///
/// # Panics
/// Panics if a check fails.
pub fn assert_documented<G>(file: &Path, cases: &[Case<G>]) {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let documented: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| kind"))
        .map(|line| line.splitn(4, " | ").take(3).collect::<Vec<_>>().join(" | "))
        .collect();
    let here: Vec<String> =
        cases.iter().map(|case| format!("| {} | {} | {}", case.kind, case.name, case.outcome)).collect();
    if std::env::var_os(WRITES).is_none() {
        assert_eq!(documented, here, "write {} again, as the header of this test describes", file.display());
    }
    let names: BTreeSet<_> = cases.iter().map(|case| (case.kind, case.name)).collect();
    assert_eq!(names.len(), cases.len(), "two cases have the same name");
}
