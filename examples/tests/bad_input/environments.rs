//! Environments that fail: the result is never a reward.

use super::{Case, rolled};

pub(crate) fn cases() -> Vec<Case> {
    const FAILS: &str = "environment fails";
    const NONSENSE: &str = "environment returns invalid output";
    const NOT_A_NUMBER: &str = "failures file: invalid_reward";
    const WRONG: &str = "failures file: verifier_error";
    vec![
        rolled(
            FAILS,
            "an error of the verifier",
            "a_verifier_error",
            WRONG,
            &["POST verifier_error/verify", "out of office"],
        ),
        rolled(
            FAILS,
            "a second reward among the verdict's keys",
            "a_verifier_two_rewards",
            NOT_A_NUMBER,
            &["POST verifier_two_rewards/verify", "its key `reward` is 0.5"],
        ),
        rolled(
            FAILS,
            "a reward of NaN",
            "a_verifier_nan",
            NOT_A_NUMBER,
            &["POST verifier_nan/verify", "reward is NaN"],
        ),
        rolled(
            FAILS,
            "a panic",
            "a_verifier_panic",
            "failures file: verifier_panic",
            &["POST verifier_panic/verify", "panicked", "index out of range"],
        ),
        rolled(
            FAILS,
            "no episode can be seeded",
            "a_seed_error",
            "failures file: environment_error",
            &["POST seed_error/seed_session", "database"],
        ),
        rolled(
            FAILS,
            "a tool breaks",
            "a_tool_error",
            "failures file: tool_error",
            &["POST tool_error/calculator", "the tool calculator broke"],
        ),
        rolled(
            FAILS,
            "a tool panics",
            "a_tool_panic",
            "failures file: tool_error",
            &["POST tool_panic/calculator", "the handler panicked: the tool calculator has no entry 3"],
        ),
        rolled(FAILS, "a tool finds no account", "a_tool_not_found", "recorded: 1", &["there is no account 7"]),
        rolled(NONSENSE, "a list", "a_answers_list", WRONG, &["response to `/run` is not a JSON object", "[1, 2, 3]"]),
        rolled(NONSENSE, "a string", "a_answers_text", WRONG, &["response to `/run` is not a JSON object", "done!"]),
        rolled(NONSENSE, "bytes that are not UTF-8", "a_not_utf8", WRONG, &["response to `/run`"]),
        rolled(
            NONSENSE,
            "a string as the reward",
            "a_text_reward",
            NOT_A_NUMBER,
            &["reward \"high\", which is not a finite number"],
        ),
        // As in NeMo Gym, a row without a score is counted as such, and not included in any mean.
        rolled(NONSENSE, "null as the reward", "a_null_reward", "recorded: 1 without reward", &["\"reward\":null"]),
    ]
}
