//! A custom transport: QUIC, as a backend that takes part in the selection of transports exactly as those of the SDK do.
//!
//! ```text
//!   Channel ── FramedClient ── one QUIC stream over UDP, TLS 1.3 ── FramedServer ── Handler
//! ```
//!
//! Frames keep calls in order, so worker groups can use it. QUIC encrypts, and both ends prove that they know a shared secret.

mod identity;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use gym_client::transport::http::frames::{ByteStream, FramedClient, FramedServer, FramesConfig};
use gym_core::message::PeerInfo;
use gym_core::transport::{
    Backend, BoundListener, ConnectOptions, Connector, Incoming, ListenOptions, Listener, Transport, TransportReport,
    async_trait,
};
use gym_core::{CallContext, CancelToken, Channel, Code, Endpoint, Error, Handler, Result};

use crate::identity::{Identity, NAME};

/// The transport, with a preference after shared memory and RDMA, and before HTTP.
pub const QUIC: Transport = Transport::new("quic", 350);
/// The environment variable with the secret that the processes share.
pub const SECRET_VARIABLE: &str = "GYM_QUIC_SECRET";
/// The scheme of the endpoints: `quic://host:port`.
const SCHEME: &str = "quic";
const NO_SECRET: &str = "the environment variable GYM_QUIC_SECRET is not set";
const FIX: &str = "set GYM_QUIC_SECRET to the same random text for all processes";
/// Limit for the handshake. A firewall drops UDP without a reply, and other transports are tried next.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);

/// A backend that connects and listens over QUIC.
#[derive(Clone, Debug)]
pub struct QuicBackend {
    identity: Option<Identity>,
    frames: FramesConfig,
}

impl QuicBackend {
    /// Creates a backend whose peers know the same secret; the limits apply to each connection.
    ///
    /// # Errors
    /// If no key can be derived from the secret.
    pub fn new(secret: &str, frames: FramesConfig) -> anyhow::Result<Self> {
        Ok(Self { identity: Some(Identity::of(secret)?), frames })
    }

    /// Creates a backend with the secret in [`SECRET_VARIABLE`]. Without a secret, each use of the backend reports that it is
    /// missing.
    ///
    /// # Errors
    /// If no key can be derived from the secret.
    pub fn from_env() -> anyhow::Result<Self> {
        let secret = std::env::var(SECRET_VARIABLE).ok().filter(|secret| !secret.is_empty());
        Ok(Self { identity: secret.map(|secret| Identity::of(&secret)).transpose()?, frames: FramesConfig::default() })
    }

    fn identity(&self) -> Result<&Identity> {
        let missing = || Error::not_started(Code::FailedPrecondition, format!("{NO_SECRET}; {FIX}"));
        self.identity.as_ref().ok_or_else(missing)
    }
}

#[async_trait]
impl Backend for QuicBackend {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![Arc::new(QuicConnector { backend: self.clone(), client: FramedClient::new(SCHEME, self.frames.clone()) })]
    }

    async fn listen(&self, options: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>> {
        // Without an address, processes of this host can connect over QUIC as well as over the Unix socket.
        let local = options.socket.is_some().then(|| (Ipv4Addr::LOCALHOST, 0).into());
        let Some(address) = options.address()?.or(local) else { return Ok(None) };
        let listener = QuicListener::bind(self, address, options.advertised_host())?;
        Ok(Some(BoundListener { listener: Box::new(listener), handler }))
    }

    async fn diagnose(&self, _: Duration) -> Vec<TransportReport> {
        vec![match (&self.identity, UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))) {
            (None, _) => TransportReport::unusable(QUIC, NO_SECRET, FIX),
            (_, Err(error)) => TransportReport::unusable(QUIC, format!("no UDP socket: {error}"), "allow UDP sockets"),
            (Some(_), Ok(_)) => TransportReport::usable(QUIC, "UDP"),
        }]
    }
}

/// Opens channels to `quic://host:port`, each over its own connection.
#[derive(Debug)]
struct QuicConnector {
    backend: QuicBackend,
    client: FramedClient,
}

impl QuicConnector {
    async fn stream(&self, to: &Endpoint) -> Result<ByteStream> {
        let failed = |text: String| Error::not_started(Code::Unavailable, text);
        let config = self.backend.identity()?.client.clone();
        let mut found = tokio::net::lookup_host(to.address()).await.map_err(|error| failed(error.to_string()))?;
        let address = found.next().ok_or_else(|| failed("the host has no address".to_owned()))?;
        let any: SocketAddr = if address.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
        let endpoint = quinn::Endpoint::client(any).map_err(|error| failed(format!("no UDP socket: {error}")))?;
        let connecting = async {
            let connecting = endpoint.connect_with(config, address, NAME).map_err(|error| error.to_string())?;
            let connection = connecting.await.map_err(|error| error.to_string())?;
            connection.open_bi().await.map_err(|error| error.to_string())
        };
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, connecting).await {
            Ok(opened) => opened.map(stream).map_err(failed),
            Err(_) => {
                Err(failed(format!("no QUIC answer within {HANDSHAKE_TIMEOUT:?}; check that UDP is not blocked")))
            }
        }
    }
}

#[async_trait]
impl Connector for QuicConnector {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn transports(&self) -> Vec<Transport> {
        vec![QUIC]
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        self.client.connect(cx, to, options, self.stream(to)).await
    }
}

/// Accepts connections on a UDP port.
#[derive(Debug)]
struct QuicListener {
    endpoint: quinn::Endpoint,
    endpoints: [Endpoint; 1],
    server: FramedServer,
}

impl QuicListener {
    fn bind(backend: &QuicBackend, address: SocketAddr, advertised: Option<&str>) -> Result<Self> {
        let config = backend.identity()?.server.clone();
        let failed = |error: io::Error| {
            let code = if error.kind() == io::ErrorKind::AddrInUse { Code::AlreadyExists } else { Code::Unavailable };
            Error::not_started(code, "cannot listen; choose another port, or allow UDP sockets")
                .about(format!("listen on {SCHEME}://{address}"))
                .caused_by(error)
        };
        let endpoint = quinn::Endpoint::server(config, address).map_err(failed)?;
        let bound = endpoint.local_addr().map_err(failed)?;
        let host = advertised.map_or_else(|| bound.ip().to_string(), str::to_owned);
        let endpoints = [Endpoint::parse(&format!("{SCHEME}://{host}:{}", bound.port()))?];
        Ok(Self { endpoint, endpoints, server: FramedServer::new(backend.frames.clone()) })
    }
}

#[async_trait]
impl Listener for QuicListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        let closed = || Error::internal("the UDP socket was closed").about(self.endpoints[0].to_string());
        let incoming = self.endpoint.accept().await.ok_or_else(closed)?;
        let peer = PeerInfo { address: incoming.remote_address().to_string().into() };
        Ok(Box::new(QuicIncoming { incoming, peer, server: self.server.clone() }))
    }
}

#[derive(Debug)]
struct QuicIncoming {
    incoming: quinn::Incoming,
    peer: PeerInfo,
    server: FramedServer,
}

#[async_trait]
impl Incoming for QuicIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let Self { incoming, peer, server } = *self;
        let opening = async { incoming.await?.accept_bi().await };
        let opened = tokio::time::timeout(HANDSHAKE_TIMEOUT, opening).await.map_err(|error| error.to_string());
        let opened = opened.and_then(|opened| opened.map_err(|error| error.to_string()));
        let failed = |text| Error::unknown(Code::Unavailable, text).about(format!("accept {}", peer.address));
        server.serve(stream(opened.map_err(failed)?), handler, peer, drain).await
    }
}

fn stream((send, receive): (quinn::SendStream, quinn::RecvStream)) -> ByteStream {
    ByteStream::new(receive, send)
}
