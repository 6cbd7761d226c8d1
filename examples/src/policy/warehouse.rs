//! The script for orders: lists the stock, plans all steps, and executes them one by one.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::conversation::Conversation;
use super::{Behaviour, Turn};

/// Quantities by item and bay, as the script expects them.
type Seen = BTreeMap<(String, String), u64>;

pub(super) fn play(conversation: &Conversation, behaviour: Behaviour, random: &mut fastrand::Rng) -> Turn {
    let style = random.u32(0..4);
    let done = conversation.outputs().len();
    if behaviour == Behaviour::Malformed {
        return malformed(done, style);
    }
    if done == 0 {
        return Turn::call("list_stock", &json!({}));
    }
    let Some(mut calls) = plan(conversation) else { return Turn::say("I do not understand the order.") };
    if behaviour == Behaviour::Wrong {
        match style {
            0 => calls.clear(),
            // Off by one in the last step.
            1 => {
                let last = calls.last_mut().map(|(_, arguments)| &mut arguments["quantity"]);
                last.into_iter().for_each(|quantity| *quantity = json!(quantity.as_u64().unwrap_or(1) + 1));
            }
            _ => drop(calls.pop()),
        }
    }
    match calls.get(done - 1) {
        Some((tool, arguments)) => Turn::call(tool, arguments),
        None => Turn::say("The order is carried out."),
    }
}

fn malformed(done: usize, style: u32) -> Turn {
    match (style, done) {
        (0, 0) => Turn::say("Everything is where it should be."),
        (1, 0) => Turn::call("move_stock", &json!({"item": "bolts", "quantity": "some", "from": "A", "to": "B"})),
        (2, 0) => Turn::call("teleport_stock", &json!({"item": "bolts"})),
        (3, 0) => Turn::Call { tool: "ship_stock", arguments: "ship everything".into() },
        _ => Turn::say("The tools do not do what I want."),
    }
}

/// Returns the calls for all steps. Each step is planned on the stock that the previous steps leave.
fn plan(conversation: &Conversation) -> Option<Vec<(&'static str, Value)>> {
    let listed = conversation.output(0);
    let mut seen = Seen::new();
    for (bay, items) in listed["stock"].as_object()? {
        for (item, quantity) in items.as_object()? {
            seen.insert((item.clone(), bay.clone()), quantity.as_u64()?);
        }
    }
    let bays: Vec<&String> = listed["stock"].as_object()?.keys().collect();
    let mut calls = Vec::new();
    for line in conversation.question().lines().skip(1) {
        let words: Vec<&str> = line.strip_suffix('.')?.split(' ').skip(1).collect();
        match words[..] {
            ["Move", quantity, item, "from", "bay", from, "to", "bay", to] => {
                let there = seen.get(&(item.to_owned(), from.to_owned())).copied().unwrap_or(0);
                let quantity = if quantity == "all" { there } else { quantity.parse().ok()? };
                calls.push(transfer(&mut seen, item, quantity, from, to));
            }
            ["Bring", "all", item, "to", "bay", to] => {
                for from in bays.iter().filter(|bay| **bay != to) {
                    let there = seen.get(&(item.to_owned(), (*from).clone())).copied().unwrap_or(0);
                    if there > 0 {
                        calls.push(transfer(&mut seen, item, there, from, to));
                    }
                }
            }
            ["Ship", "half", "of", "the", item, "in", "bay", from] => {
                let half = seen.get(&(item.to_owned(), from.to_owned())).copied().unwrap_or(0) / 2;
                calls.push(ship(&mut seen, item, half, from));
            }
            ["Ship", quantity, item, "from", "bay", from] => {
                calls.push(ship(&mut seen, item, quantity.parse().ok()?, from));
            }
            ["Receive", quantity, item, "into", "bay", to] => {
                let quantity: u64 = quantity.parse().ok()?;
                *seen.entry((item.to_owned(), to.to_owned())).or_default() += quantity;
                calls.push(("receive_stock", json!({"item": item, "quantity": quantity, "to_bay": to})));
            }
            _ => return None,
        }
    }
    Some(calls)
}

fn transfer(seen: &mut Seen, item: &str, quantity: u64, from: &str, to: &str) -> (&'static str, Value) {
    take(seen, item, quantity, from);
    *seen.entry((item.to_owned(), to.to_owned())).or_default() += quantity;
    ("move_stock", json!({"item": item, "quantity": quantity, "from_bay": from, "to_bay": to}))
}

fn ship(seen: &mut Seen, item: &str, quantity: u64, from: &str) -> (&'static str, Value) {
    take(seen, item, quantity, from);
    ("ship_stock", json!({"item": item, "quantity": quantity, "from_bay": from}))
}

fn take(seen: &mut Seen, item: &str, quantity: u64, from: &str) {
    let there = seen.entry((item.to_owned(), from.to_owned())).or_default();
    *there = there.saturating_sub(quantity);
}
