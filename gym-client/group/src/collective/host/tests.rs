//! The answers of ranks to messages that no other rank of their build sends, or sends only in a race. One of the ranks is played by the test.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::future::try_join_all;
use gym_core::group::collective::{Call, CommunicatorExt as _, Moved};
use gym_core::group::{COLLECTIVE_ROUTE, DType};
use gym_core::transport::{InProcess, ListenOptions, serve};
use gym_core::{CancelToken, Route};

use super::wire::{CHUNK_BYTES, CallPacket, Called, ChunkPacket, LeavePacket, Stream};
use super::*;

/// The number under which the rank of the test takes part.
const PLAYED: u64 = 7;

/// Ranks 0 and 1 of a meeting, and the numbers that they have given it. The test plays rank 2, which has joined.
struct Meets {
    backends: Vec<HostCollectives>,
    communicators: Vec<Arc<dyn Communicator>>,
    ids: Arc<[AtomicU64; 2]>,
    /// How often the rank of the test was told that the meeting has failed.
    told: Arc<AtomicU64>,
    _serving: Serving,
}

struct Serving(CancelToken);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The host of the rank that the test plays. It stands still when it is first told that the meeting has failed.
#[derive(Debug)]
struct Played {
    ids: Arc<[AtomicU64; 2]>,
    told: Arc<AtomicU64>,
}

impl Handler for Played {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let packet = serde_json::from_slice(&request.message.head.to_bytes()).unwrap();
        let text = match packet {
            Packet::Join(join) => {
                self.ids[join.from as usize].store(join.id, Ordering::Relaxed);
                text(&Joined::Here(PLAYED, String::new()))
            }
            Packet::Abort(_) if self.told.fetch_add(1, Ordering::Relaxed) == 0 => {
                return Box::pin(std::future::pending());
            }
            Packet::Call(_) => {
                let refused = Error::not_started(Code::FailedPrecondition, "the rank takes part no more");
                return Box::pin(async move { Err(refused) });
            }
            _ => b"null".to_vec(),
        };
        Box::pin(async move { Ok(Response::json(text)) })
    }
}

fn cx() -> CallContext {
    CallContext::within(Duration::from_secs(60))
}

impl Meets {
    async fn new() -> Self {
        let (network, ended) = (InProcess::new(), CancelToken::new());
        let transports = Transports::from(network);
        let (ids, told): (Arc<[AtomicU64; 2]>, Arc<AtomicU64>) = Default::default();
        let backends: Vec<HostCollectives> = (0..2).map(|_| HostCollectives::new(transports.clone())).collect();
        let mut handlers: Vec<Arc<dyn Handler>> = Vec::new();
        handlers.extend(backends.iter().map(|backend| Arc::new(backend.clone()) as Arc<dyn Handler>));
        handlers.push(Arc::new(Played { ids: Arc::clone(&ids), told: Arc::clone(&told) }));
        let mut seats = Vec::new();
        for (rank, handler) in handlers.into_iter().enumerate() {
            let options = ListenOptions::named(format!("rank-{rank}"));
            let (listener, handler) = transports.listen(options, handler, &[]).await.unwrap();
            seats.push(Seat::new(rank as Rank, Incarnation(1)).serving_at(listener.endpoints().to_vec()));
            tokio::spawn(serve(listener, handler, ended.clone(), Duration::ZERO));
        }
        let context = cx();
        let joins = backends.iter().enumerate().map(|(rank, backend)| {
            backend.join(&context, Meeting::new("policy", 3, rank as Rank, seats.clone()).unwrap())
        });
        let communicators = try_join_all(joins).await.unwrap();
        Self { backends, communicators, ids, told, _serving: Serving(ended) }
    }

    fn id_at(&self, rank: usize) -> u64 {
        self.ids[rank].load(Ordering::Relaxed)
    }

    /// Sends a message to a rank, and returns its answer.
    async fn answer(&self, rank: usize, packet: &Packet) -> Result<Bytes> {
        answer(&self.backends[rank], text(packet)).await
    }

    fn join_as(&self, id: u64, build: &str, epoch: u64) -> Packet {
        let seats = identities(&self.communicators[0].meeting().seats);
        Packet::Join(Join {
            build: build.to_owned(),
            name: "policy".to_owned(),
            epoch,
            from: 2,
            id,
            seats,
            facts: String::new(),
        })
    }
}

async fn answer(backend: &HostCollectives, packet: Vec<u8>) -> Result<Bytes> {
    let request = Request::post(cx(), Route::from_static(COLLECTIVE_ROUTE), packet);
    Ok(backend.handle(request).await.and_then(Response::into_result)?.message.head.to_bytes())
}

fn rejected<T: fmt::Debug>(answered: Result<T>, code: Code, texts: &[&str]) {
    let error = answered.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    texts.iter().for_each(|text| assert!(error.to_string().contains(text), "`{error}` must contain `{text}`"));
}

#[tokio::test(start_paused = true)]
async fn ranks_of_other_builds_and_older_epochs_do_not_meet() {
    let meets = Meets::new().await;
    let other = meets.answer(0, &meets.join_as(9, "0.0.9/1", 3)).await;
    rejected(other, Code::FailedPrecondition, &["rank 2 has gym 0.0.9/1", &format!("this rank has gym {BUILD}")]);
    let older = meets.answer(0, &meets.join_as(9, BUILD, 2)).await;
    rejected(older, Code::FailedPrecondition, &["this rank is in epoch 3, and rank 2 joins epoch 2"]);
    // The one that joins says whose answer that is.
    let seats = Arc::clone(&meets.communicators[0].meeting().seats);
    let older = meets.backends[1].join(&cx(), Meeting::new("policy", 2, 1, seats).unwrap()).await;
    rejected(older, Code::FailedPrecondition, &["(epoch 2) as rank 1: rank 0 answers: this rank is in epoch 3"]);
    assert_eq!(meets.backends.iter().map(HostCollectives::meetings).sum::<usize>(), 2, "it leaves nothing behind");
}

#[tokio::test(start_paused = true)]
async fn what_is_no_message_is_invalid_and_what_is_too_much_is_refused() {
    let meets = Meets::new().await;
    for garbage in [&b""[..], b"{}", b"\xff", b"{\"call\":{\"to\":0}}"] {
        let answered = answer(&meets.backends[0], garbage.to_vec()).await;
        rejected(answered, Code::InvalidArgument, &["not a message of collective operations"]);
    }
    let call = |to, from, number| {
        let call = Call::new(Collective::Barrier, DType::U8, 0);
        Packet::Call(CallPacket { to, from, stream: Stream::Round, number, call })
    };
    let unknown = meets.answer(0, &call(1_000, 2, 0)).await;
    rejected(unknown, Code::FailedPrecondition, &["takes part in this meeting no more"]);
    rejected(meets.answer(0, &call(meets.id_at(0), 3, 0)).await, Code::InvalidArgument, &["no position 3"]);
    let mut kept = 0;
    let refused = loop {
        match meets.answer(0, &call(meets.id_at(0), 2, kept)).await {
            Ok(_) => kept += 1,
            refused => break refused,
        }
    };
    assert!((1..100).contains(&kept), "{kept} calls are kept");
    rejected(refused, Code::ResourceExhausted, &["rank 2 has sent more calls than rank 0 keeps", "meeting policy"]);
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_gives_up_when_the_others_have_met_has_left() {
    for told in [true, false] {
        let meets = Meets::new().await;
        // It has not heard of some of them, and then it joins again without a word.
        for rank in (0..2).filter(|_| told) {
            let (to, called) = (meets.id_at(rank), Called::default());
            let left = Packet::Leave(LeavePacket { to, from: 2, called, gave_up: Some(PLAYED) });
            meets.answer(rank, &left).await.unwrap();
        }
        let again = meets.answer(0, &meets.join_as(PLAYED + 1, BUILD, 3)).await.unwrap();
        let Joined::Over(cause) = serde_json::from_slice(&again).unwrap() else { panic!("it is met again") };
        let cause = cause.into_error();
        assert_eq!(cause.code(), Code::Unavailable);
        assert!(cause.to_string().contains("meeting policy (epoch 3): rank 2 has left the meeting"), "{cause}");
        let context = cx();
        let (first, second) =
            tokio::join!(meets.communicators[0].barrier(&context), meets.communicators[1].barrier(&context));
        // Rank 0, at which it has joined again, has told all.
        for ended in [first, second] {
            rejected(ended, Code::Unavailable, &["meeting policy (epoch 3): rank 2 has left the meeting"]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_stood_still_is_told_again_that_the_meeting_has_failed() {
    let meets = Meets::new().await;
    meets.communicators[0].abort(Error::internal("disk full"));
    assert_eq!(meets.communicators[1].closed().await.message(), "disk full");
    // Nobody waits for it: the meeting may be forgotten before it goes on.
    let Meets { communicators, backends, told, _serving, .. } = meets;
    drop(communicators);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(backends.iter().map(HostCollectives::meetings).sum::<usize>(), 0);
    assert_eq!(told.load(Ordering::Relaxed), 2, "it is told until it answers");
}

#[tokio::test(start_paused = true)]
async fn ranks_of_several_nodes_that_must_share_memory_are_refused_before_they_meet() {
    let seats = ["a", "b"].map(|node| Seat::new(Rank::from(node == "b"), Incarnation(1)).on_node(node));
    let backend = HostCollectives::sharing(Transports::from(InProcess::new()), Sharing::Always, 0);
    // The other rank is not there: nothing that it does can be the cause.
    let refused = backend.join(&cx(), Meeting::new("policy", 1, 0, seats).unwrap()).await;
    rejected(refused, Code::FailedPrecondition, &["'shm' needs", "ranks 0 and 1 are on the nodes `a` and `b`"]);
    assert_eq!(backend.meetings(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_refused_call_is_noticed_while_the_operation_waits() {
    let (meets, began) = (Meets::new().await, Instant::now());
    let context = cx();
    let (first, second) =
        tokio::join!(meets.communicators[0].barrier(&context), meets.communicators[1].barrier(&context));
    rejected(first, Code::Unavailable, &["rank 2 has left the meeting: the rank takes part no more"]);
    rejected(second, Code::Unavailable, &["rank 2 has left the meeting"]);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}, by the paused clock", began.elapsed());
}

/// A receive of rank 1 from the rank of the test, which has announced it. Returns the transfer, the address of its memory, and the number of the meeting.
async fn receives(meets: &Meets, bytes: usize) -> (Transfer, usize, u64) {
    let memory = BytesMut::zeroed(bytes);
    let address = memory.as_ptr().addr();
    let receive = Collective::Receive { from: 2 };
    let transfer = meets.communicators[1].start(&cx(), receive, Buffer::host(DType::U8, memory));
    let to = meets.id_at(1);
    let call = Call::new(Collective::Send { to: 1 }, DType::U8, bytes);
    let announced = Packet::Call(CallPacket { to, from: 2, stream: Stream::Pair, number: 0, call });
    meets.answer(1, &announced).await.unwrap();
    (transfer, address, to)
}

fn chunk(to: u64, number: u64, at: u64) -> Bytes {
    text(&Packet::Chunk(ChunkPacket { to, from: 2, stream: Stream::Pair, number, at, waits: true })).into()
}

#[tokio::test(start_paused = true)]
async fn chunks_are_received_in_the_memory_of_the_operation() {
    let meets = Meets::new().await;
    let (backend, route) = (&meets.backends[1], Route::from_static(COLLECTIVE_ROUTE));
    let (transfer, address, to) = receives(&meets, 2 * CHUNK_BYTES + 10).await;
    let place = |number, at| backend.place(&route, &chunk(to, number, at), 0, CHUNK_BYTES);
    for (number, at) in [(1, 0), (0, 3), (0, u64::MAX)] {
        assert!(place(number, at).is_none(), "chunk {at} of operation {number} is not expected");
    }
    let mut first = place(0, 0).unwrap();
    assert_eq!((first.as_ref().as_ptr().addr(), first.as_ref().len()), (address, CHUNK_BYTES));
    assert!(place(0, 0).is_none(), "it is lent");
    first.as_mut().fill(1);
    // The transport provided memory for the second one, and its connection ended within the third one.
    drop(place(0, 2).unwrap());
    for (at, elements) in [first.into_bytes(), vec![2; CHUNK_BYTES].into(), vec![3; 10].into()].into_iter().enumerate()
    {
        let mut request = Request::post(cx(), route.clone(), chunk(to, 0, at as u64).to_vec());
        request.message.segments.push(elements);
        backend.handle(request).await.unwrap();
    }
    let Moved { buffer, result } = transfer.await;
    assert_eq!(result.unwrap().bytes as usize, 2 * CHUNK_BYTES + 10);
    let bytes = buffer.host_bytes().unwrap();
    assert_eq!(bytes.as_ptr().addr(), address, "the memory of the call comes back");
    let expected = |at: usize| [1, 2, 3][at / CHUNK_BYTES];
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    assert!(place(0, 0).is_none(), "the operation is over");
}

#[tokio::test(start_paused = true)]
async fn a_buffer_comes_back_although_a_connection_holds_a_part_of_it() {
    let meets = Meets::new().await;
    let (transfer, _, to) = receives(&meets, CHUNK_BYTES + 10).await;
    let held = meets.backends[1].place(&Route::from_static(COLLECTIVE_ROUTE), &chunk(to, 0, 0), 0, CHUNK_BYTES);
    // A chunk of another length.
    let mut request = Request::post(cx(), Route::from_static(COLLECTIVE_ROUTE), chunk(to, 0, 0).to_vec());
    request.message.segments.push(Bytes::from_static(b"short"));
    drop(meets.backends[1].handle(request).await);
    let Moved { buffer, result } = transfer.await;
    rejected(result, Code::DataLoss, &["rank 2 sent 5 bytes as chunk 0 of operation 0, and 262144 bytes of chunk 0"]);
    assert_eq!(buffer.host_bytes().unwrap().len(), CHUNK_BYTES + 10);
    assert!(held.is_some());
}
