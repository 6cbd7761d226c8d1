//! The findings about the machines of the cases, graded by the rules that came with them.
#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod machines;

use gym_transport_rdma::probe::machine::{Folder, Machine};
use gym_transport_rdma::tuning::{Finding, Severity, judge, judge_cluster};
use machines::judge::{Grade, Said, grade};
use machines::{Case, cases};

fn said(findings: Vec<Finding>) -> Vec<Said> {
    let severity = |severity| match severity {
        Severity::Ok => "ok",
        Severity::Warning => "warning",
        Severity::Error => "error",
    };
    findings
        .into_iter()
        .map(|finding| Said {
            severity: severity(finding.severity).to_owned(),
            about: finding.about,
            found: finding.found,
            fix: finding.fix,
        })
        .collect()
}

/// Writes the machines of a case, and judges them.
fn findings(case: &Case) -> Vec<Finding> {
    let folder = tempfile::tempdir().unwrap();
    let roots = case.write(folder.path());
    let machines: Vec<Folder> = roots.iter().map(Folder::new).collect();
    match &machines[..] {
        [one] => judge(one),
        several => {
            let name = |at: usize| roots[at].file_name().unwrap().to_str().unwrap().to_owned();
            let nodes: Vec<(String, &dyn Machine)> =
                several.iter().enumerate().map(|(at, node)| (name(at), node as &dyn Machine)).collect();
            judge_cluster(&nodes)
        }
    }
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
