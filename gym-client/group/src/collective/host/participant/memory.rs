//! The agreement of the ranks of one node on the memory that they share.

use std::fmt;
use std::sync::Arc;

use futures_util::future::join_all;
use gym_core::Response;
use gym_core::transport::Reply;

use super::super::shared::{self, SharedLane};
use super::super::wire::{Fetched, OfferPacket, Packet, SharePacket};
use super::{Participant, SHARED_TIMEOUT, State, answer_of, text};

impl Participant {
    /// Returns the memory that the ranks share.
    pub(in crate::collective::host) fn shared(&self) -> Option<&SharedLane> {
        self.shared.get()
    }

    /// Gets the memory that the first rank offers, on a thread that may block.
    pub(super) fn accept_offer(self: &Arc<Self>, packet: OfferPacket) -> Reply {
        let (world_size, position) = (self.world_size(), self.position());
        let deadline = gym_segment::deadline_in(SHARED_TIMEOUT);
        let fetching =
            self.runtime.spawn_blocking(move || shared::fetched(&packet.name, world_size, position, deadline));
        let participant = Arc::clone(self);
        answer_of(&self.runtime, async move {
            let why = match fetching.await {
                Ok(Ok(lane)) => {
                    participant.lock().offered = Some(lane);
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            Ok(Response::json(text(&Fetched { why })))
        })
    }

    /// Takes what the first rank says: whether all ranks have the memory.
    pub(super) fn share(&self, sharing: Result<(), String>) {
        {
            let mut state = self.lock();
            let offered = state.offered.take();
            if let (Ok(()), Some(lane)) = (&sharing, offered) {
                drop(self.shared.set(lane));
            }
            state.sharing = Some(sharing);
        }
        self.changed.notify_waiters();
    }

    /// Agrees with the other ranks whether they share memory. The first one creates it, and decides.
    ///
    /// # Errors
    /// The reason why they do not.
    pub(in crate::collective::host) async fn agree_on_memory(
        self: &Arc<Self>,
        shared_bytes: usize,
    ) -> Result<(), String> {
        if self.position() == 0 {
            let sharing = self.offer(shared_bytes).await;
            let told = self.others().filter_map(|other| self.peer(other)).map(|peer| {
                let packet = Packet::Share(SharePacket { to: peer.id, why: sharing.clone().err() });
                async move { peer.ask(SHARED_TIMEOUT, &packet).await }
            });
            join_all(told).await;
            self.share(sharing);
        }
        let failed = async {
            self.cause.wait().await;
            Err("the meeting has failed".to_owned())
        };
        // The first rank may go before it has told.
        let gone = |state: &State| self.gone_from(state, 0, 0).map(|gone| Err(gone.message().to_owned()));
        tokio::select! { biased;
            sharing = self.wait_until(|state| state.sharing.clone().or_else(|| gone(state))) => sharing,
            failed = failed => failed,
        }
    }

    /// Creates the memory and offers it to all other ranks.
    pub(super) async fn offer(self: &Arc<Self>, shared_bytes: usize) -> Result<(), String> {
        let world_size = self.world_size();
        let text_of = |error: &dyn fmt::Display| error.to_string();
        let created = self.runtime.spawn_blocking(move || shared::create(world_size, shared_bytes)).await;
        let (lane, offer) = created.map_err(|error| text_of(&error))?.map_err(|error| text_of(&error))?;
        let name = offer.name().to_owned();
        let serving = self.runtime.spawn_blocking(move || {
            offer.serve(world_size - 1, gym_segment::deadline_in(SHARED_TIMEOUT)).map_err(|error| error.to_string())
        });
        let fetched = self.others().filter_map(|other| Some((other, self.peer(other)?))).map(|(other, peer)| {
            let packet = Packet::Offer(OfferPacket { to: peer.id, name: name.clone() });
            async move {
                let answer = peer.ask(SHARED_TIMEOUT, &packet).await;
                let fetched = answer.and_then(|answer| serde_json::from_slice::<Fetched>(&answer).ok());
                let why = fetched.map_or_else(|| Some("it does not answer".to_owned()), |fetched| fetched.why);
                why.map_or(Ok(()), |why| Err(format!("rank {}: {why}", self.rank_at(other))))
            }
        });
        let fetched: Result<(), String> = join_all(fetched).await.into_iter().collect();
        if fetched.is_err() {
            // Ends the offer, too.
            lane.abort();
        }
        let served = serving.await.map_err(|error| text_of(&error))?;
        fetched.and(served)?;
        self.lock().offered = Some(lane);
        Ok(())
    }
}
