//! Commands that only report on servers, on this machine, and on configurations.

pub(super) mod config;
pub(super) mod doctor;
mod finding;
mod machine;
#[cfg(feature = "ray")]
pub(super) mod ray;
mod recording;
pub(super) mod self_test;
pub(super) mod status;
pub(super) mod stuck;
pub(super) mod top;
pub(super) mod workers;

use std::pin::pin;
use std::time::Duration;

use gym_core::Endpoint;

/// Limit for a request to the head server, which responds from memory.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// A command says after this time that it waits.
const LOG_AFTER: Duration = Duration::from_secs(2);

/// Returns the fix of a request that no head server answered.
fn without_head() -> String {
    format!(
        "start servers with `{} run`, or set another head server with --head-url or HEAD_SERVER_URL",
        crate::cli::console::program()
    )
}

/// Waits for the answer of a head server, and says so if it takes long.
async fn with_notice<T>(head: &Endpoint, within: Duration, answer: impl Future<Output = T>) -> T {
    let mut answer = pin!(answer);
    match tokio::time::timeout(LOG_AFTER, answer.as_mut()).await {
        Ok(answer) => answer,
        Err(_) => {
            eprintln!("waiting for the head server at {head}, up to {} s", within.as_secs());
            answer.await
        }
    }
}
