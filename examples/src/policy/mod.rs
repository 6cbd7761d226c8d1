//! A script that replaces a model, so that the three environments run without a GPU or an API key.
//!
//! The script recognizes only the sentences that [`crate::tasks`] writes. It reads only the input of a model (messages, tools and
//! tool outputs), and solves tasks from the prompt. The prompt and the seed determine its behavior on a task. A run therefore has
//! right, wrong and malformed responses and bad tool calls, and the same seed repeats them.

mod choice;
mod conversation;
mod math;
mod warehouse;

use gym_core::RawObject;
use serde_json::{Value, json};

use conversation::Conversation;

/// Returns the next turn of the script: the output items of the response to this request.
///
/// All turns of an episode need the same seed; otherwise the script changes its behavior within the episode.
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

/// The behavior of the script on a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    /// Solves the task.
    Right,
    /// Solves the task, but then states or does something else.
    Wrong,
    /// Responds in a malformed way: bad arguments, an unknown tool, no answer, two answers.
    Malformed,
}

impl Behaviour {
    /// Draws a behavior: three in five are right, one in four wrong.
    fn draw(random: &mut fastrand::Rng) -> Self {
        match random.u32(0..100) {
            0..60 => Self::Right,
            60..85 => Self::Wrong,
            _ => Self::Malformed,
        }
    }
}

/// One turn of the script.
#[derive(Debug)]
enum Turn {
    Say(String),
    Call {
        tool: &'static str,
        /// The arguments as written: JSON, or an imitation of a model's error.
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

/// Hashes the text with FNV-1a, then applies one round of SplitMix64, so that similar seeds draw different behaviors.
fn mix(text: &str, seed: u64) -> u64 {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mut mixed = hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
