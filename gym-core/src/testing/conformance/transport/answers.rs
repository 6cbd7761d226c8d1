//! Cases of contents: bodies, statuses, metadata and context arrive unchanged.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Barrier;
use tokio::time::Instant;

use super::{Fixture, LONG_TIMEOUT, Make, far, post, probe, run_cases};
use crate::base::error::{Code, Error, Execution};
use crate::message::{CallContext, ContentType, Message, Request, Response, Rope, Status, Verb};
use crate::message::{Incarnation, TraceContext};
use crate::transport::ConnectOptions;
use crate::transport::{Fenced, Handler, handler_fn};

pub(super) async fn run(make: Make<'_>) {
    run_cases!(make;
        a_call_is_answered,
        a_body_comes_back_bit_for_bit,
        a_message_of_any_shape_comes_back,
        what_a_handler_keeps_stays_as_it_was,
        any_status_is_an_answer,
        a_repeated_name_keeps_its_values_in_order,
        an_error_of_the_handler_keeps_code_and_execution,
        verb_route_and_query_arrive,
        the_trace_arrives,
        no_more_time_arrives_than_the_caller_has,
        calls_run_at_the_same_time,
        the_first_answer_may_be_awaited_last,
        a_call_for_another_incarnation_is_refused,
        an_answer_of_another_incarnation_is_refused,
    );
}

fn echo() -> impl Handler {
    handler_fn(|request: Request| async move { Ok(Response::new(Status::OK, request.message)) })
}

async fn a_call_is_answered(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async move { Ok(Response::json(request.message.head)) }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    let answer = channel.call(Request::post(far(), "/verify", r#"{"a":1}"#)).await.expect("an answer");
    assert_eq!(answer.status, Status::OK);
    assert_eq!(answer.message, Message::json(r#"{"a":1}"#));
    let request = seen.started().await;
    assert!(request.peer.is_some_and(|peer| !peer.address.is_empty()), "the transport says who called");
    assert_eq!(channel.path().scheme, fixture.connector.scheme());
}

/// No transport parses the message.
async fn a_body_comes_back_bit_for_bit(make: Make<'_>) {
    let fixture = Fixture::new(make, echo()).await;
    let channel = fixture.channel().await;
    for text in [
        r#"{"reward":1E5,"n":12345678901234567890123,"z":-0.0,"tiny":1e-400}"#,
        "{ \"unknown\" :\t[ 1 , 2.50 ] ,\r\n \"esc\": \"\\u00e9\\/\\ud83d\\ude00\" }  ",
        r#"{"a":1,"a":2}"#,
        "\"just a text\"",
        "null",
        "not JSON at all {",
        "\u{feff}{\"text\":\"ü 漢字 😀\"}",
    ] {
        let answer = channel.call(Request::post(far(), "/echo", text)).await.expect("an answer");
        assert_eq!(answer.message.head.to_bytes(), text);
    }
    let binary = Message {
        content_type: ContentType::Other("application/octet-stream".into()),
        head: (0..=255).collect::<Vec<u8>>().into(),
        segments: Vec::new(),
    };
    let request = Request { message: binary.clone(), ..post(far(), "/echo") };
    assert_eq!(channel.call(request).await.expect("an answer").message, binary);
}

async fn a_message_of_any_shape_comes_back(make: Make<'_>) {
    let fixture = Fixture::new(make, echo()).await;
    let channel = fixture.channel().await;
    let large = Bytes::from((0..3_000_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    let pieces: Rope = (0..100).map(|piece| Bytes::from(format!("{piece},"))).collect();
    let shapes = [
        (ContentType::Json, Rope::new(), vec![]),
        (ContentType::Json, "{}".into(), vec![Bytes::new()]),
        (ContentType::Json, Rope::new(), vec![Bytes::from_static(b"x"), Bytes::new()]),
        (ContentType::Json, pieces.clone(), vec![]),
        (ContentType::Json, pieces, vec![large.slice(..70_000), large.slice(5..9)]),
        (ContentType::Json, "{}".into(), (0..1_000).map(|start| large.slice(start..start * 2)).collect()),
        (ContentType::Json, "{}".into(), vec![large.clone()]),
        (ContentType::Json, large.into(), vec![]),
        (ContentType::Text, "text".into(), vec![]),
        (ContentType::Text, "text".into(), vec![Bytes::from_static(b"x")]),
        (ContentType::EventStream, "data: {}\n\ndata: [DONE]\n\n".into(), vec![]),
        (ContentType::Other("text/html; charset=utf-8".into()), "<p>".into(), vec![]),
    ];
    for (content_type, head, segments) in shapes {
        let sent = Message { content_type, head, segments };
        let request = Request { message: sent.clone(), ..post(far(), "/echo") };
        let answer = channel.call(request).await.expect("an answer");
        // Not `assert_eq`, which would print megabytes.
        assert!(answer.message == sent, "{:?} came back as {:?}", shape(&sent), shape(&answer.message));
    }
}

fn shape(message: &Message) -> (&ContentType, usize, Vec<usize>) {
    (&message.content_type, message.head.len(), message.segments.iter().map(Bytes::len).collect())
}

/// A transport must not reuse a receive buffer while the buffer is still read.
async fn what_a_handler_keeps_stays_as_it_was(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async move { Ok(Response::new(Status::OK, request.message)) }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    let message = |fill: u8| Message {
        content_type: ContentType::Json,
        head: vec![fill; 3_000].into(),
        segments: vec![vec![fill; 50_000].into()],
    };
    let mut kept = Vec::new();
    for fill in 0..32 {
        let request = Request { message: message(fill), ..post(far(), "/keep") };
        let answer = channel.call(request).await.expect("an answer");
        kept.push((fill, answer.message, seen.started().await.message));
    }
    for (fill, answer, request) in kept {
        assert!(answer == message(fill) && request == message(fill), "message {fill} has changed");
    }
}

async fn any_status_is_an_answer(make: Make<'_>) {
    let fixture = Fixture::new(
        make,
        handler_fn(|request: Request| async move {
            let status = request.route.path().trim_start_matches('/').parse().expect("a number");
            Ok(Response::new(Status(status), request.message))
        }),
    )
    .await;
    let channel = fixture.channel().await;
    for (status, route) in
        [(200, "/200"), (201, "/201"), (404, "/404"), (422, "/422"), (429, "/429"), (500, "/500"), (503, "/503")]
    {
        let answer = channel.call(Request::post(far(), route, "\"why\"")).await.expect("an answer");
        assert_eq!((answer.status, answer.message), (Status(status), Message::json("\"why\"")));
    }
}

async fn a_repeated_name_keeps_its_values_in_order(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async move {
                let mut response = Response::json("{}");
                for value in ["b=2; Path=/; HttpOnly", "a=1", "b=3"] {
                    response.metadata.push("set-cookie", value);
                }
                response.metadata.push("x-late", "1");
                Ok(response)
            }
        }),
    )
    .await;
    let cx = far().with_metadata("cookie", "s=1; t=\"2\"").with_metadata("x-two", "1").with_metadata("x-two", "2");
    let answer = fixture.channel().await.call(post(cx, "/seed")).await.expect("an answer");
    let cookies: Vec<_> = answer.metadata.all("set-cookie").collect();
    assert_eq!(cookies, ["b=2; Path=/; HttpOnly", "a=1", "b=3"]);
    assert_eq!(answer.metadata.get("x-late"), Some("1"));
    let metadata = seen.started().await.context.metadata;
    assert_eq!(metadata.all("cookie").collect::<Vec<_>>(), ["s=1; t=\"2\""]);
    assert_eq!(metadata.all("x-two").collect::<Vec<_>>(), ["1", "2"]);
}

async fn an_error_of_the_handler_keeps_code_and_execution(make: Make<'_>) {
    let fixture = Fixture::new(
        make,
        handler_fn(|request: Request| async move {
            let (code, execution) = request.route.query().and_then(|query| query.split_once('&')).expect("two words");
            let code = Code::from_name(code).expect("a code");
            let execution = Execution::from_name(execution).expect("an execution");
            Err(Error::new(code, execution, "because of ünicode \"quotes\"").about("tool"))
        }),
    )
    .await;
    let channel = fixture.channel().await;
    for code in Code::ALL {
        for execution in [Execution::NotStarted, Execution::Unknown, Execution::Finished] {
            let route = format!("/fail?{}&{}", code.as_str(), execution.as_str());
            let answer = channel.call(Request::post(far(), route, "{}")).await.expect("an error is an answer");
            assert_eq!(answer.status, Status(code.status()));
            assert_eq!(answer.message.head.to_bytes(), r#""tool: because of ünicode \"quotes\"""#);
            let error = answer.into_result().expect_err("an error");
            assert_eq!((error.code(), error.execution()), (code, execution));
        }
    }
}

async fn verb_route_and_query_arrive(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async { Ok(Response::json("{}")) }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    for verb in Verb::ALL {
        let route = format!("/a%20b/{verb}?x=1&y=%2F&z");
        let request = Request { verb, ..Request::get(far(), route.clone()) };
        channel.call(request).await.expect("an answer");
        let request = seen.started().await;
        assert_eq!((request.verb, request.route.as_str()), (verb, route.as_str()));
        assert!(request.message.is_empty());
    }
}

async fn the_trace_arrives(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async { Ok(Response::json("{}")) }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    for trace in [
        TraceContext::default(),
        TraceContext { trace_id: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, span_id: 7, sampled: true },
    ] {
        let mut cx = far();
        cx.trace = trace;
        channel.call(post(cx, "/run")).await.expect("an answer");
        assert_eq!(seen.started().await.context.trace, trace);
    }
}

async fn no_more_time_arrives_than_the_caller_has(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async { Ok(Response::json("{}")) }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    let begin = Instant::now();
    let cx = CallContext::within(LONG_TIMEOUT);
    let deadline = cx.deadline;
    channel.call(post(cx, "/run")).await.expect("an answer");
    let at_peer = seen.started().await.context.deadline;
    // The transport rounds the remaining time down, and the receiver adds it to its own clock: the deadline moves by the time on the way, which is
    // shorter than the call.
    let took = begin.elapsed();
    assert!(at_peer <= deadline + took, "{:?} more than the caller has, after {took:?}", at_peer - deadline);
    let rounded = Duration::from_secs(1);
    assert!(at_peer + took + rounded > deadline, "{:?} less than the caller has, after {took:?}", deadline - at_peer);
}

async fn calls_run_at_the_same_time(make: Make<'_>) {
    const CALLS: usize = 32;
    let all = Arc::new(Barrier::new(CALLS));
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let all = Arc::clone(&all);
            async move {
                // Responds only after all calls have arrived.
                all.wait().await;
                Ok(Response::json(request.message.head))
            }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    let calls = (0..CALLS).map(|call| channel.call(Request::post(far(), "/wait", call.to_string())));
    for (call, answer) in futures_util::future::join_all(calls).await.into_iter().enumerate() {
        assert_eq!(answer.expect("an answer").message.head.to_bytes(), call.to_string());
    }
}

async fn the_first_answer_may_be_awaited_last(make: Make<'_>) {
    const CALLS: usize = 16;
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(
        make,
        handler_fn(move |request: Request| {
            let _told = probe.enter(&request);
            async move { Ok(Response::json(request.message.head)) }
        }),
    )
    .await;
    let channel = fixture.channel().await;
    let mut replies = Vec::new();
    for call in 0..CALLS {
        replies.push(channel.start(Request::post(far(), "/next", call.to_string())).await.expect("handed over"));
    }
    for (call, reply) in replies.into_iter().enumerate().rev() {
        assert_eq!(reply.await.expect("an answer").message.head.to_bytes(), call.to_string());
    }
    let mut arrived = Vec::new();
    for _ in 0..CALLS {
        arrived.push(seen.started().await.message.head.to_bytes());
    }
    if !channel.path().ordered {
        arrived.sort_by_key(|text| (text.len(), text.clone()));
    }
    let sent: Vec<_> = (0..CALLS).map(|call| Bytes::from(call.to_string())).collect();
    assert_eq!(arrived, sent);
}

async fn a_call_for_another_incarnation_is_refused(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let handler = handler_fn(move |request: Request| {
        let _told = probe.enter(&request);
        async { Ok(Response::json("{}")) }
    });
    let fixture = Fixture::new(make, Fenced::new(Incarnation(2), handler)).await;
    let answer = |meant: Option<Incarnation>| {
        let options = meant.map_or_else(ConnectOptions::default, ConnectOptions::to_incarnation);
        let fixture = &fixture;
        async move { fixture.channel_with(&options).await.call(post(far(), "/run")).await.and_then(Response::into_result) }
    };
    let refused = answer(Some(Incarnation(1))).await.expect_err("refused");
    assert_eq!((refused.code(), refused.execution()), (Code::Unavailable, Execution::NotStarted), "{refused}");
    assert!(seen.nothing_started(), "a refused call is not run");
    answer(Some(Incarnation(2))).await.expect("it is meant for this one");
    answer(None).await.expect("it is meant for any");
}

async fn an_answer_of_another_incarnation_is_refused(make: Make<'_>) {
    let handler = handler_fn(|_| async {
        let mut response = Response::json("{}");
        response.metadata.push(crate::transport::INCARNATION_METADATA, "2");
        Ok(response)
    });
    let fixture = Fixture::new(make, handler).await;
    let channel = fixture.channel_with(&ConnectOptions::to_incarnation(Incarnation(1))).await;
    let refused = channel.call(post(far(), "/run")).await.expect_err("refused");
    assert_eq!((refused.code(), refused.execution()), (Code::Unavailable, Execution::Unknown), "{refused}");
}
