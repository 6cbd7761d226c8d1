//! The answers that are still to come to what one lane has sent.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use gym_core::transport::Reply;
use gym_core::{Response, Result};

use super::participant::Participant;

/// The answers of other ranks, by their positions.
#[derive(Default)]
pub(super) struct Answers(FuturesUnordered<Answer>);

type Answer = Pin<Box<dyn Future<Output = (usize, Result<Response>)> + Send>>;

impl Answers {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn add(&mut self, from: usize, reply: Option<Reply>) {
        if let Some(reply) = reply {
            self.0.push(Box::pin(async move { (from, reply.await.and_then(Response::into_result)) }));
        }
    }

    /// Takes the next answer. A rank that answers with an error takes no further part.
    pub(super) async fn next(&mut self, participant: &Arc<Participant>) {
        if let Some((from, Err(error))) = self.0.next().await {
            participant.suspect(from, error);
        }
    }

    /// Waits for something else, and looks at the answers that come meanwhile: a rank that refuses what was sent does not call either.
    pub(super) async fn during<T>(&mut self, participant: &Arc<Participant>, waiting: impl Future<Output = T>) -> T {
        let mut waiting = std::pin::pin!(waiting);
        loop {
            tokio::select! { biased;
                ended = &mut waiting => return ended,
                () = self.next(participant), if !self.0.is_empty() => {}
            }
        }
    }

    /// Waits until at most this many answers are to come.
    pub(super) async fn at_most(&mut self, participant: &Arc<Participant>, most: usize) {
        while self.0.len() > most {
            self.next(participant).await;
        }
    }
}
