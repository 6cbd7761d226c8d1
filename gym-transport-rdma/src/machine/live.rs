//! This machine: its kernel answers.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::machine::{Answer, BYTES_MAX, InterfaceAddress, Library, Machine, Space, library, read_text, variables};

/// The machine that runs this program.
#[derive(Debug, Default)]
pub struct Live {
    library_folders: Vec<String>,
    searched: OnceLock<Vec<String>>,
}

impl Live {
    /// Returns this machine.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Searches a folder for libraries, before all folders named so far.
    #[must_use]
    pub fn library_folder(mut self, folder: impl Into<String>) -> Self {
        self.library_folders.insert(0, folder.into());
        self.searched = OnceLock::new();
        self
    }
}

/// Opens a file without waiting, should it be a pipe or a device.
fn open(path: &str, write: bool) -> Answer<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    Ok(File::options().read(true).write(write).custom_flags(flags).open(path)?)
}

/// Opens a regular file.
fn file(path: &str) -> Answer<File> {
    let file = open(path, false)?;
    let kind = file.metadata()?.file_type();
    match (kind.is_file(), kind.is_dir()) {
        (true, _) => Ok(file),
        (_, true) => Err(Errno::ISDIR.into()),
        _ => Err(Errno::INVAL.into()),
    }
}

impl Machine for Live {
    fn text(&self, path: &str) -> Answer<String> {
        read_text(file(path)?)
    }

    fn bytes(&self, path: &str) -> Answer<Vec<u8>> {
        let mut bytes = Vec::new();
        file(path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn names(&self, folder: &str) -> Answer<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder)? {
            names.extend(entry?.file_name().into_string());
        }
        names.sort();
        Ok(names)
    }

    fn real(&self, path: &str) -> Answer<String> {
        fs::canonicalize(path)?.into_os_string().into_string().map_err(|_| Errno::ILSEQ.into())
    }

    fn open_node(&self, path: &str) -> Answer<()> {
        open(path, true).map(drop)
    }

    /// Searches where the backends would: NCCL and CUDA's driver also where their variables say, and in Python's packages.
    fn library(&self, soname: &str) -> Answer<Option<Library>> {
        let open = |path: &str| file(path).ok();
        if let Some((folder, name)) = library::located(soname).filter(|_| self.library_folders.is_empty()) {
            return library::find(self, &[folder], &name, open);
        }
        let folders = self.searched.get_or_init(|| library::folders(self, &self.library_folders));
        if let Some(found) = library::find(self, folders, soname, open)? {
            return Ok(Some(found));
        }
        let more = library::fallback_folders(soname)
            .into_iter()
            .filter_map(|folder| folder.into_os_string().into_string().ok());
        library::find(self, &more.collect::<Vec<_>>(), soname, open)
    }

    fn variables(&self) -> Answer<BTreeMap<String, String>> {
        let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        Ok(variables::of_field(std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value)))))
    }

    fn addresses(&self) -> Answer<Vec<InterfaceAddress>> {
        Listed::take().map(|listed| listed.addresses())
    }

    fn space(&self, path: &str) -> Answer<Space> {
        let of = rustix::fs::statvfs(path)?;
        Ok(Space { total: of.f_blocks.saturating_mul(of.f_frsize), free: of.f_bavail.saturating_mul(of.f_frsize) })
    }
}

/// The list of `getifaddrs`.
struct Listed {
    first: *mut libc::ifaddrs,
}

impl Listed {
    fn take() -> Answer<Self> {
        let mut first = std::ptr::null_mut();
        // SAFETY: `first` is a valid, exclusive place for one pointer during the call.
        let result = unsafe { libc::getifaddrs(&raw mut first) };
        if result == 0 { Ok(Self { first }) } else { Err(std::io::Error::last_os_error().into()) }
    }

    /// Returns the addresses in the order of the interfaces' indices. Those of one interface keep the kernel's order.
    fn addresses(&self) -> Vec<InterfaceAddress> {
        let mut indices = BTreeMap::new();
        let mut addresses = Vec::new();
        let mut at = NonNull::new(self.first);
        while let Some(entry) = at {
            // SAFETY: getifaddrs has written the entry, and nothing changes the list until `drop` frees it.
            let entry = unsafe { entry.as_ref() };
            at = NonNull::new(entry.ifa_next);
            // SAFETY: the name of an entry is a string that ends with zero and lives as long as the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
            if let Some(index) = index(entry) {
                indices.insert(name.clone(), index);
            }
            if let Some(address) = address(entry.ifa_addr) {
                let prefix = address_prefix(entry.ifa_netmask, address);
                addresses.push(InterfaceAddress { interface: name, address, prefix });
            }
        }
        // A second name of an interface, such as eth0:1, has no index of its own.
        let of = |name: &str| indices.get(name.split(':').next().unwrap_or(name)).copied().unwrap_or(u32::MAX);
        addresses.sort_by_key(|listed| of(&listed.interface));
        addresses
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // SAFETY: getifaddrs returned the list, which is freed once; nothing borrowed from it outlives `self`.
        unsafe { libc::freeifaddrs(self.first) };
    }
}

/// Returns the index of an interface, which is in its link-layer address.
fn index(entry: &libc::ifaddrs) -> Option<u32> {
    if family(entry.ifa_addr)? != libc::AF_PACKET {
        return None;
    }
    // SAFETY: an address of AF_PACKET is a sockaddr_ll (packet(7)), and may not be aligned for it.
    let link = unsafe { entry.ifa_addr.cast::<libc::sockaddr_ll>().read_unaligned() };
    u32::try_from(link.sll_ifindex).ok()
}

fn address(socket: *const libc::sockaddr) -> Option<IpAddr> {
    match family(socket)? {
        libc::AF_INET => {
            // SAFETY: an address of AF_INET is a sockaddr_in (ip(7)), and may not be aligned for it.
            let socket = unsafe { socket.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(socket.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of AF_INET6 is a sockaddr_in6 (ipv6(7)), and may not be aligned for it.
            let socket = unsafe { socket.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(socket.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// Returns the bits of the mask; all bits if there is none of the same family, as for a tunnel.
fn address_prefix(mask: *const libc::sockaddr, of: IpAddr) -> u8 {
    let ones = match (address(mask), of) {
        (Some(IpAddr::V4(mask)), IpAddr::V4(_)) => mask.to_bits().leading_ones(),
        (Some(IpAddr::V6(mask)), IpAddr::V6(_)) => mask.to_bits().leading_ones(),
        (_, IpAddr::V4(_)) => 32,
        (_, IpAddr::V6(_)) => 128,
    };
    u8::try_from(ones).unwrap_or(u8::MAX)
}

/// Returns the family of an address of the list; `None` if the entry has none.
fn family(socket: *const libc::sockaddr) -> Option<i32> {
    if socket.is_null() {
        return None;
    }
    // SAFETY: not null, so it points to an address of the list, and each begins with its family.
    Some(i32::from(unsafe { (&raw const (*socket).sa_family).read_unaligned() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Unknown;

    #[test]
    fn this_machine_answers() {
        let machine = Live::new();
        assert!(machine.text("/proc/self/limits").is_ok_and(|text| text.contains("Max locked memory")));
        assert_eq!(machine.text("/proc/self"), Err(Unknown::Errno(21)));
        assert_eq!(machine.text("/proc/self/none"), Err(Unknown::ENOENT));
        assert_eq!(machine.bytes("/proc/self/exe").map(|bytes| bytes[..4].to_vec()), Ok(b"\x7fELF".to_vec()));
        assert!(machine.names("/proc/self").is_ok_and(|names| names.is_sorted() && names.contains(&"maps".to_owned())));
        assert_eq!(machine.real("/proc/mounts"), Ok(format!("/proc/{}/mounts", std::process::id())));
        assert_eq!(machine.open_node("/dev/null"), Ok(()));
        assert_eq!(machine.open_node("/dev/none"), Err(Unknown::ENOENT));
        assert!(machine.space("/").is_ok_and(|space| space.total >= space.free && space.total > 0));
    }

    #[test]
    fn addresses_have_interfaces_of_the_kernel_in_its_order() {
        let machine = Live::new();
        let addresses = machine.addresses().expect("answers");
        let loopback = addresses.iter().find(|listed| listed.address == IpAddr::V4(Ipv4Addr::LOCALHOST));
        if let Some(loopback) = loopback {
            assert_eq!((loopback.interface.as_str(), loopback.prefix), ("lo", 8));
        }
        let index = |listed: &InterfaceAddress| {
            let name = listed.interface.split(':').next().unwrap_or_default().to_owned();
            let text = machine.text(&format!("/sys/class/net/{name}/ifindex"));
            text.ok().and_then(|text| text.trim().parse::<u32>().ok())
        };
        let indices: Vec<u32> = addresses.iter().filter_map(index).collect();
        assert!(indices.is_sorted(), "{addresses:?}");
    }
}
