//! The in-process transport passes the suite that every transport passes.

use gym_core::InProcess;
use gym_core::testing::conformance::{TransportPair, TransportSetup, transport};

fn pair(switchboard: &InProcess, setup: TransportSetup) -> TransportPair {
    let switchboard = switchboard.clone().with_calls_max(setup.calls_max);
    let listener = switchboard.listen("peer").expect("the name is free again");
    (Box::new(switchboard), Box::new(listener))
}

#[tokio::test]
async fn in_process() {
    transport(async |setup| pair(&InProcess::new(), setup)).await;
}

#[tokio::test]
async fn in_process_written_out_and_read_back() {
    transport(async |setup| pair(&InProcess::new().faithful(), setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_process_on_two_threads() {
    transport(async |setup| pair(&InProcess::new(), setup)).await;
}
