//! The smallest environment: typed tools, and the state of each episode.

use gym_server::prelude::*;
use serde_json::json;

/// The cart of each episode.
#[derive(Default)]
struct Shop(Sessions<Vec<(String, u64)>>);

#[derive(serde::Deserialize)]
struct Task {
    wanted: Vec<(String, u64)>,
}

impl ResourcesServer for Shop {
    type Task = Task;

    tools! { |self, _cx, session|
        /// Lists the cart.
        list() => self.0.with_or(session, Vec::new, |cart| json!(cart)),
        /// Puts an item into the cart.
        add(
            /// Its name, in lower case.
            item: String,
            quantity: u64,
        ) => self.0.with_or(session, Vec::new, |cart| {
            cart.push((item, quantity));
            json!({"lines": cart.len()})
        }),
    }

    async fn verify(&self, _: &CallContext, session: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        self.0.with_or(session, Vec::new, |cart| Verdict::correct(*cart == task.wanted))
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        Some(&self.0)
    }
}

fn main() -> std::process::ExitCode {
    cli::main(Servers::stock().resources("shop", |_| Ok(Shop::default())))
}
