//! A generator of traces: sessions of several turns with growing prompts, in groups that begin with the same prompt.
//!
//! It computes with whole numbers only, so that a seed gives the same trace on every machine.

use std::fmt::Write as _;

/// The attempts at one prompt, as in GRPO.
pub(crate) const REPEATS: u32 = 8;
/// The system prompt and the tools, which all prompts begin with.
pub(crate) const SYSTEM_TOKENS: u32 = 800;

/// One conversation.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    pub(crate) prompt: u32,
    /// The tokens of the first request after the system prompt.
    pub(crate) prompt_tokens: u32,
    pub(crate) turns: Vec<Turn>,
}

/// One call of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// The tokens that the request has more than the last one and its response: the output of tools. 0 in the first turn.
    pub(crate) new_tokens: u32,
    pub(crate) output_tokens: u32,
    /// The time until the next turn begins: tools run.
    pub(crate) think_ms: u32,
}

/// The multiples of the median, in thousandths, at 0, 1/16 … 16/16 of a lognormal distribution with σ = 1, cut at 2.5 σ.
const LOGNORMAL: [u64; 17] =
    [82, 216, 316, 412, 509, 613, 727, 854, 1_000, 1_170, 1_375, 1_631, 1_963, 2_428, 3_159, 4_637, 12_182];

fn heavy(rng: &mut fastrand::Rng, median: u64) -> u32 {
    let at = rng.u64(..16_000);
    let (step, rest) = ((at / 1_000) as usize, at % 1_000);
    let ratio = LOGNORMAL[step] + (LOGNORMAL[step + 1] - LOGNORMAL[step]) * rest / 1_000;
    u32::try_from((median * ratio / 1_000).max(1)).expect("at most twelve times the median")
}

/// Returns the sessions in the order in which a collector starts them. `hot` is the number of a prompt that has ten times its share.
pub(crate) fn generate(seed: u64, prompts: u32, hot: Option<u32>) -> Vec<Session> {
    let mut sessions = Vec::new();
    for prompt in 0..prompts {
        // One generator for each prompt, so that a hot prompt changes no other.
        let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(1_000_003).wrapping_add(u64::from(prompt)));
        let prompt_tokens = heavy(&mut rng, 1_500).min(16_000);
        let repeats = if hot == Some(prompt) { REPEATS * 10 } else { REPEATS };
        for _ in 0..repeats {
            let turns = rng.u32(1..=12);
            let turn = |index| Turn {
                new_tokens: if index == 0 { 0 } else { heavy(&mut rng, 300).min(8_000) },
                output_tokens: heavy(&mut rng, 150).min(4_000),
                think_ms: heavy(&mut rng, 500).min(60_000),
            };
            sessions.push(Session { prompt, prompt_tokens, turns: (0..turns).map(turn).collect() });
        }
    }
    sessions
}

/// Returns the trace as JSON lines, one for each session.
pub(crate) fn jsonl(sessions: &[Session]) -> String {
    let mut text = String::new();
    for (session, Session { prompt, prompt_tokens, turns }) in sessions.iter().enumerate() {
        let turns: Vec<_> = turns.iter().map(|turn| [turn.new_tokens, turn.output_tokens, turn.think_ms]).collect();
        writeln!(
            text,
            r#"{{"session":{session},"prompt":{prompt},"prompt_tokens":{prompt_tokens},"turns":{turns:?}}}"#
        )
        .expect("writing to a string cannot fail");
    }
    text
}
