//! A table of bad inputs: each is tried and must get what its row says, and nobody else may be harmed. The table that a run
//! prints is a document, too.

use std::collections::BTreeSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use tokio::time::timeout;

use crate::base::error::{Error, Result};

/// One case with all its waits; none takes longer than a few seconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// With this variable a run writes the document.
const WRITES: &str = "GYM_BAD_INPUT_TABLE";

type Run<G> = Box<dyn for<'a> Fn(&'a G) -> LocalBoxFuture<'a, Got>>;

/// One row of the table: a bad input to a ground `G`, and what it must get.
#[allow(missing_debug_implementations, reason = "a row of functions, in a test")]
pub struct Case<G> {
    kind: &'static str,
    name: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
    run: Run<G>,
}

impl<G> Case<G> {
    /// `outcome` is what it must get, in a word or two; `says` is what the error must say, the place among it.
    pub fn new(
        kind: &'static str,
        name: &'static str,
        outcome: &'static str,
        says: &'static [&'static str],
        run: impl for<'a> Fn(&'a G) -> LocalBoxFuture<'a, Got> + 'static,
    ) -> Self {
        Self { kind, name, outcome, says, run: Box::new(run) }
    }

    /// What is wrong with what it got, if something is.
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

/// What a bad input got.
#[derive(Debug)]
pub struct Got {
    /// In a word or two.
    pub outcome: String,
    /// The whole error.
    pub text: String,
}

impl Got {
    /// An outcome, and the text that came with it.
    pub fn new(outcome: impl Into<String>, text: impl Into<String>) -> Self {
        Self { outcome: outcome.into(), text: text.into() }
    }

    /// Refused before anything was done.
    pub fn refused<T>(outcome: Result<T>) -> Self {
        match outcome {
            Ok(_) => Self::new("accepted", ""),
            Err(error) => Self::refusal(&error),
        }
    }

    /// The refusal that an error is.
    #[must_use]
    pub fn refusal(error: &Error) -> Self {
        Self::new(format!("refused: {}", error.code().as_str()), error.to_string())
    }
}

/// Whom bad input is tried at.
pub trait Ground {
    /// Panics when those whom the last case did not concern are not as before, or when something is left of it.
    fn assert_well(&self) -> impl Future<Output = ()>;

    /// The text for the table: one line, without what differs from run to run, not too long; what `says` names is in it.
    fn shown(&self, text: &str, says: &[&str]) -> String;
}

/// What a run of all cases came to.
#[derive(Debug)]
pub struct Tried {
    lines: Vec<String>,
    kinds: usize,
    wrong: Vec<String>,
}

/// Tries each case, and hands each line of the table to `say`.
pub async fn try_all<G: Ground>(ground: &G, cases: &[Case<G>], say: impl Fn(&str)) -> Tried {
    let kinds = cases.iter().map(|case| case.kind).collect::<BTreeSet<_>>().len();
    let mut tried = Tried { lines: Vec::new(), kinds, wrong: Vec::new() };
    for case in cases {
        // A case that panics must not hide the others.
        let got = match timeout(PATIENCE, AssertUnwindSafe((case.run)(ground)).catch_unwind()).await {
            Ok(Ok(got)) => got,
            Ok(Err(_)) => Got::new("panic", "the case itself failed; see above"),
            Err(_) => Got::new("hang", format!("not over within {PATIENCE:?}")),
        };
        tried.wrong.extend(case.complaint(&got));
        let well = timeout(PATIENCE, AssertUnwindSafe(ground.assert_well()).catch_unwind()).await;
        if !matches!(well, Ok(Ok(()))) {
            tried.wrong.push(format!("{} / {}: it harmed others, or left something", case.kind, case.name));
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
    /// Checks that all was as expected, and that there were so many cases and kinds.
    ///
    /// # Panics
    /// When it was not so.
    pub fn assert(&self, cases_min: usize, kinds_min: usize) {
        let (cases, kinds) = (self.lines.len(), self.kinds);
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(cases >= cases_min && kinds >= kinds_min, "{cases} cases of {kinds} kinds");
    }

    /// Writes the document if the environment asks for it. `about` goes on after the number of bad inputs and kinds.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn document(&self, file: &Path, title: &str, about: &str) {
        if std::env::var_os(WRITES).is_none() {
            return;
        }
        let text = format!(
            "# {title}\n\n{} bad inputs of {} kinds, {about}\n\n\
             | kind | bad input | gets | which says |\n|---|---|---|---|\n{}\n",
            self.lines.len(),
            self.kinds,
            self.lines.join("\n")
        );
        std::fs::write(file, text).expect("writes the table");
    }
}

/// Checks that the document's rows are these cases, unless it is being written, and that no two have the same name.
///
/// # Panics
/// When it is not so.
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
        assert_eq!(documented, here, "write {} anew, as the head of this test says", file.display());
    }
    let names: BTreeSet<_> = cases.iter().map(|case| (case.kind, case.name)).collect();
    assert_eq!(names.len(), cases.len(), "two cases have the same name");
}
