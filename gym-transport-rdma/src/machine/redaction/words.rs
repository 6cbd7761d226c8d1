//! Names and addresses within a text.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::machine::redaction::keyed::Key;

/// Names that a recording has, in small letters.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) hosts: BTreeSet<String>,
    pub(super) users: BTreeSet<String>,
    /// Versions of libraries, some of which look like IPv4 addresses.
    pub(super) versions: BTreeSet<String>,
}

/// Parts of domains that tell nothing.
const COMMON: [&str; 14] = [
    "cluster",
    "com",
    "compute",
    "default",
    "edu",
    "example",
    "internal",
    "io",
    "lan",
    "local",
    "localdomain",
    "net",
    "org",
    "svc",
];
/// Words in the names of variables whose values name hosts.
const OF_HOSTS: [&str; 7] = ["ADDR", "COMM_ID", "HOST", "LAUNCH_NODE", "NODELIST", "NODENAME", "SERVER"];

/// Returns the names of hosts in the value of a variable that names some: `gpu[001-004]`, `tcp://head:6379`.
pub(super) fn host_names(variable: &str, value: &str) -> Vec<String> {
    // A family, a version or a type of addresses is a word.
    let is_word = ["_FAMILY", "_VERSION", "_TYPE"].iter().any(|end| variable.ends_with(end));
    if is_word || !OF_HOSTS.iter().any(|word| variable.contains(word)) {
        return Vec::new();
    }
    let value = value.split_once("://").map_or(value, |(_, rest)| rest);
    // Two colons are in no name and port, but in an IPv6 address.
    let items = value.split([',', ';', ' ']).filter(|item| item.matches(':').count() < 2);
    let names = items.flat_map(|item| item.split(|letter: char| !is_of_name(letter)));
    names.filter(|name| is_host_name(name)).map(str::to_lowercase).collect()
}

/// Returns `true` unless a word is a number, an address, or a name that every machine has.
pub(super) fn is_host_name(name: &str) -> bool {
    let common = ["auto", "local", "localhost", "none", "broadcasthost", "tmpfs", "true", "false"];
    let is_loopback = name.starts_with("ip6-") || name.starts_with("localhost.");
    name.len() > 1
        && name.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && !common.contains(&name.to_lowercase().as_str())
        && !is_loopback
}

pub(super) fn user(key: &Key, name: &str) -> String {
    format!("user{}", key.letters("user", name, 6))
}

/// Returns the stand-in of a host, which keeps the digits at the end of its name: `gpu001` is one of `gpu[001-004]`.
fn host(key: &Key, name: &str) -> String {
    let label = |(at, label): (usize, &str)| match (at, label.to_lowercase()) {
        (0, label) => {
            let stem = label.trim_end_matches(|letter: char| letter.is_ascii_digit());
            format!("host{}{}", key.letters("host", stem, 6), &label[stem.len()..])
        }
        (_, label) if label.is_empty() || COMMON.contains(&label.as_str()) => label,
        (_, label) => format!("net{}", key.letters("domain", &label, 5)),
    };
    name.split('.').enumerate().map(label).collect::<Vec<_>>().join(".")
}

/// Replaces what is known, and every address.
pub(super) fn replaced(text: &str, key: &Key, known: &Known) -> String {
    let mut scan = Scan { text, at: 0, out: String::with_capacity(text.len()), key, known, after_address: false };
    while scan.at < text.len() {
        if !scan.begins_word() || !(scan.address() || scan.name()) {
            scan.copy_word();
        }
    }
    scan.out
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
    out: String,
    key: &'a Key,
    known: &'a Known,
    /// Whether the text before is an address, so that `-` leads to a second one.
    after_address: bool,
}

impl Scan<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn begins_word(&self) -> bool {
        !self.text[..self.at].ends_with(|letter: char| letter.is_ascii_alphanumeric() || letter == '_')
    }

    /// Copies a run of letters and digits, or one other character.
    fn copy_word(&mut self) {
        let word = self.rest().find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(self.rest().len());
        let length = if word > 0 { word } else { self.rest().chars().next().map_or(1, char::len_utf8) };
        self.after_address &= word == 0 && self.rest().starts_with('-');
        let end = self.at + length;
        self.out.push_str(&self.text[self.at..end]);
        self.at = end;
    }

    fn replace(&mut self, length: usize, by: &str) {
        self.out.push_str(by);
        self.at += length;
    }

    /// Replaces an address that begins here.
    fn address(&mut self) -> bool {
        let rest = self.rest();
        let word = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(rest.len());
        if let Some(by) = self.of_digits(&rest[..word]) {
            self.replace(word, &by);
            return true;
        }
        let is_digit = |letter: char| letter.is_ascii_hexdigit() || matches!(letter, ':' | '.');
        let run = rest.find(|letter: char| !is_digit(letter)).unwrap_or(rest.len());
        if rest[run..].starts_with(|letter: char| letter.is_ascii_alphanumeric() || letter == '_') {
            return false;
        }
        let mut run = rest[..run].trim_end_matches('.');
        if !run.ends_with("::") {
            run = run.trim_end_matches(':');
        }
        // The longest address that begins here: an IPv4 address may have a port behind it.
        let port = run.split_once(':').map_or(run, |(address, _)| address);
        let (length, by) = match (self.whole(run), port.parse::<Ipv4Addr>()) {
            (Some(by), _) => (run.len(), by),
            (None, Ok(address)) if !self.is_version(port) => (port.len(), self.ipv4(address, &rest[port.len()..])),
            _ => return false,
        };
        self.replace(length, &by);
        self.after_address = true;
        true
    }

    /// Returns the stand-in of a word of hexadecimal digits: `0x0c42a10300001000`, and an interface that is named after its MAC.
    fn of_digits(&self, word: &str) -> Option<String> {
        if let Some(digits) = word.strip_prefix("0x").filter(|digits| digits.len() == 16) {
            return Some(format!("0x{:016x}", self.key.guid(u64::from_str_radix(digits, 16).ok()?)));
        }
        let digits =
            word.get(3..).filter(|digits| digits.len() == 12 && matches!(&word[..3], "enx" | "wlx" | "ibx"))?;
        let mac = u64::from_str_radix(digits, 16).ok()?.to_be_bytes();
        let to = self.key.mac([mac[2], mac[3], mac[4], mac[5], mac[6], mac[7]]);
        Some(format!("{}{}", &word[..3], to.map(|byte| format!("{byte:02x}")).concat()))
    }

    /// Returns the stand-in of a run that is an address as a whole, except one of IPv4.
    fn whole(&self, run: &str) -> Option<String> {
        if run.matches(':').count() < 2 {
            return None;
        }
        let groups: Vec<&str> = run.split(':').collect();
        let digits = |length| groups.iter().all(|group| group.len() == length && !group.contains('.'));
        let pairs = || groups.iter().map(|pair| u8::from_str_radix(pair, 16).ok()).collect::<Option<Vec<u8>>>();
        match groups.len() {
            6 if digits(2) => {
                let mac: [u8; 6] = pairs()?.try_into().ok()?;
                Some(joined(&self.key.mac(mac)))
            }
            // IPoIB: the number of a queue pair, and a GID.
            20 if digits(2) => {
                let mut bytes = pairs()?;
                let gid: [u8; 16] = bytes[4..].try_into().ok()?;
                bytes[4..].copy_from_slice(&self.key.ipv6(gid.into()).octets());
                Some(joined(&bytes))
            }
            4 if digits(4) => {
                let guid = u64::from_str_radix(&groups.concat(), 16).ok()?;
                let to = format!("{:016x}", self.key.guid(guid));
                Some([&to[..4], &to[4..8], &to[8..12], &to[12..]].join(":"))
            }
            _ => {
                let address: Ipv6Addr = run.parse().ok()?;
                let to = self.key.ipv6(address);
                if to == address {
                    return Some(run.to_owned());
                }
                // sysfs writes all digits.
                let to = if groups.len() == 8 && digits(4) {
                    to.segments().map(|group| format!("{group:04x}")).join(":")
                } else {
                    let behind = &self.rest()[run.len()..];
                    match network(behind, 128) {
                        Some(prefix) if host_bits(address.to_bits(), prefix) == 0 => {
                            Ipv6Addr::from_bits(to.to_bits() - host_bits(to.to_bits(), prefix)).to_string()
                        }
                        _ => to.to_string(),
                    }
                };
                Some(to)
            }
        }
    }

    fn ipv4(&self, address: Ipv4Addr, behind: &str) -> String {
        let to = self.key.ipv4(address).to_bits();
        match network(behind, 32) {
            // A network stays one.
            Some(prefix) => {
                let (prefix, bits) = (prefix + 96, u128::from(address.to_bits()));
                let host = if host_bits(bits, prefix) == 0 { host_bits(u128::from(to), prefix) } else { 0 };
                Ipv4Addr::from_bits(to - u32::try_from(host).unwrap_or_default()).to_string()
            }
            None => Ipv4Addr::from_bits(to).to_string(),
        }
    }

    /// Returns `true` for `libibverbs.so.1.14.44.0`, `5.8-4.1.5.0`, and versions that the recording has elsewhere.
    fn is_version(&self, quad: &str) -> bool {
        let before = &self.text[..self.at];
        let joins = before.ends_with('.') || before.ends_with('-') && !self.after_address;
        let joined = joins && before[..before.len() - 1].ends_with(|letter: char| letter.is_ascii_alphanumeric());
        joined || self.known.versions.contains(quad)
    }

    /// Replaces the name of a host or a user that begins here.
    fn name(&mut self) -> bool {
        let rest = self.rest();
        let end = rest.find(|letter: char| !is_of_name(letter)).unwrap_or(rest.len());
        let name = rest[..end].trim_end_matches(['.', '-']);
        if name.is_empty() {
            return false;
        }
        let before = &self.text[..self.at];
        let in_home = ["/home/", "/Users/"].iter().any(|folder| before.ends_with(folder));
        // A name within a longer one, such as the b of a-b, is another.
        let is_whole = !before.ends_with(['-', '.']);
        let by = if in_home || self.known.users.contains(name) && before.ends_with(['/', '~']) {
            user(self.key, name)
        } else if is_whole && self.is_host(name) {
            host(self.key, name)
        } else {
            return false;
        };
        let length = name.len();
        self.replace(length, &by);
        self.after_address = false;
        true
    }

    fn is_host(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        let first = name.split('.').next().unwrap_or_default();
        self.known.hosts.contains(&name) || self.known.hosts.contains(first)
    }
}

fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-' | '.')
}

fn joined(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

/// Returns the prefix length of `/24` behind an address.
fn network(behind: &str, bits: u32) -> Option<u32> {
    let digits = behind.strip_prefix('/')?;
    let end = digits.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok().filter(|prefix| *prefix <= bits)
}

fn host_bits(address: u128, prefix: u32) -> u128 {
    address & u128::MAX.checked_shr(prefix).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Known {
            hosts: set(&["node-a", "gpu", "gpu001", "head.corp.example"]),
            users: set(&["alice"]),
            versions: set(&["1.14.50.0"]),
        }
    }

    fn to(text: &str) -> String {
        replaced(text, &Key::new("word"), &known())
    }

    #[test]
    fn what_is_no_name_and_no_address_stays() {
        for text in [
            "",
            "0000:3b:00.0 at /sys/devices/pci0000:3a/0000:3a:00.0",
            "libibverbs.so.1.14.44.0",
            "OFED 5.8-4.1.5.0, libibverbs 1.14.50.0 (/usr/lib/x)",
            "NVRM version: x  570.86.15  Release",
            "0::/user.slice 12:34:56 1.2.3 1.2.3.4.5.6x 256.1.1.1",
            "mlx5_0:1,mlx5_1:1 =eth0 ^docker0,lo node-ab gpux xgpu node_a",
            "127.0.0.1 0.0.0.0 ::1 fe80::1 255.255.255.0 ff02::1",
            "/opt/alices /var/lib/data beef bench face ßü€",
            "Max locked memory         8388608              8388608              bytes",
        ] {
            assert_eq!(to(text), text);
        }
    }

    #[test]
    fn the_same_input_has_the_same_stand_in() {
        let address = to("10.1.2.3");
        assert_eq!(to("tcp://10.1.2.3:29500/x"), format!("tcp://{address}:29500/x"));
        assert_eq!(to("10.1.2.3-10.1.2.3,[10.1.2.3]"), format!("{address}-{address},[{address}]"));
        assert_eq!(to("x=10.1.2.3/24."), format!("x={address}/24."));
        let network = to("10.1.0.0/16");
        assert!(network.ends_with(".0.0/16") && network != "10.1.0.0/16", "{network}");
        let bits = |text: &str| text.parse::<Ipv4Addr>().unwrap_or(Ipv4Addr::UNSPECIFIED).to_bits() >> 16;
        assert_eq!(bits(&address), bits(network.trim_end_matches("/16")));
        let gid = to("0000:0000:0000:0000:0000:ffff:0a01:0203");
        let mapped: Ipv6Addr = gid.parse().expect("an address");
        assert_eq!((gid.len(), mapped.to_ipv4_mapped().map(|mapped| mapped.to_string())), (39, Some(address)));
        let guid = to("0c42:a103:0000:1000");
        assert_eq!(to("0x0c42a10300001000"), format!("0x{}", guid.replace(':', "")));
        assert_eq!(to("fe80::c42:a103:0:1000").parse::<Ipv6Addr>(), format!("fe80::{guid}").parse());
        let mac = to("b8:ce:f6:0a:10:00");
        assert_eq!(to("enxb8cef60a1000"), format!("enx{}", mac.replace(':', "")));
        let host = to("node-a");
        assert!(host.starts_with("host"), "{host}");
        assert_eq!(to("node-a mlx5_0\nnode-a.svc:80 node-a:/x"), format!("{host} mlx5_0\n{host}.svc:80 {host}:/x"));
        assert_eq!(to("gpu[001-004] gpu001"), format!("{0}[001-004] {0}001", to("gpu")));
        assert!(!to("head.corp.example").contains("corp"));
        let user = to("/home/alice");
        assert_eq!(
            to("/home/alice/.nccl.conf ~alice /data/alice"),
            format!("{user}/.nccl.conf ~{0} /data/{0}", &user[6..])
        );
        assert_ne!(to("/home/bob"), "/home/bob");
    }

    #[test]
    fn names_of_hosts_are_taken_from_variables_that_have_some() {
        for (variable, value, names) in [
            ("SLURM_JOB_NODELIST", "gpu[001-004],login", &["gpu", "login"][..]),
            ("RAY_ADDRESS", "ray://Head.corp:10001", &["head.corp"]),
            ("MASTER_ADDR", "10.0.0.1", &[]),
            ("NCCL_SOCKET_IFNAME", "eth0", &[]),
            ("VLLM_HOST_IP", "fe80::1", &[]),
            ("RAY_ADDRESS", "[fe80::1]:6379", &[]),
            ("RAY_ADDRESS", "auto", &[]),
            ("NCCL_IB_ADDR_FAMILY", "AF_INET6", &[]),
            ("UCX_ADDRESS_VERSION", "v2", &[]),
        ] {
            assert_eq!(host_names(variable, value), names, "{variable}={value}");
        }
    }
}
