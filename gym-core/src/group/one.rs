//! A group call to one rank, which most calls are: no task, no token and no list are needed for one answer.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::cancel::CancelToken;
use crate::channel::{Handing, Reply};
use crate::context::Incarnation;
use crate::error::{Error, Execution, Result};
use crate::group::call::Outcome;
use crate::group::gather::{
    Call, Ended, Gathered, LATE, LEFT, Part, Slot, Terms, answer_of, cannot_answer, ended_by, may_answer, request,
};
use crate::group::{GroupError, GroupView};
use crate::layout::Rank;
use crate::worker::Method;

/// A call to one rank, from its sending on.
pub(crate) struct One<M: Method> {
    group: Arc<str>,
    cancel: CancelToken,
    deadline: Instant,
    view: watch::Receiver<Arc<GroupView>>,
    rank: Rank,
    incarnation: Incarnation,
    shard: Option<usize>,
    stage: Stage,
    /// What may end it early. Made when there is something to wait for: in a pipeline most answers are there when they are read.
    early: Option<BoxFuture<'static, Early>>,
    method: PhantomData<fn() -> M>,
}

enum Stage {
    HandingOver(BoxFuture<'static, Result<Reply>>),
    Answering(Reply),
    Failing(BoxFuture<'static, GroupError>),
}

/// What ended a call that was neither handed over nor answered.
enum Early {
    Told(Ended),
    Replaced(Error),
}

impl<M: Method> One<M> {
    /// Hands the part over, at once if there is room.
    pub(crate) fn send(call: Terms, part: Part) -> Self {
        let Terms { group, context, view } = call;
        let (cancel, deadline) = (context.cancel.clone(), context.deadline);
        let (rank, incarnation, shard) = (part.rank, part.incarnation, part.shard);
        let (channel, request) = request::<M>(part, context);
        let stage = match channel.try_hand_over(request) {
            Handing::Done(Ok(reply)) => Stage::Answering(reply),
            Handing::Done(Err(error)) => Stage::HandingOver(Box::pin(std::future::ready(Err(error)))),
            Handing::Waits(request) => Stage::HandingOver(Box::pin(async move { channel.hand_over(request).await })),
        };
        Self { group, cancel, deadline, view, rank, incarnation, shard, stage, early: None, method: PhantomData }
    }

    /// Ready when the rank has its part.
    pub(crate) fn poll_handed_over(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), GroupError>> {
        if let Stage::HandingOver(sending) = &mut self.stage {
            match sending.as_mut().poll(cx) {
                Poll::Ready(Ok(reply)) => self.stage = Stage::Answering(reply),
                Poll::Ready(Err(error)) => self.fail(error),
                Poll::Pending => {
                    let early = ready!(self.poll_early(cx));
                    self.end(Execution::NotStarted, early);
                }
            }
        }
        match &mut self.stage {
            Stage::Failing(failing) => failing.as_mut().poll(cx).map(Err),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Its caller leaves, the deadline passes, or the rank cannot answer any more.
    fn poll_early(&mut self, cx: &mut Context<'_>) -> Poll<Early> {
        let early = self.early.get_or_insert_with(|| {
            let (cancel, mut view) = (self.cancel.clone(), self.view.clone());
            let (deadline, rank, incarnation) = (self.deadline, self.rank, self.incarnation);
            Box::pin(async move {
                let replaced = async {
                    while view.changed().await.is_ok() {
                        let now = view.borrow_and_update();
                        if !may_answer(&now, rank, incarnation) {
                            return cannot_answer(&now, rank, incarnation);
                        }
                    }
                    // A group that is gone changes no more; its ranks' links tell the rest.
                    std::future::pending().await
                };
                tokio::select! {
                    biased;
                    () = cancel.cancelled() => Early::Told(LEFT),
                    () = sleep_until(deadline) => Early::Told(LATE),
                    error = replaced => Early::Replaced(error),
                }
            })
        });
        early.as_mut().poll(cx)
    }

    fn end(&mut self, execution: Execution, early: Early) {
        match early {
            Early::Told(ended) => self.failing(None, ended, execution),
            Early::Replaced(error) => self.failing(Some(error.with_execution(execution)), (Some(0), None), execution),
        }
    }

    fn fail(&mut self, error: Error) {
        let ended = ended_by(&error, 0, &self.cancel);
        self.failing(Some(error), ended, Execution::Unknown);
    }

    /// `execution`: what a part without an answer means.
    fn failing(&mut self, answer: Option<Error>, (first, cause): Ended, execution: Execution) {
        let Self { rank, incarnation, shard, .. } = *self;
        let call = Call::<M> {
            group: Arc::clone(&self.group),
            cancel: self.cancel.clone(),
            deadline: self.deadline,
            view: self.view.clone(),
            slots: vec![Slot { rank, incarnation, shard, answer: answer.map(Err) }],
        };
        self.stage = Stage::Failing(Box::pin(async move {
            call.failed(first, cause.map(|(code, why)| (code, why.into())), |_| execution).await
        }));
    }
}

impl<M: Method> Future for One<M> {
    type Output = Outcome<M>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        ready!(this.poll_handed_over(cx))?;
        if let Stage::Answering(reply) = &mut this.stage {
            match reply.as_mut().poll(cx) {
                Poll::Pending => {
                    let early = ready!(this.poll_early(cx));
                    this.end(Execution::Unknown, early);
                }
                Poll::Ready(answer) => {
                    match answer_of::<M>(this.rank, this.shard.is_some(), this.incarnation, answer) {
                        Ok(answer) => return Poll::Ready(Ok(Gathered::of_one(this.rank, this.shard, answer))),
                        Err(error) => this.fail(error),
                    }
                }
            }
        }
        match &mut this.stage {
            Stage::Failing(failing) => failing.as_mut().poll(cx).map(Err),
            _ => unreachable!("an answer ends the call, and so does what ends it early"),
        }
    }
}
