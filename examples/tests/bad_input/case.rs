//! One bad input, and what it must get.

use futures_util::future::BoxFuture;

use super::ground::Ground;

type Run = Box<dyn for<'a> Fn(&'a Ground) -> BoxFuture<'a, Got> + Send + Sync>;

/// One row of the table.
pub(crate) struct Case {
    pub(crate) kind: &'static str,
    pub(crate) name: &'static str,
    /// What it must get, in a word or two.
    pub(crate) outcome: &'static str,
    /// What the error must say; the place is among it.
    pub(crate) says: &'static [&'static str],
    pub(crate) run: Run,
}

impl Case {
    pub(crate) fn new(
        kind: &'static str,
        name: &'static str,
        outcome: &'static str,
        says: &'static [&'static str],
        run: impl for<'a> Fn(&'a Ground) -> BoxFuture<'a, Got> + Send + Sync + 'static,
    ) -> Self {
        Self { kind, name, outcome, says, run: Box::new(run) }
    }
}

/// What it got.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) outcome: String,
    pub(crate) text: String,
}

impl Got {
    pub(crate) fn new(outcome: impl Into<String>, text: impl Into<String>) -> Self {
        Self { outcome: outcome.into(), text: text.into() }
    }
}
