//! The JSON header: an entry for each tensor, and `__metadata__` with strings.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::base::error::{Error, Result};

/// The key of the entry that is not a tensor.
const METADATA: &str = "__metadata__";

/// The type, shape and position of a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) data_offsets: [usize; 2],
}

/// A header under construction.
pub(super) struct Header(Vec<u8>);

impl Header {
    pub(super) fn new(metadata: &BTreeMap<String, String>) -> Self {
        let mut header = Self(b"{".to_vec());
        if !metadata.is_empty() {
            header.member(METADATA, metadata);
        }
        header
    }

    pub(super) fn insert(&mut self, name: &str, entry: &Entry) -> Result<()> {
        if name == METADATA {
            return Err(Error::invalid(format!("a tensor cannot be called {METADATA:?}")));
        }
        self.member(name, entry);
        Ok(())
    }

    fn member(&mut self, name: &str, value: &impl Serialize) {
        if self.0.len() > 1 {
            self.0.push(b',');
        }
        let written = serde_json::to_writer(&mut self.0, name).and_then(|()| {
            self.0.push(b':');
            serde_json::to_writer(&mut self.0, value)
        });
        written.expect("names, numbers and texts are written to a vector");
    }

    pub(super) fn into_text(mut self) -> Vec<u8> {
        self.0.push(b'}');
        self.0
    }
}

/// Parses the tensors and metadata of a header.
pub(super) fn parse(text: &[u8]) -> Result<(BTreeMap<String, Entry>, BTreeMap<String, String>)> {
    if text.first() != Some(&b'{') {
        return Err(Error::invalid("the header does not begin with an object"));
    }
    let parsed: Parsed = serde_json::from_slice(text)
        .map_err(|error| Error::invalid(format!("the header is not what the format asks for: {error}")))?;
    Ok((parsed.tensors, parsed.metadata))
}

struct Parsed {
    tensors: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Parsed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members)
    }
}

/// Visits the entries one by one: a map would keep the last of two equal names and hide the first.
struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Parsed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Parsed, A::Error> {
        let mut parsed = Parsed { tensors: BTreeMap::new(), metadata: BTreeMap::new() };
        let mut has_metadata = false;
        while let Some(name) = members.next_key::<String>()? {
            let twice = if name == METADATA {
                parsed.metadata = members.next_value()?;
                std::mem::replace(&mut has_metadata, true)
            } else {
                let entry = members.next_value()?;
                parsed.tensors.insert(name.clone(), entry).is_some()
            };
            if twice {
                return Err(A::Error::custom(format!("{name:?} comes twice")));
            }
        }
        Ok(parsed)
    }
}
