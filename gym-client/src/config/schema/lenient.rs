//! Deserializes settings as leniently as NeMo Gym's servers do: where a number or boolean is expected, a string that
//! spells one is accepted. Configurations depend on this, because `${oc.env:NAME,false}` is always a string.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Value};

/// A JSON value that is deserialized leniently, at any depth.
#[derive(Debug)]
pub(crate) struct LenientValue(pub(crate) Value);

/// Parses a boolean in Python's spellings, in any case.
fn boolean(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Some(true),
        "0" | "false" | "f" | "no" | "n" | "off" => Some(false),
        _ => None,
    }
}

macro_rules! numbers {
    ($($method:ident $type:ty => $visit:ident,)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.0.as_str().and_then(|text| text.trim().parse::<$type>().ok()) {
                Some(number) => visitor.$visit(number),
                None => self.0.$method(visitor),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for LenientValue {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(LenientValue));
                let value = visitor.visit_seq(&mut items)?;
                items.end().map(|()| value)
            }
            Value::Object(map) => {
                let mut entries = MapDeserializer::new(map.into_iter().map(|(key, value)| (key, Self(value))));
                let value = visitor.visit_map(&mut entries)?;
                entries.end().map(|()| value)
            }
            plain => plain.deserialize_any(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.as_str().and_then(boolean) {
            Some(flag) => visitor.visit_bool(flag),
            None => self.0.deserialize_bool(visitor),
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

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        i128 u128 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Error> for LenientValue {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
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

    #[test]
    fn a_string_that_spells_the_expected_type_is_accepted_and_a_string_stays_a_string() {
        let value =
            json!({"flag": "False", "count": "8", "share": "0.5", "name": "7", "nested": [{"a": "on", "b": true}]});
        let nested = vec![BTreeMap::from([("a".to_owned(), true), ("b".to_owned(), true)])];
        let expected = Settings { flag: false, count: Some(8), share: 0.5, name: "7".to_owned(), nested };
        assert_eq!(Settings::deserialize(LenientValue(value)).unwrap(), expected);
        let value = json!({"flag": true, "count": null, "name": "n"});
        let expected = Settings { flag: true, count: None, share: 0.0, name: "n".to_owned(), nested: Vec::new() };
        assert_eq!(Settings::deserialize(LenientValue(value)).unwrap(), expected);
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
            let error = Settings::deserialize(LenientValue(settings)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
