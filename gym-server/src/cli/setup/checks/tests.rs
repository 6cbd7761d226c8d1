//! The start sequence on recorded machines.

#[path = "../../../../../gym-transport-rdma/tests/machines/mod.rs"]
mod machines;

use std::collections::BTreeSet;

use gym_client::transport::rdma::probe::machine::{Folder, Machine};
use machines::{Case, case, cases, scratch};
use serde_json::{Value, json};

use super::asked::Asked;
use super::report::StartReport;
use super::settings;
use crate::cli::args::options::ChecksMode;
use crate::cli::exit::Failure;

/// The environment of the seed's worker container.
fn seed() -> Value {
    json!({
        "RAY_MODE": "worker", "VLLM_HOST_IP": "10.20.0.11", "RAY_ADDRESS": "10.20.0.1:6379",
        "NCCL_IB_HCA": "mlx5_0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_NET_PLUGIN": "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",
        "NCCL_IB_TC": "106", "NCCL_IB_SL": "3", "NCCL_IB_TIMEOUT": "23", "NCCL_IB_RETRY_CNT": "7",
        "VLLM_RAY_WORKER_ENV_VARS": "NCCL_IB_DISABLE,NCCL_IB_HCA,NCCL_IB_GID_INDEX",
    })
}

/// Starts on the machine of a case, as `run --worker` does. Returns the settings and the report.
fn start(case: &Case, more: impl Fn(Asked) -> Asked, mode: ChecksMode) -> (Vec<String>, StartReport) {
    let folder = scratch();
    let root = case.write(folder.path()).remove(0);
    let machine = Folder::new(&root);
    let asked = more(Asked::of_environment(&machine.variables().expect("a folder answers")));
    (settings::lines(&machine), StartReport::of(&machine, &asked, mode))
}

fn as_it_is(asked: Asked) -> Asked {
    asked
}

fn with_nccl(asked: Asked) -> Asked {
    Asked { nccl: Some("cluster.communication_backend: nccl".to_owned()), ..asked }
}

fn with_rdma(asked: Asked) -> Asked {
    Asked { transport: Some("rdma".to_owned()), ..asked }
}

fn text(report: &StartReport) -> String {
    match report.failure() {
        Some(Failure::Usage(text)) => text,
        other => panic!("exit code 2 is wanted, not {other:?}: {report:?}"),
    }
}

#[test]
fn the_seed_s_container_starts_with_its_warnings() {
    let mut case = case("healthy-container-complete");
    case.value["environment"] = seed();
    let (settings, report) = start(&case, as_it_is, ChecksMode::Fail);
    assert_eq!(report.failure(), None, "{report:?}");
    assert!(settings.contains(&"configuration: NCCL_IB_TC=106  the environment".to_owned()), "{settings:?}");
    let said: Vec<String> = report.said().collect();
    for line in [
        "GPU ok: 1 NVIDIA GPU, driver 570.86.15",
        "NCCL",
        "RDMA ok: mlx5_0",
        "device nodes ok: ",
        "verbs ok: ",
        "memlock",
    ] {
        assert!(said.iter().any(|one| one.starts_with(&format!("checks: {line}"))), "{line}: {said:#?}");
    }
    let warned: Vec<&str> = report.warnings.iter().map(|text| text.split(':').next().unwrap()).collect();
    assert_eq!(warned, ["NCCL_IB_TIMEOUT", "NCCL_NET_PLUGIN", "VLLM_RAY_WORKER_ENV_VARS"]);
}

#[test]
fn one_wrong_setting_of_each_kind_ends_the_start_with_its_fix() {
    let mut kinds = BTreeSet::new();
    for case in cases().iter().filter(|case| case.value.get("nodes").is_none()) {
        let expected = case.value["expected"].as_array().unwrap();
        let about: Vec<&str> = expected
            .iter()
            .filter(|expected| expected["severity"] == "error")
            .map(|expected| expected["about"].as_str().unwrap())
            .collect();
        if about.is_empty() {
            continue;
        }
        let kind = case.value["kind"].as_str().unwrap();
        let asks = if kind == "ucx" { with_rdma } else { with_nccl };
        let (_, report) = start(case, asks, ChecksMode::Fail);
        let said = text(&report);
        assert!(said.contains("\n  fix: ") && said.contains("--checks warn"), "{}: {said}", case.id);
        let named = about.iter().any(|about| said.contains(about));
        assert!(named, "{}: {about:?} in {said}", case.id);
        // The same machine starts where nobody asks, or where warnings are wanted.
        for (asks, mode) in [(asks, ChecksMode::Warn), ((|_| Asked::default()) as fn(Asked) -> Asked, ChecksMode::Fail)]
        {
            let (_, report) = start(case, asks, mode);
            assert!(report.failures.is_empty() && !report.warnings.is_empty(), "{} {mode:?}: {report:?}", case.id);
        }
        assert_eq!(start(case, asks, ChecksMode::Off).1, StartReport::default());
        kinds.insert(kind.to_owned());
    }
    let wanted =
        ["conf", "gdr", "gid", "hca", "ib", "limit", "node", "parse", "plugin", "qos", "shm", "socket", "time", "ucx"];
    assert_eq!(kinds.iter().map(String::as_str).collect::<Vec<_>>(), wanted);
}

/// The requests of the environment alone: no key of a configuration.
#[test]
fn a_wrong_variable_ends_the_start_without_any_configuration() {
    for id in [
        "hca-misspelt",
        "gid-link-local-index",
        "socket-not-here",
        "parse-true",
        "plugin-net-empty",
        "qos-class-in-level",
        "ucx-tls-quotes",
        "socket-gloo-caret",
        "conf-file-tilde",
    ] {
        let case = case(id);
        let (_, report) = start(&case, as_it_is, ChecksMode::Fail);
        let variable = case.value["expected"][0]["about"].as_str().unwrap();
        assert!(text(&report).contains(&format!("\n{variable}: ")), "{id}: {report:?}");
    }
}

#[test]
fn healthy_machines_start_and_say_nothing_where_nothing_is_asked() {
    for case in cases().iter().filter(|case| case.id.starts_with("healthy-")) {
        // What is healthy for NCCL may need a mention for UCX.
        let may: Vec<&str> = case.value["may"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let is_alarm = |warning: &String| !may.iter().any(|about| warning.starts_with(about));
        let (_, report) = start(case, as_it_is, ChecksMode::Fail);
        assert!(report.failures.is_empty() && !report.warnings.iter().any(is_alarm), "{}: {report:?}", case.id);
        let (_, report) = start(case, |_| Asked::default(), ChecksMode::Fail);
        assert!(!report.warnings.iter().any(is_alarm), "{}: {report:?}", case.id);
        assert_eq!((report.failures.len(), report.lines.len()), (0, 0), "{}: {report:?}", case.id);
    }
}

#[test]
fn what_a_container_lacks_is_an_error_if_it_is_asked_for() {
    let complete = || case("healthy-container-complete");
    let mut without_gpu = complete();
    without_gpu.value["host"]["dev"] = json!(["infiniband/rdma_cm", "infiniband/uverbs0"]);
    without_gpu.value["host"]["gpus"] = json!([]);
    without_gpu.value["host"]["nvidia"] = Value::Null;
    let said = text(&start(&without_gpu, as_it_is, ChecksMode::Fail).1);
    assert!(said.contains("or unset these variables for a worker without GPUs"), "{said}");
    assert!(
        said.contains("GPU: no NVIDIA GPU") && said.contains("--gpus all") && said.contains("asked for by NCCL_"),
        "{said}"
    );

    let mut without_card = complete();
    without_card.value["host"]["rdma"] = json!([]);
    let said = text(&start(&without_card, as_it_is, ChecksMode::Fail).1);
    assert!(said.contains("RDMA: no RDMA device") && said.contains("asked for by NCCL_IB_HCA"), "{said}");

    without_card.value["environment"]["NCCL_IB_DISABLE"] = json!("1");
    let (_, report) = start(&without_card, as_it_is, ChecksMode::Fail);
    assert!(report.failures.is_empty(), "NCCL is told to do without: {report:?}");

    let mut without_library = complete();
    without_library.value["host"]["libraries"].as_object_mut().unwrap().remove("libnccl.so.2");
    let (_, report) = start(&without_library, as_it_is, ChecksMode::Fail);
    assert!(report.failures.is_empty(), "a Python package may have it: {report:?}");
    let said = text(&start(&without_library, with_nccl, ChecksMode::Fail).1);
    assert!(said.contains("NCCL: NCCL not found") && said.contains("communication_backend: nccl"), "{said}");

    let said = text(&start(&case("healthy-laptop"), with_rdma, ChecksMode::Fail).1);
    assert!(said.contains("RDMA: no RDMA device") && said.contains("require_transport: rdma"), "{said}");
    let gpu = |asked| Asked { gpus: Some("CUDA_VISIBLE_DEVICES".to_owned()), ..asked };
    let said = text(&start(&case("healthy-laptop"), gpu, ChecksMode::Fail).1);
    assert!(said.contains("GPU: no NVIDIA GPU") && said.contains("asked for by CUDA_VISIBLE_DEVICES"), "{said}");
}
