//! Writes the machine of a case as a folder, laid out like `/sys`, `/proc`, `/dev` and `/etc` of Linux.
//!
//! A read that fails with `EINVAL`, such as that of an empty GID row, is a folder here: reading it fails as well. A closed device node has mode 0.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

const ACS_BITS: [&str; 7] =
    ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"];
const PORT_STATES: [(&str, u32); 6] =
    [("NOP", 0), ("DOWN", 1), ("INIT", 2), ("ARMED", 3), ("ACTIVE", 4), ("ACTIVE_DEFER", 5)];
const PHYS_STATES: [(&str, u32); 4] = [("Sleep", 1), ("Polling", 2), ("Disabled", 3), ("LinkUp", 5)];
/// Title, key of the case, unit, soft and hard default.
const LIMITS: [(&str, &str, &str, [&str; 2]); 16] = [
    ("Max cpu time", "cpu", "seconds", ["unlimited"; 2]),
    ("Max file size", "fsize", "bytes", ["unlimited"; 2]),
    ("Max data size", "data", "bytes", ["unlimited"; 2]),
    ("Max stack size", "stack", "bytes", ["8388608", "unlimited"]),
    ("Max core file size", "core", "bytes", ["0", "unlimited"]),
    ("Max resident set", "rss", "bytes", ["unlimited"; 2]),
    ("Max processes", "nproc", "processes", ["2062158"; 2]),
    ("Max open files", "nofile", "files", ["1048576"; 2]),
    ("Max locked memory", "memlock", "bytes", ["unlimited"; 2]),
    ("Max address space", "as", "bytes", ["unlimited"; 2]),
    ("Max file locks", "locks", "locks", ["unlimited"; 2]),
    ("Max pending signals", "sigpending", "signals", ["2062158"; 2]),
    ("Max msgqueue size", "msgqueue", "bytes", ["819200"; 2]),
    ("Max nice priority", "nice", "", ["0"; 2]),
    ("Max realtime priority", "rtprio", "", ["0"; 2]),
    ("Max realtime timeout", "rttime", "us", ["unlimited"; 2]),
];

/// Writes a machine below `root`. The environment is that of the process that judges.
pub(crate) fn machine(root: &Path, host: &Value, environment: &Map<String, Value>) {
    let tree = Tree { root: root.to_owned(), host };
    tree.folder("/");
    for (bdf, bridge) in entries(host, "bridges") {
        let acs: Vec<&str> = list(bridge, "acs").iter().map(|name| name.as_str().unwrap()).collect();
        tree.pci(
            bdf,
            0x06_0400,
            0x1000,
            0xC030,
            &Function { acs: Some(acs), numa: 0, group: bridge.get("iommu_group"), sriov: None },
        );
    }
    for gpu in list(host, "gpus") {
        let bdf = text(gpu, "pci");
        let numa = gpu.get("numa").and_then(Value::as_i64).unwrap_or(0);
        tree.pci(
            &bdf,
            0x03_0200,
            0x10DE,
            0x2330,
            &Function { acs: None, numa, group: gpu.get("iommu_group"), sriov: None },
        );
        let information = format!("Model: \t\t NVIDIA H100 80GB HBM3\nBus Location: \t {bdf}\n");
        tree.file(&format!("/proc/driver/nvidia/gpus/{bdf}/information"), information);
    }
    tree.rdma();
    tree.netdevs();
    tree.process(environment);
    tree.modules();
    tree.libraries();
    for (path, content) in entries(host, "files") {
        tree.file(path, content.as_str().unwrap());
    }
}

/// Properties of a PCI function that not every one has.
struct Function<'a> {
    acs: Option<Vec<&'a str>>,
    numa: i64,
    group: Option<&'a Value>,
    sriov: Option<&'a Value>,
}

struct Tree<'a> {
    root: PathBuf,
    host: &'a Value,
}

impl Tree<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn line(&self, path: &str, content: impl std::fmt::Display) {
        self.file(path, format!("{content}\n"));
    }

    fn folder(&self, path: &str) {
        fs::create_dir_all(self.path(path)).unwrap();
    }

    fn unreadable(&self, path: &str) {
        self.folder(path);
    }

    /// A link. An absolute target is written relative, as sysfs does.
    fn link(&self, path: &str, target: &str) {
        let full = self.path(path);
        fs::create_dir_all(full.parent().unwrap()).unwrap();
        let target = if target.starts_with('/') { relative(path, target) } else { target.to_owned() };
        if fs::symlink_metadata(&full).is_err() {
            symlink(target, full).unwrap();
        }
    }

    /// Returns `/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0`, with the bridges that the host names.
    fn pci_folder(&self, bdf: &str) -> String {
        let mut chain = vec![bdf.to_owned()];
        while let Some(above) = self.above(&chain[0])
            && !chain.contains(&above)
        {
            chain.insert(0, above);
        }
        format!("/sys/devices/pci{}/{}", &chain[0][..7], chain.join("/"))
    }

    fn above(&self, bdf: &str) -> Option<String> {
        let of = self.host.get("bridges").and_then(|bridges| bridges.get(bdf)).and_then(|bridge| bridge.get("of"));
        let of = of.and_then(Value::as_str);
        // Every function of a card is behind the same bridge.
        let without_function = |bdf: &str| bdf[..bdf.len().saturating_sub(1)].to_owned();
        let device = || {
            let mut devices = list(self.host, "rdma").iter().chain(list(self.host, "gpus"));
            let device = devices.find(|device| {
                let pci = device.get("pci").and_then(Value::as_str).unwrap_or_default();
                without_function(pci) == without_function(bdf)
            });
            device.and_then(|device| device.get("bridge")).and_then(Value::as_str)
        };
        of.or_else(device).map(str::to_owned)
    }

    fn pci(&self, bdf: &str, class: u32, vendor: u16, device: u16, function: &Function<'_>) -> String {
        let base = self.pci_folder(bdf);
        self.line(&format!("{base}/vendor"), format_args!("0x{vendor:04x}"));
        self.line(&format!("{base}/device"), format_args!("0x{device:04x}"));
        self.line(&format!("{base}/class"), format_args!("0x{class:06x}"));
        self.line(&format!("{base}/numa_node"), function.numa);
        self.line(&format!("{base}/max_link_speed"), "32.0 GT/s PCIe");
        self.line(&format!("{base}/current_link_speed"), "32.0 GT/s PCIe");
        self.line(&format!("{base}/max_link_width"), "16");
        self.line(&format!("{base}/current_link_width"), "16");
        let whole = self.host.get("pci_config_readable").and_then(Value::as_bool).unwrap_or(true);
        self.file(&format!("{base}/config"), config_space(vendor, device, class, function.acs.as_deref(), whole));
        self.link(&format!("/sys/bus/pci/devices/{bdf}"), &base);
        if let Some(group) = function.group.filter(|group| !group.is_null()) {
            let group_folder = format!("/sys/kernel/iommu_groups/{}", written(&group[0]));
            self.line(&format!("{group_folder}/type"), written(&group[1]));
            self.link(&format!("{group_folder}/devices/{bdf}"), &base);
            self.link(&format!("{base}/iommu_group"), &group_folder);
        }
        if let Some(functions) = function.sriov.filter(|functions| !functions.is_null()) {
            self.line(&format!("{base}/sriov_numvfs"), written(functions));
        }
        base
    }

    fn rdma(&self) {
        let devices = list(self.host, "rdma");
        for (number, device) in devices.iter().enumerate() {
            let (name, driver) = (text(device, "name"), text_or(device, "driver", "mlx5_ib"));
            let ports = list(device, "ports");
            let bdf = device.get("pci").and_then(Value::as_str).filter(|bdf| !bdf.is_empty());
            let base = if let Some(bdf) = bdf {
                let (vendor, product) = match driver.as_str() {
                    "bnxt_re" => (0x14E4, 0x1760),
                    "efa" => (0x1D0F, 0xEFA2),
                    "irdma" => (0x8086, 0x1592),
                    _ => (0x15B3, 0x1021),
                };
                let ethernet = ports.iter().any(|port| port["link_layer"] == "Ethernet");
                let class = if ethernet { 0x02_0000 } else { 0x02_0700 };
                let numa = device.get("numa").and_then(Value::as_i64).unwrap_or(0);
                let function =
                    Function { acs: None, numa, group: device.get("iommu_group"), sriov: device.get("sriov_numvfs") };
                let above = self.pci(bdf, class, vendor, product, &function);
                if let Some(physical) = device.get("vf_of").and_then(Value::as_str) {
                    self.link(&format!("{above}/physfn"), &self.pci_folder(physical));
                }
                let base = format!("{above}/infiniband/{name}");
                self.link(&format!("{base}/device"), &above);
                base
            } else {
                // rdma_rxe, siw
                let base = format!("/sys/devices/virtual/infiniband/{name}");
                self.line(&format!("{base}/parent"), text(&ports[0]["gids"][0], "ndev"));
                base
            };
            self.link(&format!("/sys/class/infiniband/{name}"), &base);
            self.line(&format!("{base}/node_type"), text_or(device, "node_type", "1: CA"));
            self.line(&format!("{base}/node_desc"), format_args!("{} {name}", text_or(self.host, "hostname", "node")));
            let guid = text_or(device, "guid", &format!("0c42:a103:00{number:02x}:1000"));
            self.line(&format!("{base}/node_guid"), &guid);
            self.line(&format!("{base}/sys_image_guid"), text_or(device, "sys_image_guid", &guid));
            self.line(
                &format!("{base}/fw_ver"),
                text_or(device, "fw_ver", if bdf.is_some() { "28.39.2048" } else { "" }),
            );
            if bdf.is_some() && driver == "mlx5_ib" {
                self.line(&format!("{base}/hca_type"), "MT4129");
                self.line(&format!("{base}/board_id"), "MT_0000000838");
            }
            for port in ports {
                self.port(&base, port);
                // Only with the vendor's driver.
                if let Some(class) = device.get("tclass") {
                    let content =
                        if class.is_null() { String::new() } else { format!("Global tclass={}\n", written(class)) };
                    self.file(&format!("{base}/tc/{}/traffic_class", text_or(port, "port", "1")), content);
                }
            }
            let above = base.rsplitn(3, '/').last().unwrap();
            let node = format!("uverbs{}", text_or(device, "uverbs", &number.to_string()));
            let verbs = format!("{above}/infiniband_verbs/{node}");
            let minor = 192 + node["uverbs".len()..].parse::<usize>().unwrap();
            self.line(&format!("{verbs}/ibdev"), &name);
            self.line(&format!("{verbs}/abi_version"), "1");
            self.line(&format!("{verbs}/dev"), format_args!("231:{minor}"));
            self.link(&format!("/sys/class/infiniband_verbs/{node}"), &verbs);
        }
        if !devices.is_empty() {
            self.line("/sys/class/infiniband_verbs/abi_version", "6");
        } else if self.host.get("ib_core").and_then(Value::as_bool).unwrap_or(true) {
            self.folder("/sys/class/infiniband");
        }
    }

    fn port(&self, base: &str, port: &Value) {
        let base = format!("{base}/ports/{}", text_or(port, "port", "1"));
        let state = text_or(port, "state", "ACTIVE");
        let phys = text_or(port, "phys_state", if state == "DOWN" { "Disabled" } else { "LinkUp" });
        let layer = text(port, "link_layer");
        let infiniband = layer == "InfiniBand";
        let number = |states: &[(&str, u32)], word: &str| states.iter().find(|(name, _)| *name == word).unwrap().1;
        let line = |name: &str, content: &str| self.line(&format!("{base}/{name}"), content);
        line("state", &format!("{}: {state}", number(&PORT_STATES, &state)));
        line("phys_state", &format!("{}: {phys}", number(&PHYS_STATES, &phys)));
        line("link_layer", &layer);
        line("rate", &text_or(port, "rate", "400 Gb/sec (4X NDR)"));
        line("lid", &text_or(port, "lid", if infiniband { "0x1" } else { "0x0" }));
        line("sm_lid", &text_or(port, "sm_lid", if infiniband { "0x1" } else { "0x0" }));
        line("sm_sl", "0");
        line("lid_mask_count", "0");
        line("cap_mask", if infiniband { "0xa751e848" } else { "0x04010000" });
        let counters = port.get("counters").cloned().unwrap_or_else(|| json!({}));
        for name in [
            "symbol_error",
            "link_downed",
            "port_rcv_errors",
            "port_xmit_discards",
            "port_xmit_wait",
            "port_rcv_data",
            "port_xmit_data",
        ] {
            line(&format!("counters/{name}"), &text_or(&counters, name, "0"));
        }
        for name in [
            "local_ack_timeout_err",
            "out_of_sequence",
            "packet_seq_err",
            "rnr_nak_retry_err",
            "np_cnp_sent",
            "np_ecn_marked_roce_packets",
        ] {
            line(&format!("hw_counters/{name}"), &text_or(&counters, name, "0"));
        }
        line("hw_counters/lifespan", "10");
        let keys = match port.get("pkeys") {
            Some(keys) => keys.as_array().unwrap().iter().map(written).collect(),
            None if infiniband => [vec!["0xffff".to_owned()], vec!["0x0000".to_owned(); 7]].concat(),
            None => vec!["0xffff".to_owned()],
        };
        for (index, key) in keys.iter().enumerate() {
            line(&format!("pkeys/{index}"), key);
        }
        let gids = list(port, "gids");
        if layer == "Unknown" {
            // EFA: no table that means anything.
            line("gids/0", &gid(&text(&gids[0], "address")));
            line("gid_attrs/types/0", "IB/RoCE v1");
            self.unreadable(&format!("{base}/gid_attrs/ndevs/0"));
            return;
        }
        let rows: BTreeMap<u64, &Value> = gids.iter().map(|row| (row["index"].as_u64().unwrap(), row)).collect();
        let last = rows.keys().next_back().copied().unwrap_or(0).max(7);
        let table = port.get("gid_table").and_then(Value::as_u64).unwrap_or(last + 1);
        for index in 0..table {
            let (types, interfaces) = (format!("gid_attrs/types/{index}"), format!("gid_attrs/ndevs/{index}"));
            let Some(row) = rows.get(&index) else {
                // An unset row of InfiniBand holds the prefix of the subnet and nothing else; one of RoCE is zero.
                line(&format!("gids/{index}"), &gid(if infiniband { "fe80::" } else { "::" }));
                if infiniband {
                    line(&types, "IB/RoCE v1");
                } else {
                    self.unreadable(&format!("{base}/{types}"));
                }
                self.unreadable(&format!("{base}/{interfaces}"));
                continue;
            };
            line(&format!("gids/{index}"), &gid(&text(row, "address")));
            line(&types, &text_or(row, "type", "IB/RoCE v1"));
            match row.get("ndev").and_then(Value::as_str).filter(|name| !name.is_empty()) {
                Some(interface) => line(&interfaces, interface),
                None => self.unreadable(&format!("{base}/{interfaces}")),
            }
        }
    }

    fn netdevs(&self) {
        let devices = list(self.host, "netdevs");
        let base_of = |device: &Value| {
            let name = text(device, "name");
            match device.get("pci").and_then(Value::as_str) {
                Some(bdf) => format!("{}/net/{name}", self.pci_folder(bdf)),
                None => format!("/sys/devices/virtual/net/{name}"),
            }
        };
        for (number, device) in devices.iter().enumerate() {
            self.netdev(number + 1, device, &base_of(device));
        }
        for device in devices {
            let (name, base) = (text(device, "name"), base_of(device));
            let of_name = |other: &&Value| device.get("master") == other.get("name");
            if let Some(bond) = device.get("bond").filter(|bond| !bond.is_null()) {
                let slaves = devices.iter().filter(|other| other.get("master") == device.get("name"));
                let slaves: Vec<String> = slaves.map(|slave| text(slave, "name")).collect();
                self.line(&format!("{base}/bonding/mode"), text(bond, "mode"));
                self.line(&format!("{base}/bonding/slaves"), slaves.join(" "));
                self.line(&format!("{base}/bonding/xmit_hash_policy"), "layer3+4 1");
                let active = text_or(bond, "active", &slaves.len().to_string());
                self.line(&format!("{base}/bonding/ad_num_ports"), active);
            }
            if let Some(master) = devices.iter().find(of_name) {
                let above = base_of(master);
                self.link(&format!("{base}/master"), &above);
                self.link(&format!("{above}/lower_{name}"), &base);
            }
        }
        self.network_tables(devices);
    }

    fn netdev(&self, number: usize, device: &Value, base: &str) {
        let name = text(device, "name");
        let is_loopback = name == "lo";
        self.link(&format!("/sys/class/net/{name}"), base);
        if let Some(bdf) = device.get("pci").and_then(Value::as_str) {
            self.link(&format!("{base}/device"), &self.pci_folder(bdf));
        }
        let state = text_or(device, "state", if is_loopback { "unknown" } else { "up" });
        let up = matches!(state.as_str(), "up" | "unknown");
        let enabled = device.get("admin_up").and_then(Value::as_bool).unwrap_or(true);
        let is_slave = device.get("master").is_some_and(Value::is_string);
        let flags = 0x1002 | u32::from(enabled) | if is_slave { 0x800 } else { 0 };
        let kind = text_or(device, "type", if is_loopback { "772" } else { "1" });
        let line = |name: &str, content: String| self.line(&format!("{base}/{name}"), content);
        line("operstate", state);
        line("flags", format!("0x{:x}", if is_loopback { 0x9 } else { flags }));
        line("mtu", text_or(device, "mtu", if is_loopback { "65536" } else { "1500" }));
        line("ifindex", text_or(device, "ifindex", &number.to_string()));
        line("addr_len", if kind == "32" { "20" } else { "6" }.to_owned());
        line("type", kind);
        let mac = if is_loopback { "00:00:00:00:00:00".to_owned() } else { format!("02:00:00:00:00:{number:02x}") };
        line("address", text_or(device, "mac", &mac));
        line("dev_id", "0x0".to_owned());
        line("dev_port", "0".to_owned());
        if enabled {
            line("carrier", u32::from(up).to_string());
        } else {
            self.unreadable(&format!("{base}/carrier"));
        }
        if is_loopback || !enabled {
            self.unreadable(&format!("{base}/speed"));
        } else {
            line("speed", if up { text_or(device, "speed", "25000") } else { "-1".to_owned() });
        }
        if device.get("bridge").and_then(Value::as_bool).unwrap_or(false) {
            line("bridge/bridge_id", "8000.020000000000".to_owned());
        }
        if let Some(trust) = device.get("qos_trust").and_then(Value::as_str) {
            line("qos/trust", trust.to_owned());
        }
    }

    fn network_tables(&self, devices: &[Value]) {
        let mut counters = String::from(
            "Inter-|   Receive                                                |  Transmit\n face |bytes    packets errs drop fifo frame compressed \
             multicast|bytes    packets errs drop fifo colls carrier compressed\n",
        );
        let mut routes =
            vec!["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT".to_owned()];
        let (mut ipv6, mut leaves) = (String::new(), String::from("  +-- 0.0.0.0/0 3 0 4\n"));
        let mut addresses = Map::new();
        for (number, device) in devices.iter().enumerate() {
            let name = text(device, "name");
            let _ = writeln!(
                counters,
                "{name:>6}:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0"
            );
            let state = text_or(device, "state", "up");
            for address in list(device, "addresses") {
                let (address, prefix) = address.as_str().unwrap().split_once('/').unwrap();
                let prefix: u32 = prefix.parse().unwrap();
                match address.parse().unwrap() {
                    IpAddr::V4(address) => {
                        let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
                        if name != "lo" && matches!(state.as_str(), "up" | "unknown") {
                            let network = little(address.to_bits() & mask);
                            routes
                                .push(format!("{name}\t{network}\t00000000\t0001\t0\t0\t0\t{}\t0\t0\t0", little(mask)));
                        }
                        let _ = write!(leaves, "     |-- {address}\n        /32 host LOCAL\n");
                    }
                    IpAddr::V6(address) => {
                        let scope = if address.is_unicast_link_local() {
                            "20"
                        } else if address.is_loopback() {
                            "10"
                        } else {
                            "00"
                        };
                        let index = device.get("ifindex").and_then(Value::as_u64).unwrap_or(number as u64 + 1);
                        let _ =
                            writeln!(ipv6, "{:032x} {index:02x} {prefix:02x} {scope} 80 {name:>8}", address.to_bits());
                    }
                }
            }
            addresses.insert(name, device.get("addresses").cloned().unwrap_or_else(|| json!([])));
        }
        if let Some(gateway) = self.host.get("gateway").filter(|gateway| !gateway.is_null()) {
            let via: Ipv4Addr = text(gateway, "via").parse().unwrap();
            let interface = text(gateway, "dev");
            let via = little(via.to_bits());
            routes.insert(1, format!("{interface}\t00000000\t{via}\t0003\t0\t0\t100\t00000000\t0\t0\t0"));
        }
        self.file("/proc/self/net/dev", counters);
        self.line("/proc/self/net/route", routes.join("\n"));
        self.file("/proc/self/net/if_inet6", ipv6);
        self.file("/proc/self/net/fib_trie", format!("Main:\n{leaves}Local:\n{leaves}"));
        self.link("/proc/net", "self/net");
        // No file of the kernel says which interface has which IPv4 address: programs ask by netlink.
        self.file("/recorded/addresses.json", indented(&addresses.into()));
    }

    fn process(&self, environment: &Map<String, Value>) {
        let pairs: String = environment.iter().map(|(name, value)| format!("{name}={}\0", written(value))).collect();
        self.file("/proc/self/environ", pairs);
        let mut limits = format!("{:<26}{:<21}{:<21}{:<10}\n", "Limit", "Soft Limit", "Hard Limit", "Units");
        for (title, name, unit, default) in LIMITS {
            let limit = self.host.get("limits").and_then(|limits| limits.get(name));
            let [soft, hard] = match limit {
                Some(Value::Array(both)) => [written(&both[0]), written(&both[1])],
                Some(one) => [written(one), written(one)],
                None => default.map(str::to_owned),
            };
            let _ = writeln!(limits, "{title:<26}{soft:<21}{hard:<21}{unit:<10}");
        }
        self.file("/proc/self/limits", limits);
        let uid = text_or(self.host, "uid", "0");
        let mask = text_or(self.host, "capabilities", "0000000000000000");
        let status = format!(
            "Name:\trgym\nUmask:\t0022\nState:\tR (running)\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\n\
             CapInh:\t0000000000000000\nCapPrm:\t{mask}\nCapEff:\t{mask}\nCapBnd:\t{mask}\nCapAmb:\t0000000000000000\n"
        );
        self.file("/proc/self/status", status);
        let is_mapped = self.host.get("user_namespace").and_then(Value::as_bool).unwrap_or(false);
        let mapping = if is_mapped { "         0     100000      65536" } else { "         0          0 4294967295" };
        self.line("/proc/self/uid_map", mapping);
        let container = self.host.get("container").and_then(Value::as_str);
        self.mounts(container.is_some());
        for (who, own) in [("self", "0::/user.slice/user-1000.slice/session-3.scope"), ("1", "0::/init.scope")] {
            let group = match container {
                Some("docker") => "0::/system.slice/docker-4f1e.scope",
                Some("kubepods") => "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-9a.scope",
                _ => own,
            };
            self.line(&format!("/proc/{who}/cgroup"), group);
        }
        if container == Some("docker") {
            self.file("/.dockerenv", "");
        }
        let cmdline = text_or(self.host, "cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro quiet");
        self.line("/proc/cmdline", cmdline);
        self.line("/proc/sys/kernel/osrelease", text_or(self.host, "kernel", "5.15.0-119-generic"));
        self.line("/proc/sys/kernel/hostname", text_or(self.host, "hostname", "node-a"));
        self.line("/proc/sys/kernel/yama/ptrace_scope", "0");
    }

    fn mounts(&self, contained: bool) {
        let root = if contained { "overlay / overlay" } else { "/dev/nvme0n1p2 / ext4" };
        let sys = if contained { "ro" } else { "rw" };
        let mut mounts = format!(
            "{root} rw,relatime 0 0\nproc /proc proc rw,nosuid,nodev,noexec,relatime 0 0\n\
             sysfs /sys sysfs {sys},nosuid,nodev,noexec,relatime 0 0\n"
        );
        let none = json!({});
        let memory = self.host.get("shm").unwrap_or(&none);
        if memory.get("mounted").and_then(Value::as_bool).unwrap_or(true) {
            let size = memory.get("size").and_then(Value::as_u64).filter(|size| *size > 0);
            let size = size.map(|size| format!(",size={}k", size / 1024)).unwrap_or_default();
            let source = if contained { "shm" } else { "tmpfs" };
            let _ = writeln!(mounts, "{source} /dev/shm tmpfs rw,nosuid,nodev{size} 0 0");
            self.folder("/dev/shm");
            for (name, bytes) in entries(memory, "files") {
                let path = format!("/dev/shm/{name}");
                self.file(&path, "");
                let file = fs::OpenOptions::new().write(true).open(self.path(&path)).unwrap();
                file.set_len(bytes.as_u64().unwrap()).unwrap();
            }
        }
        for mount in list(self.host, "mounts") {
            let options = text_or(mount, "options", "rw,relatime");
            let _ = writeln!(
                mounts,
                "{} {} {} {options} 0 0",
                text(mount, "source"),
                text(mount, "target"),
                text(mount, "type")
            );
        }
        self.file("/proc/self/mounts", mounts);
        self.link("/proc/mounts", "self/mounts");
    }

    fn modules(&self) {
        let mut loaded = String::new();
        for (name, version) in entries(self.host, "modules") {
            self.line(&format!("/sys/module/{name}/initstate"), "live");
            if let Some(version) = version.as_str().filter(|version| !version.is_empty()) {
                self.line(&format!("/sys/module/{name}/version"), version);
            }
            let _ = writeln!(loaded, "{name} 16384 0 - Live 0x0000000000000000");
        }
        self.file("/proc/modules", loaded);
        for (name, version) in entries(self.host, "memory_peers") {
            self.line(&format!("/sys/kernel/mm/memory_peers/{name}/version"), written(version));
        }
        if let Some(driver) = self.host.get("nvidia").filter(|driver| !driver.is_null()) {
            let open = driver.get("open").and_then(Value::as_bool).unwrap_or(false);
            let kind =
                if open { "NVIDIA UNIX Open Kernel Module for x86_64" } else { "NVIDIA UNIX x86_64 Kernel Module" };
            let version = text(driver, "version");
            let content = format!("NVRM version: {kind}  {version}  Release Build\nGCC version:  gcc version 12.3.0\n");
            self.file("/proc/driver/nvidia/version", content);
        }
        for node in list(self.host, "dev") {
            let path = node.as_str().map_or_else(|| text(node, "path"), str::to_owned);
            self.file(&format!("/dev/{path}"), "");
            if node.is_object() {
                fs::set_permissions(self.path(&format!("/dev/{path}")), fs::Permissions::from_mode(0o0)).unwrap();
            }
        }
    }

    fn libraries(&self) {
        let folder = "/usr/lib/x86_64-linux-gnu";
        for (name, version) in entries(self.host, "libraries") {
            let version = version.as_str().filter(|version| !version.is_empty());
            match (name.rsplit_once(".so."), version) {
                (Some((stem, _)), Some(version)) => {
                    self.file(&format!("{folder}/{stem}.so.{version}"), "");
                    self.link(&format!("{folder}/{name}"), &format!("{stem}.so.{version}"));
                }
                _ => self.file(&format!("{folder}/{name}"), ""),
            }
            if let ("libucp.so.0", Some(version)) = (name.as_str(), version) {
                let description =
                    format!("Name: ucx\nDescription: Unified Communication X Library\nVersion: {version}\n");
                self.file(&format!("{folder}/pkgconfig/ucx.pc"), description);
            }
        }
        for name in list(self.host, "ucx_modules") {
            self.file(&format!("{folder}/ucx/libuct_{}.so.0", written(name)), "");
        }
    }
}

/// Returns the first 64 bytes, which every user may read, or 4,096 with the ACS capability at 0x100, as root reads them.
fn config_space(vendor: u16, device: u16, class: u32, acs: Option<&[&str]>, whole: bool) -> Vec<u8> {
    let is_bridge = class == 0x06_0400;
    let mut space = vec![0; if whole { 4096 } else { 64 }];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[vendor.to_le_bytes(), device.to_le_bytes(), 0x0406_u16.to_le_bytes(), 0x0010_u16.to_le_bytes()].concat());
    put(8, &(class << 8).to_le_bytes());
    put(0x0E, &[u8::from(is_bridge)]);
    put(0x34, &[0x40]);
    if whole {
        put(0x40, &[0x10, 0, if is_bridge { 0x52 } else { 0x02 }, 0]);
        if let Some(acs) = acs {
            let bit = |name: &&str| 1_u16 << ACS_BITS.iter().position(|bit| bit == name).unwrap();
            put(0x100, &0x0001_000D_u32.to_le_bytes());
            put(0x104, &0x005F_u16.to_le_bytes());
            put(0x106, &acs.iter().map(bit).sum::<u16>().to_le_bytes());
        }
    }
    space
}

/// Writes an address as sysfs writes a GID. What is none was meant so.
fn gid(address: &str) -> String {
    let address = match address.parse() {
        Ok(IpAddr::V4(address)) => address.to_ipv6_mapped(),
        Ok(IpAddr::V6(address)) => address,
        Err(_) => return address.to_owned(),
    };
    address.segments().map(|group| format!("{group:04x}")).join(":")
}

fn little(number: u32) -> String {
    format!("{:08X}", number.swap_bytes())
}

/// Returns the way from the folder of `path` to `target`.
fn relative(path: &str, target: &str) -> String {
    let from: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
    let to: Vec<&str> = target.split('/').filter(|name| !name.is_empty()).collect();
    let from = &from[..from.len() - 1];
    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
    let ups = std::iter::repeat_n("..", from.len() - common);
    let way: Vec<&str> = ups.chain(to[common..].iter().copied()).collect();
    if way.is_empty() { ".".to_owned() } else { way.join("/") }
}

/// Writes JSON with one space a level.
fn indented(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b" ");
    serde::Serialize::serialize(value, &mut serde_json::Serializer::with_formatter(&mut bytes, format)).unwrap();
    bytes.push(b'\n');
    bytes
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn entries<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    value.get(name).and_then(Value::as_object).into_iter().flatten()
}

fn text(value: &Value, name: &str) -> String {
    written(value.get(name).unwrap_or_else(|| panic!("{name} of {value}")))
}

fn text_or(value: &Value, name: &str, default: &str) -> String {
    value.get(name).map_or_else(|| default.to_owned(), written)
}

fn written(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
