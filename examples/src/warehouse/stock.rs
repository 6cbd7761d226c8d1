//! The stock of a warehouse and its rules, without sessions or JSON.

use std::collections::BTreeMap;

use gym_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Maximum quantity of one item in one bay, and of one call.
pub const QUANTITY_MAX: u64 = 1_000_000;
/// Maximum number of bays in a warehouse and of items in a bay, so that `receive_stock` cannot fill the memory.
const KINDS_MAX: usize = 64;
/// Maximum characters of a name. Longer names are rejected, and errors show only their beginning.
const NAME_CHARS_MAX: usize = 40;

/// The quantity of each item in each bay. Empty bays are listed; items with quantity 0 are not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stock(pub BTreeMap<String, BTreeMap<String, u64>>);

/// The reason why a change was rejected. The model reads the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StockError {
    /// No such bay.
    #[error("there is no bay `{0}`; the bays are {1}")]
    UnknownBay(String, String),
    /// The bay has fewer items than requested.
    #[error("bay {bay} has {there} {item}, not {wanted}")]
    NotEnough {
        /// The bay.
        bay: String,
        /// The item.
        item: String,
        /// The quantity in the bay.
        there: u64,
        /// The quantity requested.
        wanted: u64,
    },
    /// The quantity is zero, negative or too large.
    #[error("the quantity must be from 1 to {QUANTITY_MAX}, not {0}")]
    Quantity(i128),
    /// The name is empty or too long.
    #[error("an item's name has from 1 to {NAME_CHARS_MAX} characters")]
    Name,
    /// The bay is full.
    #[error("bay {0} is full")]
    Full(String),
    /// Both bays are the same.
    #[error("bay {0} is both where it is and where it should go")]
    SameBay(String),
}

type Change = std::result::Result<(), StockError>;

impl Stock {
    /// Adds items to a bay.
    ///
    /// # Errors
    /// An error if there is no such bay, or if it is full.
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

    /// Removes items from a bay.
    ///
    /// # Errors
    /// An error if there is no such bay, or if it has too few of the items.
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

    /// Moves items between two bays. If the move fails, both bays are unchanged.
    ///
    /// # Errors
    /// The errors of [`Stock::ship`] and [`Stock::receive`]; also an error if both bays are the same.
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

    /// Returns the quantity of an item in a bay.
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

    /// Rejects the stock of a row if it is impossible in a warehouse.
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
