//! Libraries, where the loader of a machine would find them, and their versions without running any of their code.

mod elf;
mod loading;

use std::fs::File;
use std::path::PathBuf;

use crate::machine::{Answer, Library, Machine};

pub(crate) use elf::check_whole;
pub use loading::{Attempt, LoadOptions};
pub(crate) use loading::{Location, loader_message, path_of, python_packages};

/// Environment variable that locates NCCL: the file of the library, or a directory with it.
pub const NCCL_LIBRARY_VARIABLE: &str = "GYM_NCCL_LIBRARY";
/// Environment variable that locates the library of CUDA's driver: its file, or a directory with it.
pub const CUDA_LIBRARY_VARIABLE: &str = "GYM_CUDA_LIBRARY";
/// Folders below `site-packages` with NCCL: that of NVIDIA's wheel, and that of a PyTorch with a copy of its own.
pub(crate) const NCCL_IN_PACKAGES: [&str; 2] = ["nvidia/nccl/lib", "torch/lib"];
/// Folders of CUDA's driver that the dynamic loader may not know: those that the container toolkit mounts, and that of WSL.
pub(crate) const CUDA_FOLDERS: [&str; 4] =
    ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/wsl/lib"];
/// Library folders of distributions and vendors, in addition to those in `ld.so.conf`.
const KNOWN_FOLDERS: [&str; 11] = [
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

/// Returns the folders in which this process looks for a library that its loader does not find.
pub(super) fn fallback_folders(soname: &str) -> Vec<PathBuf> {
    match soname {
        "libnccl.so.2" => {
            let all =
                python_packages().into_iter().flat_map(|packages| NCCL_IN_PACKAGES.map(|below| packages.join(below)));
            all.collect()
        }
        "libcuda.so.1" => CUDA_FOLDERS.map(PathBuf::from).into(),
        _ => Vec::new(),
    }
}

/// Returns folder and file name where a variable of this process locates a library.
pub(super) fn located(soname: &str) -> Option<(String, String)> {
    let variable = match soname {
        "libnccl.so.2" => NCCL_LIBRARY_VARIABLE,
        "libcuda.so.1" => CUDA_LIBRARY_VARIABLE,
        _ => return None,
    };
    let path = std::env::var(variable).ok().filter(|path| path.contains('/'))?;
    if std::fs::metadata(&path).is_ok_and(|metadata| metadata.is_dir()) {
        return Some((path, soname.to_owned()));
    }
    path.rsplit_once('/').map(|(folder, name)| (folder.to_owned(), name.to_owned()))
}

/// Returns the folders in the loader's order: those that the caller names, those of `LD_LIBRARY_PATH`, those of `ld.so.conf`, and the known ones.
pub(super) fn folders(machine: &dyn Machine, named: &[String]) -> Vec<String> {
    let mut folders = named.to_vec();
    let variables = machine.variables().unwrap_or_default();
    if let Some(path) = variables.get("LD_LIBRARY_PATH") {
        folders.extend(path.split([':', ';']).filter(|folder| folder.starts_with('/')).map(str::to_owned));
    }
    configured(machine, "/etc/ld.so.conf", INCLUDE_DEPTH_MAX, &mut folders);
    folders.extend(KNOWN_FOLDERS.map(str::to_owned));
    let mut distinct: Vec<String> = Vec::new();
    for folder in folders {
        let folder = folder.trim_end_matches('/').to_owned();
        if !distinct.contains(&folder) {
            distinct.push(folder);
        }
    }
    distinct
}

/// Returns the first library with this soname. `open` opens a file of the machine.
pub(super) fn find(
    machine: &dyn Machine,
    folders: &[String],
    soname: &str,
    open: impl FnOnce(&str) -> Option<File>,
) -> Answer<Option<Library>> {
    // A name with a slash is a path, not a soname.
    if soname.is_empty() || soname.contains('/') {
        return Ok(None);
    }
    let paths = folders.iter().map(|folder| format!("{folder}/{soname}"));
    let Some(path) = paths.into_iter().find(|path| machine.bytes(path).is_ok()) else { return Ok(None) };
    let version = version(machine, &path, soname, open);
    Ok(Some(Library { path, version }))
}

fn version(machine: &dyn Machine, path: &str, soname: &str, open: impl FnOnce(&str) -> Option<File>) -> Option<String> {
    let real = machine.real(path).ok()?;
    if soname == "libucp.so.0" {
        // Its name has the version of its interface.
        let beside = |path: &str| path.rsplit_once('/').map(|(folder, _)| format!("{folder}/pkgconfig/ucx.pc"));
        let described = || {
            let texts = [beside(path), beside(&real)].into_iter().flatten().map(|file| machine.text(&file));
            texts.flatten().find_map(|text| {
                text.lines().find_map(|line| line.strip_prefix("Version:")).map(|version| version.trim().to_owned())
            })
        };
        return open(&real).and_then(|mut file| elf::version(&mut file)).or_else(described);
    }
    let stem = &soname[..soname.find(".so").map_or(soname.len(), |at| at + 3)];
    let version = real.rsplit('/').next()?.strip_prefix(stem)?.strip_prefix('.')?;
    version.contains('.').then(|| version.to_owned())
}

fn configured(machine: &dyn Machine, file: &str, depth: u32, found: &mut Vec<String>) {
    let Ok(text) = machine.text(file) else { return };
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
        match line.strip_prefix("include") {
            Some(pattern) if depth > 0 => include(machine, pattern.trim(), depth, found),
            None if line.starts_with('/') => found.push(line.to_owned()),
            Some(_) | None => {}
        }
    }
}

/// Supports the forms that exist in practice: `FOLDER/*.conf`, or one file.
fn include(machine: &dyn Machine, pattern: &str, depth: u32, found: &mut Vec<String>) {
    let pattern = if pattern.starts_with('/') { pattern.to_owned() } else { format!("/etc/{pattern}") };
    match pattern.split_once('*') {
        None => configured(machine, &pattern, depth - 1, found),
        Some((folder, suffix)) if folder.ends_with('/') => {
            let names = machine.names(folder).unwrap_or_default();
            for name in names.into_iter().filter(|name| name.ends_with(suffix)) {
                configured(machine, &format!("{folder}{name}"), depth - 1, found);
            }
        }
        Some(_) => {}
    }
}
