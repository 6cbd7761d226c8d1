//! Deserializes a JSON value, keeps the path of a mismatch, and collects the keys that the type does not have.

use std::cell::RefCell;
use std::fmt;

use gym_core::server::bool_in_string;
use serde::de::value::StringDeserializer;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error as _, Expected, IntoDeserializer as _, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Value};

/// Whether strings can be numbers and booleans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// A string is a string.
    Strict,
    /// A string that spells the expected number or boolean is accepted.
    Lenient,
}

/// A key of the value that the type does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnknownKey {
    /// The keys and indexes to the key, outermost first.
    pub(crate) path: Vec<String>,
    /// The keys that the type has in its place.
    pub(crate) known: &'static [&'static str],
}

/// Collects the keys that no type reads while a value is deserialized.
///
/// Serde ignores the value of a field that a type does not have, so an ignored value is an unknown key. A type that flattens or is
/// untagged reads all keys; serde does not tell which of them it drops.
#[derive(Debug, Default)]
pub(super) struct KeyTrace(RefCell<TraceState>);

#[derive(Debug, Default)]
struct TraceState {
    path: Vec<String>,
    unknown: Vec<UnknownKey>,
}

impl KeyTrace {
    pub(super) fn into_unknown(self) -> Vec<UnknownKey> {
        self.0.into_inner().unknown
    }

    fn below<T>(&self, step: String, read: impl FnOnce() -> T) -> T {
        self.0.borrow_mut().path.push(step);
        let value = read();
        self.0.borrow_mut().path.pop();
        value
    }

    fn ignored(&self, known: &'static [&'static str]) {
        let mut state = self.0.borrow_mut();
        let TraceState { path, unknown } = &mut *state;
        if path.last().is_some_and(|key| !known.contains(&key.as_str())) {
            unknown.push(UnknownKey { path: path.clone(), known });
        }
    }
}

/// A JSON value that is deserialized, at any depth.
#[derive(Debug)]
pub(super) struct TypedValue<'a> {
    value: Value,
    spelling: Spelling,
    trace: &'a KeyTrace,
    /// The fields of the struct whose field this value is; `None` if it belongs to no struct.
    fields: Option<&'static [&'static str]>,
}

/// A mismatch: the message of serde_json, and the path.
#[derive(Debug)]
pub(super) struct Misfit {
    /// The keys and indexes to the value, innermost first.
    path: Vec<String>,
    error: Error,
}

impl Misfit {
    /// Returns the path from the outermost key, and the message.
    pub(super) fn into_parts(self) -> (Vec<String>, String) {
        let Self { mut path, error } = self;
        path.reverse();
        (path, error.to_string())
    }

    #[cold]
    fn below(mut self, step: impl Into<String>) -> Self {
        self.path.push(step.into());
        self
    }
}

impl From<Error> for Misfit {
    fn from(error: Error) -> Self {
        Self { path: Vec::new(), error }
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Misfit {}

impl serde::de::Error for Misfit {
    #[cold]
    fn custom<T: fmt::Display>(message: T) -> Self {
        Error::custom(message).into()
    }

    #[cold]
    fn invalid_type(unexpected: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Error::invalid_type(unexpected, expected).into()
    }

    #[cold]
    fn invalid_value(unexpected: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Error::invalid_value(unexpected, expected).into()
    }
}

fn unexpected(value: &Value) -> Unexpected<'_> {
    match value {
        Value::Null => Unexpected::Unit,
        Value::Bool(flag) => Unexpected::Bool(*flag),
        Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(number), _, _) => Unexpected::Unsigned(number),
            (_, Some(number), _) => Unexpected::Signed(number),
            (_, _, Some(number)) => Unexpected::Float(number),
            (None, None, None) => Unexpected::Other("number"),
        },
        Value::String(text) => Unexpected::Str(text),
        Value::Array(_) => Unexpected::Seq,
        Value::Object(_) => Unexpected::Map,
    }
}

fn visit_number<'de, V: Visitor<'de>>(number: &serde_json::Number, visitor: V) -> Result<V::Value, Misfit> {
    match (number.as_u64(), number.as_i64()) {
        (Some(number), _) => visitor.visit_u64(number),
        (None, Some(number)) => visitor.visit_i64(number),
        (None, None) => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
    }
}

impl<'a> TypedValue<'a> {
    pub(super) fn new(value: Value, spelling: Spelling, trace: &'a KeyTrace) -> Self {
        Self { value, spelling, trace, fields: None }
    }

    /// Returns the string if it can spell a value of another type.
    fn spelled(&self) -> Option<&str> {
        self.value.as_str().filter(|_| self.spelling == Spelling::Lenient)
    }

    fn visit_items<'de, V: Visitor<'de>>(
        items: Vec<Value>,
        spelling: Spelling,
        trace: &KeyTrace,
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        let count = items.len();
        let mut items = Items { rest: items.into_iter(), index: 0, spelling, trace };
        let value = visitor.visit_seq(&mut items)?;
        if items.rest.len() == 0 { Ok(value) } else { Err(Misfit::invalid_length(count, &"fewer elements in array")) }
    }

    fn visit_entries<'de, V: Visitor<'de>>(
        map: serde_json::Map<String, Value>,
        fields: Option<&'static [&'static str]>,
        spelling: Spelling,
        trace: &KeyTrace,
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        let count = map.len();
        let mut entries = Entries { rest: map.into_iter(), value: None, fields, spelling, trace };
        let value = visitor.visit_map(&mut entries)?;
        if entries.rest.len() == 0 { Ok(value) } else { Err(Misfit::invalid_length(count, &"fewer elements in map")) }
    }
}

macro_rules! numbers {
    ($($method:ident $type:ty => $visit:ident,)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
            if let Some(number) = self.spelled().and_then(|text| text.trim().parse::<$type>().ok()) {
                return visitor.$visit(number);
            }
            match &self.value {
                Value::Number(number) => visit_number(number, visitor),
                other => Err(Misfit::invalid_type(unexpected(other), &visitor)),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for TypedValue<'_> {
    type Error = Misfit;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(flag) => visitor.visit_bool(flag),
            Value::Number(number) => visit_number(&number, visitor),
            Value::String(text) => visitor.visit_string(text),
            Value::Array(items) => Self::visit_items(items, self.spelling, self.trace, visitor),
            Value::Object(map) => Self::visit_entries(map, None, self.spelling, self.trace, visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match (self.spelled().and_then(bool_in_string), &self.value) {
            (Some(flag), _) => visitor.visit_bool(flag),
            (None, Value::Bool(flag)) => visitor.visit_bool(*flag),
            (None, other) => Err(Misfit::invalid_type(unexpected(other), &visitor)),
        }
    }

    numbers! {
        deserialize_i8 i8 => visit_i8,
        deserialize_i16 i16 => visit_i16,
        deserialize_i32 i32 => visit_i32,
        deserialize_i64 i64 => visit_i64,
        deserialize_u8 u8 => visit_u8,
        deserialize_u16 u16 => visit_u16,
        deserialize_u32 u32 => visit_u32,
        deserialize_u64 u64 => visit_u64,
        deserialize_f32 f32 => visit_f32,
        deserialize_f64 f64 => visit_f64,
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        match self.value {
            Value::Object(map) => Self::visit_entries(map, Some(fields), self.spelling, self.trace, visitor),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        if let Some(fields) = self.fields {
            self.trace.ignored(fields);
        }
        visitor.visit_unit()
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Misfit> {
        visitor.visit_newtype_struct(self)
    }

    /// The content of a variant is deserialized strictly.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        match self.value {
            Value::String(variant) => visitor.visit_enum(Variant { variant, content: None, trace: self.trace }),
            Value::Object(map) => {
                let mut entries = map.into_iter();
                match (entries.next(), entries.next()) {
                    (Some((variant, content)), None) => {
                        visitor.visit_enum(Variant { variant, content: Some(content), trace: self.trace })
                    }
                    _ => Err(Misfit::invalid_value(Unexpected::Map, &"map with a single key")),
                }
            }
            other => Err(Misfit::invalid_type(unexpected(&other), &"string or map")),
        }
    }

    forward_to_deserialize_any! {
        i128 u128 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map identifier
    }
}

/// The items of a list.
struct Items<'a> {
    rest: std::vec::IntoIter<Value>,
    index: usize,
    spelling: Spelling,
    trace: &'a KeyTrace,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Misfit;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Misfit> {
        let Some(value) = self.rest.next() else { return Ok(None) };
        let index = self.index;
        self.index += 1;
        let typed = TypedValue::new(value, self.spelling, self.trace);
        let item = self.trace.below(index.to_string(), || seed.deserialize(typed));
        item.map(Some).map_err(|misfit| misfit.below(index.to_string()))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// The entries of a mapping.
struct Entries<'a> {
    rest: serde_json::map::IntoIter,
    value: Option<(String, Value)>,
    /// The fields of the struct; `None` if the entries belong to a map.
    fields: Option<&'static [&'static str]>,
    spelling: Spelling,
    trace: &'a KeyTrace,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Misfit;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Misfit> {
        let Some((key, value)) = self.rest.next() else { return Ok(None) };
        let read: StringDeserializer<Misfit> = key.clone().into_deserializer();
        match seed.deserialize(read) {
            Ok(read) => {
                self.value = Some((key, value));
                Ok(Some(read))
            }
            Err(misfit) => Err(misfit.below(key)),
        }
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Misfit> {
        let (key, value) = self.value.take().expect("a key was read before");
        let Self { fields, spelling, trace, .. } = *self;
        let typed = TypedValue { value, spelling, trace, fields };
        trace.below(key.clone(), || seed.deserialize(typed)).map_err(|misfit| misfit.below(key))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// A variant of an enum: a text, or a mapping with one key.
struct Variant<'a> {
    variant: String,
    content: Option<Value>,
    trace: &'a KeyTrace,
}

impl<'de> EnumAccess<'de> for Variant<'_> {
    type Error = Misfit;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), Misfit> {
        let read: StringDeserializer<Misfit> = self.variant.clone().into_deserializer();
        Ok((seed.deserialize(read)?, self))
    }
}

impl<'a> Variant<'a> {
    /// Returns the content, or an error if there is none.
    fn content(self, expected: &'static str) -> Result<(String, Value, &'a KeyTrace), Misfit> {
        match self.content {
            Some(content) => Ok((self.variant, content, self.trace)),
            None => Err(Misfit::invalid_type(Unexpected::UnitVariant, &expected).below(self.variant)),
        }
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Misfit;

    fn unit_variant(self) -> Result<(), Misfit> {
        match self.content {
            Some(content) => <()>::deserialize(TypedValue::new(content, Spelling::Strict, self.trace))
                .map_err(|misfit| misfit.below(self.variant)),
            None => Ok(()),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Misfit> {
        let (variant, content, trace) = self.content("newtype variant")?;
        let typed = TypedValue::new(content, Spelling::Strict, trace);
        trace.below(variant.clone(), || seed.deserialize(typed)).map_err(|misfit| misfit.below(variant))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Misfit> {
        let (variant, content, trace) = self.content("tuple variant")?;
        let read = trace.below(variant.clone(), || match content {
            Value::Array(items) if items.is_empty() => visitor.visit_unit(),
            Value::Array(items) => TypedValue::visit_items(items, Spelling::Strict, trace, visitor),
            other => Err(Misfit::invalid_type(unexpected(&other), &"tuple variant")),
        });
        read.map_err(|misfit| misfit.below(variant))
    }

    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Result<V::Value, Misfit> {
        let (variant, content, trace) = self.content("struct variant")?;
        let read = trace.below(variant.clone(), || match content {
            Value::Object(map) => TypedValue::visit_entries(map, Some(fields), Spelling::Strict, trace, visitor),
            other => Err(Misfit::invalid_type(unexpected(&other), &"struct variant")),
        });
        read.map_err(|misfit| misfit.below(variant))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Settings {
        flag: bool,
        count: Option<u32>,
        #[serde(default)]
        share: f64,
        name: String,
        #[serde(default)]
        nested: Vec<BTreeMap<String, bool>>,
    }

    fn read<T: for<'de> Deserialize<'de>>(value: Value) -> Result<T, Misfit> {
        T::deserialize(TypedValue::new(value, Spelling::Lenient, &KeyTrace::default()))
    }

    fn unknown<T: for<'de> Deserialize<'de>>(value: Value) -> Vec<(String, &'static [&'static str])> {
        let trace = KeyTrace::default();
        let _ = T::deserialize(TypedValue::new(value, Spelling::Lenient, &trace));
        trace.into_unknown().into_iter().map(|key| (key.path.join("."), key.known)).collect()
    }

    #[test]
    fn a_string_that_spells_the_expected_type_is_accepted_and_a_string_stays_a_string() {
        let value =
            json!({"flag": "False", "count": "8", "share": "0.5", "name": "7", "nested": [{"a": "on", "b": true}]});
        let nested = vec![BTreeMap::from([("a".to_owned(), true), ("b".to_owned(), true)])];
        let expected = Settings { flag: false, count: Some(8), share: 0.5, name: "7".to_owned(), nested };
        assert_eq!(read::<Settings>(value).unwrap(), expected);
        let value = json!({"flag": true, "count": null, "name": "n"});
        let expected = Settings { flag: true, count: None, share: 0.0, name: "n".to_owned(), nested: Vec::new() };
        assert_eq!(read::<Settings>(value).unwrap(), expected);
    }

    #[test]
    fn a_string_that_does_not_spell_the_expected_type_is_rejected() {
        for (key, value, why) in [
            ("flag", json!("maybe"), "invalid type: string \"maybe\", expected a boolean"),
            ("count", json!("-1"), "invalid type: string \"-1\", expected u32"),
            ("count", json!(-1), "invalid value: integer `-1`, expected u32"),
            ("name", json!(7), "expected a string"),
        ] {
            let mut settings = json!({"flag": true, "count": 1, "name": "n"});
            settings[key] = value;
            let error = read::<Settings>(settings).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Shape {
        Point,
        Circle(f64),
        Line(u8, u8),
        Box { width: u8 },
    }

    #[derive(Debug, Deserialize)]
    struct Drawing {
        #[serde(default)]
        shapes: Vec<Shape>,
        #[serde(default)]
        named: BTreeMap<String, Settings>,
        #[serde(default)]
        pair: Option<(u8, u8)>,
    }

    #[test]
    fn every_form_of_an_enum_is_deserialized_as_by_serde_json() {
        let value =
            json!({"shapes": ["point", {"circle": 0.5}, {"line": [1, 2]}, {"box": {"width": 3}}], "pair": [1, 2]});
        let drawing = read::<Drawing>(value).unwrap();
        let shapes = vec![Shape::Point, Shape::Circle(0.5), Shape::Line(1, 2), Shape::Box { width: 3 }];
        assert_eq!((drawing.shapes, drawing.named.len(), drawing.pair), (shapes, 0, Some((1, 2))));
        for value in [
            json!("oval"),
            json!({"point": 1}),
            json!("circle"),
            json!({"circle": "0.5"}),
            json!("line"),
            json!({"line": 1}),
            json!({"line": [1]}),
            json!({"box": 1}),
            json!({"box": {}}),
            json!({"box": {"width": 300}}),
            json!({"box": 1, "point": null}),
            json!({}),
            json!(3),
            json!(null),
        ] {
            let expected = serde_json::from_value::<Shape>(value.clone()).unwrap_err().to_string();
            let misfit = read::<Shape>(value.clone()).unwrap_err();
            assert_eq!(misfit.into_parts().1, expected, "{value}");
        }
    }

    #[test]
    fn every_key_that_a_type_does_not_have_is_collected_at_any_depth() {
        let settings: &[&str] = &["flag", "count", "share", "name", "nested"];
        let drawing: &[&str] = &["shapes", "named", "pair"];
        let good = json!({"flag": true, "nmae": 1, "name": "n", "nested": [{"any": true}]});
        let value = json!({
            "named": {"a": good, "any": good}, "shapes": [{"box": {"width": 1, "height": 2}}], "shaeps": {"flag": 1},
        });
        let mut found = unknown::<Drawing>(value);
        found.sort();
        let expected: [(String, &[&str]); 4] = [
            ("named.a.nmae".to_owned(), settings),
            ("named.any.nmae".to_owned(), settings),
            ("shaeps".to_owned(), drawing),
            ("shapes.0.box.height".to_owned(), &["width"]),
        ];
        assert_eq!(found, expected);
        assert_eq!(unknown::<Settings>(json!({"falg": true})), [("falg".to_owned(), settings)], "also of a mismatch");
    }

    #[test]
    fn a_type_that_takes_any_key_has_no_unknown_ones() {
        #[derive(Deserialize)]
        struct Flat {
            #[serde(rename = "first", alias = "one")]
            _first: serde::de::IgnoredAny,
            #[serde(flatten)]
            _rest: BTreeMap<String, Value>,
        }
        #[derive(Deserialize)]
        struct Skipped {
            #[serde(rename = "first", alias = "one")]
            _first: serde::de::IgnoredAny,
        }
        assert_eq!(unknown::<Flat>(json!({"first": 1, "second": {"third": 3}})), []);
        assert_eq!(unknown::<Value>(json!({"first": 1})), []);
        assert_eq!(unknown::<BTreeMap<String, serde::de::IgnoredAny>>(json!({"first": 1})), []);
        assert_eq!(unknown::<Skipped>(json!({"one": 1})), []);
    }

    #[test]
    fn a_mismatch_has_the_path_of_the_innermost_value() {
        let good = json!({"flag": true, "count": 1, "name": "n"});
        let with = |key: &str, value: Value| {
            let mut settings = good.clone();
            settings[key] = value;
            json!({"named": {"a": good, "b": settings}})
        };
        for (value, path) in [
            (with("flag", json!("maybe")), vec!["named", "b", "flag"]),
            (with("nested", json!([{}, {"x": 1, "y": []}])), vec!["named", "b", "nested", "1", "x"]),
            (with("nested", json!(3)), vec!["named", "b", "nested"]),
            (json!({"named": {"b": {"flag": true}}}), vec!["named", "b"]),
            (json!({"shapes": ["point", "oval"]}), vec!["shapes", "1"]),
            (json!({"shapes": [{"box": {"width": -1}}]}), vec!["shapes", "0", "box", "width"]),
            (json!({"shapes": [{"line": [1, "x"]}]}), vec!["shapes", "0", "line", "1"]),
            (json!({"pair": [1, 2, 3]}), vec!["pair"]),
            (json!([1]), vec!["0"]),
        ] {
            let (found, message) = read::<Drawing>(value.clone()).unwrap_err().into_parts();
            assert_eq!(found, path, "{value}: {message}");
        }
    }
}
