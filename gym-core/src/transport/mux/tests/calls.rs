//! Calls over a pair of ends: order, capacity, rejections, cancellation, endings.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::*;
use crate::base::error::{Code, Execution};
use crate::message::{Response, Route, Status, Verb};
use crate::transport::mux::header::put_request;
use crate::transport::{ConnectOptions, handler_fn};

fn code_and_execution(error: &Error) -> (Code, Execution) {
    (error.code(), error.execution())
}

fn echo() -> impl Handler {
    handler_fn(|request: Request| async move { Ok(Response::new(Status::OK, request.message)) })
}

/// Replies when the test releases it, and counts received and dropped calls.
#[derive(Clone, Debug, Default)]
struct HeldCalls {
    arrived: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
    release: Arc<Notify>,
}

impl HeldCalls {
    fn handler(&self) -> impl Handler {
        struct DropCounter(Arc<AtomicUsize>);
        impl Drop for DropCounter {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let Self { arrived, dropped, release } = self.clone();
        handler_fn(move |_| {
            arrived.fetch_add(1, Ordering::SeqCst);
            let (counter, release) = (DropCounter(Arc::clone(&dropped)), Arc::clone(&release));
            async move {
                let _counter = counter;
                release.notified().await;
                Ok(Response::json("{}"))
            }
        })
    }

    fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }
}

#[tokio::test]
async fn requests_are_taken_in_the_order_in_which_they_were_sent() {
    let arrived = Arc::new(Mutex::new(Vec::new()));
    let order = Arc::clone(&arrived);
    let handler = handler_fn(move |request: Request| {
        order.lock().push(request.message.segments[0].len());
        async move { Ok(Response::new(Status::OK, request.message)) }
    });
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), handler);
    let mut replies = Vec::new();
    for bytes in 0..50 {
        replies.push(pair.channel.start(with_segment("/next", bytes)).await.unwrap());
    }
    pair.deliver().unwrap();
    assert_eq!(*arrived.lock(), (0..50).collect::<Vec<_>>(), "before any of them has run");
    for (bytes, reply) in replies.into_iter().enumerate().rev() {
        assert_eq!(pair.during(reply).await.unwrap().message.segments[0].len(), bytes);
    }
    assert_eq!(pair.calls_running(), 0);
}

#[tokio::test]
async fn calls_that_nobody_awaits_may_be_sent_together_until_somebody_does() {
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), echo());
    let requests = || pair.calling.sender().requests_since_flush();
    let mut replies = Vec::new();
    for _ in 0..CROWD + 3 {
        replies.push(pair.channel.start(post("/next")).await.unwrap());
        // Its response has arrived: what counts is that nobody has looked.
        pair.deliver().unwrap();
    }
    assert_eq!(requests(), [vec![Flush::Now; CROWD], vec![Flush::Later; 3]].concat());
    pair.during(replies.pop().unwrap()).await.unwrap();
    assert_eq!(requests(), [], "sent when the first is awaited");
    replies.truncate(CROWD - 1);
    let awaited = pair.channel.call(post("/next"));
    pair.during(awaited).await.unwrap();
    replies.push(pair.channel.start(post("/next")).await.unwrap());
    assert_eq!(requests(), [Flush::Now], "dropped replies are not awaited later");
    for reply in replies {
        pair.during(reply).await.unwrap();
    }
}

#[tokio::test]
async fn a_call_waits_for_room_for_its_reply_before_it_leaves() {
    let held = HeldCalls::default();
    let limits = ConnectionLimits { reply_bytes_in_flight_max: 10 << 10, ..ConnectionLimits::default() };
    let pair = Pair::new(&limits, ConnectionLimits::default(), held.handler());
    let call = |reply_bytes_max: usize| {
        let mut request = post("/hold");
        request.context.reply_bytes_max = reply_bytes_max;
        pair.channel.start(request)
    };
    let first = call(6 << 10).await.unwrap();
    let mut second = Box::pin(call(5 << 10));
    let error = {
        let mut request = post("/hold");
        request.context = CallContext::within(Duration::from_millis(20));
        request.context.reply_bytes_max = 5 << 10;
        pair.channel.start(request).await.err().unwrap()
    };
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::NotStarted), "{error}");
    assert!(futures_util::poll!(&mut second).is_pending());
    pair.deliver().unwrap();
    assert_eq!(held.arrived(), 1, "what waits has not left");
    held.release.notify_one();
    pair.during(first).await.unwrap();
    let second = pair.during(second).await.unwrap();
    held.release.notify_one();
    pair.during(second).await.unwrap();
}

#[tokio::test]
async fn a_slot_is_free_again_when_the_answer_is_there_and_the_request_has_left() {
    let pair = Pair::new(
        &ConnectionLimits { calls_max: 1, ..ConnectionLimits::default() },
        ConnectionLimits::default(),
        echo(),
    );
    for _ in 0..3 {
        let reply = pair.during(pair.channel.start(post("/x"))).await.unwrap();
        pair.during(reply).await.unwrap();
    }
}

#[tokio::test]
async fn what_exceeds_a_limit_of_the_peer_is_not_sent() {
    let handler = handler_fn(|_| async { panic!("nothing arrives") });
    let server = ConnectionLimits { message_bytes_max: 1_000, segments_max: 2, ..ConnectionLimits::default() };
    let pair = Pair::new(&ConnectionLimits::default(), server, handler);
    let mut many = post("/x");
    many.message.segments = vec![Bytes::new(); 3];
    for (request, limit) in [(with_segment("/x", 1_000), "message_bytes_max = 1000"), (many, "segments_max = 2")] {
        let error = pair.during(pair.channel.call(request)).await.unwrap_err();
        assert_eq!(code_and_execution(&error), (Code::InvalidArgument, Execution::NotStarted));
        assert!(error.to_string().contains(limit), "{error}");
    }
    let mut request = post("/x");
    request.context.metadata.push("cookie", "c".repeat(2 << 20));
    assert_eq!(pair.during(pair.channel.call(request)).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn what_a_server_has_no_room_for_is_refused_and_never_runs() {
    let held = HeldCalls::default();
    let server = ConnectionLimits { calls_max: 1, ..ConnectionLimits::default() };
    let pair = Pair::with_announced(&ConnectionLimits::default(), &ConnectionLimits::default(), server, held.handler());
    let first = pair.channel.start(post("/1")).await.unwrap();
    let second = pair.channel.start(post("/2")).await.unwrap();
    let error = pair.during(second).await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::ResourceExhausted, Execution::NotStarted), "{error}");
    assert!(error.to_string().contains("calls_max = 1"), "{error}");
    held.release.notify_one();
    pair.during(first).await.unwrap();
    assert_eq!(held.arrived(), 1);
}

#[tokio::test]
async fn a_handler_that_panics_fails_its_call_alone() {
    let handler = handler_fn(|request: Request| async move {
        assert_eq!(request.route.path(), "/good");
        Ok(Response::json("{}"))
    });
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), handler);
    let error = pair.during(pair.channel.call(post("/bad"))).await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::Internal, Execution::Finished), "{error}");
    pair.during(pair.channel.call(post("/good"))).await.unwrap();
    assert_eq!(pair.calls_running(), 0);
}

#[tokio::test]
async fn a_reply_that_is_dropped_cancels_its_call() {
    let held = HeldCalls::default();
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), held.handler());
    let reply = pair.channel.start(post("/hold")).await.unwrap();
    pair.deliver().unwrap();
    assert_eq!(held.arrived(), 1);
    drop(reply);
    pair.during(async {
        while held.dropped.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(pair.calls_running(), 0);
}

/// A handler whose futures are polled where they are woken.
#[derive(Debug)]
struct OnlyWaits<H>(H);

impl<H: Handler> Handler for OnlyWaits<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }

    fn only_waits(&self) -> bool {
        true
    }
}

#[tokio::test]
async fn a_call_that_only_waits_needs_no_task() {
    let held = HeldCalls::default();
    let limits = ConnectionLimits::default();
    let mut pair = Pair::new(&limits, limits.clone(), OnlyWaits(held.handler()));
    let reply = pair.channel.start(post("/answered")).await.unwrap();
    pair.deliver().unwrap();
    assert_eq!((held.arrived(), pair.calls_running()), (1, 1));
    // Nothing runs between these lines, because nothing is awaited.
    held.release.notify_one();
    assert_eq!(pair.calls_running(), 0);
    pair.deliver().unwrap();
    pair.during(reply).await.unwrap();

    let reply = pair.channel.start(post("/cancelled")).await.unwrap();
    pair.deliver().unwrap();
    drop(reply);
    pair.deliver().unwrap();
    assert_eq!((held.arrived(), held.dropped.load(Ordering::SeqCst), pair.calls_running()), (2, 2, 0));

    let _reply = pair.channel.start(post("/ended")).await.unwrap();
    pair.deliver().unwrap();
    pair.ending = None;
    assert_eq!((held.arrived(), held.dropped.load(Ordering::SeqCst), pair.calls_running()), (3, 3, 0));
    assert!(pair.answering.sender().next().is_none(), "nobody is there to be told");
}

#[tokio::test]
async fn calls_that_only_wait_are_answered_in_any_size_and_from_any_thread() {
    let handler = handler_fn(|request: Request| {
        let (sender, response) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || drop(sender.send(Response::new(Status::OK, request.message))));
        async move { response.await.map_err(|_| Error::internal("dropped")) }
    });
    let limits = ConnectionLimits::default();
    let pair = Pair::new(&limits, limits.clone(), OnlyWaits(handler));
    for bytes in [0, 10, 100 << 10].repeat(20) {
        let response = pair.during(pair.channel.call(with_segment("/echo", bytes))).await.unwrap();
        assert_eq!(response.message.segments[0].len(), bytes);
    }
    assert_eq!(pair.calls_running(), 0);
}

#[tokio::test]
async fn the_room_of_an_answer_that_nobody_wants_any_more_is_free_when_the_transport_says_so() {
    let caller = ConnectionLimits { reply_bytes_in_flight_max: 1 << 20, ..ConnectionLimits::default() };
    let pair = Pair::new(&caller, ConnectionLimits::default(), echo());
    drop(pair.channel.start(post("/1")).await.unwrap());
    let mut second = std::pin::pin!(pair.channel.start(post("/2")));
    assert!(futures_util::poll!(&mut second).is_pending());
    // Delivers the cancel, until which this transport keeps the permit.
    let second = pair.during(second).await.unwrap();
    pair.during(second).await.unwrap();
}

#[tokio::test]
async fn an_answer_beyond_its_room_ends_the_connection_and_one_that_comes_twice_does_not() {
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), echo());
    let mut request = post("/x");
    request.context.reply_bytes_max = 1_000;
    let _reply = pair.channel.start(request).await.unwrap();
    assert!(pair.calling.on_opening(1, 1_000).unwrap(), "wanted");
    assert!(!pair.calling.on_opening(2, 5_000).unwrap(), "its caller has left, or never was");
    pair.calling.on_answer(2, Response::json("{}"));
    let error = pair.calling.on_opening(1, 1_001).unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::DataLoss, Execution::Unknown));
}

#[tokio::test]
async fn a_number_that_does_not_grow_is_refused() {
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), echo());
    let header = || {
        let request = post("/x");
        let mut header =
            header::put_request(0, request.verb, &request.route, &request.context, 9, &request.message).freeze();
        Lengths::take(&mut header, &crate::message::frame::MessageLimits::default()).unwrap();
        RequestHeader::read(header).unwrap()
    };
    assert!(pair.answering.on_opening(3, &header(), 0).unwrap());
    for call in [3, 2, 0] {
        assert_eq!(pair.answering.on_opening(call, &header(), 0).unwrap_err().code(), Code::DataLoss);
    }
}

#[tokio::test]
async fn a_drained_server_finishes_what_runs_and_its_caller_leaves() {
    let held = HeldCalls::default();
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), held.handler());
    let running = pair.channel.start(post("/hold")).await.unwrap();
    pair.deliver().unwrap();
    let drain = CancelToken::new();
    drain.cancel();
    let mut draining = Box::pin(pair.answering.drain_with(&drain));
    assert!(futures_util::poll!(&mut draining).is_pending());
    pair.deliver().unwrap();
    let error = pair.channel.start(post("/late")).await.err().unwrap();
    assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::NotStarted), "{error}");
    assert!(!pair.calling.sender().is_closed(), "one call is under way");
    held.release.notify_one();
    pair.during(running).await.unwrap();
    assert!(pair.calling.sender().is_closed(), "it was the last");
}

#[tokio::test]
async fn the_end_of_a_connection_is_told_to_its_calls_once() {
    let held = HeldCalls::default();
    let pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), held.handler());
    let reply = pair.channel.start(post("/hold")).await.unwrap();
    pair.deliver().unwrap();
    pair.calling.end(&wire_cut());
    pair.calling.end(&Error::internal("later"));
    let error = pair.during(reply).await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::Unknown));
    assert!(error.to_string().contains("the wire was cut"), "{error}");
    let error = pair.during(pair.channel.call(post("/late"))).await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::NotStarted));
    assert!(pair.during(pair.channel.closed()).await.to_string().contains("the wire was cut"));
}

#[tokio::test]
async fn a_server_that_ends_drops_what_runs_and_tells_nobody() {
    let held = HeldCalls::default();
    let mut pair = Pair::new(&ConnectionLimits::default(), ConnectionLimits::default(), held.handler());
    let _reply = pair.channel.start(post("/hold")).await.unwrap();
    pair.deliver().unwrap();
    pair.ending = None;
    pair.during(async {
        while held.dropped.load(Ordering::SeqCst) == 0 || pair.calls_running() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(pair.answering.sender().is_closed() && pair.answering.sender().next().is_none());
}

#[tokio::test]
async fn a_caller_that_takes_no_answers_is_refused_by_their_bytes_and_ended_by_their_number() {
    let limits = ConnectionLimits { calls_max: 4, reply_bytes_in_flight_max: 100 << 10, ..ConnectionLimits::default() };
    let pair = Pair::new(&ConnectionLimits::default(), limits, echo());
    let mut last_call = 0;
    let mut ask = async || {
        last_call += 1;
        let message = with_segment("/echo", 10 << 10).message;
        let mut header = behind(put_request(
            FakeSender::HEADROOM,
            Verb::Post,
            &Route::from_static("/echo"),
            &CallContext::default(),
            1 << 20,
            &message,
        ));
        Lengths::take(&mut header, &pair.limits.message_limits())?;
        let header = RequestHeader::read(header)?;
        if pair.answering.on_opening(last_call, &header, message.len())? {
            pair.answering.on_request(last_call, header, message.head.to_bytes(), message.segments);
        }
        tokio::task::yield_now().await;
        Ok::<_, Error>(())
    };
    for _ in 0..20 {
        ask().await.unwrap();
    }
    let kinds = |posted: &Posted| matches!(posted, Posted::Response(..));
    let answers = pair.answering.sender().0.lock().posted.iter().filter(|posted| kinds(posted)).count();
    assert_eq!(answers, 10, "what comes after a hundred KiB of answers is refused");
    let mut ended = Ok(());
    for _ in 0..2_000 {
        ended = ended.and(ask().await);
    }
    assert_eq!(code_and_execution(&ended.unwrap_err()), (Code::ResourceExhausted, Execution::Unknown));

    pair.answering.sender().0.lock().posted.clear();
    ask().await.expect("what was taken does not count");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_tolerates_little_silence_gets_at_most_ten_heartbeats_a_second() {
    let brief = ConnectionLimits { silence_max: Duration::from_millis(1), ..ConnectionLimits::default() };
    let posted = |sender: &FakeSender| sender.0.lock().posted.len();
    for (ours, theirs) in [(ConnectionLimits::default(), &brief), (brief.clone(), &ConnectionLimits::default())] {
        let (sender, activity) = (FakeSender::default(), PeerActivity::default());
        let (theirs, living) = (Handshake::of(theirs), || activity.record());
        let heartbeats = heartbeat(&sender, &activity, &ours, &theirs, living);
        let ended = tokio::time::timeout(Duration::from_millis(10_050), heartbeats).await;
        assert!(ended.is_err(), "its peer lives: {ended:?}");
        assert_eq!(posted(&sender), 100);
    }
    // Both ends use the same minimum, so that neither gives up too soon.
    let began = tokio::time::Instant::now();
    heartbeat(&FakeSender::default(), &PeerActivity::default(), &brief, &Handshake::of(&brief), || {}).await;
    assert_eq!(began.elapsed().as_millis(), 300);
}

#[tokio::test(start_paused = true)]
async fn silence_ends_no_connection_of_which_one_end_watches_the_other_in_another_way() {
    let watched = ConnectionLimits::default().of_channel(&ConnectOptions::default().watched());
    let day = Duration::from_secs(86_400);
    for (ours, theirs) in [(&watched, &ConnectionLimits::default()), (&ConnectionLimits::default(), &watched)] {
        let mut announced = BytesMut::new();
        Handshake::of(theirs).put(&mut announced);
        let theirs = Handshake::read(announced.freeze()).expect("a handshake");
        let (sender, activity) = (FakeSender::default(), PeerActivity::default());
        let heartbeats = heartbeat(&sender, &activity, ours, &theirs, || {});
        assert!(tokio::time::timeout(day, heartbeats).await.is_err(), "its peer is silent for a day");
        let posted = sender.0.lock().posted.len() as u64;
        assert_eq!(posted, day.as_secs() / 5, "the connection is kept open");
    }
}
