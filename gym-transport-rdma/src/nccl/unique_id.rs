//! The id by which ranks find each other.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Length of a unique id: `NCCL_UNIQUE_ID_BYTES` of `nccl.h`.
pub const UNIQUE_ID_BYTES: usize = 128;

/// Where the address begins: `struct ncclBootstrapHandle { uint64_t magic; union ncclSocketAddress addr; }` of `bootstrap.h`, since NCCL 2.14.
const ADDRESS_AT: usize = 8;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// A unique id. Whoever has it can join the ranks, so it is a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId(pub(super) [u8; UNIQUE_ID_BYTES]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:?})", self.address())
    }
}

impl UniqueId {
    /// Takes an id that another rank has made.
    #[must_use]
    pub fn new(bytes: [u8; UNIQUE_ID_BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes, to hand them to the other ranks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; UNIQUE_ID_BYTES] {
        &self.0
    }

    /// Returns where the first rank waits for the others; `None` if the id has another form than that of the known versions.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        let at = |offset: usize, length: usize| self.0.get(ADDRESS_AT + offset..ADDRESS_AT + offset + length);
        let family = u16::from_ne_bytes(at(0, 2)?.try_into().ok()?);
        let port = u16::from_be_bytes(at(2, 2)?.try_into().ok()?);
        let ip: IpAddr = match family {
            AF_INET => Ipv4Addr::from(<[u8; 4]>::try_from(at(4, 4)?).ok()?).into(),
            // `sockaddr_in6` has the flow's label in front of the address.
            AF_INET6 => Ipv6Addr::from(<[u8; 16]>::try_from(at(8, 16)?).ok()?).into(),
            _ => return None,
        };
        (port != 0).then(|| SocketAddr::new(ip, port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(bytes: &[u8]) -> UniqueId {
        let mut id = [0; UNIQUE_ID_BYTES];
        id[ADDRESS_AT..ADDRESS_AT + bytes.len()].copy_from_slice(bytes);
        UniqueId(id)
    }

    #[test]
    fn the_address_is_that_of_a_sockaddr() {
        let family = AF_INET.to_ne_bytes();
        let four = [family[0], family[1], 0xa8, 0x3d, 192, 168, 100, 7];
        assert_eq!(id(&four).address(), Some("192.168.100.7:43069".parse().expect("an address")));
        let family = AF_INET6.to_ne_bytes();
        let mut six = vec![family[0], family[1], 0, 80, 0, 0, 0, 0];
        six.extend(Ipv6Addr::LOCALHOST.octets());
        assert_eq!(id(&six).address(), Some("[::1]:80".parse().expect("an address")));
        assert_eq!(id(&[]).address(), None, "another form");
    }
}
