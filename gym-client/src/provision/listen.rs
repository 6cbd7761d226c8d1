//! How workers are reached.

use gym_core::{Listener, Result};
use serde::{Deserialize, Serialize};

/// What a worker process listens on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Listen {
    /// HTTP on a free port of the loopback interface.
    #[default]
    Http,
}

impl Listen {
    /// Binds it. Within a tokio runtime.
    ///
    /// # Errors
    /// The listener's own; `Unimplemented` when this program was built without the transport.
    pub(crate) fn bind(&self) -> Result<Box<dyn Listener>> {
        match self {
            #[cfg(feature = "http")]
            Self::Http => {
                let loopback = (std::net::Ipv4Addr::LOCALHOST, 0).into();
                Ok(Box::new(gym_transport_http::HttpListener::bind(
                    loopback,
                    gym_transport_http::HttpConfig::default(),
                )?))
            }
            #[cfg(not(feature = "http"))]
            Self::Http => Err(gym_core::Error::not_started(
                gym_core::Code::Unimplemented,
                "this program was built without the feature `http` of gym-client, which worker processes listen with",
            )),
        }
    }
}
