//! A deserializer in front of that of `serde_json`, for texts that may have marked numbers. All others are read by `serde_json` alone.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};
use serde_json::value::RawValue;

use super::Meaning;

/// Reads a value from JSON text, with numbers that are not finite.
///
/// # Errors
/// If the text is not JSON of a `T`.
pub fn read<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    if may_have_marks(text) { read_marked(text) } else { serde_json::from_slice(text) }
}

/// Returns `false` if no string of a JSON text begins with the mark. Most texts have no backslash at all.
fn may_have_marks(text: &[u8]) -> bool {
    let escape = memchr::memchr(b'\\', text);
    escape.is_some_and(|at| memchr::memmem::find(&text[at..], b"\\u0000").is_some())
}

#[cold]
fn read_marked<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    let mut text = serde_json::Deserializer::from_slice(text);
    let value = T::deserialize(Marked(&mut text))?;
    text.end()?;
    Ok(value)
}

/// A deserializer, or what it meets on its way: the marked strings that pass are numbers.
struct Marked<T>(T);

macro_rules! as_it_is {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method(visitor)
        })*
    };
}

macro_rules! with_marks {
    ($($method:ident($($name:ident: $type:ty),*))*) => {
        $(fn $method<V: Visitor<'de>>(self, $($name: $type,)* visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method($($name,)* Marked(visitor))
        })*
    };
}

/// Numbers are read from their text, which may be a marked string: `serde_json` reads no number from a string.
macro_rules! numbers {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            let text = <&RawValue>::deserialize(self.0)?.get();
            if text.starts_with('"') {
                let string: String = serde_json::from_str(text).map_err(D::Error::custom)?;
                if let Meaning::Number(number) = Meaning::of(&string) {
                    return visitor.visit_f64(number);
                }
            }
            serde_json::Deserializer::from_str(text).$method(visitor).map_err(D::Error::custom)
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Marked<D> {
    type Error = D::Error;

    numbers! { deserialize_f32 deserialize_f64 }

    as_it_is! {
        deserialize_bool
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_unit deserialize_identifier deserialize_ignored_any
    }

    with_marks! {
        deserialize_any()
        deserialize_char() deserialize_str() deserialize_string() deserialize_bytes() deserialize_byte_buf()
        deserialize_option()
        deserialize_unit_struct(name: &'static str)
        deserialize_newtype_struct(name: &'static str)
        deserialize_seq() deserialize_tuple(length: usize)
        deserialize_tuple_struct(name: &'static str, length: usize)
        deserialize_map()
        deserialize_struct(name: &'static str, fields: &'static [&'static str])
        deserialize_enum(name: &'static str, variants: &'static [&'static str])
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

macro_rules! visits {
    ($($method:ident($type:ty))*) => {
        $(fn $method<E: serde::de::Error>(self, value: $type) -> Result<V::Value, E> {
            self.0.$method(value)
        })*
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Marked<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    visits! {
        visit_bool(bool)
        visit_i8(i8) visit_i16(i16) visit_i32(i32) visit_i64(i64) visit_i128(i128)
        visit_u8(u8) visit_u16(u16) visit_u32(u32) visit_u64(u64) visit_u128(u128)
        visit_f32(f32) visit_f64(f64) visit_char(char)
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<V::Value, E> {
        match Meaning::of(value) {
            Meaning::Number(number) => self.0.visit_f64(number),
            Meaning::Text(text) => self.0.visit_str(text),
        }
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, value: &'de str) -> Result<V::Value, E> {
        match Meaning::of(value) {
            Meaning::Number(number) => self.0.visit_f64(number),
            Meaning::Text(text) => self.0.visit_borrowed_str(text),
        }
    }

    fn visit_bytes<E: serde::de::Error>(self, value: &[u8]) -> Result<V::Value, E> {
        match std::str::from_utf8(value).map(Meaning::of) {
            Ok(Meaning::Number(number)) => self.0.visit_f64(number),
            Ok(Meaning::Text(text)) => self.0.visit_bytes(text.as_bytes()),
            Err(_) => self.0.visit_bytes(value),
        }
    }

    fn visit_borrowed_bytes<E: serde::de::Error>(self, value: &'de [u8]) -> Result<V::Value, E> {
        match std::str::from_utf8(value).map(Meaning::of) {
            Ok(Meaning::Number(number)) => self.0.visit_f64(number),
            Ok(Meaning::Text(text)) => self.0.visit_borrowed_bytes(text.as_bytes()),
            Err(_) => self.0.visit_borrowed_bytes(value),
        }
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.0.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.0.visit_some(Marked(deserializer))
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.0.visit_unit()
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.0.visit_newtype_struct(Marked(deserializer))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(Marked(seq))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Marked(map))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.0.visit_enum(Marked(access))
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Marked<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Marked(deserializer))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Marked<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(Marked(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

/// Keys are never marked.
impl<'de, A: MapAccess<'de>> MapAccess<'de> for Marked<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.next_value_seed(Marked(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for Marked<A> {
    type Error = A::Error;
    type Variant = Marked<A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        self.0.variant_seed(seed).map(|(value, variant)| (value, Marked(variant)))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Marked<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.0.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.0.newtype_variant_seed(Marked(seed))
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.0.tuple_variant(length, Marked(visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.0.struct_variant(fields, Marked(visitor))
    }
}
