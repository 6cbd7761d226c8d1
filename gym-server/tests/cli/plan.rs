//! Cases about the plan of a cluster.

use crate::fixture::{TestFolder, ended_with, row};

/// Measures the configuration of a [`TestFolder`] for a second.
pub(crate) const PLAN: [&str; 9] =
    ["plan", "--config", "gym.yaml", "--agent", "digit_agent", "--input", "tasks.jsonl", "--seconds", "1"];

pub(crate) fn a_plan_is_computed_from_a_measurement_that_checks_itself() {
    let folder = TestFolder::new();
    folder.tasks((0..10).map(|number| row("0123456789", number)));
    let arguments =
        [&PLAN[..], &["--json", "--in-flight", "32", "--worker-cores", "4", "--target", "1000000"]].concat();
    let (out, error) = ended_with(&folder.run(&arguments), 0);
    let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or_else(|| panic!("{value} in {out}{error}"));
    let measured = plan["measured"].as_array().unwrap();
    let in_flight: Vec<&serde_json::Value> = measured.iter().map(|load| &load["in_flight"]).collect();
    assert!(in_flight[0] == 1 && in_flight[2] == 32, "{out}");
    for load in measured {
        let (rate, time) = (number(&load["rollouts_per_minute"]) / 60.0, number(&load["rollout_seconds"]));
        assert!(rate > 1.0 && number(&load["cpu_seconds"]) > 0.0 && number(&load["resident_bytes"]) > 1e6, "{out}");
        assert!((rate * time / number(&load["in_flight"]) - 1.0).abs() < 1e-6, "{out}");
    }
    let off = number(&plan["predicted_rollouts_per_minute"]) / number(&measured[2]["rollouts_per_minute"]) - 1.0;
    assert!((off * 100.0 - number(&plan["off_percent"])).abs() < 1e-6, "{out}");
    let (needed, one) = (&plan["needed"], &plan["expected"][0]);
    assert!(number(&needed["rollouts_per_minute"]) >= 1e6, "{out}");
    assert_eq!(number(&needed["cores"]), number(&needed["workers"]) * 4.0);
    assert!((number(&needed["workers"]) - 1.0) * number(&one["rollouts_per_minute"]) < 1e6, "not one too many: {out}");

    let (out, error) = ended_with(&folder.run(&[&PLAN[..], &["--in-flight", "32"]].concat()), 0);
    assert!(out.contains("the prediction is off by") && out.contains("WORKERS"), "{out}");
    assert!(error.contains("measuring 10 rollouts, "), "{error}");
    let files = std::fs::read_dir(folder.directory.path()).unwrap().count();
    assert_eq!(files, 2, "only the configuration and the tasks are here");
}

pub(crate) fn a_plan_of_rollouts_that_fail_says_why() {
    let folder = TestFolder::new();
    folder.tasks((0..2).map(|number| row("", number)));
    let (_, error) = ended_with(&folder.run(&PLAN), 1);
    assert!(error.contains("2 of 2 rollouts failed") && error.contains("no digits to choose from"), "{error}");
    folder.tasks([]);
    let (_, error) = ended_with(&folder.run(&PLAN), 2);
    assert!(error.contains("tasks.jsonl: the file has no rows"), "{error}");
    let missing = ["plan", "--config", "gym.yaml", "--input", "no.jsonl"];
    let (_, error) = ended_with(&folder.run(&missing), 2);
    assert!(error.contains("no.jsonl: No such file"), "{error}");
}
