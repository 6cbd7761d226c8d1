//! Sends and receives between two ranks.

use std::sync::Arc;

use bytes::Bytes;
use gym_core::group::collective::Call;
use gym_core::{CallContext, Response, Result};

use super::answers::Answers;
use super::participant::{Announced, Expected, Expecting, Participant, State, differ};
use super::pieces::{OperationMemory, chunks_of};
use super::wire::{CallPacket, ChunkPacket, Packet, SMALL_BYTES, Stream, WINDOW};

/// Sends a buffer, and waits until it was received.
pub(super) async fn send(
    participant: &Arc<Participant>,
    cx: &CallContext,
    call: Call,
    to: usize,
    number: u64,
    memory: &mut OperationMemory,
    answers: &mut Answers,
) -> Result<()> {
    let from = participant.position();
    let length = memory.whole.len();
    let small = length <= SMALL_BYTES;
    let elements = if small { Bytes::copy_from_slice(&memory.whole) } else { Bytes::new() };
    let packet = |to| Packet::Call(CallPacket { to, from, stream: Stream::Pair, number, call });
    let taken = participant.send(cx, to, packet, Some(elements)).await;
    let sending = async {
        let taken = match taken {
            Some(taken) => taken.await.and_then(Response::into_result).map(drop),
            // It is lost, or is about to be.
            None => std::future::pending().await,
        };
        if let Err(error) = taken {
            participant.suspect(to, error);
            std::future::pending::<()>().await;
        }
        if !small {
            let pieces = memory.cut(chunks_of(length));
            for at in 0..pieces.count() {
                let packet = |to| {
                    Packet::Chunk(ChunkPacket { to, from, stream: Stream::Pair, number, at: at as u64, waits: true })
                };
                answers.at_most(participant, WINDOW - 1).await;
                answers.add(to, participant.send(cx, to, packet, Some(pieces.send(at).await)).await);
            }
            answers.at_most(participant, 0).await;
            memory.join().await;
        }
    };
    let absent =
        participant.wait_until(|state: &mut State| participant.absent(state, to, number, |left| left.receives));
    tokio::select! { biased;
        () = sending => Ok(()),
        absent = absent => Err(absent),
    }
}

/// Waits for a send to this rank on device memory. Returns what the sender tells with it.
pub(super) async fn agree(participant: &Arc<Participant>, call: Call, from: usize, number: u64) -> Result<Bytes> {
    announced(participant, call, from, number).await.map(Announced::take)
}

/// Waits for a send to this rank.
async fn announced(participant: &Arc<Participant>, call: Call, from: usize, number: u64) -> Result<Announced> {
    let announced = participant.wait_until(|state: &mut State| {
        let announced = Participant::take_call(state, from, Stream::Pair, number);
        announced.map(Ok).or_else(|| participant.absent(state, from, number, |left| left.sends).map(Err))
    });
    let announced = announced.await?;
    if !announced.call.agrees_with(&call) {
        return Err(differ(participant, call, from, announced.call));
    }
    Ok(announced)
}

/// Receives a buffer.
pub(super) async fn receive(
    participant: &Arc<Participant>,
    call: Call,
    from: usize,
    number: u64,
    memory: &mut OperationMemory,
) -> Result<()> {
    let announced = announced(participant, call, from, number).await?;
    if memory.whole.len() <= SMALL_BYTES {
        memory.whole.copy_from_slice(&announced.take());
        return Ok(());
    }
    let pieces = memory.cut(chunks_of(memory.whole.len()));
    let places = (0..pieces.count()).map(Some).collect();
    let _expecting =
        Expecting::new(participant, from, Stream::Pair, Expected { number, pieces: pieces.clone(), places });
    // The chunks follow this.
    drop(announced.take());
    for at in 0..pieces.count() {
        let chunk = participant.chunk(from, Stream::Pair, number, at as u64, pieces.length(at)).await?;
        pieces.receive(at, &chunk).await;
    }
    memory.join().await;
    Ok(())
}
