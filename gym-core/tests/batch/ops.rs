//! Section 5.4: pieces, slices and parts put together. Repeats, selections and padding are tested beside their code.

use gym_core::Code;
use gym_core::group::{Assembly, Batch, Packed, Ragged, Tensor};

use crate::{every_kind, numbers, positions, refusal, x};

#[test]
fn c053_the_last_of_three_chunks() {
    assert_eq!(x(&numbers(&[0, 0, 0, 1, 1, 1, 3, 3, 4]).chunk(2, 3).unwrap()), [3, 3, 4]);
}

#[test]
fn c054_rows_that_are_no_multiple_of_the_chunks_are_refused() {
    assert!(refusal(positions(9).chunk(0, 2)).contains("not a multiple"));
    assert!(positions(9).chunk(0, 0).is_err());
}

#[test]
fn c055_a_chunk_beyond_the_last_is_refused() {
    assert!(refusal(positions(9).chunk(3, 3)).contains("chunk 3 of 3"));
}

#[test]
fn c056_the_last_of_as_many_chunks_as_rows_is_the_last_row() {
    assert_eq!(x(&positions(9).chunk(8, 9).unwrap()), [8]);
}

#[test]
fn c060_micro_batches_of_equal_rows() {
    let batch = positions(6);
    let rows: Vec<Vec<i64>> = batch.iter_micro_batches(2).unwrap().map(|micro| x(&micro)).collect();
    assert_eq!(rows, [[0, 1], [2, 3], [4, 5]]);
    assert_eq!(batch.iter_micro_batches(3).unwrap().len(), 2);
    assert_eq!(positions(0).iter_micro_batches(4).unwrap().len(), 0);
}

#[test]
fn c061_micro_batches_that_do_not_divide_the_rows_are_refused() {
    assert!(positions(6).iter_micro_batches(4).err().unwrap().message().contains("not a multiple"));
    assert!(positions(6).iter_micro_batches(0).is_err());
}

#[test]
fn c062_a_global_batch_without_a_plan_goes_by_its_size() {
    assert_eq!(x(&positions(6).get_batch(1, 2).unwrap()), [2, 3]);
    assert!(positions(6).get_batch(3, 2).is_err());
    assert!(positions(6).get_batch(usize::MAX, usize::MAX).is_err());
    assert_eq!(positions(6).iter_planned_micro_batches().err().unwrap().code(), Code::FailedPrecondition);
}

#[test]
fn c063_c064_a_slice_beyond_the_rows_is_refused_for_every_kind_of_column() {
    let text = refusal(positions(6).slice(4..9));
    assert!(["9", "6", "\"x\""].iter().all(|part| text.contains(part)), "{text}");
    let lists = Batch::empty().with("list", gym_core::group::JsonRows::from_values([1, 2, 3]).unwrap()).unwrap();
    let text = refusal(lists.slice(2..9));
    assert!(["9", "3", "\"list\""].iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn c066_rows_of_a_packed_column_and_of_nothing() {
    let packed = Packed::new([None, None], 0);
    assert_eq!(Batch::empty().with("packed", packed).unwrap().rows(), 2);
    assert_eq!(Batch::empty().rows(), 0);
}

fn block(shape: impl Into<Vec<usize>>, value: i64) -> Batch {
    let shape = shape.into();
    let elements = vec![value; shape.iter().product()];
    Batch::empty().with("x", Tensor::from_vec(shape, elements).unwrap()).unwrap()
}

fn shape(batch: &Batch) -> Vec<usize> {
    batch.column("x").unwrap().dense().unwrap().shape().to_vec()
}

#[test]
fn c067_rows_of_different_widths_are_padded_on_the_right() {
    let wide = Batch::empty().with("x", Tensor::from_vec([2, 2], vec![1_i64, 2, 3, 4]).unwrap()).unwrap();
    let wider = Batch::empty().with("x", Tensor::from_vec([1, 3], vec![5_i64, 6, 7]).unwrap()).unwrap();
    let whole = Batch::from_batches(&[wide, wider], &Assembly::default().pad("x", -1)).unwrap();
    assert_eq!((shape(&whole), x(&whole)), (vec![3, 3], vec![1, 2, -1, 3, 4, -1, 5, 6, 7]));
}

#[test]
fn c068_only_dimension_one_of_three_is_padded() {
    let assembly = Assembly::default().pad("x", -5);
    let whole = Batch::from_batches(&[block([2, 3, 2], 1), block([2, 5, 2], 2)], &assembly).unwrap();
    assert_eq!(shape(&whole), [4, 5, 2]);
    assert_eq!(x(&whole)[..20], [[1; 6].as_slice(), &[-5; 4], &[1; 6], &[-5; 4]].concat());
    assert_eq!(x(&whole)[20..], [2; 20]);
}

#[test]
fn c069_only_dimension_one_of_four_is_padded() {
    let assembly = Assembly::default().pad("x", -1);
    let whole = Batch::from_batches(&[block([2, 3, 4, 2], 1), block([1, 5, 4, 2], 2)], &assembly).unwrap();
    assert_eq!(shape(&whole), [3, 5, 4, 2]);
    assert_eq!(x(&whole)[..40], [[1; 24].as_slice(), &[-1; 16]].concat());
}

#[test]
fn c070_a_column_missing_from_a_part_with_rows_is_refused() {
    let text = refusal(Batch::from_batches(&[every_kind(&[1, 2]), positions(1)], &Assembly::default()));
    assert!(text.contains("non-empty batches") && text.contains("\"json\"") && text.contains("[1]"), "{text}");
}

#[test]
fn c071_a_column_may_miss_from_parts_without_rows() {
    let parts = [Batch::empty(), block([1, 3], 7), positions(0)];
    let whole = Batch::from_batches(&parts, &Assembly::default()).unwrap();
    assert_eq!((shape(&whole), x(&whole)), (vec![1, 3], vec![7, 7, 7]));
}

#[test]
fn c072_no_parts_give_an_empty_batch() {
    assert_eq!(Batch::from_batches(&[], &Assembly::default()).unwrap(), Batch::empty());
    let none = Batch::from_batches(&[Batch::empty(), every_kind(&[])], &Assembly::default()).unwrap();
    assert_eq!((none.rows(), none.names().collect::<Vec<_>>()), (0, vec!["json", "ragged", "x"]));
}

#[test]
fn parts_that_padding_cannot_make_fit_are_refused_by_name() {
    let refused = |other| refusal(Batch::from_batches(&[block([1, 2, 3], 0), other], &Assembly::default()));
    for other in [
        block([1, 2, 4], 0),
        block([1, 2], 0),
        block([1], 0),
        Batch::empty().with("x", Tensor::from_vec([1, 2, 3], vec![0_i32; 6]).unwrap()).unwrap(),
        Batch::empty().with("x", Ragged::from_rows(&[vec![1_i64]])).unwrap(),
    ] {
        assert!(refused(other).contains("\"x\""));
    }
}

#[test]
fn parts_of_every_kind_are_put_together_sorted_by_name() {
    let parts = [every_kind(&[1, 2]), every_kind(&[3])];
    let whole = Batch::from_batches(&parts, &Assembly::default()).unwrap();
    assert_eq!(whole.names().collect::<Vec<_>>(), ["json", "ragged", "x"]);
    for (name, column) in every_kind(&[1, 2, 3]).columns() {
        assert_eq!(whole.column(name).unwrap(), column);
    }
}
