//! Tools: their declaration in code, and their description for the model.

use crate::base::error::Result;
use crate::message::{RawObject, Response};
use crate::server::arguments::{Argument, Arguments};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// A tool as a model sees it: name, description, and the JSON schema of its arguments. [`tools!`](crate::tools) creates them.
///
/// ```
/// use gym_core::server::Tool;
///
/// let tool = Tool::new("add", "Puts an item into the cart.").argument::<String>("item", "").argument::<Option<i64>>("count", "");
/// assert_eq!(tool.parameters()["required"], serde_json::json!(["item"]));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    name: String,
    description: String,
    properties: Map<String, Value>,
    required: Vec<Value>,
}

impl Tool {
    /// Creates a tool without arguments. The description can be the text of a doc comment.
    #[must_use]
    pub fn new(name: &str, description: &str) -> Self {
        let description = of_doc_comment(description);
        Self { name: name.to_owned(), description, properties: Map::new(), required: Vec::new() }
    }

    /// Adds an argument. It is optional if its type is an `Option`.
    #[must_use]
    pub fn argument<T: Argument>(mut self, name: &str, description: &str) -> Self {
        let mut schema = T::schema();
        let description = of_doc_comment(description);
        if let Some(schema) = schema.as_object_mut().filter(|_| !description.is_empty()) {
            schema.insert("description".to_owned(), description.into());
        }
        if T::if_missing().is_none() {
            self.required.push(name.into());
        }
        self.properties.insert(name.to_owned(), schema);
        self
    }

    /// Returns the name, which is also the route of the tool.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the JSON schema of the arguments.
    #[must_use]
    pub fn parameters(&self) -> Value {
        json!({
            "type": "object", "properties": self.properties, "required": self.required, "additionalProperties": false,
        })
    }
}

/// Serializes in the format of the Responses API.
impl Serialize for Tool {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let parameters = self.parameters();
        let strict = is_strict(&parameters);
        json!({
            "type": "function", "name": self.name, "description": self.description, "parameters": parameters, "strict": strict,
        })
        .serialize(serializer)
    }
}

/// Returns `true` if the Responses API accepts the schema with `strict`: each object is closed and requires all its properties.
fn is_strict(schema: &Value) -> bool {
    let closed = schema["type"] != "object" || {
        let properties = schema["properties"].as_object().map_or(0, Map::len);
        schema["additionalProperties"] == false && schema["required"].as_array().map_or(0, Vec::len) == properties
    };
    closed
        && match schema {
            Value::Object(fields) => fields.values().all(is_strict),
            Value::Array(items) => items.iter().all(is_strict),
            _ => true,
        }
}

/// Strips the space that follows `///`, and the line breaks at both ends.
fn of_doc_comment(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().map(str::trim).collect();
    lines.join("\n")
}

/// The return type of a tool: JSON for the model, or a whole response.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the answer of a tool",
    label = "write `json!(…)`, or a `RawObject`, a `Response`, or a `Result` of these",
    note = "`json!(text)` answers with a text, `json!({{\"key\": value}})` with an object"
)]
pub trait ToolReply {
    /// Converts the value into the response of the tool.
    ///
    /// # Errors
    /// The error of the tool, or of a value that cannot be serialized as JSON.
    fn into_response(self) -> Result<Response>;
}

impl ToolReply for Response {
    fn into_response(self) -> Result<Response> {
        Ok(self)
    }
}

impl ToolReply for RawObject {
    fn into_response(self) -> Result<Response> {
        Ok(Response::json(self))
    }
}

impl ToolReply for serde_json::Value {
    fn into_response(self) -> Result<Response> {
        Ok(Response::json(self.to_string()))
    }
}

impl<T: ToolReply> ToolReply for Result<T> {
    fn into_response(self) -> Result<Response> {
        self.and_then(T::into_response)
    }
}

/// Declares the tools of a [`ResourcesServer`](super::ResourcesServer) by generating its methods `tools` and `call_tool`.
///
/// A tool has a name, typed arguments and an expression, which can `.await` and use the three names between the bars. Doc comments
/// of tools and arguments become their descriptions. Agents of this SDK offer the tools to the model unless a row has `tools`. The
/// body of `/verify` and the scored row have the tools that the model received. A call with invalid arguments gets a 422 with
/// pydantic's messages. A call of an unknown tool gets `NotFound`.
///
/// ```
/// use gym_core::prelude::*;
/// use serde_json::json;
///
/// #[derive(Default)]
/// struct Shop(Sessions<u64>);
///
/// impl ResourcesServer for Shop {
///     type Task = serde::de::IgnoredAny;
///
///     tools! { |self, _cx, session|
///         /// Puts items into the cart.
///         add(
///             /// How many, at least 0.
///             quantity: u64,
///             note: Option<String>,
///         ) => self.0.with_or(session, || 0, |cart| {
///             *cart += quantity;
///             json!({"items": *cart, "note": note})
///         }),
///     }
///
///     async fn verify(&self, _: &CallContext, session: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
///         self.0.score(session, |cart| Verdict::correct(*cart == 2))
///     }
/// }
///
/// assert_eq!(Shop::default().tools()[0].name(), "add");
/// ```
///
/// # Compile errors
/// The error for a wrong declaration names the expected form, and that for a wrong type the type to write instead:
///
/// ```compile_fail
/// # use gym_core::prelude::*;
/// # struct Shop;
/// # impl ResourcesServer for Shop {
/// #     type Task = serde::de::IgnoredAny;
/// tools! { |self, _cx, _session|
///     // `u32` cannot be the type of a tool's argument: write `u64` or `i64` for an integer
///     add(quantity: u32) => serde_json::json!(quantity),
/// }
/// #     async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> { Ok(Verdict::correct(true)) }
/// # }
/// ```
#[macro_export]
macro_rules! tools {
    (|$this:ident, $cx:ident, $session:ident| $(
        $(#[doc = $doc:literal])*
        $tool:ident ( $( $(#[doc = $argument_doc:literal])* $argument:ident : $type:ty ),* $(,)? ) => $answer:expr
    ),+ $(,)?) => {
        fn tools(&$this) -> ::std::vec::Vec<$crate::server::Tool> {
            ::std::vec![$(
                {
                    let tool = $crate::server::Tool::new(stringify!($tool), concat!($($doc, "\n"),*));
                    $( let tool = $crate::server::argument_type::<$type>()
                        .describe(tool, stringify!($argument), concat!($($argument_doc, "\n"),*)); )*
                    tool
                }
            ),+]
        }

        async fn call_tool(
            &$this,
            $cx: &$crate::CallContext,
            $session: &$crate::SessionId,
            tool: &str,
            arguments: &$crate::RawObject,
        ) -> $crate::Result<$crate::Response> {
            let mut call = $crate::server::Arguments::of(arguments);
            match tool {
                $(
                    stringify!($tool) => {
                        $( let $argument = $crate::server::argument_type::<$type>().take(&mut call, stringify!($argument)); )*
                        #[allow(irrefutable_let_patterns)]
                        let ($(Some($argument),)*) = ($($argument,)*) else { return Ok(call.refusal()) };
                        $crate::server::ToolReply::into_response($answer)
                    }
                )+
                _ => Err($crate::server::unknown_tool(tool)),
            }
        }
    };
    (|$this:ident, $cx:ident, $session:ident|) => {
        compile_error!("tools!: expected a tool after the bars, such as `NAME(ARGUMENT: TYPE) => ANSWER,`");
    };
    (|$this:ident, $cx:ident, $session:ident| $($other:tt)+) => {
        compile_error!(concat!("tools!: expected tools as `NAME(ARGUMENT: TYPE, …) => ANSWER,`, each with only doc comments before it; found `",
            stringify!($($other)+), "`"));
    };
    ($($other:tt)*) => {
        compile_error!("tools!: expected three names between bars and then the tools: `|self, cx, session| NAME(ARGUMENT: TYPE) => ANSWER,`");
    };
}

/// The type of an argument, for `tools!`. Its methods need no bound, so that a type which is none has one error of the compiler: two uses
/// of one function at one place have the same.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct ArgumentType<T> {
    describe: fn(Tool, &str, &str) -> Tool,
    take: fn(&mut Arguments<'_>, &str) -> Option<T>,
}

/// Returns the type of an argument.
#[doc(hidden)]
#[must_use]
pub fn argument_type<T: Argument>() -> ArgumentType<T> {
    ArgumentType { describe: Tool::argument::<T>, take: |call, name| call.take(name) }
}

impl<T> ArgumentType<T> {
    /// Adds the argument to a tool.
    #[must_use]
    pub fn describe(self, tool: Tool, name: &str, description: &str) -> Tool {
        (self.describe)(tool, name, description)
    }

    /// Reads the argument of a call.
    #[must_use]
    pub fn take(self, call: &mut Arguments<'_>, name: &str) -> Option<T> {
        (self.take)(call, name)
    }
}

impl<T> std::fmt::Debug for ArgumentType<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ArgumentType")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_is_described_by_its_doc_comments_and_types() {
        let tool = Tool::new("move", " Moves items.\n Both bays must exist.\n")
            .argument::<String>("item", " What to move.\n")
            .argument::<Vec<i64>>("bays", "");
        let expected = json!({
            "type": "function",
            "name": "move",
            "description": "Moves items.\nBoth bays must exist.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "What to move."},
                    "bays": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["item", "bays"],
                "additionalProperties": false,
            },
            "strict": true,
        });
        assert_eq!(json!(tool), expected);
    }

    #[test]
    fn an_optional_argument_is_not_required_and_excludes_strict() {
        let tool = Tool::new("add", "").argument::<Option<bool>>("gift", "");
        assert_eq!((&tool.parameters()["required"], &json!(tool)["strict"]), (&json!([]), &json!(false)));
    }

    #[cfg(feature = "schemars")]
    #[test]
    fn a_struct_is_an_argument() {
        use crate::server::{Arguments, Json};

        #[derive(Debug, PartialEq, serde::Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        struct Line {
            /// What to buy.
            item: String,
            size: Size,
        }

        #[derive(Debug, PartialEq, serde::Deserialize, schemars::JsonSchema)]
        enum Size {
            Small,
            Large,
        }

        let tool = json!(Tool::new("add", "").argument::<Vec<Json<Line>>>("lines", ""));
        let line = &tool["parameters"]["properties"]["lines"]["items"];
        assert_eq!(line["properties"]["item"], json!({"description": "What to buy.", "type": "string"}));
        assert_eq!(line["properties"]["size"]["enum"], json!(["Small", "Large"]));
        assert!(tool["strict"] == true && !tool.to_string().contains("$defs"), "{tool}");

        let body = RawObject::parse(r#"{"lines":[{"item":"pen","size":"Small"},{"item":"pen"}]}"#).unwrap();
        let mut call = Arguments::of(&body);
        assert_eq!(call.take::<Vec<Json<Line>>>("lines"), None);
        let refusal: Value = serde_json::from_slice(&call.refusal().message.head.to_bytes()).unwrap();
        assert_eq!(refusal["detail"][0]["loc"], json!(["body", "lines", 1]));
    }
}
