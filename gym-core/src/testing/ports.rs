//! Ports for a test that has to know one before its program listens there, or that needs one on which nobody listens.
//!
//! A port that the kernel chose and the test released is chosen again for the next socket that asks for any, such as one of another test. The ports of this
//! module are chosen by nobody else: they are below those of the kernel, and above those of servers and ranks. Tests run at once, each in a process of its
//! own, so each process begins at another place. Only even ones are chosen: a program that finds its port taken may take the next one.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Linux chooses from 32,768 on; a configuration without ports gets some from 10,001 to 20,000.
const FIRST: u16 = 21_000;
/// Every second port to 31,000.
const COUNT: u16 = 5_000;
/// More than a process takes.
const EACH: u32 = 20;

/// Returns a TCP port on which nobody listens, another one each time.
///
/// # Panics
/// Panics if all ports are taken.
#[must_use]
pub fn free_port() -> u16 {
    static DRAWN: AtomicU16 = AtomicU16::new(0);
    let of_process = std::process::id() % (u32::from(COUNT) / EACH) * EACH;
    let of_process = u16::try_from(of_process).expect("less than the count");
    let draw = |_| FIRST + 2 * ((of_process + DRAWN.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT);
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    (0..COUNT).map(draw).find(free).expect("some port is free")
}
