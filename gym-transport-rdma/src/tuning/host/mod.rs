//! The rules' knowledge of a machine: cards with their ports and GID rows, interfaces with their addresses, versions of libraries.

mod cards;
mod interfaces;

use crate::machine::{Library, Machine};
use crate::tuning::settings::{Settings, Version};

pub(crate) use cards::{Card, Port, Row};
pub(crate) use interfaces::Interface;

/// A machine, as the rules see it. What a recording lacks is missing here, and no rule takes that for a fault.
pub(crate) struct Host<'m> {
    pub(crate) machine: &'m dyn Machine,
    pub(crate) settings: Settings,
    pub(crate) name: String,
    pub(crate) nccl: Option<Version>,
    pub(crate) ucx: Option<Version>,
    /// Whether the libraries are there, of whatever version.
    pub(crate) has_nccl: bool,
    pub(crate) has_ucx: bool,
    pub(crate) cards: Vec<Card>,
    pub(crate) interfaces: Vec<Interface>,
    /// The number of NVIDIA GPUs.
    pub(crate) gpus: usize,
}

impl<'m> Host<'m> {
    pub(crate) fn of(machine: &'m dyn Machine) -> Self {
        let library = |soname: &str| machine.library(soname).ok().flatten();
        let version = |library: &Option<Library>| Version::read(library.as_ref()?.version.as_ref()?);
        let (libnccl, libucp) = (library("libnccl.so.2"), library("libucp.so.0"));
        let (nccl, ucx) = (version(&libnccl), version(&libucp));
        Self {
            settings: Settings::of(machine, nccl, ucx, libucp.as_ref().map(|library| library.path.as_str())),
            name: text(machine, "/proc/sys/kernel/hostname").unwrap_or_else(|| "this machine".to_owned()),
            nccl,
            ucx,
            has_nccl: libnccl.is_some(),
            has_ucx: libucp.is_some(),
            cards: cards::cards(machine),
            interfaces: interfaces::interfaces(machine),
            gpus: machine.names("/dev").unwrap_or_default().iter().filter(|name| is_gpu_node(name)).count(),
            machine,
        }
    }

    pub(crate) fn text(&self, path: &str) -> Option<String> {
        text(self.machine, path)
    }

    /// Returns `true` if the machine is known to have something at a path.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.machine.exists(path) == Ok(true)
    }

    /// Returns `true` if the machine is known to have nothing at a path.
    pub(crate) fn lacks(&self, path: &str) -> bool {
        self.machine.exists(path) == Ok(false)
    }

    pub(crate) fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.name == name)
    }

    /// Returns the interface that other machines are most likely reached by: that of the default route, or else the first one with an address of its own.
    pub(crate) fn main_interface(&self) -> Option<&Interface> {
        let routes = self.text("/proc/self/net/route").or_else(|| self.text("/proc/net/route")).unwrap_or_default();
        let default = routes.lines().skip(1).find_map(|line| {
            let mut fields = line.split_whitespace();
            let (interface, destination) = (fields.next()?, fields.next()?);
            (destination == "00000000").then(|| interface.to_owned())
        });
        let by_route = default.and_then(|name| self.interface(&name)).filter(|interface| interface.is_usable());
        let first = || self.interfaces.iter().find(|interface| interface.is_usable() && !interface.is_local());
        by_route.or_else(first)
    }

    /// Returns the name of the main interface, for a text.
    pub(crate) fn main_interface_name(&self) -> String {
        self.main_interface().map_or_else(|| "INTERFACE".to_owned(), |interface| interface.name.clone())
    }

    /// Returns `true` if RDMA is not wanted.
    pub(crate) fn is_rdma_off(&self) -> bool {
        self.settings.number("NCCL_IB_DISABLE").is_some_and(|off| off != 0)
            || self.settings.nccl("NCCL_NET").is_some_and(|net| net.value.eq_ignore_ascii_case("Socket"))
    }

    /// Returns the library that NCCL loads as a plug-in of a network, if there is one.
    pub(crate) fn plugin(&self) -> Option<String> {
        let named = self.settings.nccl("NCCL_NET_PLUGIN").map(|setting| setting.value.clone());
        let names = match named {
            Some(none) if none == "none" => return None,
            Some(path) if path.contains('/') => return self.has(&path).then_some(path),
            Some(name) => vec![format!("libnccl-net-{name}.so"), name],
            None => vec!["libnccl-net.so".to_owned()],
        };
        names.into_iter().find(|name| self.machine.library(name).ok().flatten().is_some())
    }

    /// Returns `true` if something here may use RDMA: many machines have cards that nobody uses.
    pub(crate) fn may_use_rdma(&self) -> bool {
        let asked = |name: &String| name.starts_with("NCCL_") || name.starts_with("UCX_");
        self.has_nccl || self.has_ucx || self.gpus > 0 || self.settings.variables.keys().any(asked)
    }

    /// Returns `true` within a virtual machine.
    pub(crate) fn is_virtual(&self) -> bool {
        let flags = self.text("/proc/cpuinfo").unwrap_or_default();
        flags
            .lines()
            .find(|line| line.starts_with("flags"))
            .is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    }

    /// Returns `true` if a plug-in moves the data, for whose cards other rules hold.
    pub(crate) fn has_foreign_network(&self) -> bool {
        self.plugin().is_some()
            || self
                .cards
                .iter()
                .any(|card| card.ports.iter().any(|port| port.is_active() && port.link_layer == "Unknown"))
    }
}

/// Returns `true` for the name of a device node of a GPU, such as `nvidia0`.
pub(crate) fn is_gpu_node(name: &str) -> bool {
    name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

fn text(machine: &dyn Machine, path: &str) -> Option<String> {
    machine.text(path).ok().map(|text| text.trim().to_owned())
}
