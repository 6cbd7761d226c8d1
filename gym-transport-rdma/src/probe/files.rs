//! Finds and reads files below a root directory that tests can choose.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Library directories of distributions and vendors, in addition to those in `ld.so.conf`.
const LIBRARY_DIRECTORIES: [&str; 11] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/opt/ucx/lib",
    "/opt/hpcx/ucx/lib",
];
/// Maximum depth of includes, because `ld.so.conf` can include itself. Real files have one level.
const INCLUDE_DEPTH_MAX: u32 = 4;

#[derive(Debug)]
pub(crate) struct Files {
    root: PathBuf,
    library_directories: Vec<PathBuf>,
}

impl Files {
    /// Creates a view of `root`. The `extra` directories are searched first and are not below `root`.
    pub(crate) fn new(root: &Path, extra: &[PathBuf]) -> Self {
        let mut files = Self { root: root.to_owned(), library_directories: extra.to_vec() };
        let mut configured = Vec::new();
        files.loader_directories("/etc/ld.so.conf", INCLUDE_DEPTH_MAX, &mut configured);
        let known = configured.into_iter().chain(LIBRARY_DIRECTORIES.map(PathBuf::from));
        let known: Vec<PathBuf> = known.map(|directory| files.path(&directory)).collect();
        files.library_directories.extend(known);
        let mut seen = BTreeSet::new();
        files.library_directories.retain(|directory| seen.insert(directory.clone()));
        files
    }

    /// Returns the actual path of an absolute path below the root.
    pub(crate) fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.root.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// Returns the trimmed contents; `None` if the file cannot be read. sysfs fails to read some files of empty
    /// entries.
    pub(crate) fn text(&self, absolute: impl AsRef<Path>) -> Option<String> {
        let bytes = fs::read(self.path(absolute)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub(crate) fn exists(&self, absolute: impl AsRef<Path>) -> bool {
        self.path(absolute).exists()
    }

    /// Returns the sorted names in a directory; empty if it does not exist.
    pub(crate) fn names(&self, absolute: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(absolute)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Returns the first library with this soname.
    pub(crate) fn library(&self, soname: &str) -> Option<PathBuf> {
        self.library_directories.iter().map(|directory| directory.join(soname)).find(|path| path.is_file())
    }

    fn loader_directories(&self, absolute: &str, depth: u32, found: &mut Vec<PathBuf>) {
        let Some(text) = self.text(absolute) else { return };
        for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
            match line.strip_prefix("include") {
                Some(pattern) if depth > 0 => self.include(pattern.trim(), depth, found),
                None if line.starts_with('/') => found.push(line.into()),
                Some(_) | None => {}
            }
        }
    }

    /// Supports the forms that exist in practice: `DIRECTORY/*.conf`, or one file.
    fn include(&self, pattern: &str, depth: u32, found: &mut Vec<PathBuf>) {
        let pattern = if pattern.starts_with('/') { pattern.to_owned() } else { format!("/etc/{pattern}") };
        match pattern.split_once('*') {
            None => self.loader_directories(&pattern, depth - 1, found),
            Some((directory, suffix)) if directory.ends_with('/') => {
                for name in self.names(directory).into_iter().filter(|name| name.ends_with(suffix)) {
                    self.loader_directories(&format!("{directory}{name}"), depth - 1, found);
                }
            }
            Some(_) => {}
        }
    }
}

/// Returns the version in the real file's name: `libibverbs.so.1` → `libibverbs.so.1.14.44.0` → `1.14.44.0`.
pub(crate) fn version_in_name(library: &Path, stem: &str) -> Option<String> {
    let real = fs::canonicalize(library).ok()?;
    let version = real.file_name()?.to_str()?.strip_prefix(stem)?.to_owned();
    version.contains('.').then_some(version)
}

/// Splits `LD_LIBRARY_PATH` into its absolute directories.
pub(crate) fn loader_path(variable: Option<OsString>) -> Vec<PathBuf> {
    variable.map(|paths| std::env::split_paths(&paths).filter(|path| path.is_absolute()).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_from_the_loader_configuration() {
        let root = tempfile::tempdir().expect("folder");
        fs::create_dir_all(root.path().join("etc/ld.so.conf.d")).expect("folders");
        fs::write(root.path().join("etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\ninclude ld.so.conf\n")
            .expect("writes");
        fs::write(root.path().join("etc/ld.so.conf.d/a.conf"), "# site\n/opt/site/lib # ours\n").expect("writes");
        fs::create_dir_all(root.path().join("opt/site/lib")).expect("folders");
        fs::write(root.path().join("opt/site/lib/libucp.so.0"), "").expect("writes");
        let found = Files::new(root.path(), &[]).library("libucp.so.0");
        assert_eq!(found, Some(root.path().join("opt/site/lib/libucp.so.0")));
    }
}
