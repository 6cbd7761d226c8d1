//! Section 5.5 and the media cases of 5.4: rows that consist of tensors, which several rows may share.

use gym_core::group::{Assembly, Batch, DType, Packed, Segment, Tensor, Uneven};

use crate::{numbers, positions, refusal};

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape).unwrap()
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::from_vec(shape, vec![1.0_f32; shape.iter().product()]).unwrap()
}

fn filled(shape: &[usize], value: f32) -> Tensor {
    Tensor::from_vec(shape, vec![value; shape.iter().product()]).unwrap()
}

fn packed<const N: usize>(shapes: [&[usize]; N], dimension: isize) -> Packed {
    Packed::new(shapes.map(|shape| Some(ones(shape))), dimension)
}

fn shape(packed: &Packed) -> Vec<usize> {
    packed.to_tensor().unwrap().unwrap().shape().to_vec()
}

fn column(packed: Packed) -> Batch {
    Batch::empty().with("packed", packed).unwrap()
}

fn packed_of(batch: &Batch) -> &Packed {
    batch.column("packed").unwrap().packed().unwrap()
}

#[test]
fn c050_c052_repeated_rows_share_their_segments() {
    let repeated = column(packed([&[2, 3], &[4, 3]], 0)).repeat_interleave(3).unwrap();
    assert_eq!((packed_of(&repeated).rows(), packed_of(&repeated).segments().len()), (6, 2));
    assert_eq!(shape(packed_of(&repeated)), [18, 3]);
}

#[test]
fn c059_truncate_leaves_packed_rows_alone() {
    let batch = column(packed([&[2, 3], &[4, 3]], 0)).with("x", ones(&[2, 4])).unwrap();
    let cut = batch.truncate(1, 2).unwrap();
    assert_eq!(packed_of(&cut), packed_of(&batch));
    assert_eq!(cut.column("x").unwrap().dense().unwrap().shape(), [2, 2]);
}

#[test]
fn c073_media_that_misses_from_a_part_becomes_rows_without_segments() {
    let image = Segment::new(ones(&[2, 3]));
    let one = column(Packed::from_segments([vec![image.clone()], vec![image.clone()]], 0));
    let parts = [
        one.with("ids", positions(2).column("x").unwrap().clone()).unwrap(),
        Batch::empty().with("ids", numbers(&[7]).column("x").unwrap().clone()).unwrap(),
        column(Packed::from_segments([vec![image]], 0))
            .with("ids", numbers(&[8]).column("x").unwrap().clone())
            .unwrap(),
    ];
    assert!(refusal(Batch::from_batches(&parts, &Assembly::default())).contains("\"packed\""));
    let whole = Batch::from_batches(&parts, &Assembly::default().packed_may_miss()).unwrap();
    assert_eq!((whole.rows(), packed_of(&whole).segments().len()), (4, 1));
    assert_eq!(packed_of(&whole).counts().collect::<Vec<_>>(), [1, 1, 0, 1]);
}

#[test]
fn c074_media_of_other_rows_than_the_tokens_is_refused() {
    let text = refusal(positions(2).with("packed", packed([&[2, 3]], 0)));
    assert!(text.contains("batch sizes are not the same") && text.contains("\"packed\" has 1 rows"), "{text}");
}

#[test]
fn c075_media_are_the_packed_columns_and_the_token_types() {
    let types = Tensor::from_vec([2, 1], vec![0_i64, 1]).unwrap();
    let batch = column(packed([&[2, 3], &[1, 3]], 0))
        .with("token_type_ids", types)
        .unwrap()
        .with("ids", positions(2).column("x").unwrap().clone())
        .unwrap()
        .with("list", gym_core::group::JsonRows::from_values([1, 2]).unwrap())
        .unwrap();
    assert_eq!(batch.media(None).unwrap().names().collect::<Vec<_>>(), ["packed", "token_type_ids"]);
}

#[test]
fn c076_only_pixels_are_cast_and_what_they_share_stays_shared() {
    let image = Segment::new(ones(&[2, 3]));
    let pixels = Packed::from_segments([vec![image.clone()], vec![image.clone()]], 0);
    let sizes = packed([&[1, 3], &[1, 3]], 0);
    let batch = Batch::empty().with("pixel_values", pixels.clone()).unwrap().with("image_grid_thw", sizes).unwrap();
    let media = batch.media(Some(DType::Bf16)).unwrap();
    let cast = media.column("pixel_values").unwrap().packed().unwrap();
    assert_eq!((cast.rows(), cast.segments().len(), cast.references()), (2, 1, pixels.references()));
    assert_eq!(cast.segments()[0].tensor().dtype(), DType::Bf16);
    assert_ne!(cast.segments()[0].id(), image.id());
    assert_eq!(batch.column("pixel_values").unwrap().packed().unwrap(), &pixels);
    assert_eq!(media.column("image_grid_thw").unwrap(), batch.column("image_grid_thw").unwrap());
}

#[test]
fn c077_pixels_and_sizes_of_different_counts_are_refused() {
    let pixels = Packed::from_segments([vec![Segment::new(ones(&[1, 3])), Segment::new(ones(&[1, 3]))], vec![]], 0);
    let sizes = packed([&[1, 3], &[1, 3]], 0);
    let batch = Batch::empty().with("pixel_values", pixels).unwrap().with("image_grid_thw", sizes).unwrap();
    let text = refusal(batch.media(None));
    assert!(text.contains("ordered per-row segment counts") && text.contains("image_grid_thw"), "{text}");
}

#[test]
fn c078_images_are_sharded_with_their_rows() {
    let shards = column(packed([&[2, 3], &[3, 3], &[1, 3], &[5, 3]], 0)).shard(2, Uneven::Refuse).unwrap();
    let rows: Vec<_> = shards.iter().map(|shard| (packed_of(shard).rows(), shape(packed_of(shard))[0])).collect();
    assert_eq!(rows, [(2, 5), (2, 6)]);
}

#[test]
fn c079_a_segment_that_all_rows_share_is_once_in_every_shard() {
    let image = Segment::new(ones(&[2, 3]));
    let batch = column(Packed::from_segments(vec![[image.clone()]; 4], 0));
    for shard in batch.shard(2, Uneven::Refuse).unwrap() {
        let part = packed_of(&shard);
        assert_eq!((part.rows(), part.segments().len()), (2, 1));
        assert_eq!(part.segments()[0].tensor().bytes().as_ptr(), image.tensor().bytes().as_ptr());
    }
}

#[test]
fn c081_rows_are_packed_along_the_dimension() {
    let two = packed([&[16, 3], &[45, 3]], 0);
    assert_eq!((two.rows(), shape(&two)), (2, vec![61, 3]));
}

#[test]
fn c082_rows_without_segments_pack_to_nothing() {
    let none = Packed::new([None, None], 0);
    assert_eq!((none.rows(), none.to_tensor().unwrap()), (2, None));
}

#[test]
fn c083_rows_without_segments_are_passed_over() {
    let some = Packed::new([Some(filled(&[2, 3], 1.0)), None, Some(filled(&[4, 3], 2.0))], 0);
    let whole = some.to_tensor().unwrap().unwrap();
    assert_eq!((some.rows(), whole.shape()), (3, [6, 3].as_slice()));
    assert_eq!(whole.view::<f32>().unwrap().as_ref(), [[1.0; 6].as_slice(), &[2.0; 12]].concat());
}

#[test]
fn c084_other_dimensions_are_padded_with_zeros() {
    let padded = packed([&[1, 3, 2, 4], &[1, 3, 4, 2]], 0).pad_to_max_shape().to_tensor().unwrap().unwrap();
    assert_eq!(padded.shape(), [2, 3, 4, 4]);
    let elements = padded.view::<f32>().unwrap();
    assert_eq!(elements[..16], [[1.0; 8], [0.0; 8]].concat());
    assert_eq!(elements[48..56], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
}

#[test]
fn c085_c086_padding_works_for_any_number_of_dimensions() {
    assert_eq!(shape(&packed([&[1, 2, 3], &[2, 4, 3]], 0).pad_to_max_shape()), [3, 4, 3]);
    assert_eq!(shape(&packed([&[1, 2, 3, 2, 4], &[2, 4, 3, 4, 2]], 0).pad_to_max_shape()), [3, 4, 3, 4, 4]);
}

#[test]
fn c087_tensors_of_different_ranks_are_refused() {
    assert!(refusal(packed([&[1, 2], &[1, 2, 3]], 0).pad_to_max_shape().to_tensor()).contains("same rank"));
}

#[test]
fn c088_a_dimension_that_there_is_not_is_refused() {
    for dimension in [3, -4, isize::MIN, isize::MAX] {
        let text = refusal(packed([&[1, 2, 3]], dimension).to_tensor());
        assert!(text.contains(&format!("no dimension {dimension}")), "{text}");
    }
}

#[test]
fn c089_a_negative_dimension_counts_from_the_last() {
    assert_eq!(shape(&packed([&[2, 3, 1], &[4, 3, 1]], -3)), [6, 3, 1]);
    assert_eq!(shape(&packed([&[2, 3, 1], &[2, 3, 5]], -1)), [2, 3, 6]);
}

#[test]
fn c090_other_dimensions_that_differ_are_refused_unless_padded() {
    let different = packed([&[1, 2], &[1, 3]], 0);
    assert!(refusal(different.to_tensor()).contains("pad_to_max_shape"));
    assert_eq!(shape(&different.pad_to_max_shape()), [2, 3]);
}

#[test]
fn c091_a_segment_is_known_by_its_identity_not_by_its_value() {
    let image = Segment::new(ones(&[2, 3]));
    let rows = [column(Packed::from_segments([[image.clone()], [image]], 0)), column(packed([&[2, 3]], 0))];
    let whole = Batch::concat(&rows).unwrap();
    assert_eq!((packed_of(&whole).rows(), packed_of(&whole).segments().len()), (3, 2));
}

/// Two rows that share a seed image, each with another image.
fn seeded() -> Packed {
    let [seed, a, b] = [1.0, 2.0, 3.0].map(|value| Segment::new(filled(&[1, 2], value)));
    Packed::from_segments([[seed.clone(), a], [seed, b]], 0)
}

#[test]
fn c092_rows_may_share_some_of_their_segments() {
    let rows = seeded();
    assert_eq!((rows.rows(), rows.references().len(), rows.segments().len()), (2, 4, 3));
    let whole = rows.to_tensor().unwrap().unwrap();
    assert_eq!(whole.view::<f32>().unwrap().as_ref(), [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 3.0, 3.0]);
    let second = column(rows).slice(1..2).unwrap();
    assert_eq!((packed_of(&second).rows(), packed_of(&second).segments().len()), (1, 2));
}

#[test]
fn c093_picked_rows_keep_their_order_and_only_what_they_refer_to() {
    let [a, b] = [1.0, 2.0].map(|value| Segment::new(filled(&[1, 1], value)));
    let batch = column(Packed::from_segments([[a.clone()], [b.clone()], [a], [b]], 0));
    let picked = batch.select(&[3, 0, 3]).unwrap();
    assert_eq!((packed_of(&picked).rows(), packed_of(&picked).segments().len()), (3, 2));
    let whole = packed_of(&picked).to_tensor().unwrap().unwrap();
    assert_eq!(whole.view::<f32>().unwrap().as_ref(), [2.0, 1.0, 2.0]);
    assert!(batch.select(&[4]).is_err());
}

#[test]
fn c094_a_slice_and_parts_put_together_keep_the_padding() {
    let batch = column(packed([&[1, 2], &[1, 3]], 0).pad_to_max_shape());
    let whole = Batch::concat(&[batch.slice(1..2).unwrap(), batch.select(&[0]).unwrap()]).unwrap();
    assert!(packed_of(&whole).pads_to_max_shape());
    let other = column(packed([&[1, 2]], 0));
    assert!(refusal(Batch::concat(&[batch, other])).contains("padding"));
}

#[test]
fn c095_a_packed_column_comes_back_as_it_went_and_shares_as_it_did() {
    let batch = column(seeded().pad_to_max_shape());
    let (schema, segments) = batch.encode();
    assert_eq!(segments.len(), 5);
    let schema = serde_json::from_str(&serde_json::to_string(&schema).unwrap()).unwrap();
    let back = Batch::decode(schema, segments).unwrap();
    assert_eq!((&back, packed_of(&back).segments().len()), (&batch, 3));
    let both = Batch::concat(&[batch, back]).unwrap();
    assert_eq!((packed_of(&both).rows(), packed_of(&both).segments().len()), (4, 3), "it is known after the way");
}

#[test]
fn a_packed_column_that_lies_is_refused() {
    use gym_core::Code;
    use gym_core::group::ColumnSchema;
    let (schema, segments) = column(seeded()).encode();
    let refused = |edit: &dyn Fn(&mut ColumnSchema), swap: Option<usize>| {
        let (mut schema, mut segments) = (schema.clone(), segments.clone());
        edit(&mut schema.columns[0]);
        if let Some(at) = swap {
            segments[at] = [9_u64, 0, 0, 0].iter().flat_map(|at| at.to_le_bytes()).collect::<Vec<_>>().into();
        }
        let error = Batch::decode(schema, segments).unwrap_err();
        assert!(error.code() == Code::DataLoss && error.to_string().contains("packed"), "{error}");
    };
    let known = |edit: fn(&mut Vec<gym_core::group::SegmentSchema>)| {
        move |column: &mut ColumnSchema| {
            let ColumnSchema::Packed { segments, .. } = column else { panic!("a packed column") };
            edit(segments);
        }
    };
    refused(&known(|segments| segments[0].id = "x".into()), None);
    refused(&known(|segments| segments[0].shape = vec![usize::MAX]), None);
    refused(&known(|segments| segments.extend(segments.clone())), None);
    refused(&|_| (), Some(0));
    refused(&|_| (), Some(1));
}

#[test]
fn c096_rows_like_those_of_another_column_have_no_segments() {
    let like = packed([&[1, 2]], 0).pad_to_max_shape();
    let none = like.empty_rows_like(0);
    assert_eq!((none.rows(), none.to_tensor().unwrap(), none.pads_to_max_shape()), (0, None, true));
    assert_eq!(like.empty_rows_like(3).rows(), 3);
}

#[test]
fn c097_a_cast_to_the_same_type_shares_the_tensors_and_keeps_who_they_are() {
    let rows = Packed::new([Some(zeros(&[2, 2]))], 0);
    let same = rows.to_float(DType::F32).unwrap();
    assert_eq!(same.segments()[0].id(), rows.segments()[0].id());
    assert_eq!(same.segments()[0].tensor().bytes().as_ptr(), rows.segments()[0].tensor().bytes().as_ptr());
}

#[test]
fn rows_of_a_part_can_be_merged_into_one() {
    let merged = seeded().merge_rows();
    assert_eq!((merged.rows(), merged.references().len()), (1, 4));
    let flat = Packed::flattened_concat(&[seeded(), packed([&[1, 2]], 0)]).unwrap();
    assert_eq!(flat.counts().collect::<Vec<_>>(), [4, 1]);
    assert!(Packed::flattened_concat(&[]).is_err());
}
