use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use super::{read, to_raw};
use crate::base::error::Code;
use crate::group::batch::safetensors::SafeTensors;
use crate::group::batch::{Batch, JsonRows, Payload};

/// A value of each kind that serde has.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Tree {
    Unit,
    Flag(bool),
    Whole(i64, u64),
    Letter(char),
    Text(String),
    Double(f64),
    Single(f32),
    Maybe(Option<f32>, Option<Box<Self>>),
    List(Vec<Self>),
    Named(BTreeMap<String, Self>),
    Numbered(BTreeMap<u8, (f64, f32)>),
    Fields { loss: f64, clip: Option<f32>, inner: Inner, rest: Box<Self> },
    Loose(Loose),
    Flat(Flat),
    Tagged(Vec<Tagged>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Inner(f32);

/// serde buffers these, and asks for any type.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Loose {
    Number(f64),
    Text(String),
    Many(Vec<Self>),
    Named(BTreeMap<String, Self>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Flat {
    mean: f32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    skipped: Option<f64>,
    #[serde(flatten)]
    rest: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Tagged {
    Loss { value: f64, at: Option<f32> },
    Inner(Flat),
    Nothing,
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["\0{0,3}(NaN|inf|-inf|null|)", "NaN|Infinity|nan|\"|\\\\u0000NaN", any::<String>()]
}

fn double() -> impl Strategy<Value = f64> {
    prop_oneof![any::<f64>(), Just(f64::NAN), Just(f64::INFINITY), Just(f64::NEG_INFINITY), Just(-0.0)]
}

fn single() -> impl Strategy<Value = f32> {
    prop_oneof![any::<f32>(), Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(-0.0)]
}

fn flat() -> impl Strategy<Value = Flat> {
    let rest = prop::collection::btree_map("[xyz]{1,2}", double(), 0..2);
    (single(), prop::option::of(double()), rest).prop_map(|(mean, skipped, rest)| Flat { mean, skipped, rest })
}

fn loose() -> impl Strategy<Value = Loose> {
    prop_oneof![double().prop_map(Loose::Number), text().prop_map(Loose::Text)].prop_recursive(3, 12, 4, |loose| {
        prop_oneof![
            prop::collection::vec(loose.clone(), 0..4).prop_map(Loose::Many),
            prop::collection::btree_map(text(), loose, 0..4).prop_map(Loose::Named),
        ]
    })
}

fn tagged() -> impl Strategy<Value = Tagged> {
    prop_oneof![
        (double(), prop::option::of(single())).prop_map(|(value, at)| Tagged::Loss { value, at }),
        flat().prop_map(Tagged::Inner),
        Just(Tagged::Nothing),
    ]
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![
        Just(Tree::Unit),
        any::<bool>().prop_map(Tree::Flag),
        any::<(i64, u64)>().prop_map(|(signed, unsigned)| Tree::Whole(signed, unsigned)),
        any::<char>().prop_map(Tree::Letter),
        text().prop_map(Tree::Text),
        double().prop_map(Tree::Double),
        single().prop_map(Tree::Single),
        prop::collection::btree_map(any::<u8>(), (double(), single()), 0..3).prop_map(Tree::Numbered),
        loose().prop_map(Tree::Loose),
        flat().prop_map(Tree::Flat),
        prop::collection::vec(tagged(), 0..3).prop_map(Tree::Tagged),
    ];
    leaf.prop_recursive(4, 32, 4, |tree| {
        let boxed = tree.clone().prop_map(Box::new);
        let fields = (double(), prop::option::of(single()), single(), boxed.clone());
        prop_oneof![
            (prop::option::of(single()), prop::option::of(boxed)).prop_map(|(clip, rest)| Tree::Maybe(clip, rest)),
            prop::collection::vec(tree.clone(), 0..4).prop_map(Tree::List),
            prop::collection::btree_map(text(), tree, 0..4).prop_map(Tree::Named),
            fields.prop_map(|(loss, clip, inner, rest)| Tree::Fields { loss, clip, inner: Inner(inner), rest }),
        ]
    })
}

proptest! {
    #[test]
    fn every_value_comes_back_with_its_numbers(sent in tree()) {
        let message = Payload::from(sent.clone()).to_message().unwrap();
        let head = message.head.to_bytes();
        // `null` for a number and the number itself differ as `Debug` prints them, two NaN do not.
        prop_assert_eq!(format!("{:?}", Payload::<Tree>::from_message(message).unwrap().value), format!("{sent:?}"));
        // As text: a `Value` would write the numbers again, as 64-bit floats.
        let plain = format!("{{\"value\":{}}}", serde_json::value::to_raw_value(&sent).unwrap());
        prop_assert!(head == plain || head.windows(6).any(|part| part == b"\\u0000"), "finite values are plain JSON");
    }
}

fn back<T: Serialize + DeserializeOwned>(value: &T) -> serde_json::Result<T> {
    read(to_raw(value).unwrap().get().as_bytes())
}

#[test]
fn marks_are_numbers_alone_and_texts_stay_texts() {
    let words = ["\0NaN", "\0inf", "\0-inf", "\0\0NaN", "\0\0\0-inf", "\0nan", "\0", "", "NaN", "\0NaN\0", "\0\0"];
    let words = words.map(str::to_owned).to_vec();
    assert_eq!(back(&(f64::NAN, words.clone())).unwrap().1, words);
    let named: BTreeMap<String, f32> = words.iter().map(|word| (word.clone(), f32::INFINITY)).collect();
    assert_eq!(back(&named).unwrap(), named, "keys are never marked");
    let text = to_raw(&f32::NAN).unwrap();
    for wrong in [
        read::<String>(text.get().as_bytes()).unwrap_err(),
        read::<char>(text.get().as_bytes()).unwrap_err(),
        read::<(i64,)>(format!("[{text}]").as_bytes()).unwrap_err(),
        read::<f64>(to_raw("\0NaN").unwrap().get().as_bytes()).unwrap_err(),
        read::<f64>(format!("{text} 1").as_bytes()).unwrap_err(),
        serde_json::from_str::<f64>(text.get()).unwrap_err(),
        serde_json::from_str::<Option<f64>>(text.get()).unwrap_err(),
    ] {
        assert!(wrong.is_data() || wrong.is_syntax(), "{wrong}");
    }
}

#[test]
fn text_that_a_value_passes_on_stays_bit_for_bit() {
    let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
    for text in ["[1E5, 12345678901234567890123]", r#"{"a":"\u0000\u0000NaN"}"#, r#""\u0000NaN""#] {
        let (nan, passed) = back(&(f64::NAN, raw(text))).unwrap();
        assert!(nan.is_nan());
        assert_eq!(passed.get(), text);
    }
    let value = json!({"a": [1.5, null, "\0NaN"], "b": 18_446_744_073_709_551_615_u64});
    assert_eq!(back(&(f64::NAN, value.clone())).unwrap().1, value);
}

#[test]
fn a_single_is_read_as_precisely_beside_a_mark() {
    // Rounded to a double first, it becomes another number.
    let text = br#"["\u0000NaN",1.00000017881393421514957253748434595763683319091796875001]"#;
    let plain: (f32,) =
        serde_json::from_slice(br"[1.00000017881393421514957253748434595763683319091796875001]").unwrap();
    assert_eq!(read::<(f32, f32)>(text).unwrap().1.to_bits(), plain.0.to_bits());
}

#[test]
fn a_key_that_is_not_finite_is_an_error_that_says_so() {
    #[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
    struct Key(u8);
    fn nan<S: serde::Serializer>(_: &u8, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(f64::NAN)
    }
    #[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
    struct NanKey(#[serde(serialize_with = "nan")] u8);
    assert!(Payload::from(BTreeMap::from([(Key(1), 2.0)])).to_message().is_ok());
    let error = Payload::from(BTreeMap::from([(NanKey(1), 2.0)])).to_message().unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("float key must be finite"), "{error}");
}

#[test]
fn json_rows_keep_their_numbers_also_in_files() {
    let rows = [Some(f32::NAN), None, Some(f32::NEG_INFINITY), Some(0.5)];
    let batch = Batch::empty().with("reward", JsonRows::from_values(rows).unwrap()).unwrap();
    let file = SafeTensors::from_batch(&batch).unwrap().encode().unwrap().to_bytes();
    let loaded = SafeTensors::decode(&file).unwrap().into_batch().unwrap();
    let message = Payload { value: (), batch: loaded }.to_message().unwrap();
    let received = Payload::<()>::from_message(message).unwrap().batch;
    let column = received.column("reward").unwrap().json().unwrap();
    let read: Vec<Option<f32>> = (0..4).map(|row| column.read(row).unwrap()).collect();
    assert_eq!(format!("{read:?}"), format!("{rows:?}"));
}
