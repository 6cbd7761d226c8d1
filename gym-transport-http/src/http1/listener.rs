//! Listens for HTTP connections.

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use gym_core::base::raise_descriptors;
use gym_core::message::PeerInfo;
use gym_core::transport::{Incoming, Listener, host_port};
use gym_core::{Code, Endpoint, Error, Result};
use rustix::io::Errno;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use crate::frames::FRAMES_SCHEME;
use crate::frames::connection::answering::ListenerState;
use crate::http1::SCHEME;
use crate::http1::config::HttpConfig;
use crate::http1::incoming::HttpIncoming;
use crate::wire::socket::{ACCEPT_RETRY_INTERVAL, set_keep_alive};

/// Accepts HTTP/1.1 connections. Connections beyond the limit wait in the kernel's backlog, and calls beyond theirs wait in the
/// listener. No peer is rejected for lack of capacity.
#[derive(Debug)]
pub struct HttpListener {
    listener: TcpListener,
    address: SocketAddr,
    endpoints: [Endpoint; 2],
    config: Arc<HttpConfig>,
    connections: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    frames: ListenerState,
    /// The permit for the next connection: acquired before the connection is accepted, and kept if `accept` is cancelled.
    permit: Option<OwnedSemaphorePermit>,
}

impl HttpListener {
    /// Listens on an address; port 0 selects a free port. Raises this process's soft limit on file descriptors to the hard limit.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `AlreadyExists` if the port is in use, otherwise `Unavailable`.
    pub fn bind(address: SocketAddr, config: HttpConfig) -> Result<Self> {
        let descriptors = raise_descriptors();
        let listener = listen(address, config.backlog).map_err(|error| {
            let code = match error.kind() {
                std::io::ErrorKind::AddrInUse => Code::AlreadyExists,
                _ => Code::Unavailable,
            };
            Error::not_started(code, "cannot listen").about(format!("listen on {SCHEME}://{address}")).caused_by(error)
        })?;
        let address = listener.local_addr().map_err(|error| Error::internal("no local address").caused_by(error))?;
        let connections_max =
            config.accepted_max.unwrap_or_else(|| accepted_max(descriptors)).clamp(1, Semaphore::MAX_PERMITS);
        let calls = Arc::new(Semaphore::new(config.requests_max.clamp(1, Semaphore::MAX_PERMITS)));
        Ok(Self {
            listener,
            address,
            endpoints: endpoints(&address.to_string())?,
            connections: Arc::new(Semaphore::new(connections_max)),
            frames: ListenerState::new(config.frames.clone(), Arc::clone(&calls)),
            calls,
            config: Arc::new(config),
            permit: None,
        })
    }

    /// Returns the same listener with another advertised host name or address, because one bound to `0.0.0.0` cannot know its own.
    ///
    /// # Errors
    /// `InvalidArgument` if the host is empty.
    pub fn advertised_as(mut self, host: &str) -> Result<Self> {
        if host.is_empty() {
            return Err(Error::invalid("the advertised host is empty"));
        }
        self.endpoints = endpoints(&host_port(host, self.address.port()))?;
        Ok(self)
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }
}

/// Returns the endpoints. Plain HTTP is first: every peer supports it, and role servers need no order. Worker groups request the
/// ordered endpoint.
fn endpoints(address: &str) -> Result<[Endpoint; 2]> {
    Ok([Endpoint::parse(&format!("{SCHEME}://{address}"))?, Endpoint::parse(&format!("{FRAMES_SCHEME}://{address}"))?])
}

fn listen(address: SocketAddr, backlog: u32) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Lets a restarted server bind its port again at once.
    socket.set_reuseaddr(true)?;
    // Accepted sockets inherit both options.
    socket.set_nodelay(true)?;
    set_keep_alive(&socket)?;
    socket.bind(address)?;
    socket.listen(backlog)
}

/// Returns the number of connections that this many file descriptors allow.
fn accepted_max(descriptors: u64) -> usize {
    let kept = (descriptors / 8).clamp(16, 4_096);
    usize::try_from(descriptors.saturating_sub(kept).clamp(16, 65_536)).unwrap_or(65_536)
}

#[async_trait]
impl Listener for HttpListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        if self.permit.is_none() {
            let permit = Arc::clone(&self.connections).acquire_owned().await;
            self.permit = Some(permit.map_err(|_| Error::internal("the listener was closed"))?);
        }
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let peer = PeerInfo { address: address.to_string().into() };
                    let (config, calls) = (Arc::clone(&self.config), Arc::clone(&self.calls));
                    let (frames, permit) = (self.frames.clone(), self.permit.take());
                    return Ok(Box::new(HttpIncoming::new(stream, peer, config, calls, frames, permit)));
                }
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::BADF | Errno::INVAL | Errno::NOTSOCK | Errno::OPNOTSUPP) => {
                        return Err(Error::internal("cannot accept connections any more")
                            .about(self.endpoints[0].to_string())
                            .caused_by(error));
                    }
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        tracing::warn!(%error, "no new connections for {ACCEPT_RETRY_INTERVAL:?}");
                        sleep(ACCEPT_RETRY_INTERVAL).await;
                    }
                    // The peer disconnected while it waited, or the network reported an error.
                    _ => tracing::debug!(%error, "accept"),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_burst_fits_into_a_limit_that_cannot_be_raised() {
        assert!(accepted_max(20_000) >= 16_384);
        assert_eq!(accepted_max(1_024), 896);
        assert_eq!(accepted_max(u64::MAX), 65_536);
    }
}
