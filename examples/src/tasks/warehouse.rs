//! Orders of one to four steps in warehouses of three or four bays.

use serde_json::json;

use super::{Draft, pick, tool};
use crate::warehouse::Stock;

const SYSTEM: &str = "You run a warehouse with the tools. Look before you act, carry out the order one step after the other, \
    and say when it is done. Only what lies where at the end counts.";
const ITEMS: [&str; 8] = ["bolts", "nuts", "gears", "springs", "valves", "hoses", "cables", "lamps"];
const BAYS: [&str; 4] = ["A", "B", "C", "D"];

pub(super) fn draw(random: &mut fastrand::Rng, kind: usize) -> Draft {
    let mut items = ITEMS;
    random.shuffle(&mut items);
    let (bays, items) = (&BAYS[..random.usize(3..=4)], &items[..random.usize(2..=4)]);
    let mut stock = Stock::default();
    for bay in bays {
        let shelf = stock.0.entry((*bay).to_owned()).or_default();
        for item in items {
            if random.u32(0..10) < 6 {
                shelf.insert((*item).to_owned(), random.u64(1..=40));
            }
        }
    }
    let initial = stock.clone();
    let wanted = 1 + kind % 4;
    let mut steps = Vec::new();
    // Some draws are impossible (nothing to ship); further draws find enough possible ones.
    for _ in 0..200 {
        if steps.len() < wanted {
            steps.extend(step(random, &mut stock, bays, items));
        }
    }
    if stock == initial || steps.len() < wanted {
        // An order whose final stock equals its initial stock would reward doing nothing.
        return draw(random, kind);
    }
    let order: String = steps.iter().enumerate().map(|(at, step)| format!("\n{}. {step}", at + 1)).collect();
    Draft {
        system: SYSTEM,
        question: format!("Carry out this order, one step after the other:{order}"),
        tools: tools(),
        keys: vec![("initial_stock", json!(initial)), ("target_stock", json!(stock))],
    }
}

/// Draws a step and applies it. Returns `None` if the step is impossible.
fn step(random: &mut fastrand::Rng, stock: &mut Stock, bays: &[&str], items: &[&str]) -> Option<String> {
    let (item, bay) = (pick(random, items), pick(random, bays));
    let there = stock.count(item, bay);
    let other = pick(random, bays);
    match random.u32(0..6) {
        0 if there > 1 => {
            let some = random.u64(1..there);
            stock.transfer(item, some.into(), bay, other).ok()?;
            Some(format!("Move {some} {item} from bay {bay} to bay {other}."))
        }
        1 if there > 0 => {
            stock.transfer(item, there.into(), bay, other).ok()?;
            Some(format!("Move all {item} from bay {bay} to bay {other}."))
        }
        2 if there > 1 => {
            let some = random.u64(1..there);
            stock.ship(item, some.into(), bay).ok()?;
            Some(format!("Ship {some} {item} from bay {bay}."))
        }
        3 if there > 0 && there.is_multiple_of(2) => {
            stock.ship(item, (there / 2).into(), bay).ok()?;
            Some(format!("Ship half of the {item} in bay {bay}."))
        }
        4 => {
            let some = random.u64(1..=30);
            stock.receive(item, some.into(), bay).ok()?;
            Some(format!("Receive {some} {item} into bay {bay}."))
        }
        5 => {
            let from: Vec<&str> =
                bays.iter().copied().filter(|from| *from != bay && stock.count(item, from) > 0).collect();
            for from in &from {
                stock.transfer(item, stock.count(item, from).into(), from, bay).ok()?;
            }
            (!from.is_empty()).then(|| format!("Bring all {item} to bay {bay}."))
        }
        _ => None,
    }
}

fn tools() -> Vec<serde_json::Value> {
    let item = ("item", "string", "The item's name.");
    let quantity = ("quantity", "integer", "How many, at least 1.");
    let from = ("from_bay", "string", "The bay that it is in.");
    let to = ("to_bay", "string", "The bay that it goes to.");
    vec![
        tool("list_stock", "Lists what is in every bay.", &[]),
        tool("move_stock", "Carries items from one bay to another.", &[item, quantity, from, to]),
        tool("ship_stock", "Sends items away.", &[item, quantity, from]),
        tool("receive_stock", "Brings new items in.", &[item, quantity, to]),
    ]
}
