//! Ranks that do not answer as a host does: whatever they say, the caller gets an error that names them.

use std::future::Future;
use std::sync::Arc;

use gym_core::base::watch;
use gym_core::group::GroupView;
use gym_core::group::batch::tensor::Tensor;
use gym_core::group::batch::{Batch, Payload};
use gym_core::group::layout::RankLayout;
use gym_core::message::Incarnation;
use gym_core::message::{Message, Response};
use gym_core::transport::{Channel, INCARNATION_METADATA};
use gym_core::transport::{Handler, handler_fn};
use gym_core::{Code, Execution};

use super::workers::Echo;
use super::{LONG_TIMEOUT, ServedGroup, member};
use crate::call::{FailureKind, GroupError, WorkerGroupExt};

/// Runs the cases of ranks that lie, each a handler that `connect` serves.
///
/// # Panics
/// When a case fails; the message names it.
pub async fn group_rogues<C, Fut>(connect: C)
where
    C: Fn(Arc<dyn Handler>) -> Fut,
    Fut: Future<Output = Channel>,
{
    for (name, code, answer) in lies() {
        let case = async {
            let channel = connect(Arc::new(handler_fn(move |_| {
                let answer = answer.clone();
                async move { Ok(answer) }
            })))
            .await;
            let error = call(channel).await;
            let outcome = error.first().expect("the rank that lied");
            assert_eq!((error.cause().code(), outcome.rank), (code, 0), "{error:?}");
            assert_ne!(outcome.execution(), Execution::NotStarted, "it has answered, so it can have run");
            assert!(!error.may_resend(), "{error:?}");
            if code == Code::DataLoss {
                assert_eq!(outcome.kind(), Some(FailureKind::BadReply));
            }
        };
        gym_core::testing::conformance::run_case("group rogues", name, case).await;
    }
}

async fn call(channel: Channel) -> GroupError {
    let members = vec![member(0, Incarnation(1), channel)];
    let layout = RankLayout::line(1).expect("one rank");
    let group =
        ServedGroup { name: "served".into(), layout, view: watch::Sender::new(Arc::new(GroupView::new(1, members))) };
    group.call(Echo, "hello".to_owned()).deadline(LONG_TIMEOUT).await.expect_err("the rank lies")
}

fn lies() -> Vec<(&'static str, Code, Response)> {
    let batch = Tensor::from_vec([4], vec![1_i64, 2, 3, 4]).and_then(|ids| Batch::empty().with("id", ids));
    let (schema, segments) = batch.expect("a batch of four rows").encode();
    let schema = serde_json::to_string(&schema).expect("a schema is JSON");
    let echoed = r#"{"rank":0,"world_size":1,"incarnation":1,"text":"hello","rows":4}"#;
    let truth = Message { segments, ..Message::json(format!(r#"{{"value":{echoed},"batch":{schema}}}"#)) };
    let told = |head: String| Response::json(head);
    let with = |message: Message| Response::new(gym_core::message::Status::OK, message);
    let mut short = truth.clone();
    short.segments = vec![truth.segments[0].slice(..truth.segments[0].len() - 1)];
    let mut more = truth.clone();
    more.segments.push(truth.segments[0].clone());
    let mut none = truth.clone();
    none.segments.clear();
    let lied_rows = Message {
        segments: truth.segments.clone(),
        ..Message::json(format!(r#"{{"value":{echoed},"batch":{}}}"#, schema.replace("4", "4000000000")))
    };
    let mut of_another_life = with(truth);
    of_another_life.metadata.push(INCARNATION_METADATA, "2");
    let unit = Payload::from(()).to_message().expect("nothing is JSON");
    vec![
        ("a_segment_shorter_than_its_shape", Code::DataLoss, with(short)),
        ("a_segment_too_many", Code::DataLoss, with(more)),
        ("a_segment_too_few", Code::DataLoss, with(none)),
        ("more_rows_than_memory_holds", Code::DataLoss, with(lied_rows)),
        ("a_reply_of_another_method", Code::DataLoss, with(unit)),
        ("rubbish_instead_of_a_reply", Code::DataLoss, told("\u{0}not JSON".to_owned())),
        ("nothing_instead_of_a_reply", Code::DataLoss, with(Message::default())),
        ("an_answer_of_another_life", Code::Unavailable, of_another_life),
    ]
}
