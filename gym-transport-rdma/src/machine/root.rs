//! Paths below a folder that is taken for the root of a machine. No link leads out of it.
//!
//! A link with an absolute target, or with more `..` than folders above it, would otherwise read the files of the machine that judges. The kernel resolves a path
//! within a root since 5.6 (`openat2`). Where it cannot, or a filter of system calls forbids it, a walk follows one component at a time.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::machine::{Answer, Unknown};

/// Maximum number of links in one path, as in Linux.
const LINKS_MAX: u32 = 40;

/// The root of a machine. Every path is resolved within it.
#[derive(Debug)]
pub(super) struct Root {
    /// The folder, or why it cannot be opened: then every question has this answer.
    folder: Answer<OwnedFd>,
}

/// Where a walk has ended: the folders that it went through, and their names.
#[derive(Debug, Default)]
struct Place {
    opened: Vec<OwnedFd>,
    names: Vec<OsString>,
}

impl Root {
    pub(super) fn new(folder: &Path) -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self { folder: rustix::fs::openat(CWD, folder, flags, Mode::empty()).map_err(Unknown::from) }
    }

    /// Returns what a path leads to, without opening it.
    pub(super) fn stat(&self, path: &str) -> Answer<Stat> {
        Ok(rustix::fs::fstat(self.open(path, OFlags::PATH)?)?)
    }

    /// Opens what a path leads to.
    pub(super) fn open(&self, path: &str, flags: OFlags) -> Answer<OwnedFd> {
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let path = if path.is_empty() { "/" } else { path };
        let opened = rustix::fs::openat2(self.folder()?, path, flags | OFlags::CLOEXEC, Mode::empty(), within);
        match opened {
            // No such call, a filter that forbids it, a rename at the same time, or a link of the kernel's own.
            Err(Errno::NOSYS | Errno::PERM | Errno::AGAIN | Errno::LOOP | Errno::XDEV) => {
                self.open_by_walk(path, flags)
            }
            opened => Ok(opened?),
        }
    }

    /// Returns the path without links, as the machine sees it.
    pub(super) fn real(&self, path: &str) -> Answer<String> {
        let mut real = String::new();
        for name in self.walk(path)?.names {
            real.push('/');
            real.push_str(name.to_str().ok_or(Errno::ILSEQ)?);
        }
        Ok(if real.is_empty() { "/".to_owned() } else { real })
    }

    fn open_by_walk(&self, path: &str, flags: OFlags) -> Answer<OwnedFd> {
        let mut place = self.walk(path)?;
        let name = place.names.pop().unwrap_or_else(|| ".".into());
        place.opened.pop();
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(place.folder(self.folder()?), name, flags, Mode::empty())?)
    }

    fn walk(&self, path: &str) -> Answer<Place> {
        let root = self.folder()?;
        let mut place = Place::default();
        let mut rest: Vec<OsString> = Vec::new();
        push(&mut rest, OsStr::new(path));
        let mut links = 0;
        while let Some(name) = rest.pop() {
            if name == ".." {
                // Above the root is the root.
                place.opened.pop();
                place.names.pop();
                continue;
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(place.folder(root), &name, flags, Mode::empty())?;
            match FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode) {
                FileType::Symlink => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(Errno::LOOP.into());
                    }
                    let target = rustix::fs::readlinkat(&opened, c"", Vec::new())?;
                    let target = OsString::from_vec(target.into_bytes());
                    if target.as_bytes().starts_with(b"/") {
                        place = Place::default();
                    }
                    push(&mut rest, &target);
                }
                FileType::Directory => place.enter(opened, name),
                _ if rest.is_empty() => place.enter(opened, name),
                _ => return Err(Errno::NOTDIR.into()),
            }
        }
        Ok(place)
    }

    fn folder(&self) -> Answer<BorrowedFd<'_>> {
        self.folder.as_ref().map(AsFd::as_fd).map_err(|unknown| *unknown)
    }
}

impl Place {
    fn folder<'a>(&'a self, root: BorrowedFd<'a>) -> BorrowedFd<'a> {
        self.opened.last().map_or(root, AsFd::as_fd)
    }

    fn enter(&mut self, opened: OwnedFd, name: OsString) {
        self.opened.push(opened);
        self.names.push(name);
    }
}

/// Adds the components of a path, the first one on top.
fn push(rest: &mut Vec<OsString>, path: &OsStr) {
    let components = path.as_bytes().split(|byte| *byte == b'/').filter(|name| !matches!(name, [] | [b'.']));
    let components: Vec<&[u8]> = components.collect();
    rest.extend(components.into_iter().rev().map(|name| OsStr::from_bytes(name).to_owned()));
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::{MetadataExt, symlink};

    use proptest::prelude::*;

    use super::*;

    fn read(opened: OwnedFd) -> String {
        let mut text = String::new();
        fs::File::from(opened).read_to_string(&mut text).expect("reads");
        text
    }

    /// Reads by the kernel's resolution and by the walk, which must agree.
    fn text(root: &Root, path: &str) -> Answer<String> {
        let of_kernel = root.open(path, OFlags::RDONLY).map(read);
        let of_walk = root.open_by_walk(path, OFlags::RDONLY).map(read);
        assert_eq!(of_kernel, of_walk, "{path}");
        of_kernel
    }

    #[test]
    fn links_lead_nowhere_outside_the_root() {
        let outer = tempfile::tempdir().expect("folder");
        fs::write(outer.path().join("secret"), "outside").expect("writes");
        let inner = outer.path().join("root");
        fs::create_dir_all(inner.join("a/b")).expect("folders");
        fs::write(inner.join("inside"), "inside").expect("writes");
        let root = Root::new(&inner);
        for (name, target) in [
            ("up", "../secret".to_owned()),
            ("a/b/up", "../../../../../../../secret".to_owned()),
            ("absolute", outer.path().join("secret").display().to_string()),
            ("folder", outer.path().display().to_string()),
            ("a/above", "../..".to_owned()),
        ] {
            symlink(target, inner.join(name)).expect("links");
        }
        for path in
            ["/up", "/a/b/up", "/absolute", "/folder/secret", "/a/above/secret", "/../secret", "/a/../../secret"]
        {
            assert_eq!(text(&root, path), Err(Unknown::ENOENT), "{path}");
            assert_eq!(root.real(path), Err(Unknown::ENOENT), "{path}");
        }
        // Within the root they work, as on the machine itself.
        symlink("/inside", inner.join("a/to-root")).expect("links");
        symlink("../../../inside", inner.join("a/too-far-up")).expect("links");
        symlink("loop", inner.join("loop")).expect("links");
        for path in [
            "/inside",
            "inside",
            "/a/to-root",
            "/a/too-far-up",
            "/a/above/inside",
            "/a/b/../../inside",
            "//a//./to-root",
        ] {
            assert_eq!(text(&root, path).as_deref(), Ok("inside"), "{path}");
            assert_eq!(root.real(path).as_deref(), Ok("/inside"), "{path}");
        }
        assert_eq!(text(&root, "/loop"), Err(Errno::LOOP.into()));
        assert_eq!(text(&root, "/inside/x"), Err(Errno::NOTDIR.into()));
        assert_eq!(root.real("/").as_deref(), Ok("/"));
        assert_eq!(Root::new(&outer.path().join("none")).real("/"), Err(Unknown::ENOENT));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_web_of_links_leads_out(
            links in proptest::collection::vec(("[ab]{1,2}", "(/|)(\\.\\./|[ab]/|OUT/){0,5}(a|b|ab|\\.\\.|OUT)"), 1..8),
            path in "/([ab]{1,2}/|\\.\\./){0,4}[ab]{0,2}",
        ) {
            let outer = tempfile::tempdir().expect("folder");
            let inner = outer.path().join("ab");
            for folder in ["a", "b", "a/b", "b/a"] {
                fs::create_dir_all(inner.join(folder)).expect("folders");
            }
            for (index, (name, target)) in links.iter().enumerate() {
                let target = target.replace("OUT", &outer.path().display().to_string());
                let folder = ["", "a", "b", "a/b"][index % 4];
                let _ = symlink(target, inner.join(folder).join(name));
            }
            let root = Root::new(&inner);
            let of_kernel = root.open(&path, OFlags::PATH);
            let of_walk = root.open_by_walk(&path, OFlags::PATH);
            match (of_kernel, of_walk, root.real(&path)) {
                (Ok(kernel), Ok(walk), Ok(real)) => {
                    let inode = |opened: &OwnedFd| { let stat = rustix::fs::fstat(opened).expect("stat"); (stat.st_dev, stat.st_ino) };
                    prop_assert_eq!(inode(&kernel), inode(&walk));
                    let inside = fs::metadata(inner.join(real.trim_start_matches('/'))).expect("is inside");
                    prop_assert_eq!(inode(&kernel), (inside.dev(), inside.ino()));
                }
                (Err(kernel), Err(walk), Err(real)) => { prop_assert_eq!(kernel, walk); prop_assert_eq!(walk, real); }
                other => prop_assert!(false, "{}: {:?}", path, other),
            }
        }
    }
}
