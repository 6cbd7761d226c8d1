//! A model endpoint with negligible cost: fixed responses over raw sockets, so that it is never the bottleneck.

use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;

/// Maximum bytes of a request that are searched for its end.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Connections that can wait to be accepted: enough for a burst.
const BACKLOG: u32 = 4_096;

/// Returns the response to every request: one message of the assistant, so that a rollout has one step.
#[must_use]
pub fn answer() -> &'static str {
    concat!(
        r#"{"id":"resp_mock","object":"response","created_at":1700000000,"model":"mock","parallel_tool_calls":true,"#,
        r#""tool_choice":"auto","tools":[],"status":"completed","usage":{"input_tokens":57,"input_tokens_details":"#,
        r#"{"cached_tokens":0},"output_tokens":12,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":69},"#,
        r#""output":[{"id":"msg_mock","type":"message","role":"assistant","status":"completed","content":[{"type":"#,
        r#""output_text","text":"The weather in San Francisco is cold today.","annotations":[]}]}]}"#,
    )
}

/// Listens on a free loopback port.
///
/// # Errors
/// An error if there is none.
pub fn bind() -> Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_nodelay(true)?;
    socket.bind(([127, 0, 0, 1], 0).into())?;
    socket.listen(BACKLOG).context("listen for the mock endpoint")
}

/// Serves requests until dropped, each after `delay`.
///
/// # Errors
/// An error if accepting a connection fails.
pub async fn serve(listener: TcpListener, delay: Duration) -> Result<()> {
    let body = answer();
    let length = body.len();
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}");
    let answer: &'static [u8] = Box::leak(answer.into_boxed_str()).as_bytes();
    let mut peers = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.context("accept at the mock endpoint")?;
        while peers.try_join_next().is_some() {}
        peers.spawn(connection(stream, answer, delay));
    }
}

async fn connection(mut stream: TcpStream, answer: &'static [u8], delay: Duration) {
    let mut input = BytesMut::with_capacity(16 << 10);
    loop {
        while let Some(length) = request_length(&input) {
            input.advance(length);
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            if stream.write_all(answer).await.is_err() {
                return;
            }
        }
        if input.len() > 64 * HEAD_BYTES_MAX || !matches!(stream.read_buf(&mut input).await, Ok(1..)) {
            return;
        }
    }
}

/// Returns the length of the first request in the buffer, or `None` if it is incomplete.
fn request_length(input: &[u8]) -> Option<usize> {
    let head = memchr::memmem::find(&input[..input.len().min(HEAD_BYTES_MAX)], b"\r\n\r\n")?;
    let length = head + 4 + crate::load::content_length(&input[..head]).unwrap_or(0);
    (input.len() >= length).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_request_is_found() {
        let request = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /";
        assert_eq!(request_length(request), Some(request.len() - 5));
        assert_eq!(request_length(&request[..20]), None);
        assert_eq!(request_length(b"GET / HTTP/1.1\r\n\r\n"), Some(18));
    }
}
