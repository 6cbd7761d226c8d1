//! The parts of the Responses API that agents and verifiers read. All other parts are forwarded unchanged.
//!
//! Source: OpenAI's Responses API reference, and NeMo Gym's training fields on output items.

mod ending;

use std::fmt;

pub use ending::ResponseEnd;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::base::error::Result;
use crate::message::RawObject;

/// A complete response of a model, unchanged.
///
/// ```
/// use gym_core::{ModelResponse, RawObject};
///
/// let said = r#"{"output": [{"type": "message", "content": [{"type": "output_text", "text": "4"}]}]}"#;
/// let response = ModelResponse(RawObject::parse(said)?);
/// assert_eq!(response.last_text()?, "4");
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelResponse(pub RawObject);

impl ModelResponse {
    /// Parses the parts that agents and verifiers use. Training arrays of large responses are skipped.
    ///
    /// # Errors
    /// `InvalidArgument` if `output` is not a list of items with a `type`.
    pub fn outline(&self) -> Result<ResponseOutline> {
        self.0.outline()
    }

    /// Returns the text of all output messages, in order, joined without a separator.
    ///
    /// # Errors
    /// The errors of [`ModelResponse::outline`].
    pub fn output_text(&self) -> Result<String> {
        Ok(self.outline()?.output_text())
    }

    /// Returns the text of the last message that has text, which most verifiers score.
    ///
    /// # Errors
    /// The errors of [`ModelResponse::outline`].
    pub fn last_text(&self) -> Result<String> {
        Ok(self.outline()?.last_text())
    }
}

/// The parts of a response that agents and verifiers use.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct ResponseOutline {
    /// Items in order.
    #[serde(default)]
    pub output: Vec<OutputItem>,
    /// The reason why the response is incomplete, if it is.
    #[serde(default)]
    pub incomplete_details: Option<IncompleteDetails>,
}

impl ResponseOutline {
    /// Returns the text of all output messages, in order, joined without a separator.
    #[must_use]
    pub fn output_text(&self) -> String {
        self.output.iter().filter_map(OutputItem::text).collect()
    }

    /// Returns the text of the last message that has text, or an empty string.
    #[must_use]
    pub fn last_text(&self) -> String {
        self.output.iter().rev().find_map(OutputItem::text).unwrap_or_default()
    }

    /// Returns the function calls, in order.
    pub fn function_calls(&self) -> impl Iterator<Item = &FunctionCall> {
        self.output.iter().filter_map(|item| match item {
            OutputItem::FunctionCall(call) => Some(call),
            _ => None,
        })
    }
}

/// The object `incomplete_details`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct IncompleteDetails {
    /// The reason: `max_output_tokens` or `content_filter`.
    #[serde(default)]
    pub reason: Option<String>,
}

/// One item of `output` (or of `input`).
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// A message.
    Message(OutputMessage),
    /// A tool call that the model requests.
    FunctionCall(FunctionCall),
    /// The output of a tool call.
    FunctionCallOutput(FunctionCallOutput),
    /// The model's reasoning.
    Reasoning(Ignored),
    /// Any other item.
    #[serde(other)]
    Other,
}

/// An item whose content is not read.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct Ignored {}

impl OutputItem {
    /// Returns the text of a message, or `None` for other items and for messages without text.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        let Self::Message(message) = self else { return None };
        let text: String = match &message.content {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.iter().filter_map(|part| part.text.as_deref()).collect(),
        };
        (!text.is_empty()).then_some(text)
    }
}

/// A message.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct OutputMessage {
    /// The role of the speaker, such as `assistant`.
    #[serde(default)]
    pub role: String,
    /// The content.
    #[serde(default)]
    pub content: Content,
}

/// The content of a message: a string or a list of parts.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A string.
    Text(String),
    /// Parts; images and refusals have no text.
    Parts(Vec<ContentPart>),
}

impl Default for Content {
    fn default() -> Self {
        Self::Parts(Vec::new())
    }
}

/// Chooses the variant by the type of the value. An untagged enum would try each variant on a copy, which is the most expensive
/// part of parsing a small response.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<Content, E> {
        Ok(Content::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Content, E> {
        Ok(Content::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
    }
}

/// One part of a message.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct ContentPart {
    /// The type, such as `output_text`, `input_text` or `refusal`.
    #[serde(default, rename = "type")]
    pub kind: String,
    /// The text, if the part has text.
    #[serde(default)]
    pub text: Option<String>,
}

/// A tool call that the model requests.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct FunctionCall {
    /// Identifies the call; its output repeats it.
    #[serde(default)]
    pub call_id: String,
    /// The name of the tool.
    #[serde(default)]
    pub name: String,
    /// The arguments as the model wrote them: JSON, unless the model made an error.
    #[serde(default)]
    pub arguments: String,
}

/// The output of a tool call.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct FunctionCallOutput {
    /// Identifies the call.
    #[serde(default)]
    pub call_id: String,
    /// The output: a string, or parts.
    #[serde(default)]
    pub output: serde_json::Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_read_for_text_and_calls_and_unknown_items_are_skipped() {
        let response = ModelResponse(
            RawObject::parse(
                r#"{"id":"r","output":[
                {"type":"reasoning","summary":[]},
                {"type":"message","role":"assistant","content":[{"type":"output_text","text":"a"},{"type":"refusal","refusal":"no"}]},
                {"type":"function_call","call_id":"c1","name":"add","arguments":"{}"},
                {"type":"web_search_call","id":"w"},
                {"type":"message","role":"assistant","content":[]}
            ],"incomplete_details":null}"#,
            )
            .unwrap(),
        );
        let outline = response.outline().unwrap();
        assert_eq!((outline.output_text(), outline.last_text()), ("a".into(), "a".into()));
        assert_eq!(outline.function_calls().next().unwrap().name, "add");
        assert_eq!(outline.output[3], OutputItem::Other);
    }

    #[test]
    fn content_is_a_text_or_parts_and_nothing_else() {
        let read =
            |content: &str| serde_json::from_str::<OutputItem>(&format!(r#"{{"content":{content},"type":"message"}}"#));
        for content in [r#""a""#, r#""\u0061""#, r#"[{"text":"a","type":"output_text","annotations":[{}]}]"#] {
            assert_eq!(read(content).unwrap().text().as_deref(), Some("a"), "{content}");
        }
        for content in ["1", "null", "{}", "[1]"] {
            assert!(read(content).is_err(), "{content}");
        }
    }
}
