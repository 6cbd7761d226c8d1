//! Cases about resumed collections whose servers have changed.

use std::path::Path;

use serde_json::json;

use crate::fixture::{CONFIG, TestFolder, ended_with, row};

/// A collection of two tasks with the settings of [`CONFIG`].
fn recorded() -> TestFolder {
    let folder = TestFolder::new();
    folder.tasks((0..2).map(|number| row("0123456789", number)));
    let (out, error) = own(&folder, &[], 0);
    assert!(out.contains("2 of 2 rollouts are recorded"), "{out}{error}");
    folder
}

/// Collects with servers of its own.
fn own(folder: &TestFolder, options: &[&str], code: i32) -> (String, String) {
    let port = folder.port();
    let options = [&["--config", "gym.yaml", &port], options].concat();
    ended_with(&folder.collect(&options).output().unwrap(), code)
}

/// Sets a setting of the model.
fn set(folder: &TestFolder, setting: &str) {
    let model = "scripted_model:\n      entrypoint: app.py\n";
    std::fs::write(folder.file("gym.yaml"), CONFIG.replace(model, &format!("{model}      {setting}\n"))).unwrap();
}

/// Returns the mark of each row, and `null` for rows without one, in the order of the repeats.
fn marks(folder: &TestFolder) -> Vec<serde_json::Value> {
    let mut rows = folder.rollouts();
    rows.sort_by_key(|row| row["_ng_rollout_index"].as_u64());
    rows.iter().map(|row| row["_gym_settings"].clone()).collect()
}

pub(crate) fn a_resume_with_other_settings_is_refused_or_marked() {
    let folder = recorded();
    set(&folder, "seed: 7");
    let before = folder.contents();
    let (_, error) = own(&folder, &["--resume", "--num-repeats", "2"], 2);
    let says = "policy_model.responses_api_models.scripted_model.seed: was absent, is 7";
    assert!(error.contains(says) && error.contains("--changed-settings mark"), "{error}");
    assert!(folder.contents() == before, "the refused resume changed a file");

    own(&folder, &["--resume", "--num-repeats", "2", "--changed-settings", "mark"], 0);
    assert_eq!(marks(&folder), [json!(null), json!(null), json!(1), json!(1)]);

    // What decides no reward may change, and both sets of settings are known now.
    set(&folder, "seed: 7\n      latency_ms: 1");
    let started = folder.start(&[]);
    let (_, error) = ended_with(&folder.collected(&["--resume", "--num-repeats", "3"]), 0);
    assert!(!error.contains("settings"), "{error}");
    assert_eq!(started.interrupt(), Some(0));
    assert_eq!(marks(&folder)[4..], [json!(1), json!(1)]);
    std::fs::write(folder.file("gym.yaml"), CONFIG).unwrap();
    own(&folder, &["--resume", "--num-repeats", "4"], 0);
    assert_eq!(marks(&folder)[6..], [json!(null), json!(null)]);
    ended_with(&folder.run(&["view", "out/rollouts.jsonl", "--list"]), 0);
}

pub(crate) fn outputs_that_cannot_continue_are_refused_before_servers_start() {
    let folder = recorded();
    let refused = |options: &[&str], says: &str| {
        let (_, error) = own(&folder, options, 2);
        assert!(error.contains(says) && !error.contains("started 4 servers"), "{options:?}: {error}");
    };
    let before = folder.contents();
    refused(&["--resume", "--limit", "1"], "there are fewer tasks");
    refused(&["--resume", "--temperature", "0.5"], "responses_create_params.temperature: was absent, is 0.5");
    refused(
        &["--resume", "--events", "/proc/events.jsonl"],
        "write events to /proc/events.jsonl: No such file or directory (os error 2); choose another path",
    );
    refused(&["--resume", "--tensorboard", "/proc/scalars"], "to /proc/scalars: ");
    let elsewhere =
        ["collect", "--config", "gym.yaml", "-a", "digit_agent", "-i", "tasks.jsonl", "-o", "/proc/new.jsonl"];
    let (_, error) = ended_with(&folder.run(&elsewhere), 2);
    let says = "write /proc/new.jsonl: no file can be created in this folder";
    assert!(error.contains(says) && !error.contains("started 4 servers"), "{error}");
    let locked = std::fs::File::open(folder.file("out/rollouts.jsonl")).unwrap();
    locked.try_lock().unwrap();
    let says = "out/rollouts.jsonl: another collector writes to this file; wait until it ends or choose another output";
    for options in ["--resume", "--overwrite"] {
        let (_, error) = own(&folder, &[options], 1);
        assert!(error.contains(says) && !error.contains("started 4 servers"), "{error}");
    }
    drop(locked);
    set(&folder, "seed: 7");
    refused(&["--resume"], "scripted_model.seed: was absent, is 7");
    std::fs::write(folder.file("gym.yaml"), CONFIG).unwrap();
    assert!(folder.contents() == before, "a refused collection changed a file");
    own(&folder, &["--resume", "--num-repeats", "2", "--events", "events/new.jsonl"], 0);
}

pub(crate) fn a_remote_head_server_tells_the_settings_of_its_servers() {
    let folder = recorded();
    set(&folder, "model: \"${other_model}\"\nother_model: elsewhere");
    let started = folder.start(&[]);
    let before = folder.contents();
    let (_, error) = ended_with(&folder.collected(&["--resume", "--num-repeats", "2"]), 2);
    let says = "policy_model.responses_api_models.scripted_model.model: was absent, is \"elsewhere\"";
    assert!(error.contains(says), "{error}");
    assert!(folder.contents() == before, "the refused resume changed a file");
    assert_eq!(started.interrupt(), Some(0));
}

pub(crate) fn results_without_settings_resume_with_one_warning() {
    let folder = recorded();
    std::fs::remove_file(folder.file("out/rollouts_settings.json")).unwrap();
    let warns = |options: &[&str]| own(&folder, options, 0).1.contains("not checked against the servers' settings");
    assert!(warns(&["--resume", "--num-repeats", "2"]));
    assert!(!warns(&["--resume", "--num-repeats", "3"]));
    assert_eq!(marks(&folder), vec![json!(null); 6]);
}

pub(crate) fn a_resume_of_nothing_says_so_and_a_misspelled_output_is_refused() {
    let folder = recorded();
    let before = folder.contents();
    let output = |path: &str, code| {
        let (port, rows) =
            (folder.port(), ["--config", "gym.yaml", "-a", "digit_agent", "-i", "tasks.jsonl", "--resume"]);
        ended_with(&folder.run(&[&["collect"], &rows[..], &["-o", path, &port]].concat()), code)
    };
    for (path, meant) in [("out/rolouts.jsonl", "out/rollouts.jsonl"), ("otu/rollouts.jsonl", "out/rollouts.jsonl")] {
        let (_, error) = output(path, 2);
        let says =
            format!("{path}: there are no results to resume; did you mean `{meant}`?\n  fix: name it with --output");
        assert!(error.contains(&says), "{error}");
    }
    assert!(folder.contents() == before && !folder.file("otu").exists(), "the refused resume wrote a file");

    let (out, error) = output("out/other.jsonl", 0);
    assert!(error.contains("out/other.jsonl: there are no results to resume yet; this run begins them"), "{error}");
    assert!(out.contains("2 of 2 rollouts are recorded"), "{out}{error}");
    let (_, error) = output("out/other.jsonl", 0);
    assert!(!error.contains("no results to resume"), "{error}");
}

pub(crate) fn results_of_an_earlier_commit_are_read_and_resumed() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/collection");
    for with_index in [true, false] {
        let folder = TestFolder::new();
        std::fs::create_dir(folder.file("out")).unwrap();
        for entry in std::fs::read_dir(&data).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            let at = if name == "tasks.jsonl" { "" } else { "out/" };
            std::fs::copy(entry.path(), folder.file(&format!("{at}{name}"))).unwrap();
        }
        if !with_index {
            std::fs::remove_file(folder.file("out/rollouts.jsonl.index")).unwrap();
        }
        let (list, said) = ended_with(&folder.run(&["view", "out/rollouts.jsonl", "--list"]), 0);
        assert!(list.contains("2-1 ") && list.contains("failed: verifier_error"), "{list}");
        assert!(said.contains("2 of 6 rollouts are missing"), "{said}");
        let before = std::fs::read_to_string(folder.file("out/rollouts.jsonl")).unwrap();
        let (out, error) = own(&folder, &["--resume", "--num-repeats", "3", "--attempts", "1"], 3);
        // The failed rollouts have no attempts left, but their task has one more repeat.
        assert!(out.contains("9 of 12 rollouts are recorded (4 of them by earlier runs), 3 failed"), "{out}{error}");
        assert!(error.contains("3 of the failed have used all their attempts (1)"), "{error}");
        assert!(std::fs::read_to_string(folder.file("out/rollouts.jsonl")).unwrap().starts_with(&before));
    }
}
