//! A recording: what a machine answered, as a JSON file that is judged elsewhere.

mod form;

use std::collections::BTreeMap;

use crate::machine::{Answer, InterfaceAddress, Library, Loaded, Machine, Space, Unknown};

/// The format that this program writes. A program reads all formats up to its own.
pub const RECORDING_FORMAT: u64 = 1;

/// Why a text is no recording that can be judged.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// It is no JSON object with the key `rgym_recording`.
    #[error("no recording of a machine: {because}; rgym doctor --record FILE writes one")]
    Foreign {
        /// The kind of text that it is instead.
        because: String,
    },
    /// A newer program has written it.
    #[error(
        "a recording of format {format}, and this program reads formats up to {RECORDING_FORMAT}: use a newer rgym"
    )]
    Newer {
        /// Its format.
        format: u64,
    },
    /// It is a recording with a mistake in it.
    #[error("a damaged recording: {because}; record the machine again")]
    Damaged {
        /// The mistake, with its line and column.
        because: String,
    },
}

/// The answers of a machine. What it lacks answers [`Unknown::NotRecorded`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// Version of the program that has recorded.
    pub program: String,
    /// Time of the recording, in the form of RFC 3339.
    pub taken: String,
    /// Whether names and addresses are replaced by stand-ins.
    pub redacted: bool,
    /// The answers of libraries about themselves.
    pub loaded: Loaded,
    /// Texts that were left out because of their size.
    pub cut: Vec<Cut>,
    pub(super) variables: Option<Noted<BTreeMap<String, String>>>,
    pub(super) addresses: Option<Noted<Vec<InterfaceAddress>>>,
    pub(super) libraries: BTreeMap<String, Option<Noted<Option<Library>>>>,
    pub(super) spaces: BTreeMap<String, Option<Noted<Space>>>,
    pub(super) files: BTreeMap<String, Entry>,
}

/// A text that a recording does not have because of its size.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cut {
    /// Its path.
    pub path: String,
    /// Its length.
    pub bytes: usize,
}

/// An answer, or the error number of a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Noted<T> {
    Refused(i32),
    Answer(T),
}

impl<T> Noted<T> {
    /// Notes an answer, unless the machine is itself a recording that lacks it.
    pub(super) fn of(answer: Answer<T>) -> Option<Self> {
        match answer {
            Ok(answer) => Some(Self::Answer(answer)),
            Err(Unknown::Errno(errno)) => Some(Self::Refused(errno)),
            Err(Unknown::NotRecorded) => None,
        }
    }

    pub(super) fn map<U>(self, change: impl FnOnce(T) -> U) -> Noted<U> {
        match self {
            Self::Refused(errno) => Noted::Refused(errno),
            Self::Answer(answer) => Noted::Answer(change(answer)),
        }
    }
}

impl<T> From<Noted<T>> for Answer<T> {
    fn from(noted: Noted<T>) -> Self {
        match noted {
            Noted::Answer(answer) => Ok(answer),
            Noted::Refused(errno) => Err(Unknown::Errno(errno)),
        }
    }
}

/// The answers about one path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) text: Option<Noted<String>>,
    pub(super) bytes: Option<Noted<Vec<u8>>>,
    pub(super) names: Option<Noted<Vec<String>>>,
    pub(super) real: Option<Noted<String>>,
    pub(super) node: Option<Noted<()>>,
}

impl Entry {
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the form of a path under which its answers are noted.
pub(super) fn key(path: &str) -> String {
    let mut key = String::with_capacity(path.len() + 1);
    for name in path.split('/').filter(|name| !name.is_empty()) {
        key.push('/');
        key.push_str(name);
    }
    if key.is_empty() { "/".to_owned() } else { key }
}

impl Recording {
    /// Reads a recording.
    ///
    /// # Errors
    /// The text is no recording, one of a newer program, or damaged.
    pub fn from_json(text: &str) -> Result<Self, RecordingError> {
        form::read(text)
    }

    /// Writes the recording as JSON, with a line for each path.
    #[must_use]
    pub fn to_json(&self) -> String {
        form::write(self)
    }

    /// Returns the name of the recorded host.
    #[must_use]
    pub fn host(&self) -> Option<String> {
        let name = self.text("/proc/sys/kernel/hostname").ok()?;
        Some(name.trim().to_owned()).filter(|name| !name.is_empty())
    }

    /// Returns how many answers it has of each kind.
    #[must_use]
    pub fn contents(&self) -> Vec<(&'static str, usize)> {
        let files = || self.files.values();
        let variables = match &self.variables {
            Some(Noted::Answer(variables)) => variables.len(),
            _ => 0,
        };
        let addresses = match &self.addresses {
            Some(Noted::Answer(addresses)) => addresses.len(),
            _ => 0,
        };
        vec![
            ("files read", files().filter(|entry| entry.text.is_some() || entry.bytes.is_some()).count()),
            ("folders listed", files().filter(|entry| entry.names.is_some()).count()),
            ("paths resolved", files().filter(|entry| entry.real.is_some()).count()),
            ("device nodes opened", files().filter(|entry| entry.node.is_some()).count()),
            ("libraries searched", self.libraries.values().flatten().count()),
            (
                "versions from libraries",
                usize::from(self.loaded.nccl.is_some()) + usize::from(self.loaded.cuda.is_some()),
            ),
            ("mounts measured", self.spaces.values().flatten().count()),
            ("variables", variables),
            ("addresses", addresses),
        ]
    }

    pub(super) fn entry(&mut self, path: &str) -> &mut Entry {
        self.files.entry(key(path)).or_default()
    }

    /// Leaves out the longest texts until the recording has at most `bytes_max`, and names them.
    pub(super) fn shorten(&mut self, bytes_max: usize) {
        let mut bytes = self.to_json().len();
        let mut texts: Vec<(usize, String)> = Vec::new();
        for (path, entry) in &self.files {
            if let Some(Noted::Answer(text)) = &entry.text {
                texts.push((text.len(), path.clone()));
            }
        }
        texts.sort();
        while bytes > bytes_max
            && let Some((length, path)) = texts.pop()
        {
            self.entry(&path).text = None;
            self.cut.push(Cut { path, bytes: length });
            bytes = bytes.saturating_sub(length);
        }
    }

    fn ask<T: Clone>(&self, path: &str, of: impl Fn(&Entry) -> &Option<Noted<T>>) -> Answer<T> {
        let path = key(path);
        match self.files.get(&path).and_then(|entry| of(entry).clone()) {
            Some(noted) => noted.into(),
            None if self.is_known_absent(&path) => Err(Unknown::ENOENT),
            None => Err(Unknown::NotRecorded),
        }
    }

    /// Returns `true` if the list of a folder above shows that the path does not exist.
    fn is_known_absent(&self, path: &str) -> bool {
        let mut below = path;
        while let Some((folder, name)) = below.rsplit_once('/')
            && !name.is_empty()
        {
            match self.files.get(&key(folder)).and_then(|entry| entry.names.as_ref()) {
                Some(Noted::Answer(names)) => return !names.iter().any(|listed| listed == name),
                Some(Noted::Refused(errno)) => return Unknown::Errno(*errno).is_absent(),
                None => below = folder,
            }
        }
        false
    }
}

impl Machine for Recording {
    fn text(&self, path: &str) -> Answer<String> {
        self.ask(path, |entry| &entry.text)
    }

    fn bytes(&self, path: &str) -> Answer<Vec<u8>> {
        self.ask(path, |entry| &entry.bytes)
    }

    fn names(&self, folder: &str) -> Answer<Vec<String>> {
        self.ask(folder, |entry| &entry.names)
    }

    fn real(&self, path: &str) -> Answer<String> {
        self.ask(path, |entry| &entry.real)
    }

    fn open_node(&self, path: &str) -> Answer<()> {
        self.ask(path, |entry| &entry.node)
    }

    fn library(&self, soname: &str) -> Answer<Option<Library>> {
        answer(self.libraries.get(soname).and_then(Option::as_ref))
    }

    fn variables(&self) -> Answer<BTreeMap<String, String>> {
        answer(self.variables.as_ref())
    }

    fn addresses(&self) -> Answer<Vec<InterfaceAddress>> {
        answer(self.addresses.as_ref())
    }

    fn space(&self, path: &str) -> Answer<Space> {
        answer(self.spaces.get(&key(path)).and_then(Option::as_ref))
    }
}

fn answer<T: Clone>(noted: Option<&Noted<T>>) -> Answer<T> {
    noted.cloned().map_or(Err(Unknown::NotRecorded), Into::into)
}
