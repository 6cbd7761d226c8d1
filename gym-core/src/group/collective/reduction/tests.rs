use proptest::prelude::*;

use super::*;

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];

fn reductions() -> impl Iterator<Item = (DType, Reduction)> {
    DTYPES
        .into_iter()
        .flat_map(|dtype| OPS.into_iter().filter_map(move |op| Some((dtype, Reduction::new(dtype, op).ok()?))))
}

fn reduce_all(reduction: Reduction, parts: &mut [Vec<u8>]) {
    reduction.reduce_into_all(&mut parts.iter_mut().map(|part| &mut part[..]).collect::<Vec<_>>());
}

#[test]
fn the_order_begins_after_the_owner_and_ends_with_it() {
    assert_eq!(order_of(4, 1).collect::<Vec<_>>(), [2, 3, 0, 1]);
    assert_eq!(order_of(1, 0).collect::<Vec<_>>(), [0]);
    // In this order: (1e8 + 1) - 1e8 is 0 in F32, where another order has 1.
    let mut parts = [1e8_f32, 1.0, -1e8].map(|value| value.to_le_bytes().to_vec());
    reduce_all(Reduction::new(DType::F32, ReduceOp::Sum).unwrap(), &mut parts);
    assert_eq!(parts, [[0; 4]; 3]);
}

#[test]
fn halves_are_rounded_once_at_the_end() {
    // 2048 + 1 is 2048 in F16; the sum of all is 2052 only if the steps are not rounded.
    for (dtype, parts, sum) in [
        (
            DType::F16,
            [2_048.0, 1.0, 1.0, 2.0].map(f16::from_f32).map(|x| x.to_le_bytes().to_vec()),
            f16::from_f32(2_052.0).to_bits(),
        ),
        (
            DType::Bf16,
            [256.0, 1.0, 1.0, 2.0].map(bf16::from_f32).map(|x| x.to_le_bytes().to_vec()),
            bf16::from_f32(260.0).to_bits(),
        ),
    ] {
        let mut parts = parts;
        reduce_all(Reduction::new(dtype, ReduceOp::Sum).unwrap(), &mut parts);
        assert_eq!(parts[0], sum.to_le_bytes(), "{dtype}");
    }
}

#[test]
fn what_has_no_arithmetic_is_refused_with_the_fix() {
    for dtype in DType::ALL {
        let reduction = Reduction::new(dtype, ReduceOp::Mean);
        let code = reduction.as_ref().err().map(Error::code);
        let expected = match dtype {
            DType::F16 | DType::Bf16 | DType::F32 | DType::F64 => None,
            DType::U8 | DType::I32 | DType::I64 => Some(Code::InvalidArgument),
            _ => Some(Code::Unimplemented),
        };
        assert_eq!(code, expected, "{dtype}");
    }
    let error = Reduction::new(DType::I64, ReduceOp::Mean).unwrap_err();
    assert!(error.to_string().contains("use the sum, and divide it"), "{error}");
}

proptest! {
    #[test]
    fn slices_cover_every_element_once_and_differ_by_at_most_one(elements in 0_usize..10_000, world_size in 1_usize..70) {
        let slices: Vec<_> = (0..world_size).map(|position| slice_of(elements, world_size, position)).collect();
        prop_assert_eq!(slices[0].start, 0);
        prop_assert_eq!(slices[world_size - 1].end, elements);
        prop_assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
        prop_assert!(slices.iter().all(|slice| slice.len().abs_diff(elements / world_size) <= 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// What a ring passes on has the bits of what one thread adds.
    #[test]
    fn partial_results_that_are_passed_on_have_the_same_bits(
        seed in any::<u64>(), world_size in 1_usize..6, elements in 0_usize..1_200,
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        for (dtype, reduction) in reductions() {
            let bytes = elements * dtype.size();
            let parts: Vec<Vec<u8>> = (0..world_size)
                .map(|_| (0..elements).flat_map(|_| {
                    let value = random.f32() * 100.0 - 50.0;
                    match dtype {
                        DType::U8 => vec![random.u8(..)],
                        DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
                        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
                        DType::F32 => value.to_le_bytes().to_vec(),
                        DType::F64 => f64::from(value).to_le_bytes().to_vec(),
                        DType::I32 => random.i32(..).to_le_bytes().to_vec(),
                        _ => random.i64(..).to_le_bytes().to_vec(),
                    }
                }).collect())
                .collect();
            let mut whole = parts.clone();
            reduce_all(reduction, &mut whole);
            let mut last = parts.clone();
            reduction.reduce(&mut last.iter_mut().map(|part| &mut part[..]).collect::<Vec<_>>());
            let mut partial = vec![0; elements * reduction.partial_dtype().size()];
            reduction.begin(&parts[0], &mut partial);
            for part in &parts[1..] {
                reduction.fold(&mut partial, part);
            }
            let mut result = vec![0; bytes];
            reduction.finish(&partial, world_size, &mut result);
            prop_assert!(whole.iter().all(|other| *other == result), "{:?}", reduction);
            prop_assert_eq!(&last[world_size - 1], &result);
            prop_assert_eq!(&last[..world_size - 1], &parts[..world_size - 1]);
            if reduction.partial_dtype() == dtype && world_size > 1 {
                let mut passed = parts;
                for position in 1..world_size {
                    let (before, from) = passed.split_at_mut(position);
                    let ranks = (position + 1 == world_size).then_some(world_size);
                    reduction.fold_into(&before[position - 1], &mut from[0], ranks);
                }
                prop_assert_eq!(&passed[world_size - 1], &result);
            }
        }
    }
}
