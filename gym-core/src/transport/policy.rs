//! Transports by name, in order of preference, and the policy that says which of them a program may use.
//!
//! ```text
//!   mem ▸ shm ▸ rdma ▸ ucx_tcp ▸ http      built in; the preference of a transport of your own decides its position
//! ```
//!
//! Nothing here does I/O: only connecting shows which transports a peer supports.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result};

/// A transport, by its name in configurations, logs and metrics. Ordered by preference: the least is the most preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transport {
    preference: u16,
    name: &'static str,
    on_request: bool,
}

impl Transport {
    /// `mem`: calls within this process.
    pub const MEM: Self = Self::new("mem", 0);
    /// `shm`: UCX over memory shared by two processes of one host.
    pub const SHM: Self = Self::new("shm", 100).on_request();
    /// `rdma`: UCX over an RDMA device.
    pub const RDMA: Self = Self::new("rdma", 200).on_request();
    /// `ucx_tcp`: UCX over TCP.
    pub const UCX_TCP: Self = Self::new("ucx_tcp", 300).on_request();
    /// `http`: HTTP, or framed connections over TCP or a Unix socket.
    pub const HTTP: Self = Self::new("http", 400);
    /// The built-in transports, most preferred first.
    pub const KNOWN: [Self; 5] = [Self::MEM, Self::SHM, Self::RDMA, Self::UCX_TCP, Self::HTTP];

    /// A transport of your own. Lower preferences are tried first; the built-in transports have 0, 100, 200, 300 and 400.
    #[must_use]
    pub const fn new(name: &'static str, preference: u16) -> Self {
        Self { preference, name, on_request: false }
    }

    /// The same transport, used only if a configuration names it or says `auto`.
    #[must_use]
    pub const fn on_request(mut self) -> Self {
        self.on_request = true;
        self
    }

    /// The name of the transport.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.name
    }

    /// Returns `true` for the transports of UCX.
    #[must_use]
    pub fn is_ucx(self) -> bool {
        matches!(self, Self::SHM | Self::RDMA | Self::UCX_TCP)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl FromStr for Transport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::KNOWN.into_iter().find(|known| known.name == text).ok_or_else(|| {
            Error::invalid(format!("`{text}` is no transport; use auto, or one or more of {}", list(&Self::KNOWN)))
        })
    }
}

impl Serialize for Transport {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Transport {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(|error: Error| de::Error::custom(error.message()))
    }
}

/// The transports that a configuration allows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Allowed {
    Auto,
    /// Nothing was configured: all but those on request.
    Default,
    /// These, by name: only a program knows all of its transports.
    Named(Vec<String>),
}

/// The transports that may be used, and the minimum transport below which a connection fails instead of falling back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportPolicy {
    allowed: Allowed,
    require: Option<Transport>,
}

impl TransportPolicy {
    /// Every transport: `auto`.
    #[must_use]
    pub fn auto() -> Self {
        Self { allowed: Allowed::Auto, require: None }
    }

    /// Every transport except those used on request only: the policy of a program without configuration.
    #[must_use]
    pub fn without_ucx() -> Self {
        Self { allowed: Allowed::Default, require: None }
    }

    /// These transports only, in the order of their preference.
    ///
    /// # Errors
    /// `InvalidArgument` when there is none.
    pub fn of(transports: impl IntoIterator<Item = Transport>) -> Result<Self> {
        Self::named(transports.into_iter().map(|transport| transport.name.to_owned()))
    }

    /// The transports with these names only, in the order of their preference.
    ///
    /// # Errors
    /// `InvalidArgument` when there is none.
    pub fn named(names: impl IntoIterator<Item = String>) -> Result<Self> {
        let names: Vec<String> = names.into_iter().collect();
        if names.is_empty() {
            return Err(Error::invalid(format!(
                "no transport is named; use auto, or some of {}",
                list(&Transport::KNOWN)
            )));
        }
        Ok(Self { allowed: Allowed::Named(names), require: None })
    }

    /// The same policy with a minimum: no transport less preferred than `transport` is used.
    ///
    /// # Errors
    /// `InvalidArgument` if the policy names only less preferred transports.
    pub fn require(mut self, transport: Transport) -> Result<Self> {
        let preferred = |known: &Transport| self.is_named(*known) && *known <= transport;
        if !Transport::KNOWN.iter().chain([&transport]).any(preferred) {
            return Err(Error::invalid(format!(
                "require_transport is {transport}, but transport names only what is below it ({self}); add {transport}"
            )));
        }
        self.require = Some(transport);
        Ok(self)
    }

    /// The policy of the configuration keys `transport` and `require_transport`; `None` if neither is set.
    ///
    /// # Errors
    /// As of [`TransportPolicy::require`].
    pub fn configured(transport: Option<Self>, require: Option<Transport>) -> Result<Option<Self>> {
        match (transport, require) {
            (policy, None) => Ok(policy),
            (policy, Some(minimum)) => policy.unwrap_or_else(Self::auto).require(minimum).map(Some),
        }
    }

    /// Checks that every name of the policy is in `known`.
    ///
    /// # Errors
    /// `InvalidArgument` with an unknown name and the known ones.
    pub fn check(&self, known: &[Transport]) -> Result<()> {
        let Allowed::Named(names) = &self.allowed else { return Ok(()) };
        match names.iter().find(|name| !known.iter().any(|known| known.name == **name)) {
            Some(name) => {
                Err(Error::invalid(format!("`{name}` is no transport; use auto, or one or more of {}", list(known))))
            }
            None => Ok(()),
        }
    }

    /// The built-in transports that the policy names, most preferred first.
    #[must_use]
    pub fn named_transports(&self) -> Vec<Transport> {
        Transport::KNOWN.into_iter().filter(|known| self.is_named(*known)).collect()
    }

    /// The minimum transport, if one is required.
    #[must_use]
    pub fn required(&self) -> Option<Transport> {
        self.require
    }

    fn is_named(&self, transport: Transport) -> bool {
        match &self.allowed {
            Allowed::Auto => true,
            Allowed::Default => !transport.on_request,
            Allowed::Named(names) => names.iter().any(|name| name == transport.name),
        }
    }

    /// The reason why a transport may not be used; `None` if it may.
    #[must_use]
    pub fn refusal(&self, transport: Transport) -> Option<String> {
        if !self.is_named(transport) {
            return Some(format!("transport names only {}", Self { require: None, ..self.clone() }));
        }
        self.require
            .filter(|required| transport > *required)
            .map(|required| format!("below require_transport {required}"))
    }

    /// Returns `true` if a transport may be used.
    #[must_use]
    pub fn allows(&self, transport: Transport) -> bool {
        self.refusal(transport).is_none()
    }

    /// Returns `true` if any transport of UCX may be used.
    #[must_use]
    pub fn uses_ucx(&self) -> bool {
        Transport::KNOWN.into_iter().any(|known| known.is_ucx() && self.allows(known))
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
            Allowed::Default => f.write_str(&list(&self.named_transports()))?,
            Allowed::Named(names) => {
                let mut known = self.named_transports().into_iter().map(|known| known.name).collect::<Vec<_>>();
                known.extend(
                    names
                        .iter()
                        .map(String::as_str)
                        .filter(|name| !Transport::KNOWN.iter().any(|known| known.name == *name)),
                );
                f.write_str(&known.join(", "))?;
            }
        }
        self.require.map_or(Ok(()), |minimum| write!(f, ", at least {minimum}"))
    }
}

/// `auto`, or names with commas between them.
impl FromStr for TransportPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "auto" {
            return Ok(Self::auto());
        }
        Self::named(text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned))
    }
}

/// `auto`, one name, names with commas between them, or a list of names.
impl<'de> Deserialize<'de> for TransportPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            List(Vec<String>),
        }
        let wrong = |_| de::Error::custom("a transport is text or a list of texts, as in auto or [shm, http]");
        let text = match Written::deserialize(deserializer).map_err(wrong)? {
            Written::Text(text) => text,
            Written::List(names) => names.join(","),
        };
        text.parse().map_err(|error: Error| de::Error::custom(error.message()))
    }
}

fn list(transports: &[Transport]) -> String {
    transports.iter().map(|transport| transport.name).collect::<Vec<_>>().join(", ")
}
