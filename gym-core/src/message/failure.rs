//! Errors on the wire: the chain of causes in metadata, and the text of foreign error bodies.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::base::error::{Code, Error, ErrorLink, Execution};
use crate::base::failure::FailureClass;

/// Metadata key for the class and the causes of an error, as JSON in ASCII. Servers in other languages ignore it.
pub const FAILURE_METADATA: &str = "x-gym-failure";

/// Maximum number of causes in the metadata. An episode has four hops at most.
const LINKS_MAX: usize = 12;
/// Maximum bytes of the metadata. Python's HTTP client rejects header fields of more than 8,190 bytes.
const BYTES_MAX: usize = 6_000;
/// Maximum characters of one cause. Enough for the last lines of a Python traceback.
const MESSAGE_CHARS_MAX: usize = 1_000;
/// Maximum characters of a foreign body that an error shows.
const BODY_CHARS_MAX: usize = 2_000;

/// The class and the causes of an error, outermost first.
#[derive(Serialize, Deserialize)]
struct Failure {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    class: Option<String>,
    chain: Vec<ErrorLink>,
}

/// Returns the class and the causes of an error as JSON in ASCII, for messages that carry an error. Long messages are cut. If the chain has too many bytes, its middle is left
/// out, because the innermost cause explains the most.
#[must_use]
pub fn write(error: &Error) -> String {
    let mut chain = error.chain();
    for link in &mut chain {
        shorten(&mut link.subject, MESSAGE_CHARS_MAX);
        shorten(&mut link.message, MESSAGE_CHARS_MAX);
    }
    let class = error.class().map(|class| class.as_str().to_owned());
    let mut failure = Failure { class, chain };
    loop {
        let text = ascii(&serde_json::to_string(&failure).unwrap_or_default());
        let links = failure.chain.len();
        if links <= 1 && text.len() > BYTES_MAX {
            // One message of characters that are long in ASCII.
            failure.chain.iter_mut().for_each(|link| shorten(&mut link.message, MESSAGE_CHARS_MAX / 8));
            failure.chain.iter_mut().for_each(|link| shorten(&mut link.subject, MESSAGE_CHARS_MAX / 8));
            return ascii(&serde_json::to_string(&failure).unwrap_or_default());
        }
        if links <= 1 || (links <= LINKS_MAX && text.len() <= BYTES_MAX) {
            return text;
        }
        failure.chain.remove((links - 1) / 2);
    }
}

/// Returns the error that [`write_failure`](crate::message::write_failure) wrote, with this code and execution; `None` if the text is not of that form.
#[must_use]
pub fn read(text: &str, code: Code, execution: Execution) -> Option<Error> {
    let failure: Failure = serde_json::from_str(text).ok()?;
    let mut links = failure.chain.into_iter().rev();
    let innermost = links.next()?;
    let of = |link: ErrorLink| Error::new(code, execution, link.message).about(link.subject);
    let error = links.fold(of(innermost), |cause, link| of(link).caused_by(cause));
    Some(match failure.class.as_deref().and_then(FailureClass::from_name) {
        Some(class) => error.or_class(class),
        None => error,
    })
}

/// Returns the readable text of an error body of any server: FastAPI's `detail`, OpenAI's `error.message`, a JSON string, or the body
/// itself, without the markup of an HTML page.
#[must_use]
pub fn readable(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let mut said = match serde_json::from_slice::<Value>(body) {
        Ok(value) => said_by(&value).unwrap_or_else(|| text.trim().to_owned()),
        Err(_) if looks_like_html(&text) => html_title(&text),
        Err(_) => text.trim().to_owned(),
    };
    if said.is_empty() {
        "(an empty body)".clone_into(&mut said);
    }
    shorten(&mut said, BODY_CHARS_MAX);
    said
}

fn said_by(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(body) => {
            if let Some(detail) = body.get("detail") {
                return match detail {
                    Value::Array(problems) => {
                        let problems: Option<Vec<_>> = problems.iter().map(problem).collect();
                        Some(problems.filter(|problems| !problems.is_empty())?.join("; "))
                    }
                    other => said_by(other),
                };
            }
            let message = |value: &Value| value.get("message").and_then(Value::as_str).map(str::to_owned);
            match body.get("error") {
                Some(Value::String(text)) => Some(text.clone()),
                Some(error) => message(error),
                // vLLM writes its errors without the object around them.
                None => message(value),
            }
        }
        _ => None,
    }
}

/// Writes one of pydantic's problems as `responses_create_params.input: Field required`.
fn problem(problem: &Value) -> Option<String> {
    let message = problem.get("msg")?.as_str()?;
    let steps = problem.get("loc").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let steps: Vec<String> = steps
        .iter()
        .skip_while(|step| *step == "body")
        .map(|step| step.as_str().map_or_else(|| step.to_string(), str::to_owned))
        .collect();
    Some(if steps.is_empty() { message.to_owned() } else { format!("{}: {message}", steps.join(".")) })
}

fn looks_like_html(text: &str) -> bool {
    let start = text.trim_start();
    start.starts_with('<')
        && start.get(..15).is_some_and(|start| {
            let start = start.to_ascii_lowercase();
            start.starts_with("<!doctype html") || start.starts_with("<html")
        })
}

fn html_title(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let title = lower.find("<title>").zip(lower.find("</title>")).and_then(|(from, to)| text.get(from + 7..to));
    match title.map(str::trim) {
        Some(title) if !title.is_empty() => format!("an HTML page with the title `{title}`"),
        _ => "an HTML page".to_owned(),
    }
}

/// Cuts a text that has more characters than this, and marks the cut with `…`.
pub fn shorten(text: &mut String, chars_max: usize) {
    if let Some((end, _)) = text.char_indices().nth(chars_max) {
        text.truncate(end);
        text.push('…');
    }
}

/// Escapes the characters of a JSON text that no HTTP header can have, or that its readers decode differently.
fn ascii(json: &str) -> String {
    if json.bytes().all(|byte| (b' '..0x7f).contains(&byte)) {
        return json.to_owned();
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    let mut units = [0; 2];
    for c in json.chars() {
        match c {
            ' '..='~' => escaped.push(c),
            _ => escaped.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}"))),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(error: &Error) -> Error {
        let text = write(error);
        assert!(text.len() <= BYTES_MAX && text.bytes().all(|byte| (b' '..0x7f).contains(&byte)), "{text}");
        read(&text, error.code(), error.execution()).unwrap()
    }

    #[test]
    fn an_error_arrives_with_its_causes_and_its_class() {
        let cause = Error::internal("no such table \"rows\"\n").about("query the bank");
        let error = Error::internal("the tool failed").caused_by(cause).or_class(FailureClass::ToolError);
        let error = error.within(Execution::Finished, "POST bank/transfer");
        let arrived = sent(&error);
        assert_eq!(arrived.to_string(), error.to_string());
        assert_eq!(arrived.chain(), error.chain());
        assert_eq!(arrived.class(), Some(FailureClass::ToolError));
    }

    proptest! {
        #[test]
        fn any_chain_fits_and_keeps_its_innermost_cause(
            links in proptest::collection::vec((".{0,40}", ".{0,3000}"), 1..30),
        ) {
            let mut links = links.into_iter().enumerate();
            let (_, (subject, message)) = links.next().unwrap();
            let innermost = Error::internal(format!("cause {message}")).about(subject);
            let mut expected = format!("cause {message}");
            let error = links.fold(innermost, |cause, (number, (subject, message))| {
                Error::internal(format!("{number} {message}")).about(format!("s{subject}")).caused_by(cause)
            });
            let arrived = sent(&error).chain();
            shorten(&mut expected, MESSAGE_CHARS_MAX / 8);
            let innermost = &arrived.last().unwrap().message;
            let expected = expected.trim_end_matches('…');
            prop_assert!(innermost.starts_with(expected), "{innermost} {expected}");
        }

        #[test]
        fn any_metadata_is_read_or_ignored(text in ".{0,200}") {
            drop(read(&text, Code::Internal, Execution::Finished));
        }
    }

    #[test]
    fn the_bodies_of_all_servers_are_readable() {
        for (body, said) in [
            (r#""the judge is out of office""#, "the judge is out of office"),
            (r#"{"detail":"Not Found"}"#, "Not Found"),
            (
                r#"{"detail":[{"type":"missing","loc":["body","responses_create_params","input",0],"msg":"Field required","input":{}}]}"#,
                "responses_create_params.input.0: Field required",
            ),
            (
                r#"{"detail":[{"type":"value_error","loc":["body"],"msg":"no"},{"loc":["body","a"],"msg":"b"}]}"#,
                "no; a: b",
            ),
            (r#"{"detail":[]}"#, r#"{"detail":[]}"#),
            (r#"{"error":{"message":"slow down","type":"server_error"}}"#, "slow down"),
            (r#"{"error":"bad gateway"}"#, "bad gateway"),
            (r#"{"object":"error","message":"too long","code":400}"#, "too long"),
            (r#"{"id":3}"#, r#"{"id":3}"#),
            (
                "<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head>",
                "an HTML page with the title `502 Bad Gateway`",
            ),
            ("<html><body>x</body></html>", "an HTML page"),
            ("  Internal Server Error\n", "Internal Server Error"),
            ("", "(an empty body)"),
        ] {
            assert_eq!(readable(body.as_bytes()), said);
        }
    }
}
