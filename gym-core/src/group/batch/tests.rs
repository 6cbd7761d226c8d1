use bytes::Bytes;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::base::error::Code;
use crate::group::batch::tensor::{DType, Tensor};
use crate::message::Message;

/// Creates one column of each kind; `x` counts the rows.
pub(super) fn every_kind(rows: usize) -> Batch {
    let matrix = Tensor::from_vec([rows, 2], (0..2 * rows).map(|i| i as f32).collect()).unwrap();
    let tokens: Vec<Vec<i64>> = (0..rows).map(|row| vec![row as i64; row % 4]).collect();
    Batch::empty()
        .with("x", Tensor::from_vec([rows], (0..rows as i64).collect()).unwrap())
        .unwrap()
        .with("matrix", matrix)
        .unwrap()
        .with("tokens", Ragged::from_rows(&tokens))
        .unwrap()
        .with("note", JsonRows::from_values((0..rows).map(|row| json!({ "row": row }))).unwrap())
        .unwrap()
}

/// Returns the `x` column.
pub(super) fn x(batch: &Batch) -> Vec<i64> {
    batch.column("x").unwrap().dense().unwrap().to_i64s().unwrap()
}

/// Returns `true` if every segment begins within the memory of the corresponding segment of the whole batch.
fn shares(part: &Batch, whole: &Batch) -> bool {
    let (parts, wholes) = (part.encode().1, whole.encode().1);
    let inside = |(part, whole): (&Bytes, &Bytes)| part.is_empty() || whole.as_ptr_range().contains(&part.as_ptr());
    parts.len() == wholes.len() && parts.iter().zip(&wholes).all(inside)
}

#[test]
fn slices_shards_and_segments_share_the_memory() {
    let batch = every_kind(8);
    assert!(shares(&batch.slice(3..7).unwrap(), &batch));
    for shard in batch.shard(3, Uneven::Allow).unwrap() {
        assert!(shares(&shard, &batch));
    }
    let x = batch.column("x").unwrap().dense().unwrap();
    assert_eq!(batch.encode().1[0].as_ptr(), x.bytes().as_ptr());
    let (schema, segments) = batch.encode();
    assert!(shares(&Batch::decode(schema, segments).unwrap(), &batch));
    let message = Payload { value: 7, batch: batch.clone() }.to_message().unwrap();
    assert!(shares(&Payload::<i32>::from_message(message).unwrap().batch, &batch));
}

#[test]
fn a_payload_without_a_batch_is_its_value() {
    let message = Payload::from(3).to_message().unwrap();
    assert_eq!((message.head.to_bytes().as_ref(), message.segments.len()), (br#"{"value":3}"#.as_slice(), 0));
    assert_eq!(Payload::<i32>::from_message(message).unwrap(), Payload::from(3));
    let error = Payload::<i32>::from_message(Message::json(r#"{"value":"three"}"#)).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[test]
fn a_missing_column_is_answered_with_the_names_there_are() {
    let error = every_kind(1).column("y").unwrap_err();
    assert!(error.code() == Code::NotFound && error.message().contains("tokens"), "{error}");
}

#[test]
fn a_replaced_column_keeps_its_place_and_must_keep_the_rows() {
    let mut batch = every_kind(2);
    batch.insert("x", Tensor::zeros(DType::U8, [2]).unwrap()).unwrap();
    assert_eq!(batch.names().next(), Some("x"));
    assert!(batch.insert("x", Tensor::zeros(DType::U8, [3]).unwrap()).is_err());
    assert!(batch.insert("scalar", Tensor::zeros(DType::U8, []).unwrap()).is_err());
    let mut alone = Batch::empty().with("x", Tensor::zeros(DType::U8, [2]).unwrap()).unwrap();
    alone.insert("x", Tensor::zeros(DType::U8, [3]).unwrap()).unwrap();
    assert_eq!(alone.rows(), 3);
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    let part = |tensor| Batch::empty().with("x", tensor).unwrap();
    let wide = part(Tensor::zeros(DType::F32, [2, 3]).unwrap());
    for other in [
        part(Tensor::zeros(DType::F32, [2, 4]).unwrap()),
        part(Tensor::zeros(DType::F64, [2, 3]).unwrap()),
        Batch::empty().with("x", Ragged::from_rows::<f32>(&[vec![], vec![]])).unwrap(),
        Batch::empty().with("y", Tensor::zeros(DType::F32, [2, 3]).unwrap()).unwrap(),
        every_kind(2),
    ] {
        let error = Batch::concat(&[wide.clone(), other]).unwrap_err();
        assert!(error.to_string().contains("\"x\""), "{error}");
    }
    assert_eq!(Batch::concat(&[Batch::empty(), wide.clone()]).unwrap(), wide);
    assert_eq!(Batch::concat(&[]).unwrap(), Batch::empty());
}

#[test]
fn rows_that_no_memory_stands_behind_are_bounded() {
    let hollow = |rows| Batch::empty().with("x", Tensor::zeros(DType::F32, [rows, 0]).unwrap());
    assert_eq!(hollow(1 << 20).unwrap().rows(), 1 << 20);
    assert!(hollow(1 << 60).unwrap_err().message().contains("rows of no bytes"));
}

#[test]
fn of_the_metadata_stays_what_the_parts_agree_on() {
    let mut batch = every_kind(4);
    batch.metadata_mut().insert("step".into(), json!(12));
    let mut shards = batch.shard(2, Uneven::Refuse).unwrap();
    assert_eq!(shards[1].metadata()["step"], 12);
    shards[0].metadata_mut().insert("rank".into(), json!(0));
    shards[1].metadata_mut().insert("rank".into(), json!(1));
    assert_eq!(Batch::concat(&shards).unwrap(), batch);
    let (schema, segments) = batch.encode();
    assert_eq!(Batch::decode(schema, segments).unwrap().metadata(), batch.metadata());
}

#[test]
fn a_schema_that_lies_is_refused_before_anything_is_allocated() {
    let (schema, segments) = every_kind(4).encode();
    let refused = |edit: &dyn Fn(&mut Value), segments: Vec<Bytes>| {
        let mut lie = serde_json::to_value(&schema).unwrap();
        edit(&mut lie);
        let lie = serde_json::from_value(lie).unwrap();
        assert_eq!(Batch::decode(lie, segments).unwrap_err().code(), Code::DataLoss);
    };
    refused(&|schema| schema["rows"] = json!(5), segments.clone());
    refused(&|schema| schema["rows"] = json!(u64::MAX), segments.clone());
    refused(&|schema| schema["columns"][0]["shape"] = json!([u64::MAX / 8]), segments.clone());
    refused(&|schema| schema["columns"][0]["dtype"] = json!("U8"), segments.clone());
    refused(&|schema| schema["columns"][1]["shape"] = json!([8]), segments.clone());
    refused(&|schema| schema["columns"][2]["shape"] = json!([]), segments.clone());
    refused(&|schema| schema["columns"][1]["name"] = json!("x"), segments.clone());
    refused(&|schema| schema["columns"] = json!([]), segments.clone());
    refused(&|_| (), segments[..5].to_vec());
    refused(&|_| (), segments.iter().cloned().chain([Bytes::new()]).collect());
    let mut swapped = segments;
    swapped.swap(2, 4);
    refused(&|_| (), swapped);
}

proptest! {
    #[test]
    fn shards_put_together_are_the_batch(rows in 0_usize..40, count in 1_usize..12) {
        let batch = every_kind(rows);
        let shards = batch.shard(count, Uneven::Allow).unwrap();
        prop_assert_eq!(shards.len(), count);
        prop_assert!(shards.iter().all(|shard| shard.names().eq(batch.names())));
        prop_assert_eq!(Batch::concat(&shards).unwrap(), batch);
    }

    #[test]
    fn a_batch_comes_back_as_it_went(rows in 0_usize..20, start in 0_usize..20, end in 0_usize..20) {
        let batch = every_kind(rows).slice(start.min(end).min(rows)..start.max(end).min(rows)).unwrap();
        let (schema, segments) = batch.encode();
        let schema = serde_json::from_slice(&serde_json::to_vec(&schema).unwrap()).unwrap();
        prop_assert_eq!(Batch::decode(schema, segments).unwrap(), batch);
    }

    #[test]
    fn no_segments_make_it_panic(
        rows in 0_usize..6, junk in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
    ) {
        let (schema, _) = every_kind(rows).encode();
        let _ = Batch::decode(schema, junk.into_iter().map(Bytes::from).collect());
    }
}
