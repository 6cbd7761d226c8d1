//! What lies where: the rules of the warehouse, without sessions or JSON.

use std::collections::BTreeMap;

use gym_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// The most of one item in one bay, and the most that one call moves.
pub const QUANTITY_MAX: u64 = 1_000_000;
/// The most bays of a warehouse, and kinds of items in one bay: `receive_stock` cannot fill the memory.
const KINDS_MAX: usize = 64;
/// The longest name, in characters; longer ones are refused and never repeated in full.
const NAME_CHARS_MAX: usize = 40;

/// Bays, and how much of each item is in them. Items of which there are none are not listed; empty bays are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stock(pub BTreeMap<String, BTreeMap<String, u64>>);

/// Why nothing was changed. The texts are what the model reads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StockError {
    /// No such bay.
    #[error("there is no bay `{0}`; the bays are {1}")]
    UnknownBay(String, String),
    /// Fewer than were asked for.
    #[error("bay {bay} has {there} {item}, not {wanted}")]
    NotEnough {
        /// The bay.
        bay: String,
        /// The item.
        item: String,
        /// How many there are.
        there: u64,
        /// How many were asked for.
        wanted: u64,
    },
    /// Zero, negative, or more than a warehouse holds.
    #[error("the quantity must be from 1 to {QUANTITY_MAX}, not {0}")]
    Quantity(i128),
    /// Empty or too long.
    #[error("an item's name has from 1 to {NAME_CHARS_MAX} characters")]
    Name,
    /// No room.
    #[error("bay {0} is full")]
    Full(String),
    /// From a bay to itself.
    #[error("bay {0} is both where it is and where it should go")]
    SameBay(String),
}

type Change = std::result::Result<(), StockError>;

impl Stock {
    /// Brings items in.
    ///
    /// # Errors
    /// When there is no such bay or no room in it.
    pub fn receive(&mut self, item: &str, quantity: i128, to: &str) -> Change {
        let quantity = counted(quantity)?;
        if item.trim().is_empty() || item.chars().count() > NAME_CHARS_MAX {
            return Err(StockError::Name);
        }
        let bay = self.bay(to)?;
        let there = bay.get(item).copied().unwrap_or(0);
        if there + quantity > QUANTITY_MAX || (there == 0 && bay.len() >= KINDS_MAX) {
            return Err(StockError::Full(to.to_owned()));
        }
        bay.insert(item.to_owned(), there + quantity);
        Ok(())
    }

    /// Sends items away.
    ///
    /// # Errors
    /// When there is no such bay or not enough in it.
    pub fn ship(&mut self, item: &str, quantity: i128, from: &str) -> Change {
        let wanted = counted(quantity)?;
        let bay = self.bay(from)?;
        let there = bay.get(item).copied().unwrap_or(0);
        if there < wanted {
            return Err(StockError::NotEnough { bay: from.to_owned(), item: shown(item), there, wanted });
        }
        if there == wanted {
            bay.remove(item);
        } else {
            bay.insert(item.to_owned(), there - wanted);
        }
        Ok(())
    }

    /// Carries items from one bay to another: both or neither change.
    ///
    /// # Errors
    /// As [`Stock::ship`] and [`Stock::receive`], and when both bays are the same.
    pub fn transfer(&mut self, item: &str, quantity: i128, from: &str, to: &str) -> Change {
        self.bay(to)?;
        if from == to {
            return Err(StockError::SameBay(from.to_owned()));
        }
        self.ship(item, quantity, from)?;
        self.receive(item, quantity, to).inspect_err(|_| {
            self.receive(item, quantity, from).expect("what was just taken fits where it was");
        })
    }

    /// How much of an item is in a bay.
    #[must_use]
    pub fn count(&self, item: &str, bay: &str) -> u64 {
        self.0.get(bay).and_then(|bay| bay.get(item)).copied().unwrap_or(0)
    }

    fn bay(&mut self, name: &str) -> std::result::Result<&mut BTreeMap<String, u64>, StockError> {
        if !self.0.contains_key(name) {
            let known: Vec<&str> = self.0.keys().map(String::as_str).collect();
            return Err(StockError::UnknownBay(shown(name), known.join(", ")));
        }
        Ok(self.0.get_mut(name).expect("just seen"))
    }

    /// Whether a row's stock is one that a warehouse can have.
    pub(super) fn check(&self, key: &str) -> Result<()> {
        let fault = |what: String| Err(Error::invalid(format!("`{key}` of the row {what}")));
        if self.0.is_empty() || self.0.len() > KINDS_MAX {
            return fault(format!("has {} bays; write from 1 to {KINDS_MAX}", self.0.len()));
        }
        for (bay, items) in &self.0 {
            if items.len() > KINDS_MAX {
                return fault(format!("has {} items in bay {}; at most {KINDS_MAX} fit", items.len(), shown(bay)));
            }
            for (item, quantity) in items {
                if !(1..=QUANTITY_MAX).contains(quantity) {
                    let (item, bay) = (shown(item), shown(bay));
                    return fault(format!(
                        "has {quantity} {item} in bay {bay}; write from 1 to {QUANTITY_MAX}, or leave the item out"
                    ));
                }
            }
        }
        Ok(())
    }
}

fn counted(quantity: i128) -> std::result::Result<u64, StockError> {
    u64::try_from(quantity)
        .ok()
        .filter(|count| (1..=QUANTITY_MAX).contains(count))
        .ok_or(StockError::Quantity(quantity))
}

fn shown(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}
