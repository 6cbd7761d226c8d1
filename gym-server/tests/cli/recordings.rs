//! Cases about recordings of machines: `doctor --record` and `--replay`.

#[path = "../../../gym-transport-rdma/tests/machines/mod.rs"]
mod machines;

use std::path::Path;

use machines::judge::{Grade, Said, grade};
use machines::{case, scratch};
use serde_json::Value;

use crate::fixture::{TestFolder, ended_with};

fn replayed(folder: &TestFolder, path: &Path, code: i32) -> Value {
    let output = folder.run(&["doctor", "--json", "--replay", path.to_str().unwrap()]);
    serde_json::from_str(&ended_with(&output, code).0).unwrap()
}

pub(crate) fn this_machine_is_recorded_and_replayed() {
    let folder = TestFolder::new();
    let (out, _) = ended_with(&folder.run(&["doctor", "--record", "doctor.json"]), 0);
    for words in ["files read", "variables", "addresses", "--redact replaces them", "doctor --replay doctor.json"] {
        assert!(out.contains(words), "{words}: {out}");
    }
    let (_, error) = ended_with(&folder.run(&["doctor", "--record", "doctor.json"]), 2);
    assert!(error.contains("doctor.json exists; fix: name another file, or add --overwrite"), "{error}");
    let redacted = ["doctor", "--record", "doctor.json", "--overwrite", "--redact=word", "--json"];
    let report: Value = serde_json::from_str(&ended_with(&folder.run(&redacted), 0).0).unwrap();
    assert_eq!(
        (&report["redacted"], report["bytes"].as_u64().unwrap() < 1 << 20),
        (&Value::Bool(true), true),
        "{report}"
    );
    let text = std::fs::read_to_string(folder.file("doctor.json")).unwrap();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert!(!text.contains(&format!("\"{}", host.trim())), "{host}{text}");
    let recording: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(recording["rgym_recording"], 1);
    assert!(recording["taken"].as_str().unwrap().ends_with('Z'), "{}", recording["taken"]);
    // The probe of this machine says the same, apart from the stand-ins.
    let live = folder.run(&["doctor", "--json", "--no-self-test"]);
    let live: Value = serde_json::from_slice(&live.stdout).unwrap();
    let replay = folder.run(&["doctor", "--json", "--replay", "doctor.json"]);
    let replay: Value = serde_json::from_slice(&replay.stdout).unwrap();
    let about = |value: &Value, key: &str| -> Vec<(String, String)> {
        let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
        let findings = value["findings"].as_array().unwrap().iter();
        let mut about: Vec<_> = findings.map(|finding| (text(finding, key), text(finding, "found"))).collect();
        // UCX reports on itself on the live machine alone, and so do ports, descriptors, disk and clock.
        let probed = ["rdma_devices", "device_nodes", "container", "locked_memory", "gpu", "nccl", "gpu_direct"];
        about.retain(|(about, _)| probed.contains(&about.as_str()));
        about.sort();
        about
    };
    assert_eq!(about(&live, "topic"), about(&replay, "about"));
}

pub(crate) fn a_replay_judges_folders_and_recordings_with_their_names() {
    let (folder, trees) = (TestFolder::new(), scratch());
    case("shm-missing").write(trees.path());
    let root = trees.path().join("shm-missing");
    let replay = replayed(&folder, &root, 4);
    let said: Vec<Said> = replay["findings"].as_array().unwrap().iter().map(Said::of).collect();
    let verdict = grade(&case("shm-missing").value, &said);
    assert!(verdict.is_good(), "{verdict:?} of {said:?}");
    assert!(replay["findings"].as_array().unwrap().iter().all(|finding| finding["because"].is_string()));
    // A healthy machine, with a warning about none of it.
    case("healthy-roce-settings").write(trees.path());
    let replay = replayed(&folder, &trees.path().join("healthy-roce-settings"), 0);
    assert_eq!(replay["ports"], Value::Null);
    assert_eq!(replay["machines"][0]["ports"][0]["gid"]["index"], 3, "{replay}");
    // A folder of roots is a cluster.
    case("healthy-two-nodes").write(trees.path());
    let replay = replayed(&folder, &trees.path().join("healthy-two-nodes"), 0);
    let machines = replay["machines"].as_array().unwrap();
    assert_eq!(
        machines.iter().map(|machine| machine["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["node-a", "node-b"]
    );
    let node = trees.path().join("healthy-two-nodes/node-a");
    let both = [&root, &node].map(|path| path.to_str().unwrap());
    let (out, _) = ended_with(&folder.run(&["doctor", "--replay", both[0], both[1]]), 4);
    assert!(out.contains("error       shared_memory") && out.contains(both[1]), "{out}");
    // What two machines must have alike.
    case("inherit-nccl-versions").write(trees.path());
    let nodes = trees.path().join("inherit-nccl-versions");
    let (out, _) = ended_with(&folder.run(&["doctor", "--replay", nodes.to_str().unwrap()]), 4);
    assert!(out.contains("all machines, side by side\n\nerror       NCCL"), "{out}");
    assert!(out.contains("fix: install the same version on every node"), "{out}");
    // What the grades of a case mean.
    let other = grade(&case("limit-memlock").value, &said);
    assert!(
        other.expected.iter().any(|(_, grade)| *grade == Grade::Missed) && !other.false_alarms.is_empty(),
        "{other:?}"
    );
}

pub(crate) fn what_cannot_be_replayed_or_recorded_is_refused_with_the_fix() {
    let folder = TestFolder::new();
    std::fs::write(folder.file("other.json"), "{\"findings\": []}").unwrap();
    std::fs::write(folder.file("newer.json"), "{\"rgym_recording\": 99}").unwrap();
    std::fs::write(folder.file("binary"), [0xff, 0xfe, 0]).unwrap();
    std::fs::create_dir_all(folder.file("empty/etc")).unwrap();
    std::fs::create_dir_all(folder.file("linked")).unwrap();
    std::os::unix::fs::symlink("/proc", folder.file("linked/proc")).unwrap();
    for (arguments, words) in [
        (&["--replay", "none.json"][..], "cannot read none.json: No such file"),
        (
            &["--replay", "other.json"],
            "other.json: no recording of a machine: it has no key rgym_recording; rgym doctor --record FILE",
        ),
        (&["--replay", "gym.yaml"], "gym.yaml: no recording of a machine: it is no JSON"),
        (&["--replay", "binary"], "binary: no recording of a machine: it is no text; fix:"),
        (&["--replay", "newer.json"], "format 99, and this program reads formats up to 1: use a newer rgym"),
        (&["--replay", "empty"], "empty holds no machine: neither it nor a folder in it has proc or sys; fix:"),
        (&["--replay", "linked"], "linked holds no machine"),
        (&["--replay", "a", "--record", "b"], "cannot be used with"),
        (&["--redact"], "--record"),
    ] {
        let (_, error) = ended_with(&folder.run(&[&["doctor"], arguments].concat()), 2);
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
    let (_, error) = ended_with(&folder.run(&["doctor", "--record", "none/doctor.json"]), 1);
    assert!(
        error.contains("cannot write none/doctor.json: No such file") && error.contains("fix: name a file in a folder"),
        "{error}"
    );
}
