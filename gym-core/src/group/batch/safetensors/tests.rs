use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::group::batch::{Batch, JsonRows, Packed, Ragged, Segment};

/// Creates a file with this header and these elements.
fn file(header: &Value, elements: &[u8]) -> Bytes {
    raw_file(header.to_string().as_bytes(), elements)
}

fn raw_file(header: &[u8], elements: &[u8]) -> Bytes {
    [(header.len() as u64).to_le_bytes().as_slice(), header, elements].concat().into()
}

fn every_kind() -> Batch {
    let image = Segment::new(Tensor::from_vec([1, 2], vec![1.0_f32, 2.0]).unwrap());
    Batch::empty()
        .with("x", Tensor::from_vec([3, 2], (0..6_i64).collect()).unwrap())
        .unwrap()
        .with("done", Tensor::from_vec([3], vec![true, false, true]).unwrap())
        .unwrap()
        .with("tokens", Ragged::from_rows(&[vec![1_i32, 2], vec![], vec![3]]))
        .unwrap()
        .with("note", JsonRows::from_values(["a", "", "ä"]).unwrap())
        .unwrap()
        .with("image", Packed::from_segments([vec![image.clone()], vec![image], vec![]], 0))
        .unwrap()
}

#[test]
fn tensors_come_back_in_place_and_aligned() {
    let mut written = SafeTensors::default();
    for dtype in DType::ALL {
        let bytes: Bytes = (0..3 * dtype.size() as u8).map(|byte| byte % 2).collect();
        written.tensors.insert(format!("{dtype}"), Tensor::new(dtype, [3], bytes).unwrap());
    }
    written.tensors.insert("scalar".into(), Tensor::from_vec([], vec![1.5_f64]).unwrap());
    written.tensors.insert("none".into(), Tensor::zeros(DType::F32, [0, 4]).unwrap());
    written.metadata.insert("format".into(), "pt".into());
    let file = written.encode().unwrap().to_bytes();
    let read = SafeTensors::decode(&file).unwrap();
    assert_eq!(read, written);
    for tensor in read.tensors.values().filter(|tensor| !tensor.is_empty()) {
        assert!(file.as_ptr_range().contains(&tensor.bytes().as_ptr()), "{tensor:?}");
        assert_eq!((tensor.bytes().as_ptr().addr() - file.as_ptr().addr()) % tensor.dtype().size(), 0, "{tensor:?}");
    }
}

#[test]
fn the_elements_are_written_from_where_they_lie() {
    let tensor = Tensor::from_vec([2], vec![1_i64, 2]).unwrap();
    let file = SafeTensors { tensors: BTreeMap::from([("x".into(), tensor.clone())]), ..SafeTensors::default() };
    assert_eq!(file.encode().unwrap().pieces()[2].as_ptr(), tensor.bytes().as_ptr());
}

#[test]
fn a_batch_comes_back_with_every_kind_of_column() {
    let mut batch = every_kind();
    batch.metadata_mut().insert("step".into(), json!(3));
    let file = SafeTensors::from_batch(&batch).unwrap().encode().unwrap().to_bytes();
    let back = SafeTensors::decode(&file).unwrap().into_batch().unwrap();
    assert_eq!(back, batch);
    assert_eq!(back.names().collect::<Vec<_>>(), ["x", "done", "tokens", "note", "image"]);
}

#[test]
fn boundaries_in_a_file_begin_at_zero_for_a_slice_too() {
    let tail = every_kind().slice(1..3).unwrap();
    let file = SafeTensors::from_batch(&tail).unwrap();
    assert_eq!(file.tensors["tokens.offsets"].view::<u64>().unwrap().as_ref(), [0, 0, 1]);
    assert_eq!(file.into_batch().unwrap(), tail);
}

#[test]
fn a_file_of_others_is_a_batch_of_its_tensors() {
    let header = json!({
        "b": { "dtype": "I32", "shape": [2], "data_offsets": [0, 8] },
        "a": { "dtype": "U8", "shape": [2, 1], "data_offsets": [8, 10] },
    });
    let batch = SafeTensors::decode(&file(&header, &[0; 10])).unwrap().into_batch().unwrap();
    assert_eq!((batch.rows(), batch.names().collect::<Vec<_>>()), (2, vec!["a", "b"]));
    let header = json!({
        "b": { "dtype": "U8", "shape": [2], "data_offsets": [0, 2] },
        "a": { "dtype": "U8", "shape": [1], "data_offsets": [2, 3] },
    });
    let error = SafeTensors::decode(&file(&header, &[0; 3])).unwrap().into_batch().unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
}

#[test]
fn a_schema_that_does_not_fit_its_tensors_is_refused() {
    let refused = |edit: &dyn Fn(&mut SafeTensors)| {
        let mut file = SafeTensors::from_batch(&every_kind()).unwrap();
        edit(&mut file);
        assert_eq!(file.into_batch().unwrap_err().code(), Code::DataLoss);
    };
    refused(&|file| drop(file.tensors.remove("tokens.values")));
    refused(&|file| drop(file.tensors.insert("more".into(), Tensor::zeros(DType::U8, [1]).unwrap())));
    refused(&|file| drop(file.tensors.insert("x".into(), Tensor::zeros(DType::U8, [1]).unwrap())));
    refused(&|file| drop(file.metadata.insert("gym.batch".into(), "{".into())));
}

#[test]
fn columns_whose_tensors_would_meet_are_refused() {
    let batch = Batch::empty().with("t", Ragged::from_rows(&[vec![1_u8]])).unwrap();
    let batch = batch.with("t.values", Tensor::zeros(DType::U8, [1]).unwrap()).unwrap();
    assert_eq!(SafeTensors::from_batch(&batch).unwrap_err().code(), Code::AlreadyExists);
}

#[test]
fn a_tensor_cannot_take_the_name_of_the_metadata() {
    let tensors = BTreeMap::from([("__metadata__".into(), Tensor::zeros(DType::U8, [1]).unwrap())]);
    assert!(SafeTensors { tensors, ..SafeTensors::default() }.encode().is_err());
}

#[test]
fn hostile_files_are_refused() {
    let tensor =
        |dtype: &str, shape: Value, offsets: Value| json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
    let one = |dtype: &str, shape: Value, offsets: Value| file(&json!({ "x": tensor(dtype, shape, offsets) }), &[0; 8]);
    let two = |first: Value, second: Value| {
        file(&json!({ "a": tensor("U8", json!([4]), first), "b": tensor("U8", json!([4]), second) }), &[0; 8])
    };
    for (bytes, reason) in [
        (Bytes::new(), "no header length"),
        (Bytes::from_static(&[1, 2, 3]), "no header length"),
        (u64::MAX.to_le_bytes().to_vec().into(), "exceeds"),
        ((HEADER_BYTES_MAX as u64 + 1).to_le_bytes().to_vec().into(), "exceeds"),
        (100_u64.to_le_bytes().to_vec().into(), "ends within"),
        (raw_file(b"", &[]), "does not begin"),
        (raw_file(b" {}", &[]), "does not begin"),
        (raw_file(b"[]", &[]), "does not begin"),
        (raw_file(b"{\"x\":", &[]), "what the format asks for"),
        (raw_file(b"{\"\xff\":1}", &[]), "what the format asks for"),
        (raw_file(&[b"{\"x\":".as_slice(), &vec![b'['; 100_000]].concat(), &[]), "what the format asks for"),
        (file(&json!({ "__metadata__": { "a": 1 } }), &[]), "what the format asks for"),
        (raw_file(b"{\"__metadata__\":{},\"__metadata__\":{}}", &[]), "comes twice"),
        (
            raw_file(
                br#"{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#,
                &[],
            ),
            "comes twice",
        ),
        (file(&json!({ "x": { "dtype": "U8", "shape": [1] } }), &[0]), "what the format asks for"),
        (one("F8_E4M3", json!([8]), json!([0, 8])), "unknown type"),
        (one("U8", json!([-1]), json!([0, 8])), "what the format asks for"),
        (one("U8", json!([7]), json!([0, 8])), "takes 7 bytes"),
        (one("F64", json!([u64::MAX, 2]), json!([0, 8])), "can be counted"),
        (one("U8", json!([9]), json!([0, 9])), "0..9 of 8"),
        (one("U8", json!([4]), json!([4, 8])), "should begin at 0"),
        (one("U8", json!([0]), json!([8, 0])), "should begin at 0"),
        (one("U8", json!([0]), json!([0, u64::MAX])), "of 8 bytes"),
        (one("U8", json!([4]), json!([0, 4])), "the tensors end at 4"),
        (two(json!([0, 4]), json!([2, 6])), "should begin at 4"),
        (two(json!([0, 4]), json!([0, 4])), "should begin at 4"),
    ] {
        let error = SafeTensors::decode(&bytes).unwrap_err();
        assert_eq!(error.code(), Code::DataLoss);
        assert!(error.message().contains(reason), "{reason}: {error}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(header in "[\\[\\]{}\":,a-z0-9_]{0,60}", elements in prop::collection::vec(any::<u8>(), 0..20)) {
        let _ = SafeTensors::decode(&raw_file(header.as_bytes(), &elements));
        let _ = SafeTensors::decode(&elements.into());
    }
}
