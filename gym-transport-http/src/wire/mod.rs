//! HTTP/1.1 on the wire, for plain HTTP and for frames: addresses, sockets, header sections, headers and bodies.

pub(crate) mod address;
pub(crate) mod body;
pub(crate) mod head;
pub(crate) mod headers;
pub(crate) mod socket;
