//! The examples' servers by implementation name, for the command line or a stack.

use gym_core::RawObject;
use gym_server::Servers;
use gym_server::model::ScriptedItem;
use serde::Deserialize;
use serde_json::Value;

use crate::choice::Choice;
use crate::math::Math;
use crate::nemo::{MultiStep, MultiTurn, SessionState, SingleToolCall, ToolCallMultiReward};
use crate::policy;
use crate::warehouse::Warehouse;

/// Returns the stock servers, the three environments, and the five ports of NeMo Gym's examples under their own names. The
/// `scripted_model` among them plays the three environments.
#[must_use]
pub fn servers() -> Servers {
    Servers::stock()
        .scripted_policy(play)
        .resources("math", |_| Ok(Math))
        .resources("warehouse", |_| Ok(Warehouse::default()))
        .resources("choice", |_| Ok(Choice))
        .resources("example_single_tool_call", |_| Ok(SingleToolCall))
        .resources("example_multi_step", |_| Ok(MultiStep))
        .gymnasium("example_multi_turn_gymnasium", |_| Ok(MultiTurn::default()))
        .resources("example_session_state_mgmt", |_| Ok(SessionState::default()))
        .resources("example_tool_call_multireward", |_| Ok(ToolCallMultiReward))
}

/// Returns one turn of the script. Its seed is the rollout's, which the collector sends with `--add-seed`: the same on every turn
/// of an episode, and a different one for each repeat.
#[must_use]
pub fn play(request: &RawObject, _: &mut fastrand::Rng) -> Vec<ScriptedItem> {
    policy::answer(request, seed(request)).iter().map(item).collect()
}

fn item(item: &Value) -> ScriptedItem {
    let text = |key: &str| item[key].as_str().unwrap_or_default().to_owned();
    match item["type"].as_str() {
        Some("function_call") => ScriptedItem::tool_call(text("name"), text("arguments")),
        Some("reasoning") => {
            ScriptedItem::Reasoning(item["summary"][0]["text"].as_str().unwrap_or_default().to_owned())
        }
        _ => ScriptedItem::message(item["content"][0]["text"].as_str().unwrap_or_default()),
    }
}

/// Returns the seed in `metadata.extra_body`, which is JSON text from NeMo Gym's collectors. Returns 0 if there is none.
fn seed(request: &RawObject) -> u64 {
    #[derive(Default, Deserialize)]
    struct Metadata {
        #[serde(default)]
        extra_body: String,
    }
    #[derive(Default, Deserialize)]
    struct Extra {
        #[serde(default)]
        seed: u64,
    }
    let metadata: Metadata = request.get_as("metadata").ok().flatten().unwrap_or_default();
    serde_json::from_str::<Extra>(&metadata.extra_body).unwrap_or_default().seed
}
