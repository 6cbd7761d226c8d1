//! Which transports this program has: scheme to connector. Applications reach transports only through here.

use std::collections::BTreeMap;
use std::sync::Arc;

use gym_core::{CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, InProcess, Result};

/// The connectors of one program, by scheme. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Transports {
    connectors: Arc<BTreeMap<&'static str, Arc<dyn Connector>>>,
}

impl Transports {
    /// None yet; see [`Transports::with`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The in-process switchboard; with the feature `http` also HTTP and framed connections, over TCP and Unix sockets.
    #[must_use]
    pub fn from_features(in_process: InProcess) -> Self {
        let transports = Self::new().with(Arc::new(in_process));
        #[cfg(feature = "http")]
        let transports = {
            use gym_transport_http::{FramesConfig, FramesConnector, HttpConnector};
            transports
                .with(Arc::new(HttpConnector::default()))
                .with(Arc::new(FramesConnector::tcp(FramesConfig::default())))
                .with(Arc::new(FramesConnector::unix(FramesConfig::default())))
        };
        transports
    }

    /// The same with one more connector; a later one of the same scheme replaces the earlier.
    #[must_use]
    pub fn with(self, connector: Arc<dyn Connector>) -> Self {
        let mut connectors = (*self.connectors).clone();
        connectors.insert(connector.scheme(), connector);
        Self { connectors: Arc::new(connectors) }
    }

    /// The schemes, in alphabetical order.
    pub fn schemes(&self) -> impl Iterator<Item = &'static str> {
        self.connectors.keys().copied()
    }

    /// Opens a channel to the first endpoint that can be reached.
    ///
    /// # Errors
    /// The last endpoint's error; `Unimplemented` naming the schemes when none is served here.
    pub async fn connect(&self, cx: &CallContext, endpoints: &[Endpoint], options: &ConnectOptions) -> Result<Channel> {
        self.connect_where(cx, endpoints, options, |_| true).await
    }

    /// Opens a channel to the first endpoint that can be reached and whose requests arrive in the order in which they were
    /// sent, as worker groups need it.
    ///
    /// # Errors
    /// As of [`Transports::connect`]; `Unimplemented` when what can be reached keeps no order.
    pub async fn connect_ordered(
        &self,
        cx: &CallContext,
        endpoints: &[Endpoint],
        options: &ConnectOptions,
    ) -> Result<Channel> {
        self.connect_where(cx, endpoints, options, |channel| channel.path().ordered).await
    }

    async fn connect_where(
        &self,
        cx: &CallContext,
        endpoints: &[Endpoint],
        options: &ConnectOptions,
        fits: impl Fn(&Channel) -> bool,
    ) -> Result<Channel> {
        let mut last = None;
        for endpoint in endpoints {
            let Some(connector) = self.connectors.get(endpoint.scheme()) else { continue };
            match connector.connect(cx, endpoint, options).await {
                Ok(channel) if fits(&channel) => return Ok(channel),
                Ok(_) => {
                    let said = format!("{endpoint} keeps no order; give its http+frames or unix+frames endpoint too");
                    last.get_or_insert_with(|| Error::not_started(Code::Unimplemented, said));
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| {
            let wanted: Vec<_> = endpoints.iter().map(Endpoint::as_str).collect();
            let here: Vec<_> = self.schemes().collect();
            Error::not_started(
                Code::Unimplemented,
                format!("no transport here for {}; this program has {}", wanted.join(", "), here.join(", ")),
            )
        }))
    }
}
