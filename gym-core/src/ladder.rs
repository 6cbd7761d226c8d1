//! The fallback ladder: what may move the calls to a peer, best first, and whether less than the best will do.
//!
//! ```text
//!   mem ▸ shm ▸ rdma ▸ ucx_tcp ▸ http
//!   └ in this process, shared memory of one host, an RDMA device, TCP by UCX, HTTP (or frames, where order is kept)
//! ```
//!
//! Pure: which rungs a peer really offers is found out by whoever connects.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// One rung: what moves the bytes between two peers. The lesser is the better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Level {
    /// `mem`: both ends are in this process.
    InProcess,
    /// `shm`: memory that two processes of one host share, by UCX.
    SharedMemory,
    /// `rdma`: an RDMA device, by UCX.
    Rdma,
    /// `ucx_tcp`: TCP, by UCX.
    UcxTcp,
    /// `http`: HTTP, or framed connections over TCP or a Unix socket.
    Http,
}

impl Level {
    /// All of them, best first.
    pub const ALL: [Self; 5] = [Self::InProcess, Self::SharedMemory, Self::Rdma, Self::UcxTcp, Self::Http];

    /// Its name in configurations, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProcess => "mem",
            Self::SharedMemory => "shm",
            Self::Rdma => "rdma",
            Self::UcxTcp => "ucx_tcp",
            Self::Http => "http",
        }
    }

    /// Whether it is one of UCX's.
    #[must_use]
    pub fn is_ucx(self) -> bool {
        matches!(self, Self::SharedMemory | Self::Rdma | Self::UcxTcp)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Level {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|level| level.as_str() == text).ok_or_else(|| {
            Error::invalid(format!("`{text}` is no transport; use auto, or one or more of {}", list(&Self::ALL)))
        })
    }
}

impl Serialize for Level {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Level {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(|error: Error| de::Error::custom(error.message()))
    }
}

/// The rungs that may be used, and from which one on a connection fails instead of falling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ladder {
    /// Best first, each once, at least one.
    levels: Vec<Level>,
    require: Option<Level>,
}

impl Ladder {
    /// Every rung: `auto`.
    #[must_use]
    pub fn auto() -> Self {
        Self { levels: Level::ALL.to_vec(), require: None }
    }

    /// Without UCX's rungs: what a program uses that was told nothing.
    #[must_use]
    pub fn without_ucx() -> Self {
        Self { levels: vec![Level::InProcess, Level::Http], require: None }
    }

    /// These rungs only, in the ladder's order.
    ///
    /// # Errors
    /// `InvalidArgument` when there is none.
    pub fn of(levels: impl IntoIterator<Item = Level>) -> Result<Self> {
        let mut levels: Vec<Level> = levels.into_iter().collect();
        levels.sort_unstable();
        levels.dedup();
        if levels.is_empty() {
            return Err(Error::invalid(format!("no transport is named; use auto, or some of {}", list(&Level::ALL))));
        }
        Ok(Self { levels, require: None })
    }

    /// The same, but never below `level`: a peer that cannot be reached at it, or better, is not reached at all.
    ///
    /// # Errors
    /// `InvalidArgument` when no rung is that good.
    pub fn require(mut self, level: Level) -> Result<Self> {
        if !self.levels.iter().any(|known| *known <= level) {
            let levels = list(&self.levels);
            return Err(Error::invalid(format!(
                "require_transport is {level}, but transport names only what is below it ({levels}); add {level}"
            )));
        }
        self.require = Some(level);
        Ok(self)
    }

    /// What a configuration says under `transport` and `require_transport`; `None` when it says nothing.
    ///
    /// # Errors
    /// As of [`Ladder::require`].
    pub fn configured(transport: Option<Self>, require: Option<Level>) -> Result<Option<Self>> {
        match (transport, require) {
            (ladder, None) => Ok(ladder),
            (ladder, Some(level)) => ladder.unwrap_or_else(Self::auto).require(level).map(Some),
        }
    }

    /// The rungs that are named, best first.
    #[must_use]
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The least that will do, if that was said.
    #[must_use]
    pub fn required(&self) -> Option<Level> {
        self.require
    }

    /// Why a rung may not be used; `None` when it may.
    #[must_use]
    pub fn refusal(&self, level: Level) -> Option<String> {
        if !self.levels.contains(&level) {
            return Some(format!("transport names only {}", list(&self.levels)));
        }
        self.require.filter(|required| level > *required).map(|required| format!("below require_transport {required}"))
    }

    /// Whether a rung may be used.
    #[must_use]
    pub fn allows(&self, level: Level) -> bool {
        self.refusal(level).is_none()
    }

    /// Whether UCX may be used at all.
    #[must_use]
    pub fn uses_ucx(&self) -> bool {
        Level::ALL.into_iter().any(|level| level.is_ucx() && self.allows(level))
    }
}

impl Default for Ladder {
    fn default() -> Self {
        Self::auto()
    }
}

impl fmt::Display for Ladder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.levels == Level::ALL {
            f.write_str("auto")?
        } else {
            f.write_str(&list(&self.levels))?
        }
        self.require.map_or(Ok(()), |level| write!(f, ", at least {level}"))
    }
}

/// `auto`, or rungs with commas between them.
impl FromStr for Ladder {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "auto" {
            return Ok(Self::auto());
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Self::of(names.map(str::parse).collect::<Result<Vec<_>>>()?)
    }
}

/// `auto`, one rung, rungs with commas between them, or a list of rungs.
impl<'de> Deserialize<'de> for Ladder {
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

fn list(levels: &[Level]) -> String {
    levels.iter().map(|level| level.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ladder(text: &str) -> Ladder {
        text.parse().unwrap()
    }

    #[test]
    fn rungs_come_back_from_their_names_in_the_ladders_order() {
        for level in Level::ALL {
            assert_eq!(level.as_str().parse::<Level>().unwrap(), level);
        }
        assert_eq!(ladder("http, shm,shm").levels(), [Level::SharedMemory, Level::Http]);
        assert_eq!(ladder("auto").to_string(), "auto");
        let read = |text: &str| serde_json::from_str::<Ladder>(text).map_err(|error| error.to_string());
        assert_eq!(read(r#"["rdma", "http"]"#), Ok(ladder("rdma,http")));
        assert_eq!(read(r#""auto""#), Ok(Ladder::auto()));
        assert!(read(r#""rmda""#).unwrap_err().contains("`rmda` is no transport; use auto"), "names what there is");
        assert!(read("[]").unwrap_err().contains("no transport is named"));
        assert!(read("5").unwrap_err().contains("text or a list"));
    }

    #[test]
    fn a_required_level_refuses_what_is_below_it_and_keeps_what_is_better() {
        let ladder = Ladder::auto().require(Level::Rdma).unwrap();
        let allowed: Vec<_> = Level::ALL.into_iter().filter(|level| ladder.allows(*level)).collect();
        assert_eq!(allowed, [Level::InProcess, Level::SharedMemory, Level::Rdma]);
        assert_eq!(ladder.refusal(Level::Http).as_deref(), Some("below require_transport rdma"));
        assert_eq!(ladder.to_string(), "auto, at least rdma");
    }

    #[test]
    fn what_cannot_be_met_is_refused_when_it_is_said() {
        let error = "http".parse::<Ladder>().unwrap().require(Level::Rdma).unwrap_err();
        assert!(error.to_string().contains("require_transport is rdma") && error.to_string().contains("add rdma"));
        assert_eq!(Ladder::configured(None, None).unwrap(), None);
        let required = Ladder::configured(None, Some(Level::Http)).unwrap().unwrap();
        assert_eq!(required.levels(), Level::ALL);
    }

    #[test]
    fn ucx_is_used_only_where_one_of_its_rungs_may_be() {
        assert!(Ladder::auto().uses_ucx() && ladder("mem,shm").uses_ucx());
        assert!(!Ladder::without_ucx().uses_ucx());
        assert!(!Ladder::auto().require(Level::InProcess).unwrap().uses_ucx());
    }
}
