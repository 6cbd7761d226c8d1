//! HTTP and framed connections as one backend of a program.

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use gym_core::transport::{Backend, BoundListener, Connector, ListenOptions, Listener};
use gym_core::{Code, Error, Handler, Result};

use crate::frames::{FramesConfig, FramesConnector, UnixListener};
use crate::http1::{HttpConfig, HttpConnector, HttpListener};

/// Calls and listens over HTTP, and over frames if order is required: over TCP on the same port, and over Unix sockets.
///
/// ```
/// use std::sync::Arc;
///
/// use gym_core::transport::{Backend, ListenOptions, handler_fn};
/// use gym_core::{Request, Response};
/// use gym_transport_http::{FramesConfig, HttpBackend, HttpConfig};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> gym_core::Result<()> {
/// let backend = HttpBackend::new(HttpConfig::default(), FramesConfig::default());
/// let echo = Arc::new(handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) }));
/// let bound = backend.listen(&ListenOptions::default().at("127.0.0.1", 0), echo).await?.expect("an address to bind");
/// assert_eq!(bound.listener.endpoints()[0].scheme(), "http");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct HttpBackend {
    /// Limits and timeouts of HTTP. Default: [`HttpConfig::default`].
    pub http: HttpConfig,
    /// Limits and timeouts of frames. Default: [`FramesConfig::default`].
    pub frames: FramesConfig,
}

impl HttpBackend {
    /// Creates a backend with these limits and timeouts.
    #[must_use]
    pub fn new(http: HttpConfig, frames: FramesConfig) -> Self {
        Self { http, frames }
    }
}

#[async_trait]
impl Backend for HttpBackend {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![
            Arc::new(HttpConnector::new(self.http.clone())),
            Arc::new(FramesConnector::tcp(self.frames.clone())),
            Arc::new(FramesConnector::unix(self.frames.clone())),
        ]
    }

    async fn listen(&self, options: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>> {
        let listener: Box<dyn Listener> = match (options.address()?, &options.socket) {
            (Some(address), _) => Box::new(bind(address, options.advertised_host(), self.http.clone())?),
            (None, Some(socket)) => Box::new(UnixListener::bind(socket, self.frames.clone())?),
            (None, None) => return Ok(None),
        };
        Ok(Some(BoundListener { listener, handler }))
    }
}

fn bind(address: SocketAddr, advertised: Option<&str>, config: HttpConfig) -> Result<HttpListener> {
    let listener = HttpListener::bind(address, config).and_then(|listener| match advertised {
        Some(host) => listener.advertised_as(host),
        None => Ok(listener),
    });
    listener.map_err(|error| match error.code() {
        Code::AlreadyExists => Error::not_started(
            Code::AlreadyExists,
            format!("{address} is in use; stop what listens there, or choose another port"),
        )
        .caused_by(error),
        _ => error,
    })
}
