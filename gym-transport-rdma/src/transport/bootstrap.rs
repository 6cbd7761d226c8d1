//! Bootstrap: one JSON request and one JSON response by which two ends exchange UCX addresses over another transport.
//!
//! ```text
//! POST /.gym/ucx  {"version":1, "id":"…", "greeting":"…", "host":"…", "within_ms":5000, "worker":"…"?}
//!            200  {"version":1, "id":"…", "token":"…", "worker":"…"} or {…, "address":"10.0.0.7:7012"}
//! ```
//!
//! Numbers and bytes are hexadecimal. A request with `worker` asks for shared memory: `worker` is the address of a peer
//! worker that the sender has opened for this connection. A request without `worker` asks for the network. Neither end
//! uses the other's address more than `within_ms` after the request.
//!
//! The token is valid once and for a short time. Any client that can send the request can connect, so the route is as
//! protected as the transport that carries it.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::transport::mux::{ConnectionLimits, Handshake, malformed};
use gym_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::fabric::{ConnectionId, Token};

/// Route of the bootstrap request.
pub const ROUTE: &str = "/.gym/ucx";

const VERSION: u32 = 1;
/// Maximum length of a request or response. A worker address has some hundred bytes, and some thousand on a machine
/// with many devices.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// The request of the calling end.
#[derive(Clone, Debug)]
pub(crate) struct BootstrapRequest {
    pub(crate) id: ConnectionId,
    pub(crate) handshake: Handshake,
    /// Identity of the sender's host.
    pub(crate) host: String,
    /// Time for which the calling end keeps trying.
    pub(crate) within: Duration,
    /// Address of the sender's peer worker, if it asks for shared memory.
    pub(crate) worker: Option<Bytes>,
}

/// The response of the answering end.
#[derive(Clone, Debug)]
pub(crate) struct BootstrapResponse {
    pub(crate) id: ConnectionId,
    pub(crate) token: Token,
    pub(crate) address: PeerAddress,
}

/// The address that the calling end connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerAddress {
    Worker(Bytes),
    /// An unspecified address (`0.0.0.0`) stands for the host of the bootstrap endpoint.
    Listener(std::net::SocketAddr),
}

#[derive(Serialize, Deserialize)]
struct RequestText {
    version: u32,
    id: String,
    greeting: String,
    host: String,
    within_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct ResponseText {
    version: u32,
    id: String,
    token: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<std::net::SocketAddr>,
}

impl BootstrapRequest {
    pub(crate) fn new(
        id: ConnectionId,
        limits: &ConnectionLimits,
        host: String,
        within: Duration,
        worker: Option<Bytes>,
    ) -> Self {
        Self { id, handshake: Handshake::of(limits), host, within, worker }
    }

    pub(crate) fn write(&self) -> String {
        let mut greeting = BytesMut::new();
        self.handshake.put(&mut greeting);
        to_json(&RequestText {
            version: VERSION,
            id: hex(&self.id.0.to_be_bytes()),
            greeting: hex(&greeting),
            host: self.host.clone(),
            within_ms: u64::try_from(self.within.as_millis()).unwrap_or(u64::MAX),
            worker: self.worker.as_deref().map(hex),
        })
    }

    /// Reads a request.
    ///
    /// # Errors
    /// If it is malformed, too long, or of another version.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self> {
        let text: RequestText = parse(bytes)?;
        check(text.version)?;
        let worker = text.worker.map(|worker| unhex("worker", &worker)).transpose()?.map(Bytes::from);
        if worker.as_ref().is_some_and(Bytes::is_empty) {
            return Err(bad("worker: empty"));
        }
        Ok(Self {
            id: id(&text.id)?,
            handshake: Handshake::read(unhex("greeting", &text.greeting)?.into())?,
            host: text.host,
            within: Duration::from_millis(text.within_ms),
            worker,
        })
    }
}

impl BootstrapResponse {
    pub(crate) fn write(&self) -> String {
        let (worker, address) = match &self.address {
            PeerAddress::Worker(worker) => (Some(hex(worker)), None),
            PeerAddress::Listener(address) => (None, Some(*address)),
        };
        let (id, token) = (hex(&self.id.0.to_be_bytes()), hex(&self.token.0));
        to_json(&ResponseText { version: VERSION, id, token, worker, address })
    }

    /// Reads a response.
    ///
    /// # Errors
    /// If it is malformed, too long, or of another version.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self> {
        let text: ResponseText = parse(bytes)?;
        check(text.version)?;
        let address = match (text.worker, text.address) {
            (Some(worker), None) => PeerAddress::Worker(unhex("worker", &worker)?.into()),
            (None, Some(address)) => PeerAddress::Listener(address),
            _ => return Err(bad("expected either worker or address")),
        };
        let token = unhex("token", &text.token)?;
        let token = token.try_into().map_err(|_| bad("token: wrong length"))?;
        Ok(Self { id: id(&text.id)?, token: Token(token), address })
    }
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are JSON")
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    if bytes.len() > TEXT_BYTES_MAX {
        return Err(bad(format!("{} bytes; the maximum is {TEXT_BYTES_MAX}", bytes.len())));
    }
    serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))
}

fn check(version: u32) -> Result<()> {
    if version == VERSION {
        return Ok(());
    }
    Err(bad(format!("version {version}; this end supports version {VERSION}")))
}

fn bad(problem: impl std::fmt::Display) -> Error {
    malformed(format!("invalid UCX bootstrap message: {problem}"))
}

fn id(text: &str) -> Result<ConnectionId> {
    let bytes = unhex("id", text)?;
    let bytes = bytes.try_into().map_err(|_| bad("id: wrong length"))?;
    Ok(ConnectionId(u64::from_be_bytes(bytes)))
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

fn unhex(field: &str, text: &str) -> Result<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = text.as_bytes().chunks(2);
    let bytes = pairs.map(|pair| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    });
    bytes.collect::<Option<_>>().ok_or_else(|| bad(format!("{field}: not hexadecimal")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn question_and_answer_are_read_as_they_were_written(
            (number, token, within_ms) in any::<(u64, [u8; 32], u64)>(), host in ".{0,30}",
            worker in prop::option::of(prop::collection::vec(any::<u8>(), 1..400)), port in any::<u16>(),
        ) {
            let mut limits = ConnectionLimits::default();
            limits.calls_max = 3;
            let (worker, within) = (worker.map(Bytes::from), Duration::from_millis(within_ms));
            let ask = BootstrapRequest::new(ConnectionId(number), &limits, host.clone(), within, worker.clone());
            let ask = BootstrapRequest::read(ask.write().as_bytes()).unwrap();
            prop_assert_eq!((ask.id, ask.host, &ask.worker), (ConnectionId(number), host, &worker));
            prop_assert_eq!((ask.handshake, ask.within), (Handshake::of(&limits), within));
            let address = worker.map_or(PeerAddress::Listener(([10, 0, 0, 7], port).into()), PeerAddress::Worker);
            let answer = BootstrapResponse { id: ConnectionId(number), token: Token(token), address: address.clone() };
            let answer = BootstrapResponse::read(answer.write().as_bytes()).unwrap();
            prop_assert_eq!((answer.id, answer.token.0, answer.address), (ConnectionId(number), token, address));
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>()) {
            let worker = Some(Bytes::from_static(b"w"));
            let ask = BootstrapRequest::new(ConnectionId(1), &ConnectionLimits::default(), "here".into(), Duration::from_secs(5), worker);
            let mut mixed = ask.write().into_bytes();
            let at = at.index(mixed.len());
            mixed.splice(at..at, bytes.iter().copied().take(2));
            for bytes in [&bytes, &mixed] {
                let _ = (BootstrapRequest::read(bytes), BootstrapResponse::read(bytes));
            }
        }
    }

    #[test]
    fn what_is_not_a_bootstrap_is_refused_with_its_field() {
        let ask = BootstrapRequest::new(
            ConnectionId(7),
            &ConnectionLimits::default(),
            "here".into(),
            Duration::from_secs(5),
            None,
        )
        .write();
        for (from, to, said) in [
            ("\"version\":1", "\"version\":9", "version 9"),
            ("\"id\":\"00", "\"id\":\"0", "id: not hexadecimal"),
            ("\"greeting\":\"", "\"greeting\":\"zz", "greeting: not hexadecimal"),
            ("\"host\"", "\"nest\"", "host"),
            ("\"within_ms\"", "\"within\"", "within_ms"),
        ] {
            let error = BootstrapRequest::read(ask.replace(from, to).as_bytes()).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
        assert!(BootstrapRequest::read(" ".repeat(1 << 20).as_bytes()).is_err());
    }
}
