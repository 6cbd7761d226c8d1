//! Probes simulated machines, and this one.

use std::fs;
use std::path::Path;

use gym_transport_rdma::probe;
use gym_transport_rdma::probe::{Probe, ProbeOptions, Status, Topic};

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
    assert_eq!(status(&poor, Topic::LockedMemory), Status::Warning);
    assert!(poor.summary.contains("only 8388608 bytes of memory may be pinned"), "{poor}");
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
