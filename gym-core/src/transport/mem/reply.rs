//! The future of the response to an in-process call.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;

use super::connection::CallSlot;
use super::{bytes_taken, rewritten_message};
use crate::base::cancel::{CancelOnDrop, CancelledOwned};
use crate::base::error::{Code, Error, Result};
use crate::message::Response;

/// Resolves to the response. Not an async block, which would be three times as large: every rollout in flight waits in one for each hop.
pub(super) struct InProcessReply {
    /// `None` after the response, and after the peer has left.
    pub(super) running: Option<RunningCall>,
    pub(super) reply_bytes_max: usize,
    pub(super) faithful: bool,
}

/// A call that the handler runs. Dropped in this order: a dropped reply ends the handler, and then cancels the calls that it made.
pub(super) struct RunningCall {
    pub(super) answer: BoxFuture<'static, Result<Response>>,
    /// Fires when either end of the connection has closed.
    pub(super) closed: CancelledOwned,
    pub(super) cancel_guard: CancelOnDrop,
    pub(super) slot: CallSlot,
}

impl InProcessReply {
    fn checked(&self, mut response: Response) -> Result<Response> {
        let (reply_bytes, reply_bytes_max) = (bytes_taken(&response.message), self.reply_bytes_max);
        if reply_bytes > reply_bytes_max {
            return Err(Error::finished(
                Code::ResourceExhausted,
                format!("the reply has {reply_bytes} bytes, more than the {reply_bytes_max} of reply_bytes_max"),
            ));
        }
        if self.faithful {
            response.message = rewritten_message(&response.message)?;
        }
        Ok(response)
    }
}

impl Future for InProcessReply {
    type Output = Result<Response>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response>> {
        let running = self.running.as_mut().expect("not polled after the response");
        if let Poll::Ready(response) = running.answer.as_mut().poll(cx) {
            if let Some(ended) = self.running.take() {
                let _ = ended.cancel_guard.disarm();
            }
            let response = response.unwrap_or_else(|error| Response::from_error(&error));
            return Poll::Ready(self.checked(response));
        }
        if Pin::new(&mut running.closed).poll(cx).is_pending() {
            return Poll::Pending;
        }
        let peer = running.slot.0.name.to_string();
        self.running = None;
        Poll::Ready(Err(Error::unknown(Code::Unavailable, "the peer has left").about(peer)))
    }
}
