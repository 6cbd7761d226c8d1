//! A message on its way in: its pieces, until all are there.

use bytes::Bytes;
use gym_core::Result;
use gym_core::frame::{Lengths, Limits};
use gym_core::mux::{RequestHeader, ResponseHeader, malformed};

use super::plan::{ALIGNMENT, Plan};

/// What stands before a message: a request's header or an answer's.
pub(crate) trait Header: Sized {
    /// Reads what follows the lengths.
    fn read(from: Bytes) -> Result<Self>;
}

impl Header for RequestHeader {
    fn read(from: Bytes) -> Result<Self> {
        Self::read(from)
    }
}

impl Header for ResponseHeader {
    fn read(from: Bytes) -> Result<Self> {
        Self::read(from)
    }
}

/// A message whose header is there.
#[derive(Debug)]
pub(crate) struct Assembly<H> {
    pub(crate) header: H,
    /// Bytes of its head and segments.
    pub(crate) total: usize,
    parts: Vec<usize>,
    plan: Plan,
    pieces: Vec<Piece>,
    missing: usize,
}

#[derive(Clone, Debug)]
enum Piece {
    Awaited,
    Landing,
    Here(Bytes),
}

/// A message that is complete.
#[derive(Debug)]
pub(crate) struct Landed<H> {
    pub(crate) header: H,
    pub(crate) head: Bytes,
    pub(crate) segments: Vec<Bytes>,
}

impl<H: Header> Assembly<H> {
    /// Reads an opening: the header, and what follows it in the first piece.
    ///
    /// # Errors
    /// When the header is malformed, a length exceeds its limit, or the first piece is not as long as the lengths say.
    pub(crate) fn read(opening: Bytes, header_bytes: usize, cut: usize, limits: &Limits) -> Result<Self> {
        let mut header = opening.slice(..header_bytes);
        let lengths = Lengths::take(&mut header, limits)
            .map_err(|error| gym_core::Error::from(error).with_execution(gym_core::Execution::Unknown))?;
        let header = H::read(header)?;
        let mut parts = lengths.segments;
        parts.insert(0, lengths.head);
        let plan = Plan::new(header_bytes, parts.iter().copied(), cut);
        if opening.len() != plan.pieces[0] {
            let (found, expected) = (opening.len(), plan.pieces[0]);
            return Err(malformed(format!("an opening of {found} bytes whose lengths say {expected}")));
        }
        let missing = plan.pieces.len() - 1;
        let mut pieces = vec![Piece::Awaited; plan.pieces.len()];
        pieces[0] = Piece::Here(opening);
        Ok(Self { header, total: lengths.total, parts, plan, pieces, missing })
    }

    /// The piece at this place is about to land: how long it must be.
    ///
    /// # Errors
    /// When there is no such place, or it is taken.
    pub(crate) fn begin(&mut self, place: usize) -> Result<usize> {
        let pieces = self.pieces.len();
        match self.pieces.get_mut(place) {
            Some(piece @ Piece::Awaited) => {
                *piece = Piece::Landing;
                Ok(self.plan.pieces[place])
            }
            Some(_) => Err(malformed(format!("piece {place} came twice"))),
            None => Err(malformed(format!("piece {place} of a message of {pieces}"))),
        }
    }

    /// Puts a piece in its place.
    pub(crate) fn put(&mut self, place: usize, bytes: Bytes) {
        if let Some(piece @ Piece::Landing) = self.pieces.get_mut(place) {
            *piece = Piece::Here(bytes);
            self.missing -= 1;
        }
    }

    /// The bytes of every piece that is landing.
    pub(crate) fn landing(&self) -> impl Iterator<Item = usize> {
        let pieces = self.pieces.iter().zip(&self.plan.pieces);
        pieces.filter(|(piece, _)| matches!(piece, Piece::Landing)).map(|(_, bytes)| *bytes)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// The message, once it is complete.
    pub(crate) fn finish(self) -> Landed<H> {
        let part = |(length, (piece, start)): (usize, &(usize, usize))| match &self.pieces[*piece] {
            Piece::Here(piece) if length > 0 => piece.slice(*start..start + length),
            _ => Bytes::new(),
        };
        let mut parts = self.parts.iter().copied().zip(&self.plan.spots).map(part);
        let head = parts.next().unwrap_or_default();
        let segments = parts.collect();
        Landed { header: self.header, head, segments }
    }
}

/// A copy that begins at a multiple of [`ALIGNMENT`].
pub(crate) fn aligned(bytes: &[u8]) -> Bytes {
    let mut copy = Vec::<u8>::with_capacity(bytes.len() + ALIGNMENT);
    let start = copy.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    copy.resize(start, 0);
    copy.extend_from_slice(bytes);
    Bytes::from(copy).slice(start..)
}
