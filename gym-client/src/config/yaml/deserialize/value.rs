//! Deserializes a JSON value, and keeps the path of a mismatch.

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

/// A JSON value that is deserialized, at any depth.
#[derive(Debug)]
pub(super) struct TypedValue {
    value: Value,
    spelling: Spelling,
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

impl TypedValue {
    pub(super) fn new(value: Value, spelling: Spelling) -> Self {
        Self { value, spelling }
    }

    /// Returns the string if it can spell a value of another type.
    fn spelled(&self) -> Option<&str> {
        self.value.as_str().filter(|_| self.spelling == Spelling::Lenient)
    }

    fn visit_items<'de, V: Visitor<'de>>(
        items: Vec<Value>,
        spelling: Spelling,
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        let count = items.len();
        let mut items = Items { rest: items.into_iter(), index: 0, spelling };
        let value = visitor.visit_seq(&mut items)?;
        if items.rest.len() == 0 { Ok(value) } else { Err(Misfit::invalid_length(count, &"fewer elements in array")) }
    }

    fn visit_entries<'de, V: Visitor<'de>>(
        map: serde_json::Map<String, Value>,
        spelling: Spelling,
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        let count = map.len();
        let mut entries = Entries { rest: map.into_iter(), value: None, spelling };
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

impl<'de> Deserializer<'de> for TypedValue {
    type Error = Misfit;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(flag) => visitor.visit_bool(flag),
            Value::Number(number) => visit_number(&number, visitor),
            Value::String(text) => visitor.visit_string(text),
            Value::Array(items) => Self::visit_items(items, self.spelling, visitor),
            Value::Object(map) => Self::visit_entries(map, self.spelling, visitor),
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
            Value::String(variant) => visitor.visit_enum(Variant { variant, content: None }),
            Value::Object(map) => {
                let mut entries = map.into_iter();
                match (entries.next(), entries.next()) {
                    (Some((variant, content)), None) => visitor.visit_enum(Variant { variant, content: Some(content) }),
                    _ => Err(Misfit::invalid_value(Unexpected::Map, &"map with a single key")),
                }
            }
            other => Err(Misfit::invalid_type(unexpected(&other), &"string or map")),
        }
    }

    forward_to_deserialize_any! {
        i128 u128 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// The items of a list.
struct Items {
    rest: std::vec::IntoIter<Value>,
    index: usize,
    spelling: Spelling,
}

impl<'de> SeqAccess<'de> for Items {
    type Error = Misfit;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Misfit> {
        let Some(value) = self.rest.next() else { return Ok(None) };
        let index = self.index;
        self.index += 1;
        let item = seed.deserialize(TypedValue::new(value, self.spelling));
        item.map(Some).map_err(|misfit| misfit.below(index.to_string()))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// The entries of a mapping.
struct Entries {
    rest: serde_json::map::IntoIter,
    value: Option<(String, Value)>,
    spelling: Spelling,
}

impl<'de> MapAccess<'de> for Entries {
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
        seed.deserialize(TypedValue::new(value, self.spelling)).map_err(|misfit| misfit.below(key))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// A variant of an enum: a text, or a mapping with one key.
struct Variant {
    variant: String,
    content: Option<Value>,
}

impl<'de> EnumAccess<'de> for Variant {
    type Error = Misfit;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), Misfit> {
        let read: StringDeserializer<Misfit> = self.variant.clone().into_deserializer();
        Ok((seed.deserialize(read)?, self))
    }
}

impl Variant {
    /// Returns the content, or an error if there is none.
    fn content(self, expected: &'static str) -> Result<(String, Value), Misfit> {
        match self.content {
            Some(content) => Ok((self.variant, content)),
            None => Err(Misfit::invalid_type(Unexpected::UnitVariant, &expected).below(self.variant)),
        }
    }
}

impl<'de> VariantAccess<'de> for Variant {
    type Error = Misfit;

    fn unit_variant(self) -> Result<(), Misfit> {
        match self.content {
            Some(content) => <()>::deserialize(TypedValue::new(content, Spelling::Strict))
                .map_err(|misfit| misfit.below(self.variant)),
            None => Ok(()),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Misfit> {
        let (variant, content) = self.content("newtype variant")?;
        seed.deserialize(TypedValue::new(content, Spelling::Strict)).map_err(|misfit| misfit.below(variant))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Misfit> {
        let (variant, content) = self.content("tuple variant")?;
        let read = match content {
            Value::Array(items) if items.is_empty() => visitor.visit_unit(),
            Value::Array(items) => TypedValue::visit_items(items, Spelling::Strict, visitor),
            other => Err(Misfit::invalid_type(unexpected(&other), &"tuple variant")),
        };
        read.map_err(|misfit| misfit.below(variant))
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value, Misfit> {
        let (variant, content) = self.content("struct variant")?;
        let read = match content {
            Value::Object(map) => TypedValue::visit_entries(map, Spelling::Strict, visitor),
            other => Err(Misfit::invalid_type(unexpected(&other), &"struct variant")),
        };
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

    fn lenient(value: Value) -> TypedValue {
        TypedValue::new(value, Spelling::Lenient)
    }

    #[test]
    fn a_string_that_spells_the_expected_type_is_accepted_and_a_string_stays_a_string() {
        let value =
            json!({"flag": "False", "count": "8", "share": "0.5", "name": "7", "nested": [{"a": "on", "b": true}]});
        let nested = vec![BTreeMap::from([("a".to_owned(), true), ("b".to_owned(), true)])];
        let expected = Settings { flag: false, count: Some(8), share: 0.5, name: "7".to_owned(), nested };
        assert_eq!(Settings::deserialize(lenient(value)).unwrap(), expected);
        let value = json!({"flag": true, "count": null, "name": "n"});
        let expected = Settings { flag: true, count: None, share: 0.0, name: "n".to_owned(), nested: Vec::new() };
        assert_eq!(Settings::deserialize(lenient(value)).unwrap(), expected);
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
            let error = Settings::deserialize(lenient(settings)).unwrap_err().to_string();
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
        let drawing = Drawing::deserialize(lenient(value)).unwrap();
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
            let misfit = Shape::deserialize(lenient(value.clone())).unwrap_err();
            assert_eq!(misfit.into_parts().1, expected, "{value}");
        }
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
            let (found, message) = Drawing::deserialize(lenient(value.clone())).unwrap_err().into_parts();
            assert_eq!(found, path, "{value}: {message}");
        }
    }
}
