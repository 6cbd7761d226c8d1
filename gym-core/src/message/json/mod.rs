//! JSON text in its original form: indexed, spliced, and serialized on demand.

mod edit;
mod elided;
mod fields;
mod index;
mod lazy;
mod object;
mod rope;
mod scan;
mod view;

pub use edit::Edit;
pub use fields::{FieldEdit, JsonFields};
pub use index::JsonError;
pub use object::RawObject;
pub use rope::Rope;
pub use scan::{json_string, json_string_length, push_json_string};

#[cfg(test)]
mod tests;
