//! One request and its response over one connection.
//!
//! The task that waits for the response transfers the bytes itself. Most calls need one write and one read, and no other task,
//! channel or waker. An earlier version used hyper's client. It cost half of the time of a call, because separate tasks drive its
//! connections.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use gym_core::rollout::FailureClass;
use gym_core::{Code, Error, Response, Result, Status, Verb};
use httparse::parse_chunk_size;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use crate::wire::body::{PRESIZE_BYTES_MAX, freeze, take_buffer};
use crate::wire::head::{BodyLength, HEAD_BYTES_MAX, ResponseHead, not_http};

/// Capacity of one read: a response without training tokens fits, so that one read is enough.
const READ_BYTES: usize = 8 << 10;

/// Maximum number of pieces that one write sends; the kernel accepts up to 1,024, and rollouts have a handful.
const WRITE_PIECES: usize = 16;

/// Maximum length of the line before a chunk: a length, and extensions that no known server uses.
const CHUNK_LINE_BYTES_MAX: usize = 4 << 10;

/// A connection to a peer, unused or in use by one call.
#[derive(Debug)]
pub(crate) struct Connection<S> {
    pub(crate) stream: S,
    /// Received bytes that were not yet parsed.
    input: BytesMut,
    /// `true` if the last response was complete and the connection can carry another request.
    pub(crate) reusable: bool,
    /// `true` if no byte of the last response has arrived.
    pub(crate) silent: bool,
    /// `true` if the connection has carried a call before the last one.
    pub(crate) reused: bool,
}

impl<S> Connection<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, input: BytesMut::new(), reusable: true, silent: true, reused: false }
    }
}

/// The unsent rest of a request.
#[derive(Debug)]
struct Unsent {
    pieces: VecDeque<Bytes>,
    /// `true` if a byte was sent; otherwise the peer cannot have received the request.
    begun: bool,
}

impl Unsent {
    fn poll_write<S: AsyncWrite + Unpin>(&mut self, cx: &mut Context<'_>, stream: &mut S) -> Poll<io::Result<()>> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); WRITE_PIECES];
            let pieces = self.pieces.iter().zip(&mut slices).map(|(piece, slice)| *slice = IoSlice::new(piece)).count();
            let mut written = ready!(Pin::new(&mut *stream).poll_write_vectored(cx, &slices[..pieces]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.begun = true;
            // A piece is released as soon as it is written, so that a megabyte is not held until the response arrives.
            while let Some(piece) = self.pieces.front_mut() {
                if piece.len() > written {
                    piece.advance(written);
                    break;
                }
                written -= piece.len();
                self.pieces.pop_front();
            }
        }
        Poll::Ready(Ok(()))
    }
}

struct Exchange<'a, S> {
    connection: &'a mut Connection<S>,
    unsent: Unsent,
    /// The error that ended the writing early. The peer's data is still read, because it may be a rejection.
    broke: Option<io::Error>,
}

/// Sends a request, given by its pieces, and reads the response. The first poll writes as much as the kernel accepts.
///
/// # Errors
/// As in the table of [`HttpConnector`](crate::http1::HttpConnector), from a broken connection on. The connection is reusable only
/// after a response.
pub(crate) async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut Connection<S>,
    request: VecDeque<Bytes>,
    verb: Verb,
    reply_bytes_max: usize,
) -> Result<Response> {
    (connection.reusable, connection.silent) = (false, true);
    let unsent = Unsent { pieces: request, begun: false };
    let mut exchange = Exchange { connection, unsent, broke: None };
    let head = exchange.head(verb).await?;
    let too_large = |length: Option<usize>| {
        let length = length.map_or_else(String::new, |length| format!(" of {length} bytes"));
        Error::finished(
            Code::ResourceExhausted,
            format!("the reply{length} is larger than reply_bytes_max = {reply_bytes_max}; raise it if this is wanted"),
        )
    };
    // The limit applies to the message; a frame has a prefix before it.
    let bytes_max = reply_bytes_max.saturating_add(head.format.prefix_bytes_max());
    let body = exchange.body(head.length, bytes_max).await?.ok_or_else(|| too_large(None))?;
    let complete = exchange.unsent.pieces.is_empty() && exchange.broke.is_none();
    connection.reusable =
        complete && head.keeps_alive && head.length != BodyLength::UntilClose && connection.input.is_empty();
    let message = head
        .format
        .message(body, 1 << 16)
        .map_err(|error| Error::unknown(Code::DataLoss, "the reply is not the frame it says it is").caused_by(error))?;
    if message.len() > reply_bytes_max {
        return Err(too_large(Some(message.len())));
    }
    Ok(Response { status: Status(head.status), metadata: head.metadata, message })
}

impl<S: AsyncRead + AsyncWrite + Unpin> Exchange<'_, S> {
    /// Reads the header section of the response, after interim responses.
    async fn head(&mut self, verb: Verb) -> Result<ResponseHead> {
        loop {
            if !self.connection.input.is_empty()
                && let Some(head) = ResponseHead::read(&self.connection.input, verb)?
            {
                self.connection.input.advance(head.bytes);
                if head.is_interim() {
                    continue;
                }
                return Ok(head);
            }
            self.more().await?;
        }
    }

    /// Reads the whole body; returns `None` if it is longer than `bytes_max`.
    async fn body(&mut self, length: BodyLength, bytes_max: usize) -> Result<Option<Bytes>> {
        match length {
            BodyLength::Exactly(length) => match usize::try_from(length) {
                Ok(length) if length <= bytes_max => self.exactly(length).await.map(Some),
                _ => Ok(None),
            },
            BodyLength::Chunked => self.chunks(bytes_max).await,
            BodyLength::UntilClose => self.until_close(bytes_max).await,
        }
    }

    async fn exactly(&mut self, length: usize) -> Result<Bytes> {
        let input = &mut self.connection.input;
        if length <= input.len() {
            // Copied, so that a short body does not hold the capacity of a whole read.
            let body = Bytes::copy_from_slice(&input[..length]);
            input.advance(length);
            return Ok(body);
        }
        let mut body = take_buffer(length.min(PRESIZE_BYTES_MAX));
        body.extend_from_slice(input);
        input.clear();
        while body.len() < length {
            let left = length - body.len();
            let room = (&mut body).limit(left);
            if self.transfer(room).await? == 0 {
                return Err(self.broken(None));
            }
        }
        Ok(freeze(body))
    }

    async fn until_close(&mut self, bytes_max: usize) -> Result<Option<Bytes>> {
        let mut body = std::mem::take(&mut self.connection.input);
        while body.len() <= bytes_max {
            body.reserve(READ_BYTES);
            if self.transfer(&mut body).await? == 0 {
                return Ok(Some(body.freeze()));
            }
        }
        Ok(None)
    }

    /// Reads a chunked body (RFC 9112, section 7.1). Drops trailers after the last chunk, because no known server sends any.
    async fn chunks(&mut self, bytes_max: usize) -> Result<Option<Bytes>> {
        let mut body = Vec::new();
        loop {
            let size = self.chunk_size().await?;
            if size == 0 {
                break;
            }
            let Some(size) = usize::try_from(size).ok().filter(|size| *size <= bytes_max - body.len()) else {
                return Ok(None);
            };
            let mut left = size;
            while left > 0 {
                if self.connection.input.is_empty() {
                    self.more().await?;
                }
                let part = self.connection.input.split_to(left.min(self.connection.input.len()));
                body.extend_from_slice(&part);
                left -= part.len();
            }
            if !self.line_end().await?.is_empty() {
                return Err(not_http("a chunk is longer than it says"));
            }
        }
        while !self.line_end().await?.is_empty() {}
        Ok(Some(freeze(body)))
    }

    async fn chunk_size(&mut self) -> Result<u64> {
        loop {
            match parse_chunk_size(&self.connection.input) {
                Ok(httparse::Status::Complete((bytes, size))) => {
                    self.connection.input.advance(bytes);
                    return Ok(size);
                }
                Ok(httparse::Status::Partial) if self.connection.input.len() < CHUNK_LINE_BYTES_MAX => {
                    self.more().await?
                }
                _ => return Err(not_http("a chunk has no length")),
            }
        }
    }

    /// Reads the rest of the line, without its end.
    async fn line_end(&mut self) -> Result<BytesMut> {
        loop {
            if let Some(end) = self.connection.input.iter().position(|byte| *byte == b'\n') {
                let mut line = self.connection.input.split_to(end + 1);
                line.truncate(line.trim_ascii_end().len());
                return Ok(line);
            }
            if self.connection.input.len() >= HEAD_BYTES_MAX {
                return Err(not_http("what follows the chunks does not end"));
            }
            self.more().await?;
        }
    }

    /// Waits for more bytes to parse.
    async fn more(&mut self) -> Result<()> {
        let mut input = std::mem::take(&mut self.connection.input);
        input.reserve(READ_BYTES);
        let read = self.transfer(&mut input).await;
        self.connection.input = input;
        match read? {
            0 => Err(self.broken(None)),
            _ => {
                self.connection.silent = false;
                Ok(())
            }
        }
    }

    /// Writes the rest of the request while it waits for bytes to read; returns 0 at the end of the stream.
    async fn transfer(&mut self, mut into: impl BufMut + Unpin) -> Result<usize> {
        let (stream, unsent, broke) = (&mut self.connection.stream, &mut self.unsent, &mut self.broke);
        let read = poll_fn(|cx| {
            if broke.is_none()
                && let Poll::Ready(Err(error)) = unsent.poll_write(cx, stream)
            {
                if !unsent.begun {
                    return Poll::Ready(Err(error));
                }
                *broke = Some(error);
            }
            // A read holds nothing between two polls, so each poll can start it again.
            pin!(stream.read_buf(&mut into)).poll(cx)
        })
        .await;
        read.map_err(|error| self.broken(Some(error)))
    }

    /// Returns the error of a call whose connection broke.
    fn broken(&mut self, error: Option<io::Error>) -> Error {
        let said = match (self.unsent.begun, self.connection.reused && self.connection.silent) {
            (false, _) => Error::not_started(Code::Unavailable, "the connection was closed before anything was sent"),
            // Balancers and servers end kept connections, so the server may be well. The class keeps callers from taking it for lost.
            (true, true) => Error::unknown(
                Code::Unavailable,
                "the reused connection broke before a response came; whether the request was executed is not known",
            )
            .with_class(FailureClass::TransportPeerDrop),
            (true, false) => Error::unknown(Code::Unavailable, "the connection broke before the answer was complete"),
        };
        match self.broke.take().or(error) {
            Some(error) => said.caused_by(error),
            None => said,
        }
    }
}

#[cfg(test)]
mod tests {
    use gym_core::Execution;
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    /// Sends `request`, receives `answer` in parts of this many bytes, and returns the result.
    async fn answered(request: &'static [u8], answer: &str, part: usize, bytes_max: usize) -> (Result<Response>, bool) {
        let (ours, mut theirs) = duplex(64);
        let mut connection = Connection::new(ours);
        let peer = async move {
            let mut seen = vec![0; request.len()];
            theirs.read_exact(&mut seen).await.unwrap();
            assert_eq!(seen, request);
            for part in answer.as_bytes().chunks(part) {
                // The client may have closed the connection.
                if theirs.write_all(part).await.is_err() {
                    break;
                }
            }
        };
        let pieces = [&request[..7], b"", &request[7..]].map(Bytes::from_static).into();
        let (response, ()) = tokio::join!(
            async {
                let response = exchange(&mut connection, pieces, Verb::Post, bytes_max).await;
                // The server must not wait for a client that has disconnected.
                drop(std::mem::replace(&mut connection.stream, duplex(1).0));
                response
            },
            peer
        );
        (response, connection.reusable)
    }

    const REQUEST: &[u8] = b"POST /a HTTP/1.1\r\ncontent-length: 100\r\n\r\n0123456789012345678901234567890123456789";

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_comes_in_any_parts_is_the_answer() {
        let long = "x".repeat(300);
        let exact = format!("HTTP/1.1 200 OK\r\ncontent-length: 300\r\n\r\n{long}");
        let chunked = format!(
            "HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;a=b\r\nx\r\n12B\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n",
            &long[1..]
        );
        let open = format!("HTTP/1.1 200 OK\r\n\r\n{long}");
        for (answer, free) in [(exact, true), (chunked, true), (open, false)] {
            for part in [1, 2, 3, 7, 64, 1_000] {
                let (response, is_free) = answered(REQUEST, &answer, part, 300).await;
                assert_eq!(response.unwrap().message.head.to_bytes(), long, "in parts of {part}: {answer}");
                assert_eq!(is_free, free, "{answer}");
                let (response, is_free) = answered(REQUEST, &answer, part, 299).await;
                assert_eq!(response.unwrap_err().code(), Code::ResourceExhausted, "in parts of {part}: {answer}");
                assert!(!is_free);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_ends_early_is_unknown_wherever_it_ends() {
        let whole = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n";
        for end in 0..whole.len() {
            let error = answered(REQUEST, &whole[..end], 64, 100).await.0.unwrap_err();
            assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{end}");
        }
        for wrong in ["5\r\nabcdef\r\n0\r\n\r\n", "x\r\n", "-1\r\n", "fffffffffffffffff\r\n"] {
            let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            let error = answered(REQUEST, &format!("{head}{wrong}"), 64, 100).await.0.unwrap_err();
            assert_eq!(error.code(), Code::DataLoss, "{wrong}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_after_the_answer_end_the_use_of_the_connection() {
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}x";
        let (response, free) = answered(REQUEST, answer, 64, 100).await;
        assert!(response.is_ok() && !free);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_before_the_request_is_all_sent_is_the_answer_and_the_last() {
        let (ours, mut theirs) = duplex(64);
        let mut connection = Connection::new(ours);
        theirs.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        let request = VecDeque::from([Bytes::from(vec![b'x'; 1_000])]);
        let response = exchange(&mut connection, request, Verb::Post, 100).await.unwrap();
        assert_eq!((response.status, connection.reusable), (Status(413), false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_connection_has_not_started_the_call() {
        let (ours, theirs) = duplex(64);
        drop(theirs);
        let error =
            exchange(&mut Connection::new(ours), [Bytes::from_static(b"x")].into(), Verb::Post, 1).await.unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted));
    }
}
