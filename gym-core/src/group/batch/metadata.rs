//! The metadata of a batch. Most batches have none, but every call carries one. Empty metadata is a null pointer without
//! allocation.

use std::ops::Deref;
use std::sync::LazyLock;

use serde_json::{Map, Value};

/// A map that allocates when its first entry is added.
#[derive(Clone, Debug, Default)]
pub(super) struct BatchMetadata(Option<Box<Map<String, Value>>>);

static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

impl BatchMetadata {
    pub(super) fn to_mut(&mut self) -> &mut Map<String, Value> {
        self.0.get_or_insert_default()
    }
}

impl Deref for BatchMetadata {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        self.0.as_deref().unwrap_or_else(|| &EMPTY)
    }
}

impl From<Map<String, Value>> for BatchMetadata {
    fn from(map: Map<String, Value>) -> Self {
        Self((!map.is_empty()).then(|| Box::new(map)))
    }
}

impl PartialEq for BatchMetadata {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
