//! Ordered name and value pairs of a request or response; headers over HTTP.

use std::borrow::Cow;

/// Pairs of a lower-case name and a value, in order; a name may repeat (`set-cookie` does). Headers over HTTP.
///
/// ```
/// use gym_core::Metadata;
///
/// let mut metadata = Metadata::new();
/// metadata.push("set-cookie", "session=7");
/// metadata.push("set-cookie", "node=2");
/// assert_eq!(metadata.get("set-cookie"), Some("session=7"));
/// assert_eq!(metadata.all("set-cookie").collect::<Vec<_>>(), ["session=7", "node=2"]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(Vec<(Cow<'static, str>, String)>);

impl Metadata {
    /// Creates empty metadata.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a pair at the end. Names are lower case.
    pub fn push(&mut self, name: impl Into<Cow<'static, str>>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    /// Makes room for `pairs` more pairs and no others.
    pub(crate) fn reserve_exact(&mut self, pairs: usize) {
        self.0.reserve_exact(pairs);
    }

    /// Returns the first value of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Returns all values of a name, in order.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.iter().filter(move |(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Returns all pairs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), value.as_str()))
    }

    /// Keeps the pairs for whose name `keep` returns `true`.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.0.retain(|(name, _)| keep(name));
    }

    /// Returns the number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if there are no pairs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
