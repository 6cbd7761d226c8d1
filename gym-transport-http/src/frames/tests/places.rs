//! Segments that are received into memory that the handler names.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use gym_core::message::{Lender, Loan};
use gym_core::{CallContext, Handler, Request, Response, Result, Route};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use super::{LONG_TIMEOUT, joined, request_frame, soon};
use crate::frames::codec::frame::greeting_frame;
use crate::frames::config::FramesConfig;

/// Memory that is lent for the segment of its number, by the length of each.
#[derive(Debug, Default)]
pub(super) struct Shelf(Mutex<Vec<Option<BytesMut>>>);

impl Shelf {
    pub(super) fn new(lengths: &[usize]) -> Arc<Self> {
        Arc::new(Self(Mutex::new(lengths.iter().map(|length| Some(BytesMut::zeroed(*length))).collect())))
    }

    pub(super) fn lend(self: &Arc<Self>, number: usize) -> Option<Loan> {
        let memory = self.0.lock().get_mut(number)?.take()?;
        Some(Loan::new(memory, number, Arc::clone(self) as _))
    }

    fn addresses(&self) -> Vec<usize> {
        self.0.lock().iter().flatten().map(|memory| memory.as_ptr().addr()).collect()
    }

    /// Returns what has come back.
    pub(super) fn back(&self) -> Vec<BytesMut> {
        self.0.lock().iter().flatten().cloned().collect()
    }
}

impl Lender for Shelf {
    fn take_back(&self, number: usize, memory: BytesMut) {
        self.0.lock()[number] = Some(memory);
    }
}

/// Lends its memory, and answers with the addresses of the segments.
#[derive(Debug)]
struct Places {
    shelf: Arc<Shelf>,
    asked: Arc<Mutex<Vec<(Bytes, usize, usize)>>>,
}

impl Handler for Places {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let addresses: Vec<usize> = request.message.segments.iter().map(|part| part.as_ptr().addr()).collect();
        Box::pin(async move { Ok(Response::json(format!("{addresses:?}"))) })
    }

    fn place(&self, route: &Route, head: &Bytes, segment: usize, length: usize) -> Option<Loan> {
        assert_eq!(route.path(), "/x");
        self.asked.lock().push((head.clone(), segment, length));
        self.shelf.lend(segment)
    }
}

fn request(segments: &[usize]) -> Request {
    let mut request = Request::post(CallContext::within(LONG_TIMEOUT), "/x", r#"{"n":1}"#);
    request.message.segments = segments.iter().map(|length| Bytes::from(vec![7; *length])).collect();
    request
}

#[tokio::test]
async fn a_segment_lands_in_the_memory_that_the_handler_names() {
    // The second one has another length than its segment, the third segment is small, and the last one has no memory.
    let shelf = Shelf::new(&[300_000, 10, 100, 70_000]);
    let (addresses, asked) = (shelf.addresses(), Arc::default());
    let places = Places { shelf: Arc::clone(&shelf), asked: Arc::clone(&asked) };
    let both = joined(FramesConfig::default(), FramesConfig::default(), places).await;
    let sent = request(&[300_000, 20_000, 100, 70_000, 70_000]);
    let answer = soon(both.channel.call(sent)).await.unwrap();
    let answer = String::from_utf8(answer.message.head.to_bytes().to_vec()).unwrap();
    let landed: Vec<usize> =
        answer.trim_matches(['[', ']']).split(", ").map(|address| address.parse().unwrap()).collect();
    assert_eq!((landed[0], landed[3]), (addresses[0], addresses[3]));
    assert!(landed[1] != addresses[1] && landed[2] != addresses[2]);
    let head = || Bytes::from_static(br#"{"n":1}"#);
    let expected = [(head(), 0, 300_000), (head(), 1, 20_000), (head(), 3, 70_000), (head(), 4, 70_000)];
    assert_eq!(*asked.lock(), expected);
    let back = shelf.back();
    assert!(back[0].iter().chain(&back[3]).all(|byte| *byte == 7), "what has come back is what was received");
    assert!(back[1].iter().chain(&back[2]).all(|byte| *byte == 0));
    assert_eq!(shelf.addresses(), addresses);
}

#[tokio::test]
async fn memory_comes_back_if_the_connection_ends_before_its_segment_has_arrived() {
    let shelf = Shelf::new(&[300_000]);
    let places = Places { shelf: Arc::clone(&shelf), asked: Arc::default() };
    let (near, mut far) = UnixStream::pair().unwrap();
    let config = FramesConfig::default();
    let listener = super::ListenerState::new(config.clone(), Arc::new(tokio::sync::Semaphore::new(1)));
    let peer = gym_core::message::PeerInfo { address: "the other end".into() };
    let serving =
        super::serve(super::Socket::Unix(near), &[], listener, Arc::new(places), peer, gym_core::CancelToken::new());
    let serving = tokio::spawn(serving);
    far.write_all(&greeting_frame(&config.limits)).await.unwrap();
    let sent = request(&[300_000]).message;
    far.write_all(&request_frame(1, &sent)).await.unwrap();
    far.write_all(&sent.head.to_bytes()).await.unwrap();
    far.write_all(&[7; 1_000]).await.unwrap();
    let lent = async {
        while !shelf.back().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    soon(lent).await;
    drop(far);
    soon(serving).await.unwrap().unwrap_err();
    let back = shelf.back();
    assert!(back[0].iter().take(1_000).all(|byte| *byte == 7) && back[0].len() == 300_000);
}
