//! HTTP/1.1 transport of the gym SDK: a hyper server and a pooled client behind the `Connector` and `Listener` traits.
//!
//! ```text
//!   Channel ── HttpConnector ── pool of ≤ 1,024 connections ──► HttpListener ── HttpIncoming ── Handler
//!              (scheme http)     one call per connection         backlog 4,096   ≤ 16,384 calls
//! ```
//!
//! The same port accepts connections that are upgraded to frames (scheme `http+frames`): ordered, many calls at a time.
//!
//! A message without segments is sent as it is, so curl and Python servers can take part. A message with segments is sent as
//! [`application/x-gym-frame`](gym_core::message::frame). Bodies are neither flattened nor parsed.
//!
//! | module | purpose |
//! |---|---|
//! | [`HttpBackend`] | both transports as one backend of a program; [`HttpConfig`] and [`FramesConfig`] hold their limits and timeouts |
//! | [`http1`] | plain HTTP: `HttpConnector` with its connection pool, `HttpListener` |
//! | [`frames`] | ordered transport for worker groups, many calls over one connection: `FramesConnector`, `UnixListener` |
//! | [`origin`] | client of an `http` or (feature `tls`) `https` origin outside the SDK: `OriginClient` |
//! | `wire` | HTTP/1.1 as both use it: addresses, sockets, heads, headers and bodies |
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use gym_core::{CallContext, CancelToken, Request, Response, transport::{ConnectOptions, Connector, Listener, handler_fn}};
//! use gym_transport_http::HttpConfig;
//! use gym_transport_http::http1::{HttpConnector, HttpListener};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> gym_core::Result<()> {
//! let mut listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), HttpConfig::default())?;
//! let endpoint = listener.endpoints()[0].clone();
//! let server = tokio::spawn(async move {
//!     let echo = Arc::new(handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) }));
//!     listener.accept().await?.serve(echo, CancelToken::new()).await
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
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod backend;
pub mod frames;
pub mod http1;
pub mod origin;
mod wire;

pub use backend::HttpBackend;

/// `http`: HTTP, or framed connections over TCP or a Unix socket.
pub const HTTP: gym_core::transport::Transport = gym_core::transport::Transport::new("http", 400);

pub use frames::FramesConfig;
pub use http1::HttpConfig;

/// The program of README.md, as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
