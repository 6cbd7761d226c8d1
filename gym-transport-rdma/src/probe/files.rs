//! The questions of the checks to a machine, in the forms that they need.

use std::cell::RefCell;

use crate::machine::{Answer, Library, Machine, Unknown};

/// A machine, and which answers the current check did not get because its recording lacks them.
#[derive(Debug)]
pub(crate) struct Files<'a> {
    machine: &'a dyn Machine,
    not_recorded: RefCell<Vec<String>>,
}

impl<'a> Files<'a> {
    pub(crate) fn new(machine: &'a dyn Machine) -> Self {
        Self { machine, not_recorded: RefCell::default() }
    }

    /// Returns the trimmed contents; `None` if the file cannot be read. sysfs fails to read some files of empty
    /// entries.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        self.known(path, self.machine.text(path)).map(|text| text.trim().to_owned())
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.known(path, self.machine.exists(path)).unwrap_or(false)
    }

    /// Returns the sorted names in a folder; empty if it does not exist.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        self.known(folder, self.machine.names(folder)).unwrap_or_default()
    }

    pub(crate) fn real(&self, path: &str) -> Option<String> {
        self.known(path, self.machine.real(path))
    }

    /// Returns `true` if a device node can be opened.
    pub(crate) fn opens(&self, node: &str) -> bool {
        self.known(node, self.machine.open_node(node)).is_some()
    }

    /// Returns the first library with this soname.
    pub(crate) fn library(&self, soname: &str) -> Option<Library> {
        self.known(soname, self.machine.library(soname)).flatten()
    }

    /// Returns what the recording lacks of the questions since the last call.
    pub(crate) fn take_not_recorded(&self) -> Vec<String> {
        self.not_recorded.take()
    }

    fn known<T>(&self, subject: &str, answer: Answer<T>) -> Option<T> {
        if matches!(answer, Err(Unknown::NotRecorded)) {
            self.not_recorded.borrow_mut().push(subject.to_owned());
        }
        answer.ok()
    }
}
