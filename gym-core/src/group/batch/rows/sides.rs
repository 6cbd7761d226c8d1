//! The side of the padding of a column: declared by its tensor, or told by the columns next to it.

use crate::base::error::{Error, Result};
use crate::group::batch::Batch;
use crate::group::batch::tensor::{Side, Tensor};

/// The end of the name of a mask, whose elements are not 0 for real elements.
const MASK: &str = "_mask";

/// Returns `true` if the column marks real elements.
pub(super) fn is_mask(name: &str, tensor: &Tensor) -> bool {
    name.ends_with(MASK) && tensor.shape().len() == 2
}

impl Batch {
    /// Returns the side of the padding of a column: the one that it declares, or the one of its mask, or the one of the columns of the same
    /// width. `None` if nothing tells it.
    ///
    /// # Errors
    /// `InvalidArgument` if only columns of the same width tell it, and they are padded on different sides.
    pub(super) fn side_of(&self, name: &str) -> Result<Option<Side>> {
        let Some(tensor) = self.dense(name).filter(|tensor| tensor.shape().len() > 1) else { return Ok(None) };
        if let Some(side) = self.own_side(name, tensor) {
            return Ok(Some(side));
        }
        let alike = self.names().filter_map(|other| Some((other, self.dense(other)?)));
        let alike = alike.filter(|(_, other)| other.shape().get(1) == tensor.shape().get(1));
        let mut sides = alike.filter_map(|(other, tensor)| Some((other, self.own_side(other, tensor)?)));
        let Some((first, side)) = sides.next() else { return Ok(None) };
        match sides.find(|(_, other)| *other != side) {
            None => Ok(Some(side)),
            Some((second, other)) => Err(Error::invalid(format!(
                "column {name:?} does not tell the side of its padding: {first:?} of the same width is padded on the {side}, \
                 {second:?} on the {other}\n  fix: declare the side with Tensor::padded_on"
            ))),
        }
    }

    /// Returns the side that the column declares, or the one of `{name}_mask`.
    fn own_side(&self, name: &str, tensor: &Tensor) -> Option<Side> {
        let mask = || self.dense(&format!("{name}{MASK}")).filter(|mask| mask.shape() == &tensor.shape()[..2]);
        tensor.padding_side().or_else(|| side_of_mask(mask()?))
    }

    fn dense(&self, name: &str) -> Option<&Tensor> {
        self.get(name)?.dense().ok()
    }
}

/// Returns the side on which a mask is padded. `None` if no row is padded, if rows differ, or if a row has holes or padding on both
/// sides.
fn side_of_mask(mask: &Tensor) -> Option<Side> {
    let mut found = mask.padding_side();
    if found.is_some() {
        return found;
    }
    for row in mask.bytes().chunks(mask.row_bytes().max(1)) {
        let real: Vec<bool> =
            row.chunks(mask.dtype().size()).map(|element| element.iter().any(|byte| *byte != 0)).collect();
        let side = match real.chunk_by(PartialEq::eq).count() {
            0 | 1 => continue,
            2 if real[0] => Side::Right,
            2 => Side::Left,
            _ => return None,
        };
        if found.is_some_and(|known| known != side) {
            return None;
        }
        found = Some(side);
    }
    found
}

/// Returns the side of the rows of several parts of one column, given the number of rows and the side of each. A part without rows
/// has no side.
///
/// # Errors
/// `InvalidArgument` if some parts are padded on the left, and others are not known to be.
pub(super) fn common_side(parts: &[(usize, Option<Side>)]) -> Result<Option<Side>> {
    let mut filled = parts.iter().enumerate().filter(|(_, (rows, _))| *rows > 0).map(|(at, (_, side))| (at, *side));
    let Some((at, side)) = filled.next() else { return Ok(parts.first().and_then(|(_, side)| *side)) };
    let mut common = side;
    for (other, found) in filled {
        if (side == Some(Side::Left)) != (found == Some(Side::Left)) {
            let told = |side: Option<Side>| {
                side.map_or("does not tell its side, so on the right".to_owned(), |side| {
                    format!("is padded on the {side}")
                })
            };
            return Err(Error::invalid(format!(
                "part {at} {}, part {other} {}\n  fix: pad all parts on one side; of a part that does not tell it, declare it with \
                 Tensor::padded_on",
                told(side),
                told(found)
            )));
        }
        common = common.filter(|common| found == Some(*common));
    }
    Ok(common)
}
