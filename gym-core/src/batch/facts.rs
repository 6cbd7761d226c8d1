//! The metadata of a batch. Most batches have none, every call carries one: an empty one is a word and costs nothing to make.

use std::ops::Deref;
use std::sync::LazyLock;

use serde_json::{Map, Value};

/// A map that takes memory from its first entry on.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts(Option<Box<Map<String, Value>>>);

static NONE: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

impl Facts {
    pub(super) fn to_mut(&mut self) -> &mut Map<String, Value> {
        self.0.get_or_insert_default()
    }
}

impl Deref for Facts {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        self.0.as_deref().unwrap_or_else(|| &NONE)
    }
}

impl From<Map<String, Value>> for Facts {
    fn from(map: Map<String, Value>) -> Self {
        Self((!map.is_empty()).then(|| Box::new(map)))
    }
}

impl PartialEq for Facts {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
