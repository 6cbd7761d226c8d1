//! A machine whose answers are noted while it is judged.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::machine::recording::{Cut, Noted, Recording, key};
use crate::machine::{Answer, InterfaceAddress, Library, Loaded, Machine, Space};

/// Maximum length of a text in a recording. The files of the kernel that are judged have some KiB.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Maximum length of a recording, so that it can be attached to a report.
const RECORDING_BYTES_MAX: usize = 4 << 20;

/// Notes every question to a machine and its answer, error numbers included.
///
/// A question that is asked again has its first answer, so that the recording is judged as the machine was.
#[derive(Debug)]
pub struct Recorder<M> {
    machine: M,
    noted: RefCell<Recording>,
}

impl<M: Machine> Recorder<M> {
    /// Records a machine.
    pub fn new(machine: M) -> Self {
        Self { machine, noted: RefCell::default() }
    }

    /// Returns the machine itself.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Returns the recording. `program` is the version of the program, `taken` the time in the form of RFC 3339, and `loaded` what libraries said.
    ///
    /// Also recorded are the host's name, its variables and addresses, the space of `/dev/shm`, and the whole tables of GIDs and partitions of every RDMA port: a later
    /// version of the program may ask for what this one does not.
    pub fn finish(self, program: &str, taken: &str, loaded: Loaded) -> Recording {
        let _ = (self.text("/proc/sys/kernel/hostname"), self.variables(), self.addresses(), self.space("/dev/shm"));
        self.note_tables();
        let mut recording = self.noted.into_inner();
        // Places of questions without an answer.
        recording.files.retain(|_, entry| !entry.is_empty());
        recording.libraries.retain(|_, noted| noted.is_some());
        recording.spaces.retain(|_, noted| noted.is_some());
        program.clone_into(&mut recording.program);
        taken.clone_into(&mut recording.taken);
        recording.loaded = loaded;
        recording.shorten(RECORDING_BYTES_MAX);
        recording
    }

    fn note_tables(&self) {
        let devices = "/sys/class/infiniband";
        for device in self.names(devices).unwrap_or_default() {
            let ports = format!("{devices}/{device}/ports");
            for port in self.names(&ports).unwrap_or_default() {
                for table in ["gids", "gid_attrs/types", "gid_attrs/ndevs", "pkeys"] {
                    let table = format!("{ports}/{port}/{table}");
                    for row in self.names(&table).unwrap_or_default() {
                        let _ = self.text(&format!("{table}/{row}"));
                    }
                }
            }
        }
    }

    /// Returns the noted answer, or asks and notes. An answer that is not recorded is not noted, so the recording has the same.
    fn once<T: Clone>(
        &self,
        place: impl Fn(&mut Recording) -> &mut Option<Noted<T>>,
        ask: impl FnOnce() -> Answer<T>,
    ) -> Answer<T> {
        if let Some(noted) = place(&mut self.noted.borrow_mut()) {
            return noted.clone().into();
        }
        let answer = ask();
        *place(&mut self.noted.borrow_mut()) = Noted::of(answer.clone());
        answer
    }
}

impl<M: Machine> Machine for Recorder<M> {
    fn text(&self, path: &str) -> Answer<String> {
        let is_cut = self.noted.borrow().cut.iter().any(|cut| cut.path == key(path));
        if is_cut || is_private(path) {
            return self.machine.text(path);
        }
        if let Some(noted) = &self.noted.borrow_mut().entry(path).text {
            return noted.clone().into();
        }
        let answer = self.machine.text(path);
        let mut noted = self.noted.borrow_mut();
        match &answer {
            Ok(text) if text.len() > TEXT_BYTES_MAX => noted.cut.push(Cut { path: key(path), bytes: text.len() }),
            _ => noted.entry(path).text = Noted::of(answer.clone()),
        }
        answer
    }

    fn bytes(&self, path: &str) -> Answer<Vec<u8>> {
        if is_private(path) {
            return self.machine.bytes(path);
        }
        self.once(|noted| &mut noted.entry(path).bytes, || self.machine.bytes(path))
    }

    fn names(&self, folder: &str) -> Answer<Vec<String>> {
        self.once(|noted| &mut noted.entry(folder).names, || self.machine.names(folder))
    }

    fn real(&self, path: &str) -> Answer<String> {
        self.once(|noted| &mut noted.entry(path).real, || self.machine.real(path))
    }

    fn open_node(&self, path: &str) -> Answer<()> {
        self.once(|noted| &mut noted.entry(path).node, || self.machine.open_node(path))
    }

    fn library(&self, soname: &str) -> Answer<Option<Library>> {
        self.once(|noted| noted.libraries.entry(soname.to_owned()).or_default(), || self.machine.library(soname))
    }

    fn variables(&self) -> Answer<BTreeMap<String, String>> {
        self.once(|noted| &mut noted.variables, || self.machine.variables())
    }

    fn addresses(&self) -> Answer<Vec<InterfaceAddress>> {
        self.once(|noted| &mut noted.addresses, || self.machine.addresses())
    }

    fn space(&self, path: &str) -> Answer<Space> {
        self.once(|noted| noted.spaces.entry(key(path)).or_default(), || self.machine.space(path))
    }
}

/// Returns `true` for what tells more of a process than its limits: all its variables, and its command line.
fn is_private(path: &str) -> bool {
    let key = key(path);
    let name = key.strip_prefix("/proc/").and_then(|path| path.split_once('/')).map(|(_, name)| name);
    matches!(name, Some("environ" | "cmdline" | "comm" | "stat"))
}
