//! The findings about the machines of the cases, graded by the rules that came with them.
#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod machines;

use gym_transport_rdma::probe::machine::{Folder, Machine};
use gym_transport_rdma::tuning::{Finding, Severity, compare, explain, judge};
use machines::judge::{Grade, Said, grade};
use machines::{Case, case, cases, scratch};

fn said(findings: Vec<Finding>) -> Vec<Said> {
    findings
        .into_iter()
        .map(|finding| Said {
            severity: finding.severity.as_str().to_owned(),
            about: finding.about,
            found: finding.found,
            fix: finding.fix,
        })
        .collect()
}

/// Writes the machines of a case, and judges them.
fn findings(case: &Case) -> Vec<Finding> {
    let folder = scratch();
    let roots = case.write(folder.path());
    let machines: Vec<Folder> = roots.iter().map(Folder::new).collect();
    let mut findings = Vec::new();
    let mut nodes: Vec<(String, &dyn Machine)> = Vec::new();
    for (machine, root) in machines.iter().zip(&roots) {
        let name = root.file_name().unwrap().to_str().unwrap().to_owned();
        let mut own = judge(machine);
        if machines.len() > 1 {
            own.iter_mut().for_each(|finding| finding.found = format!("{name}: {}", finding.found));
        }
        findings.append(&mut own);
        nodes.push((name, machine));
    }
    findings.extend(compare(&nodes));
    findings
}

/// Grades the findings about some cases, and returns what is not right.
fn faults(cases: &[Case]) -> Vec<String> {
    let (mut hit, mut all, mut faults) = (0, 0, Vec::new());
    for case in cases {
        let findings = findings(case);
        let verdict = grade(&case.value, &said(findings.clone()));
        all += verdict.expected.len();
        hit += verdict.expected.iter().filter(|(_, grade)| *grade == Grade::Hit).count();
        if !verdict.is_good() {
            let shown: Vec<String> = findings.iter().map(|finding| format!("\n    {finding}")).collect();
            faults.push(format!(
                "{}: {:?}, false alarms {:?}{}",
                case.id,
                verdict.expected,
                verdict.false_alarms,
                shown.concat()
            ));
        }
    }
    println!("{} cases: {hit} of {all} hit, {} with a fault", cases.len(), faults.len());
    faults
}

#[test]
fn the_cases_are_found_and_healthy_machines_are_silent() {
    let faults = faults(&cases());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn names_and_addresses_do_not_matter() {
    let renamed = |case: Case| {
        let text = case.value.to_string();
        let text = text
            .replace("mlx5", "bnxt_re")
            .replace("eth0", "enp9s7")
            .replace("10.20.0", "10.33.9")
            .replace("10.100.0", "172.30.4");
        Case { value: serde_json::from_str(&text).unwrap(), id: case.id }
    };
    let cases: Vec<Case> = cases().into_iter().map(renamed).collect();
    let faults = faults(&cases);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A container with everything passed, as the seed's compose file starts it.
#[test]
fn the_seed_s_environment_has_its_known_findings() {
    let mut case = case("healthy-container-complete");
    case.value["environment"] = serde_json::json!({
        "VLLM_HOST_IP": "10.20.0.11", "RAY_ADDRESS": "10.20.0.1:6379",
        "NCCL_IB_HCA": "mlx5_0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_NET_PLUGIN": "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",
        "NCCL_IB_TC": "106", "NCCL_IB_SL": "3", "NCCL_IB_TIMEOUT": "23", "NCCL_IB_RETRY_CNT": "7",
        "VLLM_RAY_WORKER_ENV_VARS": "NCCL_IB_DISABLE,NCCL_IB_HCA,NCCL_IB_GID_INDEX",
    });
    let about: Vec<(String, Severity)> =
        findings(&case).into_iter().map(|finding| (finding.about, finding.severity)).collect();
    let warning = |about: &str| (about.to_owned(), Severity::Warning);
    assert_eq!(about, [warning("NCCL_IB_TIMEOUT"), warning("NCCL_NET_PLUGIN"), warning("VLLM_RAY_WORKER_ENV_VARS")]);
}

#[test]
fn a_machine_that_was_not_recorded_has_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("proc")).unwrap();
    assert_eq!(judge(&Folder::new(folder.path())), []);
}

#[test]
fn the_first_source_that_names_a_variable_wins() {
    let mut case = case("healthy-container-complete");
    case.value["environment"] = serde_json::json!({ "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "" });
    case.value["host"]["files"] = serde_json::json!({
        "/root/.nccl.conf": "# of the user\nNCCL_IB_TC=106\nNCCL_SOCKET_IFNAME=eth7\n",
        "/etc/nccl.conf": "NCCL_IB_TC=96\nNCCL_IB_HCA=mlx5_0\nNCCL_DEBUG=WARN\n",
    });
    let folder = tempfile::tempdir().unwrap();
    let root = case.write(folder.path()).remove(0);
    let explained = explain(&Folder::new(&root));
    let shown: Vec<String> = explained
        .iter()
        .map(|one| format!("{}={} from {}, not {:?}", one.name, one.value, one.from, one.hides))
        .collect();
    assert_eq!(
        shown,
        [
            "NCCL_DEBUG=WARN from /etc/nccl.conf:3, not []",
            "NCCL_IB_HCA= from the environment, not [(\"/etc/nccl.conf:2\", \"mlx5_0\")]",
            "NCCL_IB_TC=106 from /root/.nccl.conf:2, not [(\"/etc/nccl.conf:1\", \"96\")]",
            "NCCL_SOCKET_IFNAME=eth0 from the environment, not [(\"/root/.nccl.conf:3\", \"eth7\")]",
        ]
    );
}
