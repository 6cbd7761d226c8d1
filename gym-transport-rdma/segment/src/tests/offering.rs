//! Passing the file on.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use gym_core::Code;

use super::{SIZES, far};
use crate::{FdOffer, Segment, SegmentCommunicator, deadline_in, fetch};

#[test]
fn a_file_comes_to_everybody_who_asks() {
    let segment = Arc::new(Segment::create(3, SIZES).unwrap());
    let offer = FdOffer::new(&segment).unwrap();
    std::thread::scope(|scope| {
        let fetched = [1, 2].map(|position| {
            let name = offer.name();
            scope.spawn(move || SegmentCommunicator::join(&Arc::new(Segment::open(fetch(name, far())?, 3)?), position))
        });
        // Somebody who leaves without the file takes nobody's place.
        let address = SocketAddr::from_abstract_name(offer.name()).unwrap();
        drop(UnixStream::connect_addr(&address).unwrap());
        offer.serve(2, far()).unwrap();
        for thread in fetched {
            thread.join().unwrap().unwrap();
        }
    });
    SegmentCommunicator::join(&segment, 0).unwrap();
    assert_eq!(SegmentCommunicator::join(&segment, 2).unwrap_err().code(), Code::AlreadyExists);
}

#[test]
fn a_socket_that_is_not_here_is_unavailable() {
    let segment = Arc::new(Segment::create(1, SIZES).unwrap());
    let name = FdOffer::new(&segment).unwrap().name().to_owned();
    assert_eq!(fetch(&name, far()).unwrap_err().code(), Code::Unavailable);
}

#[test]
fn both_sides_end_at_their_deadlines() {
    let segment = Arc::new(Segment::create(1, SIZES).unwrap());
    let offer = FdOffer::new(&segment).unwrap();
    let soon = || deadline_in(Duration::from_millis(20));
    assert_eq!(fetch(offer.name(), soon()).unwrap_err().code(), Code::DeadlineExceeded);
    // The one above has left: it is not counted.
    assert_eq!(offer.serve(1, soon()).unwrap_err().code(), Code::DeadlineExceeded);
}

#[test]
fn an_abort_ends_an_offer() {
    let segment = Arc::new(Segment::create(1, SIZES).unwrap());
    let offer = FdOffer::new(&segment).unwrap();
    segment.abort();
    assert_eq!(offer.serve(1, far()).unwrap_err().code(), Code::Unavailable);
}
