//! The harness of executables that are their own shim, watchdog and workers, and so need the first line of `main`: cases by name, with the arguments
//! of cargo's harness.

use std::future::Future;
use std::pin::Pin;

use libtest_mimic::{Arguments, Trial};

/// A case by name.
pub(crate) type Case = (&'static str, fn() -> Running);

/// A case under way.
pub(crate) type Running = Pin<Box<dyn Future<Output = ()>>>;

/// Runs the cases that the arguments ask for, each with `run`, all of them even after one failed. Ends the process.
pub(crate) fn run_cases(cases: Vec<Case>, run: fn(Running)) -> ! {
    let mut arguments = Arguments::from_args();
    // Cases look at the children of this process, which they therefore do not share.
    arguments.test_threads = Some(1);
    let trial = |(name, case): Case| {
        Trial::test(name, move || {
            run(case());
            Ok(())
        })
    };
    libtest_mimic::run(&arguments, cases.into_iter().map(trial).collect()).exit()
}
