//! A serializer in front of that of `serde_json`. It adds two comparisons: of a number, whether it is finite, and of a string, whether
//! it begins with the mark.

use serde::Serialize;
use serde::ser::{
    SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple, SerializeTupleStruct,
    SerializeTupleVariant, Serializer,
};
use serde_json::value::RawValue;

use super::{MARK, NOT_FINITE};

/// Writes a value as JSON text that [`read`](super::read) restores, for those who pass text on.
///
/// # Errors
/// If the value cannot be written as JSON.
pub fn to_raw<T: Serialize + ?Sized>(value: &T) -> serde_json::Result<Box<RawValue>> {
    serde_json::value::to_raw_value(&Marking(value))
}

/// A value whose numbers are marked if they are not finite; and the serializers that it meets.
pub(in crate::group) struct Marking<T>(pub(in crate::group) T);

impl<T: Serialize + ?Sized> Serialize for Marking<&T> {
    #[inline]
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(Marking(serializer))
    }
}

/// Returns the word of a number that is not finite.
#[cold]
fn marked(number: f64) -> String {
    format!("{MARK}{number}")
}

/// Returns the text in a form that is not mistaken for a number.
#[cold]
fn escaped(text: &str) -> String {
    let rest = text.trim_start_matches(MARK);
    let ambiguous = NOT_FINITE.iter().any(|(word, _)| *word == rest);
    if ambiguous { format!("{MARK}{text}") } else { text.to_owned() }
}

macro_rules! as_it_is {
    ($($method:ident($type:ty))*) => {
        $(#[inline]
        fn $method(self, value: $type) -> Result<S::Ok, S::Error> {
            self.0.$method(value)
        })*
    };
}

impl<S: Serializer> Serializer for Marking<S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Marking<S::SerializeSeq>;
    type SerializeTuple = Marking<S::SerializeTuple>;
    type SerializeTupleStruct = Marking<S::SerializeTupleStruct>;
    type SerializeTupleVariant = Marking<S::SerializeTupleVariant>;
    type SerializeMap = Marking<S::SerializeMap>;
    type SerializeStruct = Marking<S::SerializeStruct>;
    type SerializeStructVariant = Marking<S::SerializeStructVariant>;

    as_it_is! {
        serialize_bool(bool)
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64) serialize_i128(i128)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64) serialize_u128(u128)
        serialize_char(char) serialize_bytes(&[u8]) serialize_unit_struct(&'static str)
    }

    #[inline]
    fn serialize_f32(self, value: f32) -> Result<S::Ok, S::Error> {
        if value.is_finite() { self.0.serialize_f32(value) } else { self.0.serialize_str(&marked(value.into())) }
    }

    #[inline]
    fn serialize_f64(self, value: f64) -> Result<S::Ok, S::Error> {
        if value.is_finite() { self.0.serialize_f64(value) } else { self.0.serialize_str(&marked(value)) }
    }

    #[inline]
    fn serialize_str(self, value: &str) -> Result<S::Ok, S::Error> {
        if value.starts_with(MARK) { self.0.serialize_str(&escaped(value)) } else { self.0.serialize_str(value) }
    }

    #[inline]
    fn serialize_none(self) -> Result<S::Ok, S::Error> {
        self.0.serialize_none()
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.0.serialize_some(&Marking(value))
    }

    #[inline]
    fn serialize_unit(self) -> Result<S::Ok, S::Error> {
        self.0.serialize_unit()
    }

    #[inline]
    fn serialize_unit_variant(self, name: &'static str, at: u32, variant: &'static str) -> Result<S::Ok, S::Error> {
        self.0.serialize_unit_variant(name, at, variant)
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        self.0.serialize_newtype_struct(name, &Marking(value))
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.0.serialize_newtype_variant(name, at, variant, &Marking(value))
    }

    #[inline]
    fn serialize_seq(self, length: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        self.0.serialize_seq(length).map(Marking)
    }

    #[inline]
    fn serialize_tuple(self, length: usize) -> Result<Self::SerializeTuple, S::Error> {
        self.0.serialize_tuple(length).map(Marking)
    }

    #[inline]
    fn serialize_tuple_struct(self, name: &'static str, length: usize) -> Result<Self::SerializeTupleStruct, S::Error> {
        self.0.serialize_tuple_struct(name, length).map(Marking)
    }

    #[inline]
    fn serialize_tuple_variant(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        self.0.serialize_tuple_variant(name, at, variant, length).map(Marking)
    }

    #[inline]
    fn serialize_map(self, length: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        self.0.serialize_map(length).map(Marking)
    }

    #[inline]
    fn serialize_struct(self, name: &'static str, length: usize) -> Result<Self::SerializeStruct, S::Error> {
        self.0.serialize_struct(name, length).map(Marking)
    }

    #[inline]
    fn serialize_struct_variant(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        self.0.serialize_struct_variant(name, at, variant, length).map(Marking)
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

macro_rules! elements {
    ($($of:ident.$method:ident)*) => {
        $(impl<S: $of> $of for Marking<S> {
            type Ok = S::Ok;
            type Error = S::Error;

            #[inline]
            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
                self.0.$method(&Marking(value))
            }

            #[inline]
            fn end(self) -> Result<S::Ok, S::Error> {
                self.0.end()
            }
        })*
    };
}

elements! {
    SerializeSeq.serialize_element
    SerializeTuple.serialize_element
    SerializeTupleStruct.serialize_field
    SerializeTupleVariant.serialize_field
}

macro_rules! fields {
    ($($of:ident)*) => {
        $(impl<S: $of> $of for Marking<S> {
            type Ok = S::Ok;
            type Error = S::Error;

            #[inline]
            fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), S::Error> {
                self.0.serialize_field(key, &Marking(value))
            }

            #[inline]
            fn skip_field(&mut self, key: &'static str) -> Result<(), S::Error> {
                self.0.skip_field(key)
            }

            #[inline]
            fn end(self) -> Result<S::Ok, S::Error> {
                self.0.end()
            }
        })*
    };
}

fields! { SerializeStruct SerializeStructVariant }

/// Keys are not marked: a reader of keys could not tell a number from its text.
impl<S: SerializeMap> SerializeMap for Marking<S> {
    type Ok = S::Ok;
    type Error = S::Error;

    #[inline]
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
        self.0.serialize_key(key)
    }

    #[inline]
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        self.0.serialize_value(&Marking(value))
    }

    #[inline]
    fn serialize_entry<K: Serialize + ?Sized, T: Serialize + ?Sized>(
        &mut self,
        key: &K,
        value: &T,
    ) -> Result<(), S::Error> {
        self.0.serialize_entry(key, &Marking(value))
    }

    #[inline]
    fn end(self) -> Result<S::Ok, S::Error> {
        self.0.end()
    }
}
