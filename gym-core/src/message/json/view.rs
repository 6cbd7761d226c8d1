//! Deserializes a type from an indexed object: parses the keys that the type names, and skips the others.

use serde::de::value::BorrowedStrDeserializer;
use serde::de::{Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};

use super::object::RawObject;
use super::scan::Field;
use crate::base::error;

impl RawObject {
    /// Deserializes the keys that `T` names; other keys cost nothing.
    ///
    /// # Errors
    /// `InvalidArgument` if a key that `T` requires is absent or has another type.
    pub fn view<T: DeserializeOwned>(&self) -> error::Result<T> {
        view(self).map_err(|error| error::Error::invalid("the object cannot be read").caused_by(error))
    }
}

type Result<T> = std::result::Result<T, serde_json::Error>;

fn view<'de, T: Deserialize<'de>>(object: &'de RawObject) -> Result<T> {
    T::deserialize(Object(object))
}

#[derive(Clone, Copy)]
struct Object<'de>(&'de RawObject);

impl<'de> Object<'de> {
    fn text(self) -> Value<'de> {
        Value(self.0.text())
    }
}

impl<'de> Deserializer<'de> for Object<'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_map(Fields { object: self.0, next: 0 })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_some(self)
    }

    /// Handles `RawValue` too, which serde_json recognizes by the name of this newtype.
    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value> {
        self.text().deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        self.text().deserialize_enum(name, variants, visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map struct identifier
    }
}

struct Fields<'de> {
    object: &'de RawObject,
    next: usize,
}

impl<'de> Fields<'de> {
    fn current(&self) -> Option<&'de Field> {
        self.object.fields().get(self.next)
    }
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>> {
        let Some(field) = self.current() else { return Ok(None) };
        seed.deserialize(BorrowedStrDeserializer::<serde_json::Error>::new(self.object.key(field))).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value> {
        let field = self.current().ok_or_else(|| serde_json::Error::custom("a value was asked for before its key"))?;
        self.next += 1;
        seed.deserialize(Value(&self.object.text()[self.object.original(&field.value)]))
            .map_err(|error| serde_json::Error::custom(format!("`{}`: {error}", self.object.key(field))))
    }
}

/// The text of one value, parsed only if the type needs it.
struct Value<'de>(&'de [u8]);

macro_rules! parse {
    ($($method:ident($($argument:ident: $type:ty),*))*) => {$(
        fn $method<V: Visitor<'de>>(self, $($argument: $type,)* visitor: V) -> Result<V::Value> {
            serde_json::Deserializer::from_slice(self.0).$method($($argument,)* visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Value<'de> {
    type Error = serde_json::Error;

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_unit()
    }

    parse! {
        deserialize_any() deserialize_bool()
        deserialize_i8() deserialize_i16() deserialize_i32() deserialize_i64() deserialize_i128()
        deserialize_u8() deserialize_u16() deserialize_u32() deserialize_u64() deserialize_u128()
        deserialize_f32() deserialize_f64() deserialize_char() deserialize_str() deserialize_string()
        deserialize_bytes() deserialize_byte_buf() deserialize_option() deserialize_unit()
        deserialize_unit_struct(name: &'static str) deserialize_newtype_struct(name: &'static str)
        deserialize_seq() deserialize_tuple(len: usize)
        deserialize_tuple_struct(name: &'static str, len: usize)
        deserialize_map() deserialize_struct(name: &'static str, fields: &'static [&'static str])
        deserialize_enum(name: &'static str, variants: &'static [&'static str])
        deserialize_identifier()
    }
}
