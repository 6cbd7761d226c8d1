//! Request bodies in the shapes and sizes of NeMo Gym's `example_single_tool_call`.

use serde_json::{Value, json};

use crate::mock;

/// Returns the rows that the SDK and the peer collect: the example's five questions.
#[must_use]
pub fn rows() -> Vec<Value> {
    ["what's it like in sf?", "going out in sf tn", "humidity in sf", "how's the weather in sf?", "is it cold in sf?"]
        .into_iter()
        .map(|question| json!({"responses_create_params": params(question)}))
        .collect()
}

fn params(question: &str) -> Value {
    let system =
        "You are a helpful personal assistant that aims to be helpful and reduce any pain points the user has.";
    json!({
        "input": [{"content": system, "role": "developer"}, {"content": question, "role": "user"}],
        "tools": [{
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": ""}},
                "required": ["city"],
                "additionalProperties": false,
            },
            "strict": true,
            "type": "function",
            "description": "",
        }],
    })
}

/// Returns the body of a whole rollout.
#[must_use]
pub fn row() -> Vec<u8> {
    text(&rows()[0])
}

/// Returns the body of a model call.
#[must_use]
pub fn responses() -> Vec<u8> {
    text(&rows()[0]["responses_create_params"])
}

/// Returns the body of a tool call.
#[must_use]
pub fn tool() -> Vec<u8> {
    text(&json!({"city": "San Francisco"}))
}

/// Returns the body of a verification. With tokens, it is one for training: it contains these numbers of prompt and generated
/// tokens, with their log-probabilities.
#[must_use]
pub fn verify(tokens: Option<(usize, usize)>) -> Vec<u8> {
    let mut body = rows().swap_remove(0);
    body["response"] = serde_json::from_str(mock::answer()).unwrap_or_default();
    if let Some((prompt, generated)) = tokens {
        let mut rng = fastrand::Rng::with_seed(1);
        let item = &mut body["response"]["output"][0];
        let mut ids = |count: usize| -> Vec<u32> { (0..count).map(|_| rng.u32(..150_000)).collect() };
        item["prompt_token_ids"] = json!(ids(prompt));
        item["generation_token_ids"] = json!(ids(generated));
        let probabilities: Vec<f64> = (0..generated).map(|_| -3.0 * rng.f64()).collect();
        item["generation_log_probs"] = json!(probabilities);
    }
    text(&body)
}

/// Formats JSON with spaces after commas and colons, as Python's `json` does, because the peer's own clients send this form.
fn text(value: &Value) -> Vec<u8> {
    struct Python;
    impl serde_json::ser::Formatter for Python {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            writer: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            writer.write_all(if first { b"" } else { b", " })
        }

        fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
            writer.write_all(if first { b"" } else { b", " })
        }

        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
            writer.write_all(b": ")
        }
    }
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, Python);
    serde::Serialize::serialize(value, &mut serializer).expect("a value is JSON");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_the_sizes_that_they_are_named_after() {
        // The peer's own small body has 1.6 kB, because it contains the defaults of its schema.
        assert!((900..1_700).contains(&verify(None).len()));
        assert!((165_000..185_000).contains(&verify(Some((8_192, 4_096))).len()));
        assert!((1_100_000..1_200_000).contains(&verify(Some((32_768, 32_768))).len()));
    }
}
