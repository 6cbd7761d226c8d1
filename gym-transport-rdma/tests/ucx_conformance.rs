//! Runs the conformance suites of transports and worker groups over UCX, on shared memory and on the network.

mod common;

use std::sync::Arc;

use common::Way;
use common::transport::Ends;
use gym_core::CallContext;
use gym_core::testing::conformance::{ordered_transport, transport};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Connector, Listener};
use gym_group::testing::{ServedGroups, group};

async fn transport_over(way: Way) {
    let Some(ends) = Ends::open(way).await else { return };
    transport(async |setup| ends.conformance_pair(setup).await).await;
    ordered_transport(async |setup| ends.conformance_pair(setup).await).await;
}

async fn group_over(way: Way) {
    let Some(ends) = Ends::open(way).await else { return };
    let ends = Arc::new(ends);
    group(&ServedGroups::over(move |handler| {
        let ends = Arc::clone(&ends);
        async move {
            let (connector, mut listener) = ends.pair(ConnectionLimits::default()).await;
            let endpoint = listener.endpoints()[0].clone();
            tokio::spawn(async move {
                while let Ok(incoming) = listener.accept().await {
                    tokio::spawn(incoming.serve(Arc::clone(&handler), Default::default()));
                }
            });
            let connected = connector.connect(&CallContext::default(), &endpoint, &ConnectOptions::default()).await;
            connected.expect("the listener accepts")
        }
    }))
    .await;
}

#[tokio::test]
async fn the_network_passes_the_transport_suite() {
    transport_over(Way::Network).await;
}

#[tokio::test]
async fn shared_memory_passes_the_transport_suite() {
    transport_over(Way::SharedMemory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_memory_passes_the_transport_suite_on_two_threads() {
    transport_over(Way::SharedMemory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_network_passes_the_group_suite() {
    group_over(Way::Network).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_memory_passes_the_group_suite() {
    group_over(Way::SharedMemory).await;
}
