//! Probes simulated machines, those of the cases, and this one.

mod machines;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use gym_transport_rdma::probe;
use gym_transport_rdma::probe::machine::{Folder, Loaded};
use gym_transport_rdma::probe::{Probe, ProbeOptions, Status, Topic};
use gym_transport_rdma::tuning::judge;
use machines::{Case, case, cases, scratch};
use serde_json::json;

struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("folder"))
    }

    fn file(self, path: &str, text: &str) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("has a folder")).expect("folders");
        fs::write(path, text).expect("writes");
        self
    }

    fn link(self, path: &str, target: &str) -> Self {
        std::os::unix::fs::symlink(target, self.0.path().join(path)).expect("links");
        self
    }

    fn port(self, device: &str, state: &str, layer: &str, rate: &str) -> Self {
        let base = format!("sys/class/infiniband/{device}/ports/1");
        self.file(&format!("{base}/state"), &format!("{state}\n"))
            .file(&format!("{base}/link_layer"), &format!("{layer}\n"))
            .file(&format!("{base}/rate"), &format!("{rate}\n"))
            .gid(device, 1, IPV4, "RoCE v2", "v0")
            .file("sys/class/net/v0/operstate", "up\n")
    }

    fn gid(self, device: &str, index: u32, address: &str, kind: &str, interface: &str) -> Self {
        let base = format!("sys/class/infiniband/{device}/ports/1");
        self.file(&format!("{base}/gids/{index}"), &format!("{address}\n"))
            .file(&format!("{base}/gid_attrs/types/{index}"), &format!("{kind}\n"))
            .file(&format!("{base}/gid_attrs/ndevs/{index}"), &format!("{interface}\n"))
    }

    /// An empty row as in sysfs: the address is zero, and reading the attributes fails (a directory, here, in place of
    /// `EINVAL`).
    fn empty_slot(self, device: &str, index: u32) -> Self {
        let base = format!("sys/class/infiniband/{device}/ports/1");
        for attribute in ["types", "ndevs"] {
            let _ = fs::remove_file(self.0.path().join(format!("{base}/gid_attrs/{attribute}/{index}")));
        }
        self.file(&format!("{base}/gids/{index}"), "0000:0000:0000:0000:0000:0000:0000:0000\n")
            .file(&format!("{base}/gid_attrs/types/{index}/x"), "")
            .file(&format!("{base}/gid_attrs/ndevs/{index}/x"), "")
    }

    fn limits(self, soft: &str, capabilities: &str) -> Self {
        let limits = format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max locked memory         {soft}              {soft}              bytes     \n"
        );
        self.file("proc/self/limits", &limits).file("proc/self/status", &format!("Name:\tx\nCapEff:\t{capabilities}\n"))
    }

    fn nodes(self) -> Self {
        self.file("dev/infiniband/uverbs0", "").file("dev/infiniband/rdma_cm", "")
    }

    fn verbs(self) -> Self {
        self.file("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0", "")
            .link("usr/lib/x86_64-linux-gnu/libibverbs.so.1", "libibverbs.so.1.14.44.0")
    }

    fn ucx(self) -> Self {
        self.file("usr/lib/x86_64-linux-gnu/libucp.so.0", "its version is a matter of elf.rs")
            .file("usr/lib/x86_64-linux-gnu/ucx/libuct_ib.so.0", "")
    }

    fn gpu(self) -> Self {
        self.file(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release",
        )
        .file("dev/nvidia0", "")
        .file("dev/nvidiactl", "")
        .file("usr/lib/x86_64-linux-gnu/libcuda.so.1", "")
        .file("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "")
    }

    fn probe(&self) -> Probe {
        ProbeOptions::new().root(self.0.path()).probe()
    }
}

const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a09:0001";
const LINK_LOCAL: &str = "fe80:0000:0000:0000:0c2a:69ff:fe2e:a0b1";
const ALL: &str = "000001ffffffffff";
const NONE: &str = "0000000000000000";

fn status(probe: &Probe, topic: Topic) -> Status {
    probe.finding(topic).expect("every topic has a finding").status
}

#[test]
fn an_empty_machine_says_what_was_looked_for_and_how_to_get_it() {
    let probe = Machine::new().probe();
    assert_eq!(
        probe.summary,
        "RDMA is not usable here: no RDMA device (/sys/class/infiniband does not exist); \
         UCX not found (no libucp.so.0 in the loader's directories); \
         NCCL is not usable here: no NVIDIA GPU (neither /proc/driver/nvidia/version nor /dev/nvidia0)."
    );
    assert!(!probe.rdma_usable && !probe.nccl_usable);
    for finding in &probe.findings {
        assert_eq!(finding.status == Status::Missing, finding.fix.is_some(), "{finding}");
    }
    let text = probe.to_string();
    assert_eq!(text.lines().count(), 1 + probe.findings.len());
    assert!(text.contains("apt-get install libucx0"), "{text}");
}

#[test]
fn a_complete_machine_is_usable_and_nothing_is_to_fix() {
    let machine = Machine::new()
        .port("mlx5_0", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)")
        .port("mlx5_1", "1: DOWN", "InfiniBand", "10 Gb/sec (4X SDR)")
        .nodes()
        .limits("unlimited", NONE)
        .verbs()
        .ucx()
        .gpu()
        .file("usr/lib/x86_64-linux-gnu/libnccl.so.2.27.3", "")
        .link("usr/lib/x86_64-linux-gnu/libnccl.so.2", "libnccl.so.2.27.3")
        .file("proc/sys/kernel/osrelease", "6.1.0-56-amd64\n")
        .file("dev/shm/x", "");
    let probe = machine.probe();
    assert!(probe.rdma_usable && probe.nccl_usable, "{probe}");
    assert!(probe.findings.iter().all(|finding| finding.status == Status::Ok && finding.fix.is_none()), "{probe}");
    for words in [
        "RDMA is usable (mlx5_0 port 1 ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)",
        "by UCX of unknown version",
        "NCCL 2.27.3",
        "1 NVIDIA GPU, driver 570.86.15",
    ] {
        assert!(probe.summary.contains(words), "{words:?} in {}", probe.summary);
    }
    assert!(probe.finding(Topic::Verbs).expect("there").found.contains("libibverbs 1.14.44.0"), "{probe}");
}

#[test]
fn the_gid_of_roce_is_computed_and_empty_slots_are_passed_over() {
    // As rdma_rxe writes it on an interface with one IPv4 address.
    let rxe = Machine::new()
        .port("rxe0", "4: ACTIVE", "Ethernet", "2.5 Gb/sec (1X SDR)")
        .gid("rxe0", 0, LINK_LOCAL, "RoCE v2", "v0")
        .empty_slot("rxe0", 2)
        .probe();
    let gid = rxe.ports[0].gid.clone().expect("a choice");
    assert_eq!((gid.index, gid.address.as_str(), gid.interface.as_str()), (1, "10.9.0.1", "v0"));
    assert_eq!(status(&rxe, Topic::RoceGid), Status::Ok);
    assert!(rxe.finding(Topic::RoceGid).expect("there").found.contains("rxe0 port 1: GID index 1"), "{rxe}");
    // Two ports with both versions in their tables. One of them has only a link-local address of version 2.
    let two = Machine::new()
        .port("mlx5_0", "4: ACTIVE", "Ethernet", "400 Gb/sec (4X NDR)")
        .empty_slot("mlx5_0", 1)
        .gid("mlx5_0", 2, IPV4, "IB/RoCE v1", "v0")
        .gid("mlx5_0", 3, IPV4, "RoCE v2", "v0")
        .port("mlx5_1", "4: ACTIVE", "Ethernet", "400 Gb/sec (4X NDR)")
        .gid("mlx5_1", 0, LINK_LOCAL, "IB/RoCE v1", "v1")
        .empty_slot("mlx5_1", 1)
        .probe();
    let chosen: Vec<_> = two.ports.iter().map(|port| port.gid.as_ref().map(|gid| gid.index)).collect();
    assert_eq!(chosen, [Some(3), None]);
    let finding = two.finding(Topic::RoceGid).expect("there");
    assert_eq!(finding.status, Status::Warning);
    assert!(finding.found.contains("no RoCE v2 address on mlx5_1 port 1 (mlx5_0 port 1: GID index 3"), "{finding}");
    assert!(finding.fix.as_deref().is_some_and(|fix| fix.contains("ip addr add")), "{finding}");
}

#[test]
fn a_container_without_the_hosts_network_is_told_so() {
    let probe = Machine::new()
        .port("mlx5_0", "4: ACTIVE", "Ethernet", "100 Gb/sec")
        .gid("mlx5_0", 1, IPV4, "RoCE v2", "ens5f0")
        .nodes()
        .limits("unlimited", NONE)
        .file(".dockerenv", "")
        .file("dev/shm/x", "")
        .file("proc/self/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n")
        .probe();
    let finding = probe.finding(Topic::Container).expect("there");
    assert_eq!(finding.status, Status::Warning);
    assert!(finding.found.contains("docker") && finding.found.contains("ens5f0 of mlx5_0 port 1"), "{finding}");
    assert!(finding.fix.as_deref().is_some_and(|fix| fix.contains("network_mode: host")), "{finding}");
    assert_eq!(probe.rdma_fault().map(|fault| fault.topic), Some(Topic::Container));
    let memory = probe.finding(Topic::SharedMemory).expect("there");
    assert!(memory.found.contains("only 64 MiB") && memory.fix.is_some(), "{memory}");
}

#[test]
fn a_container_without_device_nodes_is_told_to_pass_them() {
    let machine =
        Machine::new().port("mlx5_0", "4: ACTIVE", "Ethernet", "100 Gb/sec").limits("unlimited", NONE).verbs().ucx();
    let probe = machine.probe();
    assert_eq!(status(&probe, Topic::DeviceNodes), Status::Missing);
    let fix = probe.finding(Topic::DeviceNodes).expect("there").fix.clone().expect("a fix");
    assert!(fix.contains("--device=/dev/infiniband"), "{fix}");
    assert!(
        probe.summary.starts_with(
            "RDMA is not usable here: no uverbs and no rdma_cm in /dev/infiniband; UCX of unknown version"
        ),
        "{probe}"
    );
}

#[test]
fn pinning_is_judged_by_limit_and_capability_together() {
    let machine = |limit, capabilities| {
        Machine::new()
            .port("rxe0", "4: ACTIVE", "Ethernet", "2.5 Gb/sec")
            .nodes()
            .limits(limit, capabilities)
            .verbs()
            .ucx()
            .probe()
    };
    let poor = machine("8388608", NONE);
    assert_eq!(status(&poor, Topic::LockedMemory), Status::Error);
    assert!(poor.summary.contains("only 8388608 bytes (8 MiB) of memory may be pinned"), "{poor}");
    assert!(!poor.rdma_usable);
    assert!(machine("8388608", ALL).rdma_usable, "the capability overrides the limit");
    assert!(machine("unlimited", NONE).rdma_usable);
}

#[test]
fn a_port_that_is_down_is_no_device_to_use() {
    let probe = Machine::new()
        .port("rxe0", "1: DOWN", "Ethernet", "2.5 Gb/sec")
        .nodes()
        .limits("unlimited", ALL)
        .verbs()
        .ucx()
        .probe();
    assert!(!probe.rdma_usable);
    assert!(probe.summary.contains("no active RDMA port (rxe0 port 1 DOWN"), "{probe}");
    let fix = probe.finding(Topic::RdmaDevices).expect("there").fix.clone().expect("a fix");
    assert!(fix.contains("ip link set"), "{fix}");
}

#[test]
fn a_ucx_without_verbs_is_not_taken_for_rdma() {
    let machine = Machine::new()
        .port("mlx5_0", "4: ACTIVE", "InfiniBand", "400 Gb/sec")
        .nodes()
        .limits("unlimited", ALL)
        .verbs()
        .file("opt/ucx/lib/libucp.so.0", "\u{7f}ELF\0")
        .file("opt/ucx/lib/ucx/libuct_cma.so.0", "");
    let probe = machine.probe();
    assert!(!probe.rdma_usable);
    assert!(
        probe.summary.contains("UCX of unknown version") && probe.summary.contains("without RDMA transport"),
        "{probe}"
    );
}

#[test]
fn a_gpu_without_its_libraries_names_them() {
    let machine =
        Machine::new().file("proc/driver/nvidia/version", "NVRM version: x  550.54.15  y").file("dev/nvidia0", "");
    let probe = machine.probe();
    assert!(!probe.nccl_usable);
    assert!(probe.summary.contains("1 NVIDIA GPU, driver 550.54.15, but no libcuda.so.1"), "{probe}");
}

#[test]
fn the_wheel_of_nccl_is_that_of_the_environment_s_cuda() {
    let fix = |machine: Machine| machine.probe().finding(Topic::Nccl).and_then(|nccl| nccl.fix.clone()).expect("a fix");
    let thirteen = fix(Machine::new().file("usr/lib/libcudart.so.13", ""));
    assert!(thirteen.contains("pip install nvidia-nccl-cu13, "), "{thirteen}");
    let twelve = fix(Machine::new().file("usr/lib/libcudart.so.12", ""));
    assert!(twelve.contains("pip install nvidia-nccl-cu12, "), "{twelve}");
    let unknown = fix(Machine::new());
    assert!(unknown.contains("the other one overwrites its library"), "{unknown}");
}

#[test]
fn a_folder_given_by_the_caller_comes_first_and_is_below_the_root() {
    let outside = tempfile::tempdir().expect("folder");
    fs::write(outside.path().join("libnccl.so.2"), "").expect("writes");
    let machine = Machine::new().file("usr/lib/libnccl.so.2", "").file("opt/wheel/libnccl.so.2", "");
    let options = ProbeOptions::new().root(machine.0.path()).library_folder("/opt/wheel");
    let probe = options.library_folder(outside.path()).probe();
    let found = &probe.finding(Topic::Nccl).expect("there").found;
    assert!(found.contains("(/opt/wheel/libnccl.so.2)"), "{found}");
}

#[test]
fn rubbish_everywhere_is_survived() {
    let machine = Machine::new()
        .file("sys/class/infiniband/bad/ports/x/state", "\u{0}\u{fffd}")
        .file("sys/class/infiniband/file", "not a folder")
        .file("proc/self/limits", "Max locked memory")
        .file("proc/self/status", "CapEff:\tnot hex")
        .file("proc/driver/nvidia/version", "")
        .file("dev/nvidia0", "")
        .file("etc/ld.so.conf", "include\ninclude /etc/ld.so.conf\ninclude *\n/relative/../..\n")
        // A directory in place of a file.
        .file("usr/lib/libucp.so.0/x", "");
    let probe = machine.probe();
    assert!(!probe.rdma_usable && !probe.nccl_usable);
    assert_eq!(status(&probe, Topic::Ucx), Status::Missing);
}

#[test]
fn a_library_that_is_none_is_reported_and_not_a_crash() {
    let folder = tempfile::tempdir().expect("folder");
    fs::write(folder.path().join("libnccl.so.2"), "not a library").expect("writes");
    let probe = ProbeOptions::new().library_folder(folder.path()).probe();
    let finding = probe.finding(Topic::Nccl).expect("there");
    assert_eq!(finding.status, Status::Missing);
    assert!(finding.found.contains("NCCL cannot be loaded from"), "{finding}");
}

#[test]
fn a_library_without_the_version_function_is_reported() {
    // Any shared library other than NCCL serves.
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let libc = maps.lines().find_map(|line| line.split_whitespace().last().filter(|path| path.contains("/libc.so")));
    let libc = libc.expect("this test is linked to glibc");
    let folder = tempfile::tempdir().expect("folder");
    std::os::unix::fs::symlink(Path::new(libc), folder.path().join("libnccl.so.2")).expect("links");
    let probe = ProbeOptions::new().library_folder(folder.path()).probe();
    let finding = probe.finding(Topic::Nccl).expect("there");
    assert!(finding.found.contains("ncclGetVersion"), "{finding}");
}

#[test]
fn this_machine_is_probed_without_a_panic_and_reads_back_as_json() {
    let probe = probe();
    println!("{probe}");
    let json = serde_json::to_value(&probe).expect("serialises");
    assert_eq!(json["summary"], probe.summary);
    assert_eq!(json["findings"].as_array().map(Vec::len), Some(probe.findings.len()));
    assert!(probe.summary.ends_with('.') && !probe.summary.contains('\n'), "one sentence: {}", probe.summary);
}

/// A verdict about the machine of a case: topic, status, words of the fact, words of the fix, and whether RDMA is usable.
type Verdict = (&'static str, Topic, Status, &'static [&'static str], &'static [&'static str], bool);

fn of_case(case: &Case, extra: impl Fn(&Path)) -> Probe {
    let folder = scratch();
    let root = case.write(folder.path()).remove(0);
    extra(&root);
    Probe::of(&Folder::new(root), &Loaded::default())
}

fn assert_verdict(id: &str, probe: &Probe, (_, topic, status, found, fix, usable): Verdict) {
    let of_topic: Vec<_> = probe.findings.iter().filter(|finding| finding.topic == topic).collect();
    let has = |text: &str, words: &[&str]| words.iter().all(|word| text.contains(word));
    let right = of_topic.iter().any(|finding| {
        finding.status == status && has(&finding.found, found) && has(finding.fix.as_deref().unwrap_or_default(), fix)
    });
    assert!(right, "{id}: {of_topic:?}");
    assert_eq!(probe.rdma_usable, usable, "{id}: {probe}");
    assert_eq!(probe.rdma_fault().is_none(), usable, "{id}: {probe}");
    assert_eq!(probe.summary.starts_with("RDMA is usable ("), usable, "{id}: {probe}");
}

#[test]
fn verdicts_about_the_machines_of_the_cases_are_right() {
    let verdicts: [Verdict; 19] = [
        // A capability of a user namespace does not count.
        (
            "limit-memlock-capability-of-a-namespace",
            Topic::LockedMemory,
            Status::Error,
            &["CAP_IPC_LOCK of a user namespace"],
            &["memlock"],
            false,
        ),
        // Each card has its own node; the other one is enough for UCX.
        (
            "node-of-one-card-missing",
            Topic::DeviceNodes,
            Status::Error,
            &["uverbs1 of mlx5_1"],
            &["--device=/dev/infiniband"],
            true,
        ),
        (
            "node-none-in-container",
            Topic::DeviceNodes,
            Status::Error,
            &["uverbs0"],
            &["--device=/dev/infiniband"],
            false,
        ),
        ("gid-169-254", Topic::RoceGid, Status::Warning, &["roceP2p1s0f0", "169.254"], &["=roceP2p1s0f1"], true),
        (
            "gdr-nccl-too-old-for-the-module",
            Topic::GpuDirect,
            Status::Warning,
            &["2.21.5", "nvidia_peermem"],
            &["2.23"],
            true,
        ),
        (
            "gid-ipv6-only-automatic",
            Topic::RoceGid,
            Status::Error,
            &["IPv6", "row 0"],
            &["NCCL_IB_ADDR_FAMILY=AF_INET6"],
            true,
        ),
        // One usable port is enough.
        (
            "hca-without-interface",
            Topic::RoceGid,
            Status::Error,
            &["mlx5_1, mlx5_2", "interface"],
            &["NCCL_IB_HCA==mlx5_0"],
            true,
        ),
        ("node-without-rail-interface", Topic::RoceGid, Status::Error, &["interface"], &["multus", "CNI"], false),
        // UCX hides such a port, so that it is not usable until the row is named.
        ("ucx-row-0-empty", Topic::Ucx, Status::Error, &["row 0 of mlx5_0 is empty"], &["UCX_IB_GID_INDEX="], false),
        ("gid-empty-row", Topic::Ucx, Status::Error, &["row 0 of mlx5_0 is empty"], &["UCX_IB_GID_INDEX=7"], false),
        ("healthy-sparse-table", Topic::Ucx, Status::Error, &["row 0 of mlx5_0"], &["UCX_IB_GID_INDEX=7"], false),
        ("ib-no-subnet-manager", Topic::RdmaDevices, Status::Error, &["INIT", "subnet manager"], &["opensm"], false),
        ("limit-memlock", Topic::LockedMemory, Status::Error, &["8 MiB"], &["memlock"], false),
        ("limit-memlock-of-systemd", Topic::LockedMemory, Status::Error, &["64 KiB"], &["LimitMEMLOCK"], false),
        ("shm-64-mib", Topic::SharedMemory, Status::Error, &["64 MiB"], &["--shm-size"], false),
        ("ucx-tls-quotes", Topic::Ucx, Status::Error, &["UCX_TLS", "quotes"], &["UCX_TLS=tcp,self"], false),
        ("ucx-value-invalid", Topic::Ucx, Status::Error, &["UCX_RNDV_THRESH=`lots`"], &["64k"], false),
        (
            "ucx-device-not-here",
            Topic::Ucx,
            Status::Error,
            &["UCX_NET_DEVICES: ", "is not here"],
            &["UCX_NET_DEVICES="],
            false,
        ),
        ("healthy-roce-nothing-set", Topic::RoceGid, Status::Ok, &["GID index 3"], &[], true),
    ];
    for verdict in verdicts {
        let probe = of_case(&case(verdict.0), |_| {});
        assert_verdict(verdict.0, &probe, verdict);
    }
}

/// The name of the setting, its value and its source are told, and no installation is advised.
#[test]
fn settings_that_stop_ucx_are_named_with_their_source() {
    let laptop = |name: &str, value: &str| {
        let mut case = case("healthy-laptop");
        case.value["host"]["libraries"]["libucp.so.0"] = json!("1.13.1");
        case.value["environment"] = json!({ name: value });
        case
    };
    for (name, value) in [
        ("UCX_TLS", "rc"),
        ("UCX_TLS", "\"tcp\""),
        ("UCX_MAX_EAGER_LANES", "abc"),
        ("UCX_MAX_EAGER_LANES", "auto"),
        ("UCX_SEG_SIZE", "lots"),
    ] {
        let probe = of_case(&laptop(name, value), |_| {});
        let stopped = probe.ucx_stopped().expect("UCX does not start");
        let fix = stopped.fix.clone().unwrap_or_default();
        assert!(stopped.found.contains(value) && format!("{}{fix}", stopped.found).contains(name), "{stopped}");
        assert_eq!(stopped.because, "set in the environment", "{stopped}");
        assert!(!fix.contains("install"), "{stopped}");
    }
    for value in ["2", "inf", "-1", "64"] {
        assert_eq!(of_case(&laptop("UCX_MAX_EAGER_LANES", value), |_| {}).ucx_stopped(), None, "{value}");
    }
    // Of the files, a later one wins: that of the system, the home, a named folder, the current folder.
    let places = ["etc/ucx/ucx.conf", "root/ucx.conf", "conf/ucx.conf", "work/ucx.conf"];
    for last in 1..=places.len() {
        let probe = of_case(&laptop("UCX_CONFIG_DIR", "/conf"), |root| {
            for (place, value) in places[..last].iter().zip(["tcp,self", "rc", "tcp,self", "rc"]) {
                fs::create_dir_all(root.join(place).parent().expect("has a folder")).expect("folders");
                fs::write(root.join(place), format!("# of {place}\nUCX_TLS={value}\n")).expect("writes");
            }
            fs::create_dir_all(root.join("work")).expect("folders");
            std::os::unix::fs::symlink("/work", root.join("proc/self/cwd")).expect("links");
        });
        let expected = match last {
            2 => Some("/root/ucx.conf:2 wins over `tcp,self` of /etc/ucx/ucx.conf:2".to_owned()),
            4 => Some("./ucx.conf:2 wins over `tcp,self` of /conf/ucx.conf:2".to_owned()),
            _ => None,
        };
        assert_eq!(probe.ucx_stopped().map(|stopped| stopped.because.clone()), expected, "{probe}");
    }
    // The environment wins over all of them.
    let mut case = laptop("UCX_TLS", "tcp,self");
    case.value["host"]["files"]["/root/ucx.conf"] = json!("UCX_TLS=rc\n");
    assert_eq!(of_case(&case, |_| {}).ucx_stopped(), None);
}

#[test]
fn so_many_interfaces_that_ucx_would_abort_are_named_with_the_remedy() {
    let mut case = case("healthy-laptop");
    case.value["host"]["libraries"]["libucp.so.0"] = json!("1.13.1");
    let folder = scratch();
    let root = case.write(folder.path()).remove(0);
    let findings = || judge(&Folder::new(&root)).into_iter().filter(|finding| finding.about == "UCX_NET_DEVICES");
    assert_eq!(findings().count(), 0);
    for number in 0..131 {
        fs::create_dir_all(root.join(format!("sys/class/net/veth{number}"))).expect("folders");
    }
    let found: Vec<_> = findings().collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].found.contains("network interfaces, and UCX 1.13 aborts") && found[0].fix.contains("UCX_NET_DEVICES="),
        "{found:?}"
    );
}

#[test]
fn each_thing_is_said_once() {
    for case in cases() {
        let folder = scratch();
        for root in case.write(folder.path()) {
            let machine = Folder::new(root);
            let probe = Probe::of(&machine, &Loaded::default());
            let tuned = judge(&machine);
            let beside = probe.beside(tuned.clone());
            let told: Vec<&str> = (probe.findings.iter().map(|finding| finding.found.as_str()))
                .chain(beside.iter().map(|finding| finding.found.as_str()))
                .collect();
            let once: BTreeSet<&&str> = told.iter().collect();
            assert_eq!(once.len(), told.len(), "{}: {told:?}", case.id);
            // Nothing is lost, and what the probe tells in its topics is told nowhere else.
            assert!(tuned.iter().all(|finding| told.iter().any(|told| told.ends_with(&finding.found))), "{}", case.id);
            let subjects = ["memlock", "/dev/infiniband", "/dev/shm", "GPUDirect", "RoCE", "UCX_IB_GID_INDEX"];
            assert!(
                !beside.iter().any(|finding| subjects.contains(&finding.about.as_str())),
                "{}: {beside:?}",
                case.id
            );
        }
    }
}
