//! Copying of a tensor into a larger block.

use crate::group::batch::tensor::Tensor;

/// Copies `part` into a block of this shape and of the part's type. The first element goes to position `at`. The part must fit.
pub(crate) fn copy_into_block(part: &Tensor, block: &mut [u8], shape: &[usize], at: &[usize]) {
    if part.is_empty() {
        return;
    }
    // After this dimension, the part is as wide as the block, so the rest is one run in both.
    let run = (1..shape.len()).rev().find(|dim| part.shape()[*dim] != shape[*dim]).unwrap_or(0);
    let size = part.dtype().size();
    let step: usize = size * shape.iter().skip(run + 1).product::<usize>();
    let run_bytes = step * part.shape().get(run).copied().unwrap_or(1);
    let mut position = vec![0; run];
    for bytes in part.bytes().chunks(run_bytes) {
        let index = (0..run).fold(0, |index, dim| index * shape[dim] + at[dim] + position[dim]);
        let begin = (index * shape.get(run).copied().unwrap_or(1) + at.get(run).copied().unwrap_or(0)) * step;
        block[begin..begin + run_bytes].copy_from_slice(bytes);
        // Advances to the next run: the last of the outer dimensions changes fastest.
        for dim in (0..run).rev() {
            position[dim] += 1;
            if position[dim] < part.shape()[dim] {
                break;
            }
            position[dim] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_element_lies_where_its_position_says(
            dims in prop::collection::vec((0_usize..4, 0_usize..3, 0_usize..3), 0..5),
        ) {
            let part_shape: Vec<usize> = dims.iter().map(|(size, ..)| *size).collect();
            let at: Vec<usize> = dims.iter().map(|(_, at, _)| *at).collect();
            let shape: Vec<usize> = dims.iter().map(|(size, at, more)| size + at + more).collect();
            let count: usize = part_shape.iter().product();
            let part = Tensor::from_vec(part_shape.clone(), (1..=count as u16).collect()).unwrap();
            let mut block = vec![0; 2 * shape.iter().product::<usize>()];
            copy_into_block(&part, &mut block, &shape, &at);
            let whole = Tensor::new(part.dtype(), shape.clone(), block.into()).unwrap();
            let whole = whole.view::<u16>().unwrap();
            prop_assert_eq!(whole.iter().filter(|element| **element > 0).count(), count);
            for element in 0..count {
                let mut rest = element;
                let mut index = 0;
                let mut factor = 1;
                for dim in (0..shape.len()).rev() {
                    index += (rest % part_shape[dim] + at[dim]) * factor;
                    rest /= part_shape[dim];
                    factor *= shape[dim];
                }
                prop_assert_eq!(usize::from(whole[index]), element + 1);
            }
        }
    }
}
