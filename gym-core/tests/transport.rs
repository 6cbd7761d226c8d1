//! The in-process transport passes the conformance suite of transports.

use gym_core::testing::conformance::{TransportPair, TransportSetup, ordered_transport, transport};
use gym_core::testing::{Faults, SimNet};
use gym_core::transport::InProcess;

fn pair(in_process: &InProcess, setup: TransportSetup) -> TransportPair {
    let in_process = in_process.clone().with_calls_max(setup.calls_max);
    let listener = in_process.listen("peer").expect("the name is free again");
    (Box::new(in_process), Box::new(listener))
}

#[tokio::test]
async fn in_process() {
    transport(async |setup| pair(&InProcess::new(), setup)).await;
    ordered_transport(async |setup| pair(&InProcess::new(), setup)).await;
}

#[tokio::test]
async fn in_process_written_out_and_read_back() {
    transport(async |setup| pair(&InProcess::new().faithful(), setup)).await;
    ordered_transport(async |setup| pair(&InProcess::new().faithful(), setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_process_on_two_threads() {
    transport(async |setup| pair(&InProcess::new(), setup)).await;
    ordered_transport(async |setup| pair(&InProcess::new(), setup)).await;
}

fn simulated(setup: TransportSetup, faults: Faults) -> TransportPair {
    let net = SimNet::new(1, faults);
    let listener = net.host("server").listen("peer").expect("nobody listens there");
    (Box::new(net.host("client").with_calls_max(setup.calls_max)), Box::new(listener))
}

#[tokio::test(start_paused = true)]
async fn simulated_without_faults() {
    transport(async |setup| simulated(setup, Faults::NONE)).await;
}

#[tokio::test(start_paused = true)]
async fn simulated_with_delays() {
    transport(async |setup| simulated(setup, Faults::calm())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulated_on_two_threads_by_the_real_clock() {
    transport(async |setup| simulated(setup, Faults::calm())).await;
}
