//! Holds ports by binding them, instead of guessing free ports.
//!
//! If a program finds a free port and releases it, another process can take the port a moment later. This race causes many of the
//! failed starts that users of other libraries report. [`HeldPort`] keeps a socket bound to the port, not listening, with
//! `SO_REUSEADDR`. Linux lets a second socket with `SO_REUSEADDR` bind and listen there, as torch's `TCPStore` does. Linux
//! rejects a socket without the option, and does not choose the port by itself.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;

use gym_core::{Code, Error, Result};
use tokio::net::TcpSocket;

/// Number of draws before a search fails.
pub(crate) const DRAWS: u32 = 50;

/// A TCP port that stays reserved, and on which a program that sets `SO_REUSEADDR` before `bind` can still listen.
///
/// ```
/// use gym_group::HeldPort;
///
/// let held = HeldPort::bind(0)?; // any free port
/// assert!(HeldPort::bind(held.port()).is_err(), "nobody else gets it");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct HeldPort {
    // Held only for its binding; dropping it releases the port.
    _socket: TcpSocket,
    port: u16,
}

impl HeldPort {
    /// Holds `port` on all IPv4 addresses of this machine.
    ///
    /// # Errors
    /// `AddrInUse` if the port is bound or listening, or if a closed connection still lingers on it.
    pub fn bind(port: u16) -> io::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(false)?;
        socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
        // Set only after `bind`: with the option before it, two holders would get the same port. The kernel checks the option on
        // both sockets whenever the second one binds.
        socket.set_reuseaddr(true)?;
        let port = socket.local_addr()?.port();
        Ok(Self { _socket: socket, port })
    }

    /// Holds a free port of `range`, drawn at random.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty range; `ResourceExhausted` if no draw hits a free port.
    pub fn within(range: &Range<u16>, random: &mut fastrand::Rng) -> Result<Self> {
        search(range, SearchOrder::Draws(DRAWS), &BTreeSet::new(), random, Self::bind)
    }

    /// Holds `count` consecutive ports: the lowest block of `range`, from `start` on, in which all ports are free.
    ///
    /// # Errors
    /// `InvalidArgument` if `count` is zero or `start` is above the range; `ResourceExhausted` if no block is free.
    pub fn block(range: &Range<u16>, count: u16, start: Option<u16>) -> Result<Vec<Self>> {
        block(range, count, start, Self::bind)
    }

    /// Returns the number of the port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// The order of a search through a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchOrder {
    /// This many random draws; a draw of an excluded port counts as well.
    Draws(u32),
    /// Each port that is not excluded once, in random order.
    EachOnce,
}

/// Searches for a port of `range` that `bind` accepts, and returns the result of `bind`.
///
/// # Errors
/// `InvalidArgument` for an empty range; `ResourceExhausted` if no try succeeds, with the error of the last try as its cause.
pub(crate) fn search<T>(
    range: &Range<u16>,
    order: SearchOrder,
    excluded: &BTreeSet<u16>,
    random: &mut fastrand::Rng,
    mut bind: impl FnMut(u16) -> io::Result<T>,
) -> Result<T> {
    if range.is_empty() {
        return Err(Error::invalid(format!("the port range {}..{} is empty; give low < high", range.start, range.end)));
    }
    let mut candidates: Vec<u16> = range.clone().collect();
    random.shuffle(&mut candidates);
    let draws: Box<dyn Iterator<Item = u16>> = match order {
        SearchOrder::EachOnce => Box::new(candidates.into_iter()),
        SearchOrder::Draws(count) => Box::new((0..count).map(|_| random.u16(range.clone()))),
    };
    let mut refused = None;
    for port in draws.filter(|port| !excluded.contains(port)) {
        match bind(port) {
            Ok(bound) => return Ok(bound),
            Err(error) => refused = Some(error),
        }
    }
    let message = format!(
        "could not find a free port in range {}..{}{}; widen the range, or end what holds it",
        range.start,
        range.end,
        match order {
            SearchOrder::Draws(count) => format!(" in {count} draws"),
            SearchOrder::EachOnce => String::new(),
        }
    );
    let error = Error::not_started(Code::ResourceExhausted, message);
    Err(match refused {
        Some(cause) => error.caused_by(cause),
        None => error,
    })
}

fn block<T>(
    range: &Range<u16>,
    count: u16,
    start: Option<u16>,
    mut bind: impl FnMut(u16) -> io::Result<T>,
) -> Result<Vec<T>> {
    if count == 0 {
        return Err(Error::invalid("a block of 0 ports was asked for; ask for at least 1"));
    }
    let first = start.unwrap_or(range.start).max(range.start);
    if first >= range.end {
        return Err(Error::invalid(format!(
            "the search for ports would start at {first}, behind the range {}..{}",
            range.start, range.end
        )));
    }
    let none = || {
        let message = format!("no {count} consecutive free ports in {first}..{}; widen the range", range.end);
        Error::not_started(Code::ResourceExhausted, message)
    };
    let last = range.end.checked_sub(count).filter(|last| *last >= first).ok_or_else(none)?;
    (first..=last).find_map(|base| (base..base + count).map(&mut bind).collect::<io::Result<_>>().ok()).ok_or_else(none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::MASTER_PORTS;
    use std::net::TcpListener;

    fn random() -> fastrand::Rng {
        fastrand::Rng::with_seed(7)
    }

    fn busy<T>() -> io::Result<T> {
        Err(io::ErrorKind::AddrInUse.into())
    }

    #[test]
    fn c167_a_port_is_within_its_range() {
        for seed in 0..100 {
            let found = search(
                &(11001..11100),
                SearchOrder::Draws(DRAWS),
                &BTreeSet::new(),
                &mut fastrand::Rng::with_seed(seed),
                Ok,
            );
            assert!((11001..11100).contains(&found.expect("found")), "seed {seed}");
        }
    }

    #[test]
    fn c168_a_search_gives_up_after_exactly_its_draws() {
        let mut binds = 0;
        let error = search(&(11001..11100), SearchOrder::Draws(10), &BTreeSet::new(), &mut random(), |_| {
            binds += 1;
            busy::<()>()
        })
        .expect_err("always busy");
        assert_eq!((binds, error.code()), (10, Code::ResourceExhausted));
        assert!(error.to_string().contains("could not find a free port in range"), "{error}");
    }

    #[test]
    fn c169_busy_ports_are_passed_over() {
        let mut binds = 0;
        let found = search(&(11001..11100), SearchOrder::Draws(10), &BTreeSet::new(), &mut random(), |port| {
            binds += 1;
            if binds <= 3 { busy() } else { Ok(port) }
        });
        assert!(found.is_ok());
        assert_eq!(binds, 4);
    }

    #[test]
    fn c170_a_range_of_one_gives_that_port() {
        let found = search(&(12000..12001), SearchOrder::Draws(1), &BTreeSet::new(), &mut random(), Ok);
        assert_eq!(found.expect("found"), 12000);
    }

    #[test]
    fn c171_each_once_leaves_out_what_is_excluded() {
        let mut binds = Vec::new();
        let excluded = BTreeSet::from([12020, 12021]);
        let found = search(&(12020..12023), SearchOrder::EachOnce, &excluded, &mut random(), |port| {
            binds.push(port);
            Ok(port)
        });
        assert_eq!((found.expect("found"), binds), (12022, vec![12022]));
    }

    #[test]
    fn excluded_draws_are_spent_without_a_bind() {
        let excluded: BTreeSet<u16> = (12020..12023).collect();
        let refuse = |_: u16| -> io::Result<()> { panic!("an excluded port was bound") };
        assert!(search(&(12020..12023), SearchOrder::Draws(20), &excluded, &mut random(), refuse).is_err());
    }

    #[test]
    fn c172_the_default_range_gives_different_ports_that_come_free_again() {
        let mut random = random();
        let held: Vec<HeldPort> =
            (0..10).map(|_| HeldPort::within(&MASTER_PORTS, &mut random).expect("a free port")).collect();
        let ports: BTreeSet<u16> = held.iter().map(HeldPort::port).collect();
        assert_eq!(ports.len(), 10, "two holders never share a port");
        assert!(ports.iter().all(|port| MASTER_PORTS.contains(port)));
        drop(held);
        for port in ports {
            HeldPort::bind(port).expect("given back");
        }
    }

    #[test]
    fn c173_five_in_a_row_are_held_together() {
        let held = HeldPort::block(&(14100..14300), 5, None).expect("a block");
        let ports: Vec<u16> = held.iter().map(HeldPort::port).collect();
        assert!(ports.windows(2).all(|pair| pair[1] == pair[0] + 1) && ports.len() == 5, "{ports:?}");
    }

    #[test]
    fn c174_blocks_keep_to_their_range() {
        let ports = |range: Range<u16>, count, start| block(&range, count, start, Ok);
        assert_eq!(ports(100..200, 2, Some(50)).expect("clamped"), [100, 101]);
        assert_eq!(ports(100..200, 2, Some(200)).expect_err("behind").code(), Code::InvalidArgument);
        let short = ports(100..103, 5, None).expect_err("too short");
        assert_eq!(short.code(), Code::ResourceExhausted);
        assert!(short.to_string().contains("consecutive free ports"), "{short}");
        assert_eq!(ports(100..200, 0, None).expect_err("none").code(), Code::InvalidArgument);
        assert_eq!(ports(100..103, 3, None).expect("an exact fit"), [100, 101, 102]);
        let first = ports(100..200, 3, None).expect("a block");
        let second = ports(100..200, 3, Some(first[2] + 1)).expect("the next");
        assert!(second.iter().all(|port| !first.contains(port)), "an advancing start gives disjoint blocks");
        let taken = |port: u16| if port == 101 { busy() } else { Ok(port) };
        assert_eq!(block(&(100..200), 2, None, taken).expect("behind the taken one"), [102, 103]);
    }

    #[test]
    fn a_held_port_keeps_out_whoever_does_not_say_reuse() {
        let held = HeldPort::within(&(20_000..29_000), &mut random()).expect("a free port");
        assert!(HeldPort::bind(held.port()).is_err(), "another holder");
        let plain = TcpSocket::new_v4().expect("a socket");
        plain.set_reuseaddr(false).expect("an option");
        assert!(plain.bind(([127, 0, 0, 1], held.port()).into()).is_err(), "a server without SO_REUSEADDR");
    }

    #[test]
    fn a_held_port_lets_a_listener_in_that_says_reuse() {
        let held = HeldPort::within(&(20_000..29_000), &mut random()).expect("a free port");
        // The standard library sets SO_REUSEADDR before it binds, as torch does.
        let listener = TcpListener::bind(("127.0.0.1", held.port())).expect("listens beside the holder");
        let client = std::net::TcpStream::connect(("127.0.0.1", held.port())).expect("reaches the listener");
        let (_, peer) = listener.accept().expect("accepts");
        assert_eq!(peer, client.local_addr().expect("bound"));
    }
}
