//! The requirements of RDMA: ports, their device nodes and addresses, pinned memory, and the libraries.
//!
//! ```text
//!   active ports ─► with an open node ─► with a row whose interface is here ─► that UCX takes
//! ```
//!
//! A step prevents RDMA if it leaves no port. Where it leaves some, the others are a fault of theirs alone.

use crate::machine::Library;
use crate::probe::container;
use crate::probe::files::Files;
use crate::probe::finding::{Finding, Status, Topic, finding};
use crate::probe::or_unknown;
use crate::probe::ports::row;
use crate::tuning::host::{Host, Port};
use crate::tuning::rules::limits::{Node, Pinning};
use crate::tuning::rules::{Chosen, cards, chosen, fabric, limits, rows, ucx};

/// The ports and the library that RDMA uses, for a text.
pub(crate) struct Usable {
    /// The usable ports, or else the active ones.
    pub(crate) ports: String,
    /// The library of UCX.
    pub(crate) ucx: String,
    /// Whether UCX is there, and a setting keeps it from starting.
    pub(crate) is_ucx_stopped: bool,
}

/// Returns the findings in the order of their dependencies, the device first, and what is usable.
pub(crate) fn findings(files: &Files<'_>, host: &Host<'_>) -> (Vec<Finding>, Usable) {
    let checks = Checks { files, host, chosen: chosen(host) };
    let judged = |finding: Finding| finding.unless_not_recorded(&files.take_not_recorded());
    let active: Vec<&Port> = host.cards.iter().flat_map(|card| &card.ports).filter(|port| port.is_active()).collect();
    let devices = judged(checks.devices(&active));
    let has_device = devices.status != Status::Missing;
    let (opened, nodes) = checks.nodes(&active, has_device);
    let mut findings = vec![devices, judged(nodes)];
    let hidden = checks.hidden(&opened);
    let reachable: Vec<&Port> = opened
        .iter()
        .copied()
        .filter(|port| !port.is_roce() || row(host, port).is_some())
        .filter(|port| !hidden.iter().any(|(hidden, _)| std::ptr::eq(*hidden, *port)))
        .collect();
    findings.push(judged(checks.container(&hidden, &reachable)));
    findings.extend(checks.roce_gid(&active, hidden.is_empty(), &reachable).into_iter().map(judged));
    findings.push(judged(checks.locked_memory(has_device)));
    findings.push(judged(checks.verbs()));
    let taken: Vec<&Port> = reachable.into_iter().filter(|port| ucx::takes(host, port)).collect();
    let library = files.library("libucp.so.0");
    let name =
        library.as_ref().map(|Library { path, version }| format!("UCX {} ({path})", or_unknown(version.clone())));
    let stopped = ucx::stops(host).filter(|_| library.is_some()).map(|rule| Finding::of_rule(Topic::Ucx, rule));
    let is_ucx_stopped = stopped.is_some();
    findings.extend(checks.ucx(library, stopped, !active.is_empty(), &taken).into_iter().map(judged));
    let ports = if taken.is_empty() { &active } else { &taken };
    (findings, Usable { ports: written(ports), ucx: name.unwrap_or_default(), is_ucx_stopped })
}

fn written(ports: &[&Port]) -> String {
    let words =
        |port: &&Port| format!("{} {}, {}, {}", port.name(), port.state, known(&port.link_layer), known(&port.rate));
    ports.iter().map(words).collect::<Vec<_>>().join("; ")
}

fn known(text: &str) -> &str {
    if text.is_empty() { "unknown" } else { text }
}

struct Checks<'a, 'm> {
    files: &'a Files<'m>,
    host: &'a Host<'m>,
    chosen: Chosen<'a>,
}

impl Checks<'_, '_> {
    /// Returns `true` for a port that NCCL takes, too.
    fn is_chosen(&self, port: &Port) -> bool {
        self.chosen.ports.iter().any(|chosen| std::ptr::eq(*chosen, port))
    }

    fn devices(&self, active: &[&Port]) -> Finding {
        let topic = Topic::RdmaDevices;
        let directory = "/sys/class/infiniband";
        let devices = self.files.names(directory);
        if devices.is_empty() {
            let state = if self.files.exists(directory) { "is empty" } else { "does not exist" };
            return finding(topic, Status::Missing, format!("no RDMA device ({directory} {state})")).fix(
                "install a network card with RDMA and load its driver (mlx5_ib, irdma, efa), or for tests emulate one: \
                 modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE; in a container, mount the host's /sys",
            );
        }
        if !active.is_empty() {
            return finding(topic, Status::Ok, written(active));
        }
        if let Some(rule) = fabric::subnet_manager(self.host) {
            return Finding::of_rule(topic, rule);
        }
        let down: Vec<&Port> = self.host.cards.iter().flat_map(|card| &card.ports).collect();
        let what = if down.is_empty() { format!("{} without ports", devices.join(", ")) } else { written(&down) };
        finding(topic, Status::Warning, format!("no active RDMA port ({what})"))
            .fix("bring the network interface of the port up (ip link set INTERFACE up) and check the cable")
    }

    /// Returns the ports whose card can be opened, too.
    fn nodes<'p>(&self, active: &[&'p Port], has_device: bool) -> (Vec<&'p Port>, Finding) {
        let topic = Topic::DeviceNodes;
        let directory = "/dev/infiniband";
        let nodes: Vec<String> = self
            .files
            .names(directory)
            .into_iter()
            .filter(|name| name.starts_with("uverbs") || name == "rdma_cm")
            .map(|name| format!("{directory}/{name}"))
            .collect();
        if !has_device {
            let found = "device nodes are needed only with an RDMA device".to_owned();
            return (Vec::new(), finding(topic, Status::NotNeeded, found));
        }
        let of_cards = limits::nodes_of_cards(self.host);
        let is_closed = |port: &Port| of_cards.iter().any(|(card, node)| *card == port.card && *node != Node::Open);
        let opened: Vec<&Port> = active.iter().copied().filter(|port| !is_closed(port)).collect();
        let is_rule = self.host.may_use_rdma();
        if let Some(rule) = limits::nodes(self.host, &self.chosen).filter(|_| is_rule) {
            let prevents = opened.is_empty();
            return (opened, Finding::of_rule(topic, rule).prevents(prevents));
        }
        let missing: Vec<&str> = ["uverbs", "rdma_cm"]
            .into_iter()
            .filter(|kind| !nodes.iter().any(|node| node.starts_with(&format!("{directory}/{kind}"))))
            .collect();
        if !missing.is_empty() {
            let found = format!("no {} in {directory}", missing.join(" and no "));
            let fix = "modprobe ib_uverbs rdma_ucm; in a container, pass the nodes (docker: --device=/dev/infiniband, \
                       compose: devices: [/dev/infiniband])";
            return (opened, finding(topic, Status::Missing, found).fix(fix));
        }
        let closed: Vec<&String> = nodes.iter().filter(|node| !self.files.opens(node)).collect();
        // That of a card which nobody asks for is no fault, as long as another card can be opened.
        let is_of_card = |node: &&String| of_cards.iter().any(|(_, of_card)| *of_card == Node::Closed((*node).clone()));
        let matters = opened.is_empty() || !closed.iter().all(is_of_card);
        if !closed.is_empty() && matters {
            let closed: Vec<&str> = closed.iter().map(|node| node.as_str()).collect();
            let finding = finding(topic, Status::Missing, format!("{} cannot be opened", closed.join(", ")))
                .fix("add the user to the group of the nodes (often rdma), or chmod 666 them by a udev rule");
            return (opened, finding);
        }
        (opened, finding(topic, Status::Ok, nodes.join(", ")))
    }

    /// Returns the ports whose row names an interface that is not here, with its name.
    fn hidden<'p>(&self, opened: &[&'p Port]) -> Vec<(&'p Port, String)> {
        let interface = |port: &&'p Port| Some((*port, row(self.host, port)?.interface.clone()));
        let is_hidden =
            |(_, name): &(&Port, String)| !name.is_empty() && !self.files.exists(&format!("/sys/class/net/{name}"));
        opened.iter().filter_map(interface).filter(is_hidden).collect()
    }

    /// Says which cards NCCL takes and cannot use, in the words of the rule.
    fn without_row(&self) -> Option<Finding> {
        let rule = cards::without_row(self.host, &self.chosen).filter(|_| self.host.may_use_rdma());
        rule.map(|rule| Finding::of_rule(Topic::RoceGid, rule))
    }

    /// Checks whether this is a container, and whether it sees the network interfaces of the RDMA ports.
    fn container(&self, hidden: &[(&Port, String)], reachable: &[&Port]) -> Finding {
        let topic = Topic::Container;
        let kind = container::kind(self.files);
        let place = kind.map_or_else(|| "no container".to_owned(), |kind| format!("in a container ({kind})"));
        if hidden.is_empty() {
            return finding(topic, Status::Ok, place);
        }
        let prevents = reachable.is_empty();
        if let Some(rule) = self.without_row() {
            return Finding { topic, ..rule }.prevents(prevents);
        }
        if !prevents {
            return finding(topic, Status::Ok, place);
        }
        let hidden: Vec<String> =
            hidden.iter().map(|(port, interface)| format!("{interface} of {}", port.name())).collect();
        let found = format!("{place}: the network interface {} is not visible here", hidden.join(" and "));
        finding(topic, Status::Warning, found)
            .fix("give the container the host's network (docker: --network=host, compose: network_mode: host)")
    }

    /// Checks the GIDs of RoCE ports: a port without an address of version 2 cannot send. `all_visible` is false where the
    /// container has the finding about interfaces.
    fn roce_gid(&self, active: &[&Port], all_visible: bool, reachable: &[&Port]) -> Vec<Finding> {
        let topic = Topic::RoceGid;
        let roce: Vec<&Port> = active.iter().copied().filter(|port| port.is_roce()).collect();
        if roce.is_empty() {
            let found = "no active RoCE port, so no GID is needed".to_owned();
            let has_port = self.host.cards.iter().any(|card| !card.ports.is_empty());
            return vec![finding(topic, if has_port { Status::Ok } else { Status::NotNeeded }, found)];
        }
        let mut findings = Vec::new();
        if self.host.may_use_rdma() {
            let without = self.without_row().filter(|_| all_visible);
            findings.extend(without.map(|finding| finding.prevents(reachable.is_empty())));
            let others = [cards::autoconfigured(&self.chosen), rows::taken(self.host, &self.chosen)];
            findings.extend(others.into_iter().flatten().map(|rule| Finding::of_rule(topic, rule).prevents(false)));
        }
        if !findings.is_empty() {
            return findings;
        }
        let without: Vec<&&Port> = roce.iter().filter(|port| row(self.host, port).is_none()).collect();
        let rows: Vec<String> = roce
            .iter()
            .filter_map(|port| row(self.host, port).map(|row| (port, row)))
            .map(|(port, row)| {
                let (index, kind, interface) = (row.index, &row.kind, &row.interface);
                format!("{}: GID index {index} ({kind}, {}, {interface})", port.name(), row.written())
            })
            .collect();
        let prevents = reachable.is_empty() && !without.is_empty();
        if without.is_empty() || !(prevents || without.iter().any(|port| self.is_chosen(port))) {
            return vec![finding(topic, Status::Ok, rows.join("; "))];
        }
        let names: Vec<String> = without.iter().map(|port| port.name()).collect();
        let others = if rows.is_empty() { String::new() } else { format!(" ({})", rows.join("; ")) };
        let found = format!("no RoCE v2 address on {}{others}", names.join(" and "));
        let fix = "give the port's network interface an address and bring it up (ip addr add ADDRESS dev INTERFACE; ip \
                   link set INTERFACE up); in a container, give it that interface";
        vec![finding(topic, Status::Warning, found).fix(fix).prevents(prevents)]
    }

    /// Checks the limit on pinned memory, and the capability that overrides it.
    fn locked_memory(&self, has_device: bool) -> Finding {
        let topic = Topic::LockedMemory;
        // Their absence is noted.
        let _ = self.files.text("/proc/self/limits");
        if let Some(rule) = limits::locked(self.host) {
            let finding = Finding::of_rule(topic, rule);
            return match (has_device, self.host.may_use_rdma()) {
                (true, true) => finding,
                // Nothing here pins memory yet.
                (true, false) => Finding { status: Status::Warning, ..finding },
                (false, _) => Finding { status: Status::NotNeeded, fix: None, because: String::new(), ..finding },
            };
        }
        let what = match Pinning::of(self.host) {
            Pinning::Unlimited => "memory may be pinned without limit".to_owned(),
            Pinning::Capable(limit) => {
                format!("memory may be pinned without limit (CAP_IPC_LOCK overrides the limit of {limit} bytes)")
            }
            Pinning::Bytes { limit, .. } => format!("{limit} bytes of memory may be pinned"),
            Pinning::Unknown => "the limit of pinned memory is not known".to_owned(),
        };
        finding(topic, Status::Ok, what)
    }

    fn verbs(&self) -> Finding {
        let topic = Topic::Verbs;
        match self.files.library("libibverbs.so.1") {
            Some(Library { path, version }) => {
                finding(topic, Status::Ok, format!("libibverbs {} ({path})", or_unknown(version)))
            }
            None => finding(
                topic,
                Status::Missing,
                "libibverbs not found (no libibverbs.so.1 in the loader's directories)".to_owned(),
            )
            .fix("apt-get install libibverbs1 ibverbs-providers (dnf: libibverbs)"),
        }
    }

    fn ucx(&self, library: Option<Library>, stopped: Option<Finding>, has_port: bool, taken: &[&Port]) -> Vec<Finding> {
        let topic = Topic::Ucx;
        let Some(Library { path, version }) = library else {
            let missing = finding(
                topic,
                Status::Missing,
                "UCX not found (no libucp.so.0 in the loader's directories)".to_owned(),
            )
            .fix("apt-get install libucx0 (dnf: ucx ucx-ib), or add the directory of a UCX to LD_LIBRARY_PATH");
            return vec![missing];
        };
        let what = format!("UCX {} ({path})", or_unknown(version));
        if let Some(stopped) = stopped {
            return vec![stopped];
        }
        // Transports are plug-ins in the directory `ucx` next to the library. A build without verbs has none for RDMA.
        if !self.has_rdma_transport(&path) {
            let found = format!("{what} without RDMA transport (no ucx/libuct_ib* next to it)");
            let fix = "install a build with verbs: Debian's libucx0, dnf's ucx-ib, or the vendor's; the wheel libucx-cu12 has none";
            return vec![finding(topic, Status::Warning, found).fix(fix)];
        }
        let rules = [ucx::devices(self.host), ucx::row(self.host)];
        let findings: Vec<Finding> = rules
            .into_iter()
            .flatten()
            .map(|rule| Finding::of_rule(topic, rule).prevents(has_port && taken.is_empty()))
            .collect();
        if !findings.is_empty() {
            return findings;
        }
        // A setting that keeps to other transports may be meant so.
        let without = ucx::without_cards(self.host).filter(|_| has_port && taken.is_empty());
        let prevents = without.is_some();
        let found = without.map_or_else(|| what.clone(), |without| format!("{what}; {without}"));
        vec![finding(topic, Status::Ok, found).prevents(prevents)]
    }

    fn has_rdma_transport(&self, libucp: &str) -> bool {
        let plugins = |path: &str| path.rsplit_once('/').map(|(folder, _)| format!("{folder}/ucx"));
        let has = |folder: String| {
            let names = self.files.names(&folder);
            names.iter().any(|name| name.starts_with("libuct_ib") && name.contains(".so"))
        };
        // The plug-ins may be next to the target of a link.
        plugins(libucp).is_some_and(has) || self.files.real(libucp).as_deref().and_then(plugins).is_some_and(has)
    }
}
