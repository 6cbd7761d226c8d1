//! A scripted stand-in for a model, so that the three environments can be tried without a GPU or a key.
//!
//! It is a script, not a model: it recognises the sentences that [`crate::tasks`] writes and nothing else. What makes it
//! useful is that it plays fair and plays unevenly. Fair: it reads only what a model would see (messages, tools and tool
//! outputs), and where it means to be right it works the task out from the prompt. Uneven: how it behaves on a task is drawn
//! from the prompt and the seed, so that a run has right, wrong and malformed answers, bad tool calls among them, in a mix
//! that a seed repeats.

mod choice;
mod conversation;
mod math;
mod warehouse;

use gym_core::RawObject;
use serde_json::{Value, json};

use conversation::Conversation;

/// The next turn of the script: the output items of a Responses API answer to this request.
///
/// The turns of one episode must be asked for with the same seed, or the script changes its mind on the way.
#[must_use]
pub fn answer(request: &RawObject, seed: u64) -> Vec<Value> {
    let conversation = Conversation::of(request);
    let mut random = fastrand::Rng::with_seed(mix(conversation.question(), seed));
    let behaviour = Behaviour::draw(&mut random);
    let turn = if conversation.has_tool("calculator") {
        math::play(&conversation, behaviour, &mut random)
    } else if conversation.has_tool("list_stock") {
        warehouse::play(&conversation, behaviour, &mut random)
    } else {
        choice::play(&conversation, behaviour, &mut random)
    };
    turn.into_items(mix(conversation.question(), seed), conversation.outputs().len())
}

/// What the script is up to on a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    /// Works it out.
    Right,
    /// Works it out, and says or does something else.
    Wrong,
    /// Breaks the form: bad arguments, an unknown tool, no answer, two answers.
    Malformed,
}

impl Behaviour {
    /// Three in five are right, one in four wrong.
    fn draw(random: &mut fastrand::Rng) -> Self {
        match random.u32(0..100) {
            0..60 => Self::Right,
            60..85 => Self::Wrong,
            _ => Self::Malformed,
        }
    }
}

/// One turn.
#[derive(Debug)]
enum Turn {
    Say(String),
    Call {
        tool: &'static str,
        /// A JSON text, or what a careless model takes for one.
        arguments: String,
    },
}

impl Turn {
    fn say(text: impl Into<String>) -> Self {
        Self::Say(text.into())
    }

    fn call(tool: &'static str, arguments: &Value) -> Self {
        Self::Call { tool, arguments: arguments.to_string() }
    }

    fn into_items(self, episode: u64, turn: usize) -> Vec<Value> {
        let id = format!("{episode:016x}_{turn}");
        vec![match self {
            Self::Say(text) => json!({
                "type": "message",
                "id": format!("msg_{id}"),
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }),
            Self::Call { tool, arguments } => json!({
                "type": "function_call",
                "id": format!("fc_{id}"),
                "call_id": format!("call_{id}"),
                "name": tool,
                "arguments": arguments,
                "status": "completed",
            }),
        }]
    }
}

/// FNV-1a over the text, then one round of SplitMix64, so that near seeds draw unlike behaviours.
fn mix(text: &str, seed: u64) -> u64 {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mut mixed = hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
