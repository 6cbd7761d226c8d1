//! The command line with QUIC, and a worker group over it: `GYM_QUIC_SECRET=… cargo run --release --bin own_transport -- group`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use gym_client::Transports;
use gym_core::{CallContext, worker};
use gym_examples::servers::servers;
use gym_group::placement::ClusterSpec;
use gym_group::{GroupOptions, GroupRequest, Local, VirtualCluster, WorkerKind, Workers};
use gym_group::{Payload, WorkerEnv, WorkerGroupExt};
use gym_own_transport::QuicBackend;

struct Squares;
worker! {
    impl Worker for Squares as squares {
        fn start(_: WorkerEnv, (): ()) -> gym_core::Result<Self> { Ok(Self) }
        /// Returns the square of a number.
        exclusive async fn square(&mut self, _: &CallContext, call: Payload<u32>) -> gym_core::Result<Payload<u32>> {
            Ok((call.value * call.value).into())
        }
    }
}

fn main() -> Result<ExitCode> {
    let transports = Transports::standard().with(QuicBackend::from_env()?);
    let workers = Workers::new().with("squares", WorkerKind::of::<Squares>()).over(transports.clone());
    workers.enter();
    if std::env::args().nth(1).is_some_and(|argument| argument == "group") {
        tokio::runtime::Runtime::new()?.block_on(group(workers, transports))?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(gym_server::cli::main(servers().over(transports)))
}

/// Runs four processes that are reached only over QUIC.
async fn group(workers: Workers, transports: Transports) -> Result<()> {
    let cluster = VirtualCluster::new(ClusterSpec::new([4]), Local::new(workers))?.simulate_nodes(&[4]);
    let mut request = GroupRequest::new("squares", "squares", &(), GroupOptions::new(transports.clone()))?;
    request.config = Some(serde_json::from_str(r#"{"transport": ["quic", "http"], "require_transport": "quic"}"#)?);
    let group = cluster.start(&CallContext::within(Duration::from_secs(60)), request).await?;
    let squares = group.call(squares::square, 12).deadline(Duration::from_secs(60)).await?.into_values();
    for path in transports.paths() {
        println!("{} over {}", path.peer, path.transport_name());
    }
    println!("squares: {squares:?}");
    cluster.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}
