//! Models and their endpoints.

use super::ground::Ground;
use super::{Case, rolled};

/// Expects this number of requests to the endpoint.
fn asked(
    name: &'static str,
    manner: &'static str,
    times: usize,
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new("upstream fails", name, outcome, says, move |ground: &Ground| {
        Box::pin(async move {
            let before = ground.upstream.calls(manner);
            let got = ground.roll_out(&format!("a_{manner}")).await;
            let calls = ground.upstream.calls(manner) - before;
            assert_eq!(calls, times, "calls to the endpoint; {got:?}");
            assert!(!got.text.contains("sk-secret"), "the key is shown: {got:?}");
            got
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    const ERROR: &str = "failures file: model_error";
    const LATE: &str = "failures file: episode_timeout";
    const BUSY: &str = "failures file: model_unavailable";
    const NONSENSE: &str = "model returns invalid output";
    const TOOLS: &str = "hostile tool call";
    vec![
        asked("429 with Retry-After, always", "s429", 2, BUSY, &["s429/v1/responses", "answered 429", "slow down"]),
        asked("429 with Retry-After, once", "s429_once", 2, "recorded: 1", &["\"reward\":1.0"]),
        asked("500", "s500", 2, ERROR, &["s500/v1/responses", "answered 500", "the engine is on fire"]),
        asked("503, always", "s503", 2, BUSY, &["s503/v1/responses", "answered 503: loading the weights (2 attempts)"]),
        asked("401", "s401", 1, ERROR, &["s401/v1/responses", "answered 401", "who are you?"]),
        asked("400", "s400", 1, ERROR, &["s400/v1/responses", "answered 400", "maximum context length"]),
        asked(
            "a redirect",
            "redirect",
            1,
            ERROR,
            &["redirect/v1/responses", "answered 302 and refers to /good/v1/responses"],
        ),
        asked(
            "400 about max_tokens, which is no context overflow",
            "max_tokens",
            1,
            ERROR,
            &["max_tokens/v1/chat/completions", "answered 400: max_tokens must be at least 1, got -186."],
        ),
        asked(
            "a response whose generation failed",
            "failed",
            1,
            ERROR,
            &["the engine ended the response with the error", "the GPU is gone"],
        ),
        asked(
            "no endpoint at all",
            "dead",
            0,
            BUSY,
            &["http://127.0.0.1:9/dead/v1/responses", "`retry_budget_seconds`", "refused"],
        ),
        asked("never responds", "hang", 1, LATE, &["hang/v1/responses", "`max_seconds` = 3"]),
        asked("a byte now and then, forever", "drip", 1, LATE, &["drip/v1/responses", "`max_seconds` = 3"]),
        asked(
            "garbage instead of JSON",
            "garbage",
            1,
            ERROR,
            &["garbage/v1/responses", "no JSON object", "an HTML page"],
        ),
        asked("a list instead of an object", "list", 1, ERROR, &["list/v1/responses", "no JSON object"]),
        asked("no HTTP response", "not_http", 2, BUSY, &["not_http/v1/responses", "is not HTTP"]),
        asked("half a response", "truncated", 2, BUSY, &["truncated/v1/responses", "before the answer was complete"]),
        asked("a connection reset", "reset", 2, BUSY, &["reset/v1/responses", "connection broke"]),
        asked("a response of 100 GB", "endless", 1, BUSY, &["endless/v1/responses", "reply_bytes_max"]),
        rolled(
            NONSENSE,
            "an empty object",
            "a_empty_object",
            ERROR,
            &["empty_object/v1/responses", "has no list `output`"],
        ),
        rolled(NONSENSE, "no output", "a_no_output", ERROR, &["/responses", "has no list `output`"]),
        rolled(NONSENSE, "output is a string", "a_text_output", ERROR, &["/responses", "has no list `output`"]),
        rolled(
            NONSENSE,
            "empty output",
            "a_empty_output",
            "recorded: 1",
            &["\"ng_termination_reason\":\"empty_output\"", "\"reward\":0.0"],
        ),
        rolled(
            NONSENSE,
            "an unknown item",
            "a_unknown_item",
            "recorded: 1",
            &["\"beam\":3", "\"status\":\"incomplete\"", "\"reward\":0.0"],
        ),
        rolled(
            NONSENSE,
            "an item without a type",
            "a_item_without_type",
            ERROR,
            &["POST m_item_without_type/v1/responses", "missing field `type`"],
        ),
        rolled(
            NONSENSE,
            "a call without a name",
            "a_call_without_name",
            ERROR,
            &["POST m_call_without_name/v1/responses", "`name`"],
        ),
        rolled(TOOLS, "arguments that are not JSON", "a_tool_json", "recorded: 1", &["Invalid tool call arguments"]),
        rolled(
            TOOLS,
            "arguments of another type",
            "a_tool_type",
            "recorded: 1",
            &["function_call_output", "expression"],
        ),
        rolled(TOOLS, "arguments that are a list", "a_tool_list", "recorded: 1", &["model_attributes_type"]),
        rolled(TOOLS, "100,000 brackets", "a_tool_deep", "recorded: 1", &["Invalid tool call arguments"]),
        rolled(
            TOOLS,
            "a path and a header as the name",
            "a_tool_name",
            "recorded: 1",
            &["function_call_output", "Not Found"],
        ),
    ]
}
