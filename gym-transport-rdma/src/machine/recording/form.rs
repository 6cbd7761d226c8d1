//! The JSON of a recording.
//!
//! Answers are grouped by folder, with a line for each name, so that a table of 256 rows does not repeat its path and two recordings can be compared by lines.

use std::collections::BTreeMap;

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::machine::recording::{Cut, Entry, Noted, RECORDING_FORMAT, Recording, RecordingError, key};
use crate::machine::{BYTES_MAX, InterfaceAddress, Library, Loaded, Space};

#[derive(Serialize, Deserialize)]
struct Form {
    rgym_recording: u64,
    program: String,
    taken: String,
    #[serde(default)]
    redacted: bool,
    #[serde(default)]
    cut: Vec<Line<Cut>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    variables: Option<Noted<BTreeMap<String, String>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    addresses: Option<Noted<Vec<Line<InterfaceAddress>>>>,
    #[serde(default)]
    spaces: BTreeMap<String, Line<Noted<Space>>>,
    #[serde(default)]
    libraries: BTreeMap<String, Line<Noted<Option<Library>>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nccl: Option<Version>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cuda: Option<Version>,
    /// By folder and name.
    #[serde(default)]
    files: BTreeMap<String, BTreeMap<String, Line<File>>>,
}

/// The answers about one path.
#[derive(Serialize, Deserialize)]
struct File {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<Noted<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes: Option<Noted<Hex>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    names: Option<Noted<Vec<String>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    real: Option<Noted<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<Noted<Open>>,
}

/// A node that could be opened.
#[derive(Serialize, Deserialize)]
enum Open {
    #[serde(rename = "open")]
    Open,
}

/// Bytes, without the zeros at their end: a configuration space has 4,096 and uses some hundreds.
#[derive(Serialize, Deserialize)]
struct Hex {
    hex: String,
    length: usize,
}

/// The answer of a library.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Version {
    Version(String),
    Error(String),
}

/// A refusal, as an object that no answer looks like.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusal {
    errno: i32,
}

/// A value on one line of an indented JSON text.
struct Line<T>(T);

impl<T: Serialize> Serialize for Line<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::value::to_raw_value(&self.0).map_err(serde::ser::Error::custom)?.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Line<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(Self)
    }
}

impl<T: Serialize> Serialize for Noted<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Answer(answer) => answer.serialize(serializer),
            Self::Refused(errno) => Refusal { errno: *errno }.serialize(serializer),
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Noted<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        if let Ok(refusal) = serde_json::from_str::<Refusal>(raw.get()) {
            return Ok(Self::Refused(refusal.errno));
        }
        serde_json::from_str(raw.get()).map(Self::Answer).map_err(D::Error::custom)
    }
}

pub(super) fn read(text: &str) -> Result<Recording, RecordingError> {
    let foreign = |because: &str| RecordingError::Foreign { because: because.to_owned() };
    let head: BTreeMap<String, &RawValue> = serde_json::from_str(text).map_err(|error| {
        let what = if error.is_data() { "it is no JSON object" } else { "it is no JSON" };
        foreign(&format!("{what} ({error})"))
    })?;
    let format = head.get("rgym_recording").ok_or_else(|| foreign("it has no key rgym_recording"))?;
    match format.get().parse() {
        Ok(format) if format > RECORDING_FORMAT => return Err(RecordingError::Newer { format }),
        Ok(1..) => {}
        _ => return Err(foreign("its rgym_recording is no number from 1")),
    }
    let damaged = |because: String| RecordingError::Damaged { because };
    let form: Form = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
    form.into_recording().map_err(damaged)
}

pub(super) fn write(recording: &Recording) -> String {
    let mut text = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b" ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, format);
    Form::of(recording).serialize(&mut serializer).expect("maps with names as keys can be written as JSON");
    text.push(b'\n');
    String::from_utf8(text).expect("JSON is UTF-8")
}

impl Form {
    fn of(recording: &Recording) -> Self {
        let mut files: BTreeMap<String, BTreeMap<String, Line<File>>> = BTreeMap::new();
        for (path, entry) in recording.files.iter().filter(|(_, entry)| !entry.is_empty()) {
            let (folder, name) = path.rsplit_once('/').unwrap_or_default();
            files.entry(format!("{folder}/")).or_default().insert(name.to_owned(), Line(File::of(entry.clone())));
        }
        let line = |address: &InterfaceAddress| Line(address.clone());
        let addresses = recording.addresses.clone();
        Self {
            rgym_recording: RECORDING_FORMAT,
            program: recording.program.clone(),
            taken: recording.taken.clone(),
            redacted: recording.redacted,
            cut: recording.cut.iter().cloned().map(Line).collect(),
            variables: recording.variables.clone(),
            addresses: addresses.map(|noted| noted.map(|listed| listed.iter().map(line).collect())),
            spaces: lines(&recording.spaces),
            libraries: lines(&recording.libraries),
            nccl: recording.loaded.nccl.clone().map(Version::of),
            cuda: recording.loaded.cuda.clone().map(Version::of),
            files,
        }
    }

    fn into_recording(self) -> Result<Recording, String> {
        let mut files = BTreeMap::new();
        for (folder, names) in self.files {
            for (name, Line(file)) in names {
                let path = key(&format!("{}/{name}", folder.trim_end_matches('/')));
                let entry = file.into_entry().map_err(|mistake| format!("{path}: {mistake}"))?;
                if !entry.is_empty() {
                    files.insert(path, entry);
                }
            }
        }
        let loaded = Loaded { nccl: self.nccl.map(Version::said), cuda: self.cuda.map(Version::said) };
        Ok(Recording {
            program: self.program,
            taken: self.taken,
            redacted: self.redacted,
            loaded,
            cut: self.cut.into_iter().map(|Line(cut)| cut).collect(),
            variables: self.variables,
            addresses: self.addresses.map(|noted| noted.map(|listed| listed.into_iter().map(|line| line.0).collect())),
            libraries: self.libraries.into_iter().map(|(name, Line(noted))| (name, Some(noted))).collect(),
            spaces: self.spaces.into_iter().map(|(path, Line(noted))| (key(&path), Some(noted))).collect(),
            files,
        })
    }
}

fn lines<T: Clone>(noted: &BTreeMap<String, Option<Noted<T>>>) -> BTreeMap<String, Line<Noted<T>>> {
    let noted = noted.iter().filter_map(|(name, noted)| noted.clone().map(|noted| (name.clone(), Line(noted))));
    noted.collect()
}

impl File {
    fn of(entry: Entry) -> Self {
        Self {
            text: entry.text,
            bytes: entry.bytes.map(|noted| noted.map(|bytes| Hex::of(&bytes))),
            names: entry.names,
            real: entry.real,
            node: entry.node.map(|noted| noted.map(|()| Open::Open)),
        }
    }

    fn into_entry(self) -> Result<Entry, &'static str> {
        let bytes = match self.bytes {
            None => None,
            Some(Noted::Refused(errno)) => Some(Noted::Refused(errno)),
            Some(Noted::Answer(hex)) => {
                Some(Noted::Answer(hex.bytes().ok_or("its bytes are not in hexadecimal digits")?))
            }
        };
        let node = self.node.map(|noted| noted.map(|Open::Open| ()));
        Ok(Entry { text: self.text, bytes, names: self.names, real: self.real, node })
    }
}

impl Hex {
    fn of(bytes: &[u8]) -> Self {
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Self { hex: bytes[..end].iter().map(|byte| format!("{byte:02x}")).collect(), length: bytes.len() }
    }

    fn bytes(&self) -> Option<Vec<u8>> {
        let digits = self.hex.as_bytes();
        if !digits.len().is_multiple_of(2) || self.length as u64 > BYTES_MAX || digits.len() / 2 > self.length {
            return None;
        }
        let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let pair = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
        let mut bytes: Vec<u8> = digits.chunks_exact(2).map(pair).collect::<Option<_>>()?;
        bytes.resize(self.length, 0);
        Some(bytes)
    }
}

impl Version {
    fn of(said: Result<String, String>) -> Self {
        said.map_or_else(Self::Error, Self::Version)
    }

    fn said(self) -> Result<String, String> {
        match self {
            Self::Version(version) => Ok(version),
            Self::Error(error) => Err(error),
        }
    }
}
