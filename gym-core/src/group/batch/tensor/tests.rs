use proptest::prelude::*;

use super::*;

#[test]
fn a_vector_becomes_a_tensor_and_back_without_a_copy() {
    let elements = vec![1.5_f32, -2.0, 3.0, 4.0, 5.0, 6.0];
    let memory = elements.as_ptr();
    let tensor = Tensor::from_vec([3, 2], elements).unwrap();
    let view = tensor.view::<f32>().unwrap();
    assert_eq!((view.as_ptr(), view.as_ref()), (memory, [1.5, -2.0, 3.0, 4.0, 5.0, 6.0].as_slice()));
    assert!(matches!(view, Cow::Borrowed(_)));
}

#[test]
fn a_slice_shares_the_memory() {
    let tensor = Tensor::from_vec([4, 2], (0..8_i64).collect()).unwrap();
    let rows = tensor.slice(1..3).unwrap();
    assert_eq!(rows.bytes().as_ptr(), tensor.bytes()[16..].as_ptr());
    assert_eq!((rows.shape(), rows.view::<i64>().unwrap().as_ref()), ([2, 2].as_slice(), [2, 3, 4, 5].as_slice()));
}

#[test]
fn bytes_that_are_not_aligned_are_copied_for_a_view() {
    let mut bytes = vec![0_u8];
    bytes.extend(7_u64.to_le_bytes());
    bytes.extend(9_u64.to_le_bytes());
    // One of two adjacent starts cannot be aligned for eight bytes.
    let copied = [Bytes::from(bytes.clone()).slice(1..), Bytes::copy_from_slice(&bytes[1..])]
        .map(|bytes| Tensor::new(DType::U64, [2], bytes).unwrap())
        .map(|tensor| tensor.view::<u64>().unwrap().into_owned());
    assert_eq!(copied, [vec![7, 9], vec![7, 9]]);
    let odd = Bytes::from(bytes);
    let start = usize::from(odd.as_ptr().addr() % 8 == 0);
    let odd = Tensor::new(DType::U64, [1], odd.slice(start..start + 8)).unwrap();
    assert!(matches!(odd.view::<u64>().unwrap(), Cow::Owned(_)));
}

#[test]
fn a_view_of_the_wrong_type_is_refused_by_name() {
    let tensor = Tensor::from_vec([2], vec![1_i32, 2]).unwrap();
    let error = tensor.view::<f32>().unwrap_err();
    assert!(error.message().contains("I32") && error.message().contains("F32"), "{error}");
    let half = Tensor::new(DType::Bf16, [1], Bytes::from_static(&[0x80, 0x3f])).unwrap();
    assert_eq!(half.view::<u16>().unwrap().as_ref(), [0x3f80]);
}

#[test]
fn a_bool_is_zero_or_one() {
    let tensor = Tensor::from_vec([2], vec![true, false]).unwrap();
    assert_eq!(tensor.view::<bool>().unwrap().as_ref(), [true, false]);
    let two = Tensor::new(DType::Bool, [1], Bytes::from_static(&[2])).unwrap();
    assert_eq!(two.view::<bool>().unwrap_err().code(), Code::DataLoss);
    assert_eq!(two.view::<u8>().unwrap().as_ref(), [2]);
}

#[test]
fn a_shape_that_does_not_take_the_bytes_is_refused() {
    for shape in [vec![3], vec![2, 2], vec![], vec![usize::MAX, usize::MAX, 4], vec![usize::MAX, 0, usize::MAX]] {
        let error = Tensor::new(DType::F32, shape, Bytes::from(vec![0; 8])).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
    }
}

#[test]
fn a_scalar_has_one_element_and_no_rows_to_slice() {
    let scalar = Tensor::from_vec([], vec![2.5_f64]).unwrap();
    assert_eq!((scalar.len(), scalar.rows()), (1, 1));
    assert!(scalar.slice(0..1).is_err());
}

#[test]
fn a_range_beyond_the_rows_is_refused() {
    let tensor = Tensor::zeros(DType::U8, [3]).unwrap();
    for (start, end) in [(0, 4), (4, 4), (2, 1)] {
        assert!(tensor.slice(start..end).is_err(), "{start}..{end}");
    }
    assert_eq!(tensor.slice(3..3).unwrap().rows(), 0);
}

proptest! {
    #[test]
    fn slices_put_together_are_the_whole(rows in 0_usize..20, width in 0_usize..4, cut in 0_usize..20) {
        let cut = cut.min(rows);
        let tensor = Tensor::from_vec([rows, width], (0..rows * width).map(|i| i as u64).collect()).unwrap();
        let mut whole = tensor.slice(0..cut).unwrap().bytes().to_vec();
        whole.extend_from_slice(tensor.slice(cut..rows).unwrap().bytes());
        prop_assert_eq!(whole.as_slice(), tensor.bytes().as_ref());
    }
}

fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

fn f32_to_f16(value: f32) -> u16 {
    half::f16::from_f32(value).to_bits()
}

fn bf16_to_f32(bits: u16) -> f32 {
    half::bf16::from_bits(bits).to_f32()
}

fn f32_to_bf16(value: f32) -> u16 {
    half::bf16::from_f32(value).to_bits()
}

#[test]
fn every_bit_pattern_comes_back_and_a_nan_stays_one() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f16_to_f32(bits), bf16_to_f32(bits));
        if half.is_nan() {
            assert!(f16_to_f32(f32_to_f16(half)).is_nan(), "{bits:#06x}");
        } else {
            assert_eq!(f32_to_f16(half), bits, "{half}");
        }
        if brain.is_nan() {
            assert!(bf16_to_f32(f32_to_bf16(brain)).is_nan(), "{bits:#06x}");
        } else {
            assert_eq!(f32_to_bf16(brain), bits, "{brain}");
        }
    }
}

#[test]
fn what_lies_between_goes_to_the_nearer_and_a_tie_to_the_even_one() {
    for (low, to, back) in
        [(0x3c00_u16, f32_to_f16 as fn(f32) -> u16, f16_to_f32 as fn(u16) -> f32), (0x3f80, f32_to_bf16, bf16_to_f32)]
    {
        // Around 1, and for binary16 also in the subnormal range and at the step to the normal range.
        for low in [low, low + 1, 0x0001, 0x0002, 0x03ff, 0x7bfe] {
            let (below, above) = (back(low), back(low + 1));
            let middle = below + (above - below) / 2.0;
            assert_eq!(to(middle), low + (low & 1), "{middle}");
            assert_eq!(to(middle.next_down()), low, "{middle}");
            assert_eq!(to(middle.next_up()), low + 1, "{middle}");
            assert_eq!(to(-middle), 0x8000 | (low + (low & 1)), "{middle}");
        }
    }
}

#[test]
fn the_ends_of_the_range_are_ieees() {
    assert_eq!((f32_to_f16(65_504.0), f32_to_f16(65_519.9), f32_to_f16(65_520.0)), (0x7bff, 0x7bff, 0x7c00));
    assert_eq!((f32_to_f16(f32::MAX), f32_to_f16(f32::NEG_INFINITY)), (0x7c00, 0xfc00));
    assert_eq!((f32_to_f16(2.0_f32.powi(-25)), f32_to_f16(2.0_f32.powi(-25).next_up())), (0, 1));
    assert_eq!((f32_to_f16(f32::MIN_POSITIVE), f32_to_f16(-0.0)), (0, 0x8000));
    assert_eq!((f32_to_bf16(f32::MAX), f32_to_bf16(-0.0)), (0x7f80, 0x8000));
}
