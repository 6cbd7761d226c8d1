//! The first failure of a meeting, which every rank and every later call gets.

use std::fmt;
use std::sync::Arc;

use crate::base::error::Error;
use crate::base::watch;

/// A failure that is set once and read many times. For backends: each transfer of an aborted meeting ends with the same cause.
#[derive(Debug)]
pub struct FirstCause(watch::Sender<Option<Arc<Error>>>);

impl FirstCause {
    /// Creates a place without a failure.
    #[must_use]
    pub fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Sets the failure, unless there is one.
    pub fn set(&self, why: Error) {
        self.0.send_if_modified(|cause| {
            let first = cause.is_none();
            if first {
                *cause = Some(Arc::new(why));
            }
            first
        });
    }

    /// Returns a copy of the failure, if there is one: the same code, execution, class, subject, message and causes.
    #[must_use]
    pub fn get(&self) -> Option<Error> {
        self.0.borrow().as_ref().map(copy)
    }

    /// Waits for the failure.
    pub async fn wait(&self) -> Error {
        let mut receiver = self.0.subscribe();
        match receiver.wait_for(Option::is_some).await.ok().as_deref() {
            Some(Some(cause)) => copy(cause),
            _ => unreachable!("the sender lives as long as this borrow"),
        }
    }
}

impl Default for FirstCause {
    fn default() -> Self {
        Self::new()
    }
}

fn copy(error: &Arc<Error>) -> Error {
    let mut copy =
        Error::new(error.code(), error.execution(), error.message().to_owned()).about(error.subject().to_owned());
    if let Some(class) = error.class() {
        copy = copy.with_class(class);
    }
    match std::error::Error::source(&**error) {
        Some(_) => copy.caused_by(Source(Arc::clone(error))),
        None => copy,
    }
}

/// The source of a shared error.
struct Source(Arc<Error>);

impl Source {
    fn get(&self) -> &(dyn std::error::Error + 'static) {
        std::error::Error::source(&*self.0).expect("only an error with a source is wrapped")
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.get(), f)
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.get(), f)
    }
}

impl std::error::Error for Source {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.get().source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::{Code, Execution};

    #[tokio::test]
    async fn the_first_failure_stays_and_is_read_whole() {
        let cause = FirstCause::new();
        assert!(cause.get().is_none());
        let inner = Error::internal("disk full").about("append").caused_by(std::io::Error::other("no space"));
        cause.set(Error::unknown(Code::Unavailable, "rank 1 is lost").about("all_reduce 0").caused_by(inner));
        cause.set(Error::internal("later"));
        for copy in [cause.get().unwrap(), cause.wait().await] {
            assert_eq!(copy.to_string(), "all_reduce 0: rank 1 is lost: append: disk full: no space");
            assert_eq!((copy.code(), copy.execution()), (Code::Unavailable, Execution::Unknown));
        }
    }
}
