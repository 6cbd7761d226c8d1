//! The second validation: settings against the machine.

pub(crate) mod cards;
pub(crate) mod fabric;
pub(crate) mod gpu;
mod leftovers;
pub(crate) mod limits;
mod plugins;
pub(crate) mod rows;
mod sockets;
pub(crate) mod ucx;

use super::finding::Finding;
use super::host::Host;

pub(crate) use cards::{Chosen, chosen};
pub(super) use sockets::taken;

pub(super) fn check(host: &Host<'_>, findings: &mut Vec<Finding>) {
    let chosen = chosen(host);
    sockets::check(host, findings);
    cards::check(host, &chosen, findings);
    rows::check(host, &chosen, findings);
    fabric::check(host, &chosen, findings);
    limits::check(host, &chosen, findings);
    gpu::check(host, &chosen, findings);
    plugins::check(host, findings);
    leftovers::check(host, findings);
    ucx::check(host, findings);
}

/// A list of names as NCCL reads it: `^` only at the beginning, then `=`, then names between commas. Nothing is trimmed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NameList {
    excludes: bool,
    exact: bool,
    names: Vec<String>,
}

impl NameList {
    fn read(text: &str) -> Self {
        let (excludes, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        Self { excludes, exact, names }
    }

    /// Returns `true` if one name of the list stands for this one.
    fn names(&self, name: &str) -> bool {
        self.names.iter().any(|listed| self.is(listed, name))
    }

    fn is(&self, listed: &str, name: &str) -> bool {
        if self.exact { listed == name } else { name.starts_with(listed) }
    }

    fn takes(&self, name: &str) -> bool {
        self.names(name) != self.excludes
    }

    /// Returns the beginning of the list, before its names.
    fn sign(&self) -> &'static str {
        match (self.excludes, self.exact) {
            (false, false) => "",
            (false, true) => "=",
            (true, false) => "^",
            (true, true) => "^=",
        }
    }
}

/// Returns words with commas between them.
fn list<T: AsRef<str>>(words: &[T]) -> String {
    words.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}
