//! Parquet files as the input of a collection.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod collection;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use gym_client::collect::input::Repeats;
use gym_client::collect::{CollectOptions, ExistingOutput, OutputFiles};
use gym_core::base::RealFiles;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use collection::Ground;

const SCHEMA: &str = "message rows {
    required group responses_create_params { optional binary input (UTF8); }
    required group agent_ref { required binary name (UTF8); }
    optional int64 number;
}";

/// Writes a file of rows for an agent, each with a number or with none.
fn write(path: &Path, agent: &str, compression: Compression, numbers: &[Option<i64>]) {
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let mut file = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    let mut group = file.next_row_group().unwrap();
    let there = vec![1; numbers.len()];
    let texts = |text: &str| vec![ByteArray::from(text); numbers.len()];
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&texts("hi"), Some(&there), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&texts(agent), None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let levels: Vec<i16> = numbers.iter().map(|number| number.is_some().into()).collect();
    let values: Vec<i64> = numbers.iter().flatten().copied().collect();
    column.typed::<Int64Type>().write_batch(&values, Some(&levels), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
}

fn options(ground: &Ground, input: &str) -> CollectOptions {
    let mut options = ground.options();
    (options.input, options.events) = (ground.folder.path().join(input), None);
    options.materialize.input_name = options.input.display().to_string();
    options
}

/// Returns the rows as they were sent, in order.
fn sent(options: &CollectOptions) -> Vec<Map<String, Value>> {
    let text = std::fs::read_to_string(OutputFiles::beside(&options.output).materialized).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn numbers(options: &CollectOptions) -> Vec<Option<i64>> {
    sent(options).iter().map(|row| row.get("number").map(|number| number.as_i64().unwrap())).collect()
}

/// A folder with two shards, of three rows and of one.
fn shards() -> Ground {
    let ground = Ground::new(&[]);
    let at = |name: &str| ground.folder.path().join(name);
    write(&at("b-1.parquet"), "agent", Compression::SNAPPY, &[Some(i64::MAX), None, Some(-1)]);
    write(&at("b-2.parquet"), "agent", Compression::ZSTD(ZstdLevel::default()), &[Some(4)]);
    ground
}

#[tokio::test]
async fn shards_are_collected_like_the_lines_of_one_file() {
    let ground = shards();
    for input in ["b-*.parquet", "", "b-*"] {
        let mut options = options(&ground, input);
        options.existing = ExistingOutput::Overwrite;
        let summary = ground.collect(options.clone()).await.unwrap();
        assert_eq!(summary.snapshot.completed, 4, "{input}");
        assert_eq!(numbers(&options), [Some(i64::MAX), None, Some(-1), Some(4)]);
        assert_eq!(sent(&options)[0]["responses_create_params"]["input"], "hi");
    }
    let left = std::fs::read_dir(ground.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!left.into_iter().any(|name| name.to_string_lossy().starts_with(".gym-input")), "the rows are removed");
}

#[tokio::test]
async fn a_limit_repeats_and_a_resumed_run_count_rows() {
    let ground = shards();
    let mut options = options(&ground, "b-*.parquet");
    options.materialize.limit = Some(2);
    ground.collect(options.clone()).await.unwrap();
    assert_eq!(numbers(&options), [Some(i64::MAX), None]);
    options.existing = ExistingOutput::Resume;
    (options.materialize.limit, options.materialize.repeats) = (None, Repeats::Each(2));
    options.materialize.interleave = true;
    let summary = ground.collect(options.clone()).await.unwrap();
    assert_eq!((summary.snapshot.already_completed, summary.snapshot.completed), (2, 6));
    let once = [Some(i64::MAX), None, Some(-1), Some(4)];
    assert_eq!(numbers(&options), [once, once].concat());
    // Another file with the same name has other rows.
    write(&ground.folder.path().join("b-2.parquet"), "agent", Compression::SNAPPY, &[Some(5)]);
    let refused = ground.collect(options).await.unwrap_err().to_string();
    assert!(refused.contains("number: was 4, is 5"), "{refused}");
}

#[tokio::test]
async fn an_error_names_the_file_and_the_row() {
    let ground = shards();
    let at = |name: &str| ground.folder.path().join(name);
    let whole = std::fs::read(at("b-1.parquet")).unwrap();
    write(&at("c-0.parquet"), "agent", Compression::SNAPPY, &[Some(1), Some(2)]);
    write(&at("c-1.parquet"), "nobody", Compression::SNAPPY, &[Some(1)]);
    std::fs::write(at("torn.parquet"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(at("empty.parquet"), "").unwrap();
    let mut damaged = whole.clone();
    damaged[10..60].fill(0xff);
    std::fs::write(at("damaged.parquet"), damaged).unwrap();
    for (input, says) in [
        ("c-*.parquet", &["c-1.parquet, row 1: ", "nobody"][..]),
        ("torn.parquet", &["torn.parquet: ", "no complete Parquet file", "download or write it again"]),
        ("empty.parquet", &["empty.parquet: ", "no complete Parquet file"]),
        ("damaged.parquet", &["damaged.parquet", "damaged"]),
        ("x-*.parquet", &["x-*.parquet: no file fits"]),
    ] {
        let options = options(&ground, input);
        let early = match options.check_output(&RealFiles::new()).await {
            Ok(_) => options.check_rows(&ground.names()).await,
            Err(error) => Err(error),
        };
        let refused = [early.unwrap_err(), ground.collect(options).await.unwrap_err()];
        for refused in refused.map(|error| error.to_string()) {
            assert!(says.iter().all(|words| refused.contains(words)), "{input}: {refused}");
        }
    }
    let mut with_seed = options(&ground, "b-*.parquet");
    with_seed.materialize.agent_map.insert("agent".to_owned(), "absent".to_owned());
    let refused = ground.collect(with_seed).await.unwrap_err().to_string();
    assert!(refused.contains("b-1.parquet, row 1"), "{refused}");
}

/// Runs only if `GYM_DATA_PYTHON` names an interpreter with Arrow.
#[tokio::test]
async fn the_files_of_arrows_own_writer_are_read_with_every_kind_of_column() {
    let Some(python) = std::env::var_os("GYM_DATA_PYTHON") else {
        println!("NOT RUN: GYM_DATA_PYTHON names no interpreter");
        return;
    };
    let ground = Ground::new(&[]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python/data_peer.py");
    let output =
        std::process::Command::new(python).arg(script).arg("parquet").arg(ground.folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected: Vec<Map<String, Value>> =
        std::str::from_utf8(&output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let options = options(&ground, "train-*.parquet");
    ground.collect(options.clone()).await.unwrap();
    let text = std::fs::read_to_string(OutputFiles::beside(&options.output).materialized).unwrap();
    let mut rows = Vec::new();
    for line in text.lines() {
        let raw: std::collections::BTreeMap<String, &RawValue> = serde_json::from_str(line).unwrap();
        let mut row: Map<String, Value> = serde_json::from_str(line).unwrap();
        for key in ["price", "whole"] {
            if let Some(raw) = raw.get(key) {
                row.insert(key.to_owned(), raw.get().into());
            }
        }
        row.retain(|key, _| !key.starts_with("_ng_"));
        rows.push(row);
    }
    assert_eq!(rows.len(), expected.len());
    for (row, expected) in rows.iter().zip(&expected) {
        for (key, value) in expected {
            assert_eq!(row.get(key), Some(value), "{key}");
        }
        assert_eq!(row.keys().collect::<std::collections::BTreeSet<_>>(), expected.keys().collect(), "the columns");
    }
}
