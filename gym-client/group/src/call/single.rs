//! A group call to one rank, the most frequent case: one reply needs neither a token of its own nor a list.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use gym_core::CancelToken;
use gym_core::base::watch;
use gym_core::group::GroupView;
use gym_core::group::layout::Rank;
use gym_core::group::worker::Method;
use gym_core::message::Incarnation;
use gym_core::observe::waits::WaitGuard;
use gym_core::transport::Reply;
use gym_core::transport::mem::{TrySendOutcome, try_send};
use gym_core::{Error, Execution, Result};
use tokio::time::{Instant, sleep_until};

use crate::call::GroupError;
use crate::call::gather::waiting::{self, RanksWait};
use crate::call::gather::{
    CANCELLED, Call, CallResult, DEADLINE_PASSED, Ended, Gathered, RankCall, Slot, Terms, answer_of, ended_by, request,
    send_request,
};
use crate::call::monitor::RankMonitor;
use crate::call::reach::{may_answer, no_answer};

/// A call in flight to one rank.
pub(crate) struct SingleRankCall<M: Method> {
    group: Arc<str>,
    cancel: CancelToken,
    began: Instant,
    deadline: Instant,
    view: watch::Receiver<Arc<GroupView>>,
    monitor: Option<Arc<dyn RankMonitor>>,
    rank: Rank,
    incarnation: Incarnation,
    shard: Option<usize>,
    stage: Stage,
    /// A future that ends the call early. Created only when the call has to wait: in a pipeline, most replies have arrived when
    /// they are read.
    early: Option<BoxFuture<'static, EarlyEnd>>,
    trace_id: u128,
    waits: Option<WaitGuard>,
    method: PhantomData<fn() -> M>,
}

enum Stage {
    Sending(BoxFuture<'static, Result<Reply>>),
    Responding(Reply),
    Failing(BoxFuture<'static, GroupError>),
}

/// The cause that ended a call early.
enum EarlyEnd {
    Ended(Ended),
    Replaced(Error),
}

impl<M: Method> SingleRankCall<M> {
    /// Sends the request, at once if there is capacity.
    pub(crate) fn send(call: Terms, part: RankCall) -> Self {
        let Terms { group, context, began, view, monitor } = call;
        let (cancel, deadline) = (context.cancel.clone(), context.deadline);
        let trace_id = context.trace.trace_id;
        let (rank, incarnation, shard) = (part.rank, part.incarnation, part.shard);
        let (channel, request) = request::<M>(part, context);
        let stage = match try_send(channel.link(), request) {
            TrySendOutcome::Done(Ok(reply)) => Stage::Responding(reply),
            TrySendOutcome::Done(Err(error)) => Stage::Sending(Box::pin(std::future::ready(Err(error)))),
            TrySendOutcome::WouldBlock(request) => {
                Stage::Sending(Box::pin(async move { send_request(&channel, request).await }))
            }
        };
        Self {
            group,
            cancel,
            began,
            deadline,
            view,
            monitor,
            rank,
            incarnation,
            shard,
            stage,
            early: None,
            trace_id,
            waits: None,
            method: PhantomData,
        }
    }

    /// Polls until the transport has accepted the request.
    pub(crate) fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), GroupError>> {
        if let Stage::Sending(sending) = &mut self.stage {
            match sending.as_mut().poll(cx) {
                Poll::Ready(Ok(reply)) => self.stage = Stage::Responding(reply),
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

    /// Polls until the call is cancelled, its deadline passes, or the rank can no longer reply.
    fn poll_early(&mut self, cx: &mut Context<'_>) -> Poll<EarlyEnd> {
        let early = self.early.get_or_insert_with(|| {
            let (method, ranks) = (M::NAME, vec![self.rank]);
            let (view, monitor) = (self.view.clone(), self.monitor.clone());
            let ranks = RanksWait { method, view, ranks, stages: None, turn: None, monitor };
            self.waits = Some(WaitGuard::begin(waiting::wait::<M>(&self.group, (self.trace_id, self.deadline), ranks)));
            let (cancel, mut view, monitor) = (self.cancel.clone(), self.view.clone(), self.monitor.clone());
            let (deadline, rank, incarnation) = (self.deadline, self.rank, self.incarnation);
            Box::pin(async move {
                let replaced = async {
                    while view.changed().await.is_ok() {
                        let now = view.borrow_and_update();
                        if !may_answer(&now, rank, incarnation) {
                            return no_answer(&now, rank, incarnation, monitor.as_deref());
                        }
                    }
                    // The view of a dropped group no longer changes; the links of its ranks report the rest.
                    std::future::pending().await
                };
                tokio::select! {
                    biased;
                    () = cancel.cancelled() => EarlyEnd::Ended(CANCELLED),
                    () = sleep_until(deadline) => EarlyEnd::Ended(DEADLINE_PASSED),
                    error = replaced => EarlyEnd::Replaced(error),
                }
            })
        });
        early.as_mut().poll(cx)
    }

    fn end(&mut self, execution: Execution, early: EarlyEnd) {
        match early {
            EarlyEnd::Ended(ended) => self.failing(None, ended, execution),
            EarlyEnd::Replaced(error) => {
                self.failing(Some(error.with_execution(execution)), (Some(0), None), execution)
            }
        }
    }

    fn fail(&mut self, error: Error) {
        let ended = ended_by(&error, 0, &self.cancel);
        self.failing(Some(error), ended, Execution::Unknown);
    }

    /// Fails the call; `execution` is the execution state without a reply.
    fn failing(&mut self, answer: Option<Error>, (first, cause): Ended, execution: Execution) {
        let Self { rank, incarnation, shard, .. } = *self;
        let call = Call::<M> {
            group: Arc::clone(&self.group),
            cancel: self.cancel.clone(),
            began: self.began,
            deadline: self.deadline,
            view: self.view.clone(),
            monitor: self.monitor.clone(),
            slots: vec![Slot { rank, incarnation, shard, answer: answer.map(Err) }],
        };
        self.stage = Stage::Failing(Box::pin(async move {
            call.failed(first, cause.map(|(code, why)| (code, why.into())), |_| execution).await
        }));
    }
}

impl<M: Method> Future for SingleRankCall<M> {
    type Output = CallResult<M>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        ready!(this.poll_sent(cx))?;
        if let Stage::Responding(reply) = &mut this.stage {
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
