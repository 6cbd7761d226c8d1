//! Reports of a real UCX. With `GYM_UCX_REQUIRED=1`, a missing library is a failure.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use gym_transport_rdma::transport::{FabricError, LoadOptions, UcxReport};

#[test]
fn a_real_ucx_names_its_transports_and_what_it_did_to_the_process() {
    let report = match UcxReport::take(&LoadOptions::default()) {
        Ok(report) => report,
        Err(FabricError::Load(error)) if std::env::var_os("GYM_UCX_REQUIRED").is_none() => {
            eprintln!("NOT RUN: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    println!("{report:?}");
    let numbers = report.version.split('.').map(|number| number.parse::<u32>().unwrap()).collect::<Vec<_>>();
    assert!(numbers >= vec![1, 13, 0], "{}", report.version);
    assert!(report.path.is_file(), "{}", report.path.display());
    assert!(report.of(gym_transport_rdma::UCX_TCP).contains(&"tcp/lo"), "every Linux has a loopback: {report:?}");
    assert!(!report.of(gym_transport_rdma::SHM).is_empty(), "{report:?}");
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<UcxReport>(&text).unwrap(), report);
}
