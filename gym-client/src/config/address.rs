//! Hosts as a configuration writes them.

use std::net::{Ipv4Addr, Ipv6Addr};

use gym_core::transport::bare_host;

use crate::config::problem::{Mistake, Problem};
use crate::config::yaml::node::Node;

/// Returns the mistake of a `host` that no machine can have. A name that nobody can resolve is found when the server binds it.
pub(crate) fn host_mistake(key: &str, node: &Node) -> Option<Problem> {
    let host = node.as_text().filter(|_| !node.is_interpolation() && !node.is_missing())?;
    let (what, fix) = wrong_host(host)?;
    Some(Problem::new(Mistake::Value, &node.origin, key, what).fix(fix))
}

fn wrong_host(host: &str) -> Option<(String, String)> {
    let bare = bare_host(host);
    let is_name = |text: &str| text.chars().all(|one| one.is_alphanumeric() || matches!(one, '.' | '-' | '_'));
    let (address, _zone) = bare.split_once('%').unwrap_or((bare, ""));
    if host.is_empty() || address.parse::<Ipv6Addr>().is_ok() {
        return None;
    }
    if let Some((_, rest)) = host.split_once("://") {
        let alone = rest.split(['/', ':']).next().unwrap_or_default();
        return Some((format!("'{host}' is a URL, not a host"), format!("write the host alone: {alone}")));
    }
    if let Some((name, port)) = host.rsplit_once(':')
        && is_name(name)
        && port.parse::<u16>().is_ok()
    {
        return Some((
            format!("'{host}' has a port, and a host has none"),
            format!("write {name} here, and the port in its own key, port: {port}"),
        ));
    }
    if !is_name(host) {
        return Some((
            format!("'{host}' is neither a host name nor an address"),
            "write a name such as localhost, or an address such as 127.0.0.1".to_owned(),
        ));
    }
    let numbers = host.chars().all(|one| one.is_ascii_digit() || one == '.');
    (numbers && host.parse::<Ipv4Addr>().is_err()).then(|| {
        (
            format!("'{host}' is no IPv4 address"),
            "write four numbers from 0 to 255, such as 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
                .to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_or_an_address() {
        for good in
            ["", "localhost", "node-1.cluster", "my_env", "127.0.0.1", "0.0.0.0", "::1", "[::1]", "fe80::1%eth0"]
        {
            assert_eq!(wrong_host(good), None, "{good}");
        }
        for (bad, what, fix) in [
            ("0.0.0.0.0", "no IPv4 address", "four numbers"),
            ("127.0.0.256", "no IPv4 address", "four numbers"),
            ("http://10.0.0.1:80/v1", "a URL", "write the host alone: 10.0.0.1"),
            ("10.0.0.1:80", "has a port", "write 10.0.0.1 here, and the port in its own key, port: 80"),
            ("two words", "neither a host name", "localhost"),
            ("a/b", "neither a host name", "localhost"),
        ] {
            let (said, mend) = wrong_host(bad).expect(bad);
            assert!(said.contains(what) && mend.contains(fix), "{bad}: {said}: {mend}");
        }
    }
}
