//! Lanes: the transports and devices that UCX uses for a connection.

use std::fmt;

/// Transports and devices of a connection, as UCX reports them: `posix/memory`, `cma/memory`, `tcp/lo`,
/// `rc_verbs/rxe0:1`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Lanes {
    names: Vec<String>,
}

impl Lanes {
    /// Parses the output of `ucp_ep_print_info`: `#  lane[0]:  2:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] am am_bw#0`.
    pub(crate) fn parse(description: &str) -> Self {
        let mut names: Vec<String> = Vec::new();
        for line in description.lines() {
            let Some((_, lane)) = line.split_once("lane[") else { continue };
            let Some((_, lane)) = lane.split_once("]:") else { continue };
            // `2:tcp/lo.0`: index of the resource, name, path of the device.
            let Some(name) = lane.split_whitespace().find_map(|word| word.split_once(':').map(|(_, name)| name)) else {
                continue;
            };
            let name = match name.rsplit_once('.') {
                Some((name, path)) if path.bytes().all(|byte| byte.is_ascii_digit()) => name,
                _ => name,
            };
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        Self { names }
    }

    /// Returns lanes over all of these devices.
    pub(crate) fn of(devices: &[String]) -> Self {
        Self { names: devices.to_vec() }
    }

    /// Returns each lane once, as `transport/device`.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    fn transports(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| name.split('/').next().unwrap_or(name))
    }

    /// Returns `true` if messages use memory that two processes on one host share, or stay in one process.
    #[must_use]
    pub fn shared_memory(&self) -> bool {
        const SHARED: [&str; 6] = ["posix", "sysv", "xpmem", "cma", "knem", "self"];
        !self.names.is_empty() && self.transports().all(|transport| SHARED.contains(&transport))
    }

    /// Returns `true` if messages use an RDMA device.
    #[must_use]
    pub fn rdma(&self) -> bool {
        const RDMA: [&str; 6] = ["rc_", "dc_", "ud_", "srd", "rc", "gga"];
        self.transports().any(|transport| RDMA.iter().any(|name| transport.starts_with(name)))
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(lines: &[&str]) -> Lanes {
        Lanes::parse(&lines.iter().map(|line| format!("#                 {line}\n")).collect::<String>())
    }

    #[test]
    fn each_transport_is_named_once_with_its_device() {
        let tcp = lanes(&["peer: <no debug data>", "lane[0]:  2:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] am am_bw#0"]);
        assert_eq!(tcp.names(), ["tcp/lo"]);
        assert!(!tcp.shared_memory() && !tcp.rdma());
        let shared = lanes(&[
            "lane[0]:  4:posix/memory.0 md[3] -> md[3]/posix/sysdev[255] am am_bw#0",
            "lane[1]:  5:cma/memory.0 md[4] -> md[4]/cma/sysdev[255] rma_bw#0",
            "lane[2]:  5:cma/memory.0 md[4] -> md[4]/cma/sysdev[255] rma_bw#1",
        ]);
        assert_eq!(shared.names(), ["posix/memory", "cma/memory"]);
        assert!(shared.shared_memory() && !shared.rdma());
    }

    #[test]
    fn one_lane_over_a_network_is_not_shared_memory_and_none_is_neither() {
        let mixed = lanes(&["lane[0]: 1:rc_verbs/rxe0:1.0 md[2] -> md[2]/ib", "lane[1]: 4:posix/memory.0 md[3] -> x"]);
        assert_eq!(mixed.names(), ["rc_verbs/rxe0:1", "posix/memory"]);
        assert!(mixed.rdma() && !mixed.shared_memory());
        let none = lanes(&["nothing of the kind"]);
        assert!(!none.rdma() && !none.shared_memory());
    }
}
