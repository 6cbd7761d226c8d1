//! The machines of all cases: written, judged, recorded and replayed.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod machines;

use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gym_transport_rdma::probe::Probe;
use gym_transport_rdma::probe::machine::{
    Folder, Loaded, Machine, Recorder, Recording, RecordingError, Redactor, Unknown,
};
use gym_transport_rdma::tuning::{explain, judge};
use machines::judge::{Grade, Said, grade};
use machines::{case, cases, scratch};
use proptest::prelude::*;

/// Returns a line for each entry below a folder: its path, its kind, and what it holds.
fn listing(folder: &Path, path: &str, lines: &mut Vec<String>) {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    for name in names {
        let (full, path) = (folder.join(&name), format!("{path}/{}", name.to_str().unwrap()));
        let metadata = fs::symlink_metadata(&full).unwrap();
        if metadata.is_symlink() {
            lines.push(format!("{path} -> {}", fs::read_link(&full).unwrap().display()));
        } else if metadata.is_dir() {
            lines.push(format!("{path}/"));
            listing(&full, &path, lines);
        } else if metadata.mode() & 0o777 == 0 {
            lines.push(format!("{path} closed"));
        } else if metadata.len() > 1 << 20 {
            lines.push(format!("{path} of {} bytes", metadata.len()));
        } else {
            lines.push(format!("{path} {:016x}", fnv(&fs::read(&full).unwrap())));
        }
    }
}

/// FNV-1a, of 64 bits.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

const TAKEN: &str = "2026-11-29T16:20:00Z";

/// Judges a machine and returns the result as JSON, which shows every difference.
fn judged(machine: &dyn Machine) -> String {
    serde_json::to_string_pretty(&(Probe::of(machine, &Loaded::default()), judge(machine), explain(machine))).unwrap()
}

/// Returns the machine's judgement, and its recording.
fn recorded(root: &Path) -> (String, Recording) {
    let recorder = Recorder::new(Folder::new(root));
    let judgement = judged(&recorder);
    // As checks do that judge settings.
    let _ = (recorder.variables(), recorder.addresses(), recorder.space("/dev/shm"));
    (judgement, recorder.finish("0.1.0", TAKEN, Loaded::default()))
}

/// Replaying a recording is judging the machine, byte for byte.
fn assert_replayed_alike(id: &str, root: &Path) -> Recording {
    let direct = Folder::new(root);
    let (noted, recording) = recorded(root);
    assert_eq!(noted, judged(&direct), "{id}: recording changes nothing");
    let json = recording.to_json();
    let read = Recording::from_json(&json).unwrap();
    assert_eq!(read.to_json(), json, "{id}");
    assert!(read == recording, "{id}");
    assert_eq!(judged(&read), noted, "{id}");
    assert_eq!(read.variables(), direct.variables(), "{id}");
    assert_eq!(read.addresses(), direct.addresses(), "{id}");
    assert_eq!(read.space("/dev/shm"), direct.space("/dev/shm"), "{id}");
    recording
}

/// Asks everything that a machine has.
fn ask_all(machine: &dyn Machine, folder: &str) {
    for name in machine.names(folder).unwrap_or_default() {
        let path = format!("{}/{name}", folder.trim_end_matches('/'));
        let _ = (machine.text(&path), machine.bytes(&path), machine.open_node(&path));
        // A link is not followed, so no loop is.
        if machine.real(&path).is_ok_and(|real| real == path) {
            ask_all(machine, &path);
        }
    }
}

/// A redacted recording has the same findings, with stand-ins, and none of the addresses and names.
fn assert_redacted_alike(id: &str, recording: &Recording) {
    let redactor = Redactor::new(recording, "word");
    let redacted = redactor.redact(recording);
    assert_eq!(judged(&redacted), redactor.text(&judged(recording)), "{id}");
    let (before, after) = (recording.to_json(), redacted.to_json());
    assert!(Recording::from_json(&after).unwrap() == redacted, "{id}");
    for (from, to) in recording.addresses().unwrap().iter().zip(redacted.addresses().unwrap()) {
        assert_eq!((&from.interface, from.prefix), (&to.interface, to.prefix), "{id}");
        assert_eq!(redactor.text(&from.address.to_string()), to.address.to_string(), "{id}");
    }
    let host = recording.host().unwrap();
    assert!(!after.contains(&host) && redacted.host().is_some_and(|name| name.starts_with("host")), "{id}: {host}");
    let left = quads(&after);
    for address in quads(&before) {
        assert!(address.is_loopback() || address.octets()[0] == 0 || !left.contains(&address), "{id}: {address}");
    }
    let left: BTreeSet<&str> = digits(&after).collect();
    for word in digits(&before) {
        let is_address = match word.len() {
            // The second half of a GID: zero, a small number and an IPv4 address are no names.
            39 => !word[20..].starts_with("0000:"),
            // A GUID, a MAC, a row of if_inet6.
            19 => word.matches(':').count() == 3 && !word.starts_with("0000:"),
            17 => word.matches(':').count() == 5 && !word.starts_with("00:00"),
            32 => !word.starts_with("0000"),
            _ => false,
        };
        assert!(!is_address || !left.contains(word), "{id}: {word}");
    }
}

/// Returns the words of hexadecimal digits and colons.
fn digits(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_ascii_hexdigit() && letter != ':')
}

/// Returns the IPv4 addresses of a text.
fn quads(text: &str) -> BTreeSet<Ipv4Addr> {
    let words = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
    // The version of libibverbs is none.
    words.filter(|word| !word.starts_with("1.14.")).filter_map(|word| word.parse().ok()).collect()
}

/// Returns the findings of the probe in the form that is graded.
fn findings(machine: &dyn Machine) -> Vec<Said> {
    let probe = serde_json::to_value(Probe::of(machine, &Loaded::default())).unwrap();
    probe["findings"].as_array().unwrap().iter().map(Said::of).collect()
}

/// Number of entries, and their digest. The program that came with the cases has written the same trees (compared when this was written).
const TREES: (usize, u64) = (55_227, 0xbc61_006f_179c_98c4);

#[test]
fn the_machine_of_every_case_is_recorded_replayed_and_redacted_without_a_change() {
    let (mut lines, mut hits, mut weak) = (Vec::new(), 0, 0);
    for (number, case) in cases().iter().enumerate() {
        let (folder, mut said) = (scratch(), Vec::new());
        for root in case.write(folder.path()) {
            let recording = assert_replayed_alike(&case.id, &root);
            assert_redacted_alike(&case.id, &recording);
            said.extend(findings(&recording));
            // All that later checks may ask, for some: it takes a second each.
            if number.is_multiple_of(16) {
                let recorder = Recorder::new(Folder::new(&root));
                let _ = (judged(&recorder), recorder.variables(), recorder.addresses());
                for folder in ["/sys", "/proc", "/dev", "/etc", "/usr", "/root", "/workspace", "/opt"] {
                    ask_all(&recorder, folder);
                }
                assert_redacted_alike(&case.id, &recorder.finish("0.1.0", TAKEN, Loaded::default()));
            }
        }
        listing(folder.path(), "", &mut lines);
        let verdict = grade(&case.value, &said);
        assert!(verdict.false_alarms.is_empty(), "{}: {:?}", case.id, verdict.false_alarms);
        hits += verdict.expected.iter().filter(|(_, grade)| *grade == Grade::Hit).count();
        weak += verdict.expected.iter().filter(|(_, grade)| matches!(grade, Grade::Weak(_))).count();
    }
    // The probe judges no setting.
    assert!(hits >= 6 && hits + weak >= 12, "{hits} expectations are met, {weak} in part");
    let digest = fnv(lines.join("\n").as_bytes());
    assert_eq!((lines.len(), digest), TREES, "{digest:#x}");
}

#[test]
fn a_recording_has_whole_tables_and_does_not_take_the_rest_for_absent() {
    let folder = scratch();
    let root = &case("ucx-row-0-empty").write(folder.path())[0];
    let recording = recorded(root).1;
    let port = "/sys/class/infiniband/mlx5_0/ports/1";
    let direct = Folder::new(root);
    for table in ["gids", "gid_attrs/types", "gid_attrs/ndevs", "pkeys"] {
        let table = format!("{port}/{table}");
        let rows = recording.names(&table).unwrap();
        assert_eq!(Ok(&rows), direct.names(&table).as_ref());
        for row in rows {
            assert_eq!(recording.text(&format!("{table}/{row}")), direct.text(&format!("{table}/{row}")));
        }
        assert_eq!(recording.text(&format!("{table}/999")), Err(Unknown::ENOENT), "the list shows it");
    }
    assert_eq!(recording.text(&format!("{port}/gid_attrs/types/0")), Err(Unknown::Errno(21)));
    assert_eq!(recording.text(&format!("{port}/counters/symbol_error")), Err(Unknown::NotRecorded));
    assert_eq!(recording.space("/tmp"), Err(Unknown::NotRecorded));
    assert_eq!(recording.library("libefa.so.1"), Err(Unknown::NotRecorded));
    let empty = Recording::default();
    let probe = Probe::of(&empty, &Loaded::default());
    for finding in &probe.findings {
        assert!(!finding.found.contains("not found") && !finding.found.contains("does not exist"), "{finding}");
    }
    assert!(probe.summary.contains("not in the recording: /sys/class/infiniband"), "{}", probe.summary);
}

#[test]
fn long_texts_are_left_out_and_named() {
    let folder = scratch();
    fs::write(folder.path().join("long"), "x".repeat(70_000)).unwrap();
    for name in 0..100 {
        fs::write(folder.path().join(format!("{name}")), "x".repeat(60_000)).unwrap();
    }
    let recorder = Recorder::new(Folder::new(folder.path()));
    assert_eq!(recorder.text("/long").map(|text| text.len()), Ok(70_000), "what is not noted is still judged");
    assert_eq!(recorder.text("/long").map(|text| text.len()), Ok(70_000));
    for name in 0..100 {
        recorder.text(&format!("/{name}")).unwrap();
    }
    let recording = recorder.finish("0.1.0", TAKEN, Loaded::default());
    let json = recording.to_json();
    assert!(json.len() <= 4 << 20 && json.len() > 3 << 20, "{}", json.len());
    assert_eq!(recording.cut.iter().filter(|cut| cut.path == "/long" && cut.bytes == 70_000).count(), 1);
    let read = Recording::from_json(&json).unwrap();
    for cut in &read.cut {
        assert_eq!(read.text(&cut.path), Err(Unknown::NotRecorded));
    }
}

#[test]
fn what_is_no_recording_is_refused_with_the_fix() {
    let message = |text: &str| Recording::from_json(text).unwrap_err().to_string();
    for (text, words) in [
        ("", "no recording of a machine: it is no JSON"),
        ("[1]", "it is no JSON object"),
        ("{\"findings\": []}", "no key rgym_recording; rgym doctor --record FILE writes one"),
        ("{\"rgym_recording\": \"x\"}", "no number from 1"),
        ("{\"rgym_recording\": 2, \"new\": {}}", "format 2, and this program reads formats up to 1: use a newer rgym"),
        ("{\"rgym_recording\": 1}", "a damaged recording: missing field `program`"),
    ] {
        assert!(message(text).contains(words), "{text}: {}", message(text));
    }
    let recording =
        |files: &str| format!("{{\"rgym_recording\": 1, \"program\": \"\", \"taken\": \"\", \"files\": {files}}}");
    let damaged = message(&recording("{\"/sys/\": {\"x\": {\"bytes\": {\"hex\": \"0\", \"length\": 1}}}}"));
    assert!(damaged.contains("/sys/x: its bytes are not in hexadecimal digits; record the machine again"), "{damaged}");
    assert!(matches!(Recording::from_json(&recording("[]")), Err(RecordingError::Damaged { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_recording_is_judged_or_refused_and_is_no_panic(at in 0.0..1.0_f64, with in "[\\x00-\\x7f]{0,4}", cut in 0_usize..40) {
        let mut json = DAMAGED.with(Clone::clone).into_bytes();
        let at = (at * json.len() as f64) as usize;
        json.splice(at..(at + cut).min(json.len()), with.into_bytes());
        if let Ok(recording) = Recording::from_json(&String::from_utf8_lossy(&json)) {
            judged(&recording);
            prop_assert!(Recording::from_json(&recording.to_json()).unwrap() == recording);
        }
    }
}

std::thread_local! {
    static DAMAGED: String = {
        let folder = scratch();
        recorded(&case("healthy-rxe").write(folder.path())[0]).1.to_json()
    };
}
