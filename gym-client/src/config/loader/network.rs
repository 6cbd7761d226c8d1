//! Hosts and ports: of the head server, and of each instance that names none.

use crate::config::address::host_mistake;
use crate::config::check;
use crate::config::loader::ConfigLoader;
use crate::config::loader::tree::{at, place, port_at, set, set_default, settings_mut, text_or, truthy};
use crate::config::problem::{ConfigError, Mistake, Origin, Problem};
use crate::config::schema::{HeadConfig, InstanceConfig, PortRange, PortRequest};
use crate::config::yaml::node::{Key, Node, Tree};
use gym_core::base::host_name;
use gym_core::server::ServerKind;
use gym_core::transport::bare_host;

const HEAD_PORT: u16 = 11_000;

pub(super) struct NetworkSettings {
    pub(super) default_host: String,
    pub(super) head: HeadConfig,
    pub(super) ports: PortRange,
    pub(super) disallowed: Vec<u16>,
}

impl ConfigLoader {
    /// Chooses what the files leave open, and writes it into the configuration.
    pub(super) fn network(
        &mut self,
        root: &mut Node,
        resolved: &Node,
        servers: &[check::FoundServer],
    ) -> Result<NetworkSettings, ConfigError> {
        let absolute = matches!(resolved.step("use_absolute_ip").map(|n| &n.value), Some(Tree::Bool(true)));
        let default_host = if absolute {
            self.absolute_ip.clone().or_else(own_ip).ok_or_else(|| {
                place(resolved, "use_absolute_ip", "this machine's host name has no IPv4 address")
                    .fix("set default_host to the machine's address, and use_absolute_ip to false")
            })?
        } else {
            truthy(resolved, &["default_host"])
                .map_or_else(|| "127.0.0.1".to_owned(), |host| bare_host(&host).to_owned())
        };
        set_default(root, "use_absolute_ip", Tree::Bool(false));
        for (key, path) in [("default_host", &["default_host"][..]), ("head_server.host", &["head_server", "host"])] {
            if let Some(mistake) = at(resolved, path).and_then(|node| host_mistake(key, node)) {
                return Err(mistake.into());
            }
        }
        if let Some(node) =
            resolved.step("head_server").filter(|node| node.as_map().is_none() && !node.is_interpolation())
            && !matches!(node.value, Tree::Null)
        {
            let port = if let Tree::Int(port) = node.value { port } else { i128::from(HEAD_PORT) };
            return Err(place(resolved, "head_server", format!("expected a mapping, found {}", node.kind()))
                .fix(format!("write head_server: {{host: 127.0.0.1, port: {port}}}"))
                .into());
        }
        let head_host = text_or(resolved, &["head_server", "host"], &default_host)?;
        let head_port = port_at(resolved, &["head_server", "port"])?;
        let low = port_at(resolved, &["port_range_low"])?.unwrap_or(10_001);
        let high = port_at(resolved, &["port_range_high"])?.unwrap_or(20_000);
        if low > high {
            return Err(place(resolved, "port_range_low", format!("{low} is greater than port_range_high, {high}"))
                .fix("swap the two values")
                .into());
        }
        set_default(root, "port_range_low", Tree::Int(i128::from(low)));
        set_default(root, "port_range_high", Tree::Int(i128::from(high)));

        let ports = PortRange { low, high };
        let none_free = |instance: &str| {
            Problem::new(Mistake::Port, &Origin::default(), "", format!("no free port from {low} to {high}"))
                .instance(instance)
                .fix("widen the range with port_range_low and port_range_high, or set the instance's port")
        };
        let mut fixed = Vec::new();
        for server in servers {
            fixed.extend(port_at(resolved, &server.path("port"))?.filter(|port| *port != 0));
        }
        let head_port = match (head_port, &mut self.pick_port) {
            (None, Some(pick)) if self.own_head => {
                let request = PortRequest { instance: "head_server", kind: None, range: ports, disallowed: &fixed };
                pick(&request).ok_or_else(|| none_free("head_server"))?
            }
            (port, _) => port.unwrap_or(HEAD_PORT),
        };
        let head = HeadConfig { host: bare_host(&head_host).to_owned(), port: head_port };
        fixed.insert(0, head.port);
        let mut disallowed = vec![head.port];
        // Unchanged: a port given as a string remains a string in the mapping that Python reads.
        let mut listed = vec![Node::new(Tree::Int(i128::from(head.port)), Origin::default())];
        for server in servers {
            let port = port_at(resolved, &server.path("port"))?.filter(|port| *port != 0);
            let host = truthy(resolved, &server.path("host"));
            let chosen = match (port, &mut self.pick_port) {
                (Some(port), _) => Some(port),
                (None, None) => None,
                (None, Some(pick)) => {
                    let request = PortRequest {
                        instance: &server.name,
                        kind: Some(server.kind),
                        range: ports,
                        disallowed: &fixed,
                    };
                    let port = pick(&request).ok_or_else(|| none_free(&server.name))?;
                    fixed.push(port);
                    Some(port)
                }
            };
            disallowed.extend(chosen);
            listed.extend(chosen.map(|port| match at(resolved, &server.path("port")) {
                Some(node) if !matches!(node.value, Tree::Null | Tree::Int(0)) => node.clone(),
                _ => Node::new(Tree::Int(i128::from(port)), Origin::default()),
            }));
            let skip: Vec<(&str, Node)> = ["skip_verification", "skip_verification_reward"]
                .into_iter()
                .filter(|_| server.kind == ServerKind::Agent)
                .filter_map(|key| Some((key, resolved.step(key)?.clone())))
                .filter(|(_, node)| !matches!(node.value, Tree::Null))
                .collect();
            let Some(settings) = settings_mut(root, server) else { continue };
            if host.is_none() {
                settings.set(Key::from("host"), Node::text(default_host.clone(), &Origin::default()));
            }
            if port.is_none() {
                let port = chosen.map_or(-1, i128::from);
                settings.set(Key::from("port"), Node::new(Tree::Int(port), Origin::default()));
            }
            for (key, node) in skip {
                if !settings.contains(key) {
                    settings.set(Key::from(key), node);
                }
            }
        }
        set(root, "disallowed_ports", Node::new(Tree::List(listed), Origin::default()));
        let mut block = root
            .step("head_server")
            .filter(|node| node.as_map().is_some())
            .cloned()
            .unwrap_or_else(|| Node::map(Vec::new(), &Origin::default()));
        set_default(&mut block, "host", Tree::Text(default_host.clone()));
        set_default(&mut block, "port", Tree::Int(i128::from(head.port)));
        set(root, "head_server", block);
        Ok(NetworkSettings { default_host, head, ports, disallowed })
    }
}

/// Returns the address to which the host name of this machine resolves.
fn own_ip() -> Option<String> {
    use std::net::ToSocketAddrs;
    let mut addresses = (host_name().as_str(), 0).to_socket_addrs().ok()?;
    addresses.find(std::net::SocketAddr::is_ipv4).map(|address| address.ip().to_string())
}

/// Warns about servers with the same port on the same host, because only one of them can start.
pub(super) fn shared_ports(instances: &[InstanceConfig], head: &HeadConfig, warnings: &mut Vec<Problem>) {
    for (index, instance) in instances.iter().enumerate() {
        let Some(port) = instance.port else { continue };
        let earlier = instances[..index].iter().find(|other| other.port == Some(port) && other.host == instance.host);
        let other = match earlier {
            Some(other) => format!("'{}'", other.name),
            None if head.port == port && head.host == instance.host => "the head server".to_owned(),
            None => continue,
        };
        let origin = instance.node.step("port").map_or(&instance.origin, |node| &node.origin);
        warnings.push(
            Problem::new(Mistake::Port, origin, "port", format!("port {port} is also the port of {other}"))
                .instance(&instance.name)
                .fix("give one of them another port, or remove the key so that a port is chosen"),
        );
    }
}
