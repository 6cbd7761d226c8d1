//! Section 5.1: sharding by rows.

use gym_core::Code;
use gym_core::group::{Batch, Packed, Sharding, Tensor, Uneven};

use crate::{every_kind, numbers, positions, refusal, shard, x, xs};

fn by(shards: usize, batch_size: usize) -> Sharding {
    Sharding::into_shards(shards).batch_size(batch_size)
}

#[test]
fn c001_each_shard_has_its_piece_of_every_global_batch() {
    assert_eq!(xs(&shard(&positions(8), &by(2, 4)).unwrap().shards), [[0, 1, 4, 5], [2, 3, 6, 7]]);
}

#[test]
fn c002_columns_of_every_kind_are_cut_alike() {
    let batch = every_kind(&[0, 1, 2, 3, 4, 5, 6, 7]);
    let shards = shard(&batch, &by(2, 4)).unwrap().shards;
    assert_eq!(shards[0], every_kind(&[0, 1, 4, 5]));
    assert_eq!(shards[1], every_kind(&[2, 3, 6, 7]));
}

#[test]
fn c003_twelve_rows_over_three_shards_in_batches_of_three() {
    let shards = shard(&every_kind(&(0..12).collect::<Vec<_>>()), &by(3, 3)).unwrap().shards;
    assert_eq!(shards, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]].map(|rows| every_kind(&rows)));
}

#[test]
fn c004_rows_of_a_matrix_stay_whole() {
    let batch = Batch::empty().with("x", Tensor::from_vec([6, 3], (0..18_i64).collect()).unwrap()).unwrap();
    let shards = shard(&batch, &by(3, 3)).unwrap().shards;
    assert_eq!(xs(&shards), [[0, 1, 2, 9, 10, 11], [3, 4, 5, 12, 13, 14], [6, 7, 8, 15, 16, 17]]);
}

#[test]
fn c005_one_global_batch_is_cut_in_the_middle() {
    assert_eq!(xs(&shard(&positions(4), &by(2, 4)).unwrap().shards), [[0, 1], [2, 3]]);
}

#[test]
fn c006_one_shard_keeps_everything_in_order() {
    assert_eq!(xs(&shard(&positions(8), &by(1, 2)).unwrap().shards), [[0, 1, 2, 3, 4, 5, 6, 7]]);
}

#[test]
fn c007_rows_that_are_no_multiple_of_the_batch_size_are_refused() {
    let text = refusal(shard(&positions(10), &by(2, 3)));
    assert!(text.contains("total batch size (10) is not a multiple of batch_size (3)"), "{text}");
}

#[test]
fn c008_a_batch_size_that_is_no_multiple_of_the_shards_is_refused() {
    let text = refusal(shard(&positions(8), &by(3, 4)));
    assert!(text.contains("batch size (4) is not a multiple of shards (3)"), "{text}");
}

#[test]
fn c009_columns_of_different_rows_make_no_batch() {
    let text = refusal(positions(4).with("y", Tensor::from_vec([3], vec![0_u8; 3]).unwrap()));
    assert!(text.contains("batch sizes are not the same") && text.contains('4') && text.contains('3'), "{text}");
}

#[test]
fn c010_repeated_prompts_are_dealt_over_the_shards() {
    let shards = shard(&numbers(&[0, 0, 1, 1, 2, 2, 3, 3]), &by(2, 2)).unwrap().shards;
    assert_eq!(xs(&shards), [[0, 1, 2, 3], [0, 1, 2, 3]]);
}

#[test]
fn c011_without_a_batch_size_the_whole_is_one_global_batch() {
    let shards = shard(&numbers(&[0, 0, 1, 1, 2, 2, 3, 3]), &Sharding::into_shards(2)).unwrap().shards;
    assert_eq!(xs(&shards), [[0, 0, 1, 1], [2, 2, 3, 3]]);
}

#[test]
fn c012_with_a_batch_size_each_half_is_cut() {
    let shards = shard(&numbers(&[0, 0, 1, 1, 2, 2, 3, 3]), &by(2, 4)).unwrap().shards;
    assert_eq!(xs(&shards), [[0, 0, 2, 2], [1, 1, 3, 3]]);
}

#[test]
fn c013_to_c016_uneven_shards_are_ceil_sized_and_the_last_ones_may_be_empty() {
    for (shards, expected) in [
        (2, vec![vec![0, 1, 2], vec![3, 4]]),
        (3, vec![vec![0, 1], vec![2, 3], vec![4]]),
        (4, vec![vec![0, 1], vec![2, 3], vec![4], vec![]]),
        (7, vec![vec![0], vec![1], vec![2], vec![3], vec![4], vec![], vec![]]),
    ] {
        let sharding = Sharding::into_shards(shards).allow_uneven();
        assert_eq!(xs(&shard(&positions(5), &sharding).unwrap().shards), expected);
        assert_eq!(xs(&positions(5).shard(shards, Uneven::Allow).unwrap()), expected);
    }
}

#[test]
fn c017_uneven_shards_keep_every_key() {
    let packed = Packed::new([Some(Tensor::from_vec([1, 2], vec![1_i64, 2]).unwrap()), None], 0);
    let batch = every_kind(&[5, 6]).with("packed", packed).unwrap();
    let shards = shard(&batch, &Sharding::into_shards(4).allow_uneven()).unwrap().shards;
    for empty in &shards[2..] {
        assert!(empty.names().eq(batch.names()));
        assert!(empty.columns().all(|(_, column)| column.rows() == 0));
        assert_eq!(empty.column("packed").unwrap().packed().unwrap().to_tensor().unwrap(), None);
    }
}

#[test]
fn c018_uneven_shards_of_several_global_batches_are_refused() {
    let text = refusal(shard(&positions(8), &by(2, 4).allow_uneven()));
    assert!(text.contains("one global batch"), "{text}");
}

#[test]
fn c020_a_batch_without_columns_cannot_be_sharded() {
    let error = shard(&Batch::empty(), &Sharding::into_shards(2)).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(Batch::empty().shard(2, Uneven::Refuse).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn c021_no_rows_give_empty_shards_where_uneven_is_allowed_and_an_error_elsewhere() {
    let none = positions(0);
    let shards = shard(&none, &Sharding::into_shards(3).allow_uneven()).unwrap().shards;
    assert_eq!(shards, vec![none.clone(); 3]);
    assert!(refusal(shard(&none, &Sharding::into_shards(3))).contains("0 rows"));
    assert!(refusal(none.shard(3, Uneven::Refuse)).contains("0 rows"));
}

#[test]
fn no_shards_and_batches_of_no_rows_are_refused() {
    assert!(shard(&positions(4), &Sharding::into_shards(0)).is_err());
    assert!(shard(&positions(4), &by(2, 0)).is_err());
    assert!(positions(4).shard(0, Uneven::Allow).is_err());
}

#[test]
fn a_shard_is_a_view_of_the_whole() {
    let batch = positions(8);
    let whole = batch.column("x").unwrap().dense().unwrap().bytes().clone();
    for (index, part) in shard(&batch, &Sharding::into_shards(4)).unwrap().shards.iter().enumerate() {
        assert_eq!(part.column("x").unwrap().dense().unwrap().bytes().as_ptr(), whole[16 * index..].as_ptr());
        assert_eq!(x(part).len(), 2);
    }
}
