//! Cases about what `doctor` tries in processes of its own.

use std::process::Output;

use serde_json::Value;

use crate::fixture::TestFolder;

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

pub(crate) fn doctor_measures_each_usable_transport_between_two_processes() {
    let folder = TestFolder::new();
    let said = report(&folder.run(&["doctor", "--json"]));
    let usable = said["transports"].as_array().unwrap().iter().filter(|row| row["usable"] == true);
    let mut expected: Vec<&str> = usable.map(|row| row["transport"].as_str().unwrap()).collect();
    expected.retain(|transport| *transport != "mem");
    if cfg!(feature = "groups") {
        expected.push("all_reduce");
    }
    let tested = said["self_test"].as_array().unwrap();
    assert_eq!(tested.iter().map(|row| row["over"].as_str().unwrap()).collect::<Vec<_>>(), expected, "{said}");
    assert!(expected.contains(&"http"), "{said}");
    for row in tested {
        let [round_trip, rate] = ["round_trip_us", "gb_per_s"].map(|name| row[name].as_f64().unwrap_or_default());
        // A figure in another unit would be far off.
        assert!(row["error"].is_null() && (0.5..1e6).contains(&round_trip) && (1e-3..1e3).contains(&rate), "{row}");
    }
    let text = String::from_utf8(folder.run(&["doctor"]).stdout).unwrap();
    assert!(text.contains("GB/S OF 16 MIB") && text.contains("\nhttp "), "{text}");
    let without = report(&folder.run(&["doctor", "--json", "--no-self-test"]));
    assert_eq!(without["self_test"], Value::Array(Vec::new()));
}

#[cfg(feature = "rdma")]
pub(crate) use nccl::doctor_asks_nccl_in_a_process_of_its_own_where_ranks_would_meet;

#[cfg(feature = "rdma")]
mod nccl {
    use std::path::Path;
    use std::process::Command;

    use super::report;
    use crate::fixture::TestFolder;

    /// A library that answers as NCCL does without a GPU: 5, with its warning, where `NCCL_SOCKET_IFNAME` fits no interface.
    const NCCL: &str = r#"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int ncclGetVersion(int *version) { *version = 22703; return 0; }
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "unknown"; }
int ncclGetUniqueId(char *id) {
  const char *interface = getenv("NCCL_SOCKET_IFNAME");
  const char *level = getenv("NCCL_DEBUG");
  if (interface && !strcmp(interface, "eth9")) {
    if (level && !strcmp(level, "WARN")) printf("host:1:1 [0] bootstrap.cc:1 NCCL WARN Bootstrap : no socket interface found\n");
    return 5;
  }
  if (interface && !strcmp(interface, "crash")) abort();
  if (interface && !strcmp(interface, "hang")) pause();
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(40000)};
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  memset(id, 0, 128);
  memcpy(id + 8, &address, sizeof address);
  return 0;
}
"#;

    fn build(folder: &Path) {
        let source = folder.join("nccl.c");
        std::fs::write(&source, NCCL).unwrap();
        let mut cc = Command::new("cc");
        let built = cc.args(["-shared", "-fPIC", "-o"]).arg(folder.join("libnccl.so.2")).arg(&source).output();
        let built = built.expect("a C compiler (apt-get install gcc)");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    }

    pub(crate) fn doctor_asks_nccl_in_a_process_of_its_own_where_ranks_would_meet() {
        let (folder, library) = (TestFolder::new(), tempfile::tempdir().unwrap());
        build(library.path());
        let found_by = |variable: &str, interface: &str, within: &str| {
            let mut command = folder.command(&["doctor", "--json", "--no-self-test", "--nccl-timeout", within]);
            command.env(variable, library.path()).env("NCCL_SOCKET_IFNAME", interface);
            let output = command.output().unwrap();
            let said = report(&output);
            let findings = said["findings"].as_array().unwrap();
            let finding = findings.iter().find(|finding| finding["topic"] == "nccl_interface").cloned();
            (finding.unwrap_or_else(|| panic!("{said}")), output.status.code())
        };
        for variable in ["LD_LIBRARY_PATH", "GYM_NCCL_LIBRARY"] {
            let (meets, _) = found_by(variable, "lo", "20");
            let expected = (&"ok".into(), &"ranks of NCCL 2.27.3 would meet at 127.0.0.1 (lo)".into());
            assert_eq!((&meets["status"], &meets["found"]), expected, "{variable}");
        }
        let finding = |interface: &str, within: &str| found_by("LD_LIBRARY_PATH", interface, within);
        let (none, code) = finding("eth9", "20");
        let found = none["found"].as_str().unwrap();
        assert!(found.contains("ncclGetUniqueId failed with code 5 (invalid usage): Bootstrap : no socket"), "{none}");
        assert!(none["fix"].as_str().unwrap().contains("NCCL_SOCKET_IFNAME"), "{none}");
        assert_eq!((none["status"].as_str(), code), (Some("error"), Some(4)));
        let (crashed, _) = finding("crash", "20");
        assert!(crashed["found"].as_str().unwrap().contains("died by signal 6"), "{crashed}");
        let (hangs, _) = finding("hang", "1");
        assert!(hangs["found"].as_str().unwrap().contains("asks NCCL for a unique id took longer than 1s"), "{hangs}");
    }
}
