//! The addresses of a process that joins a cluster: where it listens, and what other machines are told.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use gym_core::transport::{bare_host, host_port};
use gym_core::{Code, Endpoint, Error, Execution, Result};
use tokio::time::Instant;

/// Limit for the resolution of a host's name.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time between two attempts to resolve the name of the head server, and between two messages about it.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(1);
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The addresses of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberAddress {
    /// The host to bind.
    pub bind: String,
    /// The host that other machines are told: a name, or an address.
    pub advertised: String,
    head: Option<HeadRoute>,
}

/// The way from this machine to the head server.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HeadRoute {
    head: Endpoint,
    ip: IpAddr,
    /// The address of this machine on the way; `None` without a route.
    local: Option<IpAddr>,
}

impl HeadRoute {
    async fn find(head: &Endpoint) -> Result<Self> {
        let unresolved = |error: std::io::Error| {
            Error::new(Code::Unavailable, Execution::NotStarted, "its host cannot be resolved")
                .about(format!("reach the head server {head}"))
                .caused_by(error)
        };
        let found = resolve(head.address()).await.map_err(unresolved)?;
        Ok(Self { head: head.clone(), ip: found.ip(), local: local_address_towards(found).ok() })
    }

    async fn find_within(head: &Endpoint, within: Duration) -> Result<Self> {
        let (began, mut said) = (Instant::now(), None::<Instant>);
        loop {
            match Self::find(head).await {
                Err(error) if began.elapsed() < within => {
                    if said.is_none_or(|said| said.elapsed() >= LOG_INTERVAL) {
                        said = Some(Instant::now());
                        let left = within.saturating_sub(began.elapsed()).as_secs();
                        tracing::warn!(%error, "waiting up to {left} s for the name of the head server; correct it with --head-url or HEAD_SERVER_URL");
                    }
                    tokio::time::sleep(LOOKUP_INTERVAL).await;
                }
                found => return found,
            }
        }
    }
}

impl MemberAddress {
    /// Determines the addresses of a process that binds `host`. Others are told `advertise`; if it is not given, `host`, or for `0.0.0.0` the
    /// address of the route to `head`. Names are resolved on another thread. The host of `head` is looked up again for `within`: the
    /// head server may be started after its members.
    ///
    /// # Errors
    /// `InvalidArgument` if machines on the route to `head` could not reach the address that they would be told. `Unavailable` if the
    /// host of `head` cannot be resolved within `within`.
    pub async fn find(host: &str, advertise: Option<&str>, head: Option<&Endpoint>, within: Duration) -> Result<Self> {
        let head = match head {
            Some(head) => Some(HeadRoute::find_within(head, within).await?),
            None => None,
        };
        Self::choose(host, advertise, head)
    }

    fn choose(host: &str, advertise: Option<&str>, head: Option<HeadRoute>) -> Result<Self> {
        let (host, advertise) = (bare_host(host), advertise.map(bare_host));
        let route = head.as_ref().and_then(|head| head.local);
        let advertised = match (advertise, route) {
            (Some(advertise), _) => advertise.to_owned(),
            (None, Some(route)) if is_unspecified(host) => route.to_string(),
            (None, _) => host.to_owned(),
        };
        let address = Self { bind: host.to_owned(), advertised, head };
        address.check(&address.advertised)?;
        Ok(address)
    }

    /// Checks that others reach this machine at `host`.
    fn check(&self, host: &str) -> Result<()> {
        let Some(HeadRoute { head, ip, local }) = &self.head else {
            if is_unspecified(host) {
                let message = format!(
                    "it binds all addresses ({host}), and which one others reach is unknown\n  fix: set `advertise`"
                );
                return Err(Error::invalid(message));
            }
            return Ok(());
        };
        let same_machine = ip.is_loopback() || *local == Some(*ip);
        if is_unspecified(host) || (is_loopback(host) && !same_machine) {
            let fix = local.map_or_else(|| "ADDRESS".to_owned(), |local| local.to_string());
            return Err(Error::invalid(format!(
                "the head server {head} is on another machine, which cannot reach this one at {host}\n  fix: add --host {fix}, or set the \
                 option `host`; nothing that listens there has authentication or encryption, so use a network that you trust"
            )));
        }
        Ok(())
    }

    /// Resolves the host that other machines are told, on another thread.
    ///
    /// # Errors
    /// `InvalidArgument` if it has no address, or one at which others do not reach this machine.
    pub async fn resolve(&self) -> Result<IpAddr> {
        let failed = |error| Error::invalid(format!("the host `{}` has no address", self.advertised)).caused_by(error);
        let ip = match self.advertised.parse() {
            Ok(ip) => ip,
            Err(_) => resolve(&host_port(&self.advertised, 0)).await.map_err(failed)?.ip(),
        };
        // A machine often has its own name at a loopback address.
        self.check(&ip.to_string())?;
        Ok(ip)
    }
}

/// Returns `true` for a host that binds all addresses, `0.0.0.0` or `::`, and is the address of no machine.
#[must_use]
pub fn is_unspecified(host: &str) -> bool {
    bare_host(host).parse().is_ok_and(|ip: IpAddr| ip.is_unspecified())
}

/// Returns `true` for a host that only this machine reaches: `localhost`, or a loopback address.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    host == "localhost" || bare_host(host).parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Returns the address of this machine on its route to `peer`, an address such as `10.0.0.7:11000`: the one at which the peer, and
/// machines of its network, reach this one. Sends nothing. A name is resolved on another thread.
///
/// # Errors
/// `InvalidArgument` if the address cannot be resolved or there is no route to it.
pub async fn address_towards(peer: &str) -> Result<IpAddr> {
    let failed = |error: std::io::Error| {
        Error::invalid(format!("this machine has no address on a route to {peer}: {error}; name its address"))
    };
    local_address_towards(resolve(peer).await.map_err(failed)?).map_err(failed)
}

/// Returns the address at which other machines reach this one, without a peer that they have in common: that of the default route, else
/// the loopback address. Sends nothing.
#[must_use]
pub fn own_address() -> IpAddr {
    // Addresses of documentations (RFC 5737 and RFC 3849), which are nobody's.
    let anybody = [SocketAddr::from(([192, 0, 2, 1], 9)), SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 9))];
    anybody.into_iter().find_map(|address| local_address_towards(address).ok()).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// Resolves a host with a port.
async fn resolve(address: &str) -> std::io::Result<SocketAddr> {
    let found = tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host(address)).await;
    let mut found = found.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
    found.next().ok_or_else(|| std::io::Error::other("it has no address"))
}

/// Returns the address of this machine on its route to a resolved address.
fn local_address_towards(target: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    socket.local_addr().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `head` is the address of the head server, and that of this machine on the route to it.
    fn chosen(host: &str, advertise: Option<&str>, head: Option<(&str, Option<&str>)>) -> Result<MemberAddress> {
        let head = head.map(|(ip, local)| HeadRoute {
            head: Endpoint::parse(&format!("http://{ip}:11000")).unwrap(),
            ip: ip.parse().unwrap(),
            local: local.map(|local| local.parse().unwrap()),
        });
        MemberAddress::choose(host, advertise, head)
    }

    const HERE: Option<(&str, Option<&str>)> = Some(("10.0.0.7", Some("10.0.0.7")));
    const ELSEWHERE: Option<(&str, Option<&str>)> = Some(("10.0.0.1", Some("10.0.0.7")));
    const UNREACHED: Option<(&str, Option<&str>)> = Some(("10.0.0.1", None));

    #[test]
    fn a_member_never_advertises_an_address_that_others_cannot_reach() {
        for (host, advertise, head, advertised) in [
            ("127.0.0.1", None, Some(("127.0.0.1", Some("127.0.0.1"))), "127.0.0.1"),
            ("127.0.0.1", None, HERE, "127.0.0.1"),
            ("127.0.0.1", None, None, "127.0.0.1"),
            ("0.0.0.0", Some("gpu-7"), None, "gpu-7"),
            ("0.0.0.0", None, ELSEWHERE, "10.0.0.7"),
            ("10.0.0.7", None, ELSEWHERE, "10.0.0.7"),
            ("0.0.0.0", Some("gpu-7"), ELSEWHERE, "gpu-7"),
        ] {
            let address = chosen(host, advertise, head).unwrap();
            assert_eq!(
                (address.bind.as_str(), address.advertised.as_str()),
                (host, advertised),
                "{advertise:?}, {head:?}"
            );
        }
        for (host, advertise, head, fix) in [
            ("127.0.0.1", None, ELSEWHERE, "--host 10.0.0.7"),
            ("localhost", None, ELSEWHERE, "--host 10.0.0.7"),
            ("0.0.0.0", Some("localhost"), ELSEWHERE, "--host 10.0.0.7"),
            ("0.0.0.0", Some("0.0.0.0"), ELSEWHERE, "--host 10.0.0.7"),
            ("0.0.0.0", None, UNREACHED, "--host ADDRESS"),
            ("0.0.0.0", None, None, "set `advertise`"),
        ] {
            let error = chosen(host, advertise, head).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{host}, {advertise:?}, {head:?}");
            assert!(error.to_string().contains(fix), "{error}");
        }
    }

    #[tokio::test]
    async fn a_name_that_leads_back_to_this_machine_is_not_told_to_others() {
        // As the name of a machine that has it at a loopback address.
        let named = MemberAddress { advertised: "localhost".to_owned(), ..chosen("0.0.0.0", None, ELSEWHERE).unwrap() };
        let error = named.resolve().await.unwrap_err();
        assert!(error.to_string().contains("--host 10.0.0.7"), "{error}");
        let address = chosen("10.0.0.7", None, ELSEWHERE).unwrap();
        assert_eq!(address.resolve().await.unwrap().to_string(), "10.0.0.7");
    }

    #[test]
    fn the_own_address_is_one_that_can_be_connected_to() {
        let own = own_address();
        assert!(!own.is_unspecified());
        std::net::TcpListener::bind((own, 0)).unwrap();
    }

    #[tokio::test]
    async fn the_address_towards_this_machine_is_the_loopback_address() {
        assert!(address_towards("127.0.0.1:9").await.unwrap().is_loopback());
        // The resolver refuses an empty label by itself, and asks no server.
        assert!(address_towards("no..such.host:9").await.unwrap_err().to_string().contains("no..such.host"));
    }
}
