//! Environments that fail: the result is never a reward.

use super::{Case, rolled};

pub(crate) fn cases() -> Vec<Case> {
    const FAILS: &str = "environment fails";
    const NONSENSE: &str = "environment returns invalid output";
    const ERROR: &str = "sidecar: agent_run_error";
    const WRONG: &str = "sidecar: verifier_error";
    vec![
        rolled(
            FAILS,
            "an error of the verifier",
            "a_verifier_error",
            ERROR,
            &["POST verifier_error/verify", "out of office"],
        ),
        rolled(FAILS, "a reward of NaN", "a_verifier_nan", ERROR, &["POST verifier_nan/verify", "reward is NaN"]),
        rolled(
            FAILS,
            "a panic",
            "a_verifier_panic",
            ERROR,
            &["POST verifier_panic/verify", "panicked", "index out of range"],
        ),
        rolled(FAILS, "no episode can be seeded", "a_seed_error", ERROR, &["POST seed_error/seed_session", "database"]),
        rolled(FAILS, "a tool breaks", "a_tool_error", "recorded: 1", &["the tool calculator broke"]),
        rolled(NONSENSE, "a list", "a_answers_list", WRONG, &["response to `/run` is not a JSON object", "[1, 2, 3]"]),
        rolled(NONSENSE, "a string", "a_answers_text", WRONG, &["response to `/run` is not a JSON object", "done!"]),
        rolled(NONSENSE, "bytes that are not UTF-8", "a_not_utf8", WRONG, &["response to `/run`"]),
        rolled(NONSENSE, "a string as the reward", "a_text_reward", WRONG, &["reward \"high\", which is not a number"]),
        // As in NeMo Gym, a row without a score is counted as such, and not included in any mean.
        rolled(NONSENSE, "null as the reward", "a_null_reward", "recorded: 1 without reward", &["\"reward\":null"]),
    ]
}
