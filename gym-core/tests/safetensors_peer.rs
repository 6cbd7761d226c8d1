//! Compares with the reference implementation in Python. Runs only if `GYM_SAFETENSORS_PYTHON` names an interpreter
//! that has it.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::path::{Path, PathBuf};
use std::process::Command;

use gym_core::group::batch::safetensors::SafeTensors;
use gym_core::group::{Batch, DType, JsonRows, Packed, Ragged, Scalar, Tensor};
use serde_json::Value;

fn peer() -> Option<PathBuf> {
    let python = std::env::var_os("GYM_SAFETENSORS_PYTHON").map(PathBuf::from);
    if python.is_none() {
        println!("NOT RUN: GYM_SAFETENSORS_PYTHON names no interpreter");
    }
    python
}

/// The contents that the peer read from the file, and the file that it wrote from them.
fn through_the_peer(python: &Path, file: &SafeTensors) -> (Value, SafeTensors) {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours.safetensors"), folder.path().join("theirs.safetensors"));
    std::fs::write(&ours, file.encode().unwrap().to_bytes()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python/safetensors_peer.py");
    let output = Command::new(python).arg(script).args([&ours, &theirs]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = SafeTensors::decode(&std::fs::read(theirs).unwrap().into()).unwrap();
    (serde_json::from_slice(&output.stdout).unwrap(), written)
}

/// The elements as Python prints them.
fn elements(tensor: &Tensor) -> Vec<Value> {
    match tensor.dtype() {
        DType::Bool => tensor.view::<bool>().unwrap().iter().map(|element| (*element).into()).collect(),
        DType::U64 => tensor.view::<u64>().unwrap().iter().map(|element| (*element).into()).collect(),
        dtype if dtype.is_float() => tensor.to_f64s().unwrap().into_iter().map(number).collect(),
        _ => tensor.to_i64s().unwrap().into_iter().map(Value::from).collect(),
    }
}

fn number(element: f64) -> Value {
    let name = if element.is_nan() {
        "nan"
    } else if element > 0.0 {
        "inf"
    } else {
        "-inf"
    };
    if element.is_finite() { element.into() } else { name.into() }
}

fn check(python: &Path, file: &SafeTensors) {
    let (seen, written) = through_the_peer(python, file);
    assert_eq!(seen.as_object().unwrap().len(), file.tensors.len());
    for (name, tensor) in &file.tensors {
        assert_eq!(seen[name]["dtype"], tensor.dtype().as_str(), "{name}");
        assert_eq!(seen[name]["shape"], Value::from(tensor.shape()), "{name}");
        assert_eq!(seen[name]["elements"], Value::from(elements(tensor)), "{name}");
    }
    assert_eq!(&written, file);
}

#[test]
fn the_reference_implementation_reads_every_type_and_we_read_what_it_writes() {
    let Some(python) = peer() else { return };
    let mut file = SafeTensors::default();
    for dtype in DType::ALL {
        let least = if dtype.is_float() { Scalar::Float(-2.5) } else { Scalar::Int(0) };
        let bytes = [least, Scalar::Int(1), Scalar::Int(0)].map(|scalar| scalar.to_bytes(dtype).unwrap()).concat();
        file.tensors.insert(format!("a {dtype} \"ä\""), Tensor::new(dtype, [3, 1], bytes.into()).unwrap());
    }
    file.tensors.insert("u64".into(), Tensor::from_vec([1], vec![u64::MAX]).unwrap());
    file.tensors.insert("i64".into(), Tensor::from_vec([1], vec![i64::MIN]).unwrap());
    file.tensors.insert("scalar".into(), Tensor::from_vec([], vec![0.1_f64]).unwrap());
    file.tensors.insert("none".into(), Tensor::zeros(DType::F32, [0, 4]).unwrap());
    file.metadata.insert("format".into(), "pt".into());
    check(&python, &file);
}

#[test]
fn every_16_bit_float_is_the_number_that_numpy_says() {
    let Some(python) = peer() else { return };
    let bits: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut file = SafeTensors::default();
    for dtype in [DType::F16, DType::Bf16] {
        file.tensors.insert(format!("{dtype}"), Tensor::new(dtype, [1 << 16], bits.clone().into()).unwrap());
    }
    check(&python, &file);
}

#[test]
fn a_batch_is_a_file_that_the_reference_implementation_reads() {
    let Some(python) = peer() else { return };
    let batch = Batch::empty()
        .with("x", Tensor::from_vec([3, 2], (0..6_i64).collect()).unwrap())
        .unwrap()
        .with("tokens", Ragged::from_rows(&[vec![1_i32, 2], vec![], vec![3]]))
        .unwrap()
        .with("note", JsonRows::from_values(["a", "", "ä"]).unwrap())
        .unwrap()
        .with("image", Packed::new([Some(Tensor::from_vec([1, 2], vec![1.5_f32, 2.0]).unwrap()), None, None], 0))
        .unwrap();
    for part in [batch.clone(), batch.slice(1..3).unwrap(), batch.slice(3..3).unwrap()] {
        let file = SafeTensors::from_batch(&part).unwrap();
        check(&python, &file);
        assert_eq!(through_the_peer(&python, &file).1.into_batch().unwrap(), part);
    }
}
