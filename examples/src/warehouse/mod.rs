//! Orders in a warehouse, executed step by step. The reward depends only on the final stock.
//!
//! Each episode has its own warehouse, which `seed_session` fills from the row. The model reads it with `list_stock`, and changes
//! it with `move_stock`, `ship_stock` and `receive_stock`. The reward is 1 if the final stock is the row's `target_stock`. Messages
//! of the model are ignored.

mod stock;

use gym_core::{CallContext, ModelResponse, RawObject, ResourcesServer, Response, Result, SessionId, Verdict};
use serde::Deserialize;
use serde_json::{Value, json};

use gym_core::server::Arguments;
use gym_core::server::{SessionTable, Sessions};
pub use stock::{QUANTITY_MAX, Stock, StockError};

/// The environment, with the warehouse of each episode.
#[derive(Debug, Default)]
pub struct Warehouse {
    episodes: Sessions<Episode>,
}

#[derive(Debug, Default)]
struct Episode {
    stock: Stock,
    changes: u64,
    refusals: u64,
}

/// The keys that a row must have.
#[derive(Debug, Deserialize)]
pub struct Task {
    /// The stock at the end of a correct episode.
    pub target_stock: Stock,
}

#[derive(Deserialize)]
struct Seed {
    initial_stock: Stock,
}

impl Warehouse {
    /// Creates an environment of at most `sessions_max` concurrent episodes.
    #[must_use]
    pub fn bounded(sessions_max: usize) -> Self {
        Self { episodes: Sessions::bounded(sessions_max) }
    }

    fn change(
        &self,
        session: &SessionId,
        act: impl FnOnce(&mut Stock) -> std::result::Result<(), StockError>,
    ) -> Result<Value> {
        self.episodes.with(session, |episode| match act(&mut episode.stock) {
            Ok(()) => {
                episode.changes += 1;
                json!({"ok": true})
            }
            // The model reads the reason and can try again; the stock is unchanged.
            Err(error) => {
                episode.refusals += 1;
                json!({"ok": false, "error": error.to_string()})
            }
        })
    }
}

impl ResourcesServer for Warehouse {
    type Task = Task;

    async fn seed_session(&self, _: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject> {
        let seed: Seed = row.view()?;
        seed.initial_stock.check("initial_stock")?;
        self.episodes.begin(session, || Episode { stock: seed.initial_stock, ..Episode::default() })?;
        Ok(RawObject::empty())
    }

    async fn call_tool(
        &self,
        _: &CallContext,
        session: &SessionId,
        tool: &str,
        arguments: &RawObject,
    ) -> Result<Response> {
        let mut call = Arguments::of(arguments);
        let reply = match tool {
            "list_stock" => self.episodes.with(session, |episode| json!({"stock": episode.stock}))?,
            "move_stock" => {
                let (item, quantity) = (call.take::<String>("item"), call.take("quantity"));
                let (from, to) = (call.take::<String>("from_bay"), call.take::<String>("to_bay"));
                let (Some(item), Some(quantity), Some(from), Some(to)) = (item, quantity, from, to) else {
                    return Ok(call.refusal());
                };
                self.change(session, |stock| stock.transfer(&item, quantity, &from, &to))?
            }
            "ship_stock" => {
                let (item, quantity) = (call.take::<String>("item"), call.take("quantity"));
                let from = call.take::<String>("from_bay");
                let (Some(item), Some(quantity), Some(from)) = (item, quantity, from) else {
                    return Ok(call.refusal());
                };
                self.change(session, |stock| stock.ship(&item, quantity, &from))?
            }
            "receive_stock" => {
                let (item, quantity) = (call.take::<String>("item"), call.take("quantity"));
                let to = call.take::<String>("to_bay");
                let (Some(item), Some(quantity), Some(to)) = (item, quantity, to) else { return Ok(call.refusal()) };
                self.change(session, |stock| stock.receive(&item, quantity, &to))?
            }
            _ => return Err(gym_core::server::unknown_tool(tool)),
        };
        Ok(Response::json(reply.to_string()))
    }

    async fn verify(&self, _: &CallContext, session: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        task.target_stock.check("target_stock")?;
        self.episodes.score(session, |episode| {
            Verdict::correct(episode.stock == task.target_stock)
                .with("final_stock", json!(episode.stock))
                .with("changes", episode.changes)
                .with("refusals", episode.refusals)
        })
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        Some(&self.episodes)
    }
}
