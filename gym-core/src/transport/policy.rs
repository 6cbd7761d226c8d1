//! Transports by name, in order of preference, and the policy that selects the transports that a program may use.
//!
//! ```text
//!   mem ▸ … ▸ http      the backends of a program name their transports; the preference of each decides its position
//! ```
//!
//! Nothing here does I/O: only connecting shows which transports a peer supports.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result};

/// A transport, identified by its name in configurations, logs and metrics. Ordered by preference: the smallest is the most
/// preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transport {
    preference: u16,
    name: &'static str,
    on_request: bool,
}

impl Transport {
    /// `mem`: calls within this process.
    pub const MEM: Self = Self::new("mem", 0);

    /// Creates a transport. Lower preferences are tried first: `mem` has 0, the transports of UCX have 100, 200 and 300, `http`
    /// has 400.
    #[must_use]
    pub const fn new(name: &'static str, preference: u16) -> Self {
        Self { preference, name, on_request: false }
    }

    /// Returns the transport, to be used only if a configuration names it or sets `auto`.
    #[must_use]
    pub const fn on_request(mut self) -> Self {
        self.on_request = true;
        self
    }

    /// Returns the name of the transport.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.name
    }

    /// Finds a transport by its name.
    ///
    /// # Errors
    /// `InvalidArgument` with the known names.
    pub fn named(name: &str, known: &[Self]) -> Result<Self> {
        known.iter().copied().find(|known| known.name == name).ok_or_else(|| unknown(name, known))
    }
}

fn unknown(name: &str, known: &[Transport]) -> Error {
    Error::invalid(format!("`{name}` is no transport; use auto, or one or more of {}", list(known)))
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Serialize for Transport {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// The transports that a configuration allows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Allowed {
    Auto,
    /// All transports except those on request, because nothing was configured.
    Default,
    /// Transports by name; only a program has the list of all its transports.
    Named(Vec<String>),
}

/// The minimum transport.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Minimum {
    /// The configured name; its position in the order of preference is not known yet.
    Named(String),
    Known(Transport),
}

impl Minimum {
    fn name(&self) -> &str {
        match self {
            Self::Named(name) => name,
            Self::Known(transport) => transport.name,
        }
    }

    fn allows(&self, transport: Transport) -> bool {
        match self {
            Self::Named(name) => transport.name == name,
            Self::Known(minimum) => transport <= *minimum,
        }
    }
}

/// The allowed transports, and the minimum transport below which a connection fails instead of falling back.
///
/// A policy holds names. A program that has a list of its transports checks the names with [`TransportPolicy::check`].
/// [`TransportPolicy::resolved`] then gives the minimum its position in the order of preference; until then, only the minimum
/// itself is allowed.
///
/// ```
/// use gym_core::transport::{Transport, TransportPolicy};
///
/// const QUIC: Transport = Transport::new("quic", 350);
/// let policy: TransportPolicy = "quic, mem".parse()?;
/// let policy = policy.require("quic").resolved(&[Transport::MEM, QUIC]);
/// assert!(policy.allows(QUIC) && policy.allows(Transport::MEM));
/// assert_eq!(policy.to_string(), "mem, quic, at least quic");
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportPolicy {
    allowed: Allowed,
    minimum: Option<Minimum>,
}

impl TransportPolicy {
    /// Allows every transport: `auto`.
    #[must_use]
    pub fn auto() -> Self {
        Self { allowed: Allowed::Auto, minimum: None }
    }

    /// Allows every transport except those on request: the policy of a program without configuration.
    #[must_use]
    pub fn unconfigured() -> Self {
        Self { allowed: Allowed::Default, minimum: None }
    }

    /// Allows only these transports, in the order of their preference.
    ///
    /// # Errors
    /// `InvalidArgument` if there are none.
    pub fn of(transports: impl IntoIterator<Item = Transport>) -> Result<Self> {
        Self::named(transports.into_iter().map(|transport| transport.name.to_owned()))
    }

    /// Allows only the transports with these names, in the order of their preference.
    ///
    /// # Errors
    /// `InvalidArgument` if there are none.
    pub fn named(names: impl IntoIterator<Item = String>) -> Result<Self> {
        let names: Vec<String> = names.into_iter().collect();
        if names.is_empty() {
            return Err(Error::invalid("no transport is named; use auto, or the names of one or more transports"));
        }
        Ok(Self { allowed: Allowed::Named(names), minimum: None })
    }

    /// Returns the policy with a minimum: no transport less preferred than the one of this name is used.
    #[must_use]
    pub fn require(mut self, transport: impl Into<String>) -> Self {
        self.minimum = Some(Minimum::Named(transport.into()));
        self
    }

    /// Returns the policy of the configuration keys `transport` and `require_transport`; `None` if neither is set.
    #[must_use]
    pub fn configured(transport: Option<Self>, require: Option<String>) -> Option<Self> {
        match require {
            None => transport,
            Some(minimum) => Some(transport.unwrap_or_else(Self::auto).require(minimum)),
        }
    }

    /// Checks the policy against the transports of a program.
    ///
    /// # Errors
    /// `InvalidArgument` with an unknown name and the known ones, or if the policy names only transports below its minimum.
    pub fn check(&self, known: &[Transport]) -> Result<()> {
        if let Some(name) = self.unknown_name(known) {
            return Err(unknown(name, known));
        }
        let Some(minimum) = &self.minimum else { return Ok(()) };
        let resolved = Minimum::Known(Transport::named(minimum.name(), known)?);
        if known.iter().any(|known| self.is_named(*known) && resolved.allows(*known)) {
            return Ok(());
        }
        let name = minimum.name();
        Err(Error::invalid(format!(
            "require_transport is {name}, but transport allows only less preferred ones ({}); add {name} to transport",
            self.without_minimum()
        )))
    }

    fn unknown_name(&self, known: &[Transport]) -> Option<&str> {
        let Allowed::Named(names) = &self.allowed else { return None };
        names.iter().map(String::as_str).find(|name| !known.iter().any(|known| known.name == *name))
    }

    /// Returns the policy for a program that has these transports: names in the order of preference, unknown names last.
    #[must_use]
    pub fn resolved(mut self, known: &[Transport]) -> Self {
        let preference = |name: &str| known.iter().find(|known| known.name == name).map(|known| known.preference);
        if let Allowed::Named(names) = &mut self.allowed {
            names.sort_by_key(|name| preference(name).map_or(u32::MAX, u32::from));
        }
        if let Some(minimum) = &mut self.minimum
            && let Ok(transport) = Transport::named(minimum.name(), known)
        {
            *minimum = Minimum::Known(transport);
        }
        self
    }

    /// Returns the allowed transports in the form of a configuration: `["auto"]`, or names. Empty if nothing was configured.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        match &self.allowed {
            Allowed::Auto => vec!["auto"],
            Allowed::Default => Vec::new(),
            Allowed::Named(names) => names.iter().map(String::as_str).collect(),
        }
    }

    /// Returns the name of the minimum transport, if one is required.
    #[must_use]
    pub fn required(&self) -> Option<&str> {
        self.minimum.as_ref().map(Minimum::name)
    }

    /// Returns `true` if the policy allows every transport, whatever a program has.
    #[must_use]
    pub fn is_auto(&self) -> bool {
        self.allowed == Allowed::Auto && self.minimum.is_none()
    }

    fn is_named(&self, transport: Transport) -> bool {
        match &self.allowed {
            Allowed::Auto => true,
            Allowed::Default => !transport.on_request,
            Allowed::Named(names) => names.iter().any(|name| name == transport.name),
        }
    }

    fn without_minimum(&self) -> Self {
        Self { minimum: None, ..self.clone() }
    }

    /// Returns the reason why a transport may not be used; `None` if it may.
    #[must_use]
    pub fn refusal(&self, transport: Transport) -> Option<String> {
        if !self.is_named(transport) {
            return Some(match self.allowed {
                Allowed::Default => format!("used only on request; add {transport} to transport"),
                _ => format!("transport allows only {}", self.without_minimum()),
            });
        }
        let minimum = self.minimum.as_ref().filter(|minimum| !minimum.allows(transport))?;
        Some(format!("below require_transport {}", minimum.name()))
    }

    /// Returns `true` if a transport may be used.
    #[must_use]
    pub fn allows(&self, transport: Transport) -> bool {
        self.is_named(transport) && self.minimum.as_ref().is_none_or(|minimum| minimum.allows(transport))
    }
}

impl Default for TransportPolicy {
    fn default() -> Self {
        Self::auto()
    }
}

impl fmt::Display for TransportPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.allowed {
            Allowed::Auto => f.write_str("auto")?,
            Allowed::Default => f.write_str("all but those on request")?,
            Allowed::Named(names) => f.write_str(&names.join(", "))?,
        }
        self.minimum.as_ref().map_or(Ok(()), |minimum| write!(f, ", at least {}", minimum.name()))
    }
}

/// Parses `auto`, or names separated by commas.
impl FromStr for TransportPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "auto" {
            return Ok(Self::auto());
        }
        Self::named(text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned))
    }
}

/// The forms of a transport policy in a configuration: `auto`, one name, names separated by commas, or a list of names.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum WrittenTransports {
    /// `auto`, one name, or several separated by commas.
    Text(String),
    /// A list of names.
    List(Vec<String>),
}

impl<'de> Deserialize<'de> for TransportPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wrong = |_| de::Error::custom("a transport is text or a list of texts, as in auto or [shm, http]");
        let text = match WrittenTransports::deserialize(deserializer).map_err(wrong)? {
            WrittenTransports::Text(text) => text,
            WrittenTransports::List(names) => names.join(","),
        };
        text.parse().map_err(|error: Error| de::Error::custom(error.message()))
    }
}

fn list(transports: &[Transport]) -> String {
    transports.iter().map(|transport| transport.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHM: Transport = Transport::new("shm", 100).on_request();
    const RDMA: Transport = Transport::new("rdma", 200).on_request();
    const HTTP: Transport = Transport::new("http", 400);
    const KNOWN: [Transport; 4] = [Transport::MEM, SHM, RDMA, HTTP];

    fn policy(text: &str) -> TransportPolicy {
        text.parse::<TransportPolicy>().unwrap().resolved(&KNOWN)
    }

    fn allowed(policy: &TransportPolicy) -> Vec<Transport> {
        KNOWN.into_iter().filter(|transport| policy.allows(*transport)).collect()
    }

    #[test]
    fn transports_come_back_from_their_names_in_the_order_of_preference() {
        for transport in KNOWN {
            assert_eq!(Transport::named(transport.as_str(), &KNOWN).unwrap(), transport);
        }
        assert_eq!(allowed(&policy("http, shm,shm")), [SHM, HTTP]);
        assert_eq!(policy("http, shm").to_string(), "shm, http");
        assert_eq!(policy("auto").to_string(), "auto");
        let read = |text: &str| serde_json::from_str::<TransportPolicy>(text).map_err(|error| error.to_string());
        assert_eq!(read(r#"["rdma", "http"]"#), Ok(policy("rdma,http")));
        assert_eq!(read(r#""auto""#), Ok(TransportPolicy::auto()));
        let unknown = read(r#""rmda""#).unwrap().check(&KNOWN).unwrap_err().to_string();
        assert!(unknown.contains("`rmda` is no transport; use auto"), "names what there is: {unknown}");
        assert!(read("[]").unwrap_err().contains("no transport is named"));
        assert!(read("5").unwrap_err().contains("text or a list"));
    }

    #[test]
    fn a_required_transport_refuses_what_is_below_it_and_keeps_what_is_better() {
        let policy = TransportPolicy::auto().require("rdma").resolved(&KNOWN);
        assert_eq!(allowed(&policy), [Transport::MEM, SHM, RDMA]);
        assert_eq!(policy.refusal(HTTP).as_deref(), Some("below require_transport rdma"));
        assert_eq!(policy.to_string(), "auto, at least rdma");
    }

    #[test]
    fn what_cannot_be_met_is_refused_when_the_transports_are_known() {
        let error = policy("http").require("rdma").check(&KNOWN).unwrap_err();
        assert!(error.to_string().contains("require_transport is rdma") && error.to_string().contains("add rdma"));
        let error = TransportPolicy::auto().require("rmda").check(&KNOWN).unwrap_err();
        assert!(error.to_string().contains("`rmda` is no transport"), "{error}");
        assert_eq!(TransportPolicy::configured(None, None), None);
        let required = TransportPolicy::configured(None, Some("http".to_owned())).unwrap().resolved(&KNOWN);
        assert_eq!(allowed(&required), KNOWN);
    }

    #[test]
    fn transports_on_request_are_used_only_where_they_are_named() {
        assert!(policy("auto").allows(SHM) && policy("mem,shm").allows(SHM));
        assert_eq!(allowed(&TransportPolicy::unconfigured()), [Transport::MEM, HTTP]);
        assert_eq!(allowed(&TransportPolicy::auto().require("mem").resolved(&KNOWN)), [Transport::MEM]);
    }
}
