//! Stand-ins for the names and addresses of a recording, so that it can be shown to others.
//!
//! The same input has the same stand-in everywhere, and kinds and subnets stay, so the findings do not change. Replaced are names of hosts and users, IP and MAC addresses
//! and GUIDs. Names of devices and interfaces, versions and settings stay: they are what is judged.

mod keyed;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::machine::recording::{Entry, Noted, Recording};
use crate::machine::redaction::keyed::Key;
use crate::machine::redaction::words::{Known, host_names, is_host_name};
use crate::machine::{InterfaceAddress, Library, Loaded, Machine};

/// Replaces names and addresses by stand-ins.
#[derive(Debug)]
pub struct Redactor {
    key: Key,
    known: Known,
}

/// The kind of names and addresses that a text may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Names of hosts and users, and addresses.
    Names,
    /// Addresses of cards and ports; a name of a host would be taken for a state of the kernel.
    Addresses,
    /// Versions, which look like addresses.
    Version,
    /// `/proc/net/route`: addresses in hexadecimal digits, the lowest byte first.
    Routes,
    /// `/proc/net/if_inet6`: addresses in hexadecimal digits.
    Ipv6,
    /// `/etc/passwd`.
    Users,
}

impl Redactor {
    /// Collects the names in a recording. `word` decides the stand-ins: recordings of one cluster that are redacted with the same word can be compared. Who knows the word can
    /// find the addresses by trying all.
    #[must_use]
    pub fn new(recording: &Recording, word: &str) -> Self {
        let mut known = Known::default();
        for path in ["/proc/sys/kernel/hostname", "/etc/hostname"] {
            known.hosts.extend(recording.text(path).ok().map(|name| name.trim().to_lowercase()));
        }
        for line in recording.text("/etc/hosts").unwrap_or_default().lines() {
            let line = line.split('#').next().unwrap_or_default();
            known.hosts.extend(line.split_whitespace().skip(1).map(str::to_lowercase));
        }
        for line in recording.text("/proc/self/mounts").unwrap_or_default().lines() {
            // SERVER:/PATH or //SERVER/PATH
            let source = line.split_whitespace().next().unwrap_or_default();
            let server = source.split_once(":/").map(|(server, _)| server);
            let server = server.or_else(|| source.strip_prefix("//").and_then(|rest| rest.split('/').next()));
            known.hosts.extend(server.map(str::to_lowercase));
        }
        for (name, value) in recording.variables().unwrap_or_default() {
            known.hosts.extend(host_names(&name, &value));
            if name.ends_with("_USER") {
                known.users.insert(value.clone());
            }
            // Not a folder such as /workspace, which names nobody.
            if name == "HOME"
                && let Some((above, user)) = value.trim_end_matches('/').rsplit_once('/')
                && !above.is_empty()
            {
                known.users.insert(user.to_owned());
            }
        }
        known.hosts.retain(|name| is_host_name(name));
        let versions = recording.libraries.values().flatten().filter_map(|noted| match noted {
            Noted::Answer(Some(library)) => library.version.clone(),
            _ => None,
        });
        known.versions = versions.chain(recording.loaded.nccl.clone().and_then(Result::ok)).collect();
        Self { key: Key::new(word), known }
    }

    /// Returns the recording with stand-ins.
    #[must_use]
    pub fn redact(&self, recording: &Recording) -> Recording {
        let said = |said: &Result<String, String>| said.clone().map_err(|error| self.text(&error));
        let files = recording.files.iter().map(|(path, entry)| (self.path(path), self.entry(path, entry)));
        let libraries = recording
            .libraries
            .iter()
            .map(|(name, noted)| (name.clone(), noted.clone().map(|noted| noted.map(|found| self.library(found)))));
        let spaces = recording.spaces.iter().map(|(path, space)| (self.path(path), space.clone()));
        let mut cut = recording.cut.clone();
        for cut in &mut cut {
            cut.path = self.path(&cut.path);
        }
        Recording {
            program: recording.program.clone(),
            taken: recording.taken.clone(),
            redacted: true,
            loaded: Loaded {
                nccl: recording.loaded.nccl.as_ref().map(said),
                cuda: recording.loaded.cuda.as_ref().map(said),
            },
            cut,
            variables: recording.variables.clone().map(|noted| noted.map(|variables| self.variables(variables))),
            addresses: recording.addresses.clone().map(|noted| noted.map(|listed| self.addresses(listed))),
            libraries: libraries.collect(),
            spaces: spaces.collect(),
            files: files.collect(),
        }
    }

    /// Returns a text, such as a finding, with the stand-ins of the recording.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        self.replaced(text, true)
    }

    fn path(&self, path: &str) -> String {
        self.replaced(path, !is_of_kernel(path))
    }

    fn entry(&self, path: &str, entry: &Entry) -> Entry {
        let text = |text: String| self.contents(path, &text);
        let names = |names: Vec<String>| {
            let prefix = format!("{}/", path.trim_end_matches('/'));
            let name = |name: String| {
                let replaced = self.path(&format!("{prefix}{name}"));
                replaced.rsplit('/').next().map_or(name, str::to_owned)
            };
            let mut names: Vec<String> = names.into_iter().map(name).collect();
            names.sort();
            names
        };
        Entry {
            text: entry.text.clone().map(|noted| noted.map(text)),
            bytes: entry.bytes.clone().and_then(|noted| self.bytes(path, noted)),
            names: entry.names.clone().map(|noted| noted.map(names)),
            real: entry.real.clone().map(|noted| noted.map(|real| self.path(&real))),
            node: entry.node.clone(),
        }
    }

    /// Keeps a configuration space and a text. What else is binary may hold anything, so it is left out.
    fn bytes(&self, path: &str, noted: Noted<Vec<u8>>) -> Option<Noted<Vec<u8>>> {
        match noted {
            Noted::Refused(errno) => Some(Noted::Refused(errno)),
            Noted::Answer(space) if path.ends_with("/config") => Some(Noted::Answer(without_serial_number(space))),
            Noted::Answer(bytes) => {
                let text = String::from_utf8(bytes).ok()?;
                Some(Noted::Answer(self.contents(path, &text).into_bytes()))
            }
        }
    }

    fn contents(&self, path: &str, text: &str) -> String {
        match kind(path) {
            Kind::Names => self.replaced(text, true),
            Kind::Addresses => self.replaced(text, false),
            Kind::Version => text.to_owned(),
            Kind::Routes => by_line(text, |line| self.route(line)),
            Kind::Ipv6 => by_line(text, |line| self.ipv6_line(line)),
            Kind::Users => by_line(text, |line| self.user_line(line)),
        }
    }

    fn route(&self, line: &str) -> String {
        let mut fields: Vec<String> = line.split('\t').map(str::to_owned).collect();
        let number = |field: Option<&String>| field.and_then(|field| u32::from_str_radix(field.trim(), 16).ok());
        let mask = number(fields.get(7)).map_or(u32::MAX, u32::swap_bytes);
        for (at, mask) in [(1, mask), (2, u32::MAX)] {
            if let Some(bits) = number(fields.get(at)) {
                let to = self.key.ipv4(bits.swap_bytes().into()).to_bits() & mask;
                fields[at] = format!("{:08X}", to.swap_bytes());
            }
        }
        fields.join("\t")
    }

    fn ipv6_line(&self, line: &str) -> String {
        let (digits, rest) = line.split_at_checked(32).unwrap_or((line, ""));
        match u128::from_str_radix(digits, 16) {
            Ok(bits) if digits.len() == 32 => format!("{:032x}{rest}", self.key.ipv6(bits.into()).to_bits()),
            _ => self.replaced(line, false),
        }
    }

    /// Replaces the name of a person, and leaves out the full name.
    fn user_line(&self, line: &str) -> String {
        let mut fields: Vec<String> = line.split(':').map(str::to_owned).collect();
        let is_person =
            fields.get(2).and_then(|id| id.parse::<u32>().ok()).is_some_and(|id| (1000..65_534).contains(&id));
        if !is_person || fields.len() < 7 {
            return self.replaced(line, true);
        }
        let home = match fields[5].rsplit_once('/') {
            Some((above, user)) if user == fields[0] => format!("{above}/{}", self.user(user)),
            _ => self.replaced(&fields[5], true),
        };
        fields[0] = self.user(&fields[0]);
        fields[4] = String::new();
        fields[5] = home;
        fields.join(":")
    }

    fn library(&self, found: Option<Library>) -> Option<Library> {
        found.map(|library| Library { path: self.path(&library.path), version: library.version })
    }

    fn variables(&self, variables: BTreeMap<String, String>) -> BTreeMap<String, String> {
        let value = |name: &str, value: String| match name {
            _ if name.ends_with("_USER") => self.user(&value),
            _ if name.ends_with("_ACCOUNT") || name.ends_with("_CLUSTER_NAME") => self.key.letters("name", &value, 8),
            _ => self.replaced(&value, true),
        };
        variables
            .into_iter()
            .map(|(name, of)| {
                let to = value(&name, of);
                (name, to)
            })
            .collect()
    }

    fn addresses(&self, listed: Vec<InterfaceAddress>) -> Vec<InterfaceAddress> {
        let redacted = |listed: InterfaceAddress| InterfaceAddress {
            interface: self.replaced(&listed.interface, false),
            address: match listed.address {
                IpAddr::V4(address) => self.key.ipv4(address).into(),
                IpAddr::V6(address) => self.key.ipv6(address).into(),
            },
            prefix: listed.prefix,
        };
        listed.into_iter().map(redacted).collect()
    }

    /// Replaces addresses, and names if there may be some.
    fn replaced(&self, text: &str, names: bool) -> String {
        let none = Known { versions: self.known.versions.clone(), ..Known::default() };
        words::replaced(text, &self.key, if names { &self.known } else { &none })
    }

    fn user(&self, name: &str) -> String {
        words::user(&self.key, name)
    }
}

/// Returns `true` for paths whose names the kernel gives.
fn is_of_kernel(path: &str) -> bool {
    ["/sys/", "/proc/", "/dev/"].iter().any(|folder| path.starts_with(folder))
}

fn kind(path: &str) -> Kind {
    let name = path.rsplit('/').next().unwrap_or_default();
    match name {
        "node_desc" | "hostname" | "mounts" | "mountinfo" | "cmdline" => Kind::Names,
        "version" | "osrelease" | "fw_ver" | "driver_version" | "ucx.pc" => Kind::Version,
        "route" if path.starts_with("/proc/") => Kind::Routes,
        "if_inet6" => Kind::Ipv6,
        "passwd" if path == "/etc/passwd" => Kind::Users,
        _ if is_of_kernel(path) => Kind::Addresses,
        _ => Kind::Names,
    }
}

fn by_line(text: &str, change: impl Fn(&str) -> String) -> String {
    text.split('\n').map(change).collect::<Vec<_>>().join("\n")
}

/// Clears the serial number in the configuration space of a PCI device, which is the GUID or the MAC of a card (PCI Express Base Specification, 7.9.3).
fn without_serial_number(mut space: Vec<u8>) -> Vec<u8> {
    const SERIAL_NUMBER: u16 = 3;
    let mut seen = BTreeSet::new();
    let mut at = 0x100;
    while let Some(&[id_low, id_high, next_low, next_high]) = space.get(at..at + 4)
        && seen.insert(at)
    {
        if u16::from_le_bytes([id_low, id_high]) == SERIAL_NUMBER
            && let Some(number) = space.get_mut(at + 4..at + 12)
        {
            number.fill(0);
        }
        at = usize::from(u16::from_le_bytes([next_low, next_high]) >> 4);
        if at < 0x100 {
            break;
        }
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_serial_number_of_a_card_is_cleared() {
        let mut space = vec![0; 4096];
        // ACS at 0x100, which leads to the serial number at 0x140, which leads back.
        space[0x100..0x104].copy_from_slice(&[0x0d, 0, 1, 0x14]);
        space[0x140..0x144].copy_from_slice(&[3, 0, 1, 0x10]);
        space[0x144..0x150].fill(0xaa);
        let redacted = without_serial_number(space.clone());
        assert_eq!(redacted[0x144..0x14c], [0; 8]);
        assert_eq!(redacted[0x14c..0x150], [0xaa; 4]);
        assert_eq!(without_serial_number(vec![1; 64]), vec![1; 64]);
        assert_eq!(without_serial_number(vec![0xff; 0x142]), vec![0xff; 0x142]);
    }

    #[test]
    fn tables_of_the_kernel_keep_their_form() {
        let redactor = Redactor::new(&Recording::default(), "word");
        let route = "eth0\t0000140A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0";
        let to = redactor.contents("/proc/self/net/route", route);
        let (from, to): (Vec<&str>, Vec<&str>) = (route.split('\t').collect(), to.split('\t').collect());
        assert_eq!((from[0], &from[2..]), (to[0], &to[2..]), "gateway and mask stay");
        assert_eq!((to[1].len(), &to[1][..2], &to[1][6..]), (8, "00", "0A"), "a network of 10.0.0.0/8 stays one");
        assert_ne!(from[1], to[1]);
        let line = "fe80000000000000bacef6fffe0a1000 02 40 20 80     eth0";
        let to = redactor.contents("/proc/net/if_inet6", line);
        assert_eq!((&to[..16], &to[30..]), (&line[..16], &line[30..]));
        assert_ne!(to, line);
        let users = "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000:Alice Smith:/home/alice:/bin/sh\n";
        let to = redactor.contents("/etc/passwd", users);
        assert!(to.starts_with("root:x:0:0:root:/root:/bin/sh\nuser") && !to.contains("lice"), "{to}");
        assert_eq!(to.matches(&redactor.user("alice")).count(), 2, "{to}");
    }
}
