//! HTTP and framed connections as one backend of a program.

use std::net::ToSocketAddrs;
use std::sync::Arc;

use async_trait::async_trait;
use gym_core::transport::{Backend, BoundListener, Connector, ListenOptions, Listener};
use gym_core::{Code, Error, Handler, Result};

use crate::frames::{FramesConfig, FramesConnector, UnixListener};
use crate::http1::{HttpConfig, HttpConnector, HttpListener};

/// Calls and listens by HTTP; by frames where order is kept: over TCP through the same port, and over Unix sockets.
#[derive(Clone, Debug, Default)]
pub struct HttpBackend {
    /// Limits of HTTP.
    pub http: HttpConfig,
    /// Limits of frames.
    pub frames: FramesConfig,
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
        let listener: Box<dyn Listener> = match (&options.host, &options.socket) {
            (Some((host, port)), _) => Box::new(bind(host, *port, self.http.clone())?),
            (None, Some(socket)) => Box::new(UnixListener::bind(socket, self.frames.clone())?),
            (None, None) => return Ok(None),
        };
        Ok(Some(BoundListener { listener, handler }))
    }
}

fn bind(host: &str, port: u16, config: HttpConfig) -> Result<HttpListener> {
    let unknown = || Error::invalid(format!("the host `{host}` cannot be resolved; use an address of this machine"));
    let address = (host, port).to_socket_addrs().ok().and_then(|mut found| found.next()).ok_or_else(unknown)?;
    HttpListener::bind(address, config).and_then(|listener| listener.advertised_as(host)).map_err(|error| {
        match error.code() {
            Code::AlreadyExists => Error::not_started(
                Code::AlreadyExists,
                format!("{address} is in use; stop what listens there, or choose another port"),
            )
            .caused_by(error),
            _ => error,
        }
    })
}
