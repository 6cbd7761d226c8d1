//! The HTTP/1.1 transport of the gym SDK: a hyper server and a small connection pool behind the `Connector` and `Listener` seam.
//!
//! ```text
//!   Channel ── HttpConnector ── pool of ≤ 1,024 connections ──► HttpListener ── HttpIncoming ── Handler
//!              (scheme http)     one call per connection         backlog 4,096   ≤ 16,384 calls
//! ```
//!
//! The same port takes connections that are upgraded to frames (scheme `http+frames`): ordered, many calls at a time.
//!
//! A message without segments travels as it is, so curl and Python servers can take part; one with segments travels as
//! [`application/x-gym-frame`](gym_core::frame). No body is flattened or parsed.
//!
//! | module | holds |
//! |---|---|
//! | [`HttpConfig`] | every limit and timeout, each with its why |
//! | [`HttpConnector`] | the calling end, and how failures map to errors |
//! | [`HttpListener`] | the answering end |
//! | `exchange`, `head` | one request and its answer over one connection |
//! | [`FramesConnector`], [`UnixListener`] | the ordered transport for worker groups: many calls at a time over one connection |
//! | `headers`, `body` | metadata and messages on the wire |
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use gym_core::{CallContext, ConnectOptions, Connector, Listener, Request, Response, handler_fn};
//! use gym_transport_http::{HttpConfig, HttpConnector, HttpListener};
//! use tokio_util::sync::CancellationToken;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> gym_core::Result<()> {
//! let mut listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), HttpConfig::default())?;
//! let endpoint = listener.endpoints()[0].clone();
//! let server = tokio::spawn(async move {
//!     let echo = Arc::new(handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) }));
//!     listener.accept().await?.serve(echo, CancellationToken::new()).await
//! });
//!
//! let cx = CallContext::within(Duration::from_secs(5));
//! let connector = HttpConnector::new(HttpConfig::default());
//! let channel = connector.connect(&cx, &endpoint, &ConnectOptions::default()).await?;
//! let answer = channel.call(Request::post(cx, "/echo", r#"{"n": 1E5}"#)).await?;
//! assert_eq!(&answer.message.head.to_bytes()[..], br#"{"n": 1E5}"#);
//! # server.abort();
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod body;
mod config;
mod connector;
mod exchange;
mod frames;
mod head;
mod headers;
mod incoming;
mod listener;
mod pool;
mod wire;

pub use config::HttpConfig;
pub use connector::HttpConnector;
#[cfg(feature = "testing")]
pub use frames::testing;
pub use frames::{FRAMES_SCHEME, FramesConfig, FramesConnector, UNIX_SCHEME, UnixIncoming, UnixListener};
pub use incoming::HttpIncoming;
pub use listener::HttpListener;

/// The scheme of plain HTTP endpoints: `http://host:port`.
pub const SCHEME: &str = "http";
