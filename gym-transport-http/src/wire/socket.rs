//! TCP sockets and their options.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use gym_core::base::is_out_of_descriptors;
use gym_core::{Code, Error, Result};
use tokio::net::TcpStream;

use crate::wire::address::HostPort;

/// Pause before accepting again if the process has no file descriptor left: time for a few calls to end.
pub(crate) const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Connects to the peer.
pub(crate) async fn connect(address: &HostPort) -> Result<TcpStream> {
    let HostPort { host, port } = address;
    let connected = match host.parse::<IpAddr>() {
        Ok(ip) => TcpStream::connect(SocketAddr::new(ip, *port)).await,
        Err(_) => TcpStream::connect((host.as_str(), *port)).await,
    };
    let stream = connected.map_err(|error| {
        let code = if is_out_of_descriptors(&error) { Code::ResourceExhausted } else { Code::Unavailable };
        Error::not_started(code, "cannot connect").caused_by(error)
    })?;
    // Without these options, small requests wait for acknowledgements, and the loss of a peer without power is never noticed.
    if let Err(error) = stream.set_nodelay(true).and_then(|()| set_keep_alive(&stream)) {
        tracing::debug!(%error, "socket options not set");
    }
    Ok(stream)
}

/// Makes the kernel probe an unresponsive peer: after 60 s, then every 10 s, 3 times, as in NeMo Gym's client.
pub(crate) fn set_keep_alive(socket: impl std::os::fd::AsFd) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(&socket, 3)?;
    Ok(())
}
