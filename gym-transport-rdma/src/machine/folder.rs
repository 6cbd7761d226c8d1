//! A folder that holds a machine: the root of a container, or a machine that a test has written.
//!
//! Facts that no file of the kernel tells are in files of the folder's own: `recorded/addresses.json` has the addresses of the interfaces, because programs ask for them
//! by netlink. `proc/self/environ` has the variables.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use crate::machine::root::Root;
use crate::machine::{
    Answer, BYTES_MAX, InterfaceAddress, Library, Machine, Space, Unknown, library, read_text, variables,
};

/// Maximum depth of folders whose files take space of a mount.
const DEPTH_MAX: u32 = 16;
/// Permission to read, and to write, for anyone.
const READABLE: u32 = 0o444;
const WRITABLE: u32 = 0o222;

/// A machine in a folder. Links are resolved within it, and no library of it is loaded.
#[derive(Debug)]
pub struct Folder {
    root: Root,
    library_folders: Vec<String>,
    searched: OnceLock<Vec<String>>,
}

impl Folder {
    /// Takes `root` for the root of a machine. If it is no folder, every answer says so.
    #[must_use]
    pub fn new(root: impl AsRef<Path>) -> Self {
        Self { root: Root::new(root.as_ref()), library_folders: Vec::new(), searched: OnceLock::new() }
    }

    /// Searches a folder of the machine for libraries, before all folders named so far.
    #[must_use]
    pub fn library_folder(mut self, folder: impl Into<String>) -> Self {
        self.library_folders.insert(0, folder.into());
        self.searched = OnceLock::new();
        self
    }

    /// Opens a regular file to read it. The permission bits count for root too, since the machine's user may be another.
    fn file(&self, path: &str) -> Answer<File> {
        let stat = self.root.stat(path)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if stat.st_mode & READABLE == 0 => Err(Errno::ACCESS.into()),
            FileType::RegularFile => Ok(self.root.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?.into()),
            FileType::Directory => Err(Errno::ISDIR.into()),
            // To open a device or a pipe may change it or wait.
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// Returns the sizes of the files in a folder.
    fn bytes_below(&self, folder: &str, depth: u32) -> u64 {
        let names = self.names(folder).unwrap_or_default();
        let sizes = names.into_iter().map(|name| {
            let path = format!("{folder}/{name}");
            // A link to a file elsewhere takes no space here.
            match (self.root.real(&path), self.root.stat(&path)) {
                (Ok(real), Ok(stat)) if real == path => match FileType::from_raw_mode(stat.st_mode) {
                    FileType::RegularFile => u64::try_from(stat.st_size).unwrap_or_default(),
                    FileType::Directory if depth > 0 => self.bytes_below(&path, depth - 1),
                    _ => 0,
                },
                _ => 0,
            }
        });
        sizes.fold(0, u64::saturating_add)
    }
}

impl Machine for Folder {
    fn text(&self, path: &str) -> Answer<String> {
        read_text(self.file(path)?)
    }

    fn bytes(&self, path: &str) -> Answer<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file(path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn names(&self, folder: &str) -> Answer<Vec<String>> {
        let opened = self.root.open(folder, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(opened)? {
            if let Ok(name) = entry?.file_name().to_str()
                && !matches!(name, "." | "..")
            {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    fn real(&self, path: &str) -> Answer<String> {
        self.root.real(path)
    }

    /// Judges by the permission bits. A node in a folder may be a device of this machine, which is not opened.
    fn open_node(&self, path: &str) -> Answer<()> {
        let stat = self.root.stat(path)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Err(Errno::ISDIR.into());
        }
        let open = stat.st_mode & READABLE != 0 && stat.st_mode & WRITABLE != 0;
        if open { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }

    fn library(&self, soname: &str) -> Answer<Option<Library>> {
        let folders = self.searched.get_or_init(|| library::folders(self, &self.library_folders));
        library::find(self, folders, soname, |path| self.file(path).ok())
    }

    fn variables(&self) -> Answer<BTreeMap<String, String>> {
        let text = recorded(self.text("/proc/self/environ"))?;
        let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
        Ok(variables::of_field(pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))))
    }

    fn addresses(&self) -> Answer<Vec<InterfaceAddress>> {
        let text = recorded(self.text("/recorded/addresses.json"))?;
        // The order of the interfaces is that of the file.
        let interfaces: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&text).map_err(|_| Errno::INVAL)?;
        let mut addresses = Vec::new();
        for (interface, listed) in interfaces {
            let listed: Vec<String> = serde_json::from_value(listed).map_err(|_| Errno::INVAL)?;
            for written in listed {
                let (address, prefix) = parse_address(&written).ok_or(Errno::INVAL)?;
                addresses.push(InterfaceAddress { interface: interface.clone(), address, prefix });
            }
        }
        Ok(addresses)
    }

    fn space(&self, path: &str) -> Answer<Space> {
        let real = self.root.real(path)?;
        let mounts = recorded(self.text("/proc/self/mounts"))?;
        // A mount hides the one below it, which is named first. A folder does not tell the size of other file systems.
        let options = mounts.lines().rev().find_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            (unescaped(fields.next()?) == real).then(|| fields.nth(1).unwrap_or_default())
        });
        let total = options.and_then(mount_bytes).ok_or(Unknown::NotRecorded)?;
        let free = total.saturating_sub(self.bytes_below(&real, DEPTH_MAX));
        Ok(Space { total, free })
    }
}

/// A file of the folder's own that is absent tells nothing about the machine.
fn recorded(text: Answer<String>) -> Answer<String> {
    text.map_err(|unknown| if unknown.is_absent() { Unknown::NotRecorded } else { unknown })
}

fn parse_address(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    let (address, prefix): (IpAddr, u8) = (address.parse().ok()?, prefix.parse().ok()?);
    (prefix <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, prefix))
}

/// Returns a path of `/proc/self/mounts`, where a space is `\040`.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (from, to)| path.replace(from, to))
}

/// Returns the bytes of the option `size=` of a mount.
fn mount_bytes(options: &str) -> Option<u64> {
    let size = options.split(',').find_map(|option| option.strip_prefix("size="))?;
    let digits = size.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let unit: u64 = match &size[digits.len()..] {
        "" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("folder"))
        }

        fn file(self, path: &str, text: &str) -> Self {
            let full = self.0.path().join(path);
            fs::create_dir_all(full.parent().expect("has a folder")).expect("folders");
            fs::write(full, text).expect("writes");
            self
        }

        fn link(self, path: &str, target: &str) -> Self {
            symlink(target, self.0.path().join(path)).expect("links");
            self
        }

        fn mode(self, path: &str, mode: u32) -> Self {
            fs::set_permissions(self.0.path().join(path), fs::Permissions::from_mode(mode)).expect("sets");
            self
        }

        fn machine(&self) -> Folder {
            Folder::new(self.0.path())
        }
    }

    #[test]
    fn files_answer_as_the_kernel_would() {
        let tree = Tree::new().file("dev/infiniband/uverbs0", "").file("dev/infiniband/uverbs1", "");
        let tree = tree.mode("dev/infiniband/uverbs1", 0).file("sys/x/carrier/y", "").file("sys/x/mtu", "1500\n");
        let machine = tree.machine();
        assert_eq!(machine.open_node("/dev/infiniband/uverbs0"), Ok(()));
        assert_eq!(machine.open_node("/dev/infiniband/uverbs1"), Err(Unknown::Errno(13)));
        assert_eq!(machine.text("/dev/infiniband/uverbs1"), Err(Unknown::Errno(13)));
        assert_eq!(machine.open_node("/dev/infiniband/uverbs2"), Err(Unknown::ENOENT));
        assert_eq!(machine.open_node("/dev/infiniband"), Err(Unknown::Errno(21)));
        assert_eq!(machine.text("/sys/x/carrier"), Err(Unknown::Errno(21)));
        assert_eq!(machine.text("/sys/x/mtu/y"), Err(Unknown::Errno(20)));
        assert_eq!(machine.text("/sys/x/mtu").as_deref(), Ok("1500\n"), "untrimmed");
        assert_eq!(machine.names("/sys/x"), Ok(vec!["carrier".to_owned(), "mtu".to_owned()]));
        assert_eq!(machine.names("/sys/x/mtu"), Err(Unknown::Errno(20)));
        assert_eq!((machine.exists("/sys/x"), machine.exists("/sys/y")), (Ok(true), Ok(false)));
    }

    #[test]
    fn what_a_folder_does_not_hold_is_not_recorded() {
        let tree = Tree::new().file("dev/shm/x", "");
        let machine = tree.machine();
        assert_eq!(machine.variables(), Err(Unknown::NotRecorded));
        assert_eq!(machine.addresses(), Err(Unknown::NotRecorded));
        assert_eq!(machine.space("/dev/shm"), Err(Unknown::NotRecorded));
        assert_eq!(machine.space("/dev/none"), Err(Unknown::ENOENT));
    }

    #[test]
    fn libraries_come_from_the_loaders_folders_within_the_root() {
        let outside = tempfile::tempdir().expect("folder");
        fs::write(outside.path().join("libnccl.so.2"), "").expect("writes");
        let variable = format!("LD_LIBRARY_PATH={}:relative:/opt/own/lib/\0", outside.path().display());
        let tree = Tree::new()
            .file("proc/self/environ", &variable)
            .file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\ninclude ld.so.conf\n")
            .file("etc/ld.so.conf.d/a.conf", "# site\n/opt/site/lib # ours\n")
            .file("opt/site/lib/libucp.so.0.0.0", "")
            .link("opt/site/lib/libucp.so.0", "libucp.so.0.0.0")
            .file("opt/site/lib/pkgconfig/ucx.pc", "Name: ucx\nVersion: 1.16.0\n")
            .file("opt/own/lib/libibverbs.so.1.14.44.0", "")
            .link("opt/own/lib/libibverbs.so.1", "/opt/own/lib/libibverbs.so.1.14.44.0")
            .file("usr/lib/libibverbs.so.1", "")
            .file("usr/lib/libcuda.so.1/x", "");
        let machine = tree.machine();
        let found = |soname: &str| {
            let found = machine.library(soname).expect("answers");
            found.map(|found| (found.path, found.version.unwrap_or_default()))
        };
        let pair = |path: &str, version: &str| Some((path.to_owned(), version.to_owned()));
        assert_eq!(found("libucp.so.0"), pair("/opt/site/lib/libucp.so.0", "1.16.0"));
        assert_eq!(found("libibverbs.so.1"), pair("/opt/own/lib/libibverbs.so.1", "1.14.44.0"));
        assert_eq!(found("libcuda.so.1"), None, "a folder is no library");
        assert_eq!(found("libnccl.so.2"), None, "a folder outside is not searched");
        assert_eq!(found("../../etc/ld.so.conf"), None);
        let named = tree.machine().library_folder("/usr/lib").library("libibverbs.so.1").expect("answers");
        assert_eq!(named.map(|found| found.path).as_deref(), Some("/usr/lib/libibverbs.so.1"));
    }

    #[test]
    fn addresses_keep_the_order_of_the_interfaces() {
        let json = r#"{"lo": ["127.0.0.1/8", "::1/128"], "eth1": ["10.0.0.1/24"], "eth0": [], "a": ["fe80::1/64"]}"#;
        let tree = Tree::new().file("recorded/addresses.json", json);
        let written = tree.machine().addresses().expect("answers").into_iter();
        let written: Vec<String> = written.map(|at| format!("{} {}/{}", at.interface, at.address, at.prefix)).collect();
        assert_eq!(written, ["lo 127.0.0.1/8", "lo ::1/128", "eth1 10.0.0.1/24", "a fe80::1/64"]);
        for damaged in ["", "[]", r#"{"a": ["10.0.0.1"]}"#, r#"{"a": ["10.0.0.1/33"]}"#, r#"{"a": 1}"#] {
            let tree = Tree::new().file("recorded/addresses.json", damaged);
            assert_eq!(tree.machine().addresses(), Err(Unknown::Errno(22)), "{damaged}");
        }
    }

    #[test]
    fn space_is_that_of_the_last_mount_without_its_files() {
        let mounts = "shm /dev/shm tmpfs rw,size=8g 0 0\nshm /dev/shm tmpfs rw,nosuid,size=64k,inode64 0 0\n\
                      x /a\\040b tmpfs size=1024 0 0\ny /half tmpfs size=50% 0 0\n";
        let tree = Tree::new()
            .file("proc/self/mounts", mounts)
            .file("dev/shm/a", &"x".repeat(1000))
            .file("dev/shm/b/c", &"x".repeat(24))
            .link("dev/shm/d", "/dev/shm/a")
            .file("a b/x", &"x".repeat(2000))
            .file("half/x", "");
        let machine = tree.machine();
        assert_eq!(machine.space("/dev/shm"), Ok(Space { total: 65536, free: 65536 - 1024 }));
        assert_eq!(machine.space("/a b"), Ok(Space { total: 1024, free: 0 }));
        assert_eq!(machine.space("/half"), Err(Unknown::NotRecorded));
        for (options, bytes) in
            [("rw,size=8g", Some(8 << 30)), ("size=99999999999g", None), ("rw", None), ("size=", None)]
        {
            assert_eq!(mount_bytes(options), bytes, "{options}");
        }
    }
}
